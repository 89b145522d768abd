"""Builds the two libraries with CMake and Ninja; everything about them is in CMakeLists.txt.

Environment: TORCH_CUDA_ARCH_LIST ("9.0a" alone builds fastest), TGEMM_CPU_ONLY=1, MAX_JOBS, CMAKE_ARGS
(further arguments for CMake), CUDA_HOME or CUDACXX (which nvcc).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "cmake"


def find_program(name: str) -> str:
    """CMake and Ninja come as Python packages: look beside this Python first, then on PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        sys.exit(f"torch_gemm needs {name} to build: pip install {name}")
    return found


def cached_compiler_is_gone() -> bool:
    """True if the build folder was made for a compiler that has since been removed."""
    cache = BUILD / "CMakeCache.txt"
    if not cache.is_file():
        return False
    pattern = r"^CMAKE_(?:CXX|CUDA)_COMPILER:\w+=(.+)$"
    return any(shutil.which(path) is None for path in re.findall(pattern, cache.read_text(), re.M))


class CMakeBuild(build_ext):
    """Configures, builds and installs into the source tree (editable, --inplace) or the wheel."""

    def run(self) -> None:
        if shutil.which(os.environ.get("CXX", "c++")) is None:
            sys.exit("torch_gemm needs a C++20 compiler to build, and none was found: install g++.")
        cmake = find_program("cmake")
        configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja"]
        if cached_compiler_is_gone():
            configure.append("--fresh")
        configure += [
            f"-DCMAKE_MAKE_PROGRAM={find_program('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        in_place = self.inplace or self.editable_mode
        prefix = ROOT if in_place else Path(self.build_lib).resolve()
        for command in (
            [*configure, *shlex.split(os.environ.get("CMAKE_ARGS", ""))],
            [cmake, "--build", str(BUILD), "--target", "build_record", "--parallel", jobs],
            [
                cmake,
                "--install",
                str(BUILD),
                "--prefix",
                str(prefix),
                *([] if in_place else ["--strip"]),
            ],
        ):
            if subprocess.run(command, cwd=ROOT).returncode != 0:
                sys.exit(
                    f"torch_gemm could not be built; the command that failed: {shlex.join(command)}"
                )

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib) / "torch_gemm" / "lib"
        return [str(path) for path in folder.glob("*")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in lists them


class AnyPythonWheel(bdist_wheel):
    """The libraries use no Python ABI: one wheel per platform serves every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    # Makes setuptools treat the package as one with compiled code; CMakeBuild does the rest.
    ext_modules=[Extension("torch_gemm.lib.tgemm", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
