"""Sphinx: what `make docs` builds the pages of this folder with."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
# Documents that lie elsewhere, and the pages that show them; their files here only say so.
ELSEWHERE = {
    "changelog": ROOT / "CHANGELOG.md",
    "contributing": ROOT / "CONTRIBUTING.md",
    "notes": ROOT / "benchmarks" / "NOTES.md",
    "security": ROOT / "SECURITY.md",
}

project = "torch_gemm"
author = "torch_gemm authors"
project_copyright = author
release = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"torch_gemm {release}"
html_show_copyright = False

# Headings are link targets, as on GitHub.
myst_heading_anchors = 3
# The type hints of signatures name what torch documents elsewhere.
nitpick_ignore_regex = [("py:.*", r".*")]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Code blocks of commands and their output are of no language.
highlight_language = "none"


def read_from_where_it_lies(app: Sphinx, docname: str, source: list[str]) -> None:
    """Shows documents from elsewhere, and lets links that lead to them on GitHub lead to their pages."""
    file = ELSEWHERE.get(docname, ROOT / "docs" / f"{docname}.md")
    pages = {path: name for name, path in ELSEWHERE.items()}

    def link(match: re.Match[str]) -> str:
        target = (file.parent / match["path"]).resolve()
        path = f"{pages[target]}.md" if target in pages else os.path.relpath(target, ROOT / "docs")
        return f"]({path}{match['anchor'] or ''})"

    source[0] = re.sub(r"\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)", link, file.read_text())


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read_from_where_it_lies)
