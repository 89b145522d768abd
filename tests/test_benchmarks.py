"""The benchmark runs (on the CPU here, where its times mean nothing) and the documents show its results."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types

import pytest
import torch

from benchmarks import render
from benchmarks import side_by_side as command
from torch_gemm import measure
from torch_gemm.bench import shapes, side_by_side
from torch_gemm.bench.shapes import SUITES, Shape, parse_shape


@pytest.fixture
def tiny_suite(monkeypatch):
    monkeypatch.setattr(measure, "TURN_MS", 0.01)
    suite = (Shape(16, 24, 32, "fp32"), Shape(16, 24, 32, "bf16", ("simt",)))
    monkeypatch.setitem(SUITES, "foundation", suite)


def test_shapes():
    for shape in (shape for suite in SUITES.values() for shape in suite):
        assert shape.dtype in shapes.DTYPES
        assert shape.epilogue in shapes.EPILOGUES
        assert shape.layout in shapes.LAYOUTS
    assert parse_shape("2048x6144x4096", "bf16") == Shape(2048, 6144, 4096, "bf16")
    assert Shape(2, 3, 4, "fp16").flops == 48
    assert Shape(2, 3, 4, "fp16").bytes == 2 * (8 + 12 + 6)
    assert Shape(2, 3, 4, "fp16", epilogue="swiglu").flops == 96
    for epilogue, extra in (("bias", 3), ("gelu", 3), ("silu", 0), ("residual", 6), ("swiglu", 12)):
        assert Shape(2, 3, 4, "fp16", epilogue=epilogue).bytes == 2 * (8 + 12 + 6 + extra)
    assert str(Shape(2, 3, 4, "fp16")) == "2x3x4 fp16"
    assert str(Shape(2, 3, 4, "fp16", epilogue="gelu", layout="tn")) == "2x3x4 fp16 tn gelu"
    for text in ("12x34", "axbxc", "1x2x0"):
        with pytest.raises(ValueError, match=text):
            parse_shape(text, "fp16")


def test_inputs_exceed_l2_twice():
    shape = Shape(64, 64, 64, "fp32")
    inputs = side_by_side.make_inputs(shape, "cpu", l2_bytes=10**6)
    assert len(inputs) * shape.bytes > 2 * 10**6
    assert all(tensor.count_nonzero() > 0.99 * tensor.numel() for pair in inputs for tensor in pair)


def test_the_order_rotates():
    calls = []
    replays = {name: lambda name=name: calls.append(name) for name in "abc"}

    class OneCall:
        def milliseconds(self, replay, repeats):
            replay()
            return 100.0

    times = measure.time_in_turn(replays, OneCall(), rounds=4)
    assert "".join(calls[6:]) == "abcbcacababc"
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_suite_on_the_cpu(tiny_suite, tmp_path, capsys):
    path = tmp_path / "foundation.json"
    arguments = ["--suite", "foundation", "--device", "cpu", "--rounds", "3"]
    assert command.main([*arguments, "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["name"] == "foundation"
    assert len(result["stamp"]["csrc_digest"]) == 64
    first, second = result["rows"]
    assert list(first["contenders"]) == ["torch", "torch (control)", "tgemm"]
    for contender in first["contenders"].values():
        assert contender["us"] > 0
        assert len(contender["rounds_us"]) == 3
        assert contender["largest_relative_difference"] < 1e-5
    # Kernels cannot be forced on the CPU.
    assert list(second["refused"]) == ["tgemm simt"]
    assert "torch/tgemm" in capsys.readouterr().out

    block = render.block_of("foundation", tmp_path)
    assert "| 16 x 24 x 32 | fp32 |" in block
    assert torch.__version__ in block


def test_layouts():
    strides = {"nt": ((4, 1), (4, 1)), "nn": ((4, 1), (1, 3)), "tn": ((1, 2), (1, 3))}
    strides["tt"] = ((1, 2), (4, 1))
    for layout in shapes.LAYOUTS:
        x, weight = side_by_side.make_inputs(Shape(2, 3, 4, "fp32", layout=layout), "cpu", 1)[0]
        assert (x.shape, weight.shape) == ((2, 4), (3, 4))
        assert (x.stride(), weight.stride()) == strides[layout]


def test_epilogues_and_layouts_on_the_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "TURN_MS", 0.01)
    suite = [Shape(16, 24, 32, "fp32", epilogue=epilogue) for epilogue in shapes.EPILOGUES]
    suite += [Shape(16, 24, 32, "fp32", layout=layout) for layout in shapes.LAYOUTS]
    suite.append(Shape(15, 23, 31, "tf32", epilogue="swiglu", layout="tn"))
    monkeypatch.setitem(SUITES, "fused", suite)
    path = tmp_path / "fused.json"
    assert render.block_of("fused", tmp_path) == ""
    arguments = ["--suite", "fused", "--device", "cpu", "--rounds", "1", "--output", str(path)]
    assert command.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [shapes.shape_of(row) for row in rows] == suite
    for row in rows:
        for contender in row["contenders"].values():
            assert contender["largest_relative_difference"] < 1e-5
    assert "15x23x31 tf32 tn swiglu: " in capsys.readouterr().out

    block = render.block_of("fused", tmp_path)
    assert "| M x N x K | dtype | layout | epilogue | torch |" in block
    assert "| 16 x 24 x 32 | fp32 | nt | - |" in block
    assert "| 15 x 23 x 31 | tf32 | tn | swiglu |" in block


def test_results_without_epilogue_and_layout():
    row = {"m": 2, "n": 3, "k": 4, "dtype": "fp16", "force": ["simt"], "ratio": 1.0}
    assert shapes.shape_of(row) == Shape(2, 3, 4, "fp16", ("simt",))


def test_rivals_on_the_cpu(tiny_suite, tmp_path, capsys):
    path = tmp_path / "foundation.json"
    arguments = ["--suite", "foundation", "--device", "cpu", "--rounds", "1", "--output", str(path)]
    assert command.main([*arguments, "--against", "lt,compile"]) == 0
    for row in json.loads(path.read_text())["rows"]:
        contenders = row["contenders"]
        assert list(contenders)[3:] == [shapes.COMPILED]  # cuBLASLt has no CPU
        assert contenders[shapes.COMPILED]["largest_relative_difference"] < 1e-5
        best = min(us["us"] for name, us in contenders.items() if name != "tgemm")
        assert row["best_ratio"] == pytest.approx(best / contenders["tgemm"]["us"], rel=0.05)
    block = render.block_of("foundation", tmp_path)
    assert "| M x N x K | dtype | torch | torch.compile, max-autotune | tgemm | kernel |" in block
    with pytest.raises(SystemExit):
        command.main([*arguments, "--against", "lt,qub"])
    assert "--against knows lt, compile, quack, not qub" in capsys.readouterr().err


def test_wrong_results_show(tiny_suite, monkeypatch):
    contenders = side_by_side.contenders_of(Shape(16, 24, 32, "fp32"), ())
    contenders["tgemm"] = lambda x, weight: torch.zeros(16, 24)
    monkeypatch.setattr(side_by_side, "contenders_of", lambda *_: contenders)
    row = side_by_side.measure(Shape(16, 24, 32, "fp32"), (), measure.CpuRunner(), rounds=1)
    assert row["contenders"]["tgemm"]["largest_relative_difference"] == 1.0


def test_sweep_lists_every_configuration(monkeypatch):
    table = [{"name": "simt", "configs": [{"name": "64x64"}, {"name": "128x128"}]}]
    monkeypatch.setattr(command.torch_gemm, "kernels", lambda: table)
    assert command.forced_configurations("simt", (1, 4)) == [
        "simt:64x64,split_k=1",
        "simt:64x64,split_k=4",
        "simt:128x128,split_k=1",
        "simt:128x128,split_k=4",
    ]
    sizes = {"block_m": 64, "block_n": 64}
    table[0]["configs"] = [{"name": "64x64", **sizes}]
    for m, expected in ((64, ["1", "4"]), (128, ["1"])):  # on four SMs
        forced = command.forced_configurations("simt", (1, 4), Shape(m, 64, 64, "fp32"), 4)
        assert [force.partition("split_k=")[2] for force in forced] == expected
    with pytest.raises(ValueError, match="there is no kernel 'warp'; the kernels are simt"):
        command.forced_configurations("warp", (1,))


def test_what_cannot_be_written_is_not_measured(tiny_suite, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "run_suite", None)
    (tmp_path / "file").touch()
    arguments = ["--suite", "foundation", "--device", "cpu"]
    for more, sentence in (
        (["--output", str(tmp_path / "file" / "r.json")], "cannot be written: "),
        (["--output", str(tmp_path)], "is not a regular file"),
        (["--rounds", "0"], "--rounds is 0, and must be at least 1"),
    ):
        with pytest.raises(SystemExit) as caught:
            command.main([*arguments, *more])
        assert caught.value.code == 2
        assert sentence in capsys.readouterr().err


def test_no_gpu_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        command.main(["--suite", "foundation"])
    assert ended.value.code == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_documents_are_up_to_date(capsys):
    assert render.main(["--check"]) == 0, capsys.readouterr().out


def test_render(tmp_path):
    document = tmp_path / "README.md"
    document.write_text("Before\n<!-- begin: speed -->\nold\n<!-- end: speed -->\nAfter\n")
    arguments = ["--document", str(document), "--results", str(tmp_path)]
    assert render.main([*arguments, "--check"]) == 1
    assert "old" in document.read_text()
    assert render.main(arguments) == 0
    assert render.main([*arguments, "--check"]) == 0
    assert document.read_text() == (
        "Before\n<!-- begin: speed -->\nNot measured yet.\n<!-- end: speed -->\nAfter\n"
    )
    with pytest.raises(ValueError, match="<!-- begin: a --> has no counterpart"):
        render.render("<!-- begin: a -->\n<!-- end: b -->")


def test_render_several_documents(tmp_path, capsys):
    marked = "<!-- begin: speed -->\nold\n<!-- end: speed -->\n"
    first, second = tmp_path / "a.md", tmp_path / "b.md"
    first.write_text(marked)
    second.write_text("no marker\n")
    arguments = ["--document", str(first), "--document", str(second), "--results", str(tmp_path)]
    assert render.main([*arguments, "--check"]) == 1
    second.write_text(marked)
    first.write_text(marked.replace("old", "Not measured yet."))
    assert render.main([*arguments, "--check"]) == 1
    assert "b.md is not up to date" in capsys.readouterr().out
    assert render.main(arguments) == 0
    assert capsys.readouterr().out == f"written: {second}\n"
    assert second.read_text() == first.read_text()
    assert render.main([*arguments, "--check"]) == 0


def test_the_documents():
    names = [path.name for path in render.DOCUMENTS]
    assert names[0] == "README.md"
    assert {"ladder.md", "performance.md"} <= set(names)
    marked = "".join(path.read_text() for path in render.DOCUMENTS)
    assert all(f"<!-- begin: {name} -->" in marked for name in render.BLOCKS)


STAMP = {"card": "GPU", "driver": "1", "torch": "2", "date": "3", "csrc_digest": "0"}


def stored(folder, name, rows, **contenders):
    """A result with one row for each of the times of tgemm, and for its rivals."""
    result = {
        "stamp": STAMP,
        "rounds": 1,
        "rows": [
            {"m": 1, "n": 1000, "k": 1000 * row["us"], "dtype": "bf16", "chosen": "simt:64x64"}
            | {
                "contenders": {
                    label: {"us": us, "tflops": 1.0}
                    for label, us in (contenders | {"tgemm": row["us"]}).items()
                },
                "ratio": contenders["torch"] / row["us"],
                "best_ratio": min(contenders.values()) / row["us"],
                "control_ratio": 1.0,
            }
            for row in rows
        ],
    }
    (folder / f"{name}.json").write_text(json.dumps(result))


def test_decoding_is_shown_as_bandwidth(tmp_path):
    assert render.block_of("decode", tmp_path) == render.NOT_MEASURED
    stored(tmp_path, "decode", [{"us": 2}], torch=1.0)
    # (2000 + 1000 * 2000 + 1000) * 2 bytes in one and in two microseconds.
    assert "| 1.0 us, 4.01 TB/s | 2.0 us, 2.00 TB/s | `simt:64x64` | 0.50 |" in render.block_of(
        "decode", tmp_path
    )


def test_gains_and_losses_of_all_suites(tmp_path):
    for name in ("summary", "losses"):
        assert render.block_of(name, tmp_path) == render.NOT_MEASURED
    stored(tmp_path, "sm90", [{"us": 1}, {"us": 2}, {"us": 8}], **{"torch": 4.0, shapes.LT: 2.0})
    stored(tmp_path, "fused", [{"us": 4}, {"us": 5}], **{"torch": 4.0, "torch (control)": 1.0})
    text = render.block_of("summary", tmp_path)
    # 2, 1 and 1/4: their product is 1/2. The control is no rival.
    assert (
        f"| linear layers, 128 rows and more | torch, {shapes.LT} | 1 | 1 | 1 | 0.79 | 0.25 | 2.00 |"
        in text
    )
    assert "| fused epilogues | torch | 0 | 1 | 1 | 0.89 | 0.80 | 1.00 |" in text
    assert "decoding" not in text
    assert text.endswith(
        f"GPU, driver 1, torch 2, 3. Not measured against: {shapes.COMPILED}; {shapes.QUACK}.\n"
    )
    rivals = {"torch": 4.0, shapes.LT: 2.0, shapes.QUACK: 2.0, shapes.COMPILED: 1.0}
    stored(tmp_path, "large_k", [{"us": 2}], **rivals)
    text = render.block_of("summary", tmp_path)
    assert f"| torch, {shapes.LT}, {shapes.COMPILED}, {shapes.QUACK} | 0 | 0 | 1 | 0.50 |" in text
    assert text.endswith("GPU, driver 1, torch 2, 3.\n")
    (tmp_path / "large_k.json").unlink()
    lines = [line for line in render.block_of("losses", tmp_path).splitlines() if "0." in line]
    assert [line.rsplit("|", 2)[1].strip() for line in lines] == ["0.25", "0.80"]
    assert f"| {shapes.LT}: 2.0 us | 8.0 us |" in lines[0]
    assert "2 of 5 shapes" in render.block_of("losses", tmp_path)


def test_the_picture_of_all_suites(tmp_path, capsys):
    document = tmp_path / "README.md"
    document.write_text("<!-- begin: summary -->\n<!-- end: summary -->\n")
    arguments = ["--document", str(document), "--results", str(tmp_path)]
    assert render.main(arguments) == 0
    assert not (tmp_path / "docs").exists()
    stored(tmp_path, "sm90", [{"us": 1}, {"us": 2}], torch=2.0)
    assert render.main([*arguments, "--check"]) == 1
    assert "speedups.svg is not up to date" in capsys.readouterr().out
    assert render.main(arguments) == 0
    assert render.main([*arguments, "--check"]) == 0
    # One more suite.
    stored(tmp_path, "other", [{"us": 1}], torch=2.0)
    render.main(arguments)
    first = (tmp_path / "docs" / "speedups.svg").read_bytes()
    stored(tmp_path, "other", [{"us": 2}], torch=2.0)
    assert render.main([*arguments, "--check"]) == 1
    assert render.main(arguments) == 0
    assert (tmp_path / "docs" / "speedups.svg").read_bytes() != first
    # A document in docs/ shows the picture that README.md has drawn.
    assert not (tmp_path / "docs" / "docs").exists()


def test_models_are_shown_side_by_side(tmp_path):
    assert render.block_of("models", tmp_path) == render.NOT_MEASURED
    timed = {"ms": 2.0, "over_best_stock": 0.5, "difference": 0.012}
    rows = [
        {"what": "ViT", "dtype": "bf16", "gemm_share": 0.58, "cells": {"stock eager": timed}},
        {"what": "BERT", "dtype": "bf16", "gemm_share": 0.6, "cells": {"tgemm pass": timed}},
    ]
    (tmp_path / "models_bf16.json").write_text(
        json.dumps({"stamp": STAMP, "rounds": 9, "rows": rows})
    )
    text = render.block_of("models", tmp_path)
    assert "| bf16 | ViT | BERT |" in text
    assert "| stock eager | 2.00 ms, 0.50, 1.2e-02 | - |" in text  # failed or was left out
    assert "| tgemm pass | - | 2.00 ms, 0.50, 1.2e-02 |" in text
    assert "| matrix products' share | 58% | 60% |" in text
    assert "9 rounds" in text
    assert text.endswith("GPU, driver 1, torch 2, 3.\n")


def test_host_time_is_shown_beside_torchs(tmp_path):
    rows = [
        {
            "op": "linear",
            "mode": "no_grad",
            "bar": 1.0,
            "calls": {"torch": {"us": 20.0, "of_torch": 1.0}, "ours": {"us": 15, "of_torch": 0.75}},
        },
        {"op": "parts", "mode": "no_grad", "bar": None, "calls": {"a view": {"us": 1.2}}},
    ]
    result = {"stamp": STAMP, "shape": [1, 2, 3], "calls": 10_000, "rows": rows}
    (tmp_path / "host_cost.json").write_text(json.dumps(result))
    text = render.block_of("host_cost", tmp_path)
    assert "| linear | no_grad | ours | 15.0 us | 0.75 |" in text
    assert "1 x 2 x 3, 10,000 calls of each" in text
    assert "For comparison: a view 1.2 us." in text
    assert "parts |" not in text


def test_old_results_are_named(tmp_path):
    (tmp_path / "speed.json").write_text('{"stamp": {"csrc_digest": "0"}}')
    text = "<!-- begin: speed -->\n<!-- end: speed -->"
    assert render.stale(text, tmp_path) == ["speed"]


def test_batches_offsets_and_strides(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "TURN_MS", 0.01)
    shape = Shape(3, 4, 5, "bf16", layout="nn", batch=2, offset=1, padding=3)
    assert str(shape) == "2x(3x4x5) bf16 nn offset 1 stride+3"
    assert shape.flops == 2 * 2 * 60
    assert shape.bytes == 2 * 2 * (15 + 20 + 12)
    for text in ("2x(3x4x5)", "2x3x4x5"):
        assert parse_shape(text, "fp16") == Shape(3, 4, 5, "fp16", batch=2)
    for text in ("2x(3x4x5", "2x3x4x5)", "(3x4x5)", "0x(3x4x5)"):
        with pytest.raises(ValueError, match=r"x"):
            parse_shape(text, "fp16")
    x, weight = side_by_side.make_inputs(shape, "cpu", 1)[0]
    assert (x.shape, x.stride(), x.storage_offset()) == ((2, 3, 5), (24, 8, 1), 1)
    assert (weight.shape, weight.stride(), weight.storage_offset()) == ((2, 4, 5), (35, 1, 7), 1)

    suite = [shape, Shape(3, 4, 5, "fp32", offset=1), Shape(3, 4, 5, "3xtf32", padding=1)]
    monkeypatch.setitem(SUITES, "batch", suite)
    path = tmp_path / "batch.json"
    arguments = ["--suite", "batch", "--device", "cpu", "--rounds", "1", "--output", str(path)]
    assert command.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [shapes.shape_of(row) for row in rows] == suite
    for row in rows:
        for contender in row["contenders"].values():
            assert contender["largest_relative_difference"] < 1e-2
    block = render.block_of("batch", tmp_path)
    assert "| M x N x K | dtype | layout | placement | torch |" in block
    assert "| 2 x (3 x 4 x 5) | bf16 | nn | offset 1 stride+3 |" in block
    assert "| 3 x 4 x 5 | 3xtf32 | nt | stride+1 |" in block
    capsys.readouterr()


def test_batches_without_epilogues():
    for shape in (shape for suite in SUITES.values() for shape in suite if shape.batch > 1):
        assert shape.epilogue == ""


@pytest.mark.parametrize(
    ("more", "name", "x_shape", "weight_shape"),
    [
        ({"group": 24}, "one weight", (24, 3, 5), (1, 4, 5)),
        ({"heads": 6}, "6 heads", (4, 6, 3, 5), (4, 6, 4, 5)),
        ({"heads": 6, "group": 2}, "6 heads 2 a weight", (4, 3, 2, 3, 5), (4, 3, 1, 4, 5)),
        ({"heads": 6, "layout": "nn"}, "6 heads", (4, 6, 3, 5), (4, 6, 4, 5)),
        (
            {"heads": 6, "layout": "tt", "padding": 1},
            "stride+1 6 heads",
            (4, 6, 3, 5),
            (4, 6, 4, 5),
        ),
    ],
)
def test_batches_that_share_or_interleave(more, name, x_shape, weight_shape):
    shape = Shape(3, 4, 5, "fp32", batch=24, **more)
    assert str(shape).startswith("24x(3x4x5) fp32")
    assert str(shape).endswith(name)
    assert shapes.shape_of(json.loads(json.dumps(vars(shape)))) == shape
    inputs = side_by_side.make_inputs(shape, "cpu", 1)[0]
    x, weight = inputs
    assert (x.shape, weight.shape) == (x_shape, weight_shape)
    assert shape.bytes == 4 * (x.numel() + weight.numel() + 24 * 3 * 4)
    if shape.heads and shape.layout[0] == "n":  # no reshape without a copy
        assert not x.is_contiguous()
        assert x.stride(-2) == shape.heads * x.shape[-1]
    contenders = side_by_side.contenders_of(shape, ())
    truth = torch.einsum(
        "...mk,...nk->...mn", x.double(), weight.double().expand(*x.shape[:-2], -1, -1)
    )
    for contender in contenders.values():
        torch.testing.assert_close(contender(*inputs), truth.float())


def test_the_batch_suite_has_what_cannot_be_merged():
    suite = SUITES["batch"]
    assert any(shape.group == shape.batch > 1 for shape in suite)
    assert any(shape.heads and shape.group == 1 for shape in suite)
    assert any(shape.heads and shape.group > 1 for shape in suite)
    for shape in suite:
        assert shape.batch % (shape.heads or 1) == 0
        assert (shape.heads or shape.batch) % shape.group == 0


def test_every_shape_of_a_suite_is_compiled():
    """torch.compile gives up on code that it has compiled eight times, and runs it as it is."""
    from torch._dynamo.utils import counters

    counters.clear()
    runner = measure.CpuRunner()
    for m in range(2, 12):
        row = side_by_side.measure(Shape(m, 8, 4, "fp32"), ["compile"], runner, 1)
        assert shapes.COMPILED in row["contenders"]
    assert counters["stats"]["unique_graphs"] == 10


def test_a_shape_beyond_the_memory_does_not_end_the_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "TURN_MS", 0.01)
    whole = side_by_side.measure

    def explode_at_first(shape, *rest):
        if shape.m == 4:
            raise torch.OutOfMemoryError("out of memory\nmore")
        return whole(shape, *rest)

    monkeypatch.setattr(side_by_side, "measure", explode_at_first)
    path = tmp_path / "sweep.json"
    arguments = ["--sweep", "simt", "--dtype", "fp32", "--device", "cpu", "--rounds", "1"]
    arguments += ["--output", str(path), "--shapes"]
    assert command.main([*arguments, "4x5x6,5x5x6"]) == 0
    result = json.loads(path.read_text())
    assert [row["m"] for row in result["rows"]] == [5]
    assert result["not_offered"] == {"4x5x6 fp32": "out of memory: out of memory"}
    path.unlink()
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, "4x5x6"])
    assert "simt_sweep_fp32 could not be measured: out of memory" in capsys.readouterr().err
    assert not path.exists()
    for splits in ("0", "a", "1,-1", ""):
        with pytest.raises(SystemExit, match="2"):
            command.main([*arguments, "5x5x6", "--split-k", splits])
        assert f"--split-k is {splits!r}" in capsys.readouterr().err


def test_an_interruption_costs_one_shape(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "TURN_MS", 0.01)
    whole = side_by_side.measure

    def interrupted_at_last(shape, *rest):
        if shape.m == 5:
            raise KeyboardInterrupt
        return whole(shape, *rest)

    monkeypatch.setattr(side_by_side, "measure", interrupted_at_last)
    path = tmp_path / "sweep.json"
    arguments = ["--sweep", "simt", "--dtype", "fp32", "--device", "cpu", "--rounds", "1"]
    with pytest.raises(KeyboardInterrupt):
        command.main([*arguments, "--output", str(path), "--shapes", "4x5x6,5x5x6"])
    assert [row["m"] for row in json.loads(path.read_text())["rows"]] == [4]


def test_quack_is_a_rival_where_it_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(ValueError, match="--against quack needs the package quack-kernels"):
        side_by_side.parse_against("lt,quack")
    package = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("quack", None))
    monkeypatch.setitem(sys.modules, "quack", package)
    assert side_by_side.parse_against("lt,quack") == ["lt", "quack"]

    quack = types.ModuleType("quack.gemm_interface")
    quack.gemm = torch.matmul
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", quack)
    runner = measure.CpuRunner()
    row = side_by_side.measure(Shape(4, 5, 6, "bf16"), ["quack"], runner, 1)
    assert row["contenders"][shapes.QUACK]["largest_relative_difference"] < 0.01
    for shape in (Shape(4, 5, 6, "fp32"), Shape(4, 5, 6, "bf16", epilogue="gelu")):
        assert shapes.QUACK not in side_by_side.measure(shape, ["quack"], runner, 1)["contenders"]

    def refuse(*_):
        raise AssertionError("not aligned")

    quack.gemm = refuse
    row = side_by_side.measure(Shape(4, 5, 7, "bf16"), ["quack"], runner, 1)
    assert row["refused"][shapes.QUACK] == "AssertionError: not aligned"


def test_a_precision_that_the_build_lacks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "TURN_MS", 0.01)
    suite = (Shape(4, 5, 6, "3xtf32"), Shape(4, 5, 6, "fp32"))
    monkeypatch.setitem(SUITES, "fp32", suite)
    why = "no kernel multiplies with 3xtf32"
    monkeypatch.setattr(
        side_by_side, "reason_against", lambda shape, _: why if shape.dtype == "3xtf32" else None
    )
    path = tmp_path / "fp32.json"
    arguments = ["--suite", "fp32", "--device", "cpu", "--rounds", "1", "--output", str(path)]
    assert command.main(arguments) == 0
    result = json.loads(path.read_text())
    assert [shapes.shape_of(row) for row in result["rows"]] == [suite[1]]
    assert result["not_offered"] == {"4x5x6 3xtf32": why}
    assert f"4x5x6 3xtf32: not offered: {why}" in capsys.readouterr().out


def test_a_rival_without_an_algorithm(monkeypatch):
    def none(*_):
        raise side_by_side.CublasLtError("cuBLASLt has no algorithm")

    monkeypatch.setattr(side_by_side, "best_of_lt", none)
    runner = measure.CpuRunner()
    monkeypatch.setattr(runner, "device", "cuda")
    refused = {}
    rivals = side_by_side.rival_contenders(Shape(2, 3, 4, "fp32"), ["lt"], [], runner, refused)
    assert (rivals, refused) == ({}, {shapes.LT: "cuBLASLt has no algorithm"})
