"""An explanation for the terminal: as plain text, and as tables of rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_gemm.explaining.explanation import Candidate, Explanation, Step

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN_CANDIDATES = 8
UNITS = {"tensor": "16-bit Tensor Cores", "tf32": "TF32 Tensor Cores", "fma": "FP32 FMA"}


def text_of(explanation: Explanation) -> str:
    """All of it, in lines."""
    rows = summary(explanation)
    lines = [f"{label:<11} {value}".rstrip() for label, value in rows]
    for step in (*explanation.steps, *explanation.considered):
        lines += ["", candidates_title(explanation, step)]
        shown = step.scored[:SHOWN_CANDIDATES]
        width = max((len(candidate.plan) for candidate in shown), default=0)
        for candidate in shown:
            mark = "*" if candidate is step.chosen else " "
            cells = "  ".join(candidate_cells(candidate))
            lines.append(f"{mark} {candidate.plan:<{width}}  {cells}")
        if len(step.scored) > len(shown):
            lines.append(f"  and {len(step.scored) - len(shown)} slower ones")
        lines += [f"- {', '.join(plans)}: {reason}" for reason, plans in rejections(step).items()]
    if explanation.only_forced:
        lines += ["", f"Only when forced by name: {', '.join(explanation.only_forced)}"]
    return "\n".join(lines)


def tables_of(explanation: Explanation) -> list[RenderableType]:
    """The same for a terminal, through rich."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    overview = Table(box=box.SIMPLE, show_header=False)
    overview.add_column(style="bold", no_wrap=True)
    overview.add_column(overflow="fold")
    for label, value in summary(explanation):
        overview.add_row(Text(label), Text(value))
    shown: list[RenderableType] = [overview]
    for step in (*explanation.steps, *explanation.considered):
        table = Table(
            title=Text(candidates_title(explanation, step)),
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("candidate")
        for heading in CELLS:
            table.add_column(heading, justify="right")
        for candidate in step.scored[:SHOWN_CANDIDATES]:
            style = "bold green" if candidate is step.chosen else ""
            table.add_row(Text(candidate.plan), *candidate_cells(candidate), style=style)
        shown.append(table)
        if step.rejected:
            refused = Table(title="Rejected", title_justify="left", box=box.SIMPLE_HEAD)
            refused.add_column("because", max_width=44)
            refused.add_column("kernels", overflow="fold")
            for reason, plans in rejections(step).items():
                refused.add_row(Text(reason), Text(", ".join(plans)))
            shown.append(refused)
    if explanation.only_forced:
        shown.append(Text(f"Only when forced by name: {', '.join(explanation.only_forced)}"))
    return shown


def summary(explanation: Explanation) -> list[tuple[str, str]]:
    """(label, value) of what matters most."""
    gpu = explanation.card.name
    if not explanation.built:
        gpu += " (this build of torch_gemm was made for other cards, and could not run there)"
    rows = [("call", explanation.call), ("GPU", gpu)]
    steps = explanation.steps or explanation.considered
    rows += [(_label("problem", step), step.problem) for step in steps]
    if explanation.error is not None:
        rows.append(("kernel", f"none: {explanation.error}"))
    elif explanation.aten:
        rows.append(("kernel", "none: a tuning file leaves this to ATen, measured to be faster"))
    for step in explanation.steps if explanation.error is None else ():
        rows += _step_rows(step)
    if explanation.chosen is not None:
        rows += [("predicted", _predicted(explanation))]
    rows.append(("roofline", _roofline(explanation)))
    if explanation.chosen is not None:
        chosen = explanation.chosen
        rows += [
            ("copies", _copies(explanation, chosen)),
            ("workspace", bytes_text(chosen.workspace_bytes)),
            ("runner-up", _runner_up(explanation)),
        ]
    return rows


def _label(label: str, step: Step) -> str:
    return f"{label} {step.role}" if step.role in ("gate", "up") else label


def _step_rows(step: Step) -> list[tuple[str, str]]:
    chosen, tile = step.chosen, step.chosen.tile
    how = " (from a tuning file)" if step.tuned else ""
    rows = [
        (_label("kernel", step), f"{chosen.plan}{how}"),
        (
            "tile",
            f"{tile['block_m']}x{tile['block_n']}x{tile['block_k']}, {tile['stages']} stages, "
            f"{tile['threads']} threads, {bytes_text(tile['shared_memory_bytes'])} of shared memory",
        ),
        (
            "tiles",
            f"{chosen.tiles}{f' x {chosen.split_k} splits of K' if chosen.split_k > 1 else ''} in "
            f"{chosen.waves:.2f} waves of {chosen.slots} CTAs; {chosen.sm_fill:.0%} of the SMs' room used",
        ),
    ]
    if step.resources:
        taken = step.resources
        rows.append(
            (
                "takes",
                f"{taken['registers']} registers and {taken['local_bytes']} local bytes a thread, "
                f"{taken['ctas_per_sm']} CTAs an SM, occupancy {taken['occupancy']:.0%}",
            )
        )
    return rows


def _predicted(explanation: Explanation) -> str:
    chosen = explanation.chosen
    text = us_text(chosen.predicted_us)
    terms = {"packing": chosen.packing_us, "partial sums": chosen.partial_sums_us}
    others = [f"{us_text(us)} of {name}" for name, us in terms.items() if us]
    if others:
        text += f" = {' + '.join([us_text(chosen.kernel_us), *others])}"
    text += f", {explanation.tflops:.4g} TFLOP/s"
    if explanation.share_of_peak is not None:
        text += f", {explanation.share_of_peak:.0%} of peak"
    return text + f", {explanation.roofline.bound_us / chosen.predicted_us:.0%} of the roofline"


def _roofline(explanation: Explanation) -> str:
    roofline = explanation.roofline
    compute = "unknown"
    if roofline.compute_us is not None:
        compute = f"{us_text(roofline.compute_us)} at {roofline.peak_tflops:.0f} TFLOP/s of {UNITS[roofline.unit]}"
    rate = explanation.card.memory_bytes_per_us * 1e-6
    return (
        f"{roofline.bound}-bound: compute {compute}, memory {us_text(roofline.memory_us)} at "
        f"{rate:.2f} TB/s; {roofline.intensity:.1f} FLOP/byte"
    )


def _copies(explanation: Explanation, chosen: Candidate) -> str:
    parts = []
    if chosen.packing:
        parts.append(f"{' and '.join(chosen.packing)} packed for the kernel")
    if explanation.copies:
        parts.append("operands or output that no GEMM can address")
    return ", ".join(parts) or "none"


def _runner_up(explanation: Explanation) -> str:
    other = explanation.runner_up
    if other is None:
        return "none"
    step = explanation.steps[0]
    ratio = other.predicted_us / step.chosen.predicted_us
    return f"{other.plan}, {us_text(other.predicted_us)} ({ratio:.2f} times)"


def candidates_title(explanation: Explanation, step: Step) -> str:
    """The heading of a step's candidates."""
    names = {"whole": "Both weights in one kernel", "gate": "The gate", "up": "The other product"}
    name = names.get(step.role, "Candidates")
    unused = step in explanation.considered and explanation.error is None
    return f"{name} (not chosen)" if unused else name


CELLS = ("predicted", "waves", "fill", "workspace")


def candidate_cells(candidate: Candidate) -> list[str]:
    """What CELLS names, of a candidate that can run."""
    return [
        f"{us_text(candidate.predicted_us):>10}",
        f"{candidate.waves:6.2f}",
        f"{candidate.sm_fill:5.0%}",
        f"{bytes_text(candidate.workspace_bytes):>9}",
    ]


def rejections(step: Step) -> dict[str, list[str]]:
    """Plans by the reason for which they were rejected."""
    found: dict[str, list[str]] = {}
    for candidate in step.rejected:
        found.setdefault(candidate.reason, []).append(candidate.plan)
    return found


def us_text(us: float) -> str:
    """A time for people."""
    return f"{us:.2f} us" if us < 10 else f"{us:.1f} us" if us < 1e4 else f"{us * 1e-3:.1f} ms"


def bytes_text(count: int) -> str:
    """A number of bytes for people."""
    if count == 0:
        return "none"
    if count < 2**20:
        return f"{count / 2**10:.4g} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
