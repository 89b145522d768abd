"""Loading: what import does and does not do, and the sentences when something is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import torch_gemm
from torch_gemm import _library

PACKAGE = Path(torch_gemm.__file__).parent


def run_python(code: str, path: Path = PACKAGE.parent) -> str:
    """Runs `code` in a fresh interpreter that imports torch_gemm from `path`; returns its output."""
    finished = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(path)!r})\n{textwrap.dedent(code)}",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=path,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.fixture
def copy_of_package(tmp_path: Path) -> Path:
    """A copy of the package, to break; returns the folder to import it from."""
    shutil.copytree(PACKAGE, tmp_path / "torch_gemm", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


TRY_IMPORT = """
    try:
        import torch_gemm
        print("imported")
    except ImportError as error:
        print(error)
"""


def test_import_initialises_nothing():
    out = run_python(
        """
        import sys
        import torch
        aten_before = torch.ops.aten.mm.default
        import torch_gemm
        assert not torch.cuda.is_initialized()
        assert "transformers" not in sys.modules
        assert "torch._dynamo" not in sys.modules, "importing dynamo takes seconds"
        maps = open("/proc/self/maps").read()
        print("libcuda.so" in maps)
        """
    )
    # Only a driver that torch itself loaded may be there.
    alone = run_python("import torch; print('libcuda.so' in open('/proc/self/maps').read())")
    assert out == alone


def test_fork_after_import_works():
    out = run_python(
        """
        import os
        import torch
        import torch_gemm
        child = os.fork()
        if child == 0:
            ok = torch.equal(torch_gemm.matmul(torch.eye(3), torch.eye(3)), torch.eye(3))
            os._exit(0 if ok else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert out == "0"


def test_missing_library(copy_of_package):
    shutil.rmtree(copy_of_package / "torch_gemm" / "lib")
    path = copy_of_package / "torch_gemm" / "lib" / "libtgemm.so"
    assert run_python(TRY_IMPORT, copy_of_package) == (
        f"torch_gemm's library libtgemm.so is not built: there is no {path}; build it with "
        "`pip install .` in the source tree."
    )


def test_broken_library(copy_of_package):
    path = copy_of_package / "torch_gemm" / "lib" / "libtgemm.so"
    path.unlink()
    path.write_bytes(b"not a library")
    out = run_python(TRY_IMPORT, copy_of_package)
    assert out.startswith(f"torch_gemm's library {path} could not be loaded: ")
    assert "\n" not in out


def test_undefined_symbol(copy_of_package, tmp_path):
    source, library = tmp_path / "library.c", copy_of_package / "torch_gemm" / "lib" / "libtgemm.so"
    source.write_text("void missing_in_torch(void); void entry(void) { missing_in_torch(); }\n")
    library.unlink()
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler to make a library with an undefined symbol")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-z,now", "-o", str(library), str(source)], check=True
    )
    assert run_python(TRY_IMPORT, copy_of_package) == (
        f"torch_gemm's library {library} does not fit torch {torch.__version__}, which has no "
        "symbol missing_in_torch; reinstall torch_gemm."
    )


def test_old_torch():
    out = run_python(
        "import torch; torch.__version__ = '2.9.1+cu128'\n" + textwrap.dedent(TRY_IMPORT)
    )
    assert out == "torch_gemm needs torch 2.10 or newer; this is torch 2.9.1+cu128."


CPU_PATH = """
    import json
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    import torch_gemm
    assert torch.equal(torch_gemm.matmul(torch.eye(3), torch.eye(3)), torch.eye(3))
    torch_gemm.reset_stats()
    torch_gemm.set_fallback("error")
    assert torch_gemm.stats() == {"kernels": {}, "fallbacks": {}}
    sentences = [torch_gemm._library.cuda_missing]
    try:
        torch_gemm.kernels()
    except RuntimeError as error:
        sentences.append(str(error))
    # The CUDA kernel itself, which needs no CUDA tensor to say that it is not there.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    try:
        torch.ops.tgemm.matmul.default.redispatch(keys, torch.eye(3), torch.eye(3))
    except RuntimeError as error:
        sentences.append(str(error))
    print(json.dumps(sentences))
"""


def test_torch_without_cuda():
    sentences = json.loads(
        run_python("import torch; torch.version.cuda = None\n" + textwrap.dedent(CPU_PATH))
    )
    expected = (
        f"tgemm runs on the CPU only here: torch {torch.__version__} is built without CUDA, "
        "so the CUDA kernels were not loaded."
    )
    assert sentences == [expected] * 3


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_build_without_cuda(copy_of_package):
    path = copy_of_package / "torch_gemm" / "lib" / "libtgemm_cuda.so"
    path.unlink(missing_ok=True)
    sentences = json.loads(run_python(CPU_PATH, copy_of_package))
    expected = (
        "tgemm runs on the CPU only here: torch_gemm was built without its CUDA library "
        f"({path}); build it again where nvcc is found."
    )
    assert sentences == [expected] * 3


def test_loaded_libraries_are_recorded():
    assert _library.loaded["libtgemm.so"] == PACKAGE / "lib" / "libtgemm.so"
    assert ("libtgemm_cuda.so" in _library.loaded) == (_library.cuda_missing is None)


needs_cuda_library = pytest.mark.skipif(
    _library.cuda_missing is not None, reason=str(_library.cuda_missing)
)


@needs_cuda_library
def test_kernels_are_listed_without_a_gpu():
    families = torch_gemm.kernels()
    assert {"simt", "mma_sync"} <= {family["name"] for family in families}
    for family in families:
        assert family["description"]
        assert isinstance(family["automatic"], bool)
        assert isinstance(family["splits_k"], bool)
        for config in family["configs"]:
            assert config["threads"] % 32 == 0
            assert min(config["block_m"], config["block_n"], config["block_k"]) >= 1
            assert config["shared_memory_bytes"] >= 0


@needs_cuda_library
def test_stats_and_policy_without_a_gpu():
    torch_gemm.reset_stats()
    assert torch_gemm.stats() == {"kernels": {}, "fallbacks": {}}
    for policy in ("allow", "error", "warn"):
        torch_gemm.set_fallback(policy)
    with pytest.raises(RuntimeError) as caught:
        torch.ops.tgemm._set_fallback("never")
    assert str(caught.value) == (
        "tgemm: the fallback policy 'never' is unknown; use allow, warn or error"
    )


@needs_cuda_library
@pytest.mark.parametrize("index", [-1, 2**31, 10**12])
def test_a_device_index_that_cannot_be(index):
    with pytest.raises(RuntimeError) as caught:
        torch.ops.tgemm._device(index)
    assert str(caught.value) == f"tgemm: no CUDA device has index {index}"


@needs_cuda_library
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_first_cuda_call_without_a_gpu_says_so():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=r"^tgemm: [^\n]*$"):
        torch.ops.tgemm._device(0)
    with pytest.raises(RuntimeError, match=r"^tgemm[^\n]*$"):
        torch.ops.tgemm.matmul.default.redispatch(keys, torch.eye(3), torch.eye(3))
    assert torch.equal(torch_gemm.matmul(torch.eye(3), torch.eye(3)), torch.eye(3))


def test_version():
    assert torch_gemm.__version__.split(".")[0].split("+")[0].isdigit()
