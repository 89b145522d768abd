"""An explanation as HTML: a fragment for notebooks, and a page that needs no other file."""

from __future__ import annotations

from html import escape

from torch_gemm.explaining.explanation import Explanation, Step
from torch_gemm.explaining.text import (
    candidate_cells,
    candidates_title,
    rejections,
    summary,
    us_text,
)

_STYLE = """
.tgemm { font: 14px/1.45 system-ui, sans-serif; max-width: 62rem; }
.tgemm table { border-collapse: collapse; margin: .4rem 0 1.2rem; }
.tgemm th, .tgemm td { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top; }
.tgemm td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tgemm tr.chosen td { font-weight: 600; }
.tgemm code { font-size: 13px; }
.tgemm .bar { height: .7rem; background: #7a9cc6; display: inline-block; vertical-align: middle; }
.tgemm tr.chosen .bar { background: #2f6f3e; }
.tgemm .limit { background: #c98f3c; }
"""
_BAR_REM = 14.0


def page(explanation: Explanation) -> str:
    """A whole document."""
    title = escape(explanation.call)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>'
        f"<body>{fragment(explanation)}</body></html>\n"
    )


def fragment(explanation: Explanation) -> str:
    """What a page contains."""
    parts = [f'<div class="tgemm"><style>{_STYLE}</style>', "<table>"]
    for label, value in summary(explanation):
        parts.append(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>")
    parts.append("</table>")
    if explanation.chosen is not None:
        parts.append(_roofline(explanation))
    for step in (*explanation.steps, *explanation.considered):
        parts.append(f"<h3>{escape(candidates_title(explanation, step))}</h3>")
        parts.append(f"<p><code>{escape(step.problem)}</code></p>")
        parts.append(_candidates(step))
        parts.append(_rejections(step))
    if explanation.only_forced:
        names = escape(", ".join(explanation.only_forced))
        parts.append(f"<p>Only when forced by name: {names}</p>")
    parts.append("</div>")
    return "\n".join(parts)


def _roofline(explanation: Explanation) -> str:
    roofline = explanation.roofline
    times = [("memory", roofline.memory_us, " limit"), ("predicted", explanation.predicted_us, "")]
    if roofline.compute_us is not None:
        times.insert(0, ("compute", roofline.compute_us, " limit"))
    longest = max(us for _, us, _ in times)
    rows = [
        f'<tr><th>{name}</th><td class="number">{us_text(us)}</td><td>{_bar(us, longest, kind)}</td></tr>'
        for name, us, kind in times
    ]
    return f"<h3>Roofline</h3><table>{''.join(rows)}</table>"


def _candidates(step: Step) -> str:
    if not step.scored:
        return f"<p>{escape(step.error or 'no kernel can run it')}</p>"
    # Beyond some times the fastest, a bar has no more to say.
    longest = min(step.scored[-1].predicted_us, 4.0 * step.scored[0].predicted_us)
    rows = [
        "<tr><th>candidate</th><th>predicted</th><th>waves</th><th>fill</th><th>workspace</th></tr>"
    ]
    for candidate in step.scored:
        chosen = ' class="chosen"' if candidate is step.chosen else ""
        cells = "".join(
            f'<td class="number">{escape(cell.strip())}</td>' for cell in candidate_cells(candidate)
        )
        bar = _bar(min(candidate.predicted_us, longest), longest, "")
        rows.append(
            f"<tr{chosen}><td><code>{escape(candidate.plan)}</code></td>{cells}<td>{bar}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _rejections(step: Step) -> str:
    if not step.rejected:
        return ""
    rows = [
        f"<tr><td>{escape(reason)}</td><td><code>{escape(', '.join(plans))}</code></td></tr>"
        for reason, plans in rejections(step).items()
    ]
    return f"<table><tr><th>rejected because</th><th>kernels</th></tr>{''.join(rows)}</table>"


def _bar(us: float, longest: float, kind: str) -> str:
    width = _BAR_REM * us / longest if longest else 0.0
    return f'<span class="bar{kind}" style="width:{width:.2f}rem"></span>'
