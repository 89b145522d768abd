"""Checks every kernel on this machine's GPU against FP64, and whether the GPU is as fast as it should be."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import torch_gemm
from torch_gemm import _library, measure, numerics, ops
from torch_gemm.console import CommandError, check_output, first_line, open_console, write_output
from torch_gemm.info import why_no_gpu
from torch_gemm.peak import peaks
from torch_gemm.windows import GUARD_VALUE, Alignment, place, whole_of

if TYPE_CHECKING:
    from rich.table import Table

# Operands of each dtype, and how FP32 is multiplied.
MODES = {
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    **{f"fp32/{precision}": (torch.float32, precision) for precision in ops.PRECISIONS},
}
# Below these shares of its peaks a card is not itself: another process, a power limit, wrong clocks.
LOW_BANDWIDTH, LOW_TENSOR = 0.55, 0.25


class CheckError(RuntimeError):
    """There is nothing to check, in one sentence."""


@dataclass(frozen=True)
class Problem:
    """One product in poisoned memory: NaNs around and in place of the operands' neighbours and the output.

    `layout` is a letter each for a (M, K) and b (K, N): "n" lies row-major, "t" column-major. `fused` adds
    a bias and gelu; `gated` multiplies silu of the product by another, as linear_glu.
    """

    m: int
    n: int
    k: int
    mode: str
    layout: str = "nt"
    odd: bool = False  # odd leading strides, and a start that is not aligned
    fused: bool = False
    gated: bool = False
    force_kernel: str | None = None

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k} {self.mode} {self.layout}"]
        words += [name for name in ("odd", "fused", "gated") if getattr(self, name)]
        return " ".join(words)


@dataclass
class KernelCheck:
    """One configuration of a kernel, or what is chosen automatically, over all its problems."""

    name: str
    modes: list[str] = field(default_factory=list)
    problems: int = 0
    share: float = 0.0  # the largest error as a share of what the numerics contract allows
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether it ran, and every result was right."""
        return not self.failures


@dataclass(frozen=True)
class Speed:
    """What was measured of the card, beside its peak in the same unit."""

    what: str
    value: float
    peak: float | None
    unit: str
    low: bool


@dataclass(frozen=True)
class Check:
    """What `check` found. Prints as a table."""

    card: str
    kernels: list[KernelCheck]
    speeds: list[Speed]
    seconds: float
    stamp: dict[str, Any] = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether every result was right. Speed does not count."""
        return all(kernel.ok for kernel in self.kernels)

    @property
    def verdict(self) -> str:
        """One sentence."""
        problems = sum(kernel.problems for kernel in self.kernels)
        wrong = [kernel.name for kernel in self.kernels if not kernel.ok]
        if wrong:
            names = ", ".join(wrong[:5]) + ("" if len(wrong) <= 5 else ", ...")
            return f"FAILED: {len(wrong)} of {len(self.kernels)} kernel configurations: {names}."
        return (
            f"Passed: {len(self.kernels)} kernel configurations computed {problems} problems within the "
            f"numerics contract, the same bits twice, and touched nothing else ({self.seconds:.0f} s)."
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        kernels = [
            {**vars(kernel), "ok": kernel.ok, "share": _finite(kernel.share)}
            for kernel in self.kernels
        ]
        return {
            "kind": "check",
            "stamp": self.stamp,
            "ok": self.ok,
            "verdict": self.verdict,
            "seconds": self.seconds,
            "kernels": kernels,
            "speeds": [vars(speed) for speed in self.speeds],
        }

    def __str__(self) -> str:
        lines = [
            f"{kernel.name}: {kernel.problems} problems, {kernel.share:.0%} of the contract"
            for kernel in self.kernels
            if kernel.ok
        ]
        lines += [
            f"{kernel.name}: {failure}" for kernel in self.kernels for failure in kernel.failures
        ]
        return "\n".join([self.card, *lines, *map(speed_text, self.speeds), self.verdict])


def _finite(share: float) -> float | None:
    return share if math.isfinite(share) else None  # JSON has no infinity


def check(*, progress: Callable[[str], None] | None = None) -> Check:
    """Runs one small problem or a few on every kernel that the current GPU gets, against FP64.

    Each configuration is forced on each kind of operands that it takes: sizes that end inside a tile, odd
    strides, K split, a fused epilogue. Operands lie amid NaNs, outputs are filled with NaN and lie amid a
    pattern that has to stay; each problem runs twice and must give the same bits. Then what is chosen
    automatically, a CUDA graph, and how fast the card multiplies and reads. Takes a minute or two.

    Args:
        progress: called with the name of each configuration before it runs.

    Raises:
        CheckError: there is no GPU, or no kernels for it.
    """
    if _library.cuda_missing is not None:
        raise CheckError(_library.cuda_missing)
    if not torch.cuda.is_available():
        raise CheckError(f"The kernels are checked on a GPU, and there is none: {why_no_gpu()}")
    start = time.perf_counter()
    try:
        device = json.loads(torch.ops.tgemm._device(torch.cuda.current_device()))
    except RuntimeError as error:  # an old driver, for one
        raise CheckError(f"The kernels cannot run on this GPU: {first_line(error)}") from error
    families = [kernel for kernel in torch_gemm.kernels() if kernel["name"] in device["kernels"]]
    with torch.inference_mode():
        checked = check_kernels(families, "cuda", progress or (lambda name: None))
        speeds = measure_speeds(device)
    seconds = round(time.perf_counter() - start, 1)
    return Check(device["name"], checked, speeds, seconds, measure.stamp(measure.CudaRunner()))


def check_kernels(
    families: list[dict[str, Any]], device: str, progress: Callable[[str], None]
) -> list[KernelCheck]:
    """All configurations of some rows of `torch_gemm.kernels()`, and the automatic choice."""
    checked = []
    for family in families:
        for config in family["configs"]:
            name = f"{family['name']}:{config['name']}"
            progress(name)
            checked.append(check_configuration(name, config, family["splits_k"], device))
    progress("automatic")
    automatic = KernelCheck("automatic")
    for problem in automatic_problems():
        run_into(automatic, problem, device)
    if device == "cuda":
        automatic.failures += check_graph()
    return [*checked, automatic]


def check_configuration(
    name: str, config: dict[str, Any], splits_k: bool, device: str
) -> KernelCheck:
    """One configuration, on every kind of operands that it takes."""
    checked, refused = KernelCheck(name), "it was given no problem"
    for problem in problems_for(name, config, splits_k):
        refused = run_into(checked, problem, device) or refused
    if checked.problems == 0 and not checked.failures:
        checked.failures.append(f"it ran none of the problems: {refused}")
    return checked


def problems_for(name: str, config: dict[str, Any], splits_k: bool) -> Iterator[Problem]:
    """What to try on a configuration; it may refuse some, because no kernel takes everything."""
    m, n, k = config["block_m"], config["block_n"], config["block_k"]
    forced = f"{name},split_k=1" if splits_k else name
    for mode in MODES:
        # Sizes that end inside a tile; rows and strides in whole vectors of 16 bytes, then in odd ones.
        yield Problem(m + 8, n + 24, 2 * k + 16, mode, force_kernel=forced)
        yield Problem(m + 8, n + 24, 3 * k + 8, mode, fused=True, force_kernel=forced)
        yield Problem(m + 8, n + 24, 2 * k + 16, mode, "nn", force_kernel=forced)
        yield Problem(m + 3, n + 5, 2 * k + 7, mode, odd=True, fused=True, force_kernel=forced)
        sizes = (max(m - 1, 1), 2 * n + 1, max(k - 1, 1))
        yield Problem(*sizes, mode, "tn", odd=True, force_kernel=forced)
        if splits_k:
            split = f"{name},split_k=3"
            yield Problem(m + 8, n + 24, 5 * k + 8, mode, force_kernel=split)
            yield Problem(m + 3, n + 5, 4 * k + 7, mode, odd=True, force_kernel=split)


def automatic_problems() -> Iterator[Problem]:
    """One row, a few, many; few tiles with a long K; odd sizes; gated."""
    for mode in MODES:
        yield Problem(1, 256, 512, mode)
        yield Problem(16, 1024, 1024, mode, fused=True)
        yield Problem(517, 1032, 776, mode, fused=True)
        yield Problem(64, 64, 16384, mode)
        yield Problem(131, 263, 517, mode, odd=True)
        yield Problem(100, 136, 264, mode, "tn")
        yield Problem(48, 264, 520, mode, gated=True)


def run_into(checked: KernelCheck, problem: Problem, device: str) -> str | None:
    """Adds a problem's result; where it is refused, adds nothing and returns the reason."""
    try:
        share, faults = run_problem(problem, device)
    except torch.OutOfMemoryError as error:
        raise CheckError(f"the GPU's memory does not suffice: {first_line(error)}") from error
    except RuntimeError as error:
        reason = first_line(error)
        if "CUDA error" in reason:  # after which nothing runs in this process
            raise CheckError(f"{checked.name} on {problem}: {reason}") from error
        # Only a forced kernel, or a precision, may be refused. What is chosen and then not launched "could
        # not run", in the op's words.
        refusable = problem.force_kernel or MODES[problem.mode][1] not in (None, "ieee")
        if not refusable or "could not run" in reason:
            checked.failures.append(f"{problem}: {reason}")
        return reason
    checked.problems += 1
    checked.share = max(checked.share, share)
    if problem.mode not in checked.modes:
        checked.modes.append(problem.mode)
    if not share <= 1.0:
        faults.append(f"the error is {share:.3g} times what the contract allows")
    if faults:
        checked.failures.append(f"{problem}: {'; '.join(faults)}")
    return None


@dataclass(frozen=True)
class Operands:
    """Of a problem: a (M, K), b and up (K, N), bias (N,)."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    up: Tensor | None


def run_problem(problem: Problem, device: str) -> tuple[float, list[str]]:
    """Runs a problem twice.

    Returns:
        The largest error as a share of what the contract allows, and what else was wrong.
    """
    dtype, precision = MODES[problem.mode]
    operands = draw(problem, device)
    alignment = Alignment(offset=1, odd_stride=True) if problem.odd else Alignment()
    poison = torch.full((problem.m, problem.n), math.nan, dtype=dtype, device=device)
    out = place(poison, alignment, False, GUARD_VALUE)
    call(problem, operands, out)
    first = out.clone()
    out.fill_(math.nan)
    call(problem, operands, out)
    # On the CPU, ATen multiplies FP32 as it is in place of TF32.
    rounding = None if precision == "tf32" and device == "cpu" else precision
    truth = numerics.reference(
        operands.a,
        operands.b,
        bias=operands.bias,
        up=operands.up,
        activation="gelu" if problem.fused else "silu" if problem.gated else None,
        precision=rounding,
    )
    c = numerics.accuracy_constant(problem.force_kernel, problem.k)
    share = numerics.share_of_contract(first, truth.out, truth.magnitude, c)
    share = torch.where(first.isfinite(), share, math.inf).max().item()
    faults = []
    if not torch.equal(first, out) and math.isfinite(share):  # NaN is not equal to itself
        faults.append("two runs gave different bits")
    out.fill_(GUARD_VALUE)
    if (whole_of(out) != GUARD_VALUE).any():
        faults.append("memory around the output was overwritten")
    return share, faults


def draw(problem: Problem, device: str) -> Operands:
    """Normally distributed operands, the same for the same problem, each amid NaNs."""
    dtype, precision = MODES[problem.mode]
    generator = torch.Generator(device).manual_seed(problem.m * 7919 + problem.n * 31 + problem.k)
    alignment = Alignment(offset=1, odd_stride=True) if problem.odd else Alignment()

    def matrix(rows: int, columns: int, column_major: bool, scale: float = 1.0) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device) * scale
        if precision == "tf32":
            values = numerics.without_ties(values)
        return place(values.to(dtype), alignment, column_major, math.nan)

    m, n, k, (of_a, of_b) = problem.m, problem.n, problem.k, problem.layout
    return Operands(
        matrix(m, k, of_a == "t"),
        matrix(k, n, of_b == "t"),
        matrix(1, n, False)[0] if problem.fused else None,
        # Sums of order 1, which keep the products with the gates within FP16.
        matrix(k, n, of_b == "t", k**-0.5) if problem.gated else None,
    )


def call(problem: Problem, operands: Operands, out: Tensor) -> None:
    """Computes a problem into `out`."""
    tgemm, a, b = torch.ops.tgemm, operands.a, operands.b
    options = {"precision": MODES[problem.mode][1], "force_kernel": problem.force_kernel}
    if problem.gated:
        tgemm.linear_glu.out(a, b.t(), operands.up.t(), activation="silu", out=out, **options)
    elif problem.fused:
        tgemm.linear.out(a, b.t(), operands.bias, activation="gelu", out=out, **options)
    else:
        tgemm.matmul.out(a, b, out=out, **options)


def check_graph() -> list[str]:
    """What is wrong with a product that a CUDA graph replays, if anything."""
    operands = draw(Problem(64, 512, 512, "fp16"), "cuda")
    expected = torch.ops.tgemm.matmul(operands.a, operands.b)
    outs: list[Tensor] = []

    def work() -> list[Tensor]:
        outs[:] = [torch.ops.tgemm.matmul(operands.a, operands.b)]
        return outs

    replay = measure.CudaRunner().capture(work)
    outs[0].fill_(math.nan)
    replay()
    return [] if torch.equal(outs[0], expected) else ["a CUDA graph gave other bits"]


# --- Speed ------------------------------------------------------------------------------------------


def measure_speeds(device: dict[str, Any]) -> list[Speed]:
    """How fast the card copies and multiplies, beside what it should do."""
    runner = measure.CudaRunner()
    limit = runner.free_bytes() // 8
    size = 4096 if limit > 2**29 else 1024
    return [
        _speed(
            "memory bandwidth of a copy",
            _copy_speed(runner, min(2**28, limit // 2)),
            device["memory_bytes_per_us"] * 1e-6 or None,
            "TB/s",
            LOW_BANDWIDTH,
        ),
        _speed(
            f"{size} x {size} x {size}, fp16",
            _product_speed(runner, size),
            peaks(device).get("tensor"),
            "TFLOP/s",
            LOW_TENSOR,
        ),
    ]


def _copy_speed(runner: measure.Runner, elements: int) -> float:
    source = torch.randn(elements, device="cuda").half()
    target = torch.empty_like(source)
    ms = _fastest(runner, lambda: [target.copy_(source)])
    return 2 * source.nbytes / ms * 1e-9


def _product_speed(runner: measure.Runner, size: int) -> float:
    a, b = (torch.randn(size, size, device="cuda").half() for _ in range(2))
    ms = _fastest(runner, lambda: [torch.ops.tgemm.matmul(a, b.t())])
    return 2e-9 * size**3 / ms


def _fastest(runner: measure.Runner, work: Callable[[], list[Tensor]]) -> float:
    """Milliseconds of the fastest of several turns of some 20 ms."""
    replay = runner.capture(work)
    once = min(runner.milliseconds(replay, 1) for _ in range(2))
    repeats = max(1, round(20.0 / once))
    return min(runner.milliseconds(replay, repeats) for _ in range(5))


def _speed(what: str, value: float, peak: float | None, unit: str, low: float) -> Speed:
    return Speed(what, round(value, 3), peak, unit, peak is not None and value < low * peak)


def speed_text(speed: Speed) -> str:
    """A measurement for people."""
    text = f"{speed.what}: {speed.value:.3g} {speed.unit}"
    if speed.peak is not None:
        text += f", {speed.value / speed.peak:.0%} of the card's {speed.peak:.3g}"
    if speed.low:
        text += ": LOW; is another process using the GPU, or are its clocks or its power limited?"
    return text


# --- python -m torch_gemm check ----------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m torch_gemm check``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="the whole result")


def run(arguments: argparse.Namespace) -> int:
    """Checks, prints and stores.

    Returns:
        The exit status: 1 if a result was wrong.

    Raises:
        CommandError: there is no GPU, a package is missing or the file cannot be written.
    """
    console = open_console()
    if arguments.json is not None:
        check_output(arguments.json)
    try:
        with console.status("checking the kernels") as status:
            result = check(progress=lambda name: status.update(f"checking {name}"))
    except CheckError as error:
        raise CommandError(str(error)) from error
    console.print(_table(result))
    for kernel in result.kernels:
        for failure in kernel.failures:
            console.print(f"{kernel.name}: {failure}", markup=False)
    for speed in result.speeds:
        console.print(speed_text(speed), markup=False)
    console.print(result.verdict, style="bold green" if result.ok else "bold red")
    if arguments.json is not None:
        text = json.dumps(result.to_dict(), indent=1) + "\n"
        write_output(arguments.json, text.encode())
        console.print(f"written: {arguments.json}", markup=False)
    return 0 if result.ok else 1


def _table(result: Check) -> Table:
    """A line for each kernel: the worst of its configurations."""
    from rich import box
    from rich.table import Table

    table = Table(title=result.card, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("kernel", no_wrap=True)
    table.add_column("operands")
    for heading in ("configurations", "problems", "of contract", "verdict"):
        table.add_column(heading, justify="right")
    families: dict[str, list[KernelCheck]] = {}
    for kernel in result.kernels:
        families.setdefault(kernel.name.partition(":")[0], []).append(kernel)
    for name, kernels in families.items():
        modes = [mode for mode in MODES if any(mode in kernel.modes for kernel in kernels)]
        ok = all(kernel.ok for kernel in kernels)
        table.add_row(
            name,
            ", ".join(modes),
            str(len(kernels)),
            str(sum(kernel.problems for kernel in kernels)),
            f"{max(kernel.share for kernel in kernels):.0%}",
            "passed" if ok else "FAILED",
        )
    return table
