"""Shows versions, libraries, GPUs and the kernels that each GPU gets."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from typing import TYPE_CHECKING

import torch

import torch_gemm
from torch_gemm import _digest, _library
from torch_gemm.console import first_line, open_console

if TYPE_CHECKING:
    from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``python -m torch_gemm info`` has no options."""


def run(arguments: argparse.Namespace) -> None:
    """Prints everything that a report about a problem should contain.

    Raises:
        CommandError: if rich is missing.
    """
    console = open_console()
    console.print(_versions())
    console.print(_libraries())
    if _library.cuda_missing is not None:
        console.print(_library.cuda_missing)
    if not torch.cuda.is_available():
        console.print(f"No GPU: {why_no_gpu()}")
        return
    for index in range(torch.cuda.device_count()):
        console.print(_gpu(index))


def driver_version() -> str | None:
    """The version of the NVIDIA driver, as its own tool prints it; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.split()
    return lines[0] if lines else None


def why_no_gpu() -> str:
    """Why torch has no GPU to run on: a sentence without its subject."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA."
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises RuntimeError or AssertionError with torch's reason
        return first_line(error)
    return "torch sees no device."


def _table(title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    return table


def _versions() -> Table:
    table = _table("Versions")
    table.add_row("torch_gemm", torch_gemm.__version__)
    table.add_row("torch", torch.__version__)
    table.add_row("Python", f"{platform.python_version()} on {platform.platform()}")
    table.add_row("CUDA of torch", torch.version.cuda or "none: this torch is for the CPU")
    table.add_row("NVIDIA driver", driver_version() or "none found")
    return table


def _libraries() -> Table:
    table = _table("Libraries")
    for name, path in _library.loaded.items():
        table.add_row(name, str(path))
    for name, value in (_digest.build_record() or {}).items():
        table.add_row(f"built: {name.replace('_', ' ')}", _text(value))
    return table


def _gpu(index: int) -> Table:
    properties = torch.cuda.get_device_properties(index)
    table = _table(f"cuda:{index}")
    table.add_row("name", properties.name)
    table.add_row("memory", f"{properties.total_memory / 2**30:.1f} GiB")
    table.add_row("compute capability", f"{properties.major}.{properties.minor}")
    if _library.cuda_missing is not None:
        return table
    try:
        described = json.loads(torch.ops.tgemm._device(index))
    except RuntimeError as error:
        table.add_row("kernels", f"none: {first_line(error)}")
        return table
    for name, value in described.items():
        if name not in ("name", "compute_capability"):
            table.add_row(name.replace("_", " "), _text(value))
    return table


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
