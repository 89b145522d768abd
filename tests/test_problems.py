"""The GPU suite's own machinery: it passes right results and catches each kind of wrong one.

Runs on the CPU, where the ops have the same schemas and promises.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import problems
import promises
import pytest
import torch
from problems import ALIGNMENTS, EPILOGUES, LAYOUTS, MODES, Case, Ledger
from promises import Config


@pytest.fixture(autouse=True)
def one_thread():
    """Waking a second thread takes longer than any of these problems."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", ["fp16", "bf16", "fp32"])
def test_cpu_ops_keep_the_contract(mode):
    counted = []
    ledger = Ledger("cpu", counted.append)
    outs = itertools.cycle(("row", "column"))
    for epilogue, layout, alignment in itertools.product(EPILOGUES, LAYOUTS, ALIGNMENTS):
        ledger.check(Case(17, 9, 33, mode, layout, alignment, epilogue, next(outs)))
    for m, n, k in itertools.product((0, 1, 5), repeat=3):
        ledger.check(Case(m, n, k, mode, epilogue="everything"))
    assert ledger.verify() == len(EPILOGUES) * len(LAYOUTS) * len(ALIGNMENTS) + 27
    assert counted == [len(EPILOGUES) * len(LAYOUTS) * len(ALIGNMENTS) + 27]
    assert 0 < ledger.worst <= 1
    assert ledger.constants.keys() == {f"automatic {mode}"}
    assert 0 <= ledger.constants[f"automatic {mode}"] < 1


def tampered(monkeypatch, tamper):
    """Makes every call of an op go through `tamper(out, operands)` afterwards."""
    honest = problems.call

    def call(case, operands, out):
        honest(case, operands, out)
        tamper(out, operands)

    monkeypatch.setattr(problems, "call", call)
    ledger = Ledger("cpu")
    ledger.check(Case(17, 9, 33, "fp16", epilogue="bias"))
    return ledger


def test_a_wrong_element_is_caught(monkeypatch):
    ledger = tampered(monkeypatch, lambda out, operands: out[16, 8].add_(0.1))
    with pytest.raises(AssertionError, match=r"1 of 1 problems failed .*\n.*m=17.*\n.*contract: "):
        ledger.verify()


def test_an_unwritten_element_is_caught(monkeypatch):
    ledger = tampered(monkeypatch, lambda out, operands: out[3, 4].fill_(math.nan))
    with pytest.raises(AssertionError, match="contract: inf"):
        ledger.verify()


@pytest.mark.parametrize("place", [-1, 9, -20])
def test_a_write_beside_the_output_is_caught(monkeypatch, place):
    def scribble(out, operands):
        problems.whole_of(out)[out.storage_offset() + place] = 1.0

    ledger = tampered(monkeypatch, scribble)
    with pytest.raises(AssertionError, match="guard around the output overwritten: 1"):
        ledger.verify()


def test_changing_bits_are_caught(monkeypatch):
    calls = itertools.count()

    def waver(out, operands):
        if next(calls):
            out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(math.inf, dtype=out.dtype))

    ledger = tampered(monkeypatch, waver)
    with pytest.raises(AssertionError, match="bits differ between two runs: 1"):
        ledger.verify()


def test_a_read_beside_an_operand_is_caught(monkeypatch):
    def overreach(out, operands):
        # What a masked load times zero would do.
        beside = operands.a.as_strided((17, 34), operands.a.stride(), operands.a.storage_offset())
        out += 0 * beside[:, 33:]

    ledger = tampered(monkeypatch, overreach)
    with pytest.raises(AssertionError, match="contract: inf"):
        ledger.verify()


def test_an_error_names_the_case():
    with pytest.raises(AssertionError, match=r"m=3.*TGEMM_TEST_SEED"):
        Ledger("cpu").check(Case(3, 3, 3, force_kernel=7))


def test_an_empty_ledger_is_no_success():
    with pytest.raises(AssertionError, match="no problem was checked"):
        Ledger("cpu").verify()


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_windows_are_aligned_as_they_say(alignment, dtype, column_major):
    values = torch.randn(12, 20).to(dtype)
    window = problems.place(values, ALIGNMENTS[alignment], column_major, math.nan)
    assert torch.equal(window, values)
    assert problems.whole_of(window).isnan().sum() == problems.whole_of(window).numel() - 240
    leading = max(window.stride())
    assert leading > (12 if column_major else 20)
    size = dtype.itemsize
    assert window.data_ptr() % 16 == ALIGNMENTS[alignment].offset * size % 16
    if alignment == "odd stride":
        assert leading % 2 == 1
    else:
        assert leading * size % 16 == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ulp(dtype):
    info = torch.finfo(dtype)
    values = torch.tensor(
        [0.0, info.smallest_normal / 8, info.smallest_normal, 1.0, -1.5, 2.0, 1000.0], dtype=dtype
    )
    up = torch.nextafter(values.abs(), torch.full_like(values, math.inf))
    spacing = up.double() - values.double().abs()
    assert torch.equal(problems.ulp(values.double(), dtype), spacing)


def test_rounding_to_tf32():
    one = 1 + 2.0**-10  # the TF32 number after 1
    values = torch.tensor([1.0, one, 1 + 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-12, 3.0])
    expected = torch.tensor([1.0, one, one, -one, 1.0, 3.0], dtype=torch.float64)
    assert torch.equal(problems.round_operand(values, MODES["fp32/tf32"]), expected)


def test_no_tie_between_tf32_numbers_is_left():
    values = torch.tensor([1.0, 1 + 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-12])
    expected = torch.tensor([1.0, 1 + 2.0**-11 + 2.0**-23, -1 - 2.0**-11 - 2.0**-23, 1 + 2.0**-12])
    assert torch.equal(problems.without_ties(values), expected)


def test_references_are_torchs_formulas():
    case = Case(5, 6, 7, "fp32", epilogue="everything")
    operands = problems.draw(case, "cpu")
    linear = torch.nn.functional.linear(operands.a, operands.b.t(), operands.bias)
    expected = torch.nn.functional.silu(linear) + operands.residual
    torch.testing.assert_close(problems.reference(case, operands).out.float(), expected)
    case = Case(5, 6, 7, "fp32", epilogue="swiglu")
    operands = problems.draw(case, "cpu")
    gate = torch.nn.functional.linear(operands.a, operands.b.t(), operands.bias)
    up = torch.nn.functional.linear(operands.a, operands.up.t(), operands.up_bias)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(problems.reference(case, operands).out.float(), expected)
    torch.testing.assert_close(problems.reference(case, operands).up.float(), up)
    case = Case(5, 6, 7, "fp32", epilogue="addmm")
    operands = problems.draw(case, "cpu")
    expected = torch.addmm(operands.residual, operands.a, operands.b, beta=-1.5, alpha=0.5)
    torch.testing.assert_close(problems.reference(case, operands).out.float(), expected)


def test_constant_used():
    truth, magnitude = torch.tensor([1.0, 0.0]).double(), torch.tensor([2.0, 0.0]).double()
    nearest = torch.tensor([1.0, 0.0])
    assert problems.constant_used(nearest, truth, magnitude) == 0
    # Two steps of 2^-23 away, of which the rounding explains 0.51: 2 * 1.49 steps of 2^-24 per 2.
    off = torch.tensor([1 + 2.0**-22, 0.0])
    torch.testing.assert_close(
        problems.constant_used(off, truth, magnitude), torch.tensor(1.49).double()
    )
    assert (
        problems.excess(off, truth, magnitude, 1.50)
        < 1
        < problems.excess(off, truth, magnitude, 1.48)
    )


def config(name: str) -> Config:
    return Config(*name.split(":"), 128, 128, 64, 3, True)


def test_promises_go_by_the_first_pattern():
    assert config("mma_sync:128x128_staged").modes[-1] == "fp32/fp16"
    assert config("mma_sync:128x128").modes[-1] == "fp32/tf32"
    assert config("mma_sync:64x64").modes == ("fp16", "bf16")
    assert config("simt:16x128").modes == ("fp32", "fp32/3xtf32")
    assert config("warp:64x64").modes == ()


def test_layouts_of_a_promise_are_the_kernels():
    k_major = config("mma_sync:128x256")
    assert k_major.layouts() == ("nn", "nt")
    # out.T = b.T @ a.T: its first operand is K-major where b is.
    outs = {layout: k_major.out_layouts(layout) for layout in LAYOUTS}
    assert outs == {"nn": ("row",), "nt": ("row", "column"), "tn": (), "tt": ("column",)}
    for layout, swapped in promises.SWAPPED.items():
        a, b = (torch.empty(4, 8).mT if letter == "t" else torch.empty(8, 4) for letter in layout)
        letters = ["t" if operand.stride(0) == 1 else "n" for operand in (b.mT, a.mT)]
        assert "".join(letters) == swapped


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [("nn", (71, 80, 88)), ("nt", (71, 75, 88)), ("tn", (72, 80, 83)), ("tt", (72, 75, 88))],
)
def test_whole_chunks(layout, sizes):
    case = Case(71, 75, 83, "fp16", layout)
    fitted = config("mma_sync:64x64").fit(case)
    assert (fitted.m, fitted.n, fitted.k) == sizes
    assert config("mma_sync:64x64_staged").fit(case) == case
    assert config("mma_sync:64x64").runs(fitted)
    assert not config("mma_sync:64x64").runs(case)
    for name, runs in (("odd stride", False), ("offset 4", False), ("aligned", True)):
        other = dataclasses.replace(fitted, alignment=name)
        assert config("mma_sync:64x64").runs(other) == runs
        assert config("mma_sync:64x64_staged").runs(other)
    tf32 = dataclasses.replace(fitted, mode="fp32/tf32", alignment="offset 4")
    assert config("mma_sync:128x128").runs(tf32)
    assert not config("mma_sync:64x64").runs(tf32)


def test_one_column_without_elements_counts_as_row_major():
    assert config("mma_sync:64x64").fit(Case(1, 1, 0)).n == 8
    assert config("mma_sync:64x64").fit(Case(65, 33, 0)) == Case(65, 33, 0)


def test_what_has_to_be_packed():
    needs = promises.has_to_be_packed
    case = Case(48, 56, 64, "bf16")
    for layout in LAYOUTS:
        half = dataclasses.replace(case, layout=layout)
        unaligned = {
            name for name in ALIGNMENTS if needs(dataclasses.replace(half, alignment=name))
        }
        assert unaligned == {"odd stride", "offset 1", "offset 2", "offset 4"}
        tf32 = dataclasses.replace(half, mode="fp32/tf32")
        assert needs(tf32) == (layout != "nt")
        assert needs(dataclasses.replace(half, mode="fp32/fp16"))
    assert not needs(Case(48, 56, 64, "fp32/tf32", alignment="offset 4"))
    # A single row has no stride, and nothing has no address.
    assert not needs(Case(1, 1, 64, "fp16", alignment="odd stride"))
    assert needs(Case(1, 2, 64, "fp16", alignment="odd stride"))
    assert needs(Case(1, 1, 64, "fp16", alignment="offset 1"))
    assert not needs(Case(1, 1, 0, "fp16", alignment="offset 1"))


def test_configurations_that_pack_are_given_something_to_pack():
    packs = config("sm90_packed:128x128")
    case = Case(48, 56, 64, "bf16")
    assert not packs.runs(case)
    fitted = packs.fit(case)
    assert packs.runs(fitted)
    assert fitted == dataclasses.replace(case, alignment="offset 1")
    full = dataclasses.replace(case, mode="fp32/bf16")
    assert packs.fit(full) == full
    assert packs.runs(full)
    nothing = Case(1, 1, 0, "bf16")
    assert packs.fit(nothing) == nothing
    assert not packs.runs(nothing)
    for columns in (7, 8):
        matrix = torch.randn(3, columns)
        odd = packs.operand(matrix)
        assert torch.equal(odd, matrix)
        assert odd.stride(0) % 2 == 1
        assert config("sm90:128x128").operand(matrix) is matrix


def test_every_configuration_promises_something():
    assert [str(config) for config in promises.CONFIGS if not config.modes] == []


def test_assert_product():
    a, b = torch.randn(3, 1, 5, 7), torch.randn(4, 7, 2)
    problems.assert_product(a @ b, a, b)
    wrong = a @ b
    wrong[2, 3, 4, 1] += 1e-3
    with pytest.raises(AssertionError, match="times what the accuracy contract allows"):
        problems.assert_product(wrong, a, b)
    with pytest.raises(AssertionError):
        problems.assert_product((a @ b)[0], a, b)
