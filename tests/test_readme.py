"""The Python in README.md runs, and what the documents name exists; their links are in test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torch_gemm
from torch_gemm import _library

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", README, re.M | re.S))
def test_usage_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_make_targets_exist() -> None:
    # "make" is also an English verb: commands are code, alone on a line or in backticks.
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M))
    declared = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "docs"} <= named
    assert named <= declared, named - declared


def test_named_configurations_exist() -> None:
    if _library.cuda_missing is not None:
        pytest.skip(_library.cuda_missing)
    known = {f"{row['name']}:{c['name']}" for row in torch_gemm.kernels() for c in row["configs"]}
    documented = [
        torch_gemm.stats,
        torch_gemm.matmul,
        torch_gemm.linear,
        torch_gemm.linear_glu,
        torch_gemm.addmm,
    ]
    text = "".join(path.read_text() for path in DOCUMENTS)
    text += "".join(function.__doc__ or "" for function in documented)
    named = set(re.findall(r"(?:mma_sync|simt):\w+", text))
    assert named
    assert named <= known, named - known
