"""The benchmarks of host cost and of whole models run, on the CPU here, where their times mean nothing."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import host_cost


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
                        torch.testing.assert_close(result, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    with pytest.raises(SystemExit):
        host_cost.main([])
    assert "torch finds no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        host_cost.main(["--calls", "0", "--device", "cpu"])
    assert "--calls is 0, and must be at least 1" in capsys.readouterr().err
