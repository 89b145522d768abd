"""HTML pages that need nothing besides themselves: text, tables, and pictures inside the page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from torch_gemm.console import CommandError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tr.bad td { background: #fbe3e3; }
.scroll { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
p.note { color: #555; }
"""


def require_matplotlib() -> None:
    """Makes sure that figures can be drawn.

    Raises:
        CommandError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise CommandError(
            "The pictures are drawn with the package matplotlib: pip install 'torch_gemm[plots]'"
        ) from error


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page from parts that are HTML already."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def paragraph(text: str, note: bool = False) -> str:
    """A paragraph of plain text."""
    return f'<p class="note">{escape(text)}</p>' if note else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """The title of a section."""
    return f"<h2>{escape(text)}</h2>"


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], bad: Sequence[bool] | None = None
) -> str:
    """A table of plain text; rows that are `bad` stand out."""
    rows = list(rows)
    bad = bad or [False] * len(rows)
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    lines = [
        f"<tr{' class=' + chr(34) + 'bad' + chr(34) if is_bad else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row, is_bad in zip(rows, bad, strict=True)
    ]
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'  # wider than the page


def picture(figure: Figure) -> str:
    """A figure of matplotlib as inline SVG; the same bytes for the same figure."""
    svg = draw(figure, "svg").decode()
    # What comes before the element is for files of their own.
    return re.sub(r"^.*?(?=<svg)", "", svg, count=1, flags=re.S)


def draw(figure: Figure, form: str) -> bytes:
    """A figure as "svg" or "png"."""
    import matplotlib

    content = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "torch_gemm", "svg.fonttype": "path"}):
        figure.savefig(content, format=form, metadata=metadata, dpi=150)
    return content.getvalue()
