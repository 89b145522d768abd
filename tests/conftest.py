"""What all tests share: the `gpu` marker and the hypothesis profile."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

from torch_gemm import _library

# The same examples in every run, so that CI fails for a reason in the change it tests. To look for new
# ones: HYPOTHESIS_PROFILE=explore pytest tests/test_ops_properties.py
hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=100, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

_SKIPPED: pytest.StashKey[int] = pytest.StashKey()
# Everything in these needs a GPU: the kernels, and what PyTorch and the tools put around them.
GPU_FOLDERS = {Path(__file__).with_name(name) for name in ("gpu", "gpu_torch")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_FOLDERS & set(item.path.parents):
            item.add_marker(pytest.mark.gpu)
    reason = _why_no_gpu()
    if reason is None:
        return
    marked = [item for item in items if item.get_closest_marker("gpu")]
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))
    config.stash[_SKIPPED] = len(marked)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    skipped = config.stash.get(_SKIPPED, 0)
    if skipped:
        terminalreporter.write_line(
            f"{skipped} tests marked gpu did NOT run: {_why_no_gpu()}", yellow=True, bold=True
        )


def _why_no_gpu() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU on this machine"
    return _library.cuda_missing


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda"


@pytest.fixture
def allow_tf32():
    """Sets torch's flag for FP32 matmuls, until the test ends."""
    before = torch.backends.cuda.matmul.allow_tf32

    def allow(allowed: bool) -> None:
        torch.backends.cuda.matmul.allow_tf32 = allowed

    yield allow
    allow(before)


@pytest.fixture
def cuda_headers() -> None:
    """AOTInductor compiles C++ against CUDA's headers for a model on a GPU."""
    from torch.utils.cpp_extension import include_paths

    if not any((Path(folder) / "cuda.h").exists() for folder in include_paths("cuda")):
        pytest.skip("AOTInductor needs a CUDA toolkit with cuda.h for a GPU's models")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(20240229)
