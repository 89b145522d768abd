"""Every kernel and configuration x dtype x layout x alignment x epilogue x split-K against FP64."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass

import problems
import pytest
import torch
from problems import ALIGNMENTS, BASE_SEED, EPILOGUES, LAYOUTS, MODES, Case, Ledger

from torch_gemm import _library


@dataclass(frozen=True)
class Config:
    """One row of the kernel table with one of its configurations."""

    kernel: str
    name: str
    block_m: int
    block_n: int
    block_k: int
    stages: int
    splits_k: bool

    def __str__(self) -> str:
        return f"{self.kernel}:{self.name}"

    def force(self, split_k: int) -> str:
        return f"{self}" if split_k == 1 else f"{self},split_k={split_k}"

    @property
    def staged(self) -> bool:
        """Loads through registers, and therefore takes every dtype, stride and alignment."""
        return self.name.endswith("_staged")

    @property
    def modes(self) -> tuple[str, ...]:
        """What it promises to run. A family that is not listed fails `test_every_kernel_is_here`."""
        return {
            ("simt", False): ("fp32",),
            ("simt", True): ("fp16", "bf16", "fp32"),
            ("mma_sync", False): ("fp16", "bf16", "fp32/tf32"),
            ("mma_sync", True): ("fp16", "bf16", "fp32/tf32", "fp32/bf16", "fp32/fp16"),
        }.get((self.kernel, self.staged), ())

    def alignments(self, mode: str) -> list[str]:
        """The alignments that it promises to run in a mode."""
        if self.kernel != "mma_sync" or self.staged:
            return list(ALIGNMENTS)
        # cp.async of 16 bytes
        size = MODES[mode].dtype.itemsize
        return [
            name
            for name, alignment in ALIGNMENTS.items()
            if not alignment.odd_stride and alignment.offset * size % 16 == 0
        ]


def kernel_table() -> list[dict]:
    return [] if _library.cuda_missing else json.loads(torch.ops.tgemm._kernels())


CONFIGS = [
    Config(
        kernel["name"],
        config["name"],
        config["block_m"],
        config["block_n"],
        config["block_k"],
        config["stages"],
        kernel["splits_k"],
    )
    for kernel in kernel_table()
    for config in kernel["configs"]
]
CONFIG_MODES = [
    pytest.param(config, mode, id=f"{config}-{mode}") for config in CONFIGS for mode in config.modes
]
FP16_CONFIGS = [config for config in CONFIGS if "fp16" in config.modes]
FAMILIES = sorted({config.kernel for config in CONFIGS})


def launches() -> dict[str, int]:
    return json.loads(torch.ops.tgemm._stats())["kernels"]


def sizes_around(block: int, rng: random.Random) -> int:
    """A size of M or N that ends inside a tile more often than not."""
    return rng.choice(
        (
            rng.randint(1, 8),
            rng.randint(9, block),
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
    assert CONFIGS
    assert all(kernel["configs"] for kernel in kernel_table())
    assert [str(config) for config in CONFIGS if not config.modes] == []
    for family in FAMILIES:
        assert any(config.staged for config in CONFIGS if config.kernel == family)


@pytest.mark.parametrize(("config", "mode"), CONFIG_MODES)
def test_matrix(config: Config, mode: str, ledger: Ledger):
    rng = random.Random(f"{BASE_SEED} {config} {mode}")
    splits = (1, 3) if config.splits_k else (1,)
    torch.ops.tgemm._reset_stats()
    for split_k, layout, alignment, epilogue in itertools.product(
        splits, LAYOUTS, config.alignments(mode), EPILOGUES
    ):
        ledger.check(
            Case(
                m=sizes_around(config.block_m, rng),
                n=sizes_around(config.block_n, rng),
                k=depth(config, split_k, rng),
                mode=mode,
                layout=layout,
                alignment=alignment,
                epilogue=epilogue,
                out_layout=rng.choice(("row", "row", "column")),
                force_kernel=config.force(split_k),
            )
        )
    ledger.verify()
    assert set(launches()) == {config.force(split_k) for split_k in splits}


@pytest.mark.parametrize(("config", "mode"), CONFIG_MODES)
def test_sizes_from_one(config: Config, mode: str, ledger: Ledger):
    sizes = (*range(1, 18), 23, 24, 25, 31, 32, 33, 47, 48, 63, 64, 65, 127, 128, 129)
    triples = list(itertools.product(range(1, 5), repeat=3))
    triples += [(size, 37, 45) for size in sizes]
    triples += [(37, size, 45) for size in sizes]
    triples += [(40, 37, size) for size in sizes]
    layouts = itertools.cycle(LAYOUTS)
    # Sizes, layouts and alignments go round at different speeds, so that they meet in all ways.
    alignments = itertools.cycle(name for name in config.alignments(mode) for _ in LAYOUTS)
    for (m, n, k), layout, alignment in zip(triples, layouts, alignments, strict=False):
        ledger.check(Case(m, n, k, mode, layout, alignment, "bias", force_kernel=str(config)))
    ledger.verify()


@pytest.mark.parametrize(("config", "mode"), CONFIG_MODES)
def test_nothing_to_add_up_or_nowhere_to_put_it(config: Config, mode: str, ledger: Ledger):
    variants = itertools.cycle(
        itertools.product((1, 3) if config.splits_k else (1,), ("row", "column"))
    )
    sizes = ((65, 33, 0), (1, 1, 0), (0, 33, 16), (65, 0, 16), (0, 0, 0))
    for (m, n, k), epilogue in itertools.product(sizes, EPILOGUES):
        split_k, out_layout = next(variants)
        ledger.check(
            Case(
                m,
                n,
                k,
                mode,
                epilogue=epilogue,
                out_layout=out_layout,
                force_kernel=config.force(split_k),
            )
        )
    ledger.verify()


@pytest.mark.parametrize("config", FP16_CONFIGS, ids=str)
def test_subnormal_numbers(config: Config, ledger: Ledger):
    # FP16 operands around its smallest normal number 2^-14, products around its smallest number 2^-24.
    for layout, scale in itertools.product(LAYOUTS, (2.0**-11, 2.0**-13, 2.0**-15)):
        ledger.check(Case(70, 90, 100, "fp16", layout, scale=scale, force_kernel=str(config)))
    ledger.verify()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf], ids=str)
def test_special_values_stay_in_their_row_and_column(config: Config, special: float, device: str):
    mode = MODES[config.modes[0]]
    a = torch.randn(72, 96, device=device, dtype=mode.dtype)
    b = torch.randn(96, 152, device=device, dtype=mode.dtype)
    a[33, 47] = special
    b[12, 101] = special
    out = torch.ops.tgemm.matmul(a, b, force_kernel=str(config))
    expected = a.double() @ b.double()
    assert torch.equal(out.isfinite(), expected.isfinite())
    # An infinity times a random number is an infinity with a sign, the same in any precision.
    reached = ~expected.isfinite()
    assert torch.equal(out[reached].double().nan_to_num(7.0), expected[reached].nan_to_num(7.0))


@pytest.mark.parametrize("config", FP16_CONFIGS, ids=str)
def test_overflow_of_fp16_is_infinite(config: Config, device: str):
    a = torch.full((70, 64), 200.0, device=device, dtype=torch.float16)
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


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_a_configuration_lacks_is_refused_with_a_reason(config: Config, device: str):
    for name in set(MODES) - set(config.modes):
        mode = MODES[name]
        a = torch.randn(32, 32, device=device, dtype=mode.dtype)
        with pytest.raises(RuntimeError, match=f"{config} cannot run .*: .+"):
            torch.ops.tgemm.matmul(a, a, precision=mode.precision, force_kernel=str(config))
    for name in set(ALIGNMENTS) - set(config.alignments(config.modes[0])):
        values = torch.randn(32, 32, device=device, dtype=MODES[config.modes[0]].dtype)
        a = problems.place(values, ALIGNMENTS[name], column_major=False, fill=math.nan)
        with pytest.raises(RuntimeError, match=f"{config} cannot run .*: .+ aligned"):
            torch.ops.tgemm.matmul(a, a, force_kernel=str(config))


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
        for mode in ("fp16", "bf16", "fp32", "fp32/tf32")
        if mode in config.modes
    ],
)
def test_rms_error_is_at_most_1_1_times_torchs(config: Config, mode: str, rms_problem, allow_tf32):
    how = MODES[mode]
    a, b = (operand.to(how.dtype) for operand in rms_problem)
    truth = a.double() @ b.double()
    ours = torch.ops.tgemm.matmul(a, b, precision=how.precision, force_kernel=f"{config}")
    allow_tf32(how.precision == "tf32")
    theirs = a @ b
    rms_ours = (ours.double() - truth).square().mean().sqrt().item()
    rms_theirs = (theirs.double() - truth).square().mean().sqrt().item()
    assert rms_ours <= 1.1 * rms_theirs
