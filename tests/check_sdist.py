"""Makes a source distribution, looks into it, and builds from it where there is no checkout.

    python tests/check_sdist.py --output dist      makes and inspects it
    python tests/check_sdist.py --build            also installs it in a fresh environment and runs the smoke test
    python tests/check_sdist.py --build --cuda     the same with the CUDA library (minutes; see TORCH_CUDA_ARCH_LIST)

Building needs a package index for torch (a large download), no GPU. Only the first part is in `make test`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from check_wheel import ROOT, SMOKE_TEST, require, run

# Tracked, and of no use without the repository.
LEFT_OUT = {".ci/run", ".gitignore"}
# Written by setuptools.
ADDED = {"PKG-INFO", "setup.cfg"}
MAX_BYTES = 3e6


def make(folder: Path) -> Path:
    """A source distribution of the tree, in `folder`."""
    with tempfile.TemporaryDirectory() as metadata:  # no list of files from an earlier run
        options = ["egg_info", "--egg-base", metadata, "sdist", "--dist-dir", str(folder)]
        finished = subprocess.run(
            [sys.executable, "setup.py", "-q", *options], cwd=ROOT, capture_output=True, text=True
        )
    require(finished.returncode == 0, finished.stderr)
    (sdist,) = folder.glob("torch_gemm-*.tar.gz")
    return sdist


def repository_files(*which: str) -> set[str] | None:
    """The files of the repository as `git ls-files` lists them, or None where there is no repository."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", *which], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def inspect(sdist: Path) -> None:
    """Checks that it holds the repository, the whole repository, and nothing but the repository."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        top = sdist.name.removesuffix(".tar.gz")
        for member in members:
            require(
                member.name == top or member.name.startswith(f"{top}/"),
                f"{member.name} would be unpacked beside {top}",
            )
            require(member.isfile() or member.isdir(), f"{member.name} is neither file nor folder")
        names = {member.name.removeprefix(f"{top}/") for member in members if member.isfile()}
        names = {name for name in names if ".egg-info/" not in name} - ADDED
        private = {str(ROOT), sys.prefix} - {"/"}
        for member in members:
            content = archive.extractfile(member).read() if member.isfile() else b""
            for path in private:
                require(path.encode() not in content, f"{member.name} mentions {path}")
    tracked = repository_files()
    if tracked is None:
        print("check_sdist: there is no repository to compare it with")
        tracked = {"LICENSE", "CMakeLists.txt", "setup.py", "csrc/ops/schemas.cpp"}
        strays = {name for name in names if name.startswith("torch_gemm/lib/")}
    else:
        strays = names - tracked - (repository_files("--others", "--exclude-standard") or set())
    missing = tracked - names - LEFT_OUT
    require(not missing, f"the sdist lacks {sorted(missing)}")
    require(not strays, f"the sdist has {sorted(strays)}")
    size = sdist.stat().st_size
    require(size < MAX_BYTES, f"{sdist.name} is larger than {MAX_BYTES / 1e6} MB")
    print(f"{sdist.name}: {len(names)} files, {size / 1e6:.2f} MB")


def use(sdist: Path, python: str, cuda: bool, folder: Path) -> None:
    """What a user does: an environment, `pip install`, a first call, in an empty folder."""
    environment, elsewhere = folder / "venv", folder / "elsewhere"
    elsewhere.mkdir()
    run(python, "-m", "venv", environment)
    inside = environment / "bin" / "python"
    if not cuda:
        os.environ["TGEMM_CPU_ONLY"] = "1"
    requirement = f"torch_gemm[cli] @ {sdist.as_uri()}"
    run(inside, "-m", "pip", "install", "-q", "numpy", requirement, cwd=elsewhere)
    run(inside, "-c", SMOKE_TEST, cwd=elsewhere)
    run(inside, "-m", "torch_gemm", "info", cwd=elsewhere)


def main() -> None:
    """Reads the command line and does all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="keep it in this folder")
    parser.add_argument("--build", action="store_true", help="install it in a fresh environment")
    parser.add_argument("--cuda", action="store_true", help="with the CUDA library")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist = make(folder)
        inspect(sdist)
        if arguments.output:
            arguments.output.mkdir(exist_ok=True)
            sdist = sdist.rename(arguments.output.resolve() / sdist.name)
        if arguments.build:
            use(sdist, arguments.python, arguments.cuda, folder)
    print("check_sdist: passed")


if __name__ == "__main__":
    main()
