"""Hardware counters of kernels through Nsight Compute (``ncu``): running it and reading what it prints."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_gemm.console import CommandError

# What is asked of ncu, by the name under which a result stores it.
COUNTERS = {
    "shared_load_requests": "smsp__inst_executed_op_shared_ld.sum",
    "shared_store_requests": "smsp__inst_executed_op_shared_st.sum",
    "ldmatrix_requests": "smsp__inst_executed_op_ldsm.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes_per_second": "dram__bytes.sum.per_second",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "achieved_occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor_busy_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    # wgmma is one instruction for many cycles of work: the pipe's busy cycles count it (above), its
    # instructions count here, those of mma.sync in the first of the two.
    "tensor_instructions": "sm__inst_executed_pipe_tensor.sum",
    "wgmma_instructions": "sm__inst_executed_pipe_tensor_op_gmma.sum",
}

# Why a warp does not issue, after Nsight Compute's documentation ("Warp Stall Reasons"); "selected" is
# left out: such a warp issues. Each is the number of warps in that state per issued instruction.
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
STALL_METRIC = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TOP_STALLS = 3

CAPTION = (
    "Requests are instructions of a warp; one of 128 bits per thread, or ldmatrix.x4, takes 4 wavefronts "
    "without any conflict. Loads include ldmatrix. Not counted as loads or stores: what cp.async and TMA "
    "write to shared memory, and what wgmma reads from it. n/a: not known to ncu for this card. Stalls: "
    "warps waiting for that reason per issued instruction."
)

_PREFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def find_ncu() -> str:
    """The path of ncu: on PATH, or in the CUDA toolkit.

    Raises:
        CommandError: there is none.
    """
    toolkits = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [str(Path(toolkit) / "bin") for toolkit in toolkits if toolkit]
    found = shutil.which("ncu") or shutil.which("ncu", path=os.pathsep.join(folders))
    if found is None:
        raise CommandError(
            "Nsight Compute (ncu) is not on PATH: install it with the CUDA toolkit or from "
            "https://developer.nvidia.com/nsight-compute, or leave out --profile"
        )
    return found


def profile(ncu: str, command: Sequence[str]) -> list[dict[str, Any]]:
    """Runs a program under ncu and counts what its kernels did.

    Args:
        ncu: path of the profiler.
        command: the program; its kernels count between cudaProfilerStart and cudaProfilerStop.

    Returns:
        One dict per kernel, in the order of launches, as `describe` makes it.

    Raises:
        CommandError: ncu fails; the sentence says what to do about it.
    """
    metrics = [*COUNTERS.values(), *map(STALL_METRIC.format, STALLS)]
    while True:
        finished = subprocess.run(
            _ncu_command(ncu, metrics, command),
            capture_output=True,
            text=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        # Metrics differ from card to card and from version to version, and ncu does not start with one
        # that it does not know. Those it names are left out and end up as unknown.
        unknown = _unknown_metrics(finished.stdout + finished.stderr, metrics)
        if not unknown:
            break
        metrics = [metric for metric in metrics if metric not in unknown]
    kernels = parse_raw_csv(finished.stdout)
    if finished.returncode != 0 or not kernels:
        raise CommandError(_why_it_failed(finished.stdout + finished.stderr))
    return [describe(kernel) for kernel in kernels]


def parse_raw_csv(text: str) -> list[dict[str, str | float | None]]:
    """What ``ncu --csv --page raw`` printed, one dict per kernel.

    The header, a row of units and the kernels' rows are quoted CSV; around them stand ncu's own lines
    (``==PROF== ...``) and whatever the program printed.

    Returns:
        Column name to value, in base units: text for what describes the kernel, a number or None ("n/a")
        for what was measured. Empty if there is no such table in `text`.
    """
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.startswith('"ID",')), None)
    if header is None:
        return []
    names, *rows = csv.reader([header, *(line for line in lines if line.startswith('"'))])
    rows = [row for row in rows if len(row) == len(names)]
    if not rows:
        return []
    units, *rows = rows
    return [
        {
            name: _value(cell, unit) if "__" in name else cell
            for name, unit, cell in zip(names, units, row, strict=True)
        }
        for row in rows
    ]


def _value(cell: str, unit: str) -> float | None:
    try:
        number = float(cell.replace(",", ""))
    except ValueError:
        return None
    # "Gbyte/s" where ncu does not know --print-units base.
    return number * (_PREFIXES.get(unit[:1], 1.0) if "byte" in unit else 1.0)


def describe(kernel: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one row of `parse_raw_csv`.

    Returns:
        "function", every name in COUNTERS, "load_wavefronts_per_request" and
        "store_wavefronts_per_request" (None where unknown, 0 where the kernel makes no request), and
        "stalls": the TOP_STALLS most frequent as [reason, warps per issued instruction].
    """
    counters = {name: kernel.get(metric) for name, metric in COUNTERS.items()}
    stalls = {reason: kernel.get(STALL_METRIC.format(reason)) for reason in STALLS}
    known = [[reason, warps] for reason, warps in stalls.items() if warps is not None]
    # ncu's own rule for bank conflicts counts the requests of loads like this: their wavefronts
    # include those of ldmatrix, the instruction count does not.
    loads = counters["shared_load_requests"]
    if loads is not None:
        loads += counters["ldmatrix_requests"] or 0
    return {
        "function": kernel.get("Kernel Name"),
        **counters,
        "load_wavefronts_per_request": _ratio(counters["shared_load_wavefronts"], loads),
        "store_wavefronts_per_request": _ratio(
            counters["shared_store_wavefronts"], counters["shared_store_requests"]
        ),
        "stalls": sorted(known, key=lambda stall: -stall[1])[:TOP_STALLS],
    }


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or denominator is None:
        return None
    return numerator / denominator if denominator else 0.0


def _ncu_command(ncu: str, metrics: Sequence[str], command: Sequence[str]) -> list[str]:
    options = [
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
        "--target-processes",
        "all",
    ]
    output = ["--csv", "--page", "raw", "--print-units", "base"]
    return [ncu, *options, *output, "--metrics", ",".join(metrics), *command]


def _unknown_metrics(output: str, metrics: Sequence[str]) -> set[str]:
    complaints = "\n".join(re.findall(r"Failed to find metric.*", output))
    return {metric for metric in metrics if re.search(rf"\b{metric.split('.')[0]}\b", complaints)}


def _why_it_failed(output: str) -> str:
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "Nsight Compute may not read the GPU's counters (ERR_NVGPUCTRPERM): run this as root, or "
            "load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    reasons = re.findall(r"^==(?:ERROR|WARNING)== *(.+)", output, re.M)
    # Without a word of ncu's own, the last line is the program's: that of a traceback says what it was.
    reason = reasons[0] if reasons else (output.strip().splitlines() or ["it printed nothing"])[-1]
    return (
        f"Nsight Compute did not profile the kernels, leave out --profile to go without: {reason}"
    )
