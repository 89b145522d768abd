"""``python -m torch_gemm COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch_gemm import auditing, bench, checking, demo, explaining, info, ladder, tuning
from torch_gemm.console import CommandError

# A command is a module: its docstring's first line is the help text, add_arguments(parser) declares
# its options, run(arguments) does the work, returns an exit status if it can be other than 0, and raises
# CommandError to fail.
COMMANDS = {
    "audit": auditing,
    "bench": bench,
    "check": checking,
    "demo": demo,
    "explain": explaining,
    "info": info,
    "ladder": ladder,
    "tune": tuning,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        arguments: the command line without the program's name; None reads ``sys.argv``.

    Returns:
        The exit status: 0, what the command returns, or 2 after one sentence on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torch_gemm",
        description="GEMM kernels that stand in for torch.matmul and nn.Linear.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = module.__doc__.strip().splitlines()[0]
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed) or 0
    except CommandError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
