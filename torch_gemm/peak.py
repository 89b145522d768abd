"""What a card can multiply at most, from its SMs, its clock and the rates in NVIDIA's white papers."""

from __future__ import annotations

from typing import Any

# Multiply-adds of FP32 FMA instructions per SM and cycle, by compute capability. Source: CUDA C++
# Programming Guide, "Throughput of Native Arithmetic Instructions".
FMA_PER_CYCLE = {75: 64, 80: 64, 86: 128, 89: 128, 90: 128, 100: 128, 120: 128}

# Multiply-adds of dense FP16 or BF16 products with FP32 accumulation per SM and cycle. Each follows
# from a number in the architecture's white paper or the card's data sheet, divided by SMs and boost
# clock: T4 65 TFLOP/s, A100 312, RTX A6000 155, L40S 362, H100 SXM 989, B200 2250, RTX PRO 6000 504.
TENSOR_PER_CYCLE = {75: 512, 80: 1024, 86: 512, 89: 512, 90: 2048, 100: 4096, 120: 512}

# The GeForce cards of these chips accumulate in FP32 at half the rate (RTX 2080 Ti 57 TFLOP/s,
# RTX 3090 71, RTX 4090 165, RTX 5090 210).
GEFORCE_HALVES = {75, 86, 89, 120}


def peaks(device: dict[str, Any]) -> dict[str, float]:
    """The peak of each unit of a card at its boost clock.

    Args:
        device: what ``torch.ops.tgemm._device`` says, of which this reads "name",
            "compute_capability" (90 for 9.0), "sm_count" and "clock_ghz".

    Returns:
        TFLOP/s (two FLOPs a multiply-add) of "fma" (FP32 on CUDA cores), "tensor" (dense FP16 and BF16,
        accumulated in FP32) and "tf32" (dense TF32). What is not known of a card is left out.
    """
    capability, name = device["compute_capability"], device["name"]
    tflops_per_mac = 2e-3 * device["sm_count"] * device["clock_ghz"]
    found = {}
    if capability in FMA_PER_CYCLE:
        found["fma"] = FMA_PER_CYCLE[capability] * tflops_per_mac
    # The GTX 16 series is of compute capability 7.5 and has no Tensor Cores.
    if capability in TENSOR_PER_CYCLE and "GTX" not in name:
        halved = capability in GEFORCE_HALVES and "GeForce" in name
        found["tensor"] = TENSOR_PER_CYCLE[capability] * tflops_per_mac / (2 if halved else 1)
        if capability >= 80:
            found["tf32"] = found["tensor"] / 2
    return found
