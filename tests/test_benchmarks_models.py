"""The benchmarks of host cost and of whole models run, on the CPU here, where their times mean nothing."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import host_cost
from benchmarks import models as command
from torch_gemm.bench import models
from torch_gemm.measure import CpuRunner


def test_host_cost(tmp_path, capsys):
    path = tmp_path / "host_cost.json"
    assert host_cost.main(["--device", "cpu", "--calls", "20", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["stamp"]["torch"] == torch.__version__
    cells = {(row["op"], row["mode"]): row["calls"] for row in result["rows"]}
    assert set(cells) == {
        *((op, mode) for op in ("linear", "matmul") for mode in host_cost.MODES),
        ("parts of a call", "no_grad"),
    }
    for (op, _), calls in cells.items():
        assert all(len(call["turns_us"]) == host_cost.TURNS for call in calls.values())
        if op != "parts of a call":
            assert calls["torch"]["of_torch"] == 1.0
            assert f"torch_gemm.{op}" in calls
    assert "host time of a call" in capsys.readouterr().out


def test_every_way_of_calling_computes_the_same():
    for mode in host_cost.MODES:
        for op in ("linear", "matmul"):
            with host_cost.MODES[mode]():
                calls = host_cost.calls_of(op, mode, "cpu")
                expected = calls["torch"]().clone()
                for name, call in calls.items():
                    if not name.endswith(("gelu", "nn.Linear")):
                        result = call()
                        # The .out ops return nothing; the tensor they wrote is torch's result too.
                        result = calls["torch"]() if result is None else result
                        # A bias may be added before or after the product is rounded to BF16.
                        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        host_cost.main([])
    assert "torch finds no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        host_cost.main(["--calls", "0", "--device", "cpu"])
    assert "--calls is 0, and must be at least 1" in capsys.readouterr().err


EAGER = ("stock eager", "stock CUDA graph", "tgemm replace", "tgemm replace+fuse")


def test_models(monkeypatch, tmp_path, capsys):
    """One way fails, because there is no GPU; the others are measured and compared all the same."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(models, "WAYS", {way: models.WAYS[way] for way in EAGER})
    row = models.measure_model("bert", "bf16", CpuRunner(), 2, tiny=True, cell_seconds=60)
    assert row["cells"]["stock CUDA graph"] == {"error": "RuntimeError: a CUDA graph needs a GPU"}
    assert row["best_stock"] == "stock eager"
    for way in ("stock eager", "tgemm replace", "tgemm replace+fuse", models.CONTROL):
        cell = row["cells"][way]
        assert len(cell["rounds_ms"]) == 2
        assert 0 < cell["difference"] < 0.05
    assert row["cells"]["stock eager"]["over_best_stock"] == 1.0

    monkeypatch.setattr(models, "in_own_process", lambda name, how: {**row, "model": name})
    path = tmp_path / "models.json"
    arguments = ["--models", "bert,gpt2", "--device", "cpu", "--output", str(path)]
    assert command.main(arguments) == 0
    result = json.loads(path.read_text())
    assert [row["model"] for row in result["rows"]] == ["bert", "gpt2"]
    assert result["stamp"]["torch"] == torch.__version__
    shown = capsys.readouterr().out
    assert "a CUDA graph needs a GPU" in shown
    assert "(best stock)" in shown


def test_a_way_that_takes_too_long_or_differs(monkeypatch):
    def slow(model, inputs, runner):
        while True:
            pass

    def wrong(model, inputs, runner):
        return lambda: model(**inputs)[0]

    def build(device, tiny):
        class Model(torch.nn.Module):
            def forward(self, x):
                return x, x + 1

        return Model(), {"x": torch.ones(3)}

    monkeypatch.setattr(models, "CASES", {"own": models.Case("own", build)})
    ways = {"stock eager": models._eager, "slow": slow, "wrong": wrong}
    monkeypatch.setattr(models, "WAYS", ways)
    row = models.measure_model("own", "bf16", CpuRunner(), 1, tiny=True, cell_seconds=0.2)
    assert row["cells"]["slow"]["error"] == "TimeoutError: slow took more than 0.2 s"
    assert row["cells"]["wrong"]["error"] == "RuntimeError: 1 outputs where FP32 has 2"
    assert "ms" in row["cells"]["stock eager"]


def test_a_model_that_fails_is_a_line(tmp_path, capsys):
    path = tmp_path / "models.json"
    arguments = ["--models", "bert", "--device", "cpu", "--tiny", "--output", str(path)]
    assert command.main([*arguments, "--model-seconds", "0.1"]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["error"] == "it took more than 0.1 s"
    assert "bert: failed: it took more than 0.1 s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--models", "bert,bart"])
    assert "there is no model 'bart'; the models are minilm, bert" in capsys.readouterr().err
