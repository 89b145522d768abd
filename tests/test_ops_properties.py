"""Random shapes, strides and epilogues against FP64, and fake tensors against what really came out."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite
from test_ops import check_epilogue, check_glu
from torch import Tensor

import torch_gemm  # noqa: F401  (registers the ops)

tgemm = torch.ops.tgemm
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = st.integers(0, 7)


@composite
def strided(draw: DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape: dimensions in any order in memory, gaps, an offset, expanded ones; NaN
    around it."""
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    stride = draw(st.integers(1, 2))
    for dim in order:
        if draw(st.integers(0, 9)) == 0:
            continue  # expanded
        strides[dim] = stride
        stride = stride * max(shape[dim], 1) + draw(st.integers(0, 2))
    offset = draw(st.integers(0, 3))
    extent = sum(max(size - 1, 0) * own for size, own in zip(shape, strides, strict=True)) + 1
    seed = draw(st.integers(0, 2**31))
    buffer = torch.full((offset + extent + 3,), math.nan, dtype=dtype)
    view = buffer.as_strided(shape, strides, offset)
    # Element by element, since expanded dimensions share their elements.
    inside = torch.zeros(buffer.numel(), dtype=torch.bool)
    inside.as_strided(shape, strides, offset).fill_(True)
    values = torch.randn(buffer.numel(), generator=torch.Generator().manual_seed(seed)).to(dtype)
    buffer[inside] = values[inside]
    return view


@composite
def broadcast_of(draw: DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to this one."""
    keep = draw(st.integers(0, len(shape)))
    tail = shape[len(shape) - keep :]
    return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in tail)


@composite
def products(draw: DrawFn) -> tuple[Tensor, Tensor]:
    dtype = draw(st.sampled_from(DTYPES))
    batch = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    a_shape = (*draw(broadcast_of(batch)), m, k)
    b_shape = (*draw(broadcast_of(batch)), k, n)
    if draw(st.integers(0, 5)) == 0:
        a_shape = (k,)
    if draw(st.integers(0, 5)) == 0:
        b_shape = (k,)
    return draw(strided(a_shape, dtype)), draw(strided(b_shape, dtype))


@given(products(), st.sampled_from([None, *DTYPES]))
def test_matmul(operands, out_dtype):
    a, b = operands
    out = tgemm.matmul(a, b, out_dtype=out_dtype)
    check_epilogue(out, a, b, out_dtype=out_dtype)
    fake = tgemm.matmul(a.to("meta"), b.to("meta"), out_dtype=out_dtype)
    assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype)


@given(st.data())
def test_linear(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    out_dtype = data.draw(st.sampled_from([None, torch.float32]))
    leading = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    n, k = data.draw(SIZES), data.draw(SIZES)
    addend_dtypes = st.sampled_from([dtype, torch.float32])
    x, weight = data.draw(strided((*leading, k), dtype)), data.draw(strided((n, k), dtype))
    bias = residual = None
    if data.draw(st.booleans()):
        bias = data.draw(strided((n,), data.draw(addend_dtypes)))
    if data.draw(st.booleans()):
        shape = data.draw(broadcast_of((*leading, n)))
        residual = data.draw(strided(shape, data.draw(addend_dtypes)))
    activation = data.draw(st.sampled_from([None, "relu", "gelu", "gelu_tanh", "silu"]))
    out = tgemm.linear(x, weight, bias, residual, activation=activation, out_dtype=out_dtype)
    check_epilogue(
        out,
        x,
        weight.mT,
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=out_dtype,
    )


@given(st.data())
def test_linear_glu(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    out_dtype = data.draw(st.sampled_from([None, torch.float32]))
    leading = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    n, k = data.draw(SIZES), data.draw(SIZES)
    x = data.draw(strided((*leading, k), dtype))
    weights = [data.draw(strided((n, k), dtype)) for _ in range(2)]
    biases = [
        data.draw(strided((n,), data.draw(st.sampled_from([dtype, torch.float32]))))
        if data.draw(st.booleans())
        else None
        for _ in range(2)
    ]
    activation = data.draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"]))
    options = {"activation": activation, "out_dtype": out_dtype}
    out = tgemm.linear_glu(x, *weights, *biases, **options)
    check_glu(out, x, *weights, *biases, **options)
    metas = [None if t is None else t.to("meta") for t in (x, *weights, *biases)]
    fake = tgemm.linear_glu(*metas, **options)
    assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype)


@given(st.data())
def test_addmm_into_out(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    m, n, k = data.draw(SIZES), data.draw(SIZES), data.draw(SIZES)
    addend = data.draw(strided(data.draw(broadcast_of((m, n))), dtype))
    a, b = data.draw(strided((m, k), dtype)), data.draw(strided((k, n), dtype))
    alpha, beta = (
        data.draw(st.sampled_from([1.0, -2.0, 0.5])),
        data.draw(st.sampled_from([0.0, 1.5])),
    )
    whole = torch.full((m + 2, 2 * n + 3), 7.0, dtype=dtype)
    step = data.draw(st.integers(1, 2))
    out = whole[1 : m + 1, 1 : 1 + step * n : step]
    tgemm.addmm.out(addend, a, b, alpha=alpha, beta=beta, out=out)
    check_epilogue(out.contiguous(), a, b, residual=addend, alpha=alpha, beta=beta)
    out.fill_(7.0)
    assert (whole == 7.0).all()


def try_matmul(a: Tensor, b: Tensor) -> tuple[torch.Size | None, str]:
    try:
        return tgemm.matmul(a, b).shape, ""
    except RuntimeError as error:
        return None, str(error)


@given(
    st.lists(SIZES, min_size=1, max_size=4).map(tuple),
    st.lists(SIZES, min_size=1, max_size=4).map(tuple),
)
def test_any_two_shapes_multiply_exactly_where_torchs_do(a_shape, b_shape):
    a, b = torch.ones(a_shape), torch.ones(b_shape)
    try:
        expected = torch.matmul(a, b)
    except RuntimeError:
        expected = None
    for x, y in ((a, b), (a.to("meta"), b.to("meta"))):
        shape, sentence = try_matmul(x, y)
        assert shape == (None if expected is None else expected.shape), sentence
        if expected is None:
            assert sentence.startswith(f"tgemm.matmul: a is {a_shape} and b is {b_shape}: ")
