"""Host time of one call: how long Python and the dispatcher need to put a small product on the GPU.

    python -m benchmarks.host_cost

Every way of calling makes `--calls` calls (10,000) in ten turns, in rotating order; between two turns the GPU
is waited for, within a turn it is not, and the product is so small that the GPU is done before the next call.
The median turn counts. torch runs twice as a control. Results go to benchmarks/results/host_cost.json.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_gemm
from torch_gemm.console import CommandError, open_console, prepare_output, write_output
from torch_gemm.measure import CpuRunner, CudaRunner, Runner, result_text, stamp

RESULTS = Path(__file__).with_name("results")
TURNS = 10
# On an H200 a kernel of this size takes 2 to 3 us, less than any of the calls.
ROWS, COLUMNS, DEPTH = 16, 256, 256

Call = Callable[[], Any]


@contextlib.contextmanager
def _autocast() -> Iterator[None]:
    """To BF16, around parameters in FP32, whose casts torch caches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        yield


MODES: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "with gradients": torch.enable_grad,
    "autocast": _autocast,
    "out=": torch.no_grad,
}
# What a call costs at most, as a share of torch's.
BARS = {"inference mode": 0.7, "no_grad": 1.0, "with gradients": 1.6, "autocast": 1.05, "out=": 1.0}
BASELINE, CONTROL = "torch", "torch (control)"


def calls_of(op: str, mode: str, device: str) -> dict[str, Call]:
    """All ways of calling one op in one mode, torch's first."""
    learning = mode in ("with gradients", "autocast")  # torch caches casts of what is trained
    stored = torch.float32 if mode == "autocast" else torch.bfloat16
    x = torch.randn(ROWS, DEPTH, device=device, dtype=torch.bfloat16)
    weight = torch.randn(COLUMNS, DEPTH, device=device, dtype=stored)
    bias = torch.randn(COLUMNS, device=device, dtype=stored)
    weight.requires_grad_(learning)
    bias.requires_grad_(learning)
    out = torch.empty(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)
    b, tgemm = weight.detach().mT.requires_grad_(learning), torch.ops.tgemm
    if mode == "out=":
        if op == "matmul":
            calls = {
                BASELINE: lambda: torch.matmul(x, b, out=out),
                "torch.ops.tgemm.matmul": lambda: tgemm.matmul.out(x, b, out=out),
                "torch_gemm.matmul": lambda: torch_gemm.matmul(x, b, out=out),
            }
        else:  # F.linear has no out=, and addmm is what it calls
            calls = {
                BASELINE: lambda: torch.addmm(bias, x, b, out=out),
                "torch.ops.tgemm.linear": lambda: tgemm.linear.out(x, weight, bias, out=out),
                "torch_gemm.linear": lambda: torch_gemm.linear(x, weight, bias, out=out),
            }
    elif op == "matmul":
        calls = {
            BASELINE: lambda: torch.matmul(x, b),
            "torch.ops.tgemm.matmul": lambda: tgemm.matmul(x, b),
            "torch_gemm.matmul": lambda: torch_gemm.matmul(x, b),
        }
    else:
        linear = torch.nn.functional.linear
        calls = {
            BASELINE: lambda: linear(x, weight, bias),
            "torch.ops.tgemm.linear": lambda: tgemm.linear(x, weight, bias),
            "torch_gemm.linear": lambda: torch_gemm.linear(x, weight, bias),
            "torch_gemm.linear, gelu": lambda: torch_gemm.linear(
                x, weight, bias, activation="gelu"
            ),
        }
        stock = torch.nn.Linear(DEPTH, COLUMNS, device=device, dtype=stored)
        stock.requires_grad_(learning)
        layer = torch_gemm.nn.Linear.from_linear(stock)
        calls |= {"nn.Linear": lambda: stock(x), "torch_gemm.nn.Linear": lambda: layer(x)}
    calls[CONTROL] = calls[BASELINE]
    return calls


def parts_of_a_call(device: str) -> dict[str, Call]:
    """What any call is made of at least."""
    x = torch.randn(ROWS, COLUMNS, device=device, dtype=torch.bfloat16)

    def nothing(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a

    return {
        "a Python function": lambda: nothing(x, x, x),
        "an allocation: torch.empty": lambda: torch.empty_like(x),
        "a view: Tensor.t": lambda: x.t(),
        "a kernel: torch.neg": lambda: torch.neg(x),
    }


def host_microseconds(calls: dict[str, Call], runner: Runner, count: int) -> dict[str, list[float]]:
    """Microseconds of a call of each, in each turn."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(min(count, 20)):
            calls[name]()
    for turn in range(TURNS):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            call = calls[name]
            repeats = range(max(1, count // TURNS))
            _wait(runner)
            start = time.perf_counter()
            for _ in repeats:
                call()
            times[name].append((time.perf_counter() - start) * 1e6 / len(repeats))
    _wait(runner)
    return times


def _wait(runner: Runner) -> None:
    if runner.device == "cuda":
        torch.cuda.synchronize()


def measure(runner: Runner, count: int) -> list[dict[str, Any]]:
    """A row for each op and mode, and one for the parts of a call."""
    rows = []
    groups = [(op, mode) for op in ("linear", "matmul") for mode in MODES]
    for op, mode in [*groups, ("parts of a call", "no_grad")]:
        is_parts = op == "parts of a call"
        calls = parts_of_a_call(runner.device) if is_parts else calls_of(op, mode, runner.device)
        with MODES[mode]():
            times = host_microseconds(calls, runner, count)
        medians = {name: statistics.median(turns) for name, turns in times.items()}
        rows.append(
            {
                "op": op,
                "mode": mode,
                "bar": None if is_parts else BARS[mode],
                "calls": {
                    name: {
                        "us": round(us, 3),
                        "turns_us": [round(turn, 3) for turn in times[name]],
                        "of_torch": None if is_parts else round(us / medians[BASELINE], 3),
                    }
                    for name, us in medians.items()
                },
            }
        )
    return rows


def table_of(rows: Sequence[dict[str, Any]], on_gpu: bool) -> Any:
    """A rich table of all rows."""
    from rich.table import Table

    table = Table(title="host time of a call", title_justify="left", title_style="bold")
    for column in ("op", "mode", "call"):
        table.add_column(column, no_wrap=column == "call")
    for column in ("us", "of torch's", "bar"):
        table.add_column(column, justify="right")
    for row in rows:
        for index, (name, call) in enumerate(row["calls"].items()):
            share, bar = call["of_torch"], row["bar"]
            judged = on_gpu and bar is not None and name == f"torch_gemm.{row['op']}"
            table.add_row(
                row["op"] if index == 0 else "",
                row["mode"] if index == 0 else "",
                name,
                f"{call['us']:.2f}",
                "" if share is None else f"{share:.2f}",
                f"{bar:.1f} {'met' if share <= bar else 'missed'}" if judged else "",
                end_section=index == len(row["calls"]) - 1,
            )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000, help="of each way (default: 10000)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=RESULTS / "host_cost.json")
    parsed = parser.parse_args(arguments)
    if parsed.calls < 1:
        parser.error(f"--calls is {parsed.calls}, and must be at least 1")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU (--device cpu tries the program without one)")
    runner = CudaRunner() if parsed.device == "cuda" else CpuRunner()
    try:
        console = open_console()
        prepare_output(parsed.output)
    except CommandError as error:
        parser.error(str(error))
    rows = measure(runner, parsed.calls)
    console.print(table_of(rows, runner.device == "cuda"))
    result = {
        "name": "host_cost",
        "stamp": stamp(runner),
        "shape": [ROWS, COLUMNS, DEPTH],
        "calls": parsed.calls,
        "rows": rows,
    }
    write_output(parsed.output, result_text(result).encode())
    console.print(f"written: {parsed.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
