"""The C++ package: installed out of the build, it serves a program that knows nothing of torch or of the build.

On any machine: the program plans without a GPU. Where there is one, it also multiplies.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_gemm import _library

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cmake"
EXAMPLE = ROOT / "examples" / "cpp_gemm"
CONFIG = """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
find_package(tgemm {version} REQUIRED)
"""


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found, f"{name} is not installed"
    return found


def run(*command: str | Path, status: int = 0) -> str:
    finished = subprocess.run(command, capture_output=True, text=True)
    output = finished.stdout + finished.stderr
    assert finished.returncode == status, f"{' '.join(map(str, command))}\n{output}"
    return output


def cached(variable: str) -> str:
    found = re.search(rf"^{variable}:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.M)
    assert found, f"the build has no {variable}"
    return found[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An install tree, moved after it was made: nothing in it may know where it was."""
    if not (BUILD / "CMakeCache.txt").is_file():
        pytest.skip("C++ PACKAGE NOT CHECKED: there is no build/cmake; make build")
    if _library.cuda_missing is not None:
        pytest.skip(f"C++ PACKAGE NOT CHECKED: {_library.cuda_missing}")
    folder = tmp_path_factory.mktemp("cpp")
    run(tool("cmake"), "--build", BUILD, "--target", "tgemm_gemm")
    run(tool("cmake"), "--install", BUILD, "--component", "cpp", "--prefix", folder / "before")
    return (folder / "before").rename(folder / "prefix")


def configure(source: Path, build: Path, installed: Path, status: int = 0) -> str:
    """As a user would, with the toolkit that built the kernels."""
    return run(
        tool("cmake"),
        *("-S", source, "-B", build, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DCMAKE_PREFIX_PATH={installed}",
        f"-DCUDAToolkit_ROOT={Path(cached('CMAKE_CUDA_COMPILER')).parent.parent}",
        status=status,
    )


@pytest.fixture(scope="module")
def program(installed: Path) -> Path:
    build = installed.parent / "example"
    # Every warning is an error: the headers are compiled with a user's flags, too.
    source = shutil.copytree(EXAMPLE, installed.parent / "cpp_gemm")
    listing = source / "CMakeLists.txt"
    listing.write_text(
        listing.read_text()
        + "\ntarget_compile_options(cpp_gemm PRIVATE -Wall -Wextra -Wpedantic -Werror)\n"
    )
    configure(source, build, installed)
    run(tool("cmake"), "--build", build)
    return build / "cpp_gemm"


def test_what_is_installed(installed: Path) -> None:
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert files == {
        "include/tgemm/tgemm.hpp",
        "include/tgemm/gemm/device.hpp",
        "include/tgemm/gemm/plan.hpp",
        "include/tgemm/gemm/problem.hpp",
        "include/tgemm/gemm/validate.hpp",
        "lib/libtgemm_gemm.a",
        "lib/cmake/tgemm/tgemmConfig.cmake",
        "lib/cmake/tgemm/tgemmConfigVersion.cmake",
        "lib/cmake/tgemm/tgemmTargets.cmake",
        f"lib/cmake/tgemm/tgemmTargets-{cached('CMAKE_BUILD_TYPE').lower()}.cmake",
        "share/licenses/tgemm/LICENSE",
    }


def test_it_knows_no_place(installed: Path) -> None:
    places = {str(ROOT), str(ROOT.resolve()), sys.prefix, str(Path.home()), str(installed.parent)}
    for path in installed.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for place in places - {"/"}:
                assert place.encode() not in content, f"{path.name} mentions {place}"
            # Of torch there is nothing but the name of the licence's holders.
            if path.suffix in (".hpp", ".cmake"):
                assert b"torch/" not in content, path


def test_versions(installed: Path, tmp_path: Path) -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    consumer = tmp_path / "consumer"
    consumer.mkdir()
    listing = consumer / "CMakeLists.txt"
    listing.write_text(CONFIG.format(version=version))
    configure(consumer, tmp_path / "build", installed)
    listing.write_text(CONFIG.format(version="99"))
    text = configure(consumer, tmp_path / "build", installed, status=1)
    assert f"version: {version}" in text


def test_the_python_package_gets_none_of_it(tmp_path: Path, installed: Path) -> None:
    run(tool("cmake"), "--install", BUILD, "--prefix", tmp_path)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"build.json", "libtgemm.so", "libtgemm_cuda.so"}


def test_it_plans_without_a_gpu(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also where there is one
    text = run(program)
    assert text.startswith(
        "256x4096x4096 nt float16 -> float16, bias, gelu on NVIDIA H200 (described by hand)\n  sm90:"
    )
    assert re.search(r"^  skinny:\S+ +cannot run: it is made for fewer rows$", text, re.M)
    times = [float(us) for us in re.findall(r"^  \S+ +([\d.]+) us$", text, re.M)]
    assert len(times) > 10
    assert times == sorted(times)
    assert re.search(r"^not run: .+$", text, re.M)

    forced = run(program, "100", "200", "300", "simt:128x64_staged")
    assert "  simt:128x64_staged" in forced
    assert "mma_sync" not in forced


def test_bad_input_is_one_sentence(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for arguments, sentence in (
        (["1", "2"], "usage: cpp_gemm [M N K [KERNEL]]"),
        (["1", "2", "x"], '"x" is not a size from 1 to 1048576'),
        (["0", "2", "3"], '"0" is not a size from 1 to 1048576'),
        (["8", "8", "8", "cublas"], 'there is no kernel named "cublas"; the kernels are skinny, '),
        (["8", "8", "8", "simt:,"], 'force_kernel "simt:," is not of the form "kernel", '),
    ):
        text = run(program, *arguments, status=2)
        assert text.startswith(f"cpp_gemm: {sentence}")
        assert text.count("\n") == 1


@pytest.mark.gpu
def test_it_multiplies(program: Path) -> None:
    major, _ = torch.cuda.get_device_capability()
    kernels = ["", "simt:128x64_staged", *(["mma_sync:64x64,split_k=2"] if major >= 8 else [])]
    for shape in (("256", "4096", "4096"), ("3", "1000", "264"), ("77", "129", "33")):
        for kernel in kernels:
            if "mma_sync" in kernel and shape[2] == "33":
                continue  # copies whole 16-byte pieces
            text = run(program, *shape, *([kernel] if kernel else []))
            assert "checked against FP64" in text, text
