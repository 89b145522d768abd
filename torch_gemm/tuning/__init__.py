"""Measures which kernel is fastest for every problem of a model, and writes a file that the ops use."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from torch_gemm.console import CommandError, first_line, load_function, open_console
from torch_gemm.tuning import tuner
from torch_gemm.tuning.files import (
    TunedProblem,
    Tuning,
    load_from_environment,
    load_tuning,
    unload_tuning,
)
from torch_gemm.tuning.tuner import TuningReport, tune

__all__ = [
    "TunedProblem",
    "Tuning",
    "TuningReport",
    "load_from_environment",
    "load_tuning",
    "tune",
    "unload_tuning",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m torch_gemm tune``."""
    parser.add_argument(
        "target", metavar="MODULE:FUNCTION", help="importable; returns (model, inputs) on a GPU"
    )
    parser.add_argument("path", type=Path, metavar="FILE", help="written, or added to")
    parser.add_argument(
        "--replace", action="store_true", help="first torch_gemm.replace(model): nn.Linear layers"
    )
    parser.add_argument(
        "--fuse", action="store_true", help="the same with fuse=True: and what follows them"
    )
    parser.add_argument(
        "--time-budget", type=float, metavar="SECONDS", help="begin no problem after that"
    )
    parser.add_argument(
        "--aten", action="store_true", help="torch's own product is a candidate too"
    )
    parser.add_argument("--rounds", type=int, default=tuner.ROUNDS, help="default: 5")
    parser.add_argument(
        "--candidates", type=int, default=tuner.CANDIDATES, help="for a problem; default: 12"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Tunes and shows what it bought.

    Raises:
        CommandError: an option, the function, the file or the GPU is not what it has to be.
    """
    console = None if arguments.json else open_console()
    function = load_function(arguments.target)
    try:
        tuner.check(arguments.path, arguments.time_budget, arguments.rounds, arguments.candidates)
    except (OSError, ValueError, RuntimeError) as error:
        raise CommandError(first_line(error)) from error
    try:
        model, inputs = function()
        if arguments.replace or arguments.fuse:
            from torch_gemm.replacement import replace

            replace(model, fuse=arguments.fuse)
        report = tune(
            model,
            inputs,
            arguments.path,
            time_budget=arguments.time_budget,
            aten=arguments.aten,
            rounds=arguments.rounds,
            candidates=arguments.candidates,
        )
    except torch.OutOfMemoryError as error:
        raise CommandError(f"The GPU's memory is not enough: {first_line(error)}") from error
    except (Exception, SystemExit) as error:  # the user's function and model may raise anything
        raise CommandError(
            f"{arguments.target} could not be tuned: {type(error).__name__}: {first_line(error)}"
        ) from error
    if console is None:
        print(json.dumps(report.to_dict(), indent=1))
        return
    _show(console, report)


def _show(console: Any, report: TuningReport) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    heads, *rows = report.rows()
    table = Table(title="What tuning bought", title_justify="left", box=box.SIMPLE_HEAD)
    for index, head in enumerate(heads):
        table.add_column(
            head, justify="right" if index in (1, 3, 5, 6) else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    for call, reason in report.skipped:
        console.print(f"not measured: {call}: {reason}", markup=False)
    console.print(report.summary(), markup=False)
