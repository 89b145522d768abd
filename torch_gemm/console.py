"""What the subcommands of ``python -m torch_gemm`` share: terminal, output files, and how they fail."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class CommandError(Exception):
    """Ends a subcommand: its one sentence goes to stderr and the exit status is 2."""


def open_console() -> Console:
    """The terminal to print on.

    Raises:
        CommandError: if rich, which the command line needs and the library does not, is missing.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise CommandError(
            "The command line prints through the package rich: pip install 'torch_gemm[cli]'"
        ) from error
    return Console(highlight=False)


def rich_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], whole: int = 1
) -> Table:
    """A table for the terminal; its first columns, as many as `whole`, do not wrap."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, text in enumerate(headings):
        table.add_column(
            text, justify="left" if i == 0 else "right", no_wrap=i < whole, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))  # an index in brackets is no markup
    return table


def first_line(error: BaseException) -> str:
    """The beginning of an exception's message, for a sentence that quotes it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def check_output(path: Path) -> None:
    """Finds out, before any work is done, whether `write_output` will be able to write a file.

    Raises:
        CommandError: the folder does not exist or may not be written, or `path` is no regular file.
    """
    try:
        if path.exists() and not path.is_file():
            raise CommandError(f"{path} is not a regular file, and cannot be written")
        probe = _beside(path)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """The same for all files that a command is to write, by their options; None where one is not given.

    Raises:
        CommandError: as `check_output`, or two of them are the same file.
    """
    seen: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise CommandError(f"{other} and {option} are the same file, {path}")
        check_output(path)


def prepare_output(path: Path) -> None:
    """Makes the folder of a file that is to be written, and finds out whether it will be.

    Raises:
        CommandError: as `check_output`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
    check_output(path)


def load_function(target: str) -> Callable[..., Any]:
    """What the user's "package.module:function" names.

    Raises:
        CommandError: it is of another form, cannot be imported, or is no function.
    """
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise CommandError(f"{target!r} is not of the form package.module:function")
    try:
        found = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise CommandError(
            f"{target} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not callable(found):
        raise CommandError(f"{target} is a {type(found).__name__}, and must be a function")
    return found


def write_output(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all.

    Raises:
        CommandError: it cannot be written; what was there before still is.
    """
    try:
        write_file(path, content)
    except OSError as error:
        raise CommandError(str(error)) from error


def write_file(path: Path, content: bytes) -> None:
    """The same for functions that a program calls.

    Raises:
        OSError: with one sentence.
    """
    unfinished = _beside(path)
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path.resolve())
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # where the folder is none, nothing was written
            unfinished.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Where a file is written before it takes its place; a rename works within one folder."""
    path = path.resolve()
    return path.with_name(f".{path.name}.{os.getpid()}")
