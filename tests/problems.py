"""Random GEMM problems in poisoned memory, compared with FP64.

Every operand is a window in a larger buffer: around an input lie NaNs, which must not leak into the
result, and around the output lies a guard pattern, which must stay as it is. Outputs are filled with
NaN before each call. The comparison runs on the operands' device without a single synchronisation;
`Ledger.verify` reads all verdicts at once, so that tens of thousands of problems take seconds.

`torch_gemm`'s ops are the same on every device, so the CPU tests run this file as well.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from os import environ

import torch
from torch import Tensor

from torch_gemm import numerics
from torch_gemm.numerics import (  # noqa: F401  (for tests that see problems alone)
    Reference,
    accuracy_constant,
    activate,
    constant_used,
    ulp,
    without_ties,
)
from torch_gemm.windows import GUARD_VALUE, Alignment, place, whole_of

# Drawn anew for each run; set TGEMM_TEST_SEED to repeat one.
BASE_SEED = int(environ.get("TGEMM_TEST_SEED") or secrets.randbelow(2**31))


@dataclass(frozen=True)
class Mode:
    """How operands are stored and how they are multiplied."""

    dtype: torch.dtype
    precision: str | None = None


MODES = {
    "fp16": Mode(torch.float16),
    "bf16": Mode(torch.bfloat16),
    "fp32": Mode(torch.float32, "ieee"),
    "fp32/tf32": Mode(torch.float32, "tf32"),
    "fp32/3xtf32": Mode(torch.float32, "3xtf32"),
    "fp32/bf16": Mode(torch.float32, "bf16"),
    "fp32/fp16": Mode(torch.float32, "fp16"),
}

# Which of a matrix's two dimensions is contiguous, for a (m, k) and b (k, n): "n" is row-major, "t"
# is column-major.
LAYOUTS = ("nn", "nt", "tn", "tt")


ALIGNMENTS = {
    "aligned": Alignment(),
    "odd stride": Alignment(odd_stride=True),
    "offset 1": Alignment(offset=1),
    "offset 2": Alignment(offset=2),
    "offset 4": Alignment(offset=4),
}


@dataclass(frozen=True)
class Epilogue:
    """What happens to the product: act(alpha * product + bias) + beta * residual.

    Gated, it is multiplied by a second one: act(product + bias) * (product with `up` + its bias).
    """

    bias: bool = False
    activation: str | None = None
    residual: str | None = None  # "full", "row" (1, n), "column" (m, 1)
    out_dtype: torch.dtype | None = None
    gated: bool = False
    preact: bool = False  # also ask for the value before the activation, and of `up`
    alpha: float = 1.0  # alpha and beta go through addmm, whose `input` is the residual
    beta: float = 1.0
    bias_dtype: torch.dtype | None = None  # default: the operands'
    residual_dtype: torch.dtype | None = None


EPILOGUES = {
    "none": Epilogue(),
    "bias": Epilogue(bias=True),
    "relu": Epilogue(activation="relu"),
    "gelu": Epilogue(bias=True, activation="gelu"),
    "gelu_tanh": Epilogue(bias=True, activation="gelu_tanh"),
    "silu": Epilogue(bias=True, activation="silu"),
    "residual": Epilogue(residual="full"),
    "fp32 out": Epilogue(out_dtype=torch.float32),
    "preact": Epilogue(bias=True, activation="gelu", preact=True),
    "everything": Epilogue(
        bias=True,
        activation="silu",
        residual="full",
        out_dtype=torch.float32,
        bias_dtype=torch.float32,
        residual_dtype=torch.float32,
    ),
    "fp32 bias": Epilogue(bias=True, activation="relu", out_dtype=torch.float32),
    "fp32 residual": Epilogue(
        bias=True, residual="full", out_dtype=torch.float32, residual_dtype=torch.float32
    ),
    "residual of another dtype": Epilogue(residual="full", out_dtype=torch.float32),
    "residual row": Epilogue(bias=True, activation="relu", residual="row"),
    "residual column": Epilogue(residual="column"),
    "swiglu": Epilogue(bias=True, activation="silu", gated=True),
    "geglu": Epilogue(activation="gelu_tanh", gated=True),
    "geglu fp32 out": Epilogue(activation="gelu_tanh", gated=True, out_dtype=torch.float32),
    "reglu preact": Epilogue(
        bias=True, activation="relu", gated=True, preact=True, bias_dtype=torch.float32
    ),
    "addmm": Epilogue(residual="full", alpha=0.5, beta=-1.5),
    "addmm row": Epilogue(residual="row", alpha=-2.0, beta=0.25),
}


@dataclass(frozen=True)
class Case:
    """One problem. Prints as what to type to see it again."""

    m: int
    n: int
    k: int
    mode: str = "fp16"
    layout: str = "nt"
    alignment: str = "aligned"
    epilogue: str = "none"
    out_layout: str = "row"  # or "column"
    out_alignment: str | None = None  # of out and residual; by default that of the operands
    across: bool = False  # the residual lies against the grain of out
    scale: float = 1.0  # of both operands
    force_kernel: str | None = None
    seed: int = 0


def round_operand(values: Tensor, mode: Mode) -> Tensor:
    """FP64 values that a kernel multiplies when it is given `values` in this mode."""
    return numerics.round_operand(values, mode.precision)


@dataclass(frozen=True)
class Operands:
    """The tensors of one problem; all but the first two may be absent."""

    a: Tensor  # (m, k)
    b: Tensor  # (k, n)
    bias: Tensor | None
    residual: Tensor | None
    up: Tensor | None  # (k, n)
    up_bias: Tensor | None


def draw(case: Case, device: str) -> Operands:
    """Fresh normally distributed operands, each in a window of its own amid NaNs."""
    mode, epilogue = MODES[case.mode], EPILOGUES[case.epilogue]
    generator = torch.Generator(device).manual_seed(BASE_SEED + case.seed)

    def matrix(
        rows: int,
        columns: int,
        column_major: bool,
        dtype: torch.dtype,
        scale: float = 1.0,
        alignment: str = case.alignment,
    ) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device) * scale
        if mode.precision == "tf32":  # kernels may break ties as they like
            values = without_ties(values)
        return place(values.to(dtype), ALIGNMENTS[alignment], column_major, math.nan)

    a = matrix(case.m, case.k, case.layout[0] == "t", mode.dtype, case.scale)
    b = matrix(case.k, case.n, case.layout[1] == "t", mode.dtype, case.scale)
    bias = residual = up = up_bias = None
    if epilogue.gated:
        # Sums of order 1, which keep the products with the gates within FP16.
        small = 2.0 ** -round(math.log2(max(case.k, 1)) / 2)
        up = matrix(case.k, case.n, case.layout[1] == "t", mode.dtype, small)
        if epilogue.bias:
            up_bias = matrix(1, case.n, False, epilogue.bias_dtype or mode.dtype)[0]
    if epilogue.bias:
        bias = matrix(1, case.n, False, epilogue.bias_dtype or mode.dtype)[0]
    if epilogue.residual is not None:
        rows = 1 if epilogue.residual == "row" else case.m
        columns = 1 if epilogue.residual == "column" else case.n
        residual = matrix(
            rows,
            columns,
            (case.out_layout == "column") != case.across,
            epilogue.residual_dtype or mode.dtype,
            alignment=case.out_alignment or case.alignment,
        )
    return Operands(a, b, bias, residual, up, up_bias)


def out_dtype(case: Case) -> torch.dtype:
    return EPILOGUES[case.epilogue].out_dtype or MODES[case.mode].dtype


def poisoned_out(case: Case, device: str) -> Tensor:
    """NaNs for the result to replace, in a window of their own amid the guard pattern."""
    poison = torch.full((case.m, case.n), math.nan, dtype=out_dtype(case), device=device)
    alignment = ALIGNMENTS[case.out_alignment or case.alignment]
    return place(poison, alignment, case.out_layout == "column", GUARD_VALUE)


def glu_arguments(operands: Operands) -> tuple[Tensor | None, ...]:
    """Of linear_glu, whose weights are those of nn.Linear."""
    return operands.a, operands.b.t(), operands.up.t(), operands.bias, operands.up_bias


def call(case: Case, operands: Operands, out: Tensor) -> None:
    """Computes into `out` with the op that has the case's epilogue."""
    mode, epilogue = MODES[case.mode], EPILOGUES[case.epilogue]
    tgemm = torch.ops.tgemm
    options = {
        "precision": mode.precision,
        "out_dtype": epilogue.out_dtype,
        "force_kernel": case.force_kernel,
    }
    a, b, bias, residual = operands.a, operands.b, operands.bias, operands.residual
    if operands.up is not None:
        tgemm.linear_glu.out(
            *glu_arguments(operands), activation=epilogue.activation, out=out, **options
        )
    elif epilogue.alpha != 1.0 or epilogue.beta != 1.0:
        tgemm.addmm.out(
            residual, a, b, beta=epilogue.beta, alpha=epilogue.alpha, out=out, **options
        )
    elif epilogue == Epilogue(out_dtype=epilogue.out_dtype):
        tgemm.matmul.out(a, b, out=out, **options)
    else:
        tgemm.linear.out(
            a, b.t(), bias, residual, activation=epilogue.activation, out=out, **options
        )


def reference(case: Case, operands: Operands) -> Reference:
    """The same computation in FP64, from the operands as the mode rounds them."""
    mode, epilogue = MODES[case.mode], EPILOGUES[case.epilogue]
    return numerics.reference(
        operands.a,
        operands.b,
        bias=operands.bias,
        residual=operands.residual,
        up=operands.up,
        up_bias=operands.up_bias,
        activation=epilogue.activation,
        alpha=epilogue.alpha,
        beta=epilogue.beta,
        precision=mode.precision,
    )


def excess(actual: Tensor, truth: Tensor, magnitude: Tensor, c: float) -> Tensor:
    """Largest error as a share of what the contract allows (0-d); infinite if a value is not finite."""
    if actual.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=actual.device)
    share = numerics.share_of_contract(actual, truth, magnitude, c)
    # Nothing here should overflow, and a reference that is not finite would excuse every result.
    finite = actual.isfinite() & truth.isfinite()
    return torch.where(finite, share, math.inf).max()


def assert_product(
    actual: Tensor,
    a: Tensor,
    b: Tensor,
    mode: str | None = None,
    kernel: str | None = None,
    name: str = "the product",
) -> None:
    """Fails unless `actual` is torch.matmul(a, b), shape included, within the accuracy contract.

    Args:
        actual: what an op returned.
        a: its first operand.
        b: its second operand.
        mode: of MODES; by default the operands multiply as they are.
        kernel: the kernel that was forced, for its accuracy constant.
        name: of the problem, for the message.
    """
    how = MODES[mode] if mode else Mode(a.dtype)
    a64, b64 = round_operand(a, how), round_operand(b, how)
    truth = torch.matmul(a64, b64)
    assert actual.shape == truth.shape, (name, actual.shape, truth.shape)
    k = a.shape[-1]
    magnitude = torch.matmul(a64.abs(), b64.abs())
    share = excess(actual, truth, magnitude, accuracy_constant(kernel, k)).item()
    assert share <= 1.0, (
        f"the error of {name} is {share:.3g} times what the accuracy contract allows"
    )


def _differs(actual: Tensor, expected: Tensor) -> Tensor:
    """1.0 (0-d) if any bit differs, 0.0 otherwise."""
    bits = torch.int32 if actual.element_size() == 4 else torch.int16
    different = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    return different.any().double()


VERDICTS = (
    "error as a share of the contract",
    "guard around the output overwritten",
    "bits differ between two runs",
    "error of the pre-activation as a share of the contract",
)


def check(case: Case, device: str) -> Tensor:
    """Runs a case twice; returns the four VERDICTS, FP64 on the device: each must be at most 1 or 0.

    A fifth number is the share of the accuracy constant that the result used.
    """
    mode, epilogue = MODES[case.mode], EPILOGUES[case.epilogue]
    operands = draw(case, device)
    out = poisoned_out(case, device)
    call(case, operands, out)
    first = out.clone()
    out.fill_(math.nan)
    call(case, operands, out)
    repeated = _differs(first, out)
    out.fill_(GUARD_VALUE)
    guard = (whole_of(out) != GUARD_VALUE).any().double()

    truth = reference(case, operands)
    c = accuracy_constant(case.force_kernel, case.k)
    worst = excess(first, truth.out, truth.magnitude, c)
    worst_preact = torch.zeros_like(worst)
    if epilogue.preact:
        options = {
            "activation": epilogue.activation,
            "out_dtype": epilogue.out_dtype,
            "precision": mode.precision,
            "force_kernel": case.force_kernel,
        }
        if operands.up is None:
            fused, preact = torch.ops.tgemm._linear_preact(
                operands.a, operands.b.t(), operands.bias, operands.residual, **options
            )
        else:
            fused, preact, up = torch.ops.tgemm._linear_glu_preact(
                *glu_arguments(operands), **options
            )
            worst_preact = excess(up, truth.up, truth.up_magnitude, c)
        worst = torch.maximum(worst, excess(fused, truth.out, truth.magnitude, c))
        worst_preact = torch.maximum(
            worst_preact, excess(preact, truth.preact, truth.preact_magnitude, c)
        )
    used = constant_used(first, truth.out, truth.magnitude) / c
    return torch.stack([worst, guard, repeated, worst_preact, used])


class Ledger:
    """Collects the verdicts of many cases and reads them back once.

    Args:
        device: where the cases run.
        count: called with the number of problems when they have been verified.
    """

    def __init__(self, device: str, count: Callable[[int], None] = lambda problems: None) -> None:
        self.device = device
        self.worst = 0.0  # largest share of the contract that any verified case used
        # Largest share of the accuracy constant, by the kernel that was forced and the mode.
        self.constants: dict[str, float] = {}
        self._count = count
        self._drawn = 0
        self._cases: list[Case] = []
        self._verdicts: list[Tensor] = []

    def check(self, case: Case) -> None:
        """Runs one case; a wrong result shows in `verify`, an error is raised here, with the case."""
        self._drawn += 1
        case = dataclasses.replace(case, seed=case.seed or self._drawn)
        try:
            self._verdicts.append(check(case, self.device))
        except Exception as error:
            raise AssertionError(f"{case} (TGEMM_TEST_SEED={BASE_SEED}): {error}") from error
        self._cases.append(case)

    def verify(self) -> int:
        """Waits for all cases and returns their number.

        Raises:
            AssertionError: naming the first cases that broke a promise, and which.
        """
        if not self._cases:
            raise AssertionError("no problem was checked")
        verdicts = torch.stack(self._verdicts).cpu()
        failures = []
        for case, row in zip(self._cases, verdicts.tolist(), strict=True):
            *row, used = row
            family = (case.force_kernel or "automatic").partition(":")[0]
            key = f"{family} {case.mode}"
            self.constants[key] = max(self.constants.get(key, 0.0), used)
            limits = (1.0, 0.0, 0.0, 1.0)
            broken = [
                f"{name}: {value:.3g}"
                for name, value, limit in zip(VERDICTS, row, limits, strict=True)
                if not value <= limit
            ]
            if broken:
                failures.append(f"{case}\n    {'; '.join(broken)}")
        checked = len(self._cases)
        self.worst = max(self.worst, verdicts[:, 0].max().item())
        self._cases.clear()
        self._verdicts.clear()
        if failures:
            listed = "\n".join(failures[:10])
            raise AssertionError(
                f"{len(failures)} of {checked} problems failed (TGEMM_TEST_SEED={BASE_SEED}):\n"
                f"{listed}"
            )
        self._count(checked)
        return checked
