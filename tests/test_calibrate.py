"""The fit of sm90's cost model finds constants that are known, and says how good it is."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch

from benchmarks import calibrate

CONFIGS: list[dict[str, Any]] = [
    {
        "name": name,
        "block_m": block_m,
        "block_n": block_n,
        "block_k": 64,
        "threads": 384,
        "stages": 3,
        "max_cluster_split": max_cluster_split,
    }
    for name, block_m, block_n, max_cluster_split in (
        ("128x256", 128, 256, 2),
        ("128x128_cluster", 128, 128, 1),
        ("64x128", 64, 128, 2),
        ("128x128_pingpong", 128, 128, 1),
    )
]
STAMP = {"device": {"sm_count": 132, "clock_ghz": 1.98, "memory_bytes_per_us": 4.4e6}}
RATES = (1400.0, 1100.0, 800.0, 1000.0)


@pytest.fixture
def sweep():
    """Times of a card that behaves exactly as the model says, with these constants."""
    card = calibrate.Card(132, 1980.0, 4.4e6)
    model = calibrate.Model({config["name"]: config for config in CONFIGS}, card)
    with torch.no_grad():
        model.rate.copy_(torch.tensor(RATES).log())
        model.tile.fill_(math.log(0.8))
    rows = []
    for m, n, k in itertools.product((128, 1000, 4096), (768, 4096), (768, 3072, 8192)):
        contenders = {"torch": {"us": 1.0}}
        for config, split in itertools.product(CONFIGS, (1, 2)):
            sample = calibrate.Sample((1, m, n, k), config["name"], split, 0.0)
            us = model(torch.tensor([model.features(sample)])).item()
            contenders[f"tgemm sm90:{config['name']},split_k={split}"] = {"us": us}
        # Through the workspace and a second kernel, of which the model knows nothing.
        contenders |= {
            f"tgemm sm90:{config['name']},split_k=9": {"us": 0.001} for config in CONFIGS
        }
        rows.append({"m": m, "n": n, "k": k, "contenders": contenders})
    kernels = [{"name": "sm90", "configs": CONFIGS}]
    return {"stamp": STAMP, "kernels": kernels, "rows": rows}


def test_known_constants_are_found(sweep, tmp_path, capsys):
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(sweep))
    assert calibrate.main([str(path)]) == 0
    text = capsys.readouterr().out
    for config, rate in zip(CONFIGS, RATES, strict=True):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{config['name']} ")]
        assert float(line.split()[3]) == pytest.approx(rate, rel=0.05)
    assert "Choices within 3 % of the best: 100% of 18 shapes; 100%" in text


def test_the_clusters_that_run_at_once():
    card = calibrate.Card(132, 1980.0, 4.4e6)
    assert [card.clusters(size) for size in (1, 2, 4, 8)] == [132, 66, 30, 15]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"kernels": [], "rows": [], "stamp": {}}'])
def test_what_is_no_sweep_is_one_sentence(content, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        calibrate.main([str(path)])
    assert ended.value.code == 2
    assert "is not a sweep of sm90" in capsys.readouterr().err


def test_a_sweep_of_another_kernel_is_refused(sweep, tmp_path, capsys):
    for row in sweep["rows"]:
        row["contenders"] = {"torch": {"us": 1.0}}
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(sweep))
    with pytest.raises(SystemExit):
        calibrate.main([str(path)])
    assert "has no forced configuration of sm90" in capsys.readouterr().err
