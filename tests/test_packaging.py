"""What is handed out: the source distribution holds the repository, and the checks of it can fail.

Building from it, and wheels: `make check-sdist`, `make check-wheel`.
"""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import check_sdist
import check_wheel
import pytest

from torch_gemm import _library

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return check_sdist.make(tmp_path_factory.mktemp("sdist"))


def test_sdist_holds_the_repository(sdist: Path) -> None:
    check_sdist.inspect(sdist)


def test_metadata_and_licence(sdist: Path) -> None:
    top = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        metadata = archive.extractfile(f"{top}/PKG-INFO").read().decode()
        licence = archive.extractfile(f"{top}/LICENSE").read()
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f"\nVersion: {version}\n" in metadata
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata
    assert licence == (ROOT / "LICENSE").read_bytes()
    # Installing brings torch and nothing else.
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    assert [name for name in required if "extra ==" not in name] == ["torch>=2.10"]


LIBRARIES = sorted(_library.LIBRARY_DIR.glob("*.so"))


@pytest.mark.parametrize("library", LIBRARIES, ids=[path.name for path in LIBRARIES])
def test_built_libraries(library: Path) -> None:
    """What of a wheel can be checked without making one."""
    check_wheel.check_library(library)
    check_wheel.check_content(library.name, library.read_bytes())


@pytest.mark.skipif(not LIBRARIES, reason="nothing is built")
def test_a_bad_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"mentions"):
        check_wheel.check_content("lib.so", f"...{ROOT}/csrc".encode())
    monkeypatch.setattr(check_wheel, "MAX_LIBRARY_BYTES", 1000)
    with pytest.raises(SystemExit, match=r"is larger than"):
        check_wheel.check_library(LIBRARIES[0])
    monkeypatch.undo()
    monkeypatch.setattr(check_wheel, "ALLOWED_LIBRARIES", re.compile("libc.so.6"))
    with pytest.raises(SystemExit, match=r"needs lib"):
        check_wheel.check_library(LIBRARIES[0])


def test_version_of_the_changelog() -> None:
    """Its newest heading is the version to come, or the one that pyproject.toml names."""
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert heading == "Unreleased" or heading.startswith(f"{version} ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"csrc/ops/schemas.cpp": None}, r"the sdist lacks \['csrc/ops/schemas.cpp'\]"),
        ({"torch_gemm/lib/libtgemm.so": b""}, r"the sdist has \['torch_gemm/lib/libtgemm.so'\]"),
        ({"README.md": str(ROOT).encode()}, "README.md mentions"),
        ({"../beside": b""}, "would be unpacked beside"),
        ({"docs/large.md": b""}, "the sdist has"),
    ],
)
def test_what_does_not_belong_is_found(
    sdist: Path, tmp_path: Path, change: dict[str, bytes | None], sentence: str
) -> None:
    if check_sdist.repository_files() is None and "docs" in "".join(change):
        pytest.skip("there is no repository to compare it with")
    top = sdist.name.removesuffix(".tar.gz")
    changed = {
        name.removeprefix("../") if name.startswith("../") else f"{top}/{name}": content
        for name, content in change.items()
    }
    path = tmp_path / sdist.name
    with tarfile.open(sdist) as old, tarfile.open(path, "w:gz") as new:
        for member in old.getmembers():
            if member.name not in changed:
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
        for name, content in changed.items():
            if content is not None:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                new.addfile(member, io.BytesIO(content))
    with pytest.raises(SystemExit, match=sentence):
        check_sdist.inspect(path)
