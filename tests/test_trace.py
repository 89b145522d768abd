"""trace on the CPU, with predictions for a described card: what is seen, counted, stored, and how it fails."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from torch.nn.functional import linear

import torch_gemm
from torch_gemm import tracing

needs_kernels = pytest.mark.skipif(
    torch_gemm._library.cuda_missing is not None, reason="the kernel table is in the CUDA library"
)


def operands():
    return torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)


def seen(t: torch_gemm.trace) -> list[str]:
    return [call.call.op for call in t.calls]


def test_every_op_is_seen():
    x, w, b = operands()
    with torch_gemm.trace() as t:
        torch_gemm.matmul(x, w.t())
        torch_gemm.matmul(x, w.t(), out=torch.empty(4, 6))
        torch_gemm.linear(x, w, b, activation="gelu")
        torch_gemm.linear(x, w, out=torch.empty(4, 6))
        torch_gemm.linear_glu(x, w, w)
        torch_gemm.linear_glu(x, w, w, out=torch.empty(4, 6))
        torch_gemm.addmm(b, x, w.t(), beta=0.5)
        torch_gemm.addmm(b, x, w.t(), out=torch.empty(4, 6))
        torch.ops.tgemm.matmul(x, w.t())
        with torch.inference_mode():
            torch_gemm.linear(x, w)
        torch.mm(x, w.t())  # is torch's own
    names = ("matmul", "linear", "linear_glu", "addmm")
    assert seen(t) == [op for name in names for op in (name, f"{name}.out")] + ["matmul", "linear"]
    torch_gemm.matmul(x, w.t())
    assert len(t.calls) == 10


def test_results_are_the_same():
    x, w, b = operands()
    expected = torch_gemm.linear(x, w, b, activation="silu")
    with torch_gemm.trace():
        assert torch.equal(torch_gemm.linear(x, w, b, activation="silu"), expected)


def test_models_gradients_and_override():
    x, w, b = operands()
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.GELU(), torch.nn.Linear(6, 2))
    torch_gemm.replace(model, fuse=True)
    with torch_gemm.trace() as t:
        model(x).sum().backward()
    # Forward with what a gradient needs, and the products of the backward pass.
    assert seen(t)[:2] == ["_linear_preact", "linear"]
    assert "matmul" in seen(t)[2:]
    with torch_gemm.trace() as t, torch_gemm.override():
        linear(x, w, b)
        torch.einsum("mk,nk->mn", x, w)
    assert len(t.calls) == 2
    with torch_gemm.trace() as outer, torch_gemm.override():
        linear(x, w, b)
        with torch_gemm.trace() as t:
            linear(x, w, b)
            with torch_gemm.trace() as inner:
                linear(x, w, b)
        linear(x, w, b)
    assert [len(trace.calls) for trace in (outer, t, inner)] == [4, 2, 1]


def test_compiled_functions_stay_compiled_and_are_seen():
    x, w, _ = operands()
    compiled = torch.compile(lambda x: torch_gemm.linear(x.sin(), w, activation="relu") + 1.0)
    with torch_gemm.trace() as t:
        first = compiled(x)  # compiles
    assert seen(t) == ["linear"]
    with torch_gemm.trace() as t:
        assert torch.equal(compiled(x), first)
    assert seen(t) == ["linear"]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_block_in_a_compiled_function_is_left_to_python():
    x, w, _ = operands()

    def function(x):
        with torch_gemm.trace() as t:
            return torch_gemm.linear(x.sin(), w), t

    result, t = torch.compile(function, backend="eager")(x)
    assert seen(t) == ["linear"]
    assert torch.equal(result, torch_gemm.linear(x.sin(), w))


def test_equal_calls_are_one_row():
    x, w, b = operands()
    with torch_gemm.trace() as t:
        for _ in range(3):
            torch_gemm.linear(x, w, b)
        torch_gemm.linear(x[:2], w, b)
        torch_gemm.linear(x, w, b, activation="relu")
    rows = t.rows()
    assert [row.count for row in rows] == [3, 1, 1]
    for row in rows:
        assert (row.kernel, row.device) == ("ATen", "cpu")
        assert row.predicted_us is row.measured_us is row.total_us is row.explanation is None
        assert row.host_us > 0.0
    assert "5 calls of 3 kinds" in t.table()
    assert str(t) == t.table()
    assert len(t.table().splitlines()) == 5
    assert json.loads(json.dumps(t.to_dict()))["rows"][0]["count"] == 3


@needs_kernels
def test_predictions_for_a_described_card():
    x = torch.zeros(512, 1024, dtype=torch.bfloat16)
    w = torch.zeros(2048, 1024, dtype=torch.bfloat16)
    with torch_gemm.trace(gpu="h200") as t:
        torch_gemm.linear(x, w)
        torch_gemm.linear(x, w)
        torch_gemm.matmul(x.double()[:2], w.double().t())
        torch_gemm.matmul(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64))
    first, double, integers = t.rows()
    expected = torch_gemm.explain(x, w, op="linear", gpu="h200")
    assert first.kernel == expected.chosen.plan
    assert first.predicted_us == expected.predicted_us
    assert first.total_us == 2 * first.predicted_us
    assert first.explanation.to_dict() == expected.to_dict()
    assert double.kernel.startswith("none: no kernel multiplies")
    assert integers.kernel == "ATen"
    assert expected.chosen.plan in t.table()
    assert f"4 calls of 3 kinds, {first.total_us:.1f} us on the GPU" in t.table()


def test_meta_tensors_run_no_kernel():
    with torch_gemm.trace() as t:
        torch_gemm.linear(torch.empty(2, 8, device="meta"), torch.empty(6, 8, device="meta"))
    assert t.rows()[0].device == "meta"


def test_nested_blocks_both_record():
    x, w, _ = operands()
    with torch_gemm.trace() as outer:
        torch_gemm.linear(x, w)
        with torch_gemm.trace() as inner:
            torch_gemm.linear(x, w)
        torch_gemm.linear(x, w)
    assert (len(outer.calls), len(inner.calls)) == (3, 1)


def test_an_object_goes_on_when_entered_again():
    x, w, _ = operands()
    t = torch_gemm.trace()
    for _ in range(2):
        with t:
            torch_gemm.linear(x, w)
            with t:  # twice at once: both see it
                pass
    assert t.rows()[0].count == 2
    starts = [call.host_start_us for call in t.calls]
    assert starts == sorted(starts)


def test_threads_record_what_enters():
    x, w, _ = operands()
    with torch_gemm.trace() as t:

        def enters() -> None:
            with t:
                for _ in range(50):
                    torch_gemm.linear(x, w)

        def does_not() -> None:
            torch_gemm.linear(x, w)

        threads = [threading.Thread(target=work) for work in (enters, enters, does_not)]
        for thread in threads:
            thread.start()
        torch_gemm.linear(x, w)
        for thread in threads:
            thread.join()
    assert t.rows()[0].count == 101
    assert len({call.thread for call in t.calls}) == 3


def test_errors_pass_through_and_are_not_calls():
    x, w, _ = operands()
    with torch_gemm.trace() as t:
        with pytest.raises(RuntimeError, match="differ"):
            torch_gemm.linear(x, w.t())
        torch_gemm.linear(x, w)
    assert len(t.calls) == 1
    with pytest.raises(KeyError), torch_gemm.trace():
        raise KeyError
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_chrome_trace(tmp_path):
    x, w, _ = operands()
    path = tmp_path / "trace.json"
    with torch_gemm.trace() as t:
        torch_gemm.linear(x, w)
        torch_gemm.matmul(x, w.t())
    t.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in complete] == ["linear", "matmul"]
    for event in complete:
        assert event["dur"] > 0.0
        assert event["ts"] >= 0.0
        assert event["args"]["kernel"] == "ATen"
        assert (event["pid"], event["tid"]) == (0, threading.get_native_id())
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["host"]
    assert list(tmp_path.iterdir()) == [path]


def test_save_fails_in_one_sentence(tmp_path):
    with torch_gemm.trace() as t:
        pass
    for path in (tmp_path, tmp_path / "missing" / "trace.json"):
        with pytest.raises(OSError, match="cannot be written: ") as caught:
            t.save(path)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_nvtx_ranges(monkeypatch):
    opened = []

    class Range:
        def __init__(self, name: str) -> None:
            opened.append(name)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *exception: object) -> None:
            opened.append("closed")

    monkeypatch.setattr(torch.cuda.nvtx, "range", Range)
    x, w, _ = operands()
    for name in tracing._PROFILERS:
        monkeypatch.delenv(name, raising=False)
    with torch_gemm.trace():
        torch_gemm.linear(x, w)
    assert opened == []
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/some/profiler.so")
    for trace in (torch_gemm.trace(), torch_gemm.trace(nvtx=True)):
        with trace:
            torch_gemm.linear(x, w)
        assert opened == ["linear(input 4x8, weight 6x8) float32", "closed"]
        opened.clear()
    with torch_gemm.trace(nvtx=False):
        torch_gemm.linear(x, w)
    assert opened == []


def test_unknown_gpu():
    with pytest.raises(ValueError, match="there is no described GPU 'h300'"):
        torch_gemm.trace(gpu="h300")
    with pytest.raises(TypeError, match="gpu must be a name or a Card, and is a int"):
        torch_gemm.trace(gpu=3)


def test_no_library_to_predict_with(monkeypatch):
    monkeypatch.setattr(torch_gemm._library, "cuda_missing", "tgemm runs on the CPU only here.")
    with pytest.raises(RuntimeError, match="CPU only"):
        torch_gemm.trace(gpu="h200")
    x, w, _ = operands()
    with torch_gemm.trace() as t:
        torch_gemm.linear(x, w)
    assert len(t.calls) == 1
