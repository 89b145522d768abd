"""Stored results: what they are, and how far a new one is from an old one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_gemm.bench.shapes import AGAINST, Shape, shape_of
from torch_gemm.console import CommandError

Result = dict[str, Any]

# The same kernel beside itself reads 1.00 +- 0.02 (an H200, nine rounds), whatever its rounds say.
FLOOR = 0.02


def kind_of(result: Result) -> str:
    """What made a result: "ladder", "models" or "side_by_side"."""
    if "size" in result:
        return "ladder"
    rows = result["rows"]
    return "models" if rows and "model" in rows[0] else "side_by_side"


def place_of(result: Result) -> str:
    """On what, and when, a result was measured."""
    stamp = result["stamp"]
    return f"{stamp['card']}, driver {stamp['driver']}, torch {stamp['torch']}, {stamp['date']}"


def source_of(result: Result) -> str:
    """Where the numbers of a result come from."""
    return (
        f"{place_of(result)}: CUDA graphs over random inputs beyond L2, replayed in turn, medians of "
        f"{result['rounds']} rounds."
    )


def caption_of(result: Result) -> str:
    """Where the numbers of a side-by-side result come from, and how far the method is to be trusted."""
    spread = max(abs(row["control_ratio"] - 1) for row in result["rows"])
    return f"{source_of(result)} torch beside itself differed by up to {spread:.1%}."


def rivals_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """torch, and what else rows of one suite were measured against."""
    known = ("torch", *AGAINST.values())
    return [name for name in known if any(name in row["contenders"] for row in rows)]


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def regime_of(shape: Shape) -> str:
    """What decides the speed of a shape, in a word or two."""
    if shape.batch > 1:
        return "batches"
    if shape.epilogue:
        return "fused epilogues"
    if shape.dtype in ("fp32", "tf32", "3xtf32"):
        return shape.dtype
    if shape.placement or shape.k % 8 or shape.n % 8:
        return "odd sizes"
    if shape.k >= 16 * max(shape.m, shape.n):
        return "large K"
    if shape.m <= 64:
        return "decode, M <= 64"
    return "M <= 512" if shape.m <= 512 else "large"


# --- Comparison


@dataclass(frozen=True)
class Entry:
    """A measured speed relative to torch's in the same run, and its noise as a share of it."""

    name: str
    ratio: float
    noise: float


@dataclass(frozen=True)
class Difference:
    """The same entry in two results. `change` is 0.1 where it has become 10 % faster relative to torch."""

    name: str
    old: float
    new: float
    noise: float  # of both

    @property
    def change(self) -> float:
        """Of the ratio, as a share of the old one."""
        return self.new / self.old - 1

    @property
    def verdict(self) -> str:
        """What has changed beyond the noise: "slower", "faster" or, if nothing, "same".

        What is no number counts as slower, lest a broken measurement passes for a good one.
        """
        if abs(self.change) <= self.noise:
            return "same"
        return "faster" if self.change > 0 else "slower"


@dataclass(frozen=True)
class Comparison:
    """Two results, entry by entry."""

    differences: list[Difference]
    missing: list[str]  # in one result alone
    notes: list[str]  # what else differs between the two

    @property
    def regressions(self) -> list[Difference]:
        """What has become slower beyond the noise."""
        return [one for one in self.differences if one.verdict == "slower"]


def compare(old: Result, new: Result) -> Comparison:
    """What has changed since an old result.

    Ratios to torch of the same run are compared, because absolute times move with the card, its clocks and
    its power limit. The noise of a ratio is how far torch beside itself was off, for that entry or over
    the run, and how unsteady the medians are; both runs' add up, and are FLOOR at least.

    Raises:
        CommandError: the results have nothing in common.
    """
    before = {entry.name: entry for entry in entries_of(old)}
    after = {entry.name: entry for entry in entries_of(new)}
    differences = [
        Difference(
            name,
            before[name].ratio,
            entry.ratio,
            max(FLOOR, before[name].noise + entry.noise),
        )
        for name, entry in after.items()
        if name in before
    ]
    if not differences:
        raise CommandError(
            f"The results {old.get('name')} and {new.get('name')} have no row in common to compare"
        )
    missing = [name for name in (*before, *after) if (name in before) != (name in after)]
    notes = [
        f"{what}: {old['stamp'].get(key)} before, {new['stamp'].get(key)} now"
        for what, key in (("card", "card"), ("driver", "driver"), ("torch", "torch"))
        if old["stamp"].get(key) != new["stamp"].get(key)
    ]
    if old["stamp"].get("csrc_digest") == new["stamp"].get("csrc_digest"):
        notes.append("both were measured with the same kernels")
    return Comparison(differences, missing, notes)


def entries_of(result: Result) -> list[Entry]:
    """What a result says of tgemm's speed relative to torch's."""
    return list({"ladder": _of_ladder, "models": _of_models}.get(kind_of(result), _of_rows)(result))


def _of_rows(result: Result) -> Iterator[Entry]:
    rows = result["rows"]
    overall = _root_mean_square([row["control_ratio"] - 1 for row in rows])
    for row in rows:
        contenders = row["contenders"]
        unsteady = sum(_unsteadiness(contenders[name]["rounds_us"]) for name in ("torch", "tgemm"))
        noise = max(abs(row["control_ratio"] - 1), overall) + unsteady
        yield Entry(str(shape_of(row)), row["ratio"], noise)


def _of_models(result: Result) -> Iterator[Entry]:
    for row in result["rows"]:
        cells = row.get("cells", {})
        best = cells.get(row.get("best_stock"))
        if best is None:
            continue
        stock, control = (cells.get(name, {}) for name in ("stock eager", "stock eager (control)"))
        off = abs(control["ms"] / stock["ms"] - 1) if "ms" in stock and "ms" in control else 0.0
        for way, cell in cells.items():
            if way.startswith("tgemm") and "ms" in cell:
                unsteady = _unsteadiness(best["rounds_ms"]) + _unsteadiness(cell["rounds_ms"])
                name = f"{row['model']} {row['dtype']}: {way}"
                yield Entry(name, best["ms"] / cell["ms"], off + unsteady)


def _of_ladder(result: Result) -> Iterator[Entry]:
    *rungs, torch = [row for row in result["rows"] if "us" in row]
    for row in rungs:
        unsteady = _unsteadiness(torch["rounds_us"]) + _unsteadiness(row["rounds_us"])
        name = f"{row['name']} {result['size']} {result['dtype']} {result['layout']}"
        yield Entry(name, torch["us"] / row["us"], abs(result["control_ratio"] - 1) + unsteady)


def _unsteadiness(rounds: Sequence[float]) -> float:
    """Standard error of the median of rounds, as a share of it, from their median deviation."""
    median = statistics.median(rounds)
    deviation = statistics.median(abs(one - median) for one in rounds)
    # Of normal numbers: sigma is 1.4826 median deviations, and a median is 1.2533 as uncertain as a mean.
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(rounds)) / median


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values)) if values else 0.0
