"""What the ops promise on CUDA beyond single matrices: batches, sizes past 2^31, streams, graphs, autograd."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import hypothesis
import problems
import pytest
import torch
from hypothesis import strategies as st
from problems import assert_product
from promises import CONFIGS, Config, running
from torch import Tensor

import torch_gemm

ROOT = Path(__file__).resolve().parents[2]
HALF = torch.float16
tgemm = torch.ops.tgemm


@pytest.fixture
def randn(device: str) -> Callable[..., Tensor]:
    def make(*sizes: int, dtype: torch.dtype = HALF) -> Tensor:
        return torch.randn(sizes, device=device, dtype=dtype)

    return make


# --- Shapes and views ------------------------------------------------------------------------------

SHAPES = [
    ((7,), (7,)),
    ((7,), (7, 5)),
    ((3, 7), (7,)),
    ((4, 3, 7), (7,)),
    ((7,), (4, 7, 5)),
    ((4, 3, 7), (7, 5)),
    ((3, 7), (4, 7, 5)),
    ((4, 3, 7), (4, 7, 5)),
    ((1, 3, 7), (4, 7, 5)),
    ((4, 3, 7), (1, 7, 5)),
    ((2, 1, 3, 7), (5, 7, 4)),
    ((2, 1, 4, 3, 7), (5, 1, 7, 6)),
    ((2, 3, 2, 3, 2, 3, 5, 7), (2, 3, 2, 3, 2, 3, 7, 4)),
    ((0, 3, 7), (0, 7, 5)),
    ((4, 0, 7), (7, 5)),
    ((4, 3, 0), (4, 0, 5)),
    ((0,), (0,)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_shapes_of_matmul(dtype: torch.dtype, randn, count_problems):
    for a_shape, b_shape in SHAPES:
        a, b = randn(*a_shape, dtype=dtype), randn(*b_shape, dtype=dtype)
        assert_product(tgemm.matmul(a, b), a, b)
    count_problems(len(SHAPES))


def views(randn) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of operands as models make them, none of them plainly contiguous."""
    qkv = randn(2, 33, 3, 4, 16)  # (batch, sequence, q/k/v, heads, features)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    table = randn(64, 48)
    k_major = table.mT.float()
    return {
        "attention scores": (q, k.mT),
        "attention values": (randn(2, 4, 33, 33).softmax(-1), v),
        "grouped queries": (randn(2, 8, 33, 16), k.repeat_interleave(2, 1).mT),
        "shared keys": (randn(2, 4, 33, 16), k[:, :1].expand(2, 4, 33, 16).mT),
        "expanded batch": (table.expand(5, 64, 48), randn(5, 48, 10)),
        "expanded rows": (randn(1, 48).expand(64, 48), table.mT),
        "expanded columns": (table, randn(48, 1).expand(48, 20)),
        "expanded K": (randn(64, 1).expand(64, 48), randn(1, 20).expand(48, 20)),
        "all expanded": (randn(1, 1).expand(64, 48), randn(1, 1).expand(48, 20)),
        "every other row": (table[::2], table.mT[:, ::3]),
        "every other K": (table[:, ::2], randn(48, 20)[::2]),
        "sliced columns": (table[:, 3:40], table[5:42, 1:30]),
        "permuted batch": (randn(6, 33, 5, 16).permute(2, 0, 1, 3), randn(6, 16, 9)),
        "batch in the middle": (randn(33, 7, 16).transpose(0, 1), randn(16, 7, 9).transpose(0, 1)),
        "batch innermost": (randn(33, 16, 7).permute(2, 0, 1), randn(16, 9, 7).permute(2, 0, 1)),
        "overlapping rows": (table.view(-1).as_strided((50, 48), (7, 1)), table.mT),
        "negative": (torch._neg_view(table), torch._neg_view(table.mT)),
        "imaginary part": (torch.view_as_complex(randn(64, 48, 2).float()).conj().imag, k_major),
    }


def test_views(randn, count_problems):
    pairs = views(randn)
    for name, (a, b) in pairs.items():
        assert_product(tgemm.matmul(a, b), a, b, name=name)
    count_problems(len(pairs))


def test_linear_keeps_leading_dimensions(randn):
    x, weight, bias = randn(2, 3, 5, 24), randn(40, 24), randn(40)
    out = tgemm.linear(x, weight, bias)
    assert out.shape == (2, 3, 5, 40)
    assert out.is_contiguous()
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shape", [(40,), (5, 40), (2, 1, 1, 40), (2, 3, 5, 1), (1,)], ids=str)
def test_residuals_broadcast(shape: tuple[int, ...], randn):
    x, weight, residual = randn(2, 3, 5, 24), randn(40, 24), randn(*shape)
    out = tgemm.linear(x, weight, None, residual, activation="relu").double()
    truth = torch.relu(x.double() @ weight.double().T) + residual.double()
    torch.testing.assert_close(out, truth, rtol=2e-3, atol=2e-3)


def test_nan_in_input_does_not_count_with_beta_0(randn):
    a, b = randn(33, 20), randn(20, 40)
    out = tgemm.addmm(torch.full((33, 40), math.nan, device=a.device, dtype=HALF), a, b, beta=0.0)
    assert_product(out, a, b)


# --- Gated products --------------------------------------------------------------------------------


def assert_glu(
    actual: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    kernel: str | None = None,
) -> None:
    """Fails unless `actual` is silu(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias)."""

    def linear(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        x64, weight64 = x.double(), weight.double().mT
        bias64 = torch.zeros((), device=x.device) if bias is None else bias.double()
        return x64 @ weight64 + bias64, x64.abs() @ weight64.abs() + bias64.abs()

    (gate, gate_magnitude), (up, up_magnitude) = (
        linear(gate_weight, gate_bias),
        linear(up_weight, up_bias),
    )
    gate = torch.nn.functional.silu(gate)
    magnitude = gate.abs() * up_magnitude + up.abs() * gate_magnitude
    assert actual.shape == gate.shape
    c = problems.accuracy_constant(kernel, x.shape[-1])
    assert problems.excess(actual, gate * up, magnitude, c).item() <= 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gated_products_of_views(dtype: torch.dtype, randn, count_problems):
    packed = randn(2 * 40, 24, dtype=dtype) / 4
    halves = tuple(packed.chunk(2))
    columns = packed.mT.contiguous().mT
    interleaved = packed[::2], packed[1::2]
    odd = (randn(2 * 39, 23, dtype=dtype) / 4).chunk(2)
    x = randn(2, 3, 5, 24, dtype=dtype)
    cases = {
        "packed": (x, halves),
        "packed in columns": (x, tuple(columns.chunk(2))),
        "interleaved": (x, interleaved),
        "of two layouts": (x, (halves[0], columns[40:])),
        "the same twice": (x, (halves[1], halves[1])),
        "odd": (x[..., :23], odd),
        "one row": (x[0, 0, 0], halves),
        "permuted rows": (x.permute(1, 2, 0, 3), halves),
        "expanded rows": (randn(1, 24, dtype=dtype).expand(7, 24), halves),
        "one column": (x, (halves[0][:1], halves[1][:1])),
        "one k": (x[..., :1], (halves[0][:, :1], halves[1][:, :1])),
        "no k": (x[..., :0], (halves[0][:, :0], halves[1][:, :0])),
        "no rows": (x[:0], halves),
        "no columns": (x, (halves[0][:0], halves[1][:0])),
        "many sliced batches": (randn(*[3] * 8, 4, 24, dtype=dtype)[(slice(2),) * 8], halves),
    }
    for name, (rows, weights) in cases.items():
        out = tgemm.linear_glu(rows, *weights)
        assert out.is_contiguous(), name
        assert_glu(out, rows, *weights)
    count_problems(len(cases))


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.promise.gates], ids=str)
def test_one_kernel_reads_weights_where_they_lie(config: Config, randn, count_problems):
    force, biases = str(config), (None, randn(200), randn(200))
    packed = randn(2 * 200, 136) / 4  # (2N, K)
    weights = {
        "packed": packed.chunk(2),
        "packed in columns": packed.mT.contiguous().mT.chunk(2),
        "interleaved": (packed[::2], packed[1::2]),
        "the same twice": (packed[:200], packed[:200]),
    }
    rows = {
        "contiguous": randn(2, 67, 136),
        "one row": randn(136),
        "permuted": randn(67, 3, 136).transpose(0, 1),
        "transposed": randn(136, 200).mT,
    }
    if "tn" not in config.layouts():
        del rows["transposed"]
    torch_gemm.reset_stats()
    cases = list(itertools.product(weights.values(), rows.values(), biases[:2], biases[::2]))
    for halves, x, gate_bias, up_bias in cases:
        arguments = x, *halves, gate_bias, up_bias
        out = tgemm.linear_glu(*arguments, activation="silu", force_kernel=force)
        assert_glu(out, *arguments, kernel=force)
    assert torch_gemm.stats()["kernels"] == {force: len(cases)}
    count_problems(len(cases))


@pytest.mark.parametrize(
    "config", [c for c in CONFIGS if c.promise.gates and not c.promise.boxes], ids=str
)
def test_a_kernel_of_two_weights_splits_k_or_runs_twice(config: Config, randn):
    arguments = randn(33, 520), randn(40, 520) / 16, randn(40, 520) / 16
    force = config.force(2)
    torch_gemm.reset_stats()
    assert_glu(tgemm.linear_glu(*arguments, force_kernel=force), *arguments, kernel=force)
    assert torch_gemm.stats()["kernels"] == {force: 1 if config.promise.gates_all else 2}


def test_no_gated_weight_is_copied(randn):
    """Beside the result, memory is taken for at most the gates in FP32 and partial sums."""
    x, packed = randn(64, 4096), randn(2 * 1024, 4096)
    halves = packed.chunk(2)
    tgemm.linear_glu(x, *halves)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tgemm.linear_glu(x, *halves, force_kernel="mma_sync:64x64,split_k=1")
    assert torch.cuda.max_memory_allocated() - before <= 64 * 1024 * (2 + 4)


def test_a_kernel_of_one_weight_runs_twice(randn):
    x, gate_weight, up_weight = randn(33, 24), randn(40, 24), randn(40, 24)
    for force in ("naive", "mma_sync"):
        torch_gemm.reset_stats()
        out = tgemm.linear_glu(x, gate_weight, up_weight, force_kernel=force)
        stats = torch_gemm.stats()
        assert sum(stats["kernels"].values()) == 2, stats
        assert all(plan.startswith(force + ":") for plan in stats["kernels"]), stats
        assert stats["fallbacks"] == {}
        assert_glu(out, x, gate_weight, up_weight)


def test_nothing_runs_where_one_weight_cannot(randn):
    x, aligned, shifted = randn(40, 24), randn(40, 24), randn(40, 32)[:, 1:25]
    torch_gemm.reset_stats()
    for weights in ((aligned, shifted), (shifted, aligned)):
        with pytest.raises(RuntimeError, match="cannot be copied in aligned"):
            tgemm.linear_glu(x, *weights, force_kernel="mma_sync:128x128")
    assert torch_gemm.stats()["kernels"] == {}
    assert_glu(tgemm.linear_glu(x, aligned, shifted), x, aligned, shifted)


def test_plans_of_gated_products_are_what_runs(randn):
    x, gate_weight, up_weight = randn(33, 24), randn(40, 24), randn(40, 24)
    for force in (None, "naive", "mma_sync:64x64,split_k=2", "sm90:128x128"):
        arguments = x, gate_weight, up_weight
        plan = json.loads(tgemm._linear_glu_plan(*arguments, force_kernel=force))
        assert plan["copies"] is False
        torch_gemm.reset_stats()
        tgemm.linear_glu(*arguments, force_kernel=force)
        launched = torch_gemm.stats()["kernels"]
        expected = plan["plan"].split(" + ")
        assert launched == {name: expected.count(name) for name in expected}
        steps = [plan[step]["problem"] for step in ("whole", "gate", "up")]
        assert [name.split(", ", 1)[1] for name in steps] == [
            "silu, gated",
            "silu",
            "times residual",
        ]


def test_strides_of_out_of_gated_products(device: str, randn):
    x, gate_weight, up_weight = randn(33, 20), randn(40, 20), randn(40, 20)
    outs = {
        "contiguous": torch.empty(33, 40, device=device, dtype=HALF),
        "column-major": torch.empty(40, 33, device=device, dtype=HALF).mT,
        "leading stride": torch.empty(33, 50, device=device, dtype=HALF)[:, 3:43],
        "both strides": torch.empty(33, 2, 40, 3, device=device, dtype=HALF)[:, 1, :, 2],
    }
    for name, out in outs.items():
        out.fill_(math.nan)
        assert torch_gemm.linear_glu(x, gate_weight, up_weight, out=out) is out, name
        assert_glu(out, x, gate_weight, up_weight)


def test_rows_of_gated_products_past_2_to_the_31(huge: Tensor, randn):
    gate_weight, up_weight = randn(16, 4096), randn(16, 4096) / 64
    rows = sample(len(huge))
    out = tgemm.linear_glu(huge, gate_weight, up_weight)
    assert_glu(out[rows], huge[rows], gate_weight, up_weight)


def test_gated_products_on_two_streams(randn):
    """The gates that wait between two kernels are each call's own."""
    work = [(randn(256, 512), randn(512, 512), randn(512, 512) / 16) for _ in range(2)]
    expected = [tgemm.linear_glu(*arguments) for arguments in work]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in work]
    results: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, arguments, outs in zip(streams, work, results, strict=True):
            with torch.cuda.stream(stream):
                outs.append(tgemm.linear_glu(*arguments))
    torch.cuda.synchronize()
    for outs, truth in zip(results, expected, strict=True):
        assert all(torch.equal(out, truth) for out in outs)


@pytest.mark.parametrize(
    ("mode", "force"),
    [
        ("fp16", "sm90_packed:128x128_pingpong"),
        ("fp32/tf32", "sm90_packed:128x128_pingpong"),
        ("fp32/bf16", "sm90_packed:128x128_pingpong"),
        ("fp32/3xtf32", "sm90_3xtf32:128x128"),
    ],
)
@pytest.mark.parametrize("split_k", [1, 3])
def test_packed_batches(mode: str, force: str, split_k: int, device: str):
    how = problems.MODES[mode]
    force = f"{force},split_k={split_k}"

    def operand(*sizes: int) -> Tensor:
        return problems.without_ties(torch.randn(sizes, device=device)).to(how.dtype)

    # Repeated, in another order, and more dimensions than a tensor map has.
    for a, b in (
        (operand(4, 1, 6, 33, 385), operand(5, 6, 385, 40)),
        (operand(6, 4, 33, 385).transpose(0, 1), operand(4, 6, 40, 385).mT),
        (operand(33, 385), operand(7, 385, 41)),
        (operand(5, 4, 3, 2, 33, 385).permute(3, 2, 1, 0, 4, 5), operand(2, 3, 4, 5, 385, 40)),
    ):
        out = tgemm.matmul(a, b, precision=how.precision, force_kernel=force)
        assert_product(out, a, b, mode, kernel=force)


def test_the_plan_says_what_is_packed(randn):
    options = {"precision": None, "force_kernel": "sm90_packed"}
    a, odd = randn(64, 128), randn(128, 65)
    assert json.loads(tgemm._plan(a, odd, **options))["packing"] == ["b"]
    assert json.loads(tgemm._plan(odd.mT, a.mT, **options))["packing"] == ["a"]
    assert "packing" not in json.loads(tgemm._plan(a, a.mT))


# --- Sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_batch_of_70000(dtype: torch.dtype, randn, count_problems):
    a, b = randn(70000, 8, 8, dtype=dtype), randn(70000, 8, 8, dtype=dtype)
    assert_product(tgemm.matmul(a, b), a, b)
    configs = running("fp16" if dtype is HALF else "fp32")
    for config in configs:
        force, operand, other = str(config), config.operand(a), config.second(b)
        assert_product(tgemm.matmul(operand, other, force_kernel=force), a, b, kernel=force)
    count_problems(70000 * (1 + len(configs)))


@pytest.mark.parametrize("config", running("fp16"), ids=str)
def test_rows_and_columns_past_2_to_the_21(config: Config, randn):
    force = str(config)
    tall, small = config.operand(randn(2**21 + 77, 16)), config.second(randn(16, 8))
    assert_product(tgemm.matmul(tall, small, force_kernel=force), tall, small, kernel=force)
    few, wide = randn(8, 16), tall.mT
    assert_product(tgemm.matmul(few, wide, force_kernel=force), few, wide, kernel=force)


ROWS_BEYOND = 136  # a multiple of 8, so that rows of as many outputs are whole 16 bytes


@pytest.fixture(scope="module")
def huge(device: str):
    """(rows, 4096) FP16, a little more than 2^31 elements."""
    generator = torch.Generator(device).manual_seed(problems.BASE_SEED)
    rows = 2**31 // 4096 + ROWS_BEYOND
    tensor = torch.empty(rows, 4096, device=device, dtype=HALF)
    yield tensor.normal_(generator=generator)
    del tensor
    torch.cuda.empty_cache()


def sample(rows: int) -> list[int]:
    """The first and last rows and some around those that begin at element 2^31."""
    first = rows - ROWS_BEYOND
    return [0, 1, rows // 2, rows - 200, first - 1, first, first + 1, rows - 2, rows - 1]


@pytest.mark.parametrize("config", running("fp16"), ids=str)
def test_operands_past_2_to_the_31(config: Config, huge: Tensor, randn):
    force = str(config)
    rows = sample(len(huge))
    if config.promise.packs:  # the last 4095 columns, at addresses that are not aligned
        huge = huge[:, 1:]
    columns = huge.shape[1]
    b = config.second(randn(columns, 16))
    out = tgemm.matmul(huge, b, force_kernel=force)
    assert_product(out[rows], huge[rows], b, kernel=force)
    # The same as the second operand, and along K.
    a = randn(16, columns)
    out = tgemm.matmul(a, huge.mT, force_kernel=force)
    assert_product(out[:, rows], a, huge[rows].mT, kernel=force)
    k = len(huge) // 8 * 8
    ones, few = torch.ones(8, k, device=huge.device, dtype=HALF), huge[:k, :16]
    products = [(ones, config.second(few))]
    if "tt" in config.layouts():
        products.append((few.mT, ones.mT))
    for a, b in products:
        total = tgemm.matmul(a, b, out_dtype=torch.float32, force_kernel=force)
        assert_product(total, a, b, kernel=force)


@pytest.mark.parametrize("config", running("fp16"), ids=str)
def test_outputs_past_2_to_the_31(config: Config, huge: Tensor, randn):
    force = str(config)
    a, b = huge[:, :16], config.second(config.operand(randn(16, 4096)))
    out = torch.full_like(huge, math.nan)
    tgemm.matmul.out(a, b, out=out, force_kernel=force)
    rows = sample(len(huge))
    assert_product(out[rows], a[rows], b, kernel=force)
    assert not out.sum(1, dtype=torch.float32).isnan().any()
    # Column-major, and with a residual as large as the output.
    flipped = out.view(4096, -1).mT
    weight = config.operand(randn(4096, 16))
    truth = a[rows].double() @ weight.mT.double() + flipped[rows].double()
    tgemm.linear.out(a, weight, None, flipped, out=flipped, force_kernel=force)
    torch.testing.assert_close(flipped[rows].double(), truth, rtol=1e-3, atol=1e-3)
    assert not out.sum(1, dtype=torch.float32).isnan().any()


@pytest.mark.parametrize("config", running("fp16"), ids=str)
def test_batch_strides_past_2_to_the_31(config: Config, huge: Tensor, randn):
    force = str(config)
    offset = 1 if config.promise.packs else 0
    a = huge.view(-1).as_strided((3, 70, 64), (2**30, 4096, 1), offset)
    b = config.second(randn(64, 48))
    out = tgemm.matmul(a, b.expand(3, 64, 48), force_kernel=force)
    assert_product(out, a, b.expand(3, 64, 48), kernel=force)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_large_k(dtype: torch.dtype, randn):
    a, b = randn(64, 65536, dtype=dtype), randn(65536, 72, dtype=dtype)
    assert_product(tgemm.matmul(a, b), a, b)
    assert_product(tgemm.matmul(a, b, out_dtype=torch.float32), a, b)


# --- out= ------------------------------------------------------------------------------------------


def test_strides_of_out(device: str, randn):
    a, b = randn(33, 20), randn(20, 40)
    outs = {
        "contiguous": torch.empty(33, 40, device=device, dtype=HALF),
        "column-major": torch.empty(40, 33, device=device, dtype=HALF).mT,
        "leading stride": torch.empty(33, 50, device=device, dtype=HALF)[:, 3:43],
        "every other column": torch.empty(33, 80, device=device, dtype=HALF)[:, ::2],
        "both strides": torch.empty(33, 2, 40, 3, device=device, dtype=HALF)[:, 1, :, 2],
    }
    for name, out in outs.items():
        out.fill_(math.nan)
        assert torch_gemm.matmul(a, b, out=out) is out, name
        assert_product(out, a, b)


def test_batched_out_of_any_order(device: str, randn):
    a, b = randn(6, 33, 20), randn(6, 20, 40)
    for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)):
        sizes = [(6, 33, 40)[i] for i in order]
        inverse = [order.index(i) for i in range(3)]
        out = torch.full(sizes, math.nan, device=device, dtype=HALF).permute(inverse)
        tgemm.matmul.out(a, b, out=out)
        assert_product(out, a, b)


def test_out_may_be_the_residual(randn):
    x, weight, total = randn(33, 24), randn(40, 24), randn(33, 40)
    truth = torch.nn.functional.silu(x.double() @ weight.double().T) + total.double()
    tgemm.linear.out(x, weight, None, total, activation="silu", out=total)
    torch.testing.assert_close(total.double(), truth, rtol=2e-3, atol=2e-3)
    truth = 0.5 * total.double() - (x.double() @ weight.double().T)
    tgemm.addmm.out(total, x, weight.mT, beta=0.5, alpha=-1.0, out=total)
    torch.testing.assert_close(total.double(), truth, rtol=2e-3, atol=2e-3)


def test_any_other_overlap_is_refused(randn):
    memory = randn(100, 64)
    square = memory[:64]
    for out, residual in (
        (square, None),
        (memory[32:96], None),
        (randn(64, 64), None),
        (memory[1:65], square),
        (square.mT, square),
    ):
        overlapping = out.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        x = memory[:64] if residual is None else randn(64, 64)
        if overlapping:
            before = memory.clone()
            with pytest.raises(RuntimeError, match="out"):
                tgemm.linear.out(x, randn(64, 64), None, residual, out=out)
            assert torch.equal(memory, before)
        else:
            tgemm.linear.out(x, randn(64, 64), None, residual, out=out)


# --- Errors ----------------------------------------------------------------------------------------


def test_errors_leave_the_next_call_working(randn):
    a, b = randn(33, 20), randn(20, 40)
    cpu = torch.randn(20, 40, dtype=HALF)
    bad_calls = [
        lambda: tgemm.matmul(a, a),
        lambda: tgemm.matmul(a, b.bfloat16()),
        lambda: tgemm.matmul(a, cpu),
        lambda: tgemm.matmul(a.bool(), b.bool()),
        lambda: tgemm.matmul(a.to_sparse(), b),
        lambda: tgemm.matmul(a, b, precision="fp8"),
        lambda: tgemm.matmul(a, b, force_kernel="warp_drive"),
        lambda: tgemm.matmul(a.float(), b.float(), precision="3xtf32", force_kernel="mma_sync"),
        lambda: tgemm.matmul.out(a, b, out=randn(33, 41)),
        lambda: tgemm.matmul.out(a, b, out=torch.empty(33, 40, dtype=HALF)),
        lambda: tgemm.linear(a, b.mT, activation="tanh"),
        lambda: tgemm.linear(a, b.mT, randn(39)),
        lambda: tgemm.linear_glu(a, b.mT, randn(39, 20)),
        lambda: tgemm.linear_glu(a, b.mT, b.mT.float()),
        lambda: tgemm.linear_glu(a, b.mT, b.mT, force_kernel="warp_drive"),
        lambda: tgemm.linear_glu.out(a, b.mT, b.mT, out=b.mT),
        lambda: tgemm.addmm(randn(33, 39), a, b),
    ]
    for bad_call in bad_calls:
        with pytest.raises(RuntimeError) as raised:
            bad_call()
        sentence = str(raised.value).splitlines()[0]
        assert sentence.startswith("tgemm."), sentence
        assert_product(tgemm.matmul(a, b), a, b)
    torch.cuda.synchronize()


@pytest.fixture
def fallback_policy():
    yield torch_gemm.set_fallback
    torch_gemm.set_fallback("warn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_fallback_policy(dtype: torch.dtype, fallback_policy, randn):
    a, b = randn(9, 8, dtype=dtype), randn(8, 7, dtype=dtype)
    name = f"matmul: {dtype}".replace("torch.", "")
    torch_gemm.reset_stats()
    fallback_policy("allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(tgemm.matmul(a, b), a @ b)
    assert torch_gemm.stats()["fallbacks"] == {name: 1}
    fallback_policy("warn")
    with pytest.warns(UserWarning, match="ATen computes it") as caught:
        tgemm.matmul(a, b)
    assert [warning.filename for warning in caught] == [__file__]
    assert torch_gemm.stats()["fallbacks"] == {name: 2}
    fallback_policy("error")
    with pytest.raises(RuntimeError, match="the fallback policy is 'error'"):
        tgemm.matmul(a, b)
    assert torch_gemm.stats() == {"kernels": {}, "fallbacks": {name: 2}}


# --- Streams, graphs, devices ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("force", "k"),
    [("mma_sync:64x64,split_k=4", 2048), ("sm90_packed:128x128_pingpong,split_k=4", 2047)],
)
def test_two_streams_at_once(force: str, k: int, randn):
    # Both split K, so that each needs a workspace of its own.
    work = [(randn(256, k), randn(k, 256)) for _ in range(2)]
    expected = [tgemm.matmul(a, b, force_kernel=force) for a, b in work]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in work]
    results: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, (a, b), outs in zip(streams, work, results, strict=True):
            with torch.cuda.stream(stream):
                outs.append(tgemm.matmul(a, b, force_kernel=force))
    torch.cuda.synchronize()
    for outs, truth in zip(results, expected, strict=True):
        assert all(torch.equal(out, truth) for out in outs)


def test_work_is_queued_on_the_current_stream(randn):
    a, b = randn(512, 512), randn(512, 512)
    expected = tgemm.matmul(a * 2, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms: on another stream the product would come first
        late = a * 2
        out = tgemm.matmul(late, b)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_nothing_synchronises(randn):
    x, weight, bias, residual = randn(33, 24), randn(40, 24), randn(40), randn(33, 40)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tgemm.linear(x, weight, bias, residual, activation="gelu")
        tgemm.matmul(x, weight.mT)
        tgemm.linear_glu(x, weight, weight, bias, bias)
        tgemm.addmm(residual, x, weight.mT)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_replays_read_new_inputs(randn):
    x, weight, bias, residual = randn(65, 256), randn(40, 256), randn(40), randn(65, 40)
    forces = (None, "simt", "mma_sync:64x64,split_k=3")

    def compute() -> list[Tensor]:
        return [
            tgemm.linear(x, weight, bias, residual, activation="gelu", force_kernel=force)
            for force in forces
        ] + [tgemm.linear_glu(x, weight, -weight, bias, force_kernel=force) for force in forces]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = compute()
    for _ in range(3):
        for tensor in (x, weight, bias, residual):
            tensor.normal_()
        graph.replay()
        for out, expected in zip(outs, compute(), strict=True):
            assert torch.equal(out, expected)


FIRST_CALL = """
import json, torch, torch_gemm
assert not torch.cuda.is_initialized(), "import torch_gemm initialised CUDA"
x = torch.randn(96, 224, device="cuda")
weight = torch.randn(80, 224, device="cuda")
bias = torch.randn(80, device="cuda")
half = [tensor.half() for tensor in (x, weight, bias)]
torch.cuda.synchronize()
calls = [(half, None, None)]
for kernel in torch_gemm.kernels():
    for config in kernel["configs"]:
        force = f"{kernel['name']}:{config['name']}"
        tensors, precision = half, None
        if kernel["name"] == "simt" and not config["name"].endswith("_staged"):
            tensors, precision = (x, weight, bias), "ieee"
        if kernel["name"] in ("sm90_tf32", "sm90_packed"):
            tensors = (x, weight, bias)
            precision = "tf32" if kernel["name"] == "sm90_tf32" else "fp16"
        if kernel["name"] == "sm90_3xtf32":
            tensors, precision = (x, weight, bias), "3xtf32"
        calls.append((tensors, precision, force))
        if kernel["splits_k"]:
            calls.append((tensors, precision, force + ",split_k=3"))
gated = 0
for tensors, precision, force in calls:
    graph = torch.cuda.CUDAGraph()
    options = dict(activation="relu", precision=precision, force_kernel=force)
    with torch.cuda.graph(graph):
        captured = torch.ops.tgemm.linear(*tensors, **options)
    graph.replay()
    torch.cuda.synchronize()
    again = torch.ops.tgemm.linear(*tensors, **options)
    truth = torch.relu(torch.nn.functional.linear(*(t.double() for t in tensors)))
    assert torch.equal(captured, again), force
    assert (captured.double() - truth).abs().max() < 0.1, force
    x, weight, bias = tensors
    arguments = x, weight, weight / 16, bias
    if "plan" not in json.loads(torch.ops.tgemm._linear_glu_plan(*arguments, **options)):
        continue  # a kernel that can neither gate nor multiply by what another has written
    gated += 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.tgemm.linear_glu(*arguments, **options)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, torch.ops.tgemm.linear_glu(*arguments, **options)), force
    x, weight, up_weight, bias = (t.double() for t in arguments)
    truth = torch.relu(x @ weight.T + bias) * (x @ up_weight.T)
    assert (captured.double() - truth).abs().max() < 0.5, force
print(len(calls), "calls captured,", gated, "of them gated")
"""


def in_a_fresh_process(script: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_first_call_of_every_kernel_can_be_captured():
    assert "calls captured" in in_a_fresh_process(FIRST_CALL)


def test_forked_workers_can_import_and_use_cuda():
    script = """
import multiprocessing, torch, torch_gemm
def work(queue):
    x = torch.randn(64, 64, device="cuda", dtype=torch.float16)
    queue.put(float((torch_gemm.matmul(x, x) - x @ x).abs().max()))
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=work, args=(queue,))
process.start()
print("difference", queue.get(timeout=60) < 0.1)
process.join()
"""
    assert "difference True" in in_a_fresh_process(script)


def test_operands_of_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    a = torch.randn(64, 128, device="cuda:1", dtype=HALF)
    b = torch.randn(128, 96, device="cuda:1", dtype=HALF)
    assert torch.cuda.current_device() == 0
    out = tgemm.matmul(a, b)
    assert out.device == a.device
    assert torch.cuda.current_device() == 0
    assert_product(out, a, b)
    with pytest.raises(RuntimeError, match="cuda:0"):
        tgemm.matmul(a, b.to("cuda:0"))


# --- Precision of FP32 -----------------------------------------------------------------------------


def test_wrappers_and_modules_follow_torchs_flags(allow_tf32, randn):
    x, weight = randn(256, 256, dtype=torch.float32), randn(256, 256, dtype=torch.float32)
    layer = torch_gemm.nn.Linear(256, 256, device=x.device)
    calls = {
        "linear": lambda: torch_gemm.linear(x, weight),
        "matmul": lambda: torch_gemm.matmul(x, weight),
        "addmm": lambda: torch_gemm.addmm(x, x, weight),
        "nn.Linear": lambda: layer(x),
    }
    for allowed, family in ((False, "simt"), (True, ("mma_sync", "sm90_tf32", "sm90_packed"))):
        allow_tf32(allowed)
        for name, call in calls.items():
            torch_gemm.reset_stats()
            call()
            (kernel,) = torch_gemm.stats()["kernels"]
            assert kernel.startswith(family), (name, allowed, kernel)


def test_autocast(randn):
    layer = torch_gemm.nn.Linear(24, 40, device="cuda")
    x = randn(33, 24, dtype=torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            out = layer(x)
            expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert out.dtype is dtype
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-3)


# --- Autograd, compile, opcheck --------------------------------------------------------------------


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], seed: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return list(torch.autograd.grad(out, leaves, seed.to(out.dtype)))


FUNCTIONS = {
    "matmul": (
        lambda a, b: tgemm.matmul(a, b),
        torch.matmul,
        [(3, 17, 24), (24, 40)],
    ),
    "matmul broadcast": (
        lambda a, b: tgemm.matmul(a, b),
        torch.matmul,
        [(3, 1, 17, 24), (2, 24, 40)],
    ),
    "matmul vectors": (lambda a, b: tgemm.matmul(a, b), torch.matmul, [(24,), (24, 40)]),
    "addmm": (
        lambda c, a, b: tgemm.addmm(c, a, b, beta=0.5, alpha=2.0),
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
        [(1, 40), (17, 24), (24, 40)],
    ),
    **{
        f"linear_glu {activation}": (
            lambda x, g, u, c, d, activation=activation: tgemm.linear_glu(
                x, g, u, c, d, activation=activation
            ),
            lambda x, g, u, c, d, activation=activation: (
                problems.activate(torch.nn.functional.linear(x, g, c), activation)
                * torch.nn.functional.linear(x, u, d)
            ),
            [(3, 17, 24), (40, 24), (40, 24), (40,), (40,)],
        )
        for activation in ("relu", "gelu", "gelu_tanh", "silu")
    },
    **{
        f"linear {activation}": (
            lambda x, w, b, r, activation=activation: tgemm.linear(
                x, w, b, r, activation=activation
            ),
            lambda x, w, b, r, activation=activation: (
                problems.activate(torch.nn.functional.linear(x, w, b), activation) + r
            ),
            [(3, 17, 24), (40, 24), (40,), (17, 40)],
        )
        for activation in (None, "relu", "gelu", "gelu_tanh", "silu")
    },
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str, dtype: torch.dtype, randn):
    ours, theirs, shapes = FUNCTIONS[name]
    tensors = [randn(*shape, dtype=dtype) for shape in shapes]
    seed = torch.randn_like(theirs(*tensors))
    exact = gradients(theirs, [tensor.double() for tensor in tensors], seed)
    stock = gradients(theirs, tensors, seed)
    mine = gradients(ours, tensors, seed)
    for ours_grad, stock_grad, truth, tensor in zip(mine, stock, exact, tensors, strict=True):
        assert ours_grad.shape == tensor.shape
        assert ours_grad.dtype is dtype
        error = (ours_grad.double() - truth).norm().item()
        stock_error = (stock_grad.double() - truth).norm().item()
        # The errors of so few elements are a matter of luck, hence the factor and the floor.
        floor = 4 * torch.finfo(torch.float32).eps * truth.norm().item()
        assert error <= 2 * stock_error + floor, name


def test_inference_allocates_no_preactivation(randn):
    x, weight, bias = randn(1024, 1024), randn(1024, 1024), randn(1024)
    x.requires_grad_()

    def peak(run: Callable[[], Tensor]) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    out_bytes = 2 * 1024 * 1024
    force = "mma_sync:64x64,split_k=1"

    def run() -> Tensor:
        return tgemm.linear(x, weight, bias, activation="gelu", force_kernel=force)

    with torch.no_grad():
        assert peak(run) < 2 * out_bytes
    assert peak(run) >= 2 * out_bytes


def test_compile_of_every_overload(randn):
    x, weight, bias, residual = randn(33, 24), randn(40, 24), randn(40), randn(33, 40)

    def functional(x, weight, bias, residual):
        first = tgemm.linear(x, weight, bias, residual, activation="gelu")
        second = tgemm.matmul(x * 2, weight.mT, out_dtype=torch.float32)
        third = tgemm.addmm(residual, x, weight.mT, beta=0.5, alpha=2.0)
        fourth = tgemm.linear_glu(x, weight, -weight, None, bias)
        return first, second, third + 1, fourth * 2

    def in_place(x, weight, bias, residual):
        outs = [torch.empty_like(residual) for _ in range(4)]
        tgemm.linear.out(x, weight, bias, residual, activation="silu", out=outs[0])
        tgemm.matmul.out(x, weight.mT, out=outs[1])
        tgemm.addmm.out(residual, x, weight.mT, out=outs[2])
        tgemm.linear_glu.out(x, weight, weight, bias, out=outs[3])
        return [out + 1 for out in outs]

    for function in (functional, in_place):
        expected = function(x, weight, bias, residual)
        compiled = torch.compile(function, fullgraph=True)
        for out, truth in zip(compiled(x, weight, bias, residual), expected, strict=True):
            torch.testing.assert_close(out, truth)


def test_compiled_training_step(randn):
    layer = torch_gemm.nn.Linear(24, 40, device="cuda", activation="gelu")
    x = randn(33, 24, dtype=torch.float32)
    layer(x).square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    torch.compile(layer, fullgraph=True)(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_compiled_with_cuda_graphs(randn):
    layer = torch_gemm.nn.Linear(24, 40, device="cuda", dtype=HALF, activation="relu")
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    with torch.inference_mode():
        for _ in range(4):
            x = randn(33, 24)
            torch.testing.assert_close(compiled(x).clone(), layer(x))


OPCHECKS = {
    "matmul": lambda r: (tgemm.matmul.default, (r(4, 33, 24), r(24, 40)), {}),
    "linear": lambda r: (
        tgemm.linear.default,
        (r(33, 24), r(40, 24), r(40), r(33, 40)),
        {"activation": "gelu"},
    ),
    "addmm": lambda r: (
        tgemm.addmm.default,
        (r(33, 40), r(33, 24), r(24, 40)),
        {"beta": 0.5, "alpha": 2.0},
    ),
    "_linear_preact": lambda r: (
        tgemm._linear_preact.default,
        (r(33, 24), r(40, 24), r(40)),
        {"activation": "silu"},
    ),
    "linear_glu": lambda r: (
        tgemm.linear_glu.default,
        (r(33, 24), r(40, 24), r(40, 24), r(40), r(40)),
        {"activation": "gelu"},
    ),
    "_linear_glu_preact": lambda r: (
        tgemm._linear_glu_preact.default,
        (r(33, 24), r(40, 24), r(40, 24)),
        {},
    ),
    "linear_glu.out": lambda r: (
        tgemm.linear_glu.out,
        (r(33, 24), r(40, 24), r(40, 24)),
        {"out": r(33, 40)},
    ),
    "matmul.out": lambda r: (tgemm.matmul.out, (r(33, 24), r(24, 40)), {"out": r(33, 40)}),
    "linear.out": lambda r: (tgemm.linear.out, (r(33, 24), r(40, 24)), {"out": r(33, 40)}),
    "addmm.out": lambda r: (
        tgemm.addmm.out,
        (r(40), r(33, 24), r(24, 40)),
        {"out": r(33, 40)},
    ),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name: str, randn):
    op, args, options = OPCHECKS[name](randn)
    torch.library.opcheck(op, args, options)


# --- Models ----------------------------------------------------------------------------------------


def test_replaced_model(randn):
    layer = torch.nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.TransformerDecoder(layer, 2).to("cuda", HALF).eval()
    inputs = (randn(3, 17, 64), randn(3, 9, 64))
    torch_gemm.reset_stats()
    report = torch_gemm.replace(model, verify=inputs)
    assert report.replaced == (
        "layers.0.linear1",
        "layers.0.linear2",
        "layers.1.linear1",
        "layers.1.linear2",
    )
    assert report.verification.largest_difference < 0.02
    assert sum(torch_gemm.stats()["kernels"].values()) == 4


# --- Properties ------------------------------------------------------------------------------------


@st.composite
def operand_pairs(draw: st.DrawFn) -> dict:
    """Sizes, strides and dtype of two operands that torch.matmul accepts."""
    size = st.integers(0, 70)
    m, n, k = draw(size), draw(size), draw(size)
    batch = draw(st.lists(st.integers(1, 3), max_size=3))
    a_batch = [draw(st.sampled_from((1, extent))) for extent in batch]
    b_batch = [draw(st.sampled_from((1, extent))) for extent in batch]
    return {
        "dtype": draw(st.sampled_from((torch.float16, torch.bfloat16, torch.float32))),
        "a": (*a_batch[draw(st.integers(0, len(batch))) :], m, k),
        "b": (*b_batch[draw(st.integers(0, len(batch))) :], k, n),
        "a_order": draw(st.randoms(use_true_random=False)),
        "gaps": draw(st.lists(st.integers(0, 9), min_size=4, max_size=4)),
        "precision": draw(st.sampled_from((None, "tf32", "bf16", "fp16"))),
    }


def strided(shape: tuple[int, ...], rng, gap: int, offset: int, dtype: torch.dtype) -> Tensor:
    """Random values in a random order of dimensions, with a gap, a storage offset and NaN around."""
    order = list(range(len(shape)))
    rng.shuffle(order)
    strides, stride = [0] * len(shape), 1
    for position, dimension in enumerate(order):
        strides[dimension] = stride
        stride *= max(1, shape[dimension])
        if position == 0:
            stride += gap
    whole = torch.full((offset + stride + 16,), math.nan, device="cuda", dtype=dtype)
    window = whole.as_strided(shape, strides, offset)
    window.copy_(problems.without_ties(torch.randn(shape, device="cuda")))
    return window


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(operand_pairs())
def test_any_shapes_and_strides(pair: dict):
    rng, dtype, gaps = pair["a_order"], pair["dtype"], pair["gaps"]
    a = strided(pair["a"], rng, gaps[0], gaps[1], dtype)
    b = strided(pair["b"], rng, gaps[2], gaps[3], dtype)
    mode = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)
    if mode is None:
        mode = "fp32" if pair["precision"] is None else f"fp32/{pair['precision']}"
    assert_product(tgemm.matmul(a, b, precision=pair["precision"]), a, b, mode)
