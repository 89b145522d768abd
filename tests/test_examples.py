"""Every program in examples/ runs as its text says, on small inputs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_gemm import _library
from torch_gemm.demo import MODEL_PACKAGE

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(EXAMPLES.rglob("*.py"))
GPU = torch.cuda.is_available()


def run(*command: object, fails: bool = False) -> str:
    """What a program prints; with `fails`, what it says when it refuses."""
    result = subprocess.run(
        list(map(str, command)),
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == (2 if fails else 0), result.stdout + result.stderr
    return result.stderr if fails else result.stdout


def example(name: str, *arguments: object, fails: bool = False) -> str:
    return run(sys.executable, EXAMPLES / name, *arguments, fails=fails)


def test_every_example_is_tested():
    names = {str(path.relative_to(EXAMPLES)) for path in PROGRAMS}
    assert names == {
        "embeddings_search.py",
        "image_classification.py",
        "llm_generation.py",
        "aoti_cpp/export.py",
    }


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_help(program: Path):
    text = run(sys.executable, program, "--help")
    assert text.startswith("usage: ")
    assert len(text.splitlines()) > 4


def test_embeddings_search():
    pytest.importorskip("transformers")
    pytest.importorskip(MODEL_PACKAGE)
    query = "How do plants make their food?"
    said = example("embeddings_search.py", "--limit", 24, "--top", 2, "--query", query)
    assert "37 layers replaced, 18 of them fused with more" in said
    cosine = re.search(r"smallest cosine .*: (\d\.\d+)", said)
    assert cosine is not None
    assert float(cosine[1]) > 0.999
    hits = re.findall(r"^  (-?\d\.\d+)  (.+)$", said, re.M)
    assert len(hits) == 2
    assert float(hits[0][0]) >= float(hits[1][0])
    assert ("ms for 24 sentences" in said) == GPU


def test_image_classification():
    pytest.importorskip("transformers")
    said = example("image_classification.py", "--batch", 2)
    assert re.search(r"\d+ layers replaced, \d+ of them fused with more", said)
    (same,) = re.findall(r"the same class for (\d) of 2 images", said)
    assert GPU or same == "2"  # in 16 bits, random weights leave the best classes close together
    assert ("ms a batch" in said) == GPU


def test_llm_generation():
    pytest.importorskip("transformers")
    said = example("llm_generation.py", "--tokens", 6, "--batch", 2, "--hidden", 64, "--layers", 2)
    assert "15 layers replaced, 2 gated MLPs fused" in said
    counts = re.findall(r"(\d+) of 12 tokens as stock has them", said)
    assert len(counts) == (4 if GPU else 2)
    # On the CPU both ways compute with ATen, in FP32.
    assert GPU or counts == ["12", "12"]
    assert said.count("ms a step") == (4 if GPU else 0)
    assert ("without CUDA graphs" in said) != GPU


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("embeddings_search.py", "--top", 0), "--top is 0, and must be between 1 and"),
        (("image_classification.py", "--batch", 0), "--batch is 0, and must be at least 1"),
        (("llm_generation.py", "--tokens", 0), "--tokens is 0, and must be at least 1"),
        (("llm_generation.py", "--hidden", 100), "--hidden is 100, and must be a multiple of 64"),
        (("aoti_cpp/export.py", "x", "--rows", 0), "--rows is 0, and must be between 1 and 4096"),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, tuple) else "",
)
def test_misuse(command, sentence):
    assert sentence in example(*command, fails=True)


# --- The C++ program ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_package(tmp_path_factory) -> Path:
    """The program of examples/aoti_cpp, built against the torch of this Python."""
    cmake = shutil.which(
        "cmake", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    )
    if cmake is None or not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("examples/aoti_cpp needs CMake and a C++ compiler")
    folder = tmp_path_factory.mktemp("aoti_cpp")
    source = EXAMPLES / "aoti_cpp"
    run(cmake, "-S", source, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}")
    run(cmake, "--build", folder)
    return folder / "run_package"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_aoti_cpp(device: str, run_package: Path, tmp_path: Path, request):
    """The package takes other numbers of rows than it was exported with."""
    if device == "cuda":
        request.getfixturevalue("cuda_headers")
    example("aoti_cpp/export.py", tmp_path, "--device", device, "--rows", 5)
    expected = torch.load(tmp_path / "expected.pt")
    x = torch.load(tmp_path / "input.pt")
    command = [run_package, _library.LIBRARY_DIR, tmp_path / "model.pt2"]
    for rows in (5, 1):
        torch.save(x[:rows].clone(), tmp_path / "input.pt")
        said = run(*command, tmp_path / "input.pt", tmp_path / "output.pt", device)
        assert said.startswith(f"[{rows}, 64] -> [{rows}, 64] on {device}")
        output = torch.load(tmp_path / "output.pt")
        close = {"rtol": 1e-2, "atol": 1e-2} if device == "cuda" else {}
        torch.testing.assert_close(output, expected[:rows], **close)
    # Bad input is a sentence.
    missing = run(*command, tmp_path / "nothing.pt", tmp_path / "o.pt", device, fails=True)
    assert missing == f"run_package: cannot read {tmp_path / 'nothing.pt'}\n"
    assert "usage: run_package" in run(run_package, fails=True)
    libraries = run(run_package, tmp_path, *command[2:], "i", "o", device, fails=True)
    assert libraries.startswith(f"run_package: {tmp_path}/libtgemm.so: cannot open")
    assert len(libraries.splitlines()) == 1
