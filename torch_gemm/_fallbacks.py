"""What Python code of this package leaves to ATen: counted, and warned about or refused by the policy.

The CUDA library does the same for what reaches its ops; `torch_gemm.stats` shows both together.
"""

from __future__ import annotations

import threading
from collections import Counter

from torch_gemm import _warnings

POLICIES = ("allow", "warn", "error")

policy = "warn"
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def record(function: str, op: str, reason: str) -> None:
    """Notes that `function`, a name of this package, leaves `op` to ATen because of its operands.

    Args:
        function: "override", say.
        op: what was called, "mm".
        reason: what is the matter with the operands: "int64 operands".

    Raises:
        RuntimeError: the policy is "error".
    """
    sentence = f"torch_gemm.{function}: {op} has {reason}, which torch_gemm does not take"
    if policy == "error":
        raise RuntimeError(f'{sentence}; the fallback policy is "error"')
    with _lock:
        _counts[f"{function} {op}: {reason}"] += 1
    if policy == "warn":
        _warnings.warn_caller(f"{sentence}; ATen computes it")


def counts() -> dict[str, int]:
    """How often what was left to ATen."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Sets the counters back to zero."""
    with _lock:
        _counts.clear()
