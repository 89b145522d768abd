"""What the subcommands of ``python -m torch_gemm`` share: their terminal and their way to fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


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


def first_line(error: BaseException) -> str:
    """The beginning of an exception's message, for a sentence that quotes it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
