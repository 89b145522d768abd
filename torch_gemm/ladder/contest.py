"""The measurement: rungs, their twins and cuBLAS, timed in turn and checked against FP64.

Errors are against the FP64 product of the same inputs, as shares of that product's root mean square: the
largest deviation of any element, and the root mean square of all deviations.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_gemm
from torch_gemm import measure
from torch_gemm.console import first_line
from torch_gemm.ladder.rungs import RUNGS, Rung
from torch_gemm.measure import Runner
from torch_gemm.notation import DTYPES
from torch_gemm.peak import peaks

LAYOUTS = ("nn", "nt")
CUBLAS = "torch (cuBLAS)"
CONTROL = "torch (control)"
CUBLAS_TF32 = "torch (cuBLAS, TF32)"


@dataclass
class Contender:
    """A row of the result, and what computes it; None if it was refused, with row["refused"] the reason."""

    row: dict[str, Any]
    call: Callable[[Tensor, Tensor], Tensor] | None


def make_operands(size: int, dtype: str, layout: str, device: str) -> tuple[Tensor, Tensor]:
    """Random A (size, size), row-major, and B (size, size).

    Args:
        size: M = N = K.
        dtype: a key of DTYPES.
        layout: "nn": B is row-major, too; "nt": B is the transpose of a row-major weight, as in nn.Linear.
        device: where they are.
    """
    a, b = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    return a, b if layout == "nn" else b.t()


def multiply(a: Tensor, b: Tensor, precision: str | None, force: str) -> Tensor:
    """The product by the kernel that `force` names."""
    return torch.ops.tgemm.matmul(a, b, precision=precision, force_kernel=force)


def plan_of(a: Tensor, b: Tensor, precision: str | None, force: str) -> dict[str, Any]:
    """How `multiply` would run: "plan" and, where known, "resources"; or "error", a sentence."""
    try:
        return json.loads(torch.ops.tgemm._plan(a, b, precision=precision, force_kernel=force))
    except RuntimeError as error:
        return {"error": first_line(error)}


def contenders_of(a: Tensor, b: Tensor, dtype: str, compute_capability: int) -> list[Contender]:
    """Everything to measure on operands like `a` and `b`: rungs, each before its twin, and torch, last."""
    plan = partial(plan_of, a, b)
    kernels = {kernel["name"]: kernel for kernel in torch_gemm.kernels()}
    contenders = []
    for rung in RUNGS:
        configs = _forced_configs(kernels.get(rung.kernel))
        row = _describe(rung, dtype, compute_capability)
        if rung.twin is None:
            contenders.append(_contender(row, list(configs.values()), plan))
            continue
        name = f"{rung.kernel}:{rung.twin.config}"
        forced = [configs.pop(name)] if name in configs else []
        contenders.append(_contender(row, list(configs.values()), plan))
        twin = {**row, "name": name, "idea": rung.twin.idea, "twin_of": rung.kernel}
        contenders.append(_contender({**twin, "a100_over_naive": None}, forced, plan))
    contenders += [
        Contender({"name": name, "idea": idea, "unit": unit}, _torch_matmul(unit == "tf32"))
        for name, idea, unit in _torch_rows(dtype)
    ]
    return contenders


def _forced_configs(kernel: dict[str, Any] | None) -> dict[str, str]:
    """Kernel and configuration to `force_kernel`, unsplit, so that a call is exactly one launch."""
    if kernel is None:
        return {}
    names = [f"{kernel['name']}:{config['name']}" for config in kernel["configs"]]
    return {name: name + (",split_k=1" if kernel["splits_k"] else "") for name in names}


def _describe(rung: Rung, dtype: str, compute_capability: int) -> dict[str, Any]:
    emulated = rung.emulated(compute_capability)
    return {
        "name": rung.kernel,
        "idea": rung.idea,
        "twin_of": None,
        "refines": rung.refines,
        "a100_over_naive": rung.a100,
        "unit": "tensor" if rung.tensor_cores and not emulated else "fma",
        "emulated": emulated,
        "precision": rung.precision(dtype),
    }


def _contender(
    row: dict[str, Any], forced: list[str], plan: Callable[[str | None, str], dict[str, Any]]
) -> Contender:
    """What `row` describes in the first of the `forced` configurations that takes the operands."""
    reasons = []
    for force in forced:
        planned = plan(row["precision"], force)
        if "plan" in planned:
            chosen = {
                "force": force,
                "plan": planned["plan"],
                "resources": planned.get("resources"),
            }
            call = partial(multiply, precision=row["precision"], force=force)
            return Contender({**row, **chosen}, call)
        reasons.append(planned.get("error", "it has no plan"))
    refused = reasons[0] if reasons else f"there is no kernel {row['name']} in this build"
    return Contender({**row, "refused": refused}, None)


def _torch_rows(dtype: str) -> list[tuple[str, str, str]]:
    """(name, idea, unit) of what torch does, cuBLAS last."""
    unit = "fma" if dtype == "fp32" else "tensor"
    tf32 = [(CUBLAS_TF32, "FP32 rounded to TF32", "tf32")] if dtype == "fp32" else []
    return [(CONTROL, "the same once more", unit), *tf32, (CUBLAS, "torch.matmul", unit)]


def _torch_matmul(tf32: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def run(a: Tensor, b: Tensor) -> Tensor:
        with measure.tf32_allowed(tf32):
            return torch.matmul(a, b)

    return run


def needed_bytes(size: int, dtype: str, l2_bytes: int) -> int:
    """Memory that `measure_ladder` takes at most."""
    elements = size * size
    matrix = elements * DTYPES[dtype].itemsize
    sets = measure.input_sets(3 * matrix, l2_bytes)
    contenders = len(RUNGS) + sum(rung.twin is not None for rung in RUNGS) + 3
    # Every graph keeps its outputs, and those of its warm-up stay cached for the stream that it ran on.
    # In FP64: both operands, the reference, a difference and its square.
    return sets * (2 + 2 * contenders) * matrix + 5 * 8 * elements


def measure_ladder(
    size: int,
    dtype: str,
    layout: str,
    runner: Runner,
    rounds: int,
    profiler: Callable[[list[Contender]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Times and checks every contender on C (size, size) = A (size, size) @ B (size, size).

    Args:
        size, dtype, layout: see `make_operands`.
        runner: measures.
        rounds: turns of each contender.
        profiler: called before the timing with what will run; its result is stored as "profile".

    Returns:
        {"name", "stamp", "size", "dtype", "layout", "rounds", "input_sets", "peaks" (TFLOP/s),
        "control_ratio" (torch's time over torch's), "rows"} and "profile" if there is a `profiler`. Rows
        hold a contender's description and "refused" or "us", "rounds_us", "tflops", "over_naive",
        "over_refined", "of_peak" (of the unit it runs on; None if unknown), "largest_error" and
        "rms_error" (see the head of this file).
    """
    stamp = measure.stamp(runner)
    device = stamp["device"]
    problem_bytes = 3 * size * size * DTYPES[dtype].itemsize
    torch.manual_seed(0)
    inputs = [
        make_operands(size, dtype, layout, runner.device)
        for _ in range(measure.input_sets(problem_bytes, runner.l2_bytes()))
    ]
    contenders = contenders_of(*inputs[0], dtype, device["compute_capability"] if device else 0)
    profiled = {"profile": profiler(contenders)} if profiler else {}

    reference = inputs[0][0].double() @ inputs[0][1].double()
    replays = {}
    for contender in contenders:
        if contender.call is None:
            continue
        row = contender.row
        try:
            row |= errors_of(contender.call(*inputs[0]), reference)
        except RuntimeError as error:
            # Without memory or without torch's own product there is no result.
            if isinstance(error, torch.OutOfMemoryError) or "force" not in row:
                raise
            row["refused"] = first_line(error)
            continue
        replays[row["name"]] = runner.capture(
            lambda call=contender.call: [call(a, b) for a, b in inputs]
        )
    times = measure.time_in_turn(replays, runner, rounds)

    rows = [contender.row for contender in contenders]
    peak = peaks(device) if device else {}
    for row in rows:
        if row["name"] in times:
            rounds_us = [ms * 1e3 / len(inputs) for ms in times[row["name"]]]
            row |= _speed(rounds_us, size, peak.get(row["unit"]))
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        if "us" in row:
            row["over_naive"] = _ratio(by_name["naive"], row)
            row["over_refined"] = _ratio(by_name.get(row.get("refines")), row)
    control = by_name.pop(CONTROL)
    return {
        "name": f"ladder_{layout}_{dtype}",
        "stamp": stamp,
        "size": size,
        "dtype": dtype,
        "layout": layout,
        "rounds": rounds,
        "input_sets": len(inputs),
        "peaks": {unit: round(tflops, 1) for unit, tflops in peak.items()},
        "control_ratio": _ratio(by_name[CUBLAS], control),
        "rows": [row for row in rows if row is not control],
        **profiled,
    }


def errors_of(actual: Tensor, reference: Tensor) -> dict[str, float]:
    """Largest and root-mean-square deviation from an FP64 reference, as shares of the reference's RMS."""
    scale = reference.square().mean().sqrt()
    difference = actual.double().sub_(reference)
    return {
        "largest_error": float(f"{(difference.abs().max() / scale).item():.3g}"),
        "rms_error": float(f"{(difference.square_().mean().sqrt() / scale).item():.3g}"),
    }


def _speed(rounds_us: list[float], size: int, peak: float | None) -> dict[str, Any]:
    us = statistics.median(rounds_us)
    tflops = 2.0 * size**3 / us * 1e-6
    return {
        "us": round(us, 3),
        "rounds_us": [round(turn, 3) for turn in rounds_us],
        "tflops": round(tflops, 3),
        "of_peak": round(tflops / peak, 4) if peak else None,
    }


def _ratio(slow: dict[str, Any] | None, fast: dict[str, Any]) -> float | None:
    if slow is None or "us" not in slow:
        return None
    return round(slow["us"] / fast["us"], 4)
