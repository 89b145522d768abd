"""The pages of docs/, without their generator: links and anchors, quoted code, quoted messages, code that runs.

`make docs` checks the same links once more, as Sphinx sees them.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import problems
import pytest
import support_matrix

import torch_gemm
from torch_gemm import _library

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
DOCUMENTS = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
]
DOCUMENTS += PAGES
SOURCES = [
    path
    for folder in ("csrc", "torch_gemm")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".cpp", ".hpp", ".cu", ".cuh", ".py")
] + [ROOT / "CMakeLists.txt", ROOT / "setup.py"]


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def fences(text: str, language: str) -> list[tuple[str, str]]:
    """The code blocks of a language, each with the line before it."""
    pattern = rf"(?:^(?P<before>[^\n]*)\n)?^```{language}\n(?P<code>.*?)^```$"
    return [(m["before"] or "", m["code"]) for m in re.finditer(pattern, text, re.M | re.S)]


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(path: Path) -> set[str]:
    """What a link can name in a document: its headings, as GitHub and MyST abbreviate them."""
    text = path.read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids(DOCUMENTS))
def test_links_and_anchors(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), target
        assert path.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(path), f"{target}: {sorted(anchors(path))}"


def test_every_page_can_be_reached() -> None:
    index = (DOCS / "index.md").read_text()
    listed = set(re.findall(r"^([a-z-]+)$", "\n".join(code for _, code in toctrees(index)), re.M))
    assert listed == {page.stem for page in PAGES} - {"index"}
    # The pages that README.md leads to: all that are not a document of the root folder, or generated.
    linked = set(re.findall(r"\]\(docs/([\w-]+)\.md", (ROOT / "README.md").read_text()))
    assert listed - linked <= {"api", "changelog", "contributing", "notes", "security"}


def toctrees(text: str) -> list[tuple[str, str]]:
    return fences(text, r"\{toctree\}")


# Pages whose Python is code of their own, run from top to bottom; quotations are checked below.
WITH_PYTHON = [
    page
    for page in PAGES
    if any(not code.startswith("# tests/") for _, code in fences(page.read_text(), "python"))
]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=ids(WITH_PYTHON))
def test_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU; what cannot run there is marked, and has to be Python all the same."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    try:
        for before, code in fences(page.read_text(), "python"):
            program = compile(code, str(page), "exec")
            if not before.startswith("<!-- not run: "):
                exec(program, names)
    finally:
        torch_gemm.set_fallback("warn")


QUOTING = [
    (page, language)
    for page in PAGES
    for language in ("cpp", "cmake", "python")
    if any(re.match(r"(//|#) \S+\.\w+\n", code) for _, code in fences(page.read_text(), language))
]


@pytest.mark.parametrize(("page", "language"), QUOTING, ids=[f"{p.name}-{q}" for p, q in QUOTING])
def test_quoted_code_is_literal(page: Path, language: str) -> None:
    """A block whose first line is the comment of a path quotes that file; `...` leaves lines out."""
    for _, code in fences(page.read_text(), language):
        path, _, quoted = code.partition("\n")
        if not re.match(r"(//|#) \S+\.\w+$", path):
            assert language == "python", f"{page.name} quotes {language} of no file"
            continue
        source = (ROOT / path.split()[1]).read_text()
        for piece in quoted.split("...\n"):
            assert piece in source, f"{path} has no longer:\n{piece}"


TROUBLESHOOTING = DOCS / "troubleshooting.md"
MESSAGES = re.findall(r"^> `(.*)`$", TROUBLESHOOTING.read_text(), re.M)


@cache
def sentences() -> str:
    """All sources, with string literals that were broken into several lines joined again."""
    text = "\n".join(path.read_text() for path in SOURCES)
    text = re.sub(r"\"\s*\n\s*f?\"", "", text)
    return text.replace('\\"', '"')


def pieces(message: str) -> list[str]:
    return [piece.strip() for piece in message.split("...") if piece.strip(" ,;:")]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_exist(message: str) -> None:
    assert pieces(message)
    for piece in pieces(message):
        assert piece in sentences(), f"no source says {piece!r}"


def test_enough_messages_are_explained() -> None:
    assert len(MESSAGES) == len(set(MESSAGES))
    assert sum(len(piece) > 12 for message in MESSAGES for piece in pieces(message)) > 30


def test_support_matrix_is_current() -> None:
    if not support_matrix.PROGRAM.is_file():
        pytest.skip("SUPPORT MATRIX NOT CHECKED: make test-cpp has not built it")
    program = [sys.executable, support_matrix.__file__, "--check"]
    run = subprocess.run(program, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_accuracy_constants_are_those_of_the_tests() -> None:
    """The table of numerics.md, whose second column is Python in K, says what the tests allow."""
    text = (DOCS / "numerics.md").read_text()
    text = text.partition("| kernel | c | why |\n")[2].partition("\n\n")[0]
    table = dict(re.findall(r"^\| (`\w+`|all others) \| ([^|]*[^| ]) \|", text, re.M))
    assert "all others" in table
    names = {row["name"] for row in torch_gemm.kernels()} if _library.cuda_missing is None else {}
    for kernel in {name.strip("`") for name in table} | {"mma_sync", *names}:
        expression = table.get(f"`{kernel}`", table["all others"])
        for k in (1, 64, 255, 256, 4096):
            allowed = eval(expression, {"sqrt": math.sqrt, "K": k})
            assert allowed == problems.accuracy_constant(f"{kernel}:128x128", k), (kernel, k)


def test_kernels_of_the_matrix() -> None:
    """The page lists the kernels that the library has; needs no program."""
    if _library.cuda_missing is not None:
        pytest.skip(_library.cuda_missing)
    kernel_list = (DOCS / "support.md").read_text().partition("## Aligned operands")[0]
    listed = re.findall(r"^\| `(\w+)` \|", kernel_list, re.M)
    assert listed == [kernel["name"] for kernel in torch_gemm.kernels()]
