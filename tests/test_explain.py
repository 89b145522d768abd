"""explain: the structure, against the card's description and by hand; every way to ask; how it fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_gemm
from torch_gemm import cards, measure
from torch_gemm.__main__ import main
from torch_gemm._calls import Call, Operand
from torch_gemm.cards import DESCRIBED
from torch_gemm.explaining import page, text

pytestmark = pytest.mark.skipif(
    torch_gemm._library.cuda_missing is not None, reason="the kernel table is in the CUDA library"
)

BF16 = torch.bfloat16
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def explain(*operands, gpu="h200", **options):
    return torch_gemm.explain(*operands, gpu=gpu, **options)


def meta(*sizes, dtype=BF16):
    return torch.empty(*sizes, dtype=dtype, device="meta")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["explain", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# --- What is in it


def test_a_linear_layer_of_llama():
    found = explain("2048x4096x14336", dtype="bf16", layout="nt")
    assert found.card.name == "NVIDIA H200"
    (step,) = found.steps
    assert (step.role, step.m, step.n, step.k, step.batch) == ("gemm", 2048, 4096, 14336, 1)
    assert step.problem == "2048x4096x14336 nt bfloat16 -> bfloat16"
    chosen = found.chosen
    assert chosen is step.chosen is found.candidates[0]
    assert chosen.plan.startswith("sm90:")
    assert chosen.tiles == -(-2048 // chosen.tile["block_m"]) * -(-4096 // chosen.tile["block_n"])
    assert chosen.ctas == chosen.tiles * chosen.split_k
    assert chosen.slots == 132
    assert chosen.waves == chosen.ctas / 132
    assert 0.5 < chosen.sm_fill <= 1.0
    times = [candidate.predicted_us for candidate in step.scored]
    assert times == sorted(times)
    assert found.runner_up is step.scored[1]
    # Each row of the table is either scored or rejected with a reason, or runs only when forced.
    rows = {candidate.plan.partition(",")[0] for candidate in found.candidates}
    table = torch_gemm.kernels()
    expected = {
        f"{kernel['name']}:{config['name']}"
        for kernel in table
        if kernel["automatic"]
        for config in kernel["configs"]
    }
    assert rows == expected
    assert set(found.only_forced) == {row["name"] for row in table if not row["automatic"]}
    assert all(candidate.reason for candidate in step.rejected)
    # The roofline, by hand.
    roofline = found.roofline
    assert roofline.flops == 2 * 2048 * 4096 * 14336
    assert roofline.bytes == 2 * (2048 * 14336 + 4096 * 14336 + 2048 * 4096)
    assert roofline.unit == "tensor"
    assert roofline.bound == "compute"
    assert roofline.compute_us == pytest.approx(roofline.flops / 1070.5e6, rel=1e-3)
    assert roofline.memory_us == pytest.approx(roofline.bytes / 4429156, rel=1e-3)
    assert found.share_of_peak == pytest.approx(found.tflops / roofline.peak_tflops)
    assert found.predicted_us > roofline.bound_us
    assert not found.copies
    assert step.can_use_aten


def test_a_decoding_step_is_bound_by_memory():
    found = explain("1x4096x4096", dtype="bf16", layout="nt", static_weight=True)
    assert found.chosen.plan.startswith("skinny:")
    assert found.roofline.bound == "memory"
    assert found.steps[0].problem.endswith("static weight")


def test_odd_sizes_are_packed_in_a_workspace():
    found = explain(meta(1024, 4095), meta(4096, 4095), op="linear")
    chosen = found.chosen
    assert chosen.plan.startswith("sm90_packed:")
    assert chosen.packing == ("a", "b")
    assert chosen.packing_us > 0.0
    assert chosen.workspace_bytes >= 2 * (1024 + 4096) * 4095
    assert "a and b packed" in str(found)
    assert re.search(r"= .* us \+ .* us of packing", str(found))


def test_split_k_counts_its_ctas():
    found = explain(
        "64x64x65536", dtype="fp16", layout="nt", force_kernel="mma_sync:64x64,split_k=16"
    )
    assert (found.chosen.tiles, found.chosen.split_k, found.chosen.ctas) == (1, 16, 16)
    chosen = found.chosen
    assert chosen.workspace_bytes == 4 * 16 * 64 * 64
    # Written and read at one and a half times the memory's rate, in L2.
    traffic_us = 2 * chosen.workspace_bytes / (1.5 * found.card.memory_bytes_per_us)
    assert chosen.partial_sums_us == pytest.approx(traffic_us)
    assert chosen.kernel_us + chosen.partial_sums_us == pytest.approx(chosen.predicted_us)
    assert "of partial sums" in str(found)


@pytest.mark.parametrize(("tile", "per_cta"), [("8x8", 16), ("16x16", 4), ("32x32", 4)])
def test_ctas_that_compute_several_tiles(tile, per_cta):
    found = explain("100x30x41x20", dtype="fp16", force_kernel=f"tiny:{tile}")
    chosen, side = found.chosen, int(tile.partition("x")[0])
    assert chosen.tiles == 100 * -(-30 // side) * -(-41 // side)
    assert chosen.ctas == -(-chosen.tiles // per_cta)
    assert chosen.waves == chosen.ctas / chosen.slots


def test_epilogue_and_options_reach_the_problem():
    x, weight = meta(64, 256), meta(128, 256)
    found = explain(
        x, weight, meta(128), meta(64, 128), activation="gelu", out_dtype=BF16, op="linear"
    )
    assert found.steps[0].problem == "64x128x256 nt bfloat16 -> bfloat16, bias, gelu, residual"
    assert not found.steps[0].can_use_aten
    assert explain(x, weight, activation="relu").call.startswith("linear(")
    found = explain(meta(64, 128), x, weight.t(), op="addmm", beta=0.5, alpha=2.0)
    assert found.steps[0].problem == "64x128x256 nt bfloat16 -> bfloat16, residual"
    assert found.steps[0].key.endswith("alpha 2; beta 0.5")
    assert (
        "residual" not in explain(meta(64, 128), x, weight.t(), op="addmm", beta=0).steps[0].problem
    )


def test_precision_decides_the_unit():
    def unit(**options):
        found = explain("512x512x512", dtype="fp32", **options)
        return found.roofline.unit, found.roofline.peak_tflops

    assert unit()[0] == "fma"
    assert unit(precision="tf32")[0] == "tf32"
    assert unit(precision="bf16")[0] == "tensor"
    assert unit(precision="3xtf32")[1] == pytest.approx(unit(precision="tf32")[1] / 3)
    with measure.tf32_allowed(True):
        assert unit()[0] == "tf32"
        assert unit(precision="ieee")[0] == "fma"


@pytest.mark.parametrize("rows", [1, 4096])
def test_gated_layers(rows):
    found = explain(meta(rows, 1024), meta(4096, 1024), meta(4096, 1024), op="linear_glu")
    roles = [step.role for step in found.steps]
    others = [step.role for step in found.considered]
    assert sorted(roles + others) == ["gate", "up", "whole"]
    assert roles in (["whole"], ["gate", "up"])
    assert found.roofline.flops == 2 * 2 * rows * 4096 * 1024
    times = {step.role: step.scored[0].predicted_us for step in (*found.steps, *found.considered)}
    assert found.predicted_us == pytest.approx(min(times["whole"], times["gate"] + times["up"]))


def test_a_gated_layer_in_two_launches():
    found = explain(meta(8, 1024), meta(4096, 1024), meta(4096, 1024), op="linear_glu", gpu="a100")
    assert [step.role for step in found.steps] == ["gate", "up"]
    gate, up = (step.chosen for step in found.steps)
    assert found.chosen.plan == f"{gate.plan} + {up.plan}"
    assert found.predicted_us == gate.predicted_us + up.predicted_us
    assert found.considered[0].error.startswith("no kernel can run")
    assert "it multiplies one weight" in str(found)


def test_what_no_kernel_multiplies():
    found = explain(meta(4, 4, dtype=torch.float64), meta(4, 4, dtype=torch.float64))
    assert found.chosen is None
    assert found.steps == found.candidates == ()
    assert "ATen does" in found.error
    assert "ATen does" in str(found)
    assert found.to_dict()["chosen"] is None


def test_an_empty_result():
    found = explain("0x64x64")
    assert found.chosen is None
    assert found.error == "the result has no elements, so nothing runs"
    assert explain("64x64x0").chosen is not None  # zeros are written


def test_a_kernel_that_refuses():
    found = explain("64x64x64", dtype="fp32", force_kernel="sm90")
    assert found.chosen is None
    assert "sm90 cannot run" in found.error
    assert {c.reason for c in found.candidates} == {"it multiplies FP16 and BF16 operands"}


# --- Ways to ask


def test_tensors_of_any_kind_give_the_same():
    described = explain("64x96x128", dtype="bf16", layout="nt")
    cpu = torch.zeros(64, 128, dtype=BF16), torch.zeros(96, 128, dtype=BF16).t()
    assert explain(*cpu).to_dict() == described.to_dict()
    assert explain(*(tensor.to("meta") for tensor in cpu)).to_dict() == described.to_dict()
    with FakeTensorMode() as mode:
        for device in ("cpu", "cuda"):
            a = torch.empty(64, 128, dtype=BF16, device=device)
            b = torch.empty(96, 128, dtype=BF16, device=device).t()
            assert explain(a, b).to_dict() == described.to_dict()
    assert mode is not None
    assert explain(torch.nn.Parameter(cpu[0]), cpu[1]).to_dict() == described.to_dict()
    assert explain((64, 96, 128), dtype=BF16, layout="nt").to_dict() == described.to_dict()


def test_strides_and_addresses_count():
    storage = torch.zeros(64 * 128 + 8, dtype=BF16)
    aligned = storage[: 64 * 128].view(64, 128)
    for offset, alignment in ((1, 2), (2, 4), (4, 8), (8, 16)):
        shifted = storage[offset : offset + 64 * 128].view(64, 128)
        assert Operand.of(shifted).alignment == alignment
        assert Operand.of(shifted).meta().storage_offset() == offset % 8
        key = explain(shifted, aligned.t()).steps[0].key
        assert (f"a bfloat16 128,1 @{alignment};" in key) == (alignment < 16)
        # What is measured in its place lies in the same way.
        assert Operand.of(Operand.of(shifted).random("cpu")) == Operand.of(shifted)
    for strange in (
        aligned.t(),
        aligned[:, ::3],
        aligned[:0],
        aligned[0, 0],
        aligned[:1].expand(7, 128),
    ):
        assert Operand.of(Operand.of(strange).random("cpu")) == Operand.of(strange)
        assert Operand.of(Operand.of(strange).meta()) == Operand.of(strange)
    expanded = torch.zeros(1, 128, dtype=BF16).expand(64, 128)
    assert Operand.of(expanded).bytes == 256
    assert "a bfloat16 0,1" in explain(expanded, aligned.t()).steps[0].key


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("op", ["matmul", "linear", "addmm"])
def test_layouts_of_a_shape(layout, op):
    found = explain("48x64x80", layout=layout, op=op, dtype="fp16")
    assert found.steps[0].problem.startswith(f"48x64x80 {layout} float16")


def test_a_batch():
    found = explain("8x48x64x80", dtype="fp16")
    assert found.steps[0].batch == 8
    assert found.roofline.flops == 2 * 8 * 48 * 64 * 80


def test_a_shape_is_whole_numbers():
    assert explain((48, 64, 80)).steps[0].m == 48
    with pytest.raises(ValueError, match=r"is no shape"):
        explain((48.5, 64, 80))


def test_a_tensor_as_an_option_makes_it_linear():
    x, weight = torch.ones(48, 80), torch.ones(64, 80)
    found = explain(x, weight, bias=torch.ones(64))
    assert found.call.startswith("linear")
    assert "bias" in found.steps[0].problem


def test_a_shape_with_more_operands():
    found = explain("48x64x80", dtype="bf16", bias=True, residual=True, activation="silu")
    assert found.steps[0].problem == "48x64x80 nt bfloat16 -> bfloat16, bias, silu, residual"
    found = explain("48x64x80", dtype="bf16", op="linear_glu", gate_bias=True, up_bias=True)
    assert found.considered[-1].key.count("bias") == 2


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_described_card_runs_every_dtype(name):
    for dtype in ("fp16", "bf16", "fp32"):
        found = explain("300x200x100", dtype=dtype, gpu=name)
        assert found.chosen is not None, (name, dtype)
        assert found.roofline.peak_tflops


def test_names_of_cards():
    for name in ("h200", "H200", "NVIDIA H200", "nvidia-h200"):
        assert cards.described(name) is DESCRIBED["h200"]
    assert cards.described("RTX 4090") is DESCRIBED["rtx4090"]
    own = DESCRIBED["a100"]
    assert explain("64x64x64", gpu=own).card is own
    # The data sheet's TFLOP/s follow from SMs and clock.
    assert DESCRIBED["a100"].peaks()["tensor"] == pytest.approx(312, rel=0.01)
    assert DESCRIBED["rtx4090"].peaks()["tensor"] == pytest.approx(165, rel=0.01)


def test_an_h200_is_described_as_it_describes_itself():
    measured = json.loads((RESULTS / "sm90.json").read_text())["stamp"]["device"]
    described = DESCRIBED["h200"]
    for name in ("name", "compute_capability", "sm_count", "l2_bytes", "clock_ghz"):
        assert getattr(described, name) == measured[name]
    assert described.max_shared_memory_per_block == measured["max_shared_memory_per_block"]
    assert described.max_shared_memory_per_sm == measured["max_shared_memory_per_sm"]
    assert described.memory_bytes_per_us == pytest.approx(measured["memory_bytes_per_us"], rel=1e-3)


def test_batches_that_no_gemm_can_address_are_copied():
    a, b = torch.zeros(2, 3, 2, 3, 2, 3, 5, 7), torch.zeros(2, 3, 2, 3, 2, 3, 7, 4)
    assert not explain(a, b).copies
    strided = torch.zeros(3, 2, 3, 2, 3, 2, 2, 7, 5).permute(6, 0, 1, 2, 3, 4, 5, 8, 7)
    found = explain(strided, torch.zeros(2, 1, 2, 1, 2, 1, 2, 7, 4))
    assert found.copies
    assert "operands or output that no GEMM can address" in str(found)
    out = torch.zeros(6, 8)[::2, ::2]
    call = Call.of("matmul.out", (torch.zeros(3, 5), torch.zeros(5, 4)), {"out": out})
    assert call.plan(DESCRIBED["h200"])["copies"]


@pytest.mark.parametrize(
    ("codes", "runs"),
    [
        (["sm_90", "sm_90a"], ["h200", "h100"]),
        (["sm_80"], ["a100", "rtx3090", "l4", "rtx4090"]),
        (["sm_75", "compute_90"], ["t4", "h200", "h100", "b200", "rtx5090"]),
        (["compute_90a"], ["h200", "h100"]),
        ([], []),
    ],
)
def test_what_a_build_has_code_for(monkeypatch, codes, runs):
    monkeypatch.setattr(cards, "build_record", lambda: {"architectures": {"simt": codes}})
    for name in ("h200", "h100", "a100", "rtx3090", "l4", "rtx4090", "b200", "rtx5090", "t4"):
        found = explain("64x64x64", gpu=name)
        assert found.built == (name in runs), name
        assert ("could not run there" in str(found)) != found.built


def test_calls_with_an_out_and_with_a_pre_activation():
    x, weight = torch.zeros(6, 8), torch.zeros(4, 8)
    out = torch.zeros(4, 6).t()
    call = Call.of("linear.out", (x, weight), {"out": out})
    # A column-major out: the transposed problem.
    assert call.plan(DESCRIBED["h200"])["problem"].startswith("4x6x8 ")
    call = Call.of("_linear_preact", (x, weight), {"activation": "gelu"})
    assert "pre-activation" in call.plan(DESCRIBED["h200"])["problem"]
    call = Call.of("_linear_glu_preact", (x, weight, weight), {})
    assert call.plan(DESCRIBED["h200"])["steps"] == ["gate", "up"]
    assert Call.of("linear", (x, weight), {"bias": None}) == Call.of("linear", (x, weight), {})


# --- What can go wrong


@pytest.mark.parametrize(
    ("arguments", "options", "error", "sentence"),
    [
        (
            ("64x64x64",),
            {"gpu": "h300"},
            ValueError,
            "no described GPU 'h300'; those are h200, h100",
        ),
        (("64x64",), {}, ValueError, "'64x64' is no shape"),
        (("64x64x-1",), {}, ValueError, "is no shape"),
        (("axbxc",), {}, ValueError, "is no shape"),
        ((None,), {}, ValueError, "is no shape"),
        (("64x64x99999999999999999999",), {}, ValueError, "has a size above 2^40"),
        (("64x64x64",), {"dtype": "int4"}, ValueError, "dtype is 'int4'"),
        (("64x64x64",), {"layout": "xx"}, ValueError, "layout is 'xx'"),
        (("2x64x64x64",), {"bias": True}, ValueError, "linear has no batch"),
        (("64x64x64",), {"op": "conv"}, ValueError, "op is 'conv'"),
        (("64x64x64",), {"gpu": 3}, TypeError, "gpu must be a name or a Card, and is a int"),
        ((), {}, TypeError, "a of matmul must be a Tensor, and is missing"),
        ((torch.zeros(2, 2),) * 3, {}, TypeError, "matmul takes a, b, and got 3"),
        ((torch.zeros(2, 2), 3), {}, TypeError, "b of matmul must be a Tensor, and is a int"),
        ((torch.zeros(2, 2),) * 2, {"bogus": 1}, TypeError, "bogus is not"),
        ((torch.zeros(2, 2),) * 2, {"dtype": "fp16"}, TypeError, "tensors have their own"),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), {}, RuntimeError, "inner sizes 3 and 2 differ"),
        (
            (torch.zeros(2, 2),) * 2,
            {"activation": "tanh"},
            RuntimeError,
            "activation 'tanh' is unknown",
        ),
        (("64x64x64",), {"force_kernel": ""}, RuntimeError, "tgemm.matmul: force_kernel is empty"),
        (("64x64x64",), {"dtype": 16}, TypeError, "must be a name or a torch.dtype, and is a int"),
        (("64x64x64",), {"dtype": torch.int8}, RuntimeError, "tgemm.matmul: a has dtype int8"),
        (("64x64x64",), {"dtype": torch.qint8}, RuntimeError, "a has dtype qint8, which is not"),
        (("64x64x64",), {"layout": ["nn"]}, ValueError, "layout is ['nn']"),
        (("64x64x64",), {"precision": 3}, TypeError, "precision of matmul must be a str"),
        (("64x64x64",), {"force_kernel": 3}, TypeError, "force_kernel of matmul must be a str"),
        (
            ("64x64x64",),
            {"out_dtype": "fp16"},
            TypeError,
            "out_dtype of matmul must be a torch.dtype",
        ),
        (("64x64x64",), {"activation": ["relu"]}, TypeError, "activation of linear must be a str"),
        (
            ("64x64x64",),
            {"bias": 1.0},
            TypeError,
            "bias of linear must be a Tensor, and is a float",
        ),
        (
            ("64x64x64",),
            {"op": "linear", "static_weight": "yes"},
            TypeError,
            "static_weight of linear must be a bool",
        ),
        (("64x64x64",), {"op": "addmm", "beta": "1"}, TypeError, "beta of addmm must be a number"),
        (
            ("1x4294967296x4294967296",),
            {},
            ValueError,
            "a matrix of more bytes than torch can count",
        ),
        ((torch.eye(2).to_sparse(), torch.eye(2)), {}, RuntimeError, "a has layout sparse_coo"),
        ((torch.eye(2), torch.eye(2).to_mkldnn()), {}, RuntimeError, "b has layout mkldnn"),
        (
            (
                torch.eye(2),
                torch._empty_affine_quantized((2, 2), scale=1.0, zero_point=0, dtype=torch.qint8),
            ),
            {},
            RuntimeError,
            "b has dtype qint8",
        ),
        (
            (torch.nested.nested_tensor([torch.eye(2)]), torch.eye(2)),
            {},
            RuntimeError,
            "nested tensors are not supported",
        ),
        (
            (torch.nested.nested_tensor([torch.eye(2)], layout=torch.jagged), torch.eye(2)),
            {},
            RuntimeError,
            "nested tensors are not supported",
        ),
    ],
)
def test_errors_are_one_sentence(arguments, options, error, sentence):
    with pytest.raises(error) as caught:
        explain(*arguments, **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_gpu_and_without_a_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no GPU here; name one to explain for: h200"):
        torch_gemm.explain("64x64x64")


def test_without_the_cuda_library(monkeypatch):
    monkeypatch.setattr(torch_gemm._library, "cuda_missing", "tgemm runs on the CPU only here.")
    with pytest.raises(RuntimeError, match="runs on the CPU only"):
        explain("64x64x64")


# --- How it is shown


def test_text_html_and_dict_tell_the_same():
    found = explain("1024x4096x4095", dtype="bf16", layout="nt", bias=True)
    shown = str(found)
    html = page.page(found)
    stored = json.loads(json.dumps(found.to_dict()))
    for part in (found.chosen.plan, found.runner_up.plan, found.steps[0].problem.split()[0]):
        assert part in shown
        assert part in html
    assert stored["chosen"]["plan"] == found.chosen.plan
    assert stored["steps"][0]["candidates"] == [c.to_dict() for c in found.candidates]
    for reason in text.rejections(found.steps[0]):
        assert reason in shown
    assert html.startswith("<!doctype html>")
    assert not re.search(r"(src|href)=|@import|url\(", html), "needs other files"
    assert found._repr_html_() in html
    assert html.count("<table>") == html.count("</table>")


def test_html_is_escaped():
    found = explain("64x64x64", gpu=cards.Card("<b>&", 90, 1, 1 << 17, 1 << 18, 1, 1.0, 1.0))
    assert "<b>&" not in page.page(found)
    assert "&lt;b&gt;&amp;" in page.page(found)


def test_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    html = tmp_path / "found.html"
    status, out, _ = run(
        capsys,
        "2048x4096x14336",
        "--dtype",
        "bf16",
        "--layout",
        "nt",
        "--gpu",
        "h200",
        "--html",
        str(html),
    )
    assert status == 0
    found = explain("2048x4096x14336", dtype="bf16", layout="nt")
    assert found.chosen.plan in out
    assert html.read_text() == page.page(found)
    status, out, _ = run(
        capsys, "64x64x64", "--gpu", "l4", "--json", "--glu", "--bias", "--activation", "gelu"
    )
    assert status == 0
    assert json.loads(out) == json.loads(
        json.dumps(
            explain(
                "64x64x64",
                op="linear_glu",
                gate_bias=True,
                up_bias=True,
                activation="gelu",
                gpu="l4",
            ).to_dict()
        )
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["64x64", "--gpu", "h200"], "is no shape"),
        (["64x64x64", "--gpu", "nope"], "those are h200, h100"),
        (["64x64x64", "--gpu", "h200", "--force-kernel", "nope"], "there is no kernel named"),
        (["64x64x64", "--gpu", "h200", "--force-kernel", "sm90:1x1"], "has no configuration"),
        (
            ["64x64x64", "--gpu", "l4", "--glu", "--force-kernel", "nope"],
            "there is no kernel named",
        ),
        (["64x64x64", "--gpu", "h200", "--html", "/no/such/folder/x.html"], "cannot be written"),
        (["64x64x64", "--gpu", "h200", "--glu", "--residual"], "cannot be combined"),
        (["2x64x64x64", "--gpu", "h200", "--bias"], "has no batch"),
    ],
)
def test_command_fails_in_one_sentence(capsys, arguments, sentence):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""
