"""Fills the tables in README.md and docs/ from benchmarks/results/, and draws the pictures.

What stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->`` is generated: as BLOCKS[NAME] says,
otherwise as a table of side-by-side times from ``results/NAME.json``.

    python -m benchmarks.render           writes README.md, docs/*.md and docs/*.svg
    python -m benchmarks.render --check   fails if they are not what it would write
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import speedups
from torch_gemm._digest import source_digest
from torch_gemm.bench.results import caption_of, geometric_mean, place_of, rivals_of, source_of
from torch_gemm.bench.shapes import AGAINST, Shape, shape_of
from torch_gemm.console import CommandError, write_output
from torch_gemm.ladder.picture import draw, drawn_digest, result_digest
from torch_gemm.ladder.rungs import RUNGS
from torch_gemm.ladder.tables import (
    EMULATED,
    counter_text,
    percent_text,
    share_of_peak,
    shared_kib,
    times_of,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results")
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"<!-- begin: (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end: (?P=name) -->", re.S)
NOT_MEASURED = "Not measured yet.\n"

Result = dict[str, Any]


def render(text: str, results: Path = RESULTS) -> str:
    """The document with every marked block generated anew.

    Raises:
        ValueError: if a marker has no counterpart.
    """
    filled = BLOCK.sub(
        lambda block: (
            f"<!-- begin: {block['name']} -->\n"
            f"{block_of(block['name'], results)}"
            f"<!-- end: {block['name']} -->"
        ),
        text,
    )
    for marker in re.findall(r"<!-- (?:begin|end): .*? -->", BLOCK.sub("", text)):
        raise ValueError(f"the marker {marker} has no counterpart")
    return filled


def block_of(name: str, results: Path = RESULTS) -> str:
    """The Markdown of one block, or what stands for it where its first result does not exist yet."""
    kind = kind_of(name)
    first, *others = [load(source, results) for source in kind.sources]
    return kind.markdown(first, *others) if first else kind.missing


def load(source: str, results: Path) -> Result | None:
    """A stored result by its name, or None where there is none."""
    path = results / f"{source}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def stale(text: str, results: Path = RESULTS) -> list[str]:
    """The results shown in a document that were measured on other sources than csrc/ has now."""
    digest = source_digest()
    names = [source for block in BLOCK.finditer(text) for source in kind_of(block["name"]).sources]
    found = {name: load(name, results) for name in names}
    return [
        name
        for name, result in found.items()
        if result and result["stamp"]["csrc_digest"] != digest
    ]


def _table(header: str, rule: str, rows: Iterable[str]) -> str:
    return "\n".join([header, rule, *rows]) + "\n"


# --- Results of benchmarks.side_by_side


def side_by_side(result: Result, bandwidth: bool = False) -> str:
    """A table of shapes and where it comes from."""
    return f"{table_of(result['rows'], bandwidth)}\n{caption_of(result)}\n"


def table_of(rows: Sequence[dict[str, Any]], bandwidth: bool = False) -> str:
    """One line a shape: torch, its rivals, tgemm's own choice and what it chose, and what that gains.

    Layouts, epilogues, odd placements and rivals have columns where there are any. With rivals, the gain is over the best
    of them and torch. With `bandwidth`, speeds are those of the memory traffic instead of the arithmetic.
    """
    shapes, plain = [shape_of(row) for row in rows], Shape(1, 1, 1, "")
    columns = ["dtype"] + [
        name
        for name in ("layout", "epilogue", "placement")
        if any(getattr(shape, name) != getattr(plain, name) for shape in shapes)
    ]
    others = rivals_of(rows)
    gain = speedups.gain_key(others)

    def cell(row: dict[str, Any], shape: Shape, name: str) -> str:
        contender = row["contenders"].get(name)
        if contender is None:
            return "-"
        if bandwidth:  # bytes per microsecond are MB/s
            return f"{contender['us']:.1f} us, {shape.bytes / contender['us'] * 1e-6:.2f} TB/s"
        return f"{contender['us']:.1f} us, {contender['tflops']:.0f} TFLOP/s"

    return _table(
        f"| M x N x K | {' | '.join([*columns, *others])} | tgemm | kernel | speed-up |",
        f"|---|{'---|' * len(columns)}{'---:|' * len(others)}---:|---|---:|",
        (
            f"| {_sizes(shape)} "
            f"| {' | '.join(getattr(shape, name) or '-' for name in columns)} "
            f"| {' | '.join(cell(row, shape, name) for name in [*others, 'tgemm'])} "
            f"| `{row['chosen']}` | {row[gain]:.2f} |"
            for row, shape in zip(rows, shapes, strict=True)
        ),
    )


def _sizes(shape: Shape) -> str:
    sizes = f"{shape.m} x {shape.n} x {shape.k}"
    return sizes if shape.batch == 1 else f"{shape.batch} x ({sizes})"


def _what(shape: Shape) -> str:
    return " ".join(filter(None, (shape.dtype, shape.layout, shape.epilogue, shape.placement)))


def fused(result: Result) -> str:
    """The table of fused epilogues, and what torch does for each."""
    return (
        "Fused epilogues beside what they replace: torch's linear (with its bias for `bias` and `gelu`) and then "
        "the\nactivation or addition; for `swiglu`, N columns each of gate and up, one product of both and a "
        f"compiled\n`silu(gate) * up`.\n\n{side_by_side(result)}"
    )


# --- All suites together


def summary(*results: Result | None) -> str:
    """A line for each suite: on how many shapes tgemm is faster, level or slower."""
    found = suites_of(results)
    lines = []
    for suite, result in found.items():
        gains = [one.gain for one in speedups.standings({suite: result})]
        verdicts = [speedups.verdict(gain) for gain in gains]
        counts = " | ".join(str(verdicts.count(v)) for v in ("faster", "level", "slower"))
        lines.append(
            f"| {speedups.SUITES[suite]} | {_against(result['rows'])} "
            f"| {counts} | {geometric_mean(gains):.2f} | {min(gains):.2f} | {max(gains):.2f} |"
        )
    table = _table(
        "| what | against | faster | level | slower | mean | worst | best |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        lines,
    )
    return (
        f"{table}\nShapes, and speed-ups over the best rival of each: geometric mean, smallest, largest. "
        f"Level: within {speedups.LEVEL:.0%}. {cards_of(found)}{_unmeasured(found)}\n"
    )


def _against(rows: Sequence[dict[str, Any]]) -> str:
    """The rivals of a suite, and on how many of its shapes each ran where that is not all."""
    counts = {name: sum(name in row["contenders"] for row in rows) for name in rivals_of(rows)}
    return ", ".join(
        name if count == len(rows) else f"{name} ({count} of {len(rows)})"
        for name, count in counts.items()
    )


def _unmeasured(found: Mapping[str, Result]) -> str:
    """Which rivals that the benchmark knows none of the results has."""
    rows = [row for result in found.values() for row in result["rows"]]
    names = [name for name in AGAINST.values() if name not in rivals_of(rows)]
    return f" Not measured against: {'; '.join(names)}." if names else ""


def losses(*results: Result | None) -> str:
    """Every shape on which tgemm is slower than its best rival, worst first."""
    found = suites_of(results)
    slower = [one for one in speedups.standings(found) if speedups.verdict(one.gain) == "slower"]
    table = _table(
        "| M x N x K | what | best rival | tgemm | kernel | speed-up |",
        "|---|---|---:|---:|---|---:|",
        (
            f"| {_sizes(one.shape)} "
            f"| {_what(one.shape)} "
            f"| {one.rival}: {one.rival_us:.1f} us | {one.us:.1f} us | `{one.kernel}` | {one.gain:.2f} |"
            for one in sorted(slower, key=lambda one: one.gain)
        ),
    )
    return (
        f"{table}\n{len(slower)} of {len(speedups.standings(found))} shapes, in all suites, by more than "
        f"{speedups.LEVEL:.0%}. {cards_of(found)}\n"
    )


def suites_of(results: Sequence[Result | None]) -> dict[str, Result]:
    """The results that exist of those that `speedups.SUITES` lists, by name."""
    return {
        name: result
        for name, result in zip(speedups.SUITES, results, strict=True)
        if result is not None
    }


def cards_of(results: dict[str, Result]) -> str:
    """On what, and when, several results were measured."""
    return "; ".join(sorted(set(map(place_of, results.values())))) + "."


def decode(result: Result) -> str:
    """The table of products with few rows, whose speed is that of reading the weight."""
    return (
        "Few rows, as in decoding: the time is that of reading the weight once, so speeds are in TB/s of operands and\n"
        f"output.\n\n{side_by_side(result, bandwidth=True)}"
    )


# --- Results of benchmarks.models and benchmarks.host_cost


def models(result: Result) -> str:
    """A column for each model, a line for each way to run it."""
    rows = result["rows"]
    ways = list(dict.fromkeys(way for row in rows for way in row["cells"]))

    def cell(row: dict[str, Any], way: str) -> str:
        found = row["cells"].get(way, {})
        if "ms" not in found:
            return "-"
        return f"{found['ms']:.2f} ms, {found['over_best_stock']:.2f}, {found['difference']:.1e}"

    shares = [f"{row['gemm_share']:.0%}" for row in rows]
    table = _table(
        f"| {rows[0]['dtype']} | {' | '.join(row['what'] for row in rows)} |",
        f"|---|{'---:|' * len(rows)}",
        [f"| {way} | {' | '.join(cell(row, way) for row in rows)} |" for way in ways]
        + [f"| matrix products' share | {' | '.join(shares)} |"],
    )
    return (
        f"{table}\nIn each cell: time, speed-up over the best stock way, largest difference of an output from the model "
        f"in FP32. Products' share: of the time of stock eager. {result['rounds']} rounds; the control says how far they "
        f"differ. {place_of(result)}.\n"
    )


def host_cost(result: Result) -> str:
    """What a call takes of the host, beside torch's."""
    timed = [row for row in result["rows"] if row["bar"]]
    m, n, k = result["shape"]
    parts = [
        f"{name} {call['us']:.1f} us"
        for row in result["rows"]
        if not row["bar"]
        for name, call in row["calls"].items()
    ]
    table = _table(
        "| op | mode | call | host time | of torch's |",
        "|---|---|---|---:|---:|",
        (
            f"| {row['op']} | {row['mode']} | {name} | {call['us']:.1f} us | {call['of_torch']:.2f} |"
            for row in timed
            for name, call in row["calls"].items()
        ),
    )
    return (
        f"{table}\n{m} x {n} x {k}, {result['calls']:,} calls of each, in turns; nothing waits for the GPU. "
        f"For comparison: {', '.join(parts)}. {place_of(result)}.\n"
    )


# --- Results of `python -m torch_gemm ladder`

LADDER_PICTURE = Path("docs/ladder.svg")  # from README.md


def ladder(nn: Result, nt: Result | None, fp32: Result | None) -> str:
    """The picture, and, folded up, a table for each result that exists."""
    parts = [
        f"![TFLOP/s of every rung]({LADDER_PICTURE})\n",
        "<details><summary>Times, speed-ups, shares of peak</summary>\n",
        ladder_table(nn),
        ladder_caption(nn),
    ]
    if nt:
        parts += [f"{_problem(nt)}, B as `nn.Linear` has it:\n", ladder_table(nt)]
    if fp32:
        parts += [
            f"{_problem(fp32)}. On Tensor Cores these rungs round FP32 operands to FP16. Errors: largest "
            "and RMS deviation from the FP64 product, as shares of the product's RMS.\n",
            accuracy_table(fp32),
        ]
    return "\n".join([*parts, "</details>\n"])


def ladder_table(result: Result) -> str:
    """One line for each rung, each twin, and cuBLAS."""
    return _table(
        "| kernel | idea | us | TFLOP/s | over naive | over the rung before | of peak |",
        "|---|---|---:|---:|---:|---:|---:|",
        (
            f"| {_name(row)} | {row['idea']} | {row['us']:.1f} | {row['tflops']:.1f} "
            f"| {times_of(row['over_naive'])} | {times_of(row['over_refined'])} | {share_of_peak(row)} |"
            for row in result["rows"]
            if "us" in row
        ),
    )


def ladder_caption(result: Result) -> str:
    """Where the numbers come from, how to read them, and what does not run on that card."""
    measured = [row for row in result["rows"] if "us" in row]
    sentences = [
        f"{_problem(result)}, both operands row-major. {source_of(result)}",
        f"torch beside itself differed by {abs(result['control_ratio'] - 1):.1%}.",
        "A twin, indented, is the rung above with its idea off. Peaks are at boost clock.",
    ]
    told = [row for row in measured if row.get("a100_over_naive") and row["name"] != "naive"]
    if told:
        ratios = [f"`{row['name']}` {times_of(row['a100_over_naive'])}" for row in told]
        sentences.append(
            f"Write-ups of these steps on an A100 have, over naive, {', '.join(ratios)}."
        )
    if any(row.get("emulated") for row in measured):
        sentences.append(EMULATED)
    sentences += [
        f"`{row['name']}` did not run: {row['refused'].rstrip('.')}."
        for row in result["rows"]
        if "refused" in row
    ]
    return " ".join(sentences) + "\n"


def accuracy_table(result: Result) -> str:
    """How far each way to multiply FP32 operands is from FP64."""
    return _table(
        "| kernel | multiplies | TFLOP/s | largest error | RMS error |",
        "|---|---|---:|---:|---:|",
        (
            f"| {_name(row)} | {_multiplies(row)} | {row['tflops']:.1f} "
            f"| {row['largest_error']:.1e} | {row['rms_error']:.1e} |"
            for row in result["rows"]
            if "us" in row
        ),
    )


def _name(row: dict[str, Any]) -> str:
    if row.get("twin_of"):
        return f"&nbsp;&nbsp;`{row['name'].partition(':')[2]}`"
    return f"`{row['name']}`" if "refines" in row else row["name"]


def _multiplies(row: dict[str, Any]) -> str:
    if row.get("precision") == "fp16":
        return "FP16"
    return "TF32" if row["unit"] == "tf32" else "FP32"


def _problem(result: Result) -> str:
    size = result["size"]
    return f"{size} x {size} x {size}, {result['dtype']}"


def ladder_measured(nn: Result) -> str:
    """What the figures of the rungs were measured on."""
    shown = [
        f"{label} {nn['peaks'][unit]:.0f}"
        for unit, label in (("fma", "FP32 FMA"), ("tensor", "Tensor Cores"))
        if unit in nn["peaks"]
    ]
    peaks = f" Peaks at boost clock, TFLOP/s: {', '.join(shown)}." if shown else ""
    return f"{_problem(nn)}, both operands row-major. {source_of(nn)}{peaks}\n"


def ladder_rung(name: str, nn: Result) -> str:
    """Speed, resources and counters of one rung, beside those of its twin."""
    rows = [row for row in nn["rows"] if name in (row["name"], row.get("twin_of"))]
    measured = [row for row in rows if "us" in row]
    refused = [
        f"`{row['name']}` did not run: {row['refused'].rstrip('.')}.\n"
        for row in rows
        if "refused" in row
    ]
    if not measured:
        return "".join(refused) or NOT_MEASURED
    counted = {row["name"]: row for row in nn.get("profile", {}).get("rows", ())}
    columns = [_rung_cells(row, counted.get(row["name"])) for row in measured]
    return _table(
        "| | " + " | ".join(f"`{row['name'].rpartition(':')[2]}`" for row in measured) + " |",
        "|---|" + "---|" * len(measured),
        (
            f"| {label} | " + " | ".join(column[label] for column in columns) + " |"
            for label in columns[0]
        ),
    ) + "".join(refused)


def _rung_cells(row: dict[str, Any], counted: dict[str, Any] | None) -> dict[str, str]:
    """What `ladder_rung` says of a row, by label; the counters only where it was profiled."""
    cells = {
        "time": f"{row['us']:.1f} us",
        "speed": f"{row['tflops']:.1f} TFLOP/s, {share_of_peak(row)}",
        "over naive": times_of(row["over_naive"]),
        "over the rung before": times_of(row["over_refined"]),
    }
    taken = row.get("resources")
    if taken:
        cells |= {
            "registers per thread": str(taken["registers"]),
            "shared memory per CTA": f"{shared_kib(taken):.1f} KiB",
            "occupancy": f"{taken['occupancy']:.0%}: {taken['ctas_per_sm']} x {taken['threads']} "
            "threads per SM",
        }
    if counted:
        loads, stores = (
            counter_text(counted[f"{kind}_wavefronts_per_request"], ".2f")
            for kind in ("load", "store")
        )
        conflicts = [
            counter_text(counted[f"shared_{kind}_conflicts"], ",.0f") for kind in ("load", "store")
        ]
        cells |= {
            "wavefronts per shared load, store": f"{loads}, {stores}",
            "bank conflicts of loads, stores": ", ".join(conflicts),
            "DRAM, L2": f"{percent_text(counted['dram_percent'])}, "
            f"{percent_text(counted['l2_percent'])} of peak",
            "Tensor Cores busy": percent_text(counted["tensor_busy_percent"]),
            "top stalls": ", ".join(f"{why} {warps:.2f}" for why, warps in counted["stalls"]),
        }
    return cells


def ladder_layouts(nn: Result, nt: Result | None) -> str:
    """The same kernels with B row-major (nn) and as the transpose of a row-major matrix (nt)."""
    if nt is None:
        return NOT_MEASURED
    transposed = {row["name"]: row for row in nt["rows"] if "us" in row}
    return _table(
        "| kernel | nn | nt | nn over nt |",
        "|---|---:|---:|---:|",
        (
            f"| {_name(row)} | {row['us']:.1f} us | {other['us']:.1f} us "
            f"| {times_of(other['us'] / row['us'])} |"
            for row in nn["rows"]
            if "us" in row and (other := transposed.get(row["name"]))
        ),
    )


# --- Kinds of blocks


@dataclass(frozen=True)
class Kind:
    """What a block shows: the names of its results, and what makes Markdown of them.

    `markdown` gets one argument for each source, None where it does not exist; the first always does.
    `missing` is shown where the first does not exist.
    """

    sources: tuple[str, ...]
    markdown: Callable[..., str]
    missing: str = NOT_MEASURED


BLOCKS = {
    "decode": Kind(("decode",), decode),
    "summary": Kind(tuple(speedups.SUITES), summary),
    "losses": Kind(tuple(speedups.SUITES), losses),
    "fused": Kind(("fused",), fused, missing=""),
    "models": Kind(("models_bf16",), models),
    "host_cost": Kind(("host_cost",), host_cost),
    "ladder": Kind(("ladder_nn_fp16", "ladder_nt_fp16", "ladder_nn_fp32"), ladder),
    "ladder-measured": Kind(("ladder_nn_fp16",), ladder_measured),
    "ladder-layouts": Kind(("ladder_nn_fp16", "ladder_nt_fp16"), ladder_layouts),
} | {
    f"ladder-{rung.kernel}": Kind(("ladder_nn_fp16",), partial(ladder_rung, rung.kernel))
    for rung in RUNGS
}


def kind_of(name: str) -> Kind:
    """What the block of this name shows."""
    return BLOCKS.get(name, Kind((name,), side_by_side))


# --- Pictures


@dataclass(frozen=True)
class Picture:
    """What is drawn for README.md, where that has the block of this name; other documents only show it."""

    path: Path  # from README.md
    sources: tuple[str, ...]  # the first must exist
    digest: Callable[[dict[str, Result]], str]
    draw: Callable[[dict[str, Result], str], bytes]

    def results(self, document: Path, block: str, results: Path) -> dict[str, Result]:
        """What it shows, by name; nothing where the document does not ask for it or nothing is measured."""
        found = {name: load(name, results) for name in self.sources}
        if document.parent.name == "docs" or f"<!-- begin: {block} -->" not in document.read_text():
            return {}
        if found[self.sources[0]] is None:
            return {}
        return {name: result for name, result in found.items() if result is not None}

    def is_current(self, document: Path, block: str, results: Path) -> bool:
        """Whether the file beside a document shows the stored results, or there are none to show."""
        shown = self.results(document, block, results)
        file = document.parent / self.path
        return not shown or (
            file.is_file() and drawn_digest(file.read_bytes()) == self.digest(shown)
        )

    def write(self, document: Path, block: str, results: Path) -> None:
        """Draws the stored results beside a document.

        Raises:
            CommandError: matplotlib is not installed, or the file cannot be written.
        """
        file = document.parent / self.path
        content = self.draw(self.results(document, block, results), self.path.suffix[1:])
        file.parent.mkdir(exist_ok=True)
        write_output(file, content)


def _only(results: dict[str, Result]) -> Result:
    (result,) = results.values()
    return result


PICTURES = {
    "ladder": Picture(
        LADDER_PICTURE,
        ("ladder_nn_fp16",),
        lambda results: result_digest(_only(results)),
        lambda results, form: draw(_only(results), form),
    ),
    "summary": Picture(
        Path("docs/speedups.svg"), tuple(speedups.SUITES), speedups.digest_of, speedups.draw
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit status: 1 if a document or the picture is not up to date and `--check` forbids to
        change that, 2 if matplotlib is missing or something cannot be read.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if it would")
    parser.add_argument(
        "--document",
        type=Path,
        action="append",
        metavar="FILE",
        help=f"may be repeated; default: {', '.join(path.name for path in DOCUMENTS)}",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parsed = parser.parse_args(arguments)
    documents, results = parsed.document or DOCUMENTS, parsed.results
    try:
        if not results.is_dir():
            raise ValueError(f"there is no folder {results}")
        texts = {path: path.read_text() for path in documents}
        rendered = {path: render(text, results) for path, text in texts.items()}
    except (OSError, ValueError) as error:
        print(f"render: {error}", file=sys.stderr)
        return 2
    for name in stale("".join(texts.values()), results):
        print(f"{name}: measured before the last change of csrc/", file=sys.stderr)

    undrawn = [
        (picture, path, block)
        for path in documents
        for block, picture in PICTURES.items()
        if not picture.is_current(path, block, results)
    ]
    outdated = [path for path in documents if rendered[path] != texts[path]]
    outdated += [path.parent / picture.path for picture, path, _ in undrawn]
    if parsed.check:
        for path in outdated:
            print(f"{path.name} is not up to date: python -m benchmarks.render")
        return int(bool(outdated))
    try:
        for picture, path, block in undrawn:
            picture.write(path, block, results)
        for path in documents:
            if rendered[path] != texts[path]:
                write_output(path, rendered[path].encode())
    except CommandError as error:
        print(error, file=sys.stderr)
        return 2
    for path in outdated:
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
