"""Results as tables for the terminal, plots, and HTML pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_gemm import html
from torch_gemm.bench.results import (
    Comparison,
    Result,
    caption_of,
    entries_of,
    geometric_mean,
    kind_of,
    regime_of,
    rivals_of,
    source_of,
)
from torch_gemm.bench.shapes import shape_of
from torch_gemm.console import rich_table
from torch_gemm.peak import peaks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

TGEMM, TORCH, OTHER = "#4878a8", "#76b900", "#b08a4f"
COLOURS = {"torch": TORCH, "tgemm": TGEMM}


# --- Text


def headings_of(result: Result) -> list[str]:
    """Of the table of a side-by-side result."""
    rivals = rivals_of(result["rows"])
    best = ["over best"] if len(rivals) > 1 else []
    times = [f"{name}, us" for name in (*rivals, "tgemm")]
    return ["M x N x K", *times, "TFLOP/s", "kernel", "speed-up", *best, "noise", "control"]


def cells_of(result: Result) -> list[list[str]]:
    """The lines of the table, under `headings_of`. The noise is that of the speed-up, see `compare`."""
    rivals = rivals_of(result["rows"])
    noises = [entry.noise for entry in entries_of(result)]
    return [_cells(row, rivals, noise) for row, noise in zip(result["rows"], noises, strict=True)]


def _cells(row: dict[str, Any], rivals: Sequence[str], noise: float) -> list[str]:
    contenders = row["contenders"]
    times = [contenders.get(name) for name in (*rivals, "tgemm")]
    return [
        str(shape_of(row)),
        *("-" if one is None else f"{one['us']:.1f}" for one in times),
        f"{contenders['tgemm']['tflops']:.0f}",
        row.get("chosen") or "-",
        f"{row['ratio']:.3f}",
        *([f"{row['best_ratio']:.3f}"] if len(rivals) > 1 else []),
        f"{noise:.1%}",
        f"{row['control_ratio']:.3f}",
    ]


SUMMARY_HEADINGS = ("regime", "shapes", "geometric mean", "least", "most")


def summary_of(result: Result) -> list[list[str]]:
    """Speed-ups over torch by regime, and over all; under SUMMARY_HEADINGS."""
    regimes: dict[str, list[float]] = {}
    for row in result["rows"]:
        regimes.setdefault(regime_of(shape_of(row)), []).append(row["ratio"])
    if len(regimes) > 1:
        regimes["all"] = [ratio for ratios in regimes.values() for ratio in ratios]
    return [
        [
            regime,
            str(len(ratios)),
            f"{geometric_mean(ratios):.3f}",
            f"{min(ratios):.3f}",
            f"{max(ratios):.3f}",
        ]
        for regime, ratios in regimes.items()
    ]


def not_offered(result: Result) -> list[str]:
    """Shapes that were not measured, and the op's own sentence why."""
    return [f"{name}: {reason}" for name, reason in result.get("not_offered", {}).items()]


MODEL_HEADINGS = ("model", "way", "ms", "best stock / ms", "difference to FP32")


def model_cells(result: Result) -> list[list[str]]:
    """Lines of the table of models, under MODEL_HEADINGS."""
    lines = []
    for row in result["rows"]:
        name = f"{row['model']}, {row['dtype']}"
        if "error" in row:
            lines.append([name, "-", f"failed: {row['error']}", "", ""])
        for way, cell in row.get("cells", {}).items():
            if "ms" not in cell:
                lines.append([name, way, f"failed: {cell.get('error')}", "", ""])
                continue
            over = cell.get("over_best_stock")
            lines.append(
                [
                    name,
                    way,
                    f"{cell['ms']:.3f}",
                    "-" if over is None else f"{over:.3f}",
                    f"{cell['difference']:.2g}",
                ]
            )
    return lines


COMPARISON_HEADINGS = ("", "before", "now", "change", "noise", "verdict")


def comparison_cells(comparison: Comparison) -> list[list[str]]:
    """Lines of the comparison, the largest slow-down first, under COMPARISON_HEADINGS."""
    return [
        [
            one.name,
            f"{one.old:.3f}",
            f"{one.new:.3f}",
            f"{one.change:+.1%}",
            f"{one.noise:.1%}",
            one.verdict,
        ]
        for one in sorted(comparison.differences, key=lambda one: one.change)
    ]


def comparison_verdict(comparison: Comparison) -> str:
    """One sentence."""
    count = len(comparison.differences)
    faster = sum(one.verdict == "faster" for one in comparison.differences)
    slower = comparison.regressions
    if not slower:
        return f"No regression in {count} rows; {faster} became faster beyond the noise."
    names = ", ".join(one.name for one in slower[:3]) + ("" if len(slower) <= 3 else ", ...")
    return (
        f"{len(slower)} of {count} rows became SLOWER beyond the noise, {faster} faster: {names}."
    )


# --- Terminal


def show(result: Result) -> list[RenderableType]:
    """Tables and sentences for rich."""
    from rich.text import Text

    kind = kind_of(result)
    if kind == "ladder":
        from torch_gemm.ladder.tables import show_ladder

        return show_ladder(result)
    title = f"{result['name']}: {result['stamp']['card']}"
    if kind == "models":
        return [rich_table(title, MODEL_HEADINGS, model_cells(result))]
    shown: list[RenderableType] = []
    if result["rows"]:
        shown = [
            rich_table(title, headings_of(result), cells_of(result)),
            rich_table("Speed-up over torch", SUMMARY_HEADINGS, summary_of(result)),
            Text(caption_of(result)),
        ]
    return [*shown, *(Text(f"not measured: {line}") for line in not_offered(result))]


def show_comparison(comparison: Comparison) -> list[RenderableType]:
    """Tables and sentences for rich."""
    from rich.text import Text

    title = "Speed relative to torch in the same run, before and now"
    table = rich_table(title, COMPARISON_HEADINGS, comparison_cells(comparison))
    notes = [*comparison.notes, *(f"in one result alone: {name}" for name in comparison.missing)]
    return [table, *map(Text, notes)]


# --- Plots


def figure_of(result: Result) -> Figure | None:
    """Roofline, speed-ups by regime and time over M; of models, their ways. None where there is nothing.

    A result of the ladder has a picture of its own, `ladder.picture.draw`.
    """
    from matplotlib.figure import Figure

    if kind_of(result) == "models":
        ways = sum(len(row.get("cells", ())) for row in result["rows"])
        if not ways:
            return None
        figure = Figure(figsize=(9, 1.2 + 0.26 * ways), layout="constrained")
        _models(figure.add_subplot(), result)
        return figure
    rows = result["rows"]
    if not rows:
        return None
    families = families_over_m(rows)
    panels = [_roofline, _speed_ups, *([_over_m] if families else [])]
    figure = Figure(figsize=(10, 5.2 * len(panels)), layout="constrained")
    for axes, draw in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e8e8e8")
        axes.set_axisbelow(True)
        draw(axes, result)
    return figure


def _roofline(axes: Axes, result: Result) -> None:
    """TFLOP/s over FLOPs per byte, below what the card's units and memory allow."""
    rows = result["rows"]
    shapes = [shape_of(row) for row in rows]
    intensities = [shape.flops / shape.bytes for shape in shapes]
    for name in ("torch", "tgemm"):
        times = [row["contenders"][name]["us"] for row in rows]
        speeds = [shape.flops / us * 1e-6 for shape, us in zip(shapes, times, strict=True)]
        axes.scatter(intensities, speeds, s=26, color=COLOURS[name], label=name, zorder=3)
    device = result["stamp"].get("device")
    if device:
        bandwidth = device["memory_bytes_per_us"] * 1e-6  # TFLOP/s at one FLOP per byte
        units = {"fp32": "fma", "tf32": "tf32", "3xtf32": "tf32"}
        peak = peaks(device)
        for unit in sorted({units.get(shape.dtype, "tensor") for shape in shapes} & set(peak)):
            ridge = peak[unit] / bandwidth
            ends = [min(*intensities, ridge / 4), ridge, max(*intensities, ridge * 2)]
            roof = [bandwidth * ends[0], peak[unit], peak[unit]]
            axes.plot(ends, roof, color="#777777", linewidth=1.2)
            text = f"{unit} {peak[unit]:.0f} TFLOP/s"
            axes.annotate(text, (ends[2], peak[unit]), ha="right", va="bottom")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte of operands and output")
    axes.set_ylabel("TFLOP/s")
    axes.set_title("Roofline", loc="left")
    axes.legend(loc="lower right")


def _speed_ups(axes: Axes, result: Result) -> None:
    """A dot for each shape and a bar for the geometric mean, by regime."""
    regimes: dict[str, list[float]] = {}
    for row in result["rows"]:
        regimes.setdefault(regime_of(shape_of(row)), []).append(row["ratio"])
    for place, ratios in enumerate(regimes.values()):
        mean = geometric_mean(ratios)
        axes.barh(place, mean - 1, left=1, height=0.5, color=TGEMM, alpha=0.35)
        axes.scatter(ratios, [place] * len(ratios), color=TGEMM, s=22, zorder=3)
        axes.annotate(
            f"{mean:.2f}x", (max(*ratios, mean), place), xytext=(8, -4), textcoords="offset points"
        )
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_yticks(range(len(regimes)), list(regimes))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("speed-up over torch; bars are geometric means")
    axes.set_title("Speed-up by regime", loc="left")


def families_over_m(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows that differ in M alone, by what they share; three values of M at least."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        shape = shape_of(row)
        words = (
            f"{shape.n} x {shape.k}",
            shape.dtype,
            shape.layout,
            shape.epilogue,
            shape.placement,
        )
        batch = f"{shape.batch} of " if shape.batch > 1 else ""
        name = batch + " ".join(word for word in words if word and word != "nt")
        families.setdefault(name, []).append(row)
    return {
        name: sorted(family, key=lambda row: row["m"])
        for name, family in families.items()
        if len({row["m"] for row in family}) >= 3
    }


def _over_m(axes: Axes, result: Result) -> None:
    """Time over M of the weights that were measured at several."""
    import matplotlib

    families = families_over_m(result["rows"])
    colours = matplotlib.colormaps["tab10"].colors
    for i, (name, rows) in enumerate(families.items()):
        for contender, style in (("torch", "--"), ("tgemm", "-")):
            axes.plot(
                [row["m"] for row in rows],
                [row["contenders"][contender]["us"] for row in rows],
                style,
                marker="o",
                markersize=3.5,
                color=colours[i % len(colours)],
                label=f"{name} (N x K), {contender}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("M")
    axes.set_ylabel("us")
    axes.set_title("Time over M", loc="left")
    axes.legend(fontsize=8)


def _models(axes: Axes, result: Result) -> None:
    """Each way of running each model, relative to the best of torch's own."""
    labels, values, colours = [], [], []
    for row in result["rows"]:
        for way, cell in row.get("cells", {}).items():
            if cell.get("over_best_stock") is not None:
                labels.append(f"{row['model']}: {way}")
                values.append(cell["over_best_stock"])
                colours.append(TGEMM if way.startswith("tgemm") else TORCH)
    axes.barh(range(len(values)), values, color=colours)
    axes.axvline(1, color="#555555", linewidth=1)
    axes.set_yticks(range(len(values)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("speed relative to the best of torch's own ways")


# --- HTML


def page(result: Result, comparison: Comparison | None = None) -> str:
    """A page with tables and plots that needs nothing besides itself.

    Raises:
        CommandError: matplotlib is not installed.
    """
    html.require_matplotlib()
    kind, parts = kind_of(result), []
    if comparison is not None:
        parts += [
            html.heading("Since the result before"),
            html.paragraph(comparison_verdict(comparison)),
            html.table(
                COMPARISON_HEADINGS,
                comparison_cells(comparison),
                [cells[-1] == "slower" for cells in comparison_cells(comparison)],
            ),
            *(html.paragraph(note, note=True) for note in comparison.notes),
        ]
    if kind == "ladder":
        parts += _ladder_parts(result)
    else:
        figure = figure_of(result)
        parts += [html.picture(figure)] if figure is not None else []
    if kind == "models":
        parts.append(html.table(MODEL_HEADINGS, model_cells(result)))
    if kind == "side_by_side" and result["rows"]:
        parts += [
            html.table(SUMMARY_HEADINGS, summary_of(result)),
            html.table(
                headings_of(result),
                cells_of(result),
                [row["ratio"] < 1 - FAR for row in result["rows"]],
            ),
            html.paragraph(caption_of(result), note=True),
        ]
    else:
        parts.append(html.paragraph(source_of(result), note=True))
    parts += [html.paragraph(f"not measured: {line}", note=True) for line in not_offered(result)]
    digest = result["stamp"]["csrc_digest"]
    parts.append(html.paragraph(f"Kernels: csrc digest {digest}.", note=True))
    return html.page(f"torch_gemm beside torch: {result['name']}", parts)


# Rows that are further than this behind torch stand out.
FAR = 0.05


def _ladder_parts(result: Result) -> list[str]:
    from torch_gemm.ladder.picture import draw
    from torch_gemm.ladder.tables import caption_of as ladder_caption
    from torch_gemm.ladder.tables import share_of_peak, times_of

    rows = [row for row in result["rows"] if "us" in row]
    cells = [
        [
            row["name"],
            row["idea"],
            f"{row['us']:.1f}",
            f"{row['tflops']:.1f}",
            times_of(row["over_naive"]),
            share_of_peak(row),
        ]
        for row in rows
    ]
    svg = draw(result, "svg").decode()
    return [
        svg[svg.index("<svg") :],
        html.table(("kernel", "idea", "us", "TFLOP/s", "over naive", "of peak"), cells),
        *(html.paragraph(line, note=True) for line in ladder_caption(result).splitlines()),
    ]


def plot(result: Result, form: str) -> bytes:
    """The plots of a result as "svg" or "png".

    Raises:
        CommandError: matplotlib is not installed.
    """
    html.require_matplotlib()
    if kind_of(result) == "ladder":
        from torch_gemm.ladder.picture import draw

        return draw(result, form)
    from matplotlib.figure import Figure

    return html.draw(figure_of(result) or Figure(), form)
