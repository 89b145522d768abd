"""Tuning files: what is in one, reading one that may be anything, and what the ops use of it.

A file belongs to one card and to the sources that its kernels were built from. It is used as a whole or
not at all.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_gemm import _library, _warnings
from torch_gemm._digest import build_record
from torch_gemm.console import write_file

FORMAT = "torch_gemm tuning"
VERSION = 1
VARIABLE = "TGEMM_TUNING"
# Far beyond what any model needs.
_MAX_BYTES = 16 << 20
_MAX_TEXT = 4000
_MAX_US = 1e12


@dataclass(frozen=True)
class TunedProblem:
    """One problem of a model and what was measured. Times are microseconds, medians of all rounds."""

    call: str  # for people: "linear(input 2048x4096, weight 4096x4096) bfloat16"
    count: int  # calls in one run of the model
    predicted: str  # what runs without tuning, a name in `measured`
    chosen: str  # what runs with it, the same or another
    measured: Mapping[str, float]  # by plan, or "A + B" of two launches, or "ATen"
    # What the ops are told: plans by problem (`Step.key` in `explain`). Of linear_glu, the first is that
    # of both weights in one kernel, where there is one.
    ways: Mapping[str, str]

    @property
    def key(self) -> str:
        """Names the problem: the first of `ways`."""
        return next(iter(self.ways))

    @property
    def predicted_us(self) -> float:
        """What one call takes without tuning."""
        return self.measured[self.predicted]

    @property
    def us(self) -> float:
        """What one call takes with it."""
        return self.measured[self.chosen]

    @property
    def speed_up(self) -> float:
        """Of one call."""
        return self.predicted_us / self.us


@dataclass(frozen=True)
class Tuning:
    """The content of a tuning file."""

    card: str  # as CUDA names it
    sm_count: int
    csrc_digest: str  # of the sources that the kernels were built from
    torch_gemm: str  # the library's version
    torch: str
    driver: str | None
    date: str
    problems: tuple[TunedProblem, ...]

    def __str__(self) -> str:
        faster = sum(problem.chosen != problem.predicted for problem in self.problems)
        return (
            f"{len(self.problems)} problems measured on {self.card} ({self.date}), {faster} of them "
            "faster with another kernel than the predicted one"
        )

    def table(self) -> str:
        """The lines that the op `_add_tuning` takes."""
        lines = [
            f"{way}\t{key}\n" for problem in self.problems for key, way in problem.ways.items()
        ]
        return "".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """What the file holds, for JSON."""
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}


def read(path: str | os.PathLike[str]) -> Tuning:
    """Reads a tuning file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a tuning file; one sentence says what is wrong with it.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a folder, a device
            raise ValueError(f"{path} is not a regular file")
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path} is larger than a tuning file can be")
        content = path.read_bytes()
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from error
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested without end
        raise ValueError(f"{path} is not a tuning file: it is no JSON") from error
    try:
        return _tuning(stored)
    except _MalformedError as error:
        raise ValueError(f"{path} is not a tuning file of this version: {error}") from error


def write(path: str | os.PathLike[str], tuning: Tuning) -> None:
    """Writes a tuning file whole or not at all.

    Raises:
        OSError: it cannot be written; one sentence.
    """
    write_file(Path(path), (json.dumps(tuning.to_dict(), indent=1) + "\n").encode())


def check_version(path: str | os.PathLike[str], tuning: Tuning) -> None:
    """Refuses what was measured with other kernels.

    Raises:
        ValueError: one sentence.
    """
    digest = library_digest()
    if tuning.csrc_digest != digest:
        raise ValueError(
            f"{path} was measured with the kernels of torch_gemm {tuning.torch_gemm} "
            f"({tuning.csrc_digest[:12]}), and these are others ({digest[:12]}): tune again"
        )


def library_digest() -> str:
    """Of the sources of the library that is loaded."""
    return (build_record() or {}).get("csrc_digest", "unknown")


# --- What the ops use

_loaded: list[Tuning] = []


def load_tuning(path: str | os.PathLike[str]) -> Tuning:
    """Lets the ops run each problem of a file that `tune` wrote as it was measured to be fastest.

    Holds for the process, all of its threads, and everything that goes through the ops from then on;
    CUDA graphs keep the kernels that they captured. A second file adds to the first, and of two that
    know a problem the later one counts. `unload_tuning` undoes all. The environment variable
    TGEMM_TUNING names a file to load when torch_gemm is imported; a process without Python loads none.

    Args:
        path: the file.

    Returns:
        What is in it; ``print`` shows a summary.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no tuning file, is damaged, or belongs to another card or to other kernels than
            these; nothing has changed then. One sentence.
        RuntimeError: the CUDA library is not loaded.
    """
    if _library.cuda_missing is not None:
        raise RuntimeError(_library.cuda_missing)
    tuning = read(path)
    check_version(path, tuning)
    refusal = _wrong_card(path, tuning)
    if refusal is not None:
        raise ValueError(refusal)
    _add(path, tuning)
    return tuning


def unload_tuning() -> None:
    """Lets the ops choose by prediction alone again."""
    _loaded.clear()
    if _library.cuda_missing is None:
        torch.ops.tgemm._clear_tuning()


def loaded() -> tuple[Tuning, ...]:
    """The files in use, in the order in which they were loaded."""
    return tuple(_loaded)


def load_from_environment() -> None:
    """Loads the file that TGEMM_TUNING names; what is wrong with it becomes a warning.

    CUDA is not initialised for it: whether the file is for this machine's card is found out when
    something else does that.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        if _library.cuda_missing is not None:
            raise RuntimeError(_library.cuda_missing)
        tuning = read(path)
        check_version(path, tuning)
        _add(path, tuning)
    except (OSError, ValueError, RuntimeError) as error:
        _warnings.warn_caller(f"{VARIABLE} is not used: {error}")
        return

    def check() -> None:
        refusal = _wrong_card(path, tuning)
        if refusal is not None:
            _warnings.warn_caller(f"{VARIABLE} is not used: {refusal}")

    torch.cuda._lazy_call(check)


def _add(path: str | os.PathLike[str], tuning: Tuning) -> None:
    try:
        torch.ops.tgemm._add_tuning(tuning.card, tuning.sm_count, tuning.table())
    except RuntimeError as error:  # a kernel that does not exist
        raise ValueError(f"{path} is damaged: {str(error).removeprefix('tgemm: ')}") from error
    _loaded.append(tuning)


def _wrong_card(path: str | os.PathLike[str], tuning: Tuning) -> str | None:
    """Why no GPU of this machine can use the tuning; None if one can, or if there is none to ask."""
    if not torch.cuda.is_available():
        return None  # nothing runs here; `explain` can still be asked
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if (properties.name, properties.multi_processor_count) == (tuning.card, tuning.sm_count):
            return None
        found.append(f"{properties.name} with {properties.multi_processor_count} SMs")
    return (
        f"{path} was measured on {tuning.card} with {tuning.sm_count} SMs, and this machine has "
        f"{', '.join(found)}: tune again"
    )


# --- Checking what was read


class _MalformedError(Exception):
    """What is wrong, as the end of a sentence."""


def _tuning(stored: Any) -> Tuning:
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise _MalformedError(f'its "format" is not "{FORMAT}"')
    if type(stored.get("version")) is not int or stored["version"] != VERSION:
        raise _MalformedError(f'its "version" is not {VERSION}')
    problems = stored.get("problems")
    if not isinstance(problems, list):
        raise _MalformedError('its "problems" are no list')
    driver = stored.get("driver")
    return Tuning(
        card=_text(stored, "card"),
        sm_count=_count(stored, "sm_count"),
        csrc_digest=_text(stored, "csrc_digest"),
        torch_gemm=_text(stored, "torch_gemm"),
        torch=_text(stored, "torch"),
        driver=None if driver is None else _text(stored, "driver"),
        date=_text(stored, "date"),
        problems=tuple(map(_problem, problems)),
    )


def _problem(stored: Any) -> TunedProblem:
    if not isinstance(stored, dict):
        raise _MalformedError("a problem is no object")
    measured, ways = stored.get("measured"), stored.get("ways")
    if not isinstance(measured, dict) or not all(map(_is_time, measured.values())):
        raise _MalformedError('the "measured" times of a problem are not positive numbers by name')
    if not isinstance(ways, dict) or not ways:
        raise _MalformedError('the "ways" of a problem are not plans by name')
    for text in measured:
        _check_text(text, "measured")
    for text in (*ways, *ways.values()):
        _check_text(text, "ways")
    problem = TunedProblem(
        call=_text(stored, "call"),
        count=_count(stored, "count"),
        predicted=_text(stored, "predicted"),
        chosen=_text(stored, "chosen"),
        measured={name: float(us) for name, us in measured.items()},
        ways=dict(ways),
    )
    for name in (problem.predicted, problem.chosen):
        if name not in measured:
            raise _MalformedError(f"{name!r} was not measured")
    return problem


def _is_time(value: Any) -> bool:
    # Compared before it is converted: an integer may be larger than any float.
    return type(value) in (int, float) and 0 < value < _MAX_US


def _text(stored: Mapping[str, Any], name: str) -> str:
    _check_text(stored.get(name), name)
    return stored[name]


def _check_text(value: Any, name: str) -> None:
    # Lines and tabs are what separates entries of the table.
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        raise _MalformedError(f'"{name}" is not, or does not hold, a line of text')


def _count(stored: Mapping[str, Any], name: str) -> int:
    value = stored.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise _MalformedError(f'"{name}" is not a positive number')
    return value
