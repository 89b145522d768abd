"""``python -m torch_gemm COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch_gemm import demo, explaining, info, ladder, tuning
from torch_gemm.console import CommandError

# A command is a module: its docstring's first line is the help text, add_arguments(parser) declares
# its options, run(arguments) does the work and raises CommandError to fail.
COMMANDS = {
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
        The exit status: 0, or 2 after one sentence on stderr.
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
        parsed.run(parsed)
    except CommandError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
