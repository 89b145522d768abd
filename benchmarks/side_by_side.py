"""Times torch and tgemm side by side; how is said in torch_gemm/measure.py.

    python -m benchmarks.side_by_side --suite foundation
    python -m benchmarks.side_by_side --suite sm90 --against lt,compile
    python -m benchmarks.side_by_side --sweep mma_sync --shapes 4096x4096x4096,512x4096x4096 --dtype fp16

Results go to benchmarks/results/NAME.json. `python -m torch_gemm bench` measures the same suites and shows
tables, plots and differences from a stored result.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torch_gemm
from benchmarks import calibrate
from torch_gemm.bench.shapes import AGAINST, DTYPES, SUITES, Shape, parse_shape
from torch_gemm.bench.side_by_side import parse_against, run_suite
from torch_gemm.console import CommandError, prepare_output, write_output
from torch_gemm.measure import ROUNDS, CpuRunner, CudaRunner, result_text

RESULTS = Path(__file__).with_name("results")


def forced_configurations(
    kernel: str, splits: Sequence[int], shape: Shape | None = None, sms: int = 0
) -> list[str]:
    """Every configuration of a kernel, as `force_kernel` strings, with each split-K.

    For a `shape` on a GPU with `sms` SMs: only with splits that leave no SM more than one tile, because
    others are never chosen, and where some configurations split K within clusters, only with such splits.

    Raises:
        ValueError: if there is no such kernel.
    """
    table = {entry["name"]: entry for entry in torch_gemm.kernels()}
    if kernel not in table:
        raise ValueError(f"there is no kernel {kernel!r}; the kernels are {', '.join(table)}")

    most = max(config.get("max_cluster_split", 1) for config in table[kernel]["configs"])

    def sensible(config: dict[str, Any], split: int) -> bool:
        if split == 1 or shape is None:
            return True
        if most > 1 and split > config["max_cluster_split"]:
            return False
        tiles = -(-shape.m // config["block_m"]) * -(-shape.n // config["block_n"]) * shape.batch
        return tiles * split <= sms

    return [
        f"{kernel}:{config['name']},split_k={split}"
        for config in table[kernel]["configs"]
        for split in splits
        if sensible(config, split)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", choices=SUITES)
    what.add_argument("--sweep", metavar="KERNEL", help="every configuration of this kernel")
    parser.add_argument(
        "--shapes",
        metavar="MxNxK,...",
        help="for --sweep; default: the suite of the kernel's name, or foundation",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="for --sweep")
    parser.add_argument("--split-k", default="1", metavar="N,...", help="for --sweep; default: 1")
    parser.add_argument(
        "--against",
        metavar="|".join(AGAINST) + ",...",
        default="",
        help="besides torch: the best of cuBLASLt's algorithms, torch.compile's max-autotune, "
        "QuACK (quack-kernels)",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/NAME.json")
    parsed = parser.parse_args(arguments)
    if parsed.rounds < 1:
        parser.error(f"--rounds is {parsed.rounds}, and must be at least 1")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU (--device cpu tries the program without one)")
    runner = CudaRunner() if parsed.device == "cuda" else CpuRunner()

    try:
        against = parse_against(parsed.against)
        if parsed.suite:
            name, shapes = parsed.suite, SUITES[parsed.suite]
        else:
            name = f"{parsed.sweep}_sweep_{parsed.dtype}"
            splits = [int(split) if split.isdecimal() else 0 for split in parsed.split_k.split(",")]
            if min(splits) < 1:
                raise ValueError(
                    f"--split-k is {parsed.split_k!r}, and must be numbers of at least 1"
                )
            if parsed.shapes:
                shapes = [parse_shape(text, parsed.dtype) for text in parsed.shapes.split(",")]
            else:
                suite = SUITES.get(parsed.sweep, SUITES["foundation"])
                shapes = [shape for shape in suite if shape.dtype == parsed.dtype]
                if parsed.sweep == "sm90":
                    shapes += [parse_shape(text, parsed.dtype) for text in calibrate.SHAPES]
            sms = (
                torch.cuda.get_device_properties(0).multi_processor_count
                if runner.device == "cuda"
                else 1
            )
            shapes = [
                dataclasses.replace(
                    shape, force=tuple(forced_configurations(parsed.sweep, splits, shape, sms))
                )
                for shape in shapes
            ]
        path = parsed.output or RESULTS / f"{name}.json"
        prepare_output(path)
    except (ValueError, CommandError) as error:
        parser.error(str(error))

    def save(result: dict[str, Any]) -> None:
        write_output(path, result_text(result).encode())

    try:
        with torch.inference_mode():
            # After each shape, so that an interruption costs one.
            save(run_suite(name, shapes, against, runner, parsed.rounds, save=save))
    except RuntimeError as error:
        parser.error(f"{name} could not be measured: {str(error).splitlines()[0]}")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
