"""Draws the kernel ladder as a bar chart."""

from __future__ import annotations

import hashlib
import io
import re
from typing import TYPE_CHECKING, Any

from torch_gemm.html import require_matplotlib
from torch_gemm.ladder.tables import label_of, times_of
from torch_gemm.measure import result_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUNG, TWIN, LIBRARY = "#4878a8", "#b4c8dc", "#76b900"


def draw(result: dict[str, Any], form: str) -> bytes:
    """Horizontal bars of TFLOP/s, one per row of a result of the ladder.

    Args:
        result: as `measure_ladder` returns it.
        form: "png" or "svg".

    Returns:
        The picture: with one version of matplotlib the same bytes for the same result. Its metadata names
        the result that it shows, for `drawn_digest`.

    Raises:
        CommandError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if "us" in row]
    figure = Figure(figsize=(9, 1.2 + 0.36 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(
        range(len(rows)), [row["tflops"] for row in rows], color=[_colour(row) for row in rows]
    )
    axes.bar_label(
        bars,
        [f"{row['tflops']:.1f} TFLOP/s, {times_of(row['over_naive'])}" for row in rows],
        padding=4,
        fontsize=9,
    )
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.25)  # room for the labels
    axes.set_xlim(left=0)
    axes.set_xlabel("TFLOP/s, and speed over naive")
    axes.spines[["top", "right"]].set_visible(False)
    size = result["size"]
    axes.set_title(
        f"{result['stamp']['card']}: {size} x {size} x {size}, {result['dtype']}, {result['layout']}",
        fontsize=11,
    )

    return to_bytes(figure, form, f"torch_gemm ladder sha256:{result_digest(result)}")


def to_bytes(figure: Figure, form: str, description: str) -> bytes:
    """A figure as a file: with one version of matplotlib the same bytes for the same figure.

    Args:
        figure: what was drawn.
        form: "png" or "svg".
        description: goes into the metadata; `drawn_digest` finds a digest in it.
    """
    import matplotlib

    metadata = {"Description": description}
    if form == "svg":
        metadata["Date"] = None  # else each drawing of the same numbers would differ
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "torch_gemm", "svg.fonttype": "path"}):
        figure.savefig(content, format=form, metadata=metadata, dpi=150)
    return content.getvalue()


def result_digest(result: dict[str, Any]) -> str:
    """SHA-256 of a result as it is stored, in hexadecimal."""
    return hashlib.sha256(result_text(result).encode()).hexdigest()


def drawn_digest(picture: bytes) -> str | None:
    """The digest of the results that a picture shows, or None if it does not say."""
    found = re.search(rb"torch_gemm [\w-]+ sha256:([0-9a-f]{64})", picture)
    return found[1].decode() if found else None


def _label(row: dict[str, Any]) -> str:
    # The labels are right-aligned: the name of a twin, indented, would not show whose it is.
    return row["idea"] if row.get("twin_of") else label_of(row)


def _colour(row: dict[str, Any]) -> str:
    if "refines" not in row:  # torch's
        return LIBRARY
    return TWIN if row["twin_of"] else RUNG
