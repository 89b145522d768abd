"""Counts and errors of one tensor or of many, beside FP64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_gemm import numerics

# FP64 tiles of at most so many elements, 128 MB each.
TILE = 2**24


@dataclass
class Census:
    """What numbers a tensor, or several, consist of."""

    elements: int = 0
    nan: int = 0
    inf: int = 0
    subnormal: int = 0  # not zero, and below the smallest normal number of the dtype
    zero: int = 0
    largest: float = 0.0  # finite magnitude
    smallest: float | None = None  # magnitude that is not zero; None if there is none

    def add(self, tensor: Tensor) -> None:
        """Counts a floating-point tensor as well."""
        if tensor.numel() == 0:
            return
        size = tensor.detach().abs()
        finite = size.isfinite()
        normal = torch.finfo(tensor.dtype).smallest_normal
        counts = torch.stack(
            [
                size.isnan().sum(),
                size.isinf().sum(),
                ((size > 0) & (size < normal)).sum(),
                (size == 0).sum(),
            ]
        )
        ends = torch.stack(
            [
                torch.where(finite, size, 0.0).max(),
                torch.where(finite & (size > 0), size, math.inf).min(),
            ]
        )
        nan, inf, subnormal, zero = counts.tolist()
        largest, smallest = ends.tolist()
        self.elements += tensor.numel()
        self.nan += nan
        self.inf += inf
        self.subnormal += subnormal
        self.zero += zero
        self.largest = max(self.largest, largest)
        if math.isfinite(smallest):
            self.smallest = smallest if self.smallest is None else min(self.smallest, smallest)


@dataclass
class Worst:
    """The element that is furthest from FP64, in ulp."""

    index: tuple[int, ...]  # in the output
    call: int  # of the layer, from 0
    actual: float
    reference: float
    ulp: float


@dataclass
class Errors:
    """How far an implementation is from FP64.

    Sums and extremes run over the elements that are finite in both. `share` is the largest error as a share
    of what the numerics contract allows with the kernel's constant, infinite where a value is not finite
    that should be; `beyond` are the elements above 1. `violations` are those that break it with the constant
    for any operands: FP32 accumulation does not explain them. `overflows` are infinities where FP64 has a
    finite value.
    """

    elements: int = 0
    largest: float = 0.0
    largest_ulp: float = 0.0
    share: float = 0.0
    beyond: int = 0
    violations: int = 0
    overflows: int = 0
    worst: Worst | None = None
    _squares: float = 0.0
    _ulp_squares: float = 0.0
    _reference_squares: float = 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the errors."""
        return math.sqrt(self._squares / self.elements) if self.elements else 0.0

    @property
    def rms_ulp(self) -> float:
        """Root mean square of the errors in ulp of the output around the reference."""
        return math.sqrt(self._ulp_squares / self.elements) if self.elements else 0.0

    @property
    def relative_rms(self) -> float:
        """`rms` as a share of the root mean square of the reference."""
        return (
            math.sqrt(self._squares / self._reference_squares) if self._reference_squares else 0.0
        )

    @property
    def ok(self) -> bool:
        """Whether no element breaks the contract."""
        return self.violations == 0

    @property
    def verdict(self) -> str:
        """On the contract: "kept", "outliers" (kept with the constant for any operands) or "broken"."""
        return "broken" if self.violations else "outliers" if self.beyond else "kept"

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        worst = self.worst
        return {
            "elements": self.elements,
            "max": self.largest,
            "max_ulp": self.largest_ulp,
            "rms": self.rms,
            "rms_ulp": self.rms_ulp,
            "relative_rms": self.relative_rms,
            # JSON has no infinity.
            "share_of_contract": self.share if math.isfinite(self.share) else None,
            "beyond": self.beyond,
            "violations": self.violations,
            "overflows": self.overflows,
            "verdict": self.verdict,
            "worst": worst
            and {
                "index": list(worst.index),
                "call": worst.call,
                "actual": worst.actual,
                "reference": worst.reference,
                "ulp": worst.ulp,
            },
        }


@dataclass(frozen=True)
class Product:
    """``activation(a @ b + bias) + residual``, or times ``a @ up + up_bias``, as a layer computes it.

    `a` is (M, K), `b` and `up` are (K, N), the biases (N,), the residual (M, N). `precision` is how FP32
    operands are multiplied, `c` the constant of the kernel.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None
    activation: str | None = None
    precision: str | None = None
    c: float = 0.0


def tiles(product: Product) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the result, so that nothing in FP64 is larger than TILE."""
    (m, k), n = product.a.shape, product.b.shape[1]
    columns = min(n, max(64, TILE // max(k, 1)))
    rows = min(m, max(64, TILE // max(k, columns, 1)))
    for top in range(0, m, max(rows, 1)):
        for left in range(0, n, max(columns, 1)):
            yield slice(top, top + rows), slice(left, left + columns)


def compare(
    product: Product,
    outs: list[tuple[Errors, Tensor]],
    call: int = 0,
    index_of: Callable[[int], tuple[int, ...]] | None = None,
) -> None:
    """Adds the errors of results (M, N) of a product.

    Args:
        product: what was computed. Errors are against its FP64 result, the contract's share against that
            of the operands as the precision rounds them.
        outs: where to add, and a result.
        call: of the layer.
        index_of: gives the index in the layer's output of one of the M rows; None: the row itself.
    """
    for rows, columns in tiles(product):
        exact, rounded, slack = _references(product, rows, columns)
        for errors, out in outs:
            _add(errors, out[rows, columns], exact, rounded, slack, product.c, product.a.shape[1])
            if errors.worst is None or errors.largest_ulp > errors.worst.ulp:
                _note_worst(errors, out, exact.out, rows, columns, call, index_of)


def _references(
    product: Product, rows: slice, columns: slice
) -> tuple[numerics.Reference, numerics.Reference, Tensor | None]:
    """FP64 from the operands as they are, from the operands as they are rounded, and what ties may move."""

    def of(tensor: Tensor | None, *parts: slice) -> Tensor | None:
        return None if tensor is None else tensor[parts]

    a, b, up = product.a[rows], product.b[:, columns], of(product.up, slice(None), columns)
    rest = {
        "bias": of(product.bias, columns),
        "residual": of(product.residual, rows, columns),
        "up": up,
        "up_bias": of(product.up_bias, columns),
        "activation": product.activation,
    }
    exact = numerics.reference(a, b, **rest)
    if product.precision not in ("tf32", "bf16", "fp16"):
        return exact, exact, None
    rounded = numerics.reference(a, b, **rest, precision=product.precision)
    if product.precision != "tf32":
        return exact, rounded, None
    slack = numerics.tie_slack(a, b)
    if up is not None:
        gate = numerics.activate(rounded.preact, product.activation)
        slack = slack * rounded.up.abs() + numerics.tie_slack(a, up) * gate.abs()
    return exact, rounded, slack


def _add(
    errors: Errors,
    out: Tensor,
    exact: numerics.Reference,
    rounded: numerics.Reference,
    slack: Tensor | None,
    c: float,
    k: int,
) -> None:
    truth = exact.out
    finite = out.isfinite() & truth.isfinite()
    error = torch.where(finite, (out.double() - truth).abs(), 0.0)
    in_ulp = error / numerics.ulp(torch.where(finite, truth, 0.0), out.dtype)
    contract = (out, rounded.out, rounded.magnitude)
    share = numerics.share_of_contract(*contract, c, slack)
    any_share = numerics.share_of_contract(*contract, max(c, numerics.any_constant(k)), slack)
    # One transfer.
    numbers = torch.stack(
        [
            finite.sum().double(),
            error.max(),
            in_ulp.max(),
            share.max(),
            (share > 1).sum().double(),
            (any_share > 1).sum().double(),
            (out.isinf() & truth.isfinite()).sum().double(),
            error.square().sum(),
            in_ulp.square().sum(),
            torch.where(finite, truth, 0.0).square().sum(),
        ]
    ).tolist()
    elements, beyond, violations, overflows = (int(numbers[i]) for i in (0, 4, 5, 6))
    errors.elements += elements
    errors.largest = max(errors.largest, numbers[1])
    errors.largest_ulp = max(errors.largest_ulp, numbers[2])
    errors.share = max(errors.share, numbers[3])
    errors.beyond += beyond
    errors.violations += violations
    errors.overflows += overflows
    errors._squares += numbers[7]
    errors._ulp_squares += numbers[8]
    errors._reference_squares += numbers[9]


def _note_worst(
    errors: Errors,
    out: Tensor,
    truth: Tensor,
    rows: slice,
    columns: slice,
    call: int,
    index_of: Callable[[int], tuple[int, ...]] | None,
) -> None:
    actual = out[rows, columns]
    finite = actual.isfinite() & truth.isfinite()
    in_ulp = (actual.double() - truth).abs() / numerics.ulp(
        torch.where(finite, truth, 0.0), actual.dtype
    )
    flat = int(torch.where(finite, in_ulp, -1.0).argmax())
    row, column = divmod(flat, actual.shape[1])
    if not finite[row, column]:
        return
    place = rows.start + row
    errors.worst = Worst(
        (*(index_of(place) if index_of else (place,)), columns.start + column),
        call,
        actual[row, column].item(),
        truth[row, column].item(),
        in_ulp[row, column].item(),
    )
