"""audit and audit_gemm on the CPU: errors, censuses, verdicts, pages, and how they fail."""

from __future__ import annotations

import json
import math
import re
import sys
import types
import warnings

import pytest
import torch
from torch import Tensor, nn

import torch_gemm
from torch_gemm import auditing, numerics, ops
from torch_gemm.__main__ import main
from torch_gemm.auditing import AuditError, layers
from torch_gemm.auditing.measures import TILE, Census, Errors, Product, compare, tiles


class Gated(nn.Module):
    """The MLP of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(24, 40, bias=False)
        self.act = nn.SiLU()
        self.up = nn.Linear(24, 40, bias=False)
        self.down = nn.Linear(40, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Sublayer(nn.Module):
    """The end of a sublayer of BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.dense(x) + residual)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 24), nn.GELU())
        self.mlp = Gated()
        self.end = Sublayer()
        self.unused = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.end(self.mlp(hidden), hidden)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.fixture
def model() -> Model:
    return Model().train()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_of_a_model(model, x, dtype):
    model, x = model.to(dtype), x.to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = torch_gemm.audit(model, x)
    assert [layer.name for layer in result.layers] == [
        "first.0",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
        "end.dense",
    ]
    assert [tuple(skipped) for skipped in result.skipped] == [
        ("unused", "the model did not call it as a module on these inputs")
    ]
    assert result.ok
    for layer in result.layers:
        assert layer.calls == 1
        assert layer.shapes[0][0] == 10
        assert layer.dtype == dtype
        assert layer.kernels == []
        assert layer.c == numerics.accuracy_constant(None, layer.shapes[0][2])
        assert layer.tgemm.verdict == "kept"
        assert 0 < layer.tgemm.share <= 1
        assert 0 < layer.tgemm.rms <= layer.tgemm.largest
        assert layer.tgemm.elements == 10 * layer.shapes[0][1]
        worst = layer.tgemm.worst
        assert len(worst.index) == 3
        assert worst.ulp == layer.tgemm.largest_ulp
    # Nothing has changed.
    assert hooks_of(model) == 0
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_worst_element_is_where_it_is_said_to_be(x):
    layer = nn.Linear(16, 24).bfloat16()
    x = x.bfloat16()
    (audited,) = torch_gemm.audit(layer, x).layers
    out = torch.nn.functional.linear(x, layer.weight, layer.bias)
    truth = x.double() @ layer.weight.double().t() + layer.bias.double()
    worst = audited.torch.worst
    assert worst.actual == out[worst.index].item()
    assert worst.reference == pytest.approx(truth[worst.index].item(), rel=1e-12)
    error = (out.double() - truth).abs()
    in_ulp = error / numerics.ulp(truth, torch.bfloat16)
    assert audited.torch.largest == pytest.approx(error.max().item(), rel=1e-9)
    assert audited.torch.largest_ulp == pytest.approx(in_ulp.max().item(), rel=1e-9)
    assert in_ulp[worst.index].item() == pytest.approx(in_ulp.max().item(), rel=1e-9)
    assert audited.torch.rms == pytest.approx(error.square().mean().sqrt().item(), rel=1e-9)
    assert audited.torch.rms_ulp == pytest.approx(in_ulp.square().mean().sqrt().item(), rel=1e-9)


def test_fused_layers(model, x):
    report = torch_gemm.replace(model, fuse=True, verify=x)
    assert len(report.fused) == 3, report
    result = torch_gemm.audit(model, x)
    assert {layer.name: layer.what for layer in result.layers} == {
        "first.0": "gelu(linear)",
        "mlp.gate": "silu(gate) * up",
        "mlp.down": "linear",
        "end.dense": "linear + residual",
    }
    assert [skipped.name for skipped in result.skipped] == ["unused"]
    assert result.ok
    # Rounded once, where torch rounds after each op.
    half = torch_gemm.audit(model.bfloat16(), x.bfloat16())
    assert half.ok
    gated = next(layer for layer in half.layers if layer.name == "mlp.gate")
    assert gated.rms_ratio < 0.9


def test_calls_add_up_and_rows_are_chosen():
    layer = nn.Linear(8, 6)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x).sum() + self.layer(input=y).sum()

    x, y = torch.randn(50, 8), torch.randn(7, 3, 8)
    (audited,) = torch_gemm.audit(Twice(), (x, y)).layers
    assert audited.calls == 2
    assert audited.shapes == [(50, 6, 8), (21, 6, 8)]
    assert audited.tgemm.elements == 71 * 6
    assert audited.inputs.elements == 71 * 8
    assert audited.weights.elements == 54
    (fewer,) = torch_gemm.audit(Twice(), {"x": x, "y": y}, rows=10).layers
    assert fewer.tgemm.elements == 20 * 6
    assert fewer.outputs.elements == 71 * 6
    # Evenly spaced, with both ends: an element that is wrong in the last row is seen.
    recorder = layers.Recorder([], 10)
    assert recorder._rows_of(50, torch.device("cpu")).tolist()[::9] == [0, 49]
    assert recorder._rows_of(10, torch.device("cpu")) is None


def wrong_linear(monkeypatch, change):
    """Lets the op return something else."""
    honest = ops.linear

    def linear(*args, **kwargs):
        return change(honest(*args, **kwargs))

    monkeypatch.setattr(layers.ops, "linear", linear)


def test_a_wrong_element_breaks_the_contract(monkeypatch, model, x):
    def change(out):
        out[1, 4, 7] += 1e-3 * out.abs().max()
        return out

    wrong_linear(monkeypatch, change)
    result = torch_gemm.audit(model, x)
    assert not result.ok
    for layer in result.layers:
        assert layer.tgemm.verdict == "broken"
        assert layer.tgemm.violations == 1
        assert layer.torch.verdict == "kept"
    assert "BROKEN in 5 of 5 layers: first.0, mlp.gate, mlp.up, ..." in str(result)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_should_be_finite(monkeypatch, x, value):
    def change(out):
        out[0, 0, 0] = value
        return out

    wrong_linear(monkeypatch, change)
    (layer,) = torch_gemm.audit(nn.Sequential(nn.Linear(16, 8)), x).layers
    assert layer.tgemm.violations == 1
    assert math.isinf(layer.tgemm.share)
    assert layer.to_dict()["tgemm"]["share_of_contract"] is None
    assert layer.tgemm.overflows == int(not math.isnan(value))


def test_census_and_overflow():
    layer = nn.Linear(4, 3, bias=False).half()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [300.0, 300, 0, 0], [2.0**-20, 0, 0, 0]]))
    x = torch.tensor([[300.0, 1, math.nan, math.inf], [1.0, 0, 0, 0], [300.0, 0, 0, 0]]).half()
    (audited,) = torch_gemm.audit(nn.Sequential(layer), x).layers
    inputs, weights, outputs = audited.inputs, audited.weights, audited.outputs
    assert (inputs.nan, inputs.inf, inputs.zero, inputs.elements) == (1, 1, 6, 12)
    assert (inputs.largest, inputs.smallest) == (300.0, 1.0)
    assert (weights.subnormal, weights.zero, weights.largest) == (1, 8, 300.0)
    # 300 * 300 is an infinity in FP16, as it has to be; NaN comes from NaN.
    assert outputs.inf == 1
    assert outputs.nan == 3
    assert audited.tgemm.overflows == 1
    assert audited.tgemm.verdict == "kept"
    assert "input: 1 NaN, 1 inf" in auditing.tables.notes_of(audited)
    assert "overflows: 1, torch 1" in auditing.tables.notes_of(audited)


def test_what_may_be_an_infinity():
    """FP16 rounds to infinity from 65520 on; the contract allows 16.32 before."""
    truth = torch.tensor(
        [65500.0, 65503.0, 65504.0, 65520.0, 1e9, math.inf, -1e9, math.nan]
    ).double()
    infinite = torch.full((8,), math.inf).half()
    share = numerics.share_of_contract(infinite, truth, torch.zeros(8), 8.0)
    assert share.tolist() == [math.inf, math.inf, 0, 0, 0, 0, math.inf, math.inf]
    largest = torch.full((8,), 65504.0).half()
    share = numerics.share_of_contract(largest, truth, torch.zeros(8), 8.0)
    assert share[:4].tolist() == pytest.approx([4 / 16.32, 1 / 16.32, 0, 16 / 16.32])
    assert share[4] > 1
    assert share[5:].tolist()[::2] == [math.inf, math.inf]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        largest = torch.tensor(torch.finfo(dtype).max).double()
        step, nothing = numerics.ulp(largest, dtype), torch.zeros(()).double()
        result = torch.tensor(math.inf).to(dtype)
        assert numerics.share_of_contract(result, largest + step / 2, nothing, 0.0) == 0
        assert numerics.share_of_contract(result, largest - step, nothing, 0.0) == math.inf


def test_outliers_are_told_from_broken():
    """One product dominates, and every addition after it rounds at its size."""
    x = torch.rand(256, 512) + 0.5
    layer = nn.Linear(512, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(64, 512))
    x[:, 0] = 2.0**22
    (audited,) = torch_gemm.audit(nn.Sequential(layer), x).layers
    # Whatever order the CPU adds in, this is no more than FP32 does to such numbers.
    assert audited.ok
    truth = x.double() @ layer.weight.double().t()
    magnitude = x.double().abs() @ layer.weight.double().abs().t()
    errors = Errors()
    off = (truth + 100 * 2.0**-24 * magnitude).float()
    compare(Product(x, layer.weight.t(), c=8.0), [(errors, off)])
    assert (errors.verdict, errors.violations) == ("outliers", 0)
    assert errors.beyond == 256 * 64
    errors = Errors()
    off = (truth + 1100 * 2.0**-24 * magnitude).float()
    compare(Product(x, layer.weight.t(), c=8.0), [(errors, off)])
    assert errors.verdict == "broken"


def test_accumulation_in_less_than_fp32_is_broken(monkeypatch):
    x, layer = torch.randn(64, 256).half(), nn.Linear(256, 32).half()

    def in_fp16(x, weight, bias, *_, **__):
        out = torch.zeros(64, 32).half()
        for k in range(256):
            out += x[:, k, None] * weight[:, k]
        return out + bias

    monkeypatch.setattr(layers.ops, "linear", in_fp16)
    assert not torch_gemm.audit(nn.Sequential(layer), x).ok


def test_tiles_cover_the_result_and_fit():
    for m, n, k in ((3, 5, 7), (3000, 70000, 300), (1, 1, 10**8), (10**6, 3, 4)):
        product = Product(torch.empty(m, k, device="meta"), torch.empty(k, n, device="meta"))
        parts = list(tiles(product))
        area = 0
        for rows, columns in parts:
            height, width = (
                len(range(*part.indices(size))) for part, size in ((rows, m), (columns, n))
            )
            area += height * width
            assert height * width <= TILE
        assert area == m * n
    # Errors do not depend on where tiles end.
    a, b = torch.randn(70, 9), torch.randn(9, 130)
    whole, parts = Errors(), Errors()
    compare(Product(a, b, c=8.0), [(whole, a @ b)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_gemm.auditing.measures.TILE", 600)
        assert len(list(tiles(Product(a, b)))) == 4
        compare(Product(a, b, c=8.0), [(parts, a @ b)])
    assert parts.worst == whole.worst
    assert parts.beyond == whole.beyond == 0
    for name in ("elements", "largest", "largest_ulp", "share", "rms", "rms_ulp", "relative_rms"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-9), name


def test_ties_of_tf32_may_go_either_way():
    a = torch.tensor([[1 + 2.0**-11, 1.0]])  # half-way between two TF32 numbers
    b = torch.tensor([[1.0], [0.25]])
    for rounded in (1.0, 1 + 2.0**-10):
        errors = Errors()
        compare(
            Product(a, b, precision="tf32", c=6.0), [(errors, torch.tensor([[rounded + 0.25]]))]
        )
        assert errors.verdict == "kept"
    assert numerics.tie_slack(torch.ones(2, 3), torch.ones(3, 4)).count_nonzero() == 0


def test_autocast_casts_as_the_model_does(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = torch_gemm.audit(model, x)
    assert {layer.dtype for layer in result.layers} == {torch.bfloat16}
    assert result.ok


def test_within_override_torch_is_still_torch(monkeypatch, x):
    modes = []
    honest = layers.Call.stock

    def stock(call):
        modes.extend(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
        return honest(call)

    monkeypatch.setattr(layers.Call, "stock", stock)
    torch_gemm.reset_stats()
    with torch_gemm.override():
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        (layer,) = torch_gemm.audit(nn.Sequential(nn.Linear(16, 8)), x).layers
    assert (layer.calls, modes) == (1, [])
    assert torch_gemm.stats()["fallbacks"] == {}  # of the FP64 products


def test_layers_that_are_left_out(x):
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.odd = nn.Linear(16, 16), Odd(16, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.odd(self.first(x))
            return self.attention(x, x, x)[0]

    result = torch_gemm.audit(Attending(), x)
    assert [layer.name for layer in result.layers] == ["first"]
    reasons = dict(result.skipped)
    assert reasons["odd"].startswith("subclass of nn.Linear")
    assert "reads its weights directly" in reasons["attention.out_proj"]
    with pytest.raises(AuditError, match=r"no linear layer to audit: model: its weight is float64"):
        torch_gemm.audit(nn.Linear(16, 4).double(), x.double())


@pytest.mark.parametrize("rows", [None, 2])
def test_sums_of_nothing(rows):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on initialising nothing
        layer = nn.Linear(0, 4)
    (audited,) = torch_gemm.audit(layer, torch.empty(3, 0), rows=rows).layers
    assert audited.shapes == [(3, 4, 0)]
    assert audited.tgemm.verdict == "kept"


def test_conv1d_of_transformers():
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(pytorch_utils.Conv1D(24, 16))
    x = torch.randn(3, 16)
    (stock,) = torch_gemm.audit(model, x).layers
    torch_gemm.replace(model)
    (ours,) = torch_gemm.audit(model, x).layers
    assert stock.shapes == ours.shapes == [(3, 24, 16)]
    assert stock.ok
    assert stock.tgemm.to_dict() == ours.tgemm.to_dict()


# --- How it fails


def test_a_model_that_raises_is_left_as_it_was(model, x):
    def fail(*_):
        raise ValueError("no\nthanks")

    model.end.register_forward_hook(fail)
    with pytest.raises(AuditError, match=r"^the model raised ValueError: no$"):
        torch_gemm.audit(model, x)
    assert hooks_of(model) == 0
    assert all(module.training for module in model.modules())


def test_misuse(model, x):
    with pytest.raises(AuditError, match=r"^ReLU has no linear layer to audit$"):
        torch_gemm.audit(nn.ReLU(), x)
    with pytest.raises(TypeError, match=r"audit expects a torch.nn.Module, and got a int"):
        torch_gemm.audit(3, x)
    for rows in (0, 1.5, "3", True):
        with pytest.raises(
            ValueError, match=r"rows is .*, and must be a whole number of at least 1"
        ):
            torch_gemm.audit(model, x, rows=rows)

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return x

    with pytest.raises(AuditError, match=r"Idle called none of its linear layers"):
        torch_gemm.audit(Idle(), x)


def test_out_of_memory_is_a_sentence(monkeypatch, model, x):
    def explode(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nmore")

    monkeypatch.setattr(layers, "compare", explode)
    with pytest.raises(AuditError, match=r"layer first.0 ran out of memory: CUDA .* rows=256"):
        torch_gemm.audit(model, x)
    assert hooks_of(model) == 0


def test_an_op_that_fails_is_a_sentence(monkeypatch, model, x):
    def refuse(*_, **__):
        raise RuntimeError("tgemm.linear: no kernel\nmore")

    monkeypatch.setattr(layers.ops, "linear", refuse)
    with pytest.raises(AuditError, match=r"^the audit of layer first.0 failed: tgemm.linear: no k"):
        torch_gemm.audit(model, x)
    assert hooks_of(model) == 0


def test_a_compiled_model_is_what_was_compiled(model, x):
    compiled = torch.compile(model, backend="eager")
    assert len(torch_gemm.audit(compiled, x).layers) == 5


# --- One product


def test_audit_gemm():
    a, b = torch.randn(33, 200), torch.randn(200, 20)
    result = torch_gemm.audit_gemm(a, b)
    ways = {way.name: way for way in result.ways}
    assert list(ways) == ["torch", *(f"tgemm, {precision}" for precision in ops.PRECISIONS)]
    assert result.ok
    truth = a.double() @ b.double()
    assert ways["tgemm, ieee"].errors.relative_rms < 1e-6
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        errors = ways[f"tgemm, {precision}"].errors
        rounded = a.to(dtype).double() @ b.to(dtype).double()
        expected = ((rounded - truth).square().mean() / truth.square().mean()).sqrt().item()
        assert errors.relative_rms == pytest.approx(expected, rel=1e-3)
        assert errors.verdict == "kept"  # of the rounded operands
    assert ways["tgemm, bf16"].errors.relative_rms > 4 * ways["tgemm, fp16"].errors.relative_rms
    assert all(way.us is None for way in result.ways)
    json.dumps(result.to_dict(), allow_nan=False)
    assert "tgemm, 3xtf32" in str(result)


def test_audit_gemm_of_sizes_and_halves():
    result = torch_gemm.audit_gemm((5, 6, 7), device="cpu")
    assert (result.shape, result.dtype) == ((5, 6, 7), torch.float32)
    assert torch_gemm.audit_gemm("5x6x7", device="cpu").shape == (5, 6, 7)
    half = torch_gemm.audit_gemm(torch.randn(5, 7).half(), torch.randn(7, 6).half())
    assert [way.name for way in half.ways] == ["torch", "tgemm"]
    assert half.ok


def test_audit_gemm_lists_what_is_refused(monkeypatch):
    honest = ops.matmul

    def matmul(a, b, precision=None):
        if precision == "3xtf32":
            raise RuntimeError("tgemm.matmul: no kernel takes precision 3xtf32\nmore")
        return honest(a, b, precision=precision)

    monkeypatch.setattr("torch_gemm.auditing.gemm.ops.matmul", matmul)
    result = torch_gemm.audit_gemm("8x8x8", device="cpu")
    refused = {way.name: way.refused for way in result.ways if way.refused}
    assert refused == {"tgemm, 3xtf32": "tgemm.matmul: no kernel takes precision 3xtf32"}
    assert result.ok
    assert "no kernel takes precision 3xtf32" in str(result)


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (torch.ones(2, 3), torch.ones(4, 5), "the inner sizes"),
        (torch.ones(2, 3), torch.ones(3, 5).half(), "they must agree"),
        (torch.ones(3), torch.ones(3, 5), "a has 1 dimensions, and must have 2"),
        (torch.ones(2, 3).double(), torch.ones(3, 5).double(), "a is torch.float64"),
        (torch.ones(0, 3), torch.ones(3, 5), "an empty size"),
        (torch.ones(2, 3), 3, "b must be a Tensor"),
        (torch.ones(2, 3), None, "audit_gemm expects two matrices, or sizes"),
        ("2x3", None, "is no shape"),
        ("2x0x3", None, "has a size below 1"),
        ("2x(3x4x5)", None, "is a batch, and audit_gemm audits one product"),
        ((0, 3, 4), None, "has a size below 1"),
        ((-2, 3, 4), None, "is no shape"),
        ((2.5, 3, 4), None, "is no shape"),
        ("1x4294967296x4294967296", None, "more bytes than torch can count"),
        (torch.eye(3).to_sparse(), torch.eye(3), "a is sparse_coo, and must be a strided tensor"),
        (torch.eye(3), torch.eye(3, device="meta"), "b is on meta, and must be a strided tensor"),
        (
            torch.nested.nested_tensor([torch.eye(3)]),
            torch.eye(3),
            "a is nested, and must be a strided tensor",
        ),
        ((10**30, 3, 4), None, r"has a size above 2\^40"),
    ],
)
def test_audit_gemm_misuse(a, b, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        torch_gemm.audit_gemm(a, b, device="cpu")


@pytest.mark.parametrize("device", ["tpu", "meta", (1, 2)])
def test_audit_gemm_draws_on_a_device_that_multiplies(device):
    with pytest.raises(ValueError, match="and must be cpu or cuda"):
        torch_gemm.audit_gemm("3x4x5", device=device)


def test_without_numbers():
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(AuditError, match="the input of layer model is on the meta device"):
        torch_gemm.audit(layer, torch.ones(2, 4, device="meta"))
    with pytest.raises(AuditError, match="the weight of layer model is on the meta device"):
        torch_gemm.audit(layer.to("meta"), torch.ones(2, 4))


def test_an_input_that_is_no_tensor_is_the_models_to_refuse():
    with pytest.raises(AuditError, match="the model raised TypeError: linear"):
        torch_gemm.audit(torch.nn.Linear(4, 4), 3)


# --- The command


@pytest.fixture
def module(monkeypatch, model, x):
    made = types.ModuleType("models_of_mine")
    made.build = lambda: (model, x)
    made.nothing = lambda: model
    made.fails = lambda: 1 / 0
    made.ends = lambda: sys.exit(3)
    made.number = 3
    made.no_linear = lambda: (nn.ReLU(), x)
    monkeypatch.setitem(sys.modules, "models_of_mine", made)
    monkeypatch.setenv("COLUMNS", "200")


def test_command(module, tmp_path, capsys):
    page, file = tmp_path / "audit.html", tmp_path / "audit.json"
    arguments = ["audit", "models_of_mine:build", "--html", str(page), "--json", str(file)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "mlp.gate" in shown
    assert "All 5 layers keep the numerics contract" in shown
    assert "not audited: unused" in shown
    stored = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert stored["ok"] is True
    assert stored["layers"][0]["name"] == "first.0"
    text = page.read_text()
    assert text.count("<svg") == 2
    assert not re.search(r'(src|href)="http', text)
    assert "end.dense" in text


def test_command_with_a_broken_contract(module, monkeypatch, capsys):
    wrong_linear(monkeypatch, lambda out: out + 1)
    assert main(["audit", "models_of_mine:build"]) == 1
    assert "BROKEN in 5 of 5 layers" in capsys.readouterr().out


def test_command_with_sizes(tmp_path, capsys):
    page = tmp_path / "gemm.html"
    arguments = ["audit", "16x8x32", "--device", "cpu", "--html", str(page)]
    assert main(arguments) == 0
    assert "tgemm, bf16" in capsys.readouterr().out
    assert page.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["models_of_mine:nothing"], "must return a tuple of a model and its inputs"),
        (
            ["models_of_mine:fails"],
            "models_of_mine:fails raised ZeroDivisionError: division by zero",
        ),
        (["models_of_mine:ends"], "models_of_mine:ends raised SystemExit: 3"),
        (["models_of_mine:number"], "models_of_mine:number is a int, and must be a function"),
        (["models_of_mine:"], "is not of the form package.module:function"),
        (["models_of_mine:absent"], "cannot be imported: AttributeError"),
        (["no.such.module:f"], "cannot be imported: ModuleNotFoundError"),
        (["models_of_mine:no_linear"], "ReLU has no linear layer to audit"),
        (
            ["models_of_mine:build", "--rows", "0"],
            "rows is 0, and must be a whole number of at least 1",
        ),
        (["models_of_mine:build", "--dtype", "fp16"], "--dtype is for the function"),
        (["12x13"], "'12x13' is neither MODULE:FUNCTION nor sizes"),
        (["12x13x14", "--rows", "3"], "--rows is for models"),
        (["9999999999x9999999999x2", "--device", "cpu"], "more bytes than torch can count"),
        (
            ["9999999999x1x200", "--device", "cpu"],
            "ran out of memory: it needs a matrix of 7450.6 GiB",
        ),
        (["999999999999999999999999x2x2", "--device", "cpu"], "has a size above 2^40"),
        (["12x13x14", "--json", "/no/such/folder/a.json"], "cannot be written"),
        (["12x13x14", "--json", "a.x", "--html", "./a.x"], "--json and --html are the same file"),
    ],
)
def test_command_misuse(module, capsys, arguments, sentence):
    assert main(["audit", *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_command_without_packages(module, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = tmp_path / "audit.html"
    assert main(["audit", "models_of_mine:build", "--html", str(page)]) == 2
    assert "pip install 'torch_gemm[plots]'" in capsys.readouterr().err
    assert not page.exists()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["audit", "models_of_mine:build"]) == 2
    assert "pip install 'torch_gemm[cli]'" in capsys.readouterr().err


def test_command_of_a_benchmark_model(monkeypatch, capsys):
    pytest.importorskip("transformers")
    from torch_gemm.bench import models

    honest = models.build
    monkeypatch.setattr(models, "build", lambda *args: honest(*args, tiny=True))
    assert main(["audit", "bert", "--device", "cpu", "--dtype", "bf16", "--rows", "20"]) == 0
    assert "encoder.layer.1.output.dense" in capsys.readouterr().out


def test_census_of_nothing():
    census = Census()
    census.add(torch.empty(0, 3))
    assert census == Census()
