"""Fits the constants of sm90's cost model (csrc/kernels/sm90/sm90.cpp) to a sweep, and shows how well it predicts.

    python -m benchmarks.side_by_side --sweep sm90 --dtype bf16 --split-k 1,2,3,4 --rounds 3
    python -m benchmarks.calibrate                 reads benchmarks/results/sm90_sweep_bf16.json

The first command measures every configuration on the shapes of the suite `sm90` and on SHAPES; on another
card, both commands give that card's constants. A prediction is

    start + max(rounds * (multiply-adds of a tile / rate + tile), power, L2, memory) + split

with start, tile, rate and the power limit's share of the peak of each configuration. The fit minimises
squared errors of the logarithm of the time; a measurement counts the less, the further its configuration
is behind the best one for its shape, because what matters is which one comes out first. For the same reason
the constants are then moved a little, at random, as long as the choices that they lead to lose less time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEFAULT = Path(__file__).with_name("results") / "sm90_sweep_bf16.json"
ELEMENT = 2  # bytes
PEAK_MAC_PER_CYCLE = 2048.0  # of an SM
# Of the SMs, in clusters of 1 to 8 (an H200's): csrc/gemm/plan.hpp.
CLUSTER_SHARES = (1.0, 1.0, 0.886, 0.909, 0.833, 0.773, 0.795, 0.909)
# A measurement this far behind the best one of its shape counts 1/e as much.
WEIGHT_SCALE = 0.08
# As much as one near the front counts one that the fit so far believes there, which is seen anew after so many steps.
STEPS, REWEIGHED = 3000, 500
# Limits that lie close together slow one another: the time is a norm of theirs, not the largest.
NORM = 4
# Of the second part: moves that are tried, how far they go, and what the fit's error (RMS) counts beside the
# time that choices lose.
MOVES, MOVE, ERROR_COUNTS = 12000, 0.05, 0.1
# Beside the suite's: sizes that fill their last wave in part, whatever the tile.
SHAPES = (
    *("128x128128x4096", "256x14336x8192", "384x6144x4096", "640x4096x4096", "700x3000x9000"),
    *("1024x4096x4096", "1200x5000x3000", "1536x1536x1536", "2048x1920x1920", "2048x2048x8192"),
    *("3000x5000x2000", "5120x3200x1600", "333x7776x2048", "900x900x6000", "96x10240x5120"),
    *("4000x640x2560", "1792x7168x896", "2500x2500x500", "128x10240x8192", "256x10240x8192"),
    *("128x57344x8192", "128x14336x4096", "320x5120x5120", "192x13824x5120", "448x11008x4096"),
    *("512x2048x2048", "128x3072x3072", "768x768x768", "2048x384x384", "4096x3072x768"),
    *("64x6144x4096", "64x28672x4096", "64x4096x14336"),
    *("32x6144x4096", "32x5120x5120", "32x10240x8192", "48x2048x2048", "64x2048x2048"),
    *("64x3072x3072", "64x5120x5120", "64x13824x5120", "64x10240x8192"),
    # Short ones, and batches, which show what a start costs.
    *("256x256x256", "512x512x512", "256x512x1024", "256x3072x3072", "1000x1000x500"),
    *("3000x768x768", "200x256x256x128", "40x1024x1024x512"),
    *("24x192x192x64", "48x128x128x64", "96x384x384x64", "96x384x64x384", "12x768x768x768"),
)
# Batch entries, M, N and K.
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Sample:
    """One configuration measured on one shape."""

    shape: Shape
    config: str
    split: int
    us: float


@dataclass(frozen=True)
class Card:
    """What the model knows of the GPU."""

    sms: int
    cycles_per_us: float
    bytes_per_us: float

    def clusters(self, size: int) -> int:
        """Clusters that run at once; sm90.cpp's resident_clusters(), with Device's shares."""
        return max(1, round(self.sms * CLUSTER_SHARES[size - 1] / size))


def ceil_div(a: int, b: int) -> int:
    """A / b, rounded up."""
    return -(-a // b)


def samples_of(result: dict[str, Any], configs: dict[str, dict[str, Any]]) -> list[Sample]:
    """Every forced sm90 configuration of a sweep, but for splits of K that take a second kernel."""
    samples = []
    for row in result["rows"]:
        for name, contender in row["contenders"].items():
            if not name.startswith("tgemm sm90:"):
                continue
            config, _, split = name.removeprefix("tgemm sm90:").partition(",split_k=")
            if int(split or 1) > configs[config]["max_cluster_split"]:
                continue
            shape = (row.get("batch", 1), row["m"], row["n"], row["k"])
            samples.append(Sample(shape, config, int(split or 1), contender["us"]))
    return samples


class Model(torch.nn.Module):
    """The cost model, with its constants as parameters (logarithms, so that they stay positive)."""

    def __init__(self, configs: dict[str, dict[str, Any]], card: Card) -> None:
        super().__init__()
        self.configs, self.card, self.names = configs, card, list(configs)
        count = len(configs)

        def constants(value: float, size: int = count) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.full((size,), math.log(value)))

        self.start, self.tile = constants(3.0), constants(0.5)
        self.rate, self.power = constants(1300.0), constants(0.6)
        self.l2, self.split, self.split_step = (constants(value, 1) for value in (44.0, 1.0, 1.0))
        self.memory = constants(1.0, 1)

    def features(self, sample: Sample) -> list[float]:
        """Index of the configuration, splits, rounds, multiply-adds of a tile and of all, bytes from L2, time of
        the memory, outputs of a tile, and the share of its rows that exist.
        """
        config, (batch, m, n, k) = self.configs[sample.config], sample.shape
        block_m, block_n = config["block_m"], config["block_n"]
        cluster = 2 if sample.config.endswith("cluster") else 1
        tiles = batch * ceil_div(m, block_m * cluster) * cluster * ceil_div(n, block_n)
        size = cluster * sample.split
        rounds = ceil_div(ceil_div(tiles * sample.split, size), self.card.clusters(size))
        k_tile = ceil_div(ceil_div(k, sample.split), config["block_k"]) * config["block_k"]
        line = ELEMENT * k * (1.0 if ELEMENT * k % 128 == 0 else 2.0)
        return [
            self.names.index(sample.config),
            sample.split,
            rounds,
            block_m * block_n * k_tile,
            tiles * sample.split * block_m * block_n * k_tile,
            tiles * (block_m + block_n / cluster) * line,
            ELEMENT * batch * (m * k + n * k + m * n) / self.card.bytes_per_us,
            block_m * block_n,
            m / (ceil_div(m, block_m) * block_m),
        ]

    def forward(self, features: Tensor) -> Tensor:
        """Microseconds."""
        index = features[:, 0].long()
        splits, rounds, macs, all_macs, l2_bytes, memory, outputs, used = features[:, 1:].unbind(1)
        start, tile, rate, power = (
            parameter.exp()[index] for parameter in (self.start, self.tile, self.rate, self.power)
        )
        all_cycles = self.card.sms * self.card.cycles_per_us
        compute = rounds * (macs / (rate * self.card.cycles_per_us) + tile * used)
        limits = torch.stack(
            (
                compute,
                all_macs / (power * PEAK_MAC_PER_CYCLE * all_cycles),
                l2_bytes / (self.l2.exp() * all_cycles),
                self.memory.exp() * memory,
            )
        )
        split = self.split.exp() + self.split_step.exp() * (splits - 1) * outputs / (128 * 128)
        return start + limits.norm(NORM, dim=0) + torch.where(splits > 1, split, 0.0)


def fit(samples: Sequence[Sample], configs: dict[str, dict[str, Any]], card: Card) -> Model:
    """The model whose predictions are closest to the samples."""
    model = Model(configs, card)
    features = torch.tensor([model.features(sample) for sample in samples], dtype=torch.float64)
    model.double()
    times = torch.tensor([sample.us for sample in samples], dtype=torch.float64)
    shape_of, best = shapes_of(samples)
    behind = times / best
    weights = weights_of(behind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(STEPS):
        if step > 0 and step % REWEIGHED == 0:
            with torch.no_grad():
                predicted = model(features)
            believed = predicted / least(predicted, shape_of)[shape_of]
            weights = weights_of(torch.minimum(behind, believed))
        optimizer.zero_grad()
        errors = (model(features) / times).log()
        # Where nothing decides a constant, it is pulled to what the other configurations have.
        pull = sum(
            pull * parameter.var(unbiased=False)
            for pull, parameter in ((0.02, model.power), (0.001, model.start), (0.002, model.tile))
        )
        ((weights * errors**2).sum() / weights.sum() + pull).backward()
        optimizer.step()
    refine(model, samples, features, times, weights)
    return model


@torch.no_grad()
def refine(
    model: Model, samples: Sequence[Sample], features: Tensor, times: Tensor, weights: Tensor
) -> None:
    """Moves constants, one or a few at a time, wherever that makes the choices better."""
    shape_of, best = shapes_of(samples)
    losses = times / best - 1

    def cost() -> float:
        predicted = model(features)
        lost = losses[predicted == least(predicted, shape_of)[shape_of]]
        error = (weights * (predicted / times).log() ** 2).sum() / weights.sum()
        return float(lost.mean() + (lost - 0.03).relu().mean() + ERROR_COUNTS * error.sqrt())

    random = torch.Generator().manual_seed(0)
    lowest = cost()
    parameters = list(model.parameters())
    for _ in range(MOVES):
        before = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            moved = torch.rand(parameter.shape, generator=random) < 0.05
            parameter += moved * MOVE * torch.randn(parameter.shape, generator=random)
        if (now := cost()) < lowest:
            lowest = now
        else:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def weights_of(behind: Tensor) -> Tensor:
    """What samples count whose times are these multiples of the best one for their shapes."""
    return (-(behind - 1) / WEIGHT_SCALE).exp() + 0.02


def least(times: Tensor, shape_of: Tensor) -> Tensor:
    """The smallest time of each shape."""
    smallest = torch.full((int(shape_of.max()) + 1,), math.inf, dtype=torch.float64)
    return smallest.scatter_reduce_(0, shape_of, times, "amin")


def shapes_of(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Of each sample, the number of its shape and the best time that was measured for that."""
    best = fastest(samples)
    numbers = {shape: number for number, shape in enumerate(best)}
    return (
        torch.tensor([numbers[sample.shape] for sample in samples]),
        torch.tensor([best[sample.shape].us for sample in samples], dtype=torch.float64),
    )


def fastest(samples: Sequence[Sample]) -> dict[Shape, Sample]:
    """The best measurement of each shape."""
    best: dict[Shape, Sample] = {}
    for sample in samples:
        if sample.shape not in best or sample.us < best[sample.shape].us:
            best[sample.shape] = sample
    return best


@torch.no_grad()
def losses(model: Model, samples: Sequence[Sample]) -> dict[Shape, tuple[float, str]]:
    """Of each shape: time of the configuration that the model chooses over the best one's, and both names."""
    features = torch.tensor([model.features(sample) for sample in samples], dtype=torch.float64)
    predicted = dict(zip(samples, model(features).tolist(), strict=True))
    best = fastest(samples)
    found = {}
    for shape, winner in best.items():
        chosen = min((s for s in samples if s.shape == shape), key=predicted.__getitem__)
        names = f"{chosen.config} x{chosen.split}, best {winner.config} x{winner.split}"
        found[shape] = (chosen.us / winner.us, names)
    return found


def within(found: dict[Shape, tuple[float, str]], share: float) -> float:
    """The share of shapes on which no more than `share` is lost."""
    return sum(ratio <= 1 + share for ratio, _ in found.values()) / len(found)


@torch.no_grad()
def report(model: Model, samples: Sequence[Sample]) -> str:
    """Constants, errors, and what the choices cost."""
    features = torch.tensor([model.features(sample) for sample in samples], dtype=torch.float64)
    times = torch.tensor([sample.us for sample in samples], dtype=torch.float64)
    errors = (model(features) / times).log()
    lines = [f"{'configuration':<26} start us  tile us  MAC/cycle  of peak  RMS error  worst"]
    for index, name in enumerate(model.names):
        own = errors[features[:, 0] == index]
        start, tile, rate, power = (
            parameter[index].exp().item()
            for parameter in (model.start, model.tile, model.rate, model.power)
        )
        lines.append(
            f"{name:<26} {start:8.2f} {tile:8.2f} {rate:10.0f} {power:8.3f} "
            f"{own.square().mean().sqrt().item():10.1%} {own.abs().max().item():6.1%}"
        )
    l2, split, step, memory = (
        p.exp().item() for p in (model.l2, model.split, model.split_step, model.memory)
    )
    lines += [
        f"L2: {l2:.1f} bytes per SM and cycle. Split within a cluster: {split:.2f} us, "
        f"{step:.2f} us for each CTA beyond the first and 128x128 outputs.",
        f"Memory takes {memory:.3f} times as long as its rate says.",
        f"All: RMS error {errors.square().mean().sqrt().item():.1%}.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", nargs="?", type=Path, default=DEFAULT, help="default: %(default)s")
    parsed = parser.parse_args(arguments)
    try:
        result = json.loads(parsed.sweep.read_text())
        table = {entry["name"]: entry for entry in result["kernels"]}
        configs = {config["name"]: config for config in table["sm90"]["configs"]}
        device = result["stamp"]["device"]
        card = Card(device["sm_count"], device["clock_ghz"] * 1e3, device["memory_bytes_per_us"])
        samples = samples_of(result, configs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{parsed.sweep} is not a sweep of sm90: {error!r}")
    if not samples:
        parser.error(f"{parsed.sweep} has no forced configuration of sm90")

    torch.manual_seed(0)
    model = fit(samples, configs, card)
    print(report(model, samples))
    shapes = sorted(fastest(samples))
    # Two fits, each to half of the shapes, judged by the other half.
    unseen = {}
    for half in (0, 1):
        seen = set(shapes[half::2])
        part = fit([s for s in samples if s.shape in seen], configs, card)
        unseen |= losses(part, [s for s in samples if s.shape not in seen])
    chosen = losses(model, samples)
    print(
        f"Choices within 3 % of the best: {within(chosen, 0.03):.0%} of {len(shapes)} shapes; "
        f"{within(unseen, 0.03):.0%} when the fit has not seen them."
    )
    for shape, (ratio, names) in sorted(chosen.items(), key=lambda item: -item[1][0])[:5]:
        sizes = "x".join(map(str, shape)).removeprefix("1x")
        print(f"  {sizes}: {ratio - 1:.1%} lost ({names})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
