"""Every kernel and configuration x dtype x layout x alignment x epilogue x split-K against FP64."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections import Counter

import problems
import pytest
import torch
from problems import ALIGNMENTS, BASE_SEED, EPILOGUES, LAYOUTS, MODES, Case, Ledger
from promises import CONFIGS, Config, chunk, running

CONFIG_MODES = [
    pytest.param(config, mode, id=f"{config}-{mode}") for config in CONFIGS for mode in config.modes
]
FAMILIES = sorted({config.kernel for config in CONFIGS})


def launches() -> dict[str, int]:
    return json.loads(torch.ops.tgemm._stats())["kernels"]


def sizes_around(block: int, rng: random.Random) -> int:
    """A size of M or N that ends inside a tile more often than not."""
    return rng.choice(
        (
            rng.randint(1, 8),
            rng.randint(min(9, block), block),
            block - 1,
            block,
            block + 1,
            block + rng.randint(2, block),
            block + 4 * rng.randint(1, block // 4),
            2 * block + rng.randint(1, 17),
        )
    )


def depth(config: Config, split_k: int, rng: random.Random) -> int:
    """A size of K: from a part of one step to more steps than the pipeline has stages, per split."""
    steps = rng.randint(0, config.stages + 2) * split_k
    return max(1, steps * config.block_k + rng.choice((0, 1, 2, 4, 8, -1, -8, config.block_k // 2)))


def test_every_kernel_is_here():
    assert [str(config) for config in CONFIGS if not config.modes] == []
    assert sorted(kernel["name"] for kernel in json.loads(torch.ops.tgemm._kernels())) == FAMILIES
    # These two run what no other automatic kernel does.
    assert {config.kernel for config in CONFIGS if not config.promise.aligned} >= {
        "mma_sync",
        "simt",
    }


@pytest.mark.parametrize(("config", "mode"), CONFIG_MODES)
def test_matrix(config: Config, mode: str, ledger: Ledger):
    rng = random.Random(f"{BASE_SEED} {config} {mode}")
    splits = (1, 3) if config.splits_k else (1,)
    torch.ops.tgemm._reset_stats()
    layouts = [layout for layout in LAYOUTS if config.out_layouts(layout)]
    combinations = itertools.product(splits, layouts, config.alignments(mode), EPILOGUES)
    for split_k, layout, alignment, epilogue in config.sample(combinations, rng):
        case = Case(
            m=sizes_around(config.block_m, rng),
            n=sizes_around(config.block_n, rng),
            k=depth(config, split_k, rng),
            mode=mode,
            layout=layout,
            alignment=alignment,
            epilogue=epilogue,
            out_layout=rng.choice(config.out_layouts(layout)),
            across=rng.random() < 0.2,
            force_kernel=config.force(split_k),
        )
        case = config.fit(case)
        if config.runs(case):
            ledger.check(case)
    ledger.verify()
    assert set(launches()) == {config.plan(split_k) for split_k in splits}


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        pytest.param(config, mode, id=f"{config}-{mode}")
        for config in CONFIGS
        for mode in config.modes
        if config.promise.gates
    ],
)
def test_gated_products_in_one_kernel(config: Config, mode: str, ledger: Ledger):
    """Weights of either order, rows and columns that end inside a tile or a box, K of several depths."""
    rng = random.Random(f"{BASE_SEED} gated {config} {mode}")
    gated = [name for name, epilogue in EPILOGUES.items() if epilogue.gated]
    torch.ops.tgemm._reset_stats()
    expected: Counter[str] = Counter()
    splits = itertools.cycle((1, 3) if config.promise.gates_all else (1,))
    for layout, epilogue, _ in itertools.product(LAYOUTS, gated, range(6)):
        # A tile has half its columns of each weight; rows of clusters lie below one another.
        m = sizes_around(rng.choice((1, 2)) * config.block_m, rng)
        n = -(-sizes_around(config.block_n // 2, rng) // 8) * 8
        split_k = next(splits)
        k = depth(config, split_k, rng)
        force = config.force(split_k)
        case = Case(m, n, k, mode, layout, epilogue=epilogue, force_kernel=force)
        if config.gates(case):
            ledger.check(case)
            expected[config.plan(split_k)] += 2  # a case runs twice
    ledger.verify()
    assert expected
    assert launches() == expected


@pytest.mark.parametrize(("config", "mode"), CONFIG_MODES)
def test_sizes_from_one(config: Config, mode: str, ledger: Ledger):
    rng = random.Random(f"{BASE_SEED} sizes {config} {mode}")
    sizes = (*range(1, 18), 23, 24, 25, 31, 32, 33, 47, 48, 63, 64, 65, 127, 128, 129)
    triples = list(itertools.product(range(1, 5), repeat=3))
    triples += [(size, 37, 45) for size in sizes]
    triples += [(37, size, 45) for size in sizes]
    triples += [(40, 37, size) for size in sizes]
    layouts = itertools.cycle(config.layouts())
    # Sizes, layouts and alignments go round at different speeds, so that they meet in all ways.
    alignments = itertools.cycle(name for name in config.alignments(mode) for _ in config.layouts())
    cases = zip(triples, layouts, alignments, strict=False)
    for (m, n, k), layout, alignment in config.sample(cases, rng):
        case = Case(m, n, k, mode, layout, alignment, "bias", force_kernel=str(config))
        case = config.fit(case)
        assert config.runs(case)
        ledger.check(case)
    ledger.verify()


@pytest.mark.parametrize(("config", "mode"), CONFIG_MODES)
def test_nothing_to_add_up_or_nowhere_to_put_it(config: Config, mode: str, ledger: Ledger):
    rng = random.Random(f"{BASE_SEED} nothing {config} {mode}")
    variants = itertools.cycle(
        itertools.product((1, 3) if config.splits_k else (1,), ("row", "column"))
    )
    sizes = ((65, 33, 0), (1, 1, 0), (0, 33, 16), (65, 0, 16), (0, 0, 0))
    cases = []
    for ((m, n, k), epilogue), (split_k, out_layout) in zip(
        itertools.product(sizes, EPILOGUES), variants, strict=False
    ):
        case = Case(
            m,
            n,
            k,
            mode,
            epilogue=epilogue,
            out_layout=out_layout,
            force_kernel=config.force(split_k),
        )
        case = config.fit(case)
        if config.runs(case):  # of nothing, nothing has to be packed
            cases.append(case)
    for case in config.sample(cases, rng):
        ledger.check(case)
    ledger.verify()


@pytest.mark.parametrize("config", running("fp16"), ids=str)
def test_subnormal_numbers(config: Config, ledger: Ledger):
    # FP16 operands around its smallest normal number 2^-14, products around its smallest number 2^-24.
    for layout, scale in itertools.product(config.layouts(), (2.0**-11, 2.0**-13, 2.0**-15)):
        case = Case(70, 90, 100, "fp16", layout, scale=scale, force_kernel=str(config))
        ledger.check(config.fit(case))
    ledger.verify()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf], ids=str)
def test_special_values_stay_in_their_row_and_column(config: Config, special: float, device: str):
    mode = MODES[config.modes[0]]
    a_transposed, b_transposed = (letter == "t" for letter in config.layouts()[0])
    a = torch.randn(72, 96, device=device, dtype=mode.dtype)
    b = torch.randn(96, 152, device=device, dtype=mode.dtype)
    a[33, 47] = special
    b[12, 101] = special
    a = a.t().contiguous().t() if a_transposed else a
    b = b.t().contiguous().t() if b_transposed else b
    out = torch.ops.tgemm.matmul(a, b, precision=mode.precision, force_kernel=str(config))
    expected = a.double() @ b.double()
    assert torch.equal(out.isfinite(), expected.isfinite())
    # An infinity times a random number is an infinity with a sign, the same in any precision.
    reached = ~expected.isfinite()
    assert torch.equal(out[reached].double().nan_to_num(7.0), expected[reached].nan_to_num(7.0))


@pytest.mark.parametrize("config", running("fp16"), ids=str)
def test_overflow_of_fp16_is_infinite(config: Config, device: str):
    a = config.operand(torch.full((72, 64), 200.0, device=device, dtype=torch.float16))
    out = torch.ops.tgemm.matmul(a, a.t(), force_kernel=str(config))
    assert (out == math.inf).all()
    wide = torch.ops.tgemm.matmul(a, a.t(), out_dtype=torch.float32, force_kernel=str(config))
    assert (wide == 64 * 200.0 * 200.0).all()


@pytest.mark.parametrize("mode", MODES)
def test_automatic_choice(mode: str, ledger: Ledger):
    rng = random.Random(f"{BASE_SEED} automatic {mode}")
    for epilogue, layout, alignment in itertools.product(EPILOGUES, LAYOUTS, ALIGNMENTS):
        m, n = (rng.choice((1, 3, 8, 17, 64, 100, 129, 300, 513)) for _ in range(2))
        k = rng.choice((1, 5, 16, 33, 100, 512, 1000, 4100))
        ledger.check(Case(m, n, k, mode, layout, alignment, epilogue))
    ledger.verify()


def test_automatic_choice_never_falls_back_to_aten(ledger: Ledger):
    torch.ops.tgemm._reset_stats()
    for mode in MODES:
        ledger.check(Case(100, 100, 100, mode))
    ledger.verify()
    stats = json.loads(torch.ops.tgemm._stats())
    assert stats["fallbacks"] == {}
    assert sum(stats["kernels"].values()) == 2 * len(MODES)


# Each remainder of a chunk in each combination of dimensions, then the smallest sizes.
SIZES = [
    (48 + i * rest, 56 + j * rest, 64 + k * rest)
    for rest in range(1, 8)
    for i, j, k in itertools.product((0, 1), repeat=3)
]
SIZES += itertools.product((1, 2, 8, 9), (1, 2, 8, 9), (0, 1, 8, 9))


@pytest.mark.parametrize("mode", MODES)
def test_automatic_choice_runs_what_configurations_refuse(mode: str, ledger: Ledger):
    """Every size in every layout runs, on a configuration that promises it."""
    alignments = itertools.cycle(ALIGNMENTS)
    for (m, n, k), layout, out_layout in itertools.product(SIZES, LAYOUTS, ("row", "column")):
        # Neither the stride of a dimension of size 1 nor the address of nothing counts.
        alignment = next(alignments) if min(m, n, k) > 1 else "aligned"
        case = Case(m, n, k, mode, layout, alignment, "bias", out_layout)
        torch.ops.tgemm._reset_stats()
        ledger.check(case)
        (launched,) = {name.partition(",")[0] for name in launches()}
        if k > 0:  # operands without elements are as good as any
            assert launched in [str(config) for config in CONFIGS if config.runs(case)], case
    ledger.verify()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_a_configuration_does_not_promise_is_refused_with_a_reason(
    config: Config, device: str
):
    refused = 0
    for mode, layout, out_layout in itertools.product(MODES, LAYOUTS, ("row", "column")):
        case = Case(48, 56, 64, mode, layout, out_layout=out_layout, force_kernel=str(config))
        variants = [case]
        # One difference at a time from what it runs, so that no reason hides behind another.
        if config.runs(config.fit(case)):
            case = config.fit(case)
            variants += [dataclasses.replace(case, alignment=name) for name in ALIGNMENTS]
            variants += [dataclasses.replace(case, out_alignment=name) for name in ALIGNMENTS]
            variants += [dataclasses.replace(case, epilogue=name) for name in EPILOGUES]
            variants.append(dataclasses.replace(case, epilogue="fp32 residual", across=True))
            variants += [
                dataclasses.replace(case, **{name: getattr(case, name) + extra})
                for name, extra in itertools.product("mnk", range(1, chunk(mode)))
            ]
        for variant in variants:
            if config.runs(variant):
                continue
            with pytest.raises(RuntimeError, match=f"{config} cannot run .*: .+"):
                problems.check(variant, device)
            refused += 1
    assert refused > 0  # nothing promises the reduced precisions and IEEE FP32 at once


def test_reasons_of_refusals(device: str):
    """What the sentences say where it is not obvious which property they mean."""
    half, single = (torch.randn(64, 64, device=device, dtype=t) for t in (torch.half, torch.float))
    for force, a, b, precision, reason in (
        ("mma_sync:128x256", half.mT, half, None, "this tile is built for a K-major a only"),
        ("mma_sync:128x256", single, single, "tf32", "this tile is not built for tf32"),
        ("mma_sync:128x128", half[:, 1:], half[1:], None, "a cannot be copied in aligned"),
        ("mma_sync:128x128", half, half[:, :63], None, "b cannot be copied in aligned"),
        ("mma_sync", single, single, None, "full precision do not run on Tensor Cores"),
        ("simt", single, single, "tf32", "precision tf32 needs Tensor Cores"),
        ("sm90_packed", half, half, None, "it has no operand to pack"),
        ("skinny", half.mT, half, None, "TMA cannot read a along K"),
        ("skinny", single, single, None, "it multiplies FP16 and BF16 operands"),
        ("mma_sync", single, single, "3xtf32", "it makes one product of float32 operands"),
        ("sm90_3xtf32", single, single, None, "as three products of TF32"),
        ("sm90_3xtf32", single, single, "tf32", "as three products of TF32"),
        ("sm90_3xtf32", half, half, "3xtf32", "as three products of TF32"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            torch.ops.tgemm.matmul(a, b, precision=precision, force_kernel=force)
    with pytest.raises(RuntimeError, match="it does not have the epilogue that this takes"):
        torch.ops.tgemm.linear(half, half, residual=single, force_kernel="sm90:192x192")


def test_reasons_of_refusals_of_gated_products(device: str):
    x, gate, up = (torch.randn(64, 64, device=device, dtype=torch.half) for _ in range(3))
    for force, precision, reason in (
        ("sm90:128x192", None, "its tiles do not take two weights"),
        ("sm90:128x128,split_k=2", None, "it cannot split K"),
        ("skinny:8x64", None, "its tiles do not take two weights"),
        ("skinny:8x128,split_k=9", None, "it splits K of two weights within a cluster alone"),
        ("sm90_tf32", "tf32", "it multiplies one weight"),
        ("sm90_packed", None, "it multiplies one weight"),
        ("sm90_3xtf32", "3xtf32", "it multiplies one weight"),
        ("mma_sync", None, "it multiplies one weight"),
    ):
        operands = (t.float() if precision else t for t in (x, gate, up))
        plan = torch.ops.tgemm._linear_glu_plan(*operands, precision=precision, force_kernel=force)
        assert reason in json.loads(plan)["whole"]["error"], force


def test_unknown_kernels_configurations_and_splits_are_refused(device: str):
    a = torch.randn(32, 32, device=device, dtype=torch.float16)
    for force, sentence in (
        ("warp_drive", 'there is no kernel named "warp_drive"'),
        ("mma_sync:7x7x7", 'mma_sync has no configuration "7x7x7"'),
        ("mma_sync:", "is not of the form"),
        ("mma_sync,split_k=0", "is not of the form"),
        ("mma_sync,depth=2", "is not of the form"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            torch.ops.tgemm.matmul(a, a, force_kernel=force)
    problems.assert_product(torch.ops.tgemm.matmul(a, a), a, a)


@pytest.fixture(scope="module")
def rms_problem(device: str):
    """FP32 operands and their exact product; enough tiles that no contender needs to split K."""
    generator = torch.Generator(device).manual_seed(BASE_SEED)
    a = torch.randn(2048, 2304, device=device, generator=generator)
    b = torch.randn(2304, 2048, device=device, generator=generator)
    return a, b


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        pytest.param(config, mode, id=f"{config}-{mode}")
        for config in CONFIGS
        for mode in ("fp16", "bf16", "fp32", "fp32/tf32", "fp32/3xtf32")
        if mode in config.modes
    ],
)
def test_rms_error_is_at_most_1_1_times_torchs(config: Config, mode: str, rms_problem, allow_tf32):
    how = MODES[mode]
    a, b = (config.operand(operand.to(how.dtype)) for operand in rms_problem)
    b = config.second(b)
    truth = a.double() @ b.double()
    ours = torch.ops.tgemm.matmul(a, b, precision=how.precision, force_kernel=f"{config}")
    allow_tf32(how.precision == "tf32")
    theirs = a @ b
    rms_ours = (ours.double() - truth).square().mean().sqrt().item()
    rms_theirs = (theirs.double() - truth).square().mean().sqrt().item()
    assert rms_ours <= 1.1 * rms_theirs
