"""Times torch and torch_gemm side by side in suites of problems, with plots, and compares with a stored result."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_gemm import html, measure
from torch_gemm.bench import results, tables
from torch_gemm.bench.shapes import AGAINST, SUITES
from torch_gemm.console import CommandError, check_outputs, first_line, open_console, write_output
from torch_gemm.peak import peaks

if TYPE_CHECKING:
    from rich.console import Console

# Suites that are no list of shapes.
OTHER_SUITES = ("ladder", "models")
TABLE_WIDTH = 150


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m torch_gemm bench``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", choices=(*SUITES, *OTHER_SUITES), help="what to measure")
    what.add_argument(
        "--from", dest="stored", type=Path, metavar="FILE", help="show a stored result"
    )
    what.add_argument("--list", action="store_true", help="list the suites and their problems")
    parser.add_argument(
        "--against",
        metavar=",".join(("torch", *AGAINST)),
        help="besides torch: the best of cuBLASLt's algorithms, torch.compile's max-autotune, "
        "QuACK (quack-kernels); for suites of shapes",
    )
    parser.add_argument("--rounds", type=int, default=measure.ROUNDS, help="default: 9")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the whole result")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="a page with tables and plots that stands alone"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the plots, .png or .svg")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="a stored result, to find regressions since"
    )
    parser.add_argument(
        "--fail-on-regression",
        action="store_true",
        help="with --compare: exit with status 1 if something became slower beyond the noise",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures or reads a result, shows it, compares it and stores it.

    Returns:
        The exit status: 1 after a regression, if that was asked for.

    Raises:
        CommandError: an option, a file, a package or the GPU is not what it has to be, or the measurement
            fails; no file was written.
    """
    console = open_console()
    console.width = max(console.width, TABLE_WIDTH)
    if arguments.list:
        _list(console)
        return 0
    _check(arguments)
    old = None if arguments.compare is None else load(arguments.compare)
    if arguments.stored is not None:
        result = load(arguments.stored)
    else:
        result = _measure(arguments, console)
    for shown in tables.show(result):
        console.print(shown)
    comparison = None
    if old is not None:
        with _reading(arguments.compare):
            comparison = results.compare(old, result)
            shown_comparison = tables.show_comparison(comparison)
        for shown in shown_comparison:
            console.print(shown)
        console.print(
            tables.comparison_verdict(comparison),
            style="bold red" if comparison.regressions else "bold",
        )
    outputs = []
    # A result that was measured just now has no file to blame.
    with _reading(arguments.stored) if arguments.stored else contextlib.nullcontext():
        if arguments.json is not None:
            outputs.append((arguments.json, measure.result_text(result).encode()))
        if arguments.plot is not None:
            outputs.append((arguments.plot, tables.plot(result, arguments.plot.suffix[1:])))
        if arguments.html is not None:
            outputs.append((arguments.html, tables.page(result, comparison).encode()))
    for path, content in outputs:
        write_output(path, content)
        console.print(f"written: {path}", markup=False)
    failed = comparison is not None and comparison.regressions and arguments.fail_on_regression
    return 1 if failed else 0


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What a file with something else in it does to the code that reads it becomes a sentence."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{path} is not a result of the benchmark: it is no JSON") from error
    except KeyError as error:
        raise CommandError(f"{path} is not a result of the benchmark: it has no {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise CommandError(
            f"{path} is not a result of the benchmark ({type(error).__name__}: {first_line(error)})"
        ) from error


def load(path: Path) -> results.Result:
    """A stored result.

    Raises:
        CommandError: the file cannot be read, or is nothing that can be shown.
    """
    with _reading(path):
        result = json.loads(path.read_text())
        if not isinstance(result, dict):
            raise CommandError(
                f"{path} is not a result of the benchmark: it is a {type(result).__name__}"
            )
        stamp = result["stamp"]
        if stamp["device"]:
            peaks(stamp["device"])
            float(stamp["device"]["memory_bytes_per_us"])
        str(stamp["csrc_digest"])
        # Whatever these need is there.
        tables.show(result)
        results.entries_of(result)
    return result


def _check(arguments: argparse.Namespace) -> None:
    """What can be wrong before anything is measured."""
    if arguments.rounds < 1:
        raise CommandError(f"--rounds is {arguments.rounds}, and must be at least 1")
    if arguments.fail_on_regression and arguments.compare is None:
        raise CommandError("--fail-on-regression needs --compare FILE")
    if arguments.against is not None and arguments.suite in (None, *OTHER_SUITES):
        raise CommandError("--against is for measuring suites of shapes")
    if arguments.plot is not None and arguments.plot.suffix not in (".png", ".svg"):
        raise CommandError(f"--plot {arguments.plot} must end in .png or .svg")
    if arguments.plot is not None or arguments.html is not None:
        html.require_matplotlib()
    check_outputs({"--json": arguments.json, "--plot": arguments.plot, "--html": arguments.html})


def open_runner() -> measure.Runner:
    """What measures on this machine's GPU.

    Raises:
        CommandError: there is none, or no kernels for it.
    """
    return measure.open_runner("The suites are")


def _measure(arguments: argparse.Namespace, console: Console) -> results.Result:
    from torch_gemm.bench.side_by_side import parse_against, run_suite

    suite = arguments.suite
    try:
        against = parse_against(arguments.against or "")
    except ValueError as error:
        raise CommandError(str(error)) from error
    runner = open_runner()
    try:
        with console.status(f"measuring {suite}") as status:
            if suite == "ladder":
                from torch_gemm.ladder.contest import measure_ladder

                with torch.inference_mode():
                    return measure_ladder(4096, "fp16", "nn", runner, arguments.rounds)
            if suite == "models":
                from torch_gemm.bench.models import CASES, How, run_models

                how = How(device=runner.device, rounds=arguments.rounds)
                rows = len(CASES)
                return run_models(
                    list(CASES),
                    how,
                    lambda result: status.update(f"models: {len(result['rows'])} of {rows}"),
                )
            with torch.inference_mode():
                return run_suite(
                    suite, SUITES[suite], against, runner, arguments.rounds, status.update
                )
    except torch.OutOfMemoryError as error:
        raise CommandError(
            f"The suite {suite} does not fit into the GPU's memory: {first_line(error)}"
        ) from error
    except RuntimeError as error:
        raise CommandError(
            f"The suite {suite} could not be measured: {first_line(error)}"
        ) from error


def _list(console: Console) -> None:
    for name, shapes in SUITES.items():
        console.print(f"{name}: {', '.join(map(str, shapes))}", markup=False, soft_wrap=True)
    console.print("ladder: the kernels of the ladder, 4096x4096x4096 fp16, and cuBLAS")
    from torch_gemm.bench.models import CASES

    models = (f"{name} ({case.what})" for name, case in CASES.items())
    console.print(f"models: {', '.join(models)}", markup=False, soft_wrap=True)
