"""The ops on the CPU against FP64: shapes, strides, dtypes, epilogues, precisions, edges."""

from __future__ import annotations

import itertools
import math

import problems
import pytest
import torch
from problems import Mode
from torch import Tensor

import torch_gemm

tgemm = torch.ops.tgemm
GEMM_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")

MATMUL_SHAPES = [
    ((5,), (5,)),
    ((5,), (5, 4)),
    ((3, 5), (5,)),
    ((3, 5), (5, 4)),
    ((1, 5), (5, 1)),
    ((2, 3, 5), (5,)),
    ((2, 3, 5), (5, 4)),
    ((5,), (2, 5, 4)),
    ((3, 5), (2, 5, 4)),
    ((2, 3, 5), (2, 5, 4)),
    ((2, 3, 5), (1, 5, 4)),
    ((1, 3, 5), (2, 5, 4)),
    ((6, 1, 3, 5), (2, 5, 4)),
    ((2, 1, 3, 5), (1, 6, 5, 4)),
    ((2, 3, 1, 2, 1, 2, 3, 5), (3, 2, 1, 2, 1, 5, 4)),
    # Empty and K = 0.
    ((0, 5), (5, 4)),
    ((3, 5), (5, 0)),
    ((3, 0), (0, 4)),
    ((0,), (0,)),
    ((0, 0), (0, 0)),
    ((2, 0), (3, 0, 4)),
    ((0, 3, 5), (5, 4)),
    ((0, 3, 5), (1, 5, 4)),
]


def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes).to(dtype)


def strided_variants(tensor: Tensor):
    """The same values under different strides."""
    yield "contiguous", tensor
    if tensor.dim() >= 2:
        yield "transposed", tensor.mT.contiguous().mT
    if tensor.dim() >= 1:
        padded = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), math.nan)
        padded[..., 1:-2] = tensor
        yield "sliced", padded[..., 1:-2]
        stepped = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan)
        stepped[..., ::2] = tensor
        yield "every other", stepped[..., ::2]
        yield "batch last", tensor.movedim(0, -1).contiguous().movedim(-1, 0)
        yield "negative bit", torch._neg_view(-tensor)
    if tensor.dim() >= 3:
        yield "batch inside", tensor.transpose(0, -2).contiguous().transpose(0, -2)


def check_epilogue(
    actual: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    precision: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Holds `actual` against act(alpha * a @ b + bias) + beta * residual in FP64."""
    mode = Mode(a.dtype, precision)
    a64, b64 = problems.round_operand(a, mode), problems.round_operand(b, mode)
    truth = alpha * torch.matmul(a64, b64)
    magnitude = abs(alpha) * torch.matmul(a64.abs(), b64.abs())
    if bias is not None:
        truth, magnitude = truth + bias.double(), magnitude + bias.double().abs()
    truth = problems.activate(truth, activation)
    if residual is not None and beta != 0:
        truth = truth + beta * residual.double()
        magnitude = magnitude + abs(beta) * residual.double().abs()
    assert actual.shape == truth.shape
    assert actual.dtype == (out_dtype or a.dtype)
    assert actual.is_contiguous()
    c = problems.accuracy_constant(None, a.shape[-1])
    assert problems.excess(actual, truth, magnitude, c) <= 1


@pytest.mark.parametrize("dtype", GEMM_DTYPES)
@pytest.mark.parametrize(("a_shape", "b_shape"), MATMUL_SHAPES)
def test_matmul_shapes(a_shape, b_shape, dtype):
    a, b = randn(*a_shape, dtype=dtype), randn(*b_shape, dtype=dtype)
    out = tgemm.matmul(a, b)
    problems.assert_product(out, a, b)
    assert out.shape == torch.matmul(a, b).shape
    assert out.dtype == dtype
    assert out.is_contiguous()


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((6, 5), (5, 4)), ((2, 3, 5), (2, 5, 4)), ((2, 1, 3, 5), (3, 5, 4))]
)
def test_matmul_strides(a_shape, b_shape):
    a, b = randn(*a_shape), randn(*b_shape)
    truth = a.double() @ b.double()
    for (name_a, x), (name_b, y) in itertools.product(strided_variants(a), strided_variants(b)):
        out = tgemm.matmul(x, y)
        assert out.is_contiguous(), (name_a, name_b)
        torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)


def test_matmul_of_expanded_operands():
    a = randn(1, 5).expand(3, 5)
    b = randn(5, 1).expand(5, 4)
    problems.assert_product(tgemm.matmul(a, b), a, b)
    a = randn(3, 5).expand(7, 3, 5)
    b = randn(1).expand(7, 5, 4)
    problems.assert_product(tgemm.matmul(a, b), a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_dtypes_that_go_to_aten(dtype):
    a, b = torch.randn(2, 3, 5, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    torch.testing.assert_close(tgemm.matmul(a, b), torch.matmul(a, b))
    weight, bias, residual = b.mT, torch.randn(4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    torch.testing.assert_close(
        tgemm.linear(a, weight, bias, residual),
        torch.nn.functional.linear(a, weight, bias) + residual,
    )
    torch.testing.assert_close(
        tgemm.addmm(residual, a[0], b, beta=0.5, alpha=-2.0),
        torch.addmm(residual, a[0], b, beta=0.5, alpha=-2.0),
    )
    assert tgemm.matmul(a, b, out_dtype=dtype).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers(dtype):
    a = torch.randint(0, 5, (2, 3, 5), dtype=dtype)
    b = torch.randint(0, 5, (5, 4), dtype=dtype)
    torch.testing.assert_close(tgemm.matmul(a, b), torch.matmul(a, b))


def test_conjugated_and_negated_views():
    a, b = torch.randn(3, 5, dtype=torch.complex64), torch.randn(4, 5, dtype=torch.complex64)
    assert b.mH.is_conj()
    torch.testing.assert_close(tgemm.matmul(a, b.mH), a @ b.mH.resolve_conj())
    assert a.conj().imag.is_neg()
    real = randn(5, 2)
    torch.testing.assert_close(tgemm.matmul(a.conj().imag, real), -(a.imag @ real))


@pytest.mark.parametrize("out_dtype", [None, *GEMM_DTYPES])
@pytest.mark.parametrize("dtype", GEMM_DTYPES)
def test_out_dtype(dtype, out_dtype):
    a, b = randn(3, 50, dtype=dtype), randn(50, 4, dtype=dtype)
    check_epilogue(tgemm.matmul(a, b, out_dtype=out_dtype), a, b, out_dtype=out_dtype)
    bias = randn(4, dtype=out_dtype or dtype)
    out = tgemm.linear(a, b.mT, bias, activation="silu", out_dtype=out_dtype)
    check_epilogue(out, a, b, bias=bias, activation="silu", out_dtype=out_dtype)


def test_result_is_rounded_once():
    # The product, 1 + 2^-11, is a tie between two float16 numbers: rounded before the bias is added, it
    # would become 1 and stay there.
    x, weight = torch.tensor([[1.0, 2.0**-11]]).half(), torch.ones(1, 2).half()
    assert tgemm.linear(x, weight).item() == 1.0
    assert tgemm.linear(x, weight, torch.tensor([2.0**-20])).item() == 1 + 2.0**-10


@pytest.mark.parametrize("precision", [None, "ieee", "tf32", "3xtf32", "bf16", "fp16"])
def test_precision_of_fp32(precision):
    a, b = randn(8, 300), randn(300, 8)
    out = tgemm.matmul(a, b, precision=precision)
    # TF32 is computed in true FP32, which is at least as exact.
    rounds = precision if precision in ("bf16", "fp16") else None
    check_epilogue(out, a, b, precision=rounds)
    if rounds is not None:
        assert not torch.equal(out, tgemm.matmul(a, b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_precision_is_only_for_fp32(dtype, precision):
    a, b = randn(8, 50, dtype=dtype), randn(50, 8, dtype=dtype)
    assert torch.equal(tgemm.matmul(a, b, precision=precision), tgemm.matmul(a, b))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", GEMM_DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 0, 5), (0, 5)])
def test_linear(shape, dtype, activation):
    x, weight = randn(*shape, dtype=dtype), randn(4, 5, dtype=dtype)
    bias, residual = randn(4, dtype=dtype), randn(*shape[:-1], 4, dtype=dtype)
    for given_bias, given_residual in itertools.product((None, bias), (None, residual)):
        out = tgemm.linear(x, weight, given_bias, given_residual, activation=activation)
        check_epilogue(
            out, x, weight.mT, bias=given_bias, residual=given_residual, activation=activation
        )


@pytest.mark.parametrize("residual_shape", [(), (1,), (4,), (3, 1), (3, 4), (1, 1, 4), (2, 1, 1)])
@pytest.mark.parametrize("dtype", GEMM_DTYPES)
def test_residual_broadcasts(residual_shape, dtype):
    x, weight = randn(2, 3, 5, dtype=dtype), randn(4, 5, dtype=dtype)
    for residual in (randn(*residual_shape, dtype=dtype), randn(*residual_shape)):
        out = tgemm.linear(x, weight, None, residual, activation="relu")
        check_epilogue(out, x, weight.mT, residual=residual, activation="relu")


@pytest.mark.parametrize("dtype", GEMM_DTYPES)
def test_linear_with_k_zero_is_the_epilogue_of_zero(dtype):
    bias, residual = randn(4, dtype=dtype), randn(3, 4, dtype=dtype)
    out = tgemm.linear(
        randn(3, 0, dtype=dtype), randn(4, 0, dtype=dtype), bias, residual, activation="gelu"
    )
    check_epilogue(
        out,
        torch.zeros(3, 1, dtype=dtype),
        torch.zeros(1, 4, dtype=dtype),
        bias=bias,
        residual=residual,
        activation="gelu",
    )


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", GEMM_DTYPES)
def test_linear_preact(dtype, out_dtype, activation):
    x, weight, bias = randn(2, 3, 5, dtype=dtype), randn(4, 5, dtype=dtype), randn(4)
    residual = randn(3, 4, dtype=dtype)
    out, preact = tgemm._linear_preact(
        x, weight, bias, residual, activation=activation, out_dtype=out_dtype
    )
    check_epilogue(
        out,
        x,
        weight.mT,
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=out_dtype,
    )
    check_epilogue(preact, x, weight.mT, bias=bias, out_dtype=out_dtype)


def check_glu(
    actual: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    precision: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Holds `actual` against act(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias) in FP64."""
    mode = Mode(x.dtype, precision)

    def linear(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        x64, weight64 = problems.round_operand(x, mode), problems.round_operand(weight, mode)
        added = 0.0 if bias is None else bias.double()
        magnitude = x64.abs() @ weight64.abs().T + (0.0 if bias is None else bias.double().abs())
        return x64 @ weight64.T + added, magnitude

    (gate, gate_magnitude), (up, up_magnitude) = (
        linear(gate_weight, gate_bias),
        linear(up_weight, up_bias),
    )
    gate = problems.activate(gate, activation)
    assert actual.shape == gate.shape
    assert actual.dtype == (out_dtype or x.dtype)
    assert actual.is_contiguous()
    magnitude = gate.abs() * up_magnitude + up.abs() * gate_magnitude
    c = problems.accuracy_constant(None, x.shape[-1])
    assert problems.excess(actual, gate * up, magnitude, c) <= 1


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", GEMM_DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 0, 5), (0, 5), (3, 0)])
def test_linear_glu(shape, dtype, activation):
    x = randn(*shape, dtype=dtype)
    weights = randn(4, shape[-1], dtype=dtype), randn(4, shape[-1], dtype=dtype)
    biases = randn(4, dtype=dtype), randn(4)
    for given in itertools.product((None, biases[0]), (None, biases[1])):
        out = tgemm.linear_glu(x, *weights, *given, activation=activation)
        check_glu(out, x, *weights, *given, activation=activation)


def test_linear_glu_of_no_features():
    assert tgemm.linear_glu(randn(3, 5), randn(0, 5), randn(0, 5)).shape == (3, 0)


def test_linear_glu_is_silu_by_default():
    arguments = randn(3, 5), randn(4, 5), randn(4, 5)
    expected = tgemm.linear_glu(*arguments, activation="silu")
    assert torch.equal(tgemm.linear_glu(*arguments), expected)
    assert torch.equal(torch_gemm.linear_glu(*arguments), expected)


def test_linear_glu_strides():
    """Weights in any strides, packed ones included."""
    packed = randn(8, 5)
    x = randn(2, 3, 5)
    for (name_x, own_x), (name, own) in itertools.product(
        strided_variants(x), strided_variants(packed)
    ):
        gate_weight, up_weight = own.chunk(2)
        out = tgemm.linear_glu(own_x, gate_weight, up_weight)
        truth = torch.nn.functional.silu(x.double() @ packed[:4].double().T) * (
            x.double() @ packed[4:].double().T
        )
        assert out.is_contiguous(), (name_x, name)
        torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
    # Gate and up need not have the same strides.
    gate_weight, up_weight = randn(4, 5), randn(5, 4).mT
    check_glu(tgemm.linear_glu(x, gate_weight, up_weight), x, gate_weight, up_weight)


@pytest.mark.parametrize("out_dtype", [None, *GEMM_DTYPES])
@pytest.mark.parametrize("dtype", GEMM_DTYPES)
def test_out_dtype_of_linear_glu(dtype, out_dtype):
    x, *weights = randn(3, 50, dtype=dtype), randn(4, 50, dtype=dtype), randn(4, 50, dtype=dtype)
    biases = randn(4, dtype=out_dtype or dtype), randn(4)
    out = tgemm.linear_glu(x, *weights, *biases, out_dtype=out_dtype)
    check_glu(out, x, *weights, *biases, out_dtype=out_dtype)


def test_linear_glu_is_rounded_once():
    # The gate, 1 + 2^-11, would round to 1 in float16, and so would its square: 1 + 2^-10 + 2^-22.
    x, weight = torch.tensor([[1.0, 2.0**-11]]).half(), torch.ones(1, 2).half()
    out = tgemm.linear_glu(x, weight, weight, activation="relu")
    assert out.item() == 1 + 2.0**-10


@pytest.mark.parametrize("precision", [None, "ieee", "tf32", "3xtf32", "bf16", "fp16"])
def test_precision_of_linear_glu(precision):
    arguments = randn(8, 300), randn(8, 300), randn(8, 300)
    out = tgemm.linear_glu(*arguments, precision=precision)
    rounds = precision if precision in ("bf16", "fp16") else None
    check_glu(out, *arguments, precision=rounds)
    if rounds is not None:
        assert not torch.equal(out, tgemm.linear_glu(*arguments))


def test_linear_glu_of_float64_goes_to_aten():
    x, gate_weight, up_weight = (torch.randn(3, 3, dtype=torch.float64) for _ in range(3))
    functional = torch.nn.functional
    expected = functional.gelu(functional.linear(x, gate_weight)) * functional.linear(x, up_weight)
    out = tgemm.linear_glu(x, gate_weight, up_weight, activation="gelu")
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", GEMM_DTYPES)
def test_linear_glu_preact(dtype, out_dtype, activation):
    x, *weights = randn(2, 3, 5, dtype=dtype), randn(4, 5, dtype=dtype), randn(4, 5, dtype=dtype)
    biases = randn(4), randn(4, dtype=dtype)
    out, gate, up = tgemm._linear_glu_preact(
        x, *weights, *biases, activation=activation, out_dtype=out_dtype
    )
    check_glu(out, x, *weights, *biases, activation=activation, out_dtype=out_dtype)
    check_epilogue(gate, x, weights[0].mT, bias=biases[0], out_dtype=out_dtype)
    check_epilogue(up, x, weights[1].mT, bias=biases[1], out_dtype=out_dtype)


@pytest.mark.parametrize("input_shape", [(), (1,), (4,), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (0.5, -2), (-1, 0.25), (0, 3)])
@pytest.mark.parametrize("dtype", GEMM_DTYPES)
def test_addmm(dtype, beta, alpha, input_shape):
    addend, a, b = randn(*input_shape, dtype=dtype), randn(3, 5, dtype=dtype), randn(5, 4).to(dtype)
    out = tgemm.addmm(addend, a, b, beta=beta, alpha=alpha)
    check_epilogue(out, a, b, residual=addend, beta=beta, alpha=alpha)


def test_addmm_with_beta_zero_never_reads_input():
    a, b = randn(3, 5), randn(5, 4)
    nan = torch.full((3, 4), math.nan)
    assert torch.equal(tgemm.addmm(nan, a, b, beta=0), tgemm.matmul(a, b))
    assert tgemm.addmm(nan, a, b).isnan().all()


def test_nan_beside_a_matrix_stays_there():
    buffer = torch.full((9, 9), math.nan)
    buffer[2:5, 1:6] = 1.0
    other = torch.full((9, 9), math.nan)
    other[:5, 4:8] = 2.0
    assert torch.equal(tgemm.matmul(buffer[2:5, 1:6], other[:5, 4:8]), torch.full((3, 4), 10.0))


def test_nan_and_infinity_propagate():
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    a[0, 1], b[2, 1] = math.nan, math.inf
    out = tgemm.linear(a, b.mT, activation="relu")
    assert out.isnan().tolist() == [[True, True], [False, False]]
    assert out[1].tolist() == [3.0, math.inf]


def test_results_are_repeatable():
    a, b = randn(64, 300, dtype=torch.bfloat16), randn(300, 70, dtype=torch.bfloat16)
    assert torch.equal(tgemm.matmul(a, b), tgemm.matmul(a, b))


def test_inputs_stay_as_they_are():
    x, weight, bias, residual = randn(3, 5), randn(4, 5), randn(4), randn(3, 4)
    copies = [t.clone() for t in (x, weight, bias, residual)]
    out = tgemm.linear(x, weight, bias, residual, activation="relu")
    glu = tgemm.linear_glu(x, weight, weight, bias, bias)
    for tensor, copy in zip((x, weight, bias, residual), copies, strict=True):
        assert torch.equal(tensor, copy)
        assert out.data_ptr() != tensor.data_ptr() != glu.data_ptr()


# --- The Python wrappers ----------------------------------------------------------------------------


def test_wrappers_are_the_ops():
    x, weight, bias, residual = randn(3, 5), randn(4, 5), randn(4), randn(3, 4)
    assert torch.equal(
        torch_gemm.linear(x, weight, bias, residual, activation="gelu"),
        tgemm.linear(x, weight, bias, residual, activation="gelu"),
    )
    assert torch.equal(
        torch_gemm.matmul(x, weight.mT, out_dtype=torch.float16),
        tgemm.matmul(x, weight.mT, out_dtype=torch.float16),
    )
    assert torch.equal(
        torch_gemm.addmm(residual, x, weight.mT, beta=2.0, alpha=3.0),
        tgemm.addmm(residual, x, weight.mT, beta=2.0, alpha=3.0),
    )
    options = {"activation": "relu", "out_dtype": torch.bfloat16, "precision": "fp16"}
    assert torch.equal(
        torch_gemm.linear_glu(x, weight, -weight, bias, -bias, static_weight=True, **options),
        tgemm.linear_glu(x, weight, -weight, bias, -bias, **options),
    )


class FlagPrecision:
    """Sets torch's FP32 flags for a test, and puts them back."""

    def __enter__(self):
        self.backend = torch.backends.cuda.matmul.fp32_precision
        self.generic = torch.backends.fp32_precision
        self.legacy = torch.get_float32_matmul_precision()
        return self

    def __exit__(self, *exception):
        torch.set_float32_matmul_precision(self.legacy)
        torch.backends.fp32_precision = self.generic
        torch.backends.cuda.matmul.fp32_precision = self.backend


@pytest.mark.filterwarnings("error")
def test_fp32_precision_follows_torchs_flags():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from torch_gemm.ops import fp32_precision

    with FakeTensorMode():
        on_cuda = torch.empty(2, 2, device="cuda")
        half_on_cuda = on_cuda.half()
    with FlagPrecision():
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert fp32_precision(on_cuda) is None
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert fp32_precision(on_cuda) == "tf32"
        assert fp32_precision(half_on_cuda) is None
        assert fp32_precision(torch.empty(2, 2)) is None
    for name, expected in (("highest", None), ("high", "tf32"), ("medium", "tf32")):
        with FlagPrecision():
            torch.set_float32_matmul_precision(name)
            assert fp32_precision(on_cuda) == expected
