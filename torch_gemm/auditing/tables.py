"""Audits as text, tables for the terminal, and HTML pages with plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_gemm import html
from torch_gemm.auditing.gemm import GemmAudit, Way
from torch_gemm.auditing.layers import LayerAudit
from torch_gemm.auditing.measures import Census, Errors
from torch_gemm.console import rich_table
from torch_gemm.notation import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from torch_gemm.auditing import Audit

TGEMM, TORCH, BAD = "#4878a8", "#76b900", "#c0392b"

# Both errors are tgemm's, then torch's.
HEADINGS = (
    "layer",
    "M x N x K",
    "kernel",
    "max ulp, torch's",
    "RMS error, torch's",
    "of contract",
    "worst element",
    "verdict",
)
GEMM_HEADINGS = ("", "kernel", "largest error", "RMS error", "of contract", "us", "speed-up", "")
READING = (
    "Errors are against FP64 products of the same operands: the largest in units in the last place (ulp) of "
    "the output, which is an element close to zero wherever large sums cancel, and the root mean square as a "
    "share of the outputs' own. The contract allows each element 0.51 ulp and c * 2^-24 of the sum of its "
    "products' magnitudes."
)
OUTLIERS = (
    "outliers: a few products are much larger than all others of their sum, and FP32 accumulation rounds at "
    "their size; the contract is kept with the c for any operands, 2 K."
)


def reading_of(audit: Audit) -> str:
    """How to read the table."""
    outliers = any(layer.tgemm.verdict == "outliers" for layer in audit.layers)
    return f"{READING} {OUTLIERS}" if outliers else READING


def cells_of(layer: LayerAudit, values: bool = True) -> tuple[str, ...]:
    """A line of the table, under HEADINGS; with or without the values of the worst element."""
    sizes = ", ".join(f"{m} x {n} x {k}" for m, n, k in layer.shapes[:3])
    more = "" if len(layer.shapes) <= 3 else f" and {len(layer.shapes) - 3} more"
    calls = "" if layer.calls == 1 else f" ({layer.calls} calls)"
    what = "" if layer.what == "linear" else f": {layer.what}"
    return (
        layer.name + what,
        sizes + more + calls,
        ", ".join(layer.kernels) or "ATen",
        f"{layer.tgemm.largest_ulp:.3g}, {layer.torch.largest_ulp:.3g}",
        f"{layer.tgemm.relative_rms:.2e}, {layer.torch.relative_rms:.2e}",
        share_text(layer.tgemm),
        worst_text(layer.tgemm, values),
        layer.tgemm.verdict,
    )


def share_text(errors: Errors) -> str:
    """The largest error as a share of what the contract allows."""
    return f"{errors.share:.0%}" if math.isfinite(errors.share) else "infinite"


def worst_text(errors: Errors, values: bool) -> str:
    """Where the largest error is, and on request what is there."""
    worst = errors.worst
    if worst is None:
        return "-"
    index = ", ".join(map(str, worst.index))
    call = f" of call {worst.call}" if worst.call else ""
    told = f": {worst.actual:.6g} for {worst.reference:.6g}" if values else ""
    return f"[{index}]{call}{told}"


def notes_of(layer: LayerAudit) -> str:
    """Values of a layer that are not finite or that are subnormal, and outputs that overflow."""
    parts = []
    for name, census in (
        ("input", layer.inputs),
        ("weight", layer.weights),
        ("output", layer.outputs),
    ):
        parts += [f"{name}: {text}" for text in [_unusual(census)] if text]
    if layer.tgemm.overflows or layer.torch.overflows:
        parts.append(f"overflows: {layer.tgemm.overflows}, torch {layer.torch.overflows}")
    return "; ".join(parts)


def _unusual(census: Census) -> str:
    counts = (("NaN", census.nan), ("inf", census.inf), ("subnormal", census.subnormal))
    return ", ".join(f"{count} {name}" for name, count in counts if count)


def verdict_of(audit: Audit) -> str:
    """One sentence."""
    count = len(audit.layers)
    for verdict, sentence in (
        ("broken", f"The numerics contract is BROKEN in {{}} of {count} layers: {{}}."),
        ("outliers", f"All {count} layers keep the numerics contract, {{}} with outliers: {{}}."),
    ):
        names = [layer.name for layer in audit.layers if layer.tgemm.verdict == verdict]
        if names:
            listed = ", ".join(names[:3]) + ("" if len(names) <= 3 else ", ...")
            return sentence.format(len(names), listed)
    worst = max(audit.layers, key=lambda layer: layer.tgemm.share)
    return (
        f"All {count} layers keep the numerics contract; the closest, {worst.name}, uses "
        f"{share_text(worst.tgemm)} of what it allows."
    )


def audit_text(audit: Audit) -> str:
    """The audit as plain text."""
    lines = columns(HEADINGS, [cells_of(layer) for layer in audit.layers])
    lines += [f"not audited: {name}: {reason}" for name, reason in audit.skipped]
    notes = {layer.name: notes_of(layer) for layer in audit.layers}
    lines += [f"{name}: {note}" for name, note in notes.items() if note]
    return "\n".join([*lines, verdict_of(audit)])


def audit_table(audit: Audit) -> Table:
    """The audit for the terminal."""
    rows = [cells_of(layer, values=False) for layer in audit.layers]
    return rich_table(f"{audit.model} on {audit.where}", HEADINGS, rows, whole=2)


def gemm_cells(way: Way) -> tuple[str, ...]:
    """A line of the table, under GEMM_HEADINGS."""
    if way.refused is not None:
        return (way.name, "-", "-", "-", "-", "-", "-", way.refused)
    return (
        way.name,
        way.kernel or "-",
        f"{way.errors.largest:.2g}",
        f"{way.errors.relative_rms:.2g}",
        "-" if way.precision is None else share_text(way.errors),
        "-" if way.us is None else f"{way.us:.1f}",
        "-" if way.speed_up is None else f"{way.speed_up:.2f}",
        "" if way.precision is None else way.errors.verdict,
    )


def gemm_title(audit: GemmAudit) -> str:
    """The problem."""
    m, n, k = audit.shape
    return (
        f"{m} x {n} x {k}, {plain(audit.dtype)}, on {audit.stamp['card']}; RMS errors "
        "as shares of the product's RMS"
    )


def gemm_text(audit: GemmAudit) -> str:
    """The audit of a product as plain text."""
    lines = columns(GEMM_HEADINGS, [gemm_cells(way) for way in audit.ways])
    return "\n".join([gemm_title(audit), *lines])


def gemm_table(audit: GemmAudit) -> Table:
    """The audit of a product for the terminal."""
    rows = [gemm_cells(way) for way in audit.ways]
    return rich_table(gemm_title(audit), GEMM_HEADINGS, rows, whole=2)


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of plain text in columns."""
    lines = [headings, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def audit_page(audit: Audit) -> str:
    """The audit as an HTML page with plots.

    Raises:
        CommandError: matplotlib is not installed.
    """
    html.require_matplotlib()
    parts = [
        html.paragraph(verdict_of(audit)),
        html.paragraph(reading_of(audit), note=True),
        html.picture(errors_figure(audit.layers)),
        html.picture(ranges_figure(audit.layers)),
        html.table(
            HEADINGS,
            [cells_of(layer) for layer in audit.layers],
            [not layer.ok for layer in audit.layers],
        ),
    ]
    notes = [(layer.name, notes_of(layer)) for layer in audit.layers if notes_of(layer)]
    if notes:
        title = "Values that are not finite or subnormal, and overflows"
        parts += [html.heading(title), html.table(("layer", "numbers"), notes)]
    if audit.skipped:
        parts += [html.heading("Not audited"), html.table(("layer", "reason"), audit.skipped)]
    parts.append(html.paragraph(stamp_text(audit.stamp), note=True))
    return html.page(f"Numerics of {audit.model} on {audit.where}", parts)


def gemm_page(audit: GemmAudit) -> str:
    """The audit of a product as an HTML page with a plot.

    Raises:
        CommandError: matplotlib is not installed.
    """
    html.require_matplotlib()
    parts = [
        html.picture(gemm_figure(audit)),
        html.table(GEMM_HEADINGS, [gemm_cells(way) for way in audit.ways]),
        html.paragraph(stamp_text(audit.stamp), note=True),
    ]
    return html.page(f"Precisions of {gemm_title(audit)}", parts)


def stamp_text(stamp: dict) -> str:
    """Where an audit was made."""
    driver = f", driver {stamp['driver']}" if stamp["driver"] else ""
    return f"{stamp['card']}{driver}, torch {stamp['torch']}, {stamp['date']}."


def _rows_figure(rows: int, panels: int, width: float = 11.0) -> tuple[Figure, list]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 1.4 + 0.24 * rows), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", color="#e4e4e4")
        axis.set_axisbelow(True)
    return figure, list(axes)


def errors_figure(layers: Sequence[LayerAudit]) -> Figure:
    """RMS errors of both, and the share of the contract, a line for each layer."""
    figure, (errors, share) = _rows_figure(len(layers), 2)
    places = range(len(layers))
    errors.barh(places, [layer.tgemm.relative_rms for layer in layers], color=TGEMM, label="tgemm")
    errors.scatter(
        [layer.torch.relative_rms for layer in layers],
        places,
        color=TORCH,
        marker="|",
        s=140,
        linewidths=2.5,
        label="torch",
        zorder=3,
    )
    errors.set_xlim(left=0)
    errors.set_xlabel("RMS error, as a share of the outputs' RMS")
    errors.legend(loc="best", fontsize=9)
    errors.set_yticks(places, [layer.name for layer in layers], fontsize=8)
    errors.invert_yaxis()
    # An infinite share stands at the edge.
    values = [min(layer.tgemm.share, 10.0) for layer in layers]
    share.barh(places, values, color=[TGEMM if layer.ok else BAD for layer in layers])
    share.axvline(1.0, color=BAD, linewidth=1)
    share.set_xlabel("largest error, as a share of the contract with the kernel's c")
    return figure


def ranges_figure(layers: Sequence[LayerAudit]) -> Figure:
    """From the smallest to the largest magnitude of each layer's numbers, and what its dtype can hold."""
    figure, axes = _rows_figure(len(layers), 3)
    for axis, (title, censuses) in zip(
        axes,
        (
            ("inputs", [layer.inputs for layer in layers]),
            ("weights", [layer.weights for layer in layers]),
            ("outputs", [layer.outputs for layer in layers]),
        ),
        strict=True,
    ):
        for place, (layer, census) in enumerate(zip(layers, censuses, strict=True)):
            info = torch.finfo(layer.dtype)
            axis.plot([info.smallest_normal, info.max], [place] * 2, color="#dddddd", linewidth=7)
            if census.smallest is not None:
                strange = census.nan or census.inf
                ends = [census.smallest, census.largest]
                axis.plot(ends, [place] * 2, color=BAD if strange else TGEMM, linewidth=3)
        axis.set_xscale("log")
        axis.set_xlabel(f"magnitudes of {title}; grey: normal numbers")
    axes[0].set_yticks(range(len(layers)), [layer.name for layer in layers], fontsize=8)
    axes[0].invert_yaxis()
    return figure


def gemm_figure(audit: GemmAudit) -> Figure:
    """Errors, and on a GPU speed-ups, of each way."""
    ways = [way for way in audit.ways if way.refused is None]
    timed = all(way.speed_up is not None for way in ways)
    figure, axes = _rows_figure(len(ways), 2 if timed else 1)
    places = range(len(ways))
    colours = [TORCH if way.precision is None else TGEMM for way in ways]
    axes[0].barh(places, [way.errors.relative_rms for way in ways], color=colours)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("RMS error, as a share of the product's RMS")
    axes[0].set_yticks(places, [way.name for way in ways])
    axes[0].invert_yaxis()
    if timed:
        axes[1].barh(places, [way.speed_up for way in ways], color=colours)
        axes[1].set_xlabel("speed-up over torch")
    return figure
