"""Hand-written GEMM kernels as PyTorch ops: `torch.ops.tgemm`, with `matmul`, `linear` and others.

Importing registers the ops and changes nothing else; it does not initialise CUDA.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from typing import Any

import torch

from torch_gemm import (  # noqa: F401  (some register with torch)
    _fake,
    _fallbacks,
    _library,
    _vmap,
    autograd,
    nn,
)
from torch_gemm.ops import addmm, linear, linear_glu, matmul
from torch_gemm.overriding import override
from torch_gemm.packaging import load_package
from torch_gemm.replacement import replace, restore

try:
    __version__ = importlib.metadata.version("torch_gemm")
except importlib.metadata.PackageNotFoundError:  # imported from a source tree
    __version__ = "0+source"

__all__ = [
    "addmm",
    "audit",
    "audit_gemm",
    "check",
    "explain",
    "inductor",
    "kernels",
    "linear",
    "linear_glu",
    "load_package",
    "load_tuning",
    "matmul",
    "nn",
    "override",
    "replace",
    "reset_stats",
    "restore",
    "set_fallback",
    "stats",
    "trace",
    "tune",
    "unload_tuning",
]

# What tools and Inductor take to import, nobody waits for who does not use them.
_LAZY = {
    "audit": "torch_gemm.auditing",
    "audit_gemm": "torch_gemm.auditing",
    "check": "torch_gemm.checking",
    "explain": "torch_gemm.explaining",
    "load_tuning": "torch_gemm.tuning",
    "trace": "torch_gemm.tracing",
    "tune": "torch_gemm.tuning",
    "unload_tuning": "torch_gemm.tuning",
}


def __getattr__(name: str) -> Any:
    if name == "inductor":
        return importlib.import_module("torch_gemm.inductor")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'torch_gemm' has no attribute {name!r}")


def kernels() -> list[dict[str, Any]]:
    """The kernel families of the CUDA library, whatever GPU there is.

    Returns:
        One dict per family: "name", "description", "automatic" (False: runs only when forced),
        "splits_k", and "configs", each with "name", "block_m", "block_n", "block_k", "threads",
        "stages", "shared_memory_bytes" and "max_cluster_split" (up to here, split-K adds up within a
        cluster of CTAs). ``f"{name}:{config}"`` is what `force_kernel` takes.

    Raises:
        RuntimeError: the CUDA library is not loaded; the sentence says why.
    """
    return json.loads(torch.ops.tgemm._kernels())


def stats() -> dict[str, dict[str, int]]:
    """How often each kernel ran on CUDA in this process, and what went to ATen instead.

    Returns:
        {"kernels": {"mma_sync:128x256": 12, ...}, "fallbacks": {"matmul: float64": 1,
        "override mm: int64 operands": 2, "linear: measured to be faster": 3 (by a tuning file), ...}}.
        On the CPU every op is computed by ATen, which counts
        neither as a kernel nor as a fallback.
    """
    counted: dict[str, dict[str, int]] = {"kernels": {}, "fallbacks": {}}
    if _library.cuda_missing is None:
        counted = json.loads(torch.ops.tgemm._stats())
    counted["fallbacks"].update(_fallbacks.counts())
    return counted


def reset_stats() -> None:
    """Sets all counters of `stats` back to zero."""
    _fallbacks.reset()
    if _library.cuda_missing is None:
        torch.ops.tgemm._reset_stats()


def set_fallback(policy: str) -> None:
    """What happens when operands can only be multiplied by ATen.

    Those are float64 and complex ones on CUDA, and in `override` all that tgemm does not take.

    Args:
        policy: "allow" (count it in `stats`), "warn" (the default: also issue a UserWarning, which
            Python shows once for each calling line) or "error".

    Raises:
        ValueError: the policy is unknown.
    """
    if policy not in _fallbacks.POLICIES:
        known = ", ".join(_fallbacks.POLICIES)
        raise ValueError(f"tgemm: the fallback policy is {policy!r}, and must be one of {known}")
    _fallbacks.policy = policy
    if _library.cuda_missing is None:
        torch.ops.tgemm._set_fallback(policy)


if os.environ.get("TGEMM_TUNING"):
    importlib.import_module("torch_gemm.tuning").load_from_environment()
