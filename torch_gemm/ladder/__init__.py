"""Times the kernel ladder: kernels that are each one idea further than the last, beside cuBLAS."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from torch_gemm import measure, nsight
from torch_gemm.console import CommandError, check_outputs, first_line, open_console, write_output
from torch_gemm.html import require_matplotlib
from torch_gemm.ladder.contest import LAYOUTS, measure_ladder, needed_bytes
from torch_gemm.ladder.picture import draw
from torch_gemm.ladder.profile import profile_contenders
from torch_gemm.ladder.tables import show_ladder, show_profile
from torch_gemm.measure import Runner
from torch_gemm.notation import DTYPES

# What the tables need: a number that does not fit would lose digits.
TABLE_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m torch_gemm ladder``."""
    parser.add_argument("--size", type=int, default=4096, help="M = N = K; default: 4096")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="default: fp16")
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="nn", help="nn: A and B row-major; nt: nn.Linear's"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a bar chart, .png or .svg")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the whole result")
    parser.add_argument(
        "--profile", action="store_true", help="hardware counters, through Nsight Compute"
    )
    parser.add_argument("--rounds", type=int, default=measure.ROUNDS, help="default: 9")


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints and stores the ladder.

    Raises:
        CommandError: an option, a file, a package, a tool or the GPU is not what it has to be; nothing
            was measured and no file written. Or ncu or the measurement fails.
    """
    console = open_console()
    for option in ("size", "rounds"):
        if getattr(arguments, option) < 1:
            raise CommandError(
                f"--{option} is {getattr(arguments, option)}, and must be at least 1"
            )
    _check_outputs(arguments)
    ncu = nsight.find_ncu() if arguments.profile else None
    runner = open_runner()
    problem = (arguments.size, arguments.dtype, arguments.layout)
    needed = needed_bytes(arguments.size, arguments.dtype, runner.l2_bytes())
    if needed > runner.free_bytes():
        raise CommandError(
            f"--size {arguments.size} takes {needed / 2**30:.1f} GiB, and "
            f"{runner.free_bytes() / 2**30:.1f} GiB of the GPU's memory are free"
        )
    profiler = ncu and (lambda contenders: profile_contenders(ncu, contenders, *problem))
    try:
        with torch.inference_mode():
            result = measure_ladder(*problem, runner, arguments.rounds, profiler)
    except torch.OutOfMemoryError as error:
        raise CommandError(
            f"--size {arguments.size} is too large for the GPU's memory: {first_line(error)}"
        ) from error
    console.width = max(console.width, TABLE_WIDTH)
    for shown in show_ladder(result) + (show_profile(result["profile"]) if profiler else []):
        console.print(shown)
    outputs = []
    if arguments.json:
        outputs.append((arguments.json, measure.result_text(result).encode()))
    if arguments.plot:
        outputs.append((arguments.plot, draw(result, arguments.plot.suffix[1:])))
    for path, content in outputs:
        write_output(path, content)
        console.print(f"written: {path}", markup=False)


def open_runner() -> Runner:
    """What measures on this machine's GPU.

    Raises:
        CommandError: there is none, or no kernels for it.
    """
    return measure.open_runner("The ladder is")


def _check_outputs(arguments: argparse.Namespace) -> None:
    if arguments.plot:
        if arguments.plot.suffix not in (".png", ".svg"):
            raise CommandError(f"--plot {arguments.plot} must end in .png or .svg")
        require_matplotlib()
    check_outputs({"--plot": arguments.plot, "--json": arguments.json})
