"""Puts the tables of docs/support.md into the page, as the kernel table has them.

    python tests/support_matrix.py            writes the page
    python tests/support_matrix.py --check    fails if it is not what it would write

The tables come from a program that `make test-cpp` builds (tests/cpp/support_matrix.cpp): it asks every row of
the kernel table what it runs on cards that need not be in this machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"
PROGRAM = ROOT / "build" / "cmake" / "tests" / "cpp" / "support_matrix"
BEGIN, END = "<!-- kernel table -->\n", "<!-- end of kernel table -->"


def filled(page: str, tables: str) -> str:
    """The page with these tables between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main() -> int:
    """The command line.

    Returns:
        The exit status: 1 if the page is not up to date, 2 if the program is not built.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if it would")
    arguments = parser.parse_args()
    if not PROGRAM.is_file():
        print(f"{PROGRAM.relative_to(ROOT)} is not built: make test-cpp", file=sys.stderr)
        return 2
    tables = subprocess.run([PROGRAM], capture_output=True, text=True, check=True).stdout
    page = PAGE.read_text()
    new = filled(page, tables)
    if new == page:
        return 0
    if arguments.check:
        print("docs/support.md is not up to date: python tests/support_matrix.py")
        return 1
    PAGE.write_text(new)
    print("written: docs/support.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
