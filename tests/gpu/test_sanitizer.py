"""compute-sanitizer finds no access outside an allocation and no race in shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUBSET = Path(__file__).with_name("sanitizer_subset.py")
# The tool's exit status when it found something.
FOUND = 99
# The problems are shared among this many tests, which can run side by side.
SHARES = 4


def find_tool() -> str | None:
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(toolkit) if toolkit.is_file() else None)


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str, share: int):
    sanitizer = find_tool()
    if sanitizer is None:
        pytest.skip(
            "compute-sanitizer is not installed: memory errors and races were not looked for"
        )
    # Without torch's cache every tensor is an allocation of its own, whose ends the tool guards.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = [
        sanitizer,
        *("--tool", tool),
        *("--error-exitcode", str(FOUND)),
        # Only our own kernels: they are in the namespace tgemm.
        *("--kernel-name", "kernel_substring=tgemm"),
        *("--report-api-errors", "no"),
        *("--launch-timeout", "120"),
        sys.executable,
        *(str(SUBSET), tool, str(share), str(SHARES)),
    ]
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=200
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(
            f"no end after {late.timeout} s; the last lines: {(late.stdout or b'')[-1000:]!r}"
        )
    report = result.stdout + result.stderr
    if "Device not supported" in report:
        pytest.skip("compute-sanitizer does not support this machine: nothing was looked for")
    # The first findings, which cause the rest, and what the program said at its end.
    findings = [line for line in report.splitlines() if line.startswith("=========")]
    excerpt = "\n".join([*findings[:60], "...", report[-3000:]])
    assert result.returncode == 0, excerpt
    assert "problems right" in report
    summary = {"memcheck": r"ERROR SUMMARY: 0 errors", "racecheck": r"RACECHECK SUMMARY: 0 hazards"}
    assert re.search(summary[tool], report), excerpt
