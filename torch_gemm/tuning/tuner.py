"""`tune`: measures, for every problem of a model, the ways in which it could run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_gemm import _fallbacks, _library, _outputs, cards, measure
from torch_gemm._calls import Call, overload
from torch_gemm.cards import Card
from torch_gemm.console import CommandError, check_output, first_line
from torch_gemm.explaining.explanation import Explanation
from torch_gemm.info import driver_version, why_no_gpu
from torch_gemm.replacement import _call_arguments
from torch_gemm.tracing import TracedRow, trace
from torch_gemm.tuning import files
from torch_gemm.tuning.files import TunedProblem, Tuning

ROUNDS = 5
# The cost models are rarely wrong by more: benchmarks/NOTES.md.
CANDIDATES = 12
WITHIN = 2.0  # times the fastest prediction
# A choice is changed for a gain above this and above the noise of the measurement.
MINIMUM_GAIN = 0.01
ATEN = "ATen"
# As csrc/gemm/tuning.hpp calls them.
_ATEN_WAY = "aten"
_TWO_GEMMS_WAY = "two GEMMs"


@dataclass(frozen=True)
class Choice:
    """A way to run one call."""

    name: str  # "sm90:128x256", "A + B" of two launches, "ATen"
    ways: tuple[tuple[str, str], ...]  # (problem, plan): what the ops have to be told


# Microseconds of each choice in each round; the first list is a second measurement of the first choice.
# None for what turned out not to run.
Measure = Callable[[Call, Sequence[Choice]], list[list[float] | None]]


@dataclass(frozen=True)
class TuningReport:
    """What tuning a model found. Prints as a table."""

    path: Path
    tuning: Tuning  # the file, other models' problems included
    problems: tuple[TunedProblem, ...]  # this model's, those that take longest first
    measured: int  # how many of them were measured now; the others were in the file
    remaining: tuple[str, ...]  # calls for which the time budget was not enough: tune again
    skipped: tuple[tuple[str, str], ...]  # calls that there is nothing to tune for, and why

    @property
    def predicted_us(self) -> float:
        """All of the model's calls without tuning, microseconds."""
        return sum(problem.count * problem.predicted_us for problem in self.problems)

    @property
    def us(self) -> float:
        """And with it."""
        return sum(problem.count * problem.us for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": str(self.path),
            "card": self.tuning.card,
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
            "measured": self.measured,
            "remaining": list(self.remaining),
            "skipped": [list(entry) for entry in self.skipped],
            "predicted_us": self.predicted_us,
            "us": self.us,
        }

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of a table, its heads first."""
        heads = ("call", "count", "predicted", "us", "measured best", "us", "speed-up")
        return [heads] + [
            (
                problem.call,
                str(problem.count),
                problem.predicted,
                f"{problem.predicted_us:.2f}",
                "the same" if problem.chosen == problem.predicted else problem.chosen,
                f"{problem.us:.2f}",
                f"{problem.speed_up:.3f}",
            )
            for problem in self.problems
        ]

    def summary(self) -> str:
        """What tuning bought, and what is missing."""
        parts = [f"{len(self.problems)} problems, {self.measured} measured now"]
        if self.problems:
            gain = self.predicted_us / self.us
            parts.append(f"all calls {self.predicted_us:.1f} us -> {self.us:.1f} us ({gain:.3f}x)")
        if self.remaining:
            parts.append(f"{len(self.remaining)} beyond the time budget: tune again to go on")
        if self.skipped:
            parts.append(f"{len(self.skipped)} calls without a choice")
        return "; ".join([*parts, str(self.path)])

    def __str__(self) -> str:
        cells = self.rows()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        lines += [f"not measured: {call}: {reason}" for call, reason in self.skipped]
        return "\n".join([*lines, self.summary()])


def tune(
    model: Any,
    inputs: Any,
    path: str | os.PathLike[str],
    *,
    time_budget: float | None = None,
    aten: bool = False,
    rounds: int = ROUNDS,
    candidates: int = CANDIDATES,
    progress: bool | None = None,
) -> TuningReport:
    """Measures, for every distinct problem of a model, the kernels that could run it, and writes a file.

    The model runs once; then each problem is measured by itself on random operands: the candidates with
    the best predictions as CUDA graphs over inputs beyond L2, in turn, medians (`torch_gemm.measure`).
    The file is written after every problem, so that a run that ends early, or a second model, goes on
    where it ended. `load_tuning` uses it. While tuning, files that are loaded are not in use, and `stats`
    counts what is measured.

    Args:
        model: a module or function that calls the ops: after `replace`, say, or in a block of
            `override`.
        inputs: a tuple of arguments, a dict of keyword arguments, or a single argument, on a GPU.
        path: the file. If it exists, it has to be a tuning file for this card and these kernels, and
            is added to.
        time_budget: seconds, after which no further problem is begun; those that take the model the
            longest come first. None: no limit.
        aten: whether torch's own product is a candidate, for products of 16-bit operands without an
            activation and a residual. Where it is faster the op then leaves the call to ATen, unless it
            writes into a given `out` or the fallback policy is "error"; `stats` counts it as a fallback.
            The result is rounded as ATen rounds it.
        rounds: measurements of each candidate.
        candidates: how many are measured for a problem, at most.
        progress: whether to show a bar (through rich, if it is installed). None: on a terminal.

    Returns:
        The report: what was chosen, and what it saves.

    Raises:
        TypeError, ValueError: an argument is not what it has to be, the model calls no op of torch_gemm,
            or the file is another card's or no tuning file.
        OSError: the file cannot be written.
        RuntimeError: there is no GPU.
        Whatever the model raises.
    """
    path = Path(path)
    card, previous = check(path, time_budget, rounds, candidates)
    if aten and _fallbacks.policy == "error":
        raise ValueError('tune: aten=True, but the fallback policy "error" leaves nothing to ATen')
    runner = measure.CudaRunner()
    with _untuned():
        # Of several GPUs, those that are like the current one, on which is measured.
        rows = [
            row
            for row in _rows_of(model, inputs)
            if row.device.startswith("cuda")
            and (row.explanation is None or row.explanation.card == card)
        ]
        if not rows:
            raise ValueError(
                "tune: the model calls no op of torch_gemm on the GPU: torch_gemm.replace(model) makes "
                "its layers do so, and so does tuning inside `with torch_gemm.override():`"
            )
        return tune_rows(
            rows,
            card,
            path,
            lambda call, choices: measure_choices(call, choices, card, rounds, runner),
            previous=previous,
            time_budget=time_budget,
            aten=aten,
            candidates=candidates,
            progress=progress,
        )


def tune_rows(
    rows: Sequence[TracedRow],
    card: Card,
    path: Path,
    measure_all: Measure,
    *,
    previous: Tuning | None,
    time_budget: float | None = None,
    aten: bool = False,
    candidates: int = CANDIDATES,
    progress: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TuningReport:
    """Tunes for calls that a trace has seen, by whatever measures; `tune` says the rest."""
    start = clock()
    jobs, skipped = _jobs(rows, aten, candidates)
    known = {} if previous is None else {problem.key: problem for problem in previous.problems}
    tuning = _tuning(card, ())
    found: list[TunedProblem] = []
    remaining = []
    todo = []
    for job in jobs:
        before = known.get(job.key)
        if before is None or (job.has_aten and ATEN not in before.measured):
            todo.append(job)
        else:
            found.append(dataclasses.replace(before, call=str(job.call), count=job.count))
    measured = 0

    def file() -> Tuning:
        others = dict(known)
        for problem in found:
            others.pop(problem.key, None)
        return dataclasses.replace(tuning, problems=(*others.values(), *found))

    with _bar(len(todo), progress) as advance:
        for job in todo:
            if time_budget is not None and clock() - start >= time_budget:
                remaining.append(str(job.call))
                continue
            try:
                times = measure_all(job.call, job.choices)
                found.append(_judged(job, times))
            except RuntimeError as error:  # out of memory, say
                skipped.append((str(job.call), first_line(error)))
            else:
                measured += 1
                files.write(path, file())
            advance(str(job.call))
    if measured == 0:
        files.write(path, file())
    found.sort(key=lambda problem: -problem.count * problem.predicted_us)
    return TuningReport(path, file(), tuple(found), measured, tuple(remaining), tuple(skipped))


# --- What to measure


@dataclass(frozen=True)
class _Job:
    call: Call
    count: int
    key: str  # as TunedProblem's
    choices: tuple[Choice, ...]  # the predicted one first
    predicted_us: float

    @property
    def has_aten(self) -> bool:
        return any(choice.name == ATEN for choice in self.choices)


def _jobs(
    rows: Sequence[TracedRow], aten: bool, candidates: int
) -> tuple[list[_Job], list[tuple[str, str]]]:
    """One job for each distinct problem, the longest first; and the calls without, with the reason."""
    jobs: dict[str, _Job] = {}
    skipped = []
    for row in rows:
        explanation = row.explanation
        if explanation is None or explanation.chosen is None:
            reason = "no kernel runs it" if explanation is None else str(explanation.error)
            skipped.append((str(row.call), reason))
            continue
        if "force_kernel" in dict(row.call.options):
            skipped.append((str(row.call), "its kernel is forced"))
            continue
        # Into a given `out`, ATen is no choice.
        out = row.call.op.endswith(".out")
        choices = choices_of(explanation, aten and not out, candidates)
        key = choices[0].ways[0][0]
        job = _Job(row.call, row.count, key, choices, explanation.predicted_us)
        before = jobs.get(key)
        if before is not None:
            job = dataclasses.replace(before if out else job, count=before.count + row.count)
        jobs[key] = job
    return sorted(jobs.values(), key=lambda job: -job.count * job.predicted_us), skipped


def choices_of(explanation: Explanation, aten: bool, limit: int) -> tuple[Choice, ...]:
    """What to measure for a call: the predicted choice, then others by their predictions."""
    steps = {step.role: step for step in (*explanation.steps, *explanation.considered)}
    scored: list[tuple[float, Choice]] = []
    if "gemm" in steps or "whole" in steps:
        step = steps.get("gemm") or steps["whole"]
        scored += [(c.predicted_us, Choice(c.plan, ((step.key, c.plan),))) for c in step.scored]
    if "gate" in steps:
        gate, up = steps["gate"], steps["up"]
        # What rules out one kernel for both leaves no key to tell the op so.
        two = ((steps["whole"].key, _TWO_GEMMS_WAY),) if "whole" in steps else ()
        for first, second in zip(gate.scored, up.scored, strict=False):
            ways = (*two, (gate.key, first.plan), (up.key, second.plan))
            name = f"{first.plan} + {second.plan}"
            scored.append((first.predicted_us + second.predicted_us, Choice(name, ways)))
    predicted = explanation.chosen.plan
    scored.sort(key=lambda entry: (entry[1].name != predicted, entry[0]))
    fastest = scored[0][0]
    chosen = [choice for us, choice in scored if us <= WITHIN * fastest][:limit]
    if aten and "gemm" in steps and steps["gemm"].can_use_aten:
        chosen.append(Choice(ATEN, ((steps["gemm"].key, _ATEN_WAY),)))
    return tuple(chosen)


def _judged(job: _Job, times: Sequence[list[float] | None]) -> TunedProblem:
    control, *each = [None if rounds is None else statistics.median(rounds) for rounds in times]
    if each[0] is None or control is None:
        raise RuntimeError(f"{job.choices[0].name} did not run")
    ran = [(us, choice) for us, choice in zip(each, job.choices, strict=True) if us is not None]
    base = min(each[0], control)
    noise = abs(each[0] - control) / base
    best_us, best = min(ran, key=lambda entry: entry[0])
    if best_us >= base * (1.0 - max(MINIMUM_GAIN, noise)):
        best = job.choices[0]
    measured = {choice.name: round(us, 4) for us, choice in ran}
    measured[job.choices[0].name] = round(base, 4)
    return TunedProblem(
        call=str(job.call),
        count=job.count,
        predicted=job.choices[0].name,
        chosen=best.name,
        measured=measured,
        ways=dict(best.ways),
    )


# --- Measuring


def measure_choices(
    call: Call, choices: Sequence[Choice], card: Card, rounds: int, runner: measure.Runner
) -> list[list[float] | None]:
    """Times the choices (`Measure`), on the GPU that `card` describes.

    Raises:
        RuntimeError: the operands do not fit in memory.
    """
    torch.cuda.empty_cache()  # does nothing before CUDA is initialised
    result = 0 if "out" in dict(call.operands) else call.result().bytes
    sets = measure.input_sets(call.bytes, runner.l2_bytes())
    # Every graph keeps its results; workspaces come and go.
    one = call.bytes + (len(choices) + 1) * 2 * result
    sets = min(sets, int(0.8 * runner.free_bytes()) // max(1, one))
    if sets < 1:
        raise RuntimeError(f"it takes {one / 2**30:.1f} GiB to measure, more than is free")
    inputs = [call.tensors(lambda operand: operand.random(runner.device)) for _ in range(sets)]
    function = overload(call.op)

    def work() -> list[Tensor]:
        return [function(**arguments) for arguments in inputs]

    replays = {}
    with torch.inference_mode():
        for index, choice in enumerate((choices[0], *choices)):
            torch.ops.tgemm._clear_tuning()
            table = "".join(f"{way}\t{key}\n" for key, way in choice.ways)
            torch.ops.tgemm._add_tuning(card.name, card.sm_count, table)
            try:
                replays[str(index)] = runner.capture(work)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
            finally:
                torch.ops.tgemm._clear_tuning()
        times = measure.time_in_turn(replays, runner, rounds) if replays else {}
    return [
        [ms * 1e3 / sets for ms in times[str(index)]] if str(index) in times else None
        for index in range(len(choices) + 1)
    ]


# --- The rest


def _rows_of(model: Any, inputs: Any) -> list[TracedRow]:
    args, kwargs = _call_arguments(inputs)
    with trace(events=False, nvtx=False) as t:
        if isinstance(model, torch.nn.Module):
            _outputs.run(model, args, kwargs)
        elif callable(model):
            with torch.no_grad():
                model(*args, **kwargs)
        else:
            raise TypeError(
                f"tune expects a module or a function, and got a {type(model).__name__}"
            )
    return t.rows()


@contextlib.contextmanager
def _untuned() -> Iterator[None]:
    """Without the tuning files that are loaded."""
    loaded = files.loaded()
    torch.ops.tgemm._clear_tuning()
    try:
        yield
    finally:
        torch.ops.tgemm._clear_tuning()
        for tuning in loaded:
            torch.ops.tgemm._add_tuning(tuning.card, tuning.sm_count, tuning.table())


def _tuning(card: Card, problems: tuple[TunedProblem, ...]) -> Tuning:
    from torch_gemm import __version__

    return Tuning(
        card=card.name,
        sm_count=card.sm_count,
        csrc_digest=files.library_digest(),
        torch_gemm=__version__,
        torch=torch.__version__,
        driver=driver_version(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        problems=problems,
    )


def _previous(path: Path, card: Card) -> Tuning | None:
    """What the file holds that is to be added to; None if there is none.

    Raises:
        OSError, ValueError: it cannot be written, or not be added to.
    """
    try:
        check_output(path)
    except CommandError as error:
        raise OSError(str(error)) from error
    if not path.exists():
        return None
    tuning = files.read(path)
    files.check_version(path, tuning)
    if (tuning.card, tuning.sm_count) != (card.name, card.sm_count):
        raise ValueError(
            f"{path} was measured on {tuning.card} with {tuning.sm_count} SMs, and this is {card.name} "
            f"with {card.sm_count}: give another path"
        )
    return tuning


def check(
    path: Path, time_budget: object, rounds: object, candidates: object
) -> tuple[Card, Tuning | None]:
    """What `tune` needs before it does anything: the GPU, and what is in the file already.

    Raises:
        OSError, ValueError, RuntimeError: as `tune`.
    """
    if time_budget is not None and not (
        isinstance(time_budget, (int, float)) and time_budget >= 0.0
    ):
        raise ValueError(f"tune: time_budget is {time_budget!r}, and must be seconds")
    for name, value in (("rounds", rounds), ("candidates", candidates)):
        if type(value) is not int or value < 1:
            raise ValueError(f"tune: {name} is {value!r}, and must be a number of at least 1")
    if _library.cuda_missing is not None:
        raise RuntimeError(_library.cuda_missing)
    card = cards.default()
    if card is None:
        raise RuntimeError(f"tune measures on a GPU, and there is none: {why_no_gpu()}")
    return card, _previous(path, card)


@contextlib.contextmanager
def _bar(total: int, progress: bool | None) -> Iterator[Callable[[str], None]]:
    """A progress bar, where one is wanted and rich is there: yields what moves it on."""
    wanted = sys.stderr.isatty() if progress is None else progress
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        wanted = False
    if not wanted or total == 0:
        yield lambda call: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tuning", total=total)
        yield lambda call: bar.update(task, advance=1, description=call[:60])
