"""The audit of one product: what each precision costs in accuracy and gains in speed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_gemm import measure, notation, numerics, ops
from torch_gemm.auditing.measures import Census, Errors, Product, compare
from torch_gemm.console import first_line
from torch_gemm.info import why_no_gpu

ROUNDS = 5


@dataclass
class Way:
    """One way to multiply. Where it is refused there are no errors and no time."""

    name: str
    precision: str | None  # None for torch's
    kernel: str | None = None
    refused: str | None = None  # in the op's own words
    errors: Errors = field(default_factory=Errors)
    us: float | None = None  # median; None on the CPU
    speed_up: float | None = None  # over torch in true FP32, or over torch for 16-bit operands

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = {name: value for name, value in vars(self).items() if name != "errors"}
        return {**plain, "errors": None if self.refused else self.errors.to_dict()}


@dataclass(frozen=True)
class GemmAudit:
    """What `audit_gemm` found. Prints as a table."""

    shape: tuple[int, int, int]  # M, N, K
    dtype: torch.dtype
    device: str
    inputs: Census  # of both operands
    ways: list[Way]
    stamp: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether no way of tgemm's breaks the numerics contract of its precision."""
        return all(way.errors.ok for way in self.ways if way.precision is not None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": "audit_gemm",
            "stamp": self.stamp,
            "shape": list(self.shape),
            "dtype": notation.plain(self.dtype),
            "device": self.device,
            "ok": self.ok,
            "inputs": vars(self.inputs),
            "ways": [way.to_dict() for way in self.ways],
        }

    def __str__(self) -> str:
        from torch_gemm.auditing.tables import gemm_text

        return gemm_text(self)


def sizes_of(shape: Any) -> tuple[int, int, int]:
    """M, N and K of "2048x4096x1024" or of those numbers.

    Raises:
        ValueError: it is of another form, a batch, or has a size that no product has.
    """
    *batch, m, n, k = notation.sizes_of(shape)
    if batch and batch != [1]:
        raise ValueError(f"{shape!r} is a batch, and audit_gemm audits one product")
    return m, n, k


def operands_of(a: Any, b: Any, device: str | None) -> tuple[Tensor, Tensor]:
    """The operands of `audit_gemm` from its arguments."""
    if b is None:
        m, n, k = sizes_of(a)
        where = _device_of(device)
        generator = torch.Generator(where).manual_seed(0)
        first = torch.randn(m, k, device=where, generator=generator)
        return first, torch.randn(n, k, device=where, generator=generator).t()
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, Tensor):
            raise TypeError(
                f"audit_gemm: {name} must be a Tensor, and is a {type(operand).__name__}"
            )
        if operand.is_nested or operand.layout is not torch.strided or operand.is_meta:
            kind = "nested" if operand.is_nested else notation.plain(operand.layout)
            raise TypeError(
                f"audit_gemm: {name} is {'on meta' if operand.is_meta else kind}, and must be a strided "
                "tensor with numbers in it"
            )
        if operand.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(
                f"audit_gemm: {name} is {operand.dtype}, and must be float16, bfloat16 or float32"
            )
        if operand.dim() != 2:
            raise ValueError(f"audit_gemm: {name} has {operand.dim()} dimensions, and must have 2")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"audit_gemm: the inner sizes of a {tuple(a.shape)} and b {tuple(b.shape)} differ"
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(
            f"audit_gemm: a is {a.dtype} on {a.device} and b {b.dtype} on {b.device}; they must agree"
        )
    if 0 in (*a.shape, *b.shape):
        raise ValueError(
            f"audit_gemm: a {tuple(a.shape)} and b {tuple(b.shape)} have an empty size"
        )
    return a.detach(), b.detach()


def _device_of(device: Any) -> str:
    """The device that operands are drawn on.

    Raises:
        ValueError: it is none that can multiply.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"audit_gemm: device is {device!r}, and must be cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"audit_gemm: device is {device!r}, and there is no GPU: {why_no_gpu()}")
    return str(device)


def run(a: Tensor, b: Tensor) -> GemmAudit:
    """Errors of every way to multiply (M, K) by (K, N), and on a GPU times."""
    wide = a.dtype == torch.float32
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": partial(_torch, tf32=False)}
    ways = [Way("torch", None)]
    if wide and a.is_cuda:
        ways.append(Way("torch, TF32", None))
        calls["torch, TF32"] = partial(_torch, tf32=True)
    for precision in ops.PRECISIONS if wide else (None,):
        name = f"tgemm, {precision}" if precision else "tgemm"
        ways.append(Way(name, precision or "as given"))
        calls[name] = partial(_tgemm, precision=precision)

    census = Census()
    census.add(a)
    census.add(b)
    for way in ways:
        try:
            out = calls[way.name](a, b)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            way.refused = first_line(error)
            del calls[way.name]
            continue
        precision = way.precision if way.precision in ops.PRECISIONS else None
        if a.is_cuda and way.precision is not None:
            plan = torch.ops.tgemm._plan(a, b, precision=precision)
            way.kernel = json.loads(plan).get("plan")
        # The CPU has no TF32: it multiplies the operands as they are.
        rounding = None if precision == "tf32" and not a.is_cuda else precision
        if way.name == "torch, TF32":
            rounding = "tf32"
        c = numerics.accuracy_constant(way.kernel, a.shape[1])
        compare(Product(a, b, precision=rounding, c=c), [(way.errors, out)])
    if a.is_cuda:
        _time(a, b, ways, calls)
    runner = measure.CudaRunner() if a.is_cuda else measure.CpuRunner()
    shape = (a.shape[0], b.shape[1], a.shape[1])
    return GemmAudit(shape, a.dtype, a.device.type, census, ways, measure.stamp(runner))


def _torch(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    with measure.tf32_allowed(tf32):
        return torch.matmul(a, b)


def _tgemm(a: Tensor, b: Tensor, precision: str | None) -> Tensor:
    return ops.matmul(a, b, precision=precision)


def _time(
    a: Tensor, b: Tensor, ways: list[Way], calls: dict[str, Callable[[Tensor, Tensor], Tensor]]
) -> None:
    runner = measure.CudaRunner()
    out_bytes = a.shape[0] * b.shape[1] * a.element_size()
    problem_bytes = a.numel() * a.element_size() + b.numel() * b.element_size() + out_bytes
    count = measure.input_sets(problem_bytes, runner.l2_bytes())
    sets = [(a, b)] + [(_copy(a), _copy(b)) for _ in range(count - 1)]
    replays = {
        name: runner.capture(lambda call=call: [call(*one_set) for one_set in sets])
        for name, call in calls.items()
    }
    times = measure.time_in_turn(replays, runner, ROUNDS)
    for way in ways:
        if way.name in times:
            way.us = statistics.median(times[way.name]) * 1e3 / count
    base = ways[0].us
    for way in ways:
        way.speed_up = base / way.us if way.us and base else None


def _copy(matrix: Tensor) -> Tensor:
    """In memory of its own, with the same strides."""
    return torch.empty_like(matrix, memory_format=torch.preserve_format).copy_(matrix)
