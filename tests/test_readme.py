"""The Python in README.md runs, and the commands it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", README, re.M | re.S))
def test_usage_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    # "make" is also an English verb: commands are code, alone on a line or in backticks.
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M))
    declared = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert named
    assert named <= declared, named - declared


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / document).read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target
