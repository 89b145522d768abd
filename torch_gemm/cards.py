"""GPUs as selection sees them: this machine's, and described ones that need not be there."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass

import torch

from torch_gemm import _library
from torch_gemm._digest import build_record
from torch_gemm.peak import peaks

# Share of the theoretical memory bandwidth that a kernel reading a large array reaches; as in
# csrc/ops/device_properties.cpp.
READ_EFFICIENCY = 0.92


@dataclass(frozen=True)
class Card:
    """What the choice of a kernel depends on."""

    name: str  # as CUDA has it, "NVIDIA H200"
    compute_capability: int  # 90 for 9.0
    sm_count: int
    max_shared_memory_per_block: int  # opt-in limit, bytes
    max_shared_memory_per_sm: int  # bytes
    l2_bytes: int
    clock_ghz: float  # boost clock of the SMs
    memory_bytes_per_us: float  # what reading a large array reaches

    def text(self) -> str:
        """The form in which the ops `_plan` and `_linear_glu_plan` take it."""
        name, *numbers = dataclasses.astuple(self)
        return " ".join(map(str, [*numbers, name]))

    def peaks(self) -> dict[str, float]:
        """TFLOP/s of "fma", "tensor" and "tf32", as far as they are known (`torch_gemm.peak`)."""
        return peaks(dataclasses.asdict(self))


# Shared memory by compute capability, KiB: of a block at most, of an SM. CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability".
_SHARED_KIB = {
    75: (64, 64),
    80: (163, 164),
    86: (99, 100),
    89: (99, 100),
    90: (227, 228),
    100: (227, 228),
    120: (99, 100),
}


def _card(
    name: str, capability: int, sm_count: int, l2_mib: float, clock_ghz: float, gb_per_second: float
) -> Card:
    block, sm = _SHARED_KIB[capability]
    return Card(
        name,
        capability,
        sm_count,
        block << 10,
        sm << 10,
        int(l2_mib * 2**20),
        clock_ghz,
        READ_EFFICIENCY * gb_per_second * 1e3,
    )


# SMs, MiB of L2, boost clock and theoretical bandwidth from the vendor's data sheets and white papers;
# those of the H200 as the card itself reports them.
DESCRIBED = {
    "h200": _card("NVIDIA H200", 90, 132, 60, 1.98, 4814.3),
    "h100": _card("NVIDIA H100 80GB HBM3", 90, 132, 50, 1.98, 3352),
    "h100-pcie": _card("NVIDIA H100 PCIe", 90, 114, 50, 1.755, 2039),
    "h20": _card("NVIDIA H20", 90, 78, 60, 1.98, 4000),
    "b200": _card("NVIDIA B200", 100, 148, 126, 1.965, 8000),
    "a100": _card("NVIDIA A100-SXM4-80GB", 80, 108, 40, 1.41, 2039),
    "a100-40gb": _card("NVIDIA A100-SXM4-40GB", 80, 108, 40, 1.41, 1555),
    "a10": _card("NVIDIA A10", 86, 72, 6, 1.695, 600),
    "a6000": _card("NVIDIA RTX A6000", 86, 84, 6, 1.8, 768),
    "rtx3090": _card("NVIDIA GeForce RTX 3090", 86, 82, 6, 1.695, 936),
    "l4": _card("NVIDIA L4", 89, 58, 48, 2.04, 300),
    "l40s": _card("NVIDIA L40S", 89, 142, 96, 2.52, 864),
    "rtx4090": _card("NVIDIA GeForce RTX 4090", 89, 128, 72, 2.52, 1008),
    "rtx5090": _card("NVIDIA GeForce RTX 5090", 120, 170, 96, 2.407, 1792),
    "t4": _card("Tesla T4", 75, 40, 4, 1.59, 320),
    "rtx2080ti": _card("NVIDIA GeForce RTX 2080 Ti", 75, 68, 5.5, 1.545, 616),
}


def described(name: str) -> Card:
    """The described card of a name: a key of DESCRIBED or CUDA's name, case and punctuation aside.

    Raises:
        ValueError: there is none; the sentence lists those there are.
    """
    wanted = _plain(name)
    for key, card in DESCRIBED.items():
        if wanted in (_plain(key), _plain(card.name)):
            return card
    raise ValueError(f"there is no described GPU {name!r}; those are {', '.join(DESCRIBED)}")


def named(gpu: object) -> Card:
    """What a caller means by `gpu`: a Card, or the name of a described one.

    Raises:
        TypeError: it is neither.
        ValueError: the name is unknown.
    """
    if isinstance(gpu, Card):
        return gpu
    if not isinstance(gpu, str):
        raise TypeError(f"gpu must be a name or a Card, and is a {type(gpu).__name__}")
    return described(gpu)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def present(index: int) -> Card:
    """The CUDA device with this index.

    Raises:
        RuntimeError: the CUDA library is not loaded, or there is no such device, or it is too old.
    """
    found = json.loads(torch.ops.tgemm._device(index))
    return Card(**{field.name: found[field.name] for field in dataclasses.fields(Card)})


def is_built_for(card: Card) -> bool:
    """Whether the CUDA library has code that the card can run, in whichever kernel family."""
    families = (build_record() or {}).get("architectures", {})
    return any(
        _runs(code, card.compute_capability) for codes in families.values() for code in codes
    )


def _runs(code: str, capability: int) -> bool:
    """Whether code for "sm_90", "sm_90a" or "compute_90" (PTX) runs on a card.

    CUDA C++ Programming Guide, "Application Compatibility": machine code within one generation, PTX on
    every later card, and what has a suffix on that card alone.
    """
    kind, _, target = code.partition("_")
    number = int(target.rstrip("af"))
    if target[-1].isalpha():
        return number == capability
    if kind == "compute":
        return number <= capability
    return number <= capability and number // 10 == capability // 10


def default() -> Card | None:
    """The current CUDA device; None where there is none that runs kernels."""
    if _library.cuda_missing is not None or not torch.cuda.is_available():
        return None
    return present(torch.cuda.current_device())
