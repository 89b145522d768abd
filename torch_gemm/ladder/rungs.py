"""The rungs of the ladder, in order: a new one is a row of RUNGS."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Twin:
    """A rung with its idea switched off: the same kernel in another configuration."""

    config: str
    idea: str


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder, a name that `force_kernel` takes.

    `refines` is the rung that it improves on. `a100` is its speed over naive as the write-ups that made
    these steps popular give it for an A100. `tensor_until` is the last compute capability on which the
    kernel's instruction runs on Tensor Cores, where later cards emulate it with FFMA.
    """

    kernel: str
    idea: str
    refines: str | None = None
    tensor_cores: bool = False
    twin: Twin | None = None
    a100: float | None = None
    tensor_until: int | None = None

    def emulated(self, compute_capability: int) -> bool:
        """Whether a card (90 for 9.0) computes this on CUDA cores instead of Tensor Cores."""
        return self.tensor_until is not None and compute_capability > self.tensor_until

    def precision(self, dtype: str) -> str | None:
        """How the rung multiplies: FP32 operands as they are on CUDA cores, as FP16 on Tensor Cores."""
        if dtype != "fp32":
            return None
        return "fp16" if self.tensor_cores else "ieee"


RUNGS = (
    Rung("naive", "a thread per output, operands from global memory", a100=1.0),
    Rung("tiled", "tiles of A and B in shared memory", refines="naive", a100=5.5),
    Rung("tiled_padded", "padded rows: no bank conflicts", refines="tiled", a100=7.6),
    Rung(
        "tiled_vectorized",
        "8x8 outputs a thread, 128-bit loads",
        refines="tiled_padded",
        twin=Twin("128x128_scalar", "the same without 128-bit loads"),
    ),
    Rung(
        "wmma",
        "Tensor Cores through the wmma API",
        refines="tiled_vectorized",
        tensor_cores=True,
        a100=18.0,
    ),
    Rung(
        "wmma_double_buffered",
        "the next tile is copied during the multiplication",
        refines="wmma",
        tensor_cores=True,
        twin=Twin("128x128_single", "the same with a single buffer"),
        a100=20.5,
    ),
    Rung("volta_mma", "Volta's mma.sync, m8n8k4", tensor_cores=True, tensor_until=75),
    Rung(
        "mma_sync",
        "mma.sync m16n8k16, ldmatrix, multi-stage cp.async",
        refines="wmma_double_buffered",
        tensor_cores=True,
    ),
    Rung("wgmma", "wgmma on tiles that TMA copies", refines="mma_sync", tensor_cores=True),
)
