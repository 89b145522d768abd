"""explain, trace and tune on a GPU: what is explained is what runs, calls are measured, files are used."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
import torch

import torch_gemm
from torch_gemm import cards
from torch_gemm.__main__ import main
from torch_gemm.tuning import files, tuner

HALF = torch.float16


@pytest.fixture(autouse=True)
def nothing_loaded():
    torch_gemm.unload_tuning()
    yield
    torch_gemm.unload_tuning()
    torch_gemm.set_fallback("warn")


@pytest.fixture
def randn(device: str):
    return lambda *sizes, dtype=HALF: torch.randn(sizes, device=device, dtype=dtype)


def launched(call) -> dict[str, int]:
    torch_gemm.reset_stats()
    call()
    return torch_gemm.stats()["kernels"]


# --- explain


def test_what_is_explained_is_what_runs(randn):
    x, w, odd = randn(300, 512), randn(256, 512), randn(256, 513)[:, 1:]
    bias, residual = randn(256), randn(300, 256)
    for op, arguments, options in (
        ("matmul", (x, w.t()), {}),
        ("matmul", (x.float(), w.t().float()), {"precision": "tf32"}),
        ("linear", (x, w, bias, residual), {"activation": "gelu"}),
        ("linear", (x[:1], w), {"static_weight": True}),
        ("linear", (x, odd), {}),
        ("linear", (x, w), {"force_kernel": "simt"}),
        ("addmm", (bias, x, w.t()), {"beta": 0.5}),
        ("linear_glu", (x, w, w), {}),
        ("linear_glu", (x[:8], w, odd), {}),
    ):
        found = torch_gemm.explain(*arguments, op=op, **options)
        assert found.card == cards.present(0)
        expected = found.chosen.plan.split(" + ")
        ran = launched(lambda op=op: getattr(torch_gemm, op)(*arguments, **options))  # noqa: B023
        assert ran == {plan: expected.count(plan) for plan in expected}, op
        for step in found.steps:
            assert step.resources["registers"] > 0
        assert "registers" in str(found)
        # Without data, for the same card described, it is the same but for what only the GPU knows.
        meta = [tensor.to("meta") for tensor in arguments if tensor is not odd]
        if len(meta) == len(arguments):
            described = torch_gemm.explain(*meta, op=op, gpu=found.card, **options)
            steps = tuple(dataclasses.replace(step, resources=None) for step in found.steps)
            assert described.steps == steps


def test_a_shape_is_explained_for_this_gpu(device: str):
    assert torch_gemm.explain("64x64x64").card == cards.present(torch.cuda.current_device())
    torch_gemm.explain("64x64x64", gpu="t4")


# --- trace


def test_trace_measures_and_names_what_ran(randn, tmp_path):
    x, w = randn(1024, 1024), randn(2048, 1024)
    torch_gemm.set_fallback("allow")
    for operands in ((x, w), (x.double(), w.double())):  # what a first call loads is not measured
        torch_gemm.linear(*operands)
    torch_gemm.reset_stats()
    with torch_gemm.trace() as t:
        for _ in range(5):
            torch_gemm.linear(x, w)
        torch_gemm.linear_glu(x, w, w)
        torch_gemm.linear(x.double(), w.double())
    product, gated, double = t.rows()
    stats = torch_gemm.stats()["kernels"]
    names = [product.kernel] * 5 + gated.kernel.split(" + ")
    assert stats == {name: names.count(name) for name in names}
    assert double.kernel.startswith("none: no kernel multiplies")
    assert product.count == 5
    for row in (product, gated, double):
        assert 0.5 < row.measured_us < 1e5
    calls = t.calls
    assert [call.gpu_start_us for call in calls] == sorted(call.gpu_start_us for call in calls)
    assert calls[0].device == "cuda:0"
    t.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M"}
    on_gpu = [e for e in events if e["ph"] == "X" and e["pid"] == processes["cuda:0"]]
    assert [e["name"] for e in on_gpu] == [product.kernel] * 5 + [gated.kernel, double.kernel]


def test_trace_in_a_capture_on_a_stream_and_in_a_backward_pass(randn):
    x, w = randn(64, 64), randn(64, 64).requires_grad_()
    torch_gemm.linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch_gemm.trace() as t:
        with torch.no_grad(), torch.cuda.graph(graph):
            torch_gemm.linear(x, w)
        graph.replay()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch_gemm.linear(x, w, activation="gelu").sum().backward()
    calls = t.calls
    assert calls[0].gpu_us is None
    assert len(calls) >= 3
    assert all(call.gpu_us > 0.0 for call in calls[1:])
    with torch_gemm.trace(events=False, nvtx=True) as t:
        torch_gemm.linear(x, w)
    assert t.calls[0].gpu_us is None
    torch.cuda.synchronize()


# --- tune


def model_and_inputs(device: str):
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256, bias=False)
    )
    model = model.to(device, HALF).requires_grad_(False)
    torch_gemm.replace(model, fuse=True)
    return model, torch.randn(128, 256, device=device, dtype=HALF)


def test_tune_a_model_and_use_the_file(device: str, tmp_path):
    path = tmp_path / "model.json"
    model, inputs = model_and_inputs(device)
    expected = model(inputs)
    options = {"rounds": 1, "candidates": 2, "progress": False}
    report = torch_gemm.tune(model, inputs, path, aten=True, **options)
    assert len(report.problems) == report.measured == 2
    assert not report.skipped, report
    for problem in report.problems:
        assert len(problem.measured) >= 2
        assert all(0.5 < us < 1e4 for us in problem.measured.values()), problem
    assert (
        sum("ATen" in problem.measured for problem in report.problems) == 1
    )  # not with an activation
    assert torch_gemm.tune(model, inputs, path, aten=True, **options).measured == 0
    tuning = torch_gemm.load_tuning(path)
    assert tuning.driver
    for chosen in [p.chosen for p in tuning.problems if p.chosen != "ATen"]:
        assert chosen in launched(lambda: model(inputs))
    torch.testing.assert_close(model(inputs), expected, atol=1e-2, rtol=1e-2)


def write_choice(path, explanation, ways: dict[str, str]) -> None:
    """A tuning file with these ways for the problems of an explanation."""
    name = explanation.chosen.plan
    problem = files.TunedProblem(explanation.call, 1, name, name, {name: 1.0}, ways)
    files.write(path, tuner._tuning(explanation.card, (problem,)))


def test_every_way_in_a_file_is_taken(randn, tmp_path):
    path = tmp_path / "t.json"
    x, w = randn(256, 512), randn(256, 512)
    found = torch_gemm.explain(x, w, op="linear")
    exact = x.double() @ w.double().t()
    for candidate in found.steps[0].scored[:20]:
        write_choice(path, found, {found.steps[0].key: candidate.plan})
        torch_gemm.load_tuning(path)
        assert launched(lambda: torch_gemm.linear(x, w)) == {candidate.plan: 1}
        torch.testing.assert_close(torch_gemm.linear(x, w).double(), exact, atol=0.1, rtol=1e-2)
        # Another problem, and another op of the same.
        assert launched(lambda: torch_gemm.matmul(x, w.t())) == {candidate.plan: 1}
    torch_gemm.unload_tuning()
    assert launched(lambda: torch_gemm.linear(x, w)) == {found.chosen.plan: 1}


def test_other_threads_follow_the_file(randn, tmp_path):
    x, w = randn(256, 512), randn(256, 512)
    found = torch_gemm.explain(x, w, op="linear")
    other = found.runner_up.plan
    write_choice(tmp_path / "t.json", found, {found.steps[0].key: other})
    go, done = threading.Event(), threading.Event()
    seen = []

    def work() -> None:
        torch_gemm.linear(x, w)  # its cache knows the problem
        done.set()
        go.wait(10)
        seen.append(launched(lambda: torch_gemm.linear(x, w)))

    thread = threading.Thread(target=work)
    thread.start()
    assert done.wait(10)
    torch_gemm.load_tuning(tmp_path / "t.json")
    go.set()
    thread.join()
    assert seen == [{other: 1}]


def test_what_is_left_to_aten(randn, tmp_path):
    x, w, bias = randn(256, 512), randn(128, 512), randn(128)
    found = torch_gemm.explain(x, w, bias, op="linear")
    write_choice(tmp_path / "t.json", found, {found.steps[0].key: "aten"})
    torch_gemm.load_tuning(tmp_path / "t.json")
    torch_gemm.reset_stats()
    out = torch_gemm.linear(x, w, bias)
    assert torch_gemm.stats() == {
        "kernels": {},
        "fallbacks": {"linear: measured to be faster": 1},
    }
    assert torch.equal(out, torch.nn.functional.linear(x, w, bias))
    assert out.is_contiguous()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch_gemm.linear(x, w, bias)
    graph.replay()
    torch.testing.assert_close(captured, out)
    # Not into a given tensor, not with a kernel's name, and not where nothing may be left to ATen.
    kernel = found.chosen.plan
    into = torch.empty_like(out)
    assert launched(lambda: torch_gemm.linear(x, w, bias, out=into)) == {kernel: 1}
    assert launched(lambda: torch_gemm.linear(x, w, bias, force_kernel=kernel)) == {kernel: 1}
    torch_gemm.set_fallback("error")
    assert launched(lambda: torch_gemm.linear(x, w, bias)) == {kernel: 1}


def test_gated_products_as_one_and_as_two(randn, tmp_path):
    x, gate, up = randn(256, 512), randn(384, 512), randn(384, 512)
    found = torch_gemm.explain(x, gate, up, op="linear_glu")
    steps = {step.role: step for step in (*found.steps, *found.considered)}
    if "whole" not in steps or not steps["whole"].scored:
        pytest.skip("no kernel of this card takes two weights")
    exact = torch.nn.functional.silu(x.double() @ gate.double().t()) * (
        x.double() @ up.double().t()
    )
    whole = steps["whole"].scored[-1].plan
    first, second = steps["gate"].scored[1].plan, steps["up"].scored[0].plan
    for ways, expected in (
        ({steps["whole"].key: whole}, [whole]),
        (
            {steps["whole"].key: "two GEMMs", steps["gate"].key: first, steps["up"].key: second},
            [first, second],
        ),
    ):
        write_choice(tmp_path / "t.json", found, ways)
        torch_gemm.load_tuning(tmp_path / "t.json")
        ran = launched(lambda: torch_gemm.linear_glu(x, gate, up))
        assert ran == {plan: expected.count(plan) for plan in expected}
        out = torch_gemm.linear_glu(x, gate, up).double()
        torch.testing.assert_close(out, exact, atol=1.0, rtol=1e-2)


def test_another_cards_file_is_refused(device: str, tmp_path):
    found = torch_gemm.explain("64x64x64", gpu="t4")
    write_choice(tmp_path / "t.json", found, {found.steps[0].key: "simt"})
    with pytest.raises(
        ValueError, match="was measured on Tesla T4 with 40 SMs, and this machine has"
    ):
        torch_gemm.load_tuning(tmp_path / "t.json")


MODEL = """
import torch

def tiny():
    model = torch.nn.Linear(256, 128, device="cuda", dtype=torch.float16)
    return torch.nn.Sequential(model), torch.randn(64, 256, device="cuda", dtype=torch.float16)
"""


def test_the_command(device: str, tmp_path, monkeypatch, capsys):
    (tmp_path / "a_tiny_gpu_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "250")
    path = str(tmp_path / "t.json")
    options = ["--replace", "--rounds", "1", "--candidates", "2"]
    assert main(["tune", "a_tiny_gpu_model:tiny", path, *options]) == 0
    assert "1 problems, 1 measured now" in capsys.readouterr().out
    assert main(["explain", "64x128x256"]) == 0
    assert torch.cuda.get_device_name() in capsys.readouterr().out
