"""precision="3xtf32": as accurate as FP32 multiply-adds, beside cuBLAS' own FP32 product (SGEMM)."""

from __future__ import annotations

import json
import math

import pytest
import torch
from problems import BASE_SEED
from promises import running
from torch import Tensor

import torch_gemm

MATMUL = torch.ops.tgemm.matmul
CONFIGS = [str(config) for config in running("fp32/3xtf32") if config.kernel == "sm90_3xtf32"]
MAX, TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


@pytest.fixture
def generator(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(BASE_SEED)


def powers_of_two(generator: torch.Generator, sizes: tuple[int, ...], most: int) -> Tensor:
    """2^-most to 2^most, FP32."""
    exponents = torch.randint(-most, most + 1, sizes, generator=generator, device=generator.device)
    return torch.exp2(exponents.float())


def operands(
    kind: str, m: int, n: int, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """FP32 (m, k) and (k, n), well or ill scaled."""

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=generator.device)

    a, b = normal(m, k), normal(k, n)
    if kind == "positive":
        return a.abs(), b.abs()
    if kind == "rows and columns of any scale":
        return a * powers_of_two(generator, (m, 1), 60), b * powers_of_two(generator, (1, n), 60)
    if kind == "every k of its own scale":
        scale = powers_of_two(generator, (k,), 60)
        return a * scale, b / scale[:, None]
    if kind == "elements of any scale":
        return a * powers_of_two(generator, (m, k), 3), b * powers_of_two(generator, (k, n), 3)
    if kind == "cancelling":  # sums a thousand times smaller than what is added up
        small = normal(m, k - k // 2) * 1e-3
        return torch.cat([a[:, : k // 2], small - a[:, : k // 2]], 1), torch.cat([b[: k // 2]] * 2)
    if kind == "largest":
        return a.clamp(-3, 3) * (MAX / 4), b / k
    if kind == "small":
        return a * (TINY * 64), b
    assert kind == "normal"
    return a, b


KINDS = (
    "normal",
    "positive",
    "rows and columns of any scale",
    "every k of its own scale",
    "elements of any scale",
    "cancelling",
    "largest",
    "small",
)


@pytest.mark.parametrize("k", [512, 4096, 16384])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("force", CONFIGS)
def test_error_is_not_above_sgemms(
    force: str, kind: str, k: int, generator: torch.Generator, allow_tf32
):
    """RMS and largest, relative to |a| @ |b|, which is what either error is proportional to.

    With so many tiles neither splits K, whose parts would add up to smaller errors.
    """
    a, b = operands(kind, 2048, 2048, k, generator)
    truth, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    allow_tf32(False)
    errors = {
        name: (product.double() - truth).abs() / magnitude
        for name, product in {
            "ours": MATMUL(a, b, precision="3xtf32", force_kernel=f"{force},split_k=1"),
            "sgemm": a @ b,
        }.items()
    }
    rms = {name: error.square().mean().sqrt().item() for name, error in errors.items()}
    worst = {name: error.max().item() for name, error in errors.items()}
    assert rms["ours"] <= rms["sgemm"]
    assert worst["ours"] <= worst["sgemm"]


@pytest.mark.parametrize("force", CONFIGS)
def test_infinities_and_nans_are_as_in_ieee_754(force: str, generator: torch.Generator):
    """Also where they meet numbers without a low part, zeros, one another, and the padding of K."""
    a = torch.randn(72, 45, generator=generator, device=generator.device)
    b = torch.randn(45, 152, generator=generator, device=generator.device)
    a[5], b[:, 7] = 1.0, -2.0  # TF32 has them exactly
    a[6], b[:, 8] = 0.0, -0.0
    a[33, 17] = math.inf
    a[34, 44] = -math.inf
    a[35, 3], a[35, 4] = math.inf, -math.inf
    a[36, 0] = math.nan
    b[12, 101] = -math.inf
    b[17, 102] = math.inf
    b[44, 103] = math.nan
    truth = a.double() @ b.double()
    out = MATMUL(a, b, precision="3xtf32", force_kernel=force)
    special = ~truth.isfinite()
    assert torch.equal(out.isfinite(), ~special)
    assert torch.equal(out[special].double().nan_to_num(7.0), truth[special].nan_to_num(7.0))


@pytest.mark.parametrize("force", CONFIGS)
@pytest.mark.parametrize(
    ("x", "y"),
    [
        (MAX, 1.0),
        (MAX, -0.5),
        (-MAX, 2.0),
        (1e30, 1.1e30),
        (1.2345678e-19, 1.7654321e-19),
        (TINY, 1.0),
        (1.2345678 * TINY, 3.3),
    ],
)
def test_ends_of_the_range(force: str, x: float, y: float, device: str):
    a, b = torch.full((64, 1), x, device=device), torch.full((1, 64), y, device=device)
    truth = (a.double() @ b.double()).float()
    out = MATMUL(a, b, precision="3xtf32", force_kernel=force)
    if truth.isfinite().all():
        torch.testing.assert_close(out, truth, rtol=16 * 2.0**-24, atol=0.0)
    else:
        assert torch.equal(out, truth)


def test_is_chosen_when_asked_for_and_never_else(generator: torch.Generator, allow_tf32):
    a, b = operands("normal", 2048, 2048, 2048, generator)

    def kernel(**options) -> str:
        torch_gemm.reset_stats()
        torch_gemm.matmul(a, b, **options)
        (name,) = torch_gemm.stats()["kernels"]
        return name.partition(":")[0]

    assert kernel(precision="3xtf32") in ("sm90_3xtf32", "simt")
    if torch.cuda.get_device_capability() == (9, 0):
        assert kernel(precision="3xtf32") == "sm90_3xtf32"
        plan = json.loads(torch.ops.tgemm._plan(a, b, precision="3xtf32"))
        assert plan["packing"] == ["a", "b"]
        assert plan["workspace_bytes"] >= 2 * 2 * 4 * 2048 * 2048
    for allowed in (False, True):
        allow_tf32(allowed)
        assert kernel() != "sm90_3xtf32"
        assert kernel(precision="ieee") == "simt"
        assert kernel(precision="tf32") != "sm90_3xtf32"


def test_gradients_are_as_accurate(generator: torch.Generator, allow_tf32):
    a, b = operands("normal", 512, 512, 512, generator)
    a.requires_grad_()
    b.requires_grad_()
    grad = torch.randn(512, 512, generator=generator, device=generator.device)
    torch_gemm.matmul(a, b, precision="3xtf32").backward(grad)
    allow_tf32(False)
    for ours, x, y in ((a.grad, grad, b.detach().mT), (b.grad, a.detach().mT, grad)):
        truth = x.double() @ y.double()
        error, theirs = ours.double() - truth, (x @ y).double() - truth
        assert error.square().mean() <= 1.1 * theirs.square().mean()
