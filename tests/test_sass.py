"""The machine code in libtgemm_cuda.so: each kernel contains the instructions it is about, reads memory
in wide pieces, and keeps its registers to itself.

Needs no GPU. Compiling the right thing by accident into something slow is what this catches: a spilled
accumulator, a 128-bit load that became four, Tensor Cores that are not used.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pytest

import torch_gemm._digest as build

LIBRARY = build.LIBRARY_FOLDER / "libtgemm_cuda.so"

# A kernel's first lines, its instructions, and its resources as the tools print them.
_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)(.*)")
_TARGET = re.compile(r"0x([0-9a-f]+) ;")
_RESOURCES = re.compile(r"^\s*Function ([^\s:]+):")


@dataclass
class Kernel:
    """One kernel as compiled for one architecture."""

    name: str  # demangled, without its parameters
    architecture: str
    instructions: list[tuple[int, str]] = field(default_factory=list)  # address, name
    loops: list[tuple[int, int]] = field(default_factory=list)  # first and last address
    resources: dict[str, int] = field(default_factory=dict)

    def count(self, pattern: str) -> int:
        """How many instructions match the regular expression from their first letter on."""
        return len(self.where(pattern))

    def where(self, pattern: str) -> list[int]:
        """The addresses of those instructions."""
        matches = re.compile(pattern).match
        return [address for address, name in self.instructions if matches(name)]

    def in_main_loop(self, pattern: str) -> int:
        """How many of those instructions stand in the loop that multiplies most."""
        multiplies = self.where(r"HMMA\.") or self.where(r"FFMA\b")
        # Outer loops (over tiles) contain the main one and the epilogue's.
        inner = [
            (a, b)
            for a, b in self.loops
            if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in self.loops)
        ]
        if not inner:
            return 0
        first, last = max(inner, key=lambda loop: sum(loop[0] <= m <= loop[1] for m in multiplies))
        return sum(first <= address <= last for address in self.where(pattern))

    def __str__(self) -> str:
        return f"{self.name} for {self.architecture}"


def _tool(name: str) -> str:
    """Path of a CUDA binary tool: torch's Triton brings them where the toolkit lacks them."""
    triton = importlib.util.find_spec("triton")
    places = [Path(triton.origin).parent / "backends" / "nvidia" / "bin"] if triton else []
    places += [Path("/usr/local/cuda/bin")]
    for place in places:
        if (place / name).is_file():
            return str(place / name)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"SASS NOT CHECKED: {name} is neither in triton nor in a CUDA toolkit")
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _demangle(names: list[str]) -> dict[str, str]:
    demangled = subprocess.run(
        ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return dict(zip(names, demangled.stdout.splitlines(), strict=True))


def _read_architecture(architecture: str) -> list[Kernel]:
    """All kernels of the library as compiled for one architecture."""
    dump = [_tool("cuobjdump"), "-arch", architecture]
    kernels: dict[str, Kernel] = {}
    kernel = None
    for line in _output(*dump, "-sass", str(LIBRARY)).splitlines():
        if match := _INSTRUCTION.match(line):
            assert kernel is not None, line
            if "@!PT" in line:  # never executed: ptxas pads copies that follow reads with such ones
                continue
            address = int(match[1], 16)
            kernel.instructions.append((address, match[2]))
            if match[2].startswith("BRA") and (target := _TARGET.search(match[3])):
                start = int(target[1], 16)
                # Behind the last instruction stands a branch to itself.
                if start < address:
                    kernel.loops.append((start, address))
        elif match := _FUNCTION.match(line):
            kernel = kernels[match[1]] = Kernel(match[1], architecture)
    for line in _output(*dump, "-res-usage", str(LIBRARY)).splitlines():
        if match := _RESOURCES.match(line):
            kernel = kernels.get(match[1])
        elif kernel is not None and "REG:" in line:
            kernel.resources.update((k, int(v)) for k, v in re.findall(r"([A-Z]+):(\d+)", line))
            kernel = None
    names = _demangle(list(kernels))
    for kernel in kernels.values():
        kernel.name = names[kernel.name]
    return list(kernels.values())


def _read_kernels() -> list[Kernel]:
    _tool("nvdisasm")  # cuobjdump calls it by name
    listing = _output(_tool("cuobjdump"), "-lelf", str(LIBRARY))
    architectures = sorted(set(re.findall(r"\.(sm_\d+\w*)\.cubin", listing)))
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(chain.from_iterable(pool.map(_read_architecture, architectures)))


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    if not LIBRARY.is_file():
        pytest.skip(f"SASS NOT CHECKED: {LIBRARY.name} is not built (no nvcc, or TGEMM_CPU_ONLY)")
    kernels = _read_kernels()
    assert kernels, f"{LIBRARY} contains no machine code"
    return kernels


def _named(kernels: list[Kernel], word: str) -> list[Kernel]:
    found = [kernel for kernel in kernels if word in kernel.name]
    assert found, f"no kernel is called {word}: {sorted({kernel.name for kernel in kernels})}"
    return found


def _report(lines: Iterator[str]) -> None:
    complaints = list(lines)
    assert not complaints, "\n".join(["", *complaints])


def test_every_architecture_of_the_build_is_there(kernels: list[Kernel]) -> None:
    record = build.build_record()
    assert record is not None
    asked = {code for codes in record["architectures"].values() for code in codes}
    compiled = {kernel.architecture for kernel in kernels}
    assert compiled == {code for code in asked if code.startswith("sm_")}


def test_libraries_were_built_from_these_sources() -> None:
    record = build.build_record()
    if record is None:
        pytest.skip("BUILD NOT CHECKED: torch_gemm/lib is empty")
    if (digest := build.source_digest()) is not None:
        assert record["csrc_digest"] == digest, "csrc/ has changed since the last `make build`"


def test_no_kernel_spills(kernels: list[Kernel]) -> None:
    def complaints() -> Iterator[str]:
        for kernel in kernels:
            spills, hot = kernel.count(r"(STL|LDL)\b"), kernel.in_main_loop(r"(STL|LDL)\b")
            stack, local = kernel.resources["STACK"], kernel.resources["LOCAL"]
            if spills or stack or local:
                yield (
                    f"{kernel}: {spills} loads and stores of spilled registers ({hot} in the main "
                    f"loop), {stack + local} bytes"
                )

    _report(complaints())


def test_mma_sync_is_what_it_says(kernels: list[Kernel]) -> None:
    """Tensor Cores, fed by ldmatrix; the pipelined configurations by 16-byte asynchronous copies."""

    def complaints() -> Iterator[str]:
        for kernel in _named(kernels, "mma_sync"):
            # HMMA with the dot: HFMA2.MMA is a move.
            if not kernel.count(r"HMMA\.(16816|1688)"):
                yield f"{kernel}: no HMMA"
            # ldmatrix transposes 16-bit elements only: TF32 reads MN-major operands one by one.
            tf32 = kernel.count(r"HMMA\.1688\.F32\.TF32")
            if not tf32 and not kernel.count(r"LDSM\.16\.MT?88\.[24]"):
                yield f"{kernel}: no LDSM that reads more than one 8x8 matrix"
            if "staged" in kernel.name.lower():
                continue
            copies = kernel.count(r"LDGSTS\.")
            wide = kernel.count(r"LDGSTS\.E\.(?:\w+\.)*128")
            if not copies or wide != copies:
                yield f"{kernel}: {wide} of {copies} asynchronous copies (LDGSTS) are 128 bits wide"

    _report(complaints())


def test_mma_sync_multiplies_in_the_type_it_is_named_for(kernels: list[Kernel]) -> None:
    found = _named(kernels, "mma_sync")
    seen = {
        kind
        for kernel in found
        for kind, pattern in {
            "fp16": r"HMMA\.16816\.F32$",
            "bf16": r"HMMA\.16816\.F32\.BF16",
            "tf32": r"HMMA\.1688\.F32\.TF32",
        }.items()
        if kernel.count(pattern)
    }
    assert seen == {"fp16", "bf16", "tf32"}
    # Never FP16 accumulation.
    _report(f"{k}: accumulates in FP16" for k in found if k.count(r"HMMA\.\d+\.F16"))


def test_simt_is_what_it_says(kernels: list[Kernel]) -> None:
    """FP32 multiply-adds, each main loop fed by 128-bit reads of shared memory alone."""

    def complaints() -> Iterator[str]:
        for kernel in _named(kernels, "simt"):
            if kernel.architecture == "sm_75" and not kernel.count(r"FFMA\b"):
                continue  # the cp.async configurations are empty there, and rejected on the host
            if kernel.count(r"HMMA\."):
                yield f"{kernel}: uses Tensor Cores"
            multiplies, reads = kernel.in_main_loop(r"FFMA\b"), kernel.in_main_loop(r"LDS(\.|$)")
            wide_reads = kernel.in_main_loop(r"LDS\.(?:\w+\.)*128")
            if not reads or multiplies < 4 * reads:
                yield f"{kernel}: {multiplies} FFMA for {reads} reads of shared memory in the main loop"
            if wide_reads != reads:
                yield f"{kernel}: {wide_reads} of {reads} LDS in the main loop are 128 bits wide"

    _report(complaints())


def test_simt_loads_128_bits_where_the_layout_allows(kernels: list[Kernel]) -> None:
    wide = r"LDGSTS\.E\.(?:\w+\.)*128|LDG\.E\.(?:\w+\.)*128"
    for architecture in sorted({kernel.architecture for kernel in kernels}):
        if architecture == "sm_75":
            continue  # without cp.async only the element-wise copies are compiled
        found = [k for k in _named(kernels, "simt") if k.architecture == architecture]
        assert any(kernel.count(wide) for kernel in found), f"none for {architecture}"
