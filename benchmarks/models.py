"""Times whole models end to end: stock, replaced, fused and compiled, each as eager code and as a CUDA graph.

    python -m benchmarks.models --models bert,vit        one or several of the list that --help prints
    python -m benchmarks.models --models all --dtype fp16

How is said in torch_gemm/bench/models.py. Results go to benchmarks/results/models_DTYPE.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_gemm.bench.models import (
    CASES,
    CELL_SECONDS,
    MODEL_SECONDS,
    How,
    print_row,
    run_models,
)
from torch_gemm.console import CommandError, open_console, prepare_output, write_output
from torch_gemm.measure import ROUNDS, result_text

RESULTS = Path(__file__).with_name("results")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    models = "".join(f"\n  {name:<14}{case.what}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0] + f"\n\nmodels:{models}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", required=True, metavar="NAME,...", help='or "all"')
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program")
    parser.add_argument("--model-seconds", type=float, default=MODEL_SECONDS, metavar="S")
    parser.add_argument("--cell-seconds", type=float, default=CELL_SECONDS, metavar="S")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/models_DTYPE.json")
    parsed = parser.parse_args(arguments)
    names = list(CASES) if parsed.models == "all" else parsed.models.split(",")
    for name in names:
        if name not in CASES:
            parser.error(f"there is no model {name!r}; the models are {', '.join(CASES)}")
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU (--device cpu --tiny tries the program without one)")
    path = parsed.output or RESULTS / f"models_{parsed.dtype}.json"
    try:
        console = open_console()
        prepare_output(path)
    except CommandError as error:
        parser.error(str(error))

    def show(result: dict[str, Any]) -> None:
        print_row(console, result["rows"][-1])
        # After each, so that an interruption costs one.
        write_output(path, result_text(result).encode())

    options = ("dtype", "device", "rounds", "tiny", "model_seconds", "cell_seconds")
    run_models(names, How(**{name: getattr(parsed, name) for name in options}), show)
    console.print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
