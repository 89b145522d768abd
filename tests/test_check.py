"""check on the CPU: its problems catch every kind of wrong result, and how it fails without a GPU."""

from __future__ import annotations

import json
import math

import pytest
import torch
from problems import MODES as MODE_NAMES
from problems import Case
from promises import CONFIGS

import torch_gemm
from torch_gemm import checking, measure
from torch_gemm.__main__ import main
from torch_gemm.checking import MODES, Check, CheckError, KernelCheck, Problem, Speed

CONFIG = {"name": "64x64", "block_m": 16, "block_n": 24, "block_k": 8}
FAMILIES = [{"name": "simt", "splits_k": True, "configs": [CONFIG, {**CONFIG, "name": "32x32"}]}]


@pytest.fixture(autouse=True)
def one_thread():
    """Waking a second thread takes longer than any of these products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def case_of(problem: Problem) -> Case:
    """The same for the promises of the kernels."""
    return Case(
        problem.m,
        problem.n,
        problem.k,
        "fp32" if problem.mode == "fp32/ieee" else problem.mode,
        problem.layout,
        "odd stride" if problem.odd else "aligned",
        "gelu" if problem.fused else "none",
    )


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_takes_a_problem_in_each_of_its_modes(config):
    table = {kernel["name"]: kernel for kernel in torch_gemm.kernels()}[config.kernel]
    (described,) = [one for one in table["configs"] if one["name"] == config.name]
    problems = list(checking.problems_for(str(config), described, table["splits_k"]))
    taken = {
        case.mode
        for case in map(case_of, problems)
        if case.mode in MODE_NAMES and config.runs(case)
    }
    assert taken == set(config.modes)


@pytest.fixture
def unforced(monkeypatch):
    """The CPU has no kernels to force; `tamper` of it changes what was computed."""
    honest = checking.call

    class Unforced:
        tamper = staticmethod(lambda problem, operands, out: None)
        forced: list = []  # noqa: RUF012

    state = Unforced()
    state.forced = []

    def call(problem, operands, out):
        state.forced.append(problem.force_kernel)
        options = {**vars(problem), "force_kernel": None}
        honest(Problem(**options), operands, out)
        state.tamper(problem, operands, out)

    monkeypatch.setattr(checking, "call", call)
    return state


def test_every_configuration_and_what_is_chosen(unforced):
    seen = []
    checked = checking.check_kernels(FAMILIES, "cpu", seen.append)
    assert [kernel.name for kernel in checked] == ["simt:64x64", "simt:32x32", "automatic"]
    assert seen == [kernel.name for kernel in checked]
    for kernel in checked:
        assert kernel.ok, kernel.failures
        assert kernel.modes == list(MODES)
        assert 0 < kernel.share <= 1
    assert checked[0].problems == len(MODES) * 7
    assert checked[2].problems == len(list(checking.automatic_problems()))
    forced = set(unforced.forced)
    assert forced == {None, *(f"simt:{c},split_k={s}" for c in ("64x64", "32x32") for s in (1, 3))}


def check_one(problem=None):
    checked = KernelCheck("simt")
    checking.run_into(checked, problem or Problem(17, 9, 33, "fp16", odd=True), "cpu")
    return checked


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("epilogue", ["fused", "gated", "none"])
def test_right_results_pass(unforced, odd, layout, epilogue):
    options = {name: name == epilogue for name in ("fused", "gated")}
    for mode in MODES:
        checked = check_one(Problem(17, 9, 33, mode, layout, odd, **options))
        assert checked.ok, checked.failures
        assert checked.problems == 1


def test_a_wrong_element_is_caught(unforced):
    unforced.tamper = lambda problem, operands, out: out[16, 8].add_(0.1)
    assert "times what the contract allows" in check_one().failures[0]


def test_an_unwritten_element_is_caught(unforced):
    unforced.tamper = lambda problem, operands, out: out[3, 4].fill_(math.nan)
    (failure,) = check_one().failures
    assert failure == "17x9x33 fp16 nt odd: the error is inf times what the contract allows"


def test_a_write_beside_the_output_is_caught(unforced):
    def scribble(problem, operands, out):
        checking.whole_of(out)[-1] = 1.0

    unforced.tamper = scribble
    assert "memory around the output was overwritten" in check_one().failures[0]


def test_changing_bits_are_caught(unforced):
    calls = []

    def waver(problem, operands, out):
        calls.append(1)
        out[0, 0] *= 1 + len(calls) * 2.0**-10

    unforced.tamper = waver
    assert "two runs gave different bits" in check_one().failures[0]


def test_a_read_beside_an_operand_is_caught(unforced):
    def overreach(problem, operands, out):
        out += 0 * checking.whole_of(operands.a)[0]  # a NaN

    unforced.tamper = overreach
    assert not check_one().ok


def test_refusals(monkeypatch):
    def refuse(problem, operands, out):
        raise RuntimeError("tgemm.matmul: simt:64x64 cannot run this: it is tired\nmore")

    monkeypatch.setattr(checking, "call", refuse)
    (checked, _, automatic) = checking.check_kernels(FAMILIES, "cpu", lambda name: None)
    assert checked.failures == [
        "it ran none of the problems: tgemm.matmul: simt:64x64 cannot run this: it is tired"
    ]
    # Nothing may be refused where nothing was forced, but a precision that the build lacks.
    refused = {failure.split()[1] for failure in automatic.failures}
    assert refused == {"fp16", "bf16", "fp32/ieee"}


def test_what_could_not_be_launched_is_a_failure(monkeypatch):
    def fail(problem, operands, out):
        raise RuntimeError("tgemm.matmul: simt:64x64 could not run 3x4x5: invalid argument")

    monkeypatch.setattr(checking, "call", fail)
    problem = Problem(3, 4, 5, "fp16", force_kernel="simt")
    assert "could not run" in check_one(problem).failures[0]

    def crash(problem, operands, out):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(checking, "call", crash)
    with pytest.raises(CheckError, match=r"^simt on 3x4x5 fp16 nt: CUDA error: an illegal"):
        check_one(problem)

    def exhaust(problem, operands, out):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(checking, "call", exhaust)
    with pytest.raises(CheckError, match="the GPU's memory does not suffice"):
        check_one(problem)


# --- The command


@pytest.fixture
def result(monkeypatch) -> Check:
    made = Check(
        "Card",
        [KernelCheck("simt:64x64", ["fp16"], 6, 0.5), KernelCheck("automatic", ["fp16"], 7, 0.25)],
        [
            Speed("memory bandwidth of a copy", 1.0, 4.8, "TB/s", True),
            Speed("4096 x 4096 x 4096, fp16", 600.0, None, "TFLOP/s", False),
        ],
        12.0,
        measure.stamp(measure.CpuRunner()),
    )
    monkeypatch.setattr(checking, "check", lambda progress=None: made)
    monkeypatch.setenv("COLUMNS", "200")
    return made


def test_command(result, tmp_path, capsys):
    path = tmp_path / "check.json"
    assert main(["check", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Passed: 2 kernel configurations computed 13 problems" in shown
    assert "memory bandwidth of a copy: 1 TB/s, 21% of the card's 4.8: LOW; is another" in shown
    assert "4096 x 4096 x 4096, fp16: 600 TFLOP/s\n" in shown
    stored = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert stored["ok"] is True
    assert stored["kernels"][0]["problems"] == 6
    assert "simt:64x64: 6 problems, 50% of the contract" in str(result)


def test_command_with_a_wrong_result(result, tmp_path, capsys):
    result.kernels[0].failures.append("3x4x5 fp16 [nt]: the error is inf")
    result.kernels[0].share = math.inf
    path = tmp_path / "check.json"
    assert main(["check", "--json", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: 1 of 2 kernel configurations: simt:64x64." in shown
    assert "simt:64x64: 3x4x5 fp16 [nt]: the error is inf" in shown
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["kernels"][0]["share"] is None
    assert "the error is inf" in str(result)


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    with pytest.raises(CheckError):
        torch_gemm.check()
    monkeypatch.setattr(checking._library, "cuda_missing", "The CUDA library is not there.")
    assert main(["check"]) == 2
    assert capsys.readouterr().err == "The CUDA library is not there.\n"


def test_misuse(result, capsys):
    assert main(["check", "--json", "/no/such/folder/check.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err
