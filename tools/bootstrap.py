"""Makes the virtual environment that `make` works in: torch, CMake, Ninja and, if need be, nvcc.

    python3 tools/bootstrap.py .venv

Needs Python 3.10, g++ and a package index, nothing else. Running it again only adds what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What the interpreter inside the environment is asked, without importing torch (which takes seconds).
ASK_ENVIRONMENT = """
import importlib.metadata as metadata, importlib.util as util, pathlib, re
folder = pathlib.Path(util.find_spec("torch").submodule_search_locations[0])
cuda = re.search(r"^cuda.*= *'([^']*)'", (folder / "version.py").read_text(), re.M)
runtime = [d.version for d in metadata.distributions(name="nvidia-cuda-runtime")]
nvcc = folder.parent / "nvidia" / "cu13" / "bin" / "nvcc"
print(metadata.version("torch"), cuda and cuda[1], runtime[0] if runtime else None, nvcc, sep="\\n")
"""


def say(message: str) -> None:
    """Prints one line about what happens next."""
    print(f"[setup] {message}", flush=True)


def run(*command: str | Path) -> None:
    """Runs a command, visibly; ends the program if it fails."""
    if subprocess.run(command).returncode != 0:
        words = " ".join(map(str, command))
        sys.exit(f"[setup] this failed: {words}")


def check_machine() -> None:
    """Ends the program with one sentence if the machine lacks what cannot be installed from here."""
    if sys.version_info < (3, 10):  # noqa: UP036 - also run by the Python that happens to be there
        sys.exit(
            f"[setup] Python {sys.version.split()[0]} is too old: Python 3.10 or newer is needed."
        )
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            "[setup] this Python cannot make virtual environments: install its venv module "
            "(on Debian and Ubuntu: apt-get install python3-venv)."
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        sys.exit(
            f"[setup] no C++ compiler ({compiler}) was found, and torch_gemm is compiled here: install "
            "g++ (on Debian and Ubuntu: apt-get install g++)."
        )


def build_requirements() -> list[str]:
    """The packages that pyproject.toml names for building."""
    text = (ROOT / "pyproject.toml").read_text()
    table = re.search(r"^\[build-system\].*?^requires = \[(.*?)\]$", text, re.M | re.S)
    assert table, "pyproject.toml has no build-system.requires"
    return re.findall(r'"([^"]+)"', table[1])


def installed_nvcc() -> str | None:
    """Path of an nvcc that CMakeLists.txt will find by itself."""
    if "CUDACXX" in os.environ:
        return os.environ["CUDACXX"]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [f"{home}/bin" for home in homes if home]
    return shutil.which("nvcc", path=os.pathsep.join([*places, os.environ.get("PATH", "")]))


def provide_nvcc(python: Path) -> None:
    """Installs nvcc beside torch, unless the machine has one or wants none."""
    if os.environ.get("TGEMM_CPU_ONLY", "").lower() in {"1", "on", "true", "yes"}:
        return say("TGEMM_CPU_ONLY is set: only the CPU library will be built.")
    answer = subprocess.run(
        [python, "-c", ASK_ENVIRONMENT], capture_output=True, text=True, check=True
    )
    torch, cuda, runtime, packaged_nvcc = answer.stdout.split("\n")[:4]
    if cuda == "None":
        return say(f"torch {torch} has no CUDA: only the CPU library will be built.")
    if found := installed_nvcc():
        return say(f"nvcc: {found}")
    if runtime == "None" or int(cuda.split(".")[0]) < 13:
        return say(
            f"no nvcc was found, and there is none to install beside torch {torch} (CUDA {cuda}): only "
            "the CPU library will be built. For the CUDA library install a CUDA toolkit."
        )
    # All three of one minor version, that of torch's CUDA runtime: left alone, pip combines an nvvm
    # whose PTX is newer than what ptxas accepts.
    minor = ".".join(runtime.split(".")[:2])
    say(f"no CUDA toolkit was found: installing nvcc {minor} beside torch {torch}")
    names = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt"]
    run(python, "-m", "pip", "install", "-q", *(f"{name}=={minor}.*" for name in names))
    run(packaged_nvcc, "--version")
    return None


def main() -> None:
    """Creates or completes the environment named on the command line."""
    check_machine()
    environment = Path(sys.argv[1])
    python = environment / "bin" / "python"
    if not python.exists():
        say(f"Python {sys.version.split()[0]}: making the virtual environment {environment}")
        run(sys.executable, "-m", "venv", environment)
    requirements = build_requirements()
    say(f"installing {', '.join(requirements)} (torch is a large download the first time)")
    run(python, "-m", "pip", "install", "--disable-pip-version-check", *requirements)
    provide_nvcc(python)


if __name__ == "__main__":
    main()
