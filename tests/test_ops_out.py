"""`out=`: what may be written, and that nothing else is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import torch_gemm

tgemm = torch.ops.tgemm


def outputs(rows: int, columns: int) -> dict[str, Tensor]:
    """(rows, columns) outputs of many strides, full of NaN."""
    nan = float("nan")
    return {
        "contiguous": torch.full((rows, columns), nan),
        "column-major": torch.full((columns, rows), nan).mT,
        "leading stride": torch.full((rows, columns + 3), nan)[:, 1:-2],
        "every other column": torch.full((rows, 2 * columns), nan)[:, ::2],
        "negative bit": torch._neg_view(torch.full((rows, columns), nan)),
    }


@pytest.mark.parametrize("name", outputs(1, 1))
def test_strides_of_out(name):
    a, b = torch.randn(3, 5), torch.randn(5, 4)
    weight, bias, addend = b.mT, torch.randn(4), torch.randn(3, 4)
    out = outputs(3, 4)[name]
    assert torch_gemm.matmul(a, b, out=out) is out
    torch.testing.assert_close(out, a @ b)
    out = outputs(3, 4)[name]
    assert torch_gemm.linear(a, weight, bias, addend, activation="relu", out=out) is out
    torch.testing.assert_close(out, torch.relu(a @ b + bias) + addend)
    out = outputs(3, 4)[name]
    assert torch_gemm.linear_glu(a, weight, -weight, None, bias, activation="relu", out=out) is out
    torch.testing.assert_close(out, torch.relu(a @ b) * (bias - a @ b))
    out = outputs(3, 4)[name]
    assert torch_gemm.addmm(addend, a, b, beta=0.5, alpha=2.0, out=out) is out
    torch.testing.assert_close(out, 0.5 * addend + 2 * (a @ b))


def test_out_overloads_return_nothing():
    a, b, out = torch.randn(3, 5), torch.randn(5, 4), torch.empty(3, 4)
    assert tgemm.matmul(a, b, out=out) is None
    torch.testing.assert_close(out, a @ b)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, None)],
)
def test_dtype_of_out(dtype, out_dtype):
    a, b = torch.randn(3, 5).to(dtype), torch.randn(5, 4).to(dtype)
    out = torch.empty(3, 4, dtype=out_dtype or dtype)
    torch_gemm.matmul(a, b, out=out, out_dtype=out_dtype)
    assert torch.equal(out, torch_gemm.matmul(a, b, out_dtype=out_dtype))


def test_batched_out():
    a, b = torch.randn(2, 3, 5), torch.randn(5, 4)
    out = torch.empty(4, 3, 2).permute(2, 1, 0)
    torch_gemm.matmul(a, b, out=out)
    torch.testing.assert_close(out, a @ b)
    torch_gemm.linear_glu(a, b.mT, b.mT, out=out)
    torch.testing.assert_close(out, torch.nn.functional.silu(a @ b) * (a @ b))
    scalar = torch.empty(())
    torch_gemm.matmul(torch.ones(3), torch.ones(3), out=scalar)
    assert scalar.item() == 3
    torch_gemm.matmul(torch.ones(0, 3), torch.ones(3, 4), out=torch.empty(0, 4))


def test_out_may_be_exactly_the_residual():
    x, weight, residual = torch.randn(3, 5), torch.randn(4, 5), torch.randn(3, 4)
    expected = torch.relu(x @ weight.mT) + residual
    torch_gemm.linear(x, weight, None, residual, activation="relu", out=residual)
    torch.testing.assert_close(residual, expected)
    # The same memory through another tensor object.
    total = torch.randn(3, 4)
    expected = 2 * total + x @ weight.mT
    torch_gemm.addmm(total.view(3, 4), x, weight.mT, beta=2.0, out=total)
    torch.testing.assert_close(total, expected)


def test_out_may_be_a_slice_of_the_buffer_of_an_input():
    buffer = torch.randn(6, 12)
    before = buffer.clone()
    weight = torch.randn(4, 5)
    # Columns beside the input's; rows interleaved with the input's.
    torch_gemm.linear(buffer[:, :5], weight, out=buffer[:, 5:9])
    torch.testing.assert_close(buffer[:, 5:9], before[:, :5] @ weight.mT)
    assert torch.equal(buffer[:, :5], before[:, :5])
    assert torch.equal(buffer[:, 9:], before[:, 9:])
    torch_gemm.linear(buffer[::2, :5], weight, out=buffer[1::2, 1:5])
    torch.testing.assert_close(buffer[1::2, 1:5], before[::2, :5] @ weight.mT)
    # Every other column: even ones are read, odd ones written.
    flat = torch.randn(3, 10)
    kept = flat[:, ::2].clone()
    torch_gemm.matmul(flat[:, ::2], torch.ones(5, 5), out=flat[:, 1::2])
    assert torch.equal(flat[:, ::2], kept)


def test_neighbours_of_out_stay_as_they_are():
    buffer = torch.full((5, 8), 7.0)
    torch_gemm.matmul(torch.ones(3, 2), torch.ones(2, 4), out=buffer[1:4, 2:6])
    assert torch.equal(buffer[1:4, 2:6], torch.full((3, 4), 2.0))
    weight = torch.ones(4, 2)
    torch_gemm.linear_glu(torch.ones(3, 2), weight, weight, activation="relu", out=buffer[1:4, 2:6])
    assert torch.equal(buffer[1:4, 2:6], torch.full((3, 4), 4.0))
    buffer[1:4, 2:6] = 7.0
    assert (buffer == 7.0).all()


def elements(view: Tensor) -> list[int]:
    offsets = torch.arange(view.untyped_storage().nbytes() // view.element_size())
    return offsets.as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist()


def test_overlap_is_decided_exactly():
    """All small strided views of one buffer against each other, by enumeration of their elements."""
    buffer = torch.zeros(64)
    views = [
        buffer.as_strided((2, 3), strides, offset)
        for strides in itertools.product((1, 2, 3, 4, 6, 7), repeat=2)
        for offset in (0, 1, 5, 8)
    ]
    other = torch.eye(3)
    for out, read in itertools.product(views, views[::3]):
        own, theirs = elements(out), elements(read)
        repeats = len(set(own)) < len(own)
        shares = bool(set(own) & set(theirs))
        try:
            tgemm.matmul.out(read, other, out=out)
            sentence = ""
        except RuntimeError as error:
            sentence = str(error)
        where = (out.stride(), out.storage_offset(), read.stride(), read.storage_offset())
        assert ("share memory with each other" in sentence) == repeats, where
        if not repeats:
            assert ("out shares memory with a" in sentence) == shares, where


def test_version_of_out_is_bumped():
    a, b, out = torch.randn(3, 5), torch.randn(5, 4), torch.zeros(3, 4)
    factor = torch.ones(3, 4, requires_grad=True)
    product = factor * out  # saves out
    torch_gemm.matmul(a, b, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    product = factor * out
    torch_gemm.linear_glu(a, b.mT, b.mT, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
