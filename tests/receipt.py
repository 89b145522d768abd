"""The record that a full `pytest -m gpu` run leaves in tests/gpu_receipt.json, and its judgement.

The GPU suite does not run where the code is written, so its result travels with the repository. The
digest of csrc/ says which sources it speaks of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("gpu_receipt.json")

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "csrc_digest": str,
    "card": str,
    "driver": str,
    "torch": str,
    "cuda": str,
    "python": str,
    "date": str,
    "seconds": (int, float),
    "seed": int,
    "passed": int,
    "failed": int,
    "skipped": int,
    "skip_reasons": dict,
    "failures": list,
    "gemm_problems": int,
}


def write(receipt: dict[str, Any], path: Path = PATH) -> None:
    """Stores a receipt; refuses one that `read` would refuse."""
    _validate(receipt)
    path.write_text(json.dumps(receipt, indent=2) + "\n")


def read(path: Path = PATH) -> dict[str, Any]:
    """The stored receipt.

    Raises:
        ValueError: if it is not what `write` stores.
        FileNotFoundError: if there is none.
    """
    try:
        receipt = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    _validate(receipt)
    return receipt


def doubts(receipt: dict[str, Any], digest: str | None) -> list[str]:
    """What a reader must know before relying on a receipt: one sentence each, none if it is good.

    Args:
        receipt: as returned by `read`.
        digest: of the csrc/ folder as it is now.
    """
    sentences = []
    if receipt["csrc_digest"] != digest:
        sentences.append(
            f"the GPU tests last ran on {receipt['date']} with other sources: csrc/ has changed "
            "since (run them again with `make test-gpu` on a machine with a GPU)"
        )
    if receipt["failed"]:
        names = ", ".join(receipt["failures"][:5])
        sentences.append(f"{receipt['failed']} GPU tests failed on {receipt['date']}: {names}")
    sentences += [
        f"a GPU test did not run on {receipt['date']}: {name}: {reason}"
        for name, reason in receipt["skip_reasons"].items()
    ]
    return sentences


def _validate(receipt: Any) -> None:
    if not isinstance(receipt, dict):
        raise ValueError("the receipt is not a JSON object")
    for name, kind in _FIELDS.items():
        value = receipt.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"the receipt's {name} is {value!r}")
    if unknown := receipt.keys() - _FIELDS.keys():
        raise ValueError(f"the receipt has unknown fields: {', '.join(sorted(unknown))}")
    digest = receipt["csrc_digest"]
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(f"the receipt's csrc_digest is {digest!r}")
    if receipt["passed"] + receipt["failed"] == 0:
        raise ValueError("the receipt is of a run that executed no test")
    if len(receipt["failures"]) != receipt["failed"]:
        raise ValueError("the receipt's failures are not as many as failed")
    if len(receipt["skip_reasons"]) != receipt["skipped"]:
        raise ValueError("the receipt's skip_reasons are not as many as skipped")
