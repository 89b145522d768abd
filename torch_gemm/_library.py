"""Finds and loads the two shared libraries, and says in one sentence what is missing.

Importing this module registers the ops with torch. It does not initialise CUDA.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import torch

LIBRARY_DIR = Path(__file__).parent / "lib"
MINIMUM_TORCH = (2, 10)

# The ops that take tensors: what an implementation has to provide.
TENSOR_OPS = (
    "matmul",
    "matmul.out",
    "linear",
    "linear.out",
    "_linear_preact",
    "linear_glu",
    "linear_glu.out",
    "_linear_glu_preact",
    "addmm",
    "addmm.out",
)
# Implemented by the CUDA library alone.
_CUDA_ONLY_OPS = (
    "_kernels",
    "_device",
    "_stats",
    "_reset_stats",
    "_set_fallback",
    "_set_warning_callback",
    "_plan",
    "_linear_glu_plan",
    "_add_tuning",
    "_clear_tuning",
)

# The libraries that were loaded, by file name.
loaded: dict[str, Path] = {}
# Why the CUDA library was not loaded, as one sentence; None if it was.
cuda_missing: str | None = None

# Python registrations live as long as this object.
registrations = torch.library.Library("tgemm", "FRAGMENT")


def _check_torch() -> None:
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(match[1]), int(match[2])) if match else MINIMUM_TORCH
    if version < MINIMUM_TORCH:
        raise ImportError(
            f"torch_gemm needs torch {MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]} or newer; "
            f"this is torch {torch.__version__}."
        )


def _load(name: str) -> str | None:
    """Loads one library. Returns None, or one sentence that says why it could not be loaded."""
    path = LIBRARY_DIR / name
    if not path.exists():
        return (
            f"torch_gemm's library {name} is not built: there is no {path}; build it with "
            "`pip install .` in the source tree."
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        # Newer versions of torch wrap the dynamic linker's words.
        words = str(error.__cause__ or error)
        undefined = re.search(r"undefined symbol: (\w+)", words)
        if undefined:
            return (
                f"torch_gemm's library {path} does not fit torch {torch.__version__}, which has no "
                f"symbol {undefined[1]}; reinstall torch_gemm."
            )
        reason = " ".join(words.split())
        return f"torch_gemm's library {path} could not be loaded: {reason}"
    loaded[name] = path
    return None


def _load_cuda() -> str | None:
    if torch.version.cuda is None:
        return (
            f"tgemm runs on the CPU only here: torch {torch.__version__} is built without CUDA, "
            "so the CUDA kernels were not loaded."
        )
    if not (LIBRARY_DIR / "libtgemm_cuda.so").exists():
        return (
            "tgemm runs on the CPU only here: torch_gemm was built without its CUDA library "
            f"({LIBRARY_DIR / 'libtgemm_cuda.so'}); build it again where nvcc is found."
        )
    return _load("libtgemm_cuda.so")


def _explain_missing_cuda(reason: str) -> None:
    """Registers kernels that raise `reason`, where torch would print a list of dispatch keys."""

    def unavailable(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(reason)

    for op in TENSOR_OPS:
        registrations.impl(op, unavailable, "CUDA")
    for op in _CUDA_ONLY_OPS:
        registrations.impl(op, unavailable, "CompositeExplicitAutograd")


_check_torch()
_error = _load("libtgemm.so")
if _error is not None:
    raise ImportError(_error)
cuda_missing = _load_cuda()
if cuda_missing is not None:
    _explain_missing_cuda(cuda_missing)
