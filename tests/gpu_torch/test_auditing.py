"""audit, audit_gemm, check and bench on a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import torch_gemm
from torch_gemm import checking, measure, ops
from torch_gemm.__main__ import main
from torch_gemm.bench import cublaslt
from torch_gemm.bench.shapes import SUITES, Shape


class Block(nn.Module):
    """The MLP of Llama between two residual streams, with a projection that gelu follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(256, 512), nn.GELU())
        self.gate = nn.Linear(512, 768, bias=False)
        self.up = nn.Linear(512, 768, bias=False)
        self.down = nn.Linear(768, 257)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_layers_keep_the_contract(dtype, rows, device):
    model = Block().to(device, dtype)
    x = torch.randn(2, rows, 256, device=device, dtype=dtype)
    for fuse in (False, True):
        if fuse:
            torch_gemm.replace(model, fuse=True, verify=x)
        result = torch_gemm.audit(model, x)
        assert result.ok, result
        for layer in result.layers:
            assert layer.kernels, layer
            # What down multiplies are products, which have outliers.
            assert layer.tgemm.verdict == "kept" or layer.name == "down", result
            # torch divides K of its FP32 products, whose shorter sums are more exact.
            assert layer.rms_ratio <= (1.1 if dtype != torch.float32 else 3.0), result
    assert result.stamp["card"] == torch.cuda.get_device_name()


def test_layers_in_tf32(allow_tf32, device):
    allow_tf32(True)
    model = Block().to(device)
    x = torch.randn(200, 256, device=device)
    # Bits that TF32 has no room for, and ties among them.
    x = (x.view(torch.int32) & ~0xFFF).view(torch.float32)
    result = torch_gemm.audit(model, x)
    assert result.ok, result
    assert {layer.precision for layer in result.layers} == {"tf32"}
    assert all(layer.tgemm.relative_rms > 1e-5 for layer in result.layers)


def test_wrong_values_of_the_model_are_counted(device):
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(device).half()
    with torch.no_grad():
        model[0].weight.fill_(60.0)
    x = torch.full((8, 64), 60.0, device=device).half()  # 64 * 3600 is beyond FP16
    (layer,) = torch_gemm.audit(model, x).layers
    assert layer.tgemm.verdict == "kept"
    assert layer.tgemm.overflows == layer.torch.overflows == layer.outputs.inf == 8 * 64


def test_audit_gemm(device):
    result = torch_gemm.audit_gemm("512x768x1024")
    assert result.device == "cuda"
    assert result.ok, result
    ways = {way.name: way for way in result.ways}
    assert set(ways) == {"torch", "torch, TF32", *(f"tgemm, {name}" for name in ops.PRECISIONS)}
    for way in result.ways:
        if way.refused is None:
            assert way.us > 0
            assert way.speed_up > 0
            assert way.precision is None or way.kernel
        else:
            assert way.precision in way.refused
    errors = {name: way.errors.relative_rms for name, way in ways.items() if not way.refused}
    assert errors["tgemm, ieee"] < 1e-6 < errors["tgemm, fp16"] < errors["tgemm, bf16"]
    assert errors["tgemm, tf32"] < errors["tgemm, bf16"]


def test_check_of_one_configuration_of_each_kernel(device):
    """The whole check takes a minute or two; this is a piece of it."""
    described = json.loads(torch.ops.tgemm._device(0))
    families = [
        {**family, "configs": family["configs"][:1]}
        for family in torch_gemm.kernels()
        if family["name"] in described["kernels"]
    ]
    assert families
    with torch.inference_mode():
        checked = checking.check_kernels(families, device, lambda name: None)
    assert [kernel.name for kernel in checked if not kernel.ok] == [], [
        failure for kernel in checked for failure in kernel.failures
    ]


def test_speeds_of_the_card():
    speeds = checking.measure_speeds(json.loads(torch.ops.tgemm._device(0)))
    assert [speed.unit for speed in speeds] == ["TB/s", "TFLOP/s"]
    for speed in speeds:
        assert speed.value > 0


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measure, "TURN_MS", 0.1)
    monkeypatch.setattr(measure, "MAX_SETS", 4)


def test_bench_of_batches_offsets_and_precisions(quick, monkeypatch, tmp_path, capsys):
    suite = (
        Shape(64, 72, 80, "bf16", layout="nn", batch=5),
        Shape(64, 72, 80, "fp16", batch=5),
        Shape(33, 65, 129, "bf16"),
        Shape(64, 64, 64, "bf16", offset=1),
        Shape(64, 64, 64, "bf16", padding=1),
        Shape(128, 128, 256, "fp32"),
        Shape(128, 128, 256, "3xtf32"),
    )
    monkeypatch.setitem(SUITES, "odd", suite)
    path = tmp_path / "odd.json"
    arguments = ["bench", "--suite", "odd", "--against", "lt", "--rounds", "2", "--json", str(path)]
    assert main(arguments) == 0
    result = json.loads(path.read_text())
    assert len(result["rows"]) + len(result.get("not_offered", {})) == len(suite)
    for row in result["rows"]:
        assert row["chosen"]
        for contender in row["contenders"].values():
            assert contender["largest_relative_difference"] < 0.02
    # A batch of cuBLASLt's, at least, ran and gave what torch gives.
    assert "cublasLt, best of 8" in result["rows"][0]["contenders"]
    assert "Speed-up over torch" in capsys.readouterr().out


def test_alignment_of_cublaslt():
    matrix = torch.empty(1000, device="cuda", dtype=torch.bfloat16)
    assert cublaslt.alignment_of(matrix) == 256
    assert cublaslt.alignment_of(matrix[1:]) == 2
    assert cublaslt.alignment_of(matrix[8:]) == 16
