"""The numerics contract: how far from FP64 an element of a result may be, and the arithmetic to find out.

Every element of a result keeps

    |out - ref| <= 0.51 ulp(ref) + c * 2^-24 * magnitude

`ref` is the FP64 result of the operands as the precision rounds them, `ulp` the spacing of the output's
dtype around it, `magnitude` what would be added up without cancellation (|A| @ |B| + |bias| + ...), and c
the constant of the kernel, `accuracy_constant`. That is one rounding at the very end, and accumulation in
FP32.

The constants are for operands that are spread like normally distributed ones. Where a few products of a sum
are much larger than all others, as with the outlying features of trained models, every addition after them
rounds at their size, and the error of any FP32 accumulation grows faster. Then `any_constant` holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 0.51  # ulp of the output
FP32_ROUNDING = 2.0**-24


def accuracy_constant(kernel: str | None, k: int) -> float:
    """The c of the contract.

    True FP32 multiply-adds round to nearest, so that their errors average out at any K: in chains of 96
    or 300 of them on normally distributed numbers, 1 in 10^4 needs c = 3.2, 1 in 10^6 c = 4.7, and every
    further decade 0.8 more. 8 leaves room for the 10^8 elements of a run. Tensor Cores truncate when they
    add to the accumulator, always towards zero: there the error grows with the number of additions, which
    is K / 16 (K / 8 for TF32), against a sum that grows with sqrt(K).

    3xTF32 leaves out the product of the low parts, at most 2^-22 of a product, and rounds each low part to
    within 2^-23: a c of 8 for a single product of the worst operands, and some for truncated sums. In sums
    of many such products a part of that is left.

    Args:
        kernel: its name, with or without a configuration; None if it is not known.
        k: the inner size of the product.
    """
    family = (kernel or "").partition(":")[0]
    if family == "sm90_3xtf32":
        return 12.0 if k < 256 else 8.0
    return 8.0 if family == "simt" else 6.0 + math.sqrt(k) / 4


def any_constant(k: int) -> float:
    """A c that holds for all operands: each of K multiply-adds loses at most the last bit of FP32.

    Twice 2^-24 for each, because Tensor Cores truncate. What accumulates in less than FP32 exceeds it.
    """
    return 2.0 * max(k, 4)


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of the numbers of `dtype` around FP64 `values`, subnormal ones included."""
    info = torch.finfo(dtype)
    digits = -round(math.log2(info.eps))
    smallest = round(math.log2(info.smallest_normal))
    _, exponent = torch.frexp(values)  # |values| = m * 2^exponent with m in [0.5, 1)
    exponent = torch.where(values == 0, smallest, exponent - 1).clamp_min(smallest) - digits
    # Powers of two from their bits: exact, where pow() need not be.
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def round_operand(values: Tensor, precision: str | None) -> Tensor:
    """FP64 values that a kernel multiplies when it is given `values` with this precision.

    "ieee" and "3xtf32" multiply what they are given.
    """
    if precision == "tf32":
        # To nearest, ties away from zero, like the instruction cvt.rna.tf32. TMA rounds them to even.
        bits = (values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
        return bits.view(torch.float32).double()
    if precision in ("bf16", "fp16"):
        narrow = torch.bfloat16 if precision == "bf16" else torch.float16
        return values.to(narrow).double()
    return values.double()


def without_ties(values: Tensor) -> Tensor:
    """FP32 values, those that lie half-way between two TF32 numbers moved a little further from zero."""
    bits = values.view(torch.int32)
    return (bits | ((bits & 0x1FFF) == 0x1000).int()).view(torch.float32)


def activate(values: Tensor, activation: str | None) -> Tensor:
    """The activation in the precision of `values`."""
    functional = torch.nn.functional
    if activation is None:
        return values
    if activation == "gelu_tanh":
        return functional.gelu(values, approximate="tanh")
    return {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}[activation](
        values
    )


@dataclass(frozen=True)
class Reference:
    """FP64 truth and what the contract is relative to, all in the shape of the result."""

    preact: Tensor
    out: Tensor
    preact_magnitude: Tensor
    magnitude: Tensor
    up: Tensor | None = None
    up_magnitude: Tensor | None = None


def reference(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    precision: str | None = None,
) -> Reference:
    """``activation(alpha * (a @ b) + bias) + beta * residual`` in FP64, and its magnitude.

    Args:
        a: (..., M, K).
        b: (..., K, N).
        bias, residual: broadcast to the result.
        up: (..., K, N): the result is ``activation(a @ b + bias) * (a @ up + up_bias)``.
        up_bias: broadcasts to the result.
        activation: one of ops.ACTIVATIONS.
        alpha, beta: factors.
        precision: rounds a, b and up as `round_operand` says.
    """
    a, b = round_operand(a, precision), round_operand(b, precision)
    preact = alpha * (a @ b)
    magnitude = abs(alpha) * (a.abs() @ b.abs())
    if bias is not None:
        preact = preact + bias.double()
        magnitude = magnitude + bias.double().abs()
    out, preact_magnitude = activate(preact, activation), magnitude
    if residual is not None:
        out = out + beta * residual.double()
        magnitude = magnitude + (beta * residual.double()).abs()
    if up is None:
        return Reference(preact, out, preact_magnitude, magnitude)
    up64 = round_operand(up, precision)
    factor, up_magnitude = a @ up64, a.abs() @ up64.abs()
    if up_bias is not None:
        factor = factor + up_bias.double()
        up_magnitude = up_magnitude + up_bias.double().abs()
    # An error of either factor counts as much as the other is large.
    magnitude = out.abs() * up_magnitude + factor.abs() * preact_magnitude
    return Reference(preact, out * factor, preact_magnitude, magnitude, factor, up_magnitude)


def tie_slack(a: Tensor, b: Tensor) -> Tensor:
    """What it may add to each error of ``a @ b`` that kernels round ties between two TF32 numbers as they like.

    Args:
        a: (M, K), FP32.
        b: (K, N), FP32.

    Returns:
        (M, N), FP64: the sum of all products with a tie in them, times the step between two TF32 numbers.
    """

    def ties(values: Tensor) -> Tensor:
        tie = (values.contiguous().view(torch.int32) & 0x1FFF) == 0x1000
        return torch.where(tie, values.double().abs(), 0.0)

    return 2.0**-10 * (ties(a) @ b.double().abs() + a.double().abs() @ ties(b))


def share_of_contract(
    actual: Tensor, truth: Tensor, magnitude: Tensor, c: float, slack: Tensor | None = None
) -> Tensor:
    """The error of each element as a share of what the contract allows, FP64 in the shape of `actual`.

    `slack` is allowed besides.

    What is not finite has to be what IEEE arithmetic gives: NaN where the truth is NaN, an infinity where
    the truth is that infinity or so large that what the contract allows reaches what rounds to it. There
    the share is 0, elsewhere infinite.
    """
    allowed = ROUNDING * ulp(truth, actual.dtype) + c * FP32_ROUNDING * magnitude
    if slack is not None:
        allowed = allowed + slack
    wide = actual.double()
    share = ((wide - truth).abs() / allowed).nan_to_num(nan=math.inf, posinf=math.inf)
    info = torch.finfo(actual.dtype)
    rounds_to_infinity = info.max * (
        1 + info.eps / (4 - 2 * info.eps)
    )  # half an ulp above the largest
    overflows = truth.abs() + allowed >= rounds_to_infinity
    expected = (wide.isnan() & truth.isnan()) | (wide == truth)
    expected |= wide.isinf() & (overflows & (wide.sign() == truth.sign()))
    return torch.where(expected, 0.0, share)


def constant_used(actual: Tensor, truth: Tensor, magnitude: Tensor) -> Tensor:
    """The smallest c with which these results would keep the contract (0-d)."""
    if actual.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=actual.device)
    beyond_rounding = (actual.double() - truth).abs() - ROUNDING * ulp(truth, actual.dtype)
    c = torch.where(magnitude > 0, beyond_rounding / (FP32_ROUNDING * magnitude), 0.0)
    return c.max().clamp_min(0.0)
