"""The result for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

EMULATED = (
    "volta_mma: this card emulates Volta's m8n8k4 with FFMA; it shows correctness here, not speed."
)


def show_ladder(result: dict[str, Any]) -> list[RenderableType]:
    """Speed of every row, then its resources and errors, then how to read them and what was refused.

    Two tables, so that neither is wider than a terminal.
    """
    from rich.text import Text

    size = result["size"]
    problem = f"{size} x {size} x {size}, {result['dtype']}, {result['layout']}"
    speed = _table(
        f"{problem}: {result['stamp']['card']}",
        "us|TFLOP/s|over naive|A100 write-up|over rung before|of peak",
    )
    resources = _table(
        "Resources and errors",
        "registers|local bytes|shared KiB|CTAs per SM|occupancy|largest error|RMS error",
    )
    for row in result["rows"]:
        if "us" in row:
            speed.add_row(label_of(row), *_speed(row))
            resources.add_row(label_of(row), *_resources(row))
    return [speed, resources, Text(caption_of(result) + "\n")]


def _table(title: str, headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("kernel", no_wrap=True)
    for heading in headings.split("|"):
        table.add_column(heading, justify="right")
    return table


def _speed(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['us']:.1f}",
        f"{row['tflops']:.1f}",
        times_of(row["over_naive"]),
        times_of(row.get("a100_over_naive")),
        times_of(row["over_refined"]),
        share_of_peak(row),
    ]


def _resources(row: dict[str, Any]) -> list[str]:
    taken = row.get("resources")
    cells = ["-"] * 5
    if taken:
        cells = [
            f"{taken['registers']}",
            f"{taken['local_bytes']}",
            f"{shared_kib(taken):.1f}",
            f"{taken['ctas_per_sm']}",
            f"{taken['occupancy']:.0%}",
        ]
    return [*cells, f"{row['largest_error']:.1e}", f"{row['rms_error']:.1e}"]


def shared_kib(resources: dict[str, Any]) -> float:
    """Shared memory of one CTA, KiB."""
    return (resources["static_shared_bytes"] + resources["dynamic_shared_bytes"]) / 1024


def label_of(row: dict[str, Any]) -> str:
    """A row's name for people: twins, which are named kernel:configuration, are indented."""
    twin = row["name"].partition(":")[2]
    name = f"  {twin}" if twin else row["name"]
    return f"{name} (emulated)" if row.get("emulated") else name


def times_of(ratio: float | None) -> str:
    """A speed-up for people."""
    return "-" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def share_of_peak(row: dict[str, Any]) -> str:
    """Which share of what a row uses, for people: "76% Tensor"."""
    units = {"fma": "FMA", "tensor": "Tensor", "tf32": "TF32"}
    return "-" if row["of_peak"] is None else f"{row['of_peak']:.1%} {units[row['unit']]}"


def caption_of(result: dict[str, Any]) -> str:
    """What the columns mean, and how far the method is to be trusted."""
    known = {"fma": "FP32 FMA", "tensor": "FP16/BF16 Tensor Cores", "tf32": "TF32 Tensor Cores"}
    lines = [
        f"Medians of {result['rounds']} rounds in turn over {result['input_sets']} sets of inputs; "
        f"torch beside itself differed by {abs(result['control_ratio'] - 1):.1%}.",
        "A twin, indented, is the rung above with its idea off; both are compared with the rung before.",
        "Registers and local memory are per thread, shared memory per CTA; occupancy is the share of an "
        "SM's warps that fit.",
        "Errors: largest and RMS deviation from the FP64 product of the same inputs, as a share of that product's RMS.",
    ]
    if result["peaks"]:
        shown = [f"{known[unit]} {tflops:.0f}" for unit, tflops in result["peaks"].items()]
        lines.append(f"Peaks at boost clock, TFLOP/s: {', '.join(shown)}.")
    if result["dtype"] == "fp32":
        lines.append("Rungs on Tensor Cores round the FP32 operands to FP16; CUDA cores do not.")
    if any(row.get("emulated") and "us" in row for row in result["rows"]):
        lines.append(EMULATED)
    lines += [f"{row['name']}: {row['refused']}" for row in result["rows"] if "refused" in row]
    return "\n".join(lines)


def show_profile(profile: dict[str, Any]) -> list[RenderableType]:
    """The counters of every rung, then how to read them; what ncu does not know is n/a."""
    from rich.text import Text

    memory = _table(
        "Nsight Compute, one launch each: memory",
        "wavefronts per load|wavefronts per store|load conflicts|store conflicts|DRAM|GB/s|L2",
    )
    pipes = _table(
        "Nsight Compute: warps and Tensor Cores",
        "occupancy|Tensor busy|Tensor instr.|wgmma instr.|top stalls",
    )
    for row in profile["rows"]:
        dram = row["dram_bytes_per_second"]
        memory.add_row(
            label_of(row),
            counter_text(row["load_wavefronts_per_request"], ".2f"),
            counter_text(row["store_wavefronts_per_request"], ".2f"),
            counter_text(row["shared_load_conflicts"], ",.0f"),
            counter_text(row["shared_store_conflicts"], ",.0f"),
            percent_text(row["dram_percent"]),
            counter_text(None if dram is None else dram * 1e-9, ",.0f"),
            percent_text(row["l2_percent"]),
        )
        pipes.add_row(
            label_of(row),
            percent_text(row["achieved_occupancy_percent"]),
            percent_text(row["tensor_busy_percent"]),
            counter_text(row["tensor_instructions"], ",.0f"),
            counter_text(row["wgmma_instructions"], ",.0f"),
            "\n".join(f"{reason} {warps:.2f}" for reason, warps in row["stalls"]) or "n/a",
        )
    return [memory, pipes, Text(profile["caption"] + "\n")]


def counter_text(value: float | None, form: str) -> str:
    """A hardware counter for people."""
    return "n/a" if value is None else format(value, form)


def percent_text(value: float | None) -> str:
    """A hardware counter that is a percentage, for people."""
    return counter_text(value and value / 100, ".1%")
