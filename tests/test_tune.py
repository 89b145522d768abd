"""tune without a GPU: which ways are measured, how they are judged, what the file holds, what is refused,
how a run goes on, and what selection makes of the file (through explain, for a described card).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_gemm
from torch_gemm import _library, cards, measure, tuning
from torch_gemm.__main__ import main
from torch_gemm.cards import DESCRIBED
from torch_gemm.tuning import files, tuner

pytestmark = pytest.mark.skipif(
    _library.cuda_missing is not None, reason="the kernel table is in the CUDA library"
)

H200 = DESCRIBED["h200"]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_loaded():
    torch_gemm.unload_tuning()
    yield
    torch_gemm.unload_tuning()


def weights(*sizes):
    return torch.empty(*sizes, dtype=BF16, device="meta")


def some_calls(*, gated: bool = True):
    """Rows of a trace as of a small model on an H200: a product three times, another, a gated one."""
    x = weights(512, 1024)
    with torch_gemm.trace(gpu="h200") as t:
        for _ in range(3):
            torch_gemm.linear(x, weights(2048, 1024))
        torch_gemm.linear(x[:16], weights(2048, 1024), activation="gelu")
        if gated:
            torch_gemm.linear_glu(x, weights(4096, 1024), weights(4096, 1024))
    return t.rows()


def predicted_times(call, choices):
    """As if all took the same time, the second measurement of the first too."""
    return [[10.0] * 3 for _ in range(len(choices) + 1)]


def favour(name: str, us: float = 5.0):
    """A measurement in which one choice is faster than the others."""

    def measure(call, choices):
        return [[10.0] * 3] + [[us if c.name == name else 10.0] * 3 for c in choices]

    return measure


def tune(rows, path, measure=predicted_times, **options):
    options.setdefault("previous", files.read(path) if Path(path).exists() else None)
    return tuner.tune_rows(rows, H200, Path(path), measure, **options)


# --- What is measured


def test_the_predicted_choice_comes_first_and_the_best_follow():
    row = some_calls(gated=False)[0]
    choices = tuner.choices_of(row.explanation, aten=False, limit=6)
    scored = row.explanation.steps[0].scored
    assert [choice.name for choice in choices] == [c.plan for c in scored[:6]]
    assert choices[0].name == row.explanation.chosen.plan
    key = row.explanation.steps[0].key
    assert all(choice.ways == ((key, choice.name),) for choice in choices)
    # None whose prediction is far off is worth a measurement.
    every = tuner.choices_of(row.explanation, aten=False, limit=1000)
    assert 6 < len(every) < len(scored)


def test_aten_is_a_choice_where_it_is_one_op():
    product, activated, gated = some_calls()
    choices = tuner.choices_of(product.explanation, aten=True, limit=3)
    assert [choice.name for choice in choices][3:] == ["ATen"]
    assert choices[-1].ways == ((product.explanation.steps[0].key, "aten"),)
    for row in (activated, gated):
        names = [c.name for c in tuner.choices_of(row.explanation, aten=True, limit=100)]
        assert "ATen" not in names


def test_a_gated_problem_runs_as_one_or_as_two():
    explanation = some_calls()[2].explanation
    choices = tuner.choices_of(explanation, aten=False, limit=1000)
    whole = next(s for s in (*explanation.steps, *explanation.considered) if s.role == "whole")
    one = [choice for choice in choices if len(choice.ways) == 1]
    two = [choice for choice in choices if len(choice.ways) == 3]
    assert len(one) + len(two) == len(choices)
    assert one
    assert two
    assert choices[0].name == explanation.chosen.plan
    for choice in two:
        assert choice.ways[0] == (whole.key, "two GEMMs")
        assert choice.name == " + ".join(plan for _, plan in choice.ways[1:])


def test_problems_that_take_longest_come_first_and_calls_are_counted(tmp_path):
    order = []

    def measure(call, choices):
        order.append(call)
        return predicted_times(call, choices)

    rows = some_calls()
    report = tune(rows, tmp_path / "t.json", measure)
    assert order == [row.call for row in sorted(rows, key=lambda row: -row.total_us)]
    assert order[0] != rows[-1].call
    assert sorted(problem.count for problem in report.problems) == [1, 1, 3]
    assert report.measured == 3


def test_the_same_problem_of_two_ops_is_measured_once(tmp_path):
    x, w = weights(512, 1024), weights(2048, 1024)
    with torch_gemm.trace(gpu="h200") as t:
        torch_gemm.linear(x, w, out=weights(512, 2048))
        torch_gemm.linear(x, w)
        torch_gemm.matmul(x, w.t())
    report = tune(t.rows(), tmp_path / "t.json", aten=True)
    assert [problem.count for problem in report.problems] == [3]
    # ATen cannot write into a given tensor: not measured with that form of the op.
    assert "ATen" in report.problems[0].measured
    report = tune(t.rows()[:1], tmp_path / "out.json", aten=True)
    assert "ATen" not in report.problems[0].measured


def test_calls_without_a_choice_are_named(tmp_path):
    x, w = weights(512, 1024), weights(2048, 1024)
    with torch_gemm.trace(gpu="h200") as t:
        torch_gemm.linear(x, w, force_kernel="simt")
        torch_gemm.linear(x.double(), w.double())
        torch_gemm.linear(x[:0], w)
    report = tune(t.rows(), tmp_path / "t.json")
    reasons = [reason for _, reason in report.skipped]
    assert reasons[0] == "its kernel is forced"
    assert reasons[1].startswith("no kernel multiplies")
    assert reasons[2].startswith("the result has no elements")
    assert report.problems == ()
    assert "not measured: linear(" in str(report)


# --- How it is judged


def test_a_faster_choice_is_chosen(tmp_path):
    rows = some_calls(gated=False)[:1]
    other = rows[0].explanation.runner_up.plan
    report = tune(rows, tmp_path / "t.json", favour(other))
    (problem,) = report.problems
    assert (problem.predicted, problem.chosen) == (rows[0].kernel, other)
    assert (problem.predicted_us, problem.us, problem.speed_up) == (10.0, 5.0, 2.0)
    assert (report.predicted_us, report.us) == (30.0, 15.0)
    assert "all calls 30.0 us -> 15.0 us (2.000x)" in str(report)
    assert problem.ways == {rows[0].explanation.steps[0].key: other}


def test_what_is_faster_by_no_more_than_noise_is_not(tmp_path):
    rows = some_calls(gated=False)[:1]
    other = rows[0].explanation.runner_up.plan
    report = tune(rows, tmp_path / "a.json", favour(other, 9.95))
    assert report.problems[0].chosen == rows[0].kernel

    def noisy(call, choices):  # the predicted choice differs from itself by 10 %
        return [[9.0]] + [[{rows[0].kernel: 10.0, other: 8.5}.get(c.name, 12.0)] for c in choices]

    report = tune(rows, tmp_path / "b.json", noisy)
    assert report.problems[0].chosen == rows[0].kernel
    assert report.problems[0].predicted_us == 9.0


def test_what_does_not_run_is_left_out(tmp_path):
    rows = some_calls(gated=False)[:1]
    broken = rows[0].explanation.runner_up.plan

    def measure(call, choices):
        return [[10.0]] + [None if c.name == broken else [10.0] for c in choices]

    report = tune(rows, tmp_path / "a.json", measure)
    assert broken not in report.problems[0].measured

    def fails(call, choices):
        raise torch.OutOfMemoryError("CUDA out of memory.\nAnd a long story")

    report = tune(rows, tmp_path / "b.json", fails)
    assert report.skipped == ((str(rows[0].call), "CUDA out of memory."),)
    assert files.read(tmp_path / "b.json").problems == ()


def test_the_measurement_itself(monkeypatch):
    """On the CPU, where every way is ATen's: that each choice is told to the ops and timed."""
    x, w = torch.randn(16, 32, dtype=BF16), torch.randn(8, 32, dtype=BF16)
    bias = torch.zeros(9, dtype=BF16)[1:]
    with torch_gemm.trace(gpu="h200") as t:
        torch_gemm.linear(x, w, bias, activation="gelu")
        torch_gemm.linear(x, w, out=torch.zeros(8, 16, dtype=BF16).t())
        torch_gemm.linear_glu(x, w, w)
        torch_gemm.addmm(bias, x, w.t(), beta=0.5)
    told = []
    monkeypatch.setattr(torch.ops.tgemm, "_add_tuning", lambda *arguments: told.append(arguments))
    monkeypatch.setattr(measure, "TURN_MS", 0.01)
    for row in t.rows():
        told.clear()
        choices = tuner.choices_of(row.explanation, aten=False, limit=3)
        times = tuner.measure_choices(row.call, choices, H200, 2, measure.CpuRunner())
        assert [len(rounds) for rounds in times] == [2] * (len(choices) + 1)
        assert all(us > 0.0 for rounds in times for us in rounds)
        expected = [
            ("NVIDIA H200", 132, "".join(f"{way}\t{key}\n" for key, way in choice.ways))
            for choice in (choices[0], *choices)
        ]
        assert told == expected


def test_a_choice_that_fails_and_a_problem_that_does_not_fit(monkeypatch):
    row = some_calls(gated=False)[0]
    choices = tuner.choices_of(row.explanation, aten=False, limit=3)
    monkeypatch.setattr(measure, "TURN_MS", 0.01)

    class Runner(measure.CpuRunner):
        captured = 0

        def capture(self, work):
            self.captured += 1
            if self.captured == 3:
                raise RuntimeError("this kernel cannot")
            return super().capture(lambda: [])

    times = tuner.measure_choices(row.call, choices, H200, 1, Runner())
    assert [rounds is None for rounds in times] == [False, False, True, False]
    monkeypatch.setattr(Runner, "free_bytes", lambda self: 1000)
    with pytest.raises(RuntimeError, match=r"it takes 0\.0 GiB to measure, more than is free"):
        tuner.measure_choices(row.call, choices, H200, 1, Runner())


# --- The file, and going on


def test_the_file_holds_what_the_report_says(tmp_path):
    path = tmp_path / "t.json"
    report = tune(some_calls(), path)
    stored = files.read(path)
    assert sorted(map(str, stored.problems)) == sorted(map(str, report.problems))
    assert (stored.card, stored.sm_count) == ("NVIDIA H200", 132)
    assert stored.csrc_digest == files.library_digest()
    assert stored == report.tuning
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(json.dumps(report.to_dict()))["measured"] == 3
    assert "3 problems measured on NVIDIA H200" in str(stored)


def test_a_time_budget_and_going_on(tmp_path):
    path = tmp_path / "t.json"
    now = [0.0]
    calls = []

    def measure(call, choices):
        now[0] += 10.0
        calls.append(call)
        return predicted_times(call, choices)

    report = tune(some_calls(), path, measure, time_budget=15.0, clock=lambda: now[0])
    assert (report.measured, len(report.remaining)) == (2, 1)
    assert "1 beyond the time budget" in str(report)
    assert len(files.read(path).problems) == 2
    report = tune(some_calls(), path, measure, clock=lambda: now[0])
    assert (report.measured, report.remaining, len(report.problems)) == (1, (), 3)
    assert len(set(calls)) == 3
    report = tune(some_calls(), path, measure)
    assert report.measured == 0
    assert len(report.problems) == 3
    report = tune(some_calls(), tmp_path / "none.json", measure, time_budget=0.0)
    assert (report.measured, len(report.remaining)) == (0, 3)
    assert files.read(tmp_path / "none.json").problems == ()


def test_an_interrupted_run_keeps_what_it_has(tmp_path):
    path = tmp_path / "t.json"
    begun = []

    def measure(call, choices):
        begun.append(call)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return predicted_times(call, choices)

    with pytest.raises(KeyboardInterrupt):
        tune(some_calls(), path, measure)
    assert [problem.call for problem in files.read(path).problems] == [str(begun[0])]


def test_another_models_problems_stay(tmp_path):
    path = tmp_path / "t.json"
    first, second, _ = some_calls()
    tune([first], path)
    report = tune([second], path)
    assert len(report.problems) == 1
    assert len(files.read(path).problems) == 2
    # Asking for ATen measures again what was measured without it.
    report = tune([first], path, aten=True)
    assert report.measured == 1
    assert "ATen" in report.problems[0].measured
    assert len(files.read(path).problems) == 2


# --- What selection makes of it


def chosen(rows=512, activation=None, **options):
    x, w = weights(rows, 1024), weights(2048, 1024)
    options.setdefault("gpu", "h200")
    return torch_gemm.explain(x, w, op="linear", activation=activation, **options)


def test_loading_changes_the_choice_on_this_card_alone(tmp_path):
    path = tmp_path / "t.json"
    rows = some_calls(gated=False)[:1]
    before = chosen().to_dict()
    other = rows[0].explanation.runner_up.plan
    tune(rows, path, favour(other))
    assert chosen().to_dict() == before  # a file is not used until it is loaded
    loaded = torch_gemm.load_tuning(path)
    assert loaded == files.read(path)
    assert tuning.files.loaded() == (loaded,)
    found = chosen()
    assert found.chosen.plan == other
    assert found.steps[0].tuned
    assert "(from a tuning file)" in str(found)
    assert found.runner_up.plan == rows[0].kernel
    assert not chosen(gpu="h20").steps[0].tuned
    assert not chosen(rows=513).steps[0].tuned
    assert not chosen(force_kernel="simt").steps[0].tuned
    torch_gemm.unload_tuning()
    assert chosen().to_dict() == before
    assert tuning.files.loaded() == ()


def test_a_later_file_counts(tmp_path):
    rows = some_calls(gated=False)[:1]
    plans = [candidate.plan for candidate in rows[0].explanation.steps[0].scored[:3]]
    for index, plan in enumerate(plans[1:]):
        tune(rows, tmp_path / f"{index}.json", favour(plan))
        torch_gemm.load_tuning(tmp_path / f"{index}.json")
        assert chosen().chosen.plan == plan
    torch_gemm.load_tuning(tmp_path / "0.json")
    assert chosen().chosen.plan == plans[1]


def test_loading_aten_and_gated_choices(tmp_path):
    path = tmp_path / "t.json"
    product, _, gated = some_calls()
    two = next(
        c for c in tuner.choices_of(gated.explanation, aten=False, limit=1000) if len(c.ways) == 3
    )
    one = gated.explanation.chosen.plan

    def measure(call, choices):
        wanted = {"linear": "ATen", "linear_glu": two.name}[call.kind]
        return favour(wanted)(call, choices)

    def gated_now():
        return torch_gemm.explain(
            weights(512, 1024),
            weights(4096, 1024),
            weights(4096, 1024),
            op="linear_glu",
            gpu="h200",
        )

    assert gated_now().chosen.plan == one
    tune([product, gated], path, measure, aten=True)
    torch_gemm.load_tuning(path)
    assert chosen().aten
    assert "leaves this to ATen" in str(chosen())
    with torch_gemm.trace(gpu="h200") as t:
        torch_gemm.linear(weights(512, 1024), weights(2048, 1024))
    assert t.rows()[0].kernel == "ATen (tuned)"
    found = gated_now()
    assert [step.role for step in found.steps] == ["gate", "up"]
    assert found.chosen.plan == two.name
    # And back: one kernel, although two were predicted to be as good.
    tune([gated], tmp_path / "one.json", favour(one))
    torch_gemm.load_tuning(tmp_path / "one.json")
    assert gated_now().chosen.plan == one
    assert [step.role for step in gated_now().steps] == ["whole"]


def test_tuning_is_measured_without_loaded_files(tmp_path):
    rows = some_calls(gated=False)[:1]
    other = rows[0].explanation.runner_up.plan
    tune(rows, tmp_path / "t.json", favour(other))
    torch_gemm.load_tuning(tmp_path / "t.json")
    with tuner._untuned():
        assert chosen().chosen.plan == rows[0].kernel
    assert chosen().chosen.plan == other


# --- What is refused


@pytest.fixture
def stored(tmp_path) -> dict:
    """The content of a good file."""
    tune(some_calls(gated=False)[:1], tmp_path / "good.json")
    return json.loads((tmp_path / "good.json").read_text())


def refused(path, error=ValueError) -> str:
    before = chosen().to_dict()
    with pytest.raises(error) as caught:
        torch_gemm.load_tuning(path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 400
    assert chosen().to_dict() == before
    assert files.loaded() == ()
    return sentence


def broken(**changes):
    def change(stored):
        stored.update(changes)

    return change


def problem(**changes):
    def change(stored):
        stored["problems"][0].update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (broken(format="something"), '"format" is not "torch_gemm tuning"'),
        (broken(version=2), '"version" is not 1'),
        (broken(version=True), '"version" is not 1'),
        (broken(version="1"), '"version" is not 1'),
        (broken(card=None), '"card"'),
        (broken(card=""), '"card"'),
        (broken(card="a\nb"), '"card"'),
        (broken(sm_count=-1), '"sm_count"'),
        (broken(sm_count=1e9), '"sm_count"'),
        (broken(sm_count=True), '"sm_count"'),
        (broken(sm_count=2**70), '"sm_count"'),
        (broken(csrc_digest=7), '"csrc_digest"'),
        (broken(driver=[]), '"driver"'),
        (broken(problems={}), '"problems" are no list'),
        (broken(problems=[3]), "a problem is no object"),
        (problem(count=0), '"count"'),
        (problem(call="x" * 5000), '"call"'),
        (problem(measured={}), "was not measured"),
        (problem(measured={"x": -1.0}), '"measured"'),
        (problem(measured={"x": True}), '"measured"'),
        (problem(measured={"x": "1"}), '"measured"'),
        (problem(measured={"x": float("nan")}), '"measured"'),
        (problem(measured={"x": float("inf")}), '"measured"'),
        (problem(measured={"x": 10**400}), '"measured"'),
        (problem(measured={"x\n": 1.0}), '"measured" is not'),
        (problem(measured=[1.0]), '"measured"'),
        (problem(chosen="simt:1x1"), "'simt:1x1' was not measured"),
        (problem(ways={}), '"ways"'),
        (problem(ways=[["a", "b"]]), '"ways"'),
        (problem(ways={"key": 3}), '"ways"'),
        (problem(ways={"key": "simt\tother"}), '"ways"'),
        (problem(ways={"key\nsimt\tother": "simt"}), '"ways"'),
        (problem(ways={"": "simt"}), '"ways"'),
        (problem(ways={"key": "cutlass"}), "there is no kernel named"),
        (problem(ways={"key": "simt:1x1"}), "simt has no configuration"),
        (problem(ways={"key": "simt:64x64,split_k=-3"}), "is not of the form"),
        (broken(csrc_digest="0" * 64), "was measured with the kernels of torch_gemm"),
    ],
)
def test_damaged_files(tmp_path, stored, change, words):
    changed = copy.deepcopy(stored)
    change(changed)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(changed))
    sentence = refused(path)
    assert words in sentence
    assert str(path) in sentence


@pytest.mark.parametrize("sm_count", [2**32 + 132, 0, -1])
def test_no_card_has_so_many_sms(sm_count):
    """Not those that are left of the number in 32 bits either."""
    with pytest.raises(RuntimeError, match=rf"^tgemm: no card has {sm_count} SMs$"):
        torch.ops.tgemm._add_tuning("NVIDIA H200", sm_count, "")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[1, 2",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"null",
        b"3",
        b'"text"',
        b"[]",
        b"{}",
        b"9" * 10_000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_what_is_no_tuning_file(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert "is not a tuning file" in refused(path)


def test_paths_that_are_no_files(tmp_path):
    assert "is not a regular file" in refused(tmp_path)
    assert "is not a regular file" in refused("/dev/zero")
    assert "cannot be read: No such file" in refused(tmp_path / "none.json", OSError)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(files._MAX_BYTES + 1)
    assert "larger than a tuning file can be" in refused(large)


def test_a_hostile_plan_that_cannot_run_changes_nothing(tmp_path, stored):
    key = chosen().steps[0].key
    before = chosen().chosen.plan
    for way in ("simt:128x128", "sm90_tf32:128x128", "two GEMMs"):
        changed = copy.deepcopy(stored)
        changed["problems"][0]["ways"] = {key: way}
        (tmp_path / "t.json").write_text(json.dumps(changed))
        torch_gemm.load_tuning(tmp_path / "t.json")
        assert chosen().chosen.plan == before
        assert not chosen().steps[0].tuned


class Gpu:
    """A machine with one GPU, as far as loading asks."""

    def __init__(self, monkeypatch, name="NVIDIA A100-SXM4-80GB", sms=108):
        self.name, self.multi_processor_count = name, sms
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: self)


def test_another_card(tmp_path, stored, monkeypatch):
    path = tmp_path / "good.json"
    Gpu(monkeypatch)
    with pytest.raises(
        ValueError, match="was measured on NVIDIA H200 with 132 SMs, and this machine"
    ):
        torch_gemm.load_tuning(path)
    assert files.loaded() == ()
    Gpu(monkeypatch, "NVIDIA H200", 114)
    with pytest.raises(ValueError, match="has NVIDIA H200 with 114 SMs: tune again"):
        torch_gemm.load_tuning(path)
    Gpu(monkeypatch, "NVIDIA H200", 132)
    torch_gemm.load_tuning(path)


def test_no_library(tmp_path, monkeypatch):
    monkeypatch.setattr(_library, "cuda_missing", "tgemm runs on the CPU only here.")
    for call in (
        lambda: torch_gemm.load_tuning(tmp_path / "x.json"),
        lambda: torch_gemm.tune(torch.nn.Identity(), (), tmp_path / "x.json"),
    ):
        with pytest.raises(RuntimeError, match="CPU only"):
            call()


def test_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(cards, "default", lambda: None)
    with pytest.raises(
        RuntimeError, match=r"^tune measures on a GPU, and there is none: "
    ) as caught:
        torch_gemm.tune(torch.nn.Identity(), (), tmp_path / "x.json")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def on_an_h200(monkeypatch):
    """As if the model's calls ran on an H200: any tensors pass for its own, times are made up."""
    monkeypatch.setattr(cards, "default", lambda: H200)
    rows_of = tuner._rows_of

    def rows(model, inputs):
        trace = torch_gemm.trace
        monkeypatch.setattr(tuner, "trace", lambda **options: trace(gpu="h200", **options))
        found = rows_of(model, inputs)
        return [dataclasses.replace(row, device="cuda:0") for row in found]

    monkeypatch.setattr(tuner, "_rows_of", rows)
    monkeypatch.setattr(
        tuner, "measure_choices", lambda call, choices, *others: predicted_times(call, choices)
    )


def a_model():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, 64)).to(BF16)
    torch_gemm.replace(model)
    return model, weights(32, 1024)


def test_tune_a_model(tmp_path, on_an_h200):
    model, inputs = a_model()
    model.train()
    report = torch_gemm.tune(model, inputs, tmp_path / "t.json", aten=True)
    assert len(report.problems) == 2
    assert model.training
    assert all("bias" in key for problem in report.problems for key in problem.ways)
    report = torch_gemm.tune(lambda x: model(x), {"x": inputs}, str(tmp_path / "t.json"))
    assert report.measured == 0

    def in_a_block(x):
        with torch_gemm.override():
            return torch.nn.functional.linear(x, weights(64, 1024))

    report = torch_gemm.tune(in_a_block, (inputs,), tmp_path / "t.json")
    assert report.measured == 1
    torch_gemm.load_tuning(tmp_path / "t.json")


def test_tune_refuses(tmp_path, on_an_h200, stored):
    model, inputs = a_model()
    path = tmp_path / "t.json"

    def sentence(error, *arguments, **options):
        with pytest.raises(error) as caught:
            torch_gemm.tune(*arguments, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    plain = torch.nn.Linear(1024, 8, device="meta", dtype=BF16)
    assert "calls no op of torch_gemm" in sentence(ValueError, plain, inputs, path)
    assert "expects a module or a function" in sentence(TypeError, 3, inputs, path)
    assert "time_budget is -1" in sentence(ValueError, model, inputs, path, time_budget=-1)
    assert "rounds is 0" in sentence(ValueError, model, inputs, path, rounds=0)
    assert "candidates is 1.5" in sentence(ValueError, model, inputs, path, candidates=1.5)
    assert "cannot be written" in sentence(OSError, model, inputs, tmp_path / "no" / "t.json")
    assert "is not a regular file" in sentence(OSError, model, inputs, tmp_path)
    torch_gemm.set_fallback("error")
    try:
        assert "leaves nothing to ATen" in sentence(ValueError, model, inputs, path, aten=True)
    finally:
        torch_gemm.set_fallback("warn")
    assert not path.exists()
    # An existing file is never written over unless it is this card's and these kernels'.
    for change, words in (
        (broken(card="NVIDIA A100"), "was measured on NVIDIA A100"),
        (broken(csrc_digest="0" * 64), "tune again"),
        (broken(version=9), "is not a tuning file of this version"),
    ):
        changed = copy.deepcopy(stored)
        change(changed)
        path.write_text(json.dumps(changed))
        assert words in sentence(ValueError, model, inputs, path)
        assert json.loads(path.read_text()) == changed


# --- The environment variable


def import_with(path, more: str = "") -> subprocess.CompletedProcess:
    code = f"import torch, torch_gemm; assert not torch.cuda.is_initialized(); {more}"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TGEMM_TUNING": str(path)},
        capture_output=True,
        text=True,
        cwd=Path(torch_gemm.__file__).parent.parent,
        timeout=300,
    )


def test_the_environment_variable(tmp_path):
    rows = some_calls(gated=False)[:1]
    other = rows[0].explanation.runner_up.plan
    tune(rows, tmp_path / "t.json", favour(other))
    more = "print(torch_gemm.explain('512x2048x1024', op='linear', dtype='bf16', gpu='h200').chosen.plan)"
    finished = import_with(tmp_path / "t.json", more)
    assert finished.stdout.strip() == other, finished.stderr
    assert finished.stderr == ""


def test_the_environment_variable_is_wrong(tmp_path):
    finished = import_with(tmp_path / "none.json", "print('went on')")
    assert finished.stdout.strip() == "went on"
    assert "TGEMM_TUNING is not used: " in finished.stderr
    assert "none.json cannot be read: No such file" in finished.stderr


def test_the_environment_variable_names_another_cards_file(tmp_path, stored, monkeypatch):
    checks = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", checks.append)
    monkeypatch.setenv("TGEMM_TUNING", str(tmp_path / "good.json"))
    tuning.load_from_environment()
    assert len(files.loaded()) == 1
    Gpu(monkeypatch)
    with pytest.warns(
        UserWarning, match="TGEMM_TUNING is not used: .* was measured on NVIDIA H200"
    ):
        checks[0]()


# --- The command


MODEL = """
import torch
import torch_gemm

def tiny():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU()).to(torch.bfloat16)
    return model.requires_grad_(False), torch.zeros(32, 64, dtype=torch.bfloat16)

def fails():
    raise RuntimeError("no such weights\\nat all")

def ends():
    raise SystemExit(3)

def returns_one():
    return 3

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "a_tiny_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "250")
    yield "a_tiny_model"
    sys.modules.pop("a_tiny_model", None)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["tune", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_command(tmp_path, module, on_an_h200, capsys):
    path = tmp_path / "t.json"
    status, out, err = run(capsys, f"{module}:tiny", str(path), "--fuse")
    assert (status, err) == (0, "")
    assert "What tuning bought" in out
    assert "1 problems, 1 measured now" in out
    assert "gelu" in next(iter(files.read(path).problems[0].ways))
    status, out, _ = run(capsys, f"{module}:tiny", str(path), "--replace", "--json")
    assert status == 0
    assert len(json.loads(out)["problems"]) == 1
    assert len(files.read(path).problems) == 2


@pytest.mark.parametrize(
    ("target", "options", "sentence"),
    [
        ("a_tiny_model", [], "is not of the form package.module:function"),
        ("a_tiny_model:", [], "is not of the form"),
        (":tiny", [], "is not of the form"),
        ("no_such_module:tiny", [], "cannot be imported: ModuleNotFoundError"),
        ("a_tiny_model:missing", [], "cannot be imported: AttributeError"),
        ("a_tiny_model:number", [], "is a int, and must be a function"),
        ("a_tiny_model:fails", [], "could not be tuned: RuntimeError: no such weights"),
        ("a_tiny_model:ends", [], "could not be tuned: SystemExit: 3"),
        ("a_tiny_model:returns_one", [], "could not be tuned: TypeError"),
        ("a_tiny_model:tiny", [], "calls no op of torch_gemm"),
        ("a_tiny_model:tiny", ["--rounds", "0"], "rounds is 0"),
        ("a_tiny_model:tiny", ["--time-budget", "-3"], "time_budget is -3.0"),
    ],
)
def test_command_fails_in_one_sentence(
    tmp_path, module, on_an_h200, capsys, target, options, sentence
):
    path = tmp_path / "t.json"
    status, out, err = run(capsys, target, str(path), *options)
    assert status == 2
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""
    assert not path.exists()


def test_command_without_a_gpu(tmp_path, module, capsys, monkeypatch):
    monkeypatch.setattr(cards, "default", lambda: None)
    status, _, err = run(capsys, f"{module}:tiny", str(tmp_path / "t.json"))
    assert status == 2
    assert re.match(r"tune measures on a GPU, and there is none: .*\n$", err)
