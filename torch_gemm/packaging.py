"""Loads models that were compiled ahead of time by AOTInductor and call tgemm ops."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch


def load_package(path: str | os.PathLike[str], *, device_index: int = -1) -> Any:
    """Loads a package of torch._inductor.aoti_compile_and_package, with the ops that it calls.

    The model may use tgemm ops itself, have gone through `replace`, or have been compiled with
    ``inductor_configs=torch_gemm.inductor.options()``. Nothing is compiled: importing torch_gemm has
    loaded the libraries that the package needs, and this function checks what it can before torch
    loads the rest.

    Args:
        path: the .pt2 file, or the folder it was unpacked to.
        device_index: of the GPU to load the weights to; -1 for the current one.

    Returns:
        What is called with the model's arguments, as torch._inductor.aoti_load_package returns it.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError: there is nothing at `path`.
        RuntimeError: it is no package, or torch cannot load it; one sentence says why.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"load_package expects a path, and got a {type(path).__name__}")
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"load_package: there is no {file}")
    if file.is_file():
        _check_is_package(file)
    from torch._inductor import aoti_load_package

    try:
        return aoti_load_package(str(file), device_index=device_index)
    except (
        Exception
    ) as error:  # whatever torch's loader, its zip reader or the model's library raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RuntimeError(f"load_package: torch cannot load {file}: {lines[0]}") from error


def _check_is_package(file: Path) -> None:
    if not zipfile.is_zipfile(file):
        raise RuntimeError(
            f"load_package: {file} is not a package of torch._inductor.aoti_compile_and_package"
        )
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    if not any("/aotinductor/" in f"/{name}" for name in names):
        kind = "a torch.export program, which has to be compiled first" if any(
            "/models/" in f"/{name}" for name in names
        ) else "a zip file of another kind"  # fmt: skip
        raise RuntimeError(f"load_package: {file} is {kind}")
    if not torch.cuda.is_available() and any(name.endswith(".cubin") for name in names):
        raise RuntimeError(
            f"load_package: {file} was compiled for a GPU, and torch finds none on this machine"
        )
