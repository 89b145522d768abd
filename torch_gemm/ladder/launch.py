"""Launches kernels once each, in the order given, for a profiler that waits for cudaProfilerStart.

python -m torch_gemm.ladder.launch '{"size": 4096, "dtype": "fp16", "layout": "nn",
                                     "calls": [{"force": "naive:8x32", "precision": null}]}'
"""

from __future__ import annotations

import json
import sys

import torch

from torch_gemm.ladder.contest import make_operands, multiply


def main(job: str) -> None:
    """Runs one job: "size", "dtype", "layout", and "calls", each with "force" and "precision"."""
    work = json.loads(job)
    a, b = make_operands(work["size"], work["dtype"], work["layout"], "cuda")
    for profiled in (False, True):  # the first launch of a kernel loads its code
        if profiled:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        for call in work["calls"]:
            multiply(a, b, call["precision"], call["force"])
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1])
