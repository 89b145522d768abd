"""All suites side by side: how often, and by how much, torch_gemm gains or loses against its best rival."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_gemm.bench.results import rivals_of
from torch_gemm.bench.shapes import Shape, shape_of
from torch_gemm.ladder.picture import require_matplotlib, result_digest, to_bytes

# A result's name, and what it measures.
SUITES = {
    "sm90": "linear layers, 128 rows and more",
    "decode": "decoding, 1 to 64 rows",
    "fused": "fused epilogues",
    "other": "TF32, layouts, odd sizes",
    "foundation": "FP16, BF16 and true FP32",
    "odd": "odd sizes, strides and offsets",
    "batch": "batches",
    "large_k": "large K, few tiles",
    "fp32": "FP32, and FP32 accuracy on Tensor Cores",
    "rivals": "a few of each, beside rivals that compile",
}
# Closer than this is level: about twice what torch differs by from itself.
LEVEL = 0.03
GAIN, EVEN, LOSS = "#4878a8", "#b0b0b0", "#d1622b"


def gain_key(rivals: Sequence[str]) -> str:
    """Which ratio of a row is the speed-up over the best of the rivals.

    With torch alone it is torch's: the best of torch and its control would be a coin tossed twice.
    """
    return "ratio" if list(rivals) == ["torch"] else "best_ratio"


@dataclass(frozen=True)
class Standing:
    """One shape: what was fastest besides tgemm, and tgemm's speed-up over it."""

    suite: str
    shape: Shape
    rival: str
    rival_us: float
    us: float
    kernel: str
    gain: float


def standings(results: Mapping[str, dict[str, Any]]) -> list[Standing]:
    """Of every shape of every result, by the result's name."""
    found = []
    for suite, result in results.items():
        rivals = rivals_of(result["rows"])
        for row in result["rows"]:
            times = {
                name: row["contenders"][name]["us"] for name in rivals if name in row["contenders"]
            }
            rival = min(times, key=times.__getitem__)
            found.append(
                Standing(
                    suite,
                    shape_of(row),
                    rival,
                    times[rival],
                    row["contenders"]["tgemm"]["us"],
                    row["chosen"],
                    row[gain_key(rivals)],
                )
            )
    return found


def verdict(gain: float) -> str:
    """What a speed-up counts as: faster, level or slower."""
    return "level" if abs(gain - 1) <= LEVEL else "faster" if gain > 1 else "slower"


def digest_of(results: Mapping[str, dict[str, Any]]) -> str:
    """SHA-256 of several results together, in hexadecimal."""
    text = "".join(f"{name} {result_digest(result)}\n" for name, result in results.items())
    return hashlib.sha256(text.encode()).hexdigest()


def draw(results: Mapping[str, dict[str, Any]], form: str) -> bytes:
    """A row for each suite, a dot for each shape; what is left of the line is slower than its best rival.

    Raises:
        CommandError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    colours = {"faster": GAIN, "level": EVEN, "slower": LOSS}
    figure = Figure(figsize=(9, 0.9 + 0.5 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    labels = []
    for row, (suite, result) in enumerate(results.items()):
        gains = sorted(one.gain for one in standings({suite: result}))
        # Spread a little, so that equal ones are seen to be several.
        heights = [row + 0.1 * (i % 5 - 2) for i in range(len(gains))]
        colour = [colours[verdict(gain)] for gain in gains]
        axes.scatter(gains, heights, c=colour, s=22, linewidths=0, zorder=2)
        rivals = ", ".join(name.partition(",")[0] for name in rivals_of(result["rows"]))
        labels.append(f"{SUITES[suite]}\n{len(gains)} shapes, against {rivals}")
    axes.axvline(1.0, color="#404040", linewidth=1, zorder=1)
    axes.set_xscale("log")
    ticks = [0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0]
    low, high = axes.get_xlim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e4e4e4", zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    card = next(iter(results.values()))["stamp"]["card"]
    axes.set_xlabel(
        f"speed-up over the best rival, {card}; orange: slower by more than {LEVEL:.0%}"
    )
    return to_bytes(figure, form, f"torch_gemm speed-ups sha256:{digest_of(results)}")
