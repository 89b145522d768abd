"""Measures GEMMs with torch and tgemm side by side; how is said in torch_gemm/measure.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import torch_gemm
from torch_gemm.bench.cublaslt import CublasLtError, Linear
from torch_gemm.bench.shapes import AGAINST, COMPILED, LT, QUACK, Shape, shape_of
from torch_gemm.measure import (
    Runner,
    input_sets,
    stamp,
    tf32_allowed,
    time_in_turn,
)
from torch_gemm.notation import DTYPES

STORAGE = DTYPES | {"tf32": torch.float32, "3xtf32": torch.float32}
PRECISIONS = {"fp32": "ieee", "tf32": "tf32", "3xtf32": "3xtf32"}

# x (M, K), weight (N, K), and bias (N,) or residual (M, N) if there is one; of a batch, x (batch, M, K) and
# weight (batch, N, K) or (1, N, K); with heads, x (batch / heads, heads, M, K) and weight likewise, or, where
# heads share a weight, x (batch / heads, heads / group, group, M, K) and weight with 1 in place of the group.
Inputs = tuple[Tensor, ...]
Contender = Callable[..., Tensor]


def torch_contender(shape: Shape) -> Contender:
    """What a user of torch writes."""
    epilogue, linear = shape.epilogue, torch.nn.functional.linear
    if shape.batch > 1:
        multiply = torch.matmul if shape.heads or shape.group > 1 else torch.bmm
        return lambda x, weight: multiply(x, weight.mT)
    if epilogue == "gelu":
        return lambda x, weight, bias: torch.nn.functional.gelu(linear(x, weight, bias))
    if epilogue == "silu":
        return lambda x, weight: torch.nn.functional.silu(linear(x, weight))
    if epilogue == "residual":
        return lambda x, weight, residual: linear(x, weight) + residual
    if epilogue == "swiglu":
        gated = torch.compile(silu_times, dynamic=False)
        return lambda x, weight: gated(linear(x, weight))
    return lambda x, weight, *bias: linear(x, weight, *bias)


def silu_times(packed: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the columns."""
    gate, up = packed.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def tgemm_arguments(shape: Shape, inputs: Inputs) -> tuple[Sequence[Tensor | None], dict[str, Any]]:
    """Operands and options of tgemm.linear, of linear_glu for "swiglu", or of matmul for a batch."""
    options = {"precision": PRECISIONS.get(shape.dtype)}
    x, weight, *rest = inputs
    if shape.batch > 1:
        return (x, weight.mT), options
    if shape.epilogue == "swiglu":
        return (x, *weight.chunk(2)), options
    if shape.epilogue in ("gelu", "silu"):
        options["activation"] = shape.epilogue
    return (x, weight, *([None] if shape.epilogue == "residual" else []), *rest), options


def contenders_of(shape: Shape, forced: Sequence[str]) -> dict[str, Contender]:
    """torch, torch once more as a control, tgemm's own choice, and tgemm with each forced kernel."""
    op = torch.ops.tgemm.linear_glu if shape.epilogue == "swiglu" else torch.ops.tgemm.linear
    if shape.batch > 1:
        op = torch.ops.tgemm.matmul

    def tgemm_contender(force: str | None) -> Contender:
        def run(*inputs: Tensor) -> Tensor:
            operands, options = tgemm_arguments(shape, inputs)
            return op(*operands, **options, force_kernel=force)

        return run

    in_torch = torch_contender(shape)
    contenders = {
        "torch": in_torch,
        "torch (control)": in_torch,
        "tgemm": tgemm_contender(None),
    }
    contenders |= {f"tgemm {force}": tgemm_contender(force) for force in forced}
    return contenders


def best_of_lt(shape: Shape, inputs: Sequence[Inputs], runner: Runner) -> Contender:
    """The fastest of the algorithms that cuBLASLt proposes for a plain product.

    Raises:
        CublasLtError: if it has none.
    """
    product = Linear(*inputs[0])

    def contender(algorithm: Any) -> Contender:
        return lambda x, weight: product(x, weight, algorithm)

    replays, contenders = {}, {}
    for i, algorithm in enumerate(product.algorithms):
        run = contenders[str(i)] = contender(algorithm)
        try:
            replays[str(i)] = runner.capture(lambda run=run: [run(*one_set) for one_set in inputs])
        except CublasLtError:  # not every proposal runs
            continue
    if not replays:
        raise CublasLtError(f"cuBLASLt has no algorithm for {shape}")
    times = time_in_turn(replays, runner, rounds=3)
    return contenders[min(times, key=lambda name: statistics.median(times[name]))]


def parse_against(text: str) -> list[str]:
    """The rivals that a text like "lt,compile" names; "torch", which always runs, may be among them.

    Raises:
        ValueError: if there is no such rival, or it is not installed.
    """
    against = [name for name in text.split(",") if name and name != "torch"]
    if unknown := set(against) - set(AGAINST):
        raise ValueError(f"--against knows {', '.join(AGAINST)}, not {', '.join(sorted(unknown))}")
    if "quack" in against and importlib.util.find_spec("quack") is None:
        raise ValueError("--against quack needs the package quack-kernels")
    return against


def rival_contenders(
    shape: Shape,
    against: Sequence[str],
    inputs: Sequence[Inputs],
    runner: Runner,
    refused: dict[str, str],
) -> dict[str, Contender]:
    """The contenders of AGAINST that can run a shape; the reason of one that might goes to `refused`."""
    rivals: dict[str, Contender] = {}
    plain = shape.epilogue == "" and shape.heads == 0 and shape.group == 1
    if "lt" in against and plain and runner.device == "cuda":
        try:
            rivals[LT] = best_of_lt(shape, inputs, runner)
        except CublasLtError as error:
            refused[LT] = str(error)
    if "compile" in against:
        # It is captured as the others are, so it needs no graphs of its own.
        compiled = torch.compile(
            torch_contender(shape), mode="max-autotune-no-cudagraphs", dynamic=False
        )
        rivals[COMPILED] = compiled
    if "quack" in against and plain and shape.dtype in ("fp16", "bf16"):
        rivals[QUACK] = quack_contender
    return rivals


def quack_contender(x: Tensor, weight: Tensor) -> Tensor:
    """QuACK's GEMM, which its first call for a shape autotunes.

    Raises:
        RuntimeError: whatever stops it; shapes that it does not take end in errors of many types.
    """
    from quack.gemm_interface import gemm

    try:
        return gemm(x, weight.mT)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def make_inputs(shape: Shape, device: str, l2_bytes: int) -> list[Inputs]:
    """Enough sets of random inputs that one pass over all of them leaves nothing useful in L2."""

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).to(STORAGE[shape.dtype])

    def matrix(rows: int, columns: int, group: int = 1) -> Tensor:
        stride = columns + shape.padding
        batch, heads = shape.batch // group, shape.heads // group
        storage = random(batch * rows * stride + shape.offset)
        if shape.batch == 1:
            return storage.as_strided((rows, columns), (stride, 1), shape.offset)
        if not shape.heads:
            sizes, strides = (batch, rows, columns), (rows * stride, stride, 1)
            return storage.as_strided(sizes, strides, shape.offset)
        sizes = (batch // heads, heads, rows, columns)
        strides = (rows * heads * stride, stride, heads * stride, 1)
        return storage.as_strided(sizes, strides, shape.offset)

    def one_set() -> Inputs:
        of_x, of_weight = shape.layout
        rows = shape.weight_rows
        x = matrix(shape.m, shape.k) if of_x == "n" else matrix(shape.k, shape.m).mT
        group = shape.group
        weight = (
            matrix(rows, shape.k, group) if of_weight == "t" else matrix(shape.k, rows, group).mT
        )
        if shape.heads and group > 1:
            x, weight = x.unflatten(1, (-1, group)), weight.unsqueeze(2)
        if shape.epilogue in ("bias", "gelu"):
            return x, weight, random(shape.n)
        if shape.epilogue == "residual":
            return x, weight, random(shape.m, shape.n)
        return x, weight

    return [one_set() for _ in range(input_sets(shape.bytes, l2_bytes))]


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value; a wrong kernel is no contender."""
    difference = (actual.float() - expected.float()).abs().max()
    return (difference / expected.float().abs().max()).item()


def measure(shape: Shape, against: Sequence[str], runner: Runner, rounds: int) -> dict:
    """One row of a result: microseconds a call of every contender, and what follows from them.

    `against` are keys of AGAINST. A forced kernel that cannot run the shape is listed under "refused" with its reason.
    """
    inputs = make_inputs(shape, runner.device, runner.l2_bytes())
    # Contenders of all shapes share their code, and after eight of them torch.compile would give up and run it
    # as it is.
    torch.compiler.reset()
    with tf32_allowed(shape.dtype == "tf32"):
        contenders = contenders_of(shape, shape.force)
        replays, differences, refused = {}, {}, {}
        contenders |= rival_contenders(shape, against, inputs, runner, refused)
        expected = contenders["torch"](*inputs[0])
        for name, contender in contenders.items():
            try:
                differences[name] = relative_difference(contender(*inputs[0]), expected)
            except RuntimeError as error:
                if name in ("torch", "tgemm"):
                    raise
                refused[name] = str(error).splitlines()[0]
                continue
            replays[name] = runner.capture(
                lambda run=contender: [run(*one_set) for one_set in inputs]
            )
        times = time_in_turn(replays, runner, rounds)

    microseconds = {
        name: statistics.median(milliseconds) * 1e3 / len(inputs)
        for name, milliseconds in times.items()
    }
    return {
        **dataclasses.asdict(shape),
        "input_sets": len(inputs),
        "chosen": plan_of(shape, inputs[0], runner),
        "contenders": {
            name: {
                "us": round(us, 3),
                "tflops": round(shape.flops / us * 1e-6, 2),
                "rounds_us": [round(ms * 1e3 / len(inputs), 3) for ms in times[name]],
                "largest_relative_difference": float(f"{differences[name]:.3g}"),
            }
            for name, us in microseconds.items()
        },
        "refused": refused,
        # Above 1: tgemm's own choice is faster than torch; than the best that is not tgemm.
        "ratio": round(microseconds["torch"] / microseconds["tgemm"], 4),
        "best_ratio": round(
            min(us for name, us in microseconds.items() if not name.startswith("tgemm"))
            / microseconds["tgemm"],
            4,
        ),
        "control_ratio": round(microseconds["torch"] / microseconds["torch (control)"], 4),
    }


def plan_of(shape: Shape, inputs: Inputs, runner: Runner) -> str | None:
    """The kernel that tgemm chooses for a shape."""
    if runner.device == "cpu":
        return None
    (x, weight, *rest), options = tgemm_arguments(shape, inputs)
    if shape.epilogue == "swiglu":
        plan = torch.ops.tgemm._linear_glu_plan(x, weight, *rest, **options)
    else:
        b = weight if shape.batch > 1 else weight.t()
        plan = torch.ops.tgemm._plan(x, b, *rest, **options)
    return json.loads(plan).get("plan")


def reason_against(shape: Shape, runner: Runner) -> str | None:
    """Why the op does not offer the precision that a shape asks for, in its own words; None if it does."""
    precision = PRECISIONS.get(shape.dtype)
    # Large enough to be worth a kernel of its own.
    a, b = (torch.ones(256, 256, device=runner.device) for _ in range(2))
    try:
        torch.ops.tgemm.matmul(a, b, precision=precision)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def run_suite(
    name: str,
    shapes: Sequence[Shape],
    against: Sequence[str],
    runner: Runner,
    rounds: int,
    show: Callable[[str], None] = print,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measures all shapes and shows a line for each as it goes; `save` gets the result so far after each.

    Returns:
        What is stored: {"name", "stamp", "rounds", "kernels", "rows"}, and with shapes whose precision this
        build does not have, or that do not fit into memory, "not_offered", by name, with a sentence.

    Raises:
        torch.OutOfMemoryError: none of the shapes fits.
    """
    start = time.perf_counter()
    rows, beyond_memory = [], None
    result: dict[str, Any] = {
        "name": name,
        "stamp": stamp(runner),
        "rounds": rounds,
        "kernels": torch_gemm.kernels() if runner.device == "cuda" else [],
        "rows": rows,
    }
    for shape in shapes:
        if reason := reason_against(shape, runner):
            result.setdefault("not_offered", {})[str(shape)] = reason
            show(f"{shape}: not offered: {reason}")
            continue
        try:
            row = measure(shape, against, runner, rounds)
        except torch.OutOfMemoryError as error:
            beyond_memory = error
            reason = f"out of memory: {str(error).splitlines()[0]}"
            result.setdefault("not_offered", {})[str(shape)] = reason
            show(f"{shape}: not measured: {reason}")
            continue
        rows.append(row)
        show(line_of(row))
        if save is not None:
            save(result)
    if beyond_memory is not None and not rows:
        raise beyond_memory
    show(f"{name}: {time.perf_counter() - start:.1f} s")
    return result


def line_of(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    parts = [f"{shape_of(row)}:"]
    parts += [
        f"{name} {contender['us']:.1f} us ({contender['tflops']:.0f} TFLOP/s)"
        for name, contender in row["contenders"].items()
    ]
    parts += [f"{name} refused" for name in row["refused"]]
    parts.append(f"torch/tgemm {row['ratio']:.3f} (control {row['control_ratio']:.3f})")
    return " | ".join(parts)
