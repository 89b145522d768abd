"""Builds a wheel, looks into it, and uses it where it was not built: a fresh environment with another
Python and another torch.

    python tests/check_wheel.py                                        this Python, the newest torch
    python tests/check_wheel.py --python python3.12 --torch 2.10.0
    python tests/check_wheel.py --wheel dist/torch_gemm-0.1.0-py3-none-linux_x86_64.whl

Needs a package index for torch (a large download), no GPU. Not part of `make test`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LIBRARY_BYTES = 40e6
# What the libraries may need at load time. Never libpython or libcuda: one build has to serve every
# Python, and machines without a driver.
ALLOWED_LIBRARIES = re.compile(
    r"(libtorch_cpu|libtorch_cuda|libstdc\+\+|libgcc_s|libc|libm|librt|libdl|libpthread|ld-linux[\w-]*)"
    r"\.so(\.\d+)?"
)

# Runs in the fresh environment, in an empty folder.
SMOKE_TEST = """
import math, pathlib, sys, warnings
warnings.simplefilter("error")
import torch
import torch_gemm
from torch_gemm import _library

package = pathlib.Path(torch_gemm.__file__).parent
assert package.is_relative_to(sys.prefix), package
assert not torch.cuda.is_initialized(), "import initialised CUDA"
print("python", sys.version.split()[0], "torch", torch.__version__, "loaded", sorted(_library.loaded))

# A matmul, an epilogue with a gradient, in-place accumulation, a module.
a, b = torch.randn(3, 5, 33), torch.randn(33, 17)
torch.testing.assert_close(torch_gemm.matmul(a, b), a @ b)
w, bias, residual = torch.randn(17, 33, requires_grad=True), torch.randn(17), torch.randn(3, 5, 17)
result = torch_gemm.linear(a, w, bias, residual, activation="gelu")
expected = torch.nn.functional.gelu(a @ w.T + bias) + residual
torch.testing.assert_close(result, expected)
ours, = torch.autograd.grad(result.sum(), w)
theirs, = torch.autograd.grad(expected.sum(), w)
torch.testing.assert_close(ours, theirs)
out = residual.clone()
torch_gemm.linear(a, w.detach(), residual=out, out=out)
torch.testing.assert_close(out, a @ w.detach().T + residual)
model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.ReLU())
before = model(a)
torch_gemm.replace(model)
torch.testing.assert_close(model(a), before)

# The message of an error, and the call after it.
try:
    torch_gemm.matmul(a, a)
except RuntimeError as error:
    assert "inner sizes" in str(error) and "\\n" not in str(error), error
else:
    raise AssertionError("no error for shapes that do not multiply")
torch.testing.assert_close(torch_gemm.matmul(a, b), a @ b)

# CUDA tensors without a GPU.
if "libtgemm_cuda.so" in _library.loaded:
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        x = torch.empty(3, 5, 33, dtype=torch.float16, device="cuda")
        y = torch_gemm.matmul(x, torch.empty(33, 17, dtype=torch.float16, device="cuda"))
        assert y.shape == (3, 5, 17) and y.device.type == "cuda" and y.dtype == torch.float16
    assert {"simt", "mma_sync"} <= {kernel["name"] for kernel in torch_gemm.kernels()}
else:
    print(_library.cuda_missing)
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Runs a command, visibly; ends the program if it fails."""
    print("+", *(str(word) if len(str(word)) < 200 else "..." for word in command), flush=True)
    if subprocess.run(command, cwd=cwd).returncode != 0:
        sys.exit("check_wheel: FAILED")


def require(condition: bool, sentence: str) -> None:
    """Ends the program with the sentence unless the condition holds."""
    if not condition:
        sys.exit(f"check_wheel: FAILED: {sentence}")


def build(folder: Path) -> Path:
    """A wheel of the source tree."""
    options = ["--no-build-isolation", "--no-deps"]
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_content(name: str, content: bytes) -> None:
    """No path of the machine that built it."""
    for private in {str(ROOT), sys.prefix, str(Path.home())} - {"/"}:
        require(private.encode() not in content, f"{name} mentions {private}")


def check_library(path: Path) -> None:
    """Its size, and what the dynamic linker will look for, and where."""
    size = path.stat().st_size
    print(f"{path.name}: {size / 1e6:.1f} MB")
    require(size < MAX_LIBRARY_BYTES, f"{path.name} is larger than {MAX_LIBRARY_BYTES / 1e6} MB")
    dynamic = subprocess.run(
        ["readelf", "-d", path], capture_output=True, text=True, check=True
    ).stdout
    for library in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        require(ALLOWED_LIBRARIES.fullmatch(library) is not None, f"{path.name} needs {library}")
    require("PATH)" not in dynamic, f"{path.name} has a run path")


def inspect(path: Path) -> None:
    """Checks the wheel's name, what is in it and what is not."""
    require(
        re.search(r"-py3-none-(manylinux|linux)\w*_(x86_64|aarch64)\.whl$", path.name) is not None,
        f"{path.name} is tagged for one Python, or for no platform",
    )
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        names = set(wheel.namelist())
        record = json.loads(wheel.read("torch_gemm/lib/build.json"))
        libraries = {"torch_gemm/lib/libtgemm.so"}
        if record["nvcc"] is not None:
            libraries.add("torch_gemm/lib/libtgemm_cuda.so")
        needed = {"torch_gemm/__init__.py", "torch_gemm/py.typed", *libraries}
        require(needed <= names, f"the wheel lacks {sorted(needed - names)}")
        binaries = {name for name in names if name.endswith(".so")}
        require(binaries == libraries, f"the wheel has other libraries: {sorted(binaries)}")
        require(
            any(re.fullmatch(r"[\w.-]+\.dist-info/licenses/LICENSE", name) for name in names),
            "the wheel has no licence",
        )
        strays = {n for n in names if not re.match(r"torch_gemm/|torch_gemm-[\w.]+\.dist-info/", n)}
        require(not strays, f"the wheel would install {sorted(strays)}")
        for name in sorted(names):
            check_content(name, wheel.read(name))
        for name in sorted(libraries):
            check_library(Path(wheel.extract(name, folder)))
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, built with {json.dumps(record)}")


def use(wheel: Path, python: str, torch: str | None, folder: Path) -> None:
    """Installs the wheel in a fresh environment and runs the smoke test there."""
    environment, elsewhere = folder / "venv", folder / "elsewhere"
    elsewhere.mkdir()
    run(python, "-m", "venv", environment)
    inside = environment / "bin" / "python"
    requirement = f"torch=={torch}" if torch else "torch>=2.10"
    run(
        inside,
        "-m",
        "pip",
        "install",
        "-q",
        requirement,
        "numpy",
        f"torch_gemm[cli] @ {wheel.as_uri()}",
    )
    run(inside, "-c", SMOKE_TEST, cwd=elsewhere)
    run(inside, "-m", "torch_gemm", "info", cwd=elsewhere)


def main() -> None:
    """Reads the command line and does all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="default: build one")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--torch", metavar="VERSION", help="default: the newest")
    parser.add_argument("--inspect-only", action="store_true", help="do not install the wheel")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = arguments.wheel.resolve() if arguments.wheel else build(folder)
        inspect(wheel)
        if not arguments.inspect_only:
            use(wheel, arguments.python, arguments.torch, folder)
    print("check_wheel: passed")


if __name__ == "__main__":
    main()
