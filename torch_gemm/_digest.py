"""Which sources a library was built from.

Also run as a script by CMake, without torch and without the rest of the package:
``python _digest.py build.json.in csrc build.json`` adds the digest to the record of a build.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

SOURCE_SUFFIXES = {".cpp", ".cu", ".cuh", ".hpp"}
LIBRARY_FOLDER = Path(__file__).resolve().parent / "lib"


def csrc_digest(csrc: Path) -> str:
    """SHA-256 over the paths and contents of all source files below `csrc`, in sorted order."""
    digest = hashlib.sha256()
    for path in sorted(csrc.rglob("*"), key=lambda path: path.relative_to(csrc).as_posix()):
        if path.suffix in SOURCE_SUFFIXES:
            name = path.relative_to(csrc).as_posix().encode()
            content = path.read_bytes()
            # Lengths keep two different trees from hashing the same stream of bytes.
            digest.update(b"%d %s %d\n" % (len(name), name, len(content)))
            digest.update(content)
    return digest.hexdigest()


def source_digest() -> str | None:
    """Digest of the `csrc` folder beside the package, or None where only the package is installed."""
    csrc = Path(__file__).resolve().parent.parent / "csrc"
    return csrc_digest(csrc) if csrc.is_dir() else None


def build_record() -> dict[str, Any] | None:
    """What the installed libraries were built from and with, or None if nothing was built.

    Keys: ``torch``, ``nvcc`` (None for a CPU-only build), ``compiler``, ``build_type``,
    ``architectures`` (kernel family to list) and ``csrc_digest``.
    """
    path = LIBRARY_FOLDER / "build.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _write_record(template: Path, csrc: Path, output: Path) -> None:
    record = json.loads(template.read_text())
    record["csrc_digest"] = csrc_digest(csrc)
    text = json.dumps(record, indent=2) + "\n"
    # An unchanged file keeps its time stamp, and so everything that depends on it.
    if not output.is_file() or output.read_text() != text:
        output.write_text(text)


if __name__ == "__main__":
    _write_record(*map(Path, sys.argv[1:]))
