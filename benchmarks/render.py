"""Fills the tables in README.md from benchmarks/results/.

What stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->`` is generated from
``results/NAME.json``.

    python -m benchmarks.render           writes README.md
    python -m benchmarks.render --check   fails if README.md is not what it would write
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_gemm._digest import source_digest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results")
BLOCK = re.compile(r"<!-- begin: (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end: (?P=name) -->", re.S)
NOT_MEASURED = "Not measured yet.\n"


def render(text: str, results: Path = RESULTS) -> str:
    """The document with every marked block generated anew.

    Raises:
        ValueError: if a marker has no counterpart.
    """
    filled = BLOCK.sub(
        lambda block: (
            f"<!-- begin: {block['name']} -->\n"
            f"{block_of(results / (block['name'] + '.json'))}"
            f"<!-- end: {block['name']} -->"
        ),
        text,
    )
    for marker in re.findall(r"<!-- (?:begin|end): .*? -->", BLOCK.sub("", text)):
        raise ValueError(f"the marker {marker} has no counterpart")
    return filled


def block_of(path: Path) -> str:
    """The Markdown of one result, or a sentence where there is none yet."""
    if not path.is_file():
        return NOT_MEASURED
    result = json.loads(path.read_text())
    return f"{table_of(result['rows'])}\n{caption_of(result)}\n"


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """One line a shape: torch, tgemm's own choice and what it chose, and their ratio."""
    lines = [
        "| M x N x K | dtype | torch | tgemm | kernel | speed-up |",
        "|---|---|---:|---:|---|---:|",
    ]
    lines += [
        f"| {row['m']} x {row['n']} x {row['k']} | {row['dtype']} "
        f"| {_time(row['contenders']['torch'])} | {_time(row['contenders']['tgemm'])} "
        f"| `{row['chosen']}` | {row['ratio']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def caption_of(result: dict[str, Any]) -> str:
    """Where the numbers come from, and how far the method is to be trusted."""
    stamp, rows = result["stamp"], result["rows"]
    spread = max(abs(row["control_ratio"] - 1) for row in rows)
    return (
        f"{stamp['card']}, driver {stamp['driver']}, torch {stamp['torch']}, {stamp['date']}: CUDA "
        f"graphs over random inputs beyond L2, replayed in turn, medians of {result['rounds']} rounds. "
        f"torch beside itself differed by up to {spread:.1%}."
    )


def stale(text: str, results: Path = RESULTS) -> list[str]:
    """The names of the blocks whose results were measured on other sources than csrc/ has now."""
    digest = source_digest()
    names = [block["name"] for block in BLOCK.finditer(text)]
    paths = {name: results / f"{name}.json" for name in names}
    return [
        name
        for name, path in paths.items()
        if path.is_file() and json.loads(path.read_text())["stamp"]["csrc_digest"] != digest
    ]


def _time(contender: dict[str, Any]) -> str:
    return f"{contender['us']:.1f} us, {contender['tflops']:.0f} TFLOP/s"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 1 if the document is not up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if it would")
    parser.add_argument("--document", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parsed = parser.parse_args(arguments)
    text = parsed.document.read_text()
    rendered = render(text, parsed.results)
    for name in stale(text, parsed.results):
        print(f"{name}: measured before the last change of csrc/", file=sys.stderr)
    if rendered == text:
        return 0
    if parsed.check:
        print(f"{parsed.document.name} is not up to date: python -m benchmarks.render")
        return 1
    parsed.document.write_text(rendered)
    print(f"written: {parsed.document}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
