"""The Python in README.md runs, and what the documents name and link to exists."""

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


DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/ladder.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    # "make" is also an English verb: commands are code, alone on a line or in backticks.
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M))
    declared = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert named
    assert named <= declared, named - declared


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


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
    text = README + "".join(function.__doc__ or "" for function in documented)
    named = set(re.findall(r"(?:mma_sync|simt):\w+", text))
    assert named
    assert named <= known, named - known
