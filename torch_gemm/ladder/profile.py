"""What the rungs do in hardware, counted by Nsight Compute."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch_gemm import nsight
from torch_gemm.console import CommandError
from torch_gemm.ladder.contest import Contender


def profile_contenders(
    ncu: str, contenders: list[Contender], size: int, dtype: str, layout: str
) -> dict[str, Any]:
    """Counts what each rung and twin does in one launch, in a process of its own.

    Returns:
        {"caption": what the counters leave out, "rows": one per rung, in order: "name" and what
        `nsight.describe` returns}.

    Raises:
        CommandError: ncu fails, or a rung is not exactly one kernel.
    """
    rows = [contender.row for contender in contenders if "force" in contender.row]
    calls = [{"force": row["force"], "precision": row["precision"]} for row in rows]
    job = {"size": size, "dtype": dtype, "layout": layout, "calls": calls}
    command = [sys.executable, "-m", "torch_gemm.ladder.launch", json.dumps(job)]
    kernels = nsight.profile(ncu, command)
    if len(kernels) != len(rows):
        raise CommandError(
            f"Nsight Compute saw {len(kernels)} kernels for {len(rows)} rungs, and cannot tell them apart"
        )
    return {
        "caption": nsight.CAPTION,
        "rows": [
            {"name": row["name"], **counts} for row, counts in zip(rows, kernels, strict=True)
        ],
    }
