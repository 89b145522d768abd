"""The machine code in libtgemm_cuda.so: each kernel contains the instructions it is about, reads memory
in wide pieces, and keeps its registers to itself.

Needs no GPU. Compiling the right thing by accident into something slow is what this catches: a spilled
accumulator, a 128-bit load that became four, Tensor Cores that are not used.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pytest
import torch

import torch_gemm._digest as build
from torch_gemm import _library

LIBRARY = build.LIBRARY_FOLDER / "libtgemm_cuda.so"

# A kernel's first lines, its instructions, and its resources as the tools print them.
_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)(.*)")
_TARGET = re.compile(r"0x([0-9a-f]+) ;")
_RESOURCES = re.compile(r"^\s*Function ([^\s:]+):")
_ARCHITECTURE = re.compile(r"^arch = (sm_\w+)")


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

    def is_empty(self) -> bool:
        """Whether only the name was compiled: the host refuses to run it on this architecture."""
        return not self.count(r"STG\b")

    def in_main_loop(self, pattern: str) -> int:
        """How many of those instructions stand in the innermost loop that multiplies most."""
        return self._within(self._main_loop(), pattern)

    def in_k_loop(self, pattern: str) -> int:
        """How many stand in the loop over K: the main loop with what surrounds it, copies mostly."""
        main = self._main_loop()
        return self._within(self._k_loop(main), pattern) if main else 0

    def around_main_loop(self, pattern: str) -> tuple[int, int]:
        """How many stand in the loop over K before the main loop, and how many behind it."""
        main = self._main_loop()
        if main is None:
            return 0, 0
        first, last = self._k_loop(main)
        before, after = (first, main[0] - 1), (main[1] + 1, last)
        return self._within(before, pattern), self._within(after, pattern)

    def calls_in_a_loop(self) -> int:
        """The most calls of subroutines in any loop of the multiplication."""
        return max((self._within(loop, r"CALL\b") for loop in self._loops_over_k()), default=0)

    def _main_loop(self) -> tuple[int, int] | None:
        multiplies = r"HGMMA\." if self.count(r"HGMMA\.") else r"HMMA\."
        if not self.count(multiplies):
            multiplies = r"FFMA\b"
        return max(
            self._loops_over_k(),
            key=lambda loop: (self._within(loop, multiplies), -_length(loop)),
            default=None,
        )

    def _k_loop(self, main: tuple[int, int]) -> tuple[int, int]:
        around = [loop for loop in self._loops_over_k() if _covers(loop, main)]
        return max(around, key=_length)

    def _loops_over_k(self) -> list[tuple[int, int]]:
        # The loop over tiles divides (to find its tile) and applies activations, and both need
        # reciprocals or exponentials (MUFU): so do the epilogue's own loops.
        return [loop for loop in self.loops if not self._within(loop, r"MUFU\b")]

    def _within(self, loop: tuple[int, int] | None, pattern: str) -> int:
        if loop is None:
            return 0
        return sum(loop[0] <= address <= loop[1] for address in self.where(pattern))

    def __str__(self) -> str:
        return f"{self.name} for {self.architecture}"


def _covers(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _length(loop: tuple[int, int]) -> int:
    return loop[1] - loop[0]


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


def _of_architecture(architecture: str, dump: str) -> Iterator[str]:
    """The lines of a dump that are about one architecture: asked for sm_90, cuobjdump adds sm_90a."""
    shown = None
    for line in dump.splitlines():
        if match := _ARCHITECTURE.match(line):
            shown = match[1]
        elif shown == architecture:
            yield line


def _read_architecture(architecture: str) -> list[Kernel]:
    """All kernels of the library as compiled for one architecture."""
    dump = [_tool("cuobjdump"), "-arch", architecture]
    kernels: dict[str, Kernel] = {}
    kernel = None
    for line in _of_architecture(architecture, _output(*dump, "-sass", str(LIBRARY))):
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
    for line in _of_architecture(architecture, _output(*dump, "-res-usage", str(LIBRARY))):
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


def _named(kernels: list[Kernel], family: str) -> list[Kernel]:
    """The kernels whose own name, without namespaces and template arguments, begins so."""
    own = [kernel.name.partition("<")[0].rpartition("::")[2] for kernel in kernels]
    found = [kernel for kernel, name in zip(kernels, own, strict=True) if name.startswith(family)]
    assert found, f"no kernel is called {family}: {sorted(set(own))}"
    return found


def _rung(kernels: list[Kernel], name: str, arguments: str = ".*") -> list[Kernel]:
    """The instances of a kernel of the ladder whose template arguments match, without empty ones."""
    pattern = re.compile(rf"tgemm::ladder::{name}<{arguments}>")
    found = [kernel for kernel in kernels if pattern.fullmatch(kernel.name)]
    assert found, f"no kernel is called {pattern.pattern}"
    return [kernel for kernel in found if not kernel.is_empty()]


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
            size = kernel.resources["STACK"] + kernel.resources["LOCAL"]
            if spills or size:
                yield (
                    f"{kernel}: {spills} loads and stores of spilled registers ({hot} in the main "
                    f"loop), {size} bytes"
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
    """FP32 multiply-adds, each main loop fed by 128-bit reads of shared memory alone: but that of 64x64 tiles,
    of which ptxas splits one read in some builds, and not in others of the same sources.
    """

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
            split_reads = 1 if "CtaTile<64, 64," in kernel.name else 0
            if wide_reads < reads - split_reads:
                yield f"{kernel}: {wide_reads} of {reads} LDS in the main loop are 128 bits wide"

    _report(complaints())


def test_simt_loads_128_bits_where_the_layout_allows(kernels: list[Kernel]) -> None:
    wide = r"LDGSTS\.E\.(?:\w+\.)*128|LDG\.E\.(?:\w+\.)*128"
    simt = _named(kernels, "simt")
    for architecture in sorted({kernel.architecture for kernel in simt}):
        if architecture == "sm_75":
            continue  # without cp.async only the element-wise copies are compiled
        found = [kernel for kernel in simt if kernel.architecture == architecture]
        assert any(kernel.count(wide) for kernel in found), f"none for {architecture}"


# --- The ladder: each rung has the instructions that it is there to show, and not those of later ones.

TENSOR_CORES = r"(HMMA|IMMA|HGMMA)\."
FFMA = r"FFMA\b"
GLOBAL_LOAD = r"LDG\."
WIDE_GLOBAL_LOAD = r"LDG\.E\.(?:\w+\.)*128"
SHARED_LOAD = r"LDS(\.|$)"
WIDE_SHARED_LOAD = r"LDS\.(?:\w+\.)*128"
SHARED_STORE = r"STS\b"
WIDE_SHARED_STORE = r"STS\.(?:\w+\.)*128"
BARRIER = r"BAR\.SYNC"


def test_only_bf16_wmma_before_compute_capability_80_is_empty(kernels: list[Kernel]) -> None:
    def complaints() -> Iterator[str]:
        for kernel in kernels:
            if "::ladder::" not in kernel.name:
                continue
            refused = (
                kernel.architecture == "sm_75"
                and "wmma" in kernel.name
                and "__nv_bfloat16" in kernel.name
            )
            if kernel.is_empty() != refused:
                yield f"{kernel}: {'not ' if refused else ''}empty"

    _report(complaints())


def test_naive_reads_global_memory_alone(kernels: list[Kernel]) -> None:
    def complaints() -> Iterator[str]:
        for kernel in _rung(kernels, "naive"):
            if kernel.count(TENSOR_CORES):
                yield f"{kernel}: uses Tensor Cores"
            multiplies, loads = kernel.in_main_loop(FFMA), kernel.in_main_loop(GLOBAL_LOAD)
            if not multiplies or loads != 2 * multiplies:
                yield f"{kernel}: {loads} global loads for {multiplies} FFMA in the main loop"
            if kernel.in_k_loop(rf"LDSM|{SHARED_LOAD}|{SHARED_STORE}|{BARRIER}"):
                yield f"{kernel}: shared memory or barriers in the main loop"

    _report(complaints())


@pytest.mark.parametrize("name", ["tiled", "tiled_padded"])
def test_tiled_multiplies_from_shared_memory(kernels: list[Kernel], name: str) -> None:
    def complaints() -> Iterator[str]:
        for kernel in _rung(kernels, name):
            if kernel.count(TENSOR_CORES):
                yield f"{kernel}: uses Tensor Cores"
            if not kernel.in_main_loop(FFMA) or not kernel.in_main_loop(SHARED_LOAD):
                yield f"{kernel}: no FFMA, or no LDS, in the main loop"
            if kernel.in_main_loop(GLOBAL_LOAD):
                yield f"{kernel}: reads global memory where it multiplies"
            if not kernel.in_k_loop(GLOBAL_LOAD) or not kernel.in_k_loop(SHARED_STORE):
                yield f"{kernel}: no LDG, or no STS, in the loop over K"
            if kernel.in_k_loop(BARRIER) != 2:
                yield f"{kernel}: {kernel.in_k_loop(BARRIER)} barriers in the loop over K"

    _report(complaints())


def test_tiled_padded_differs_in_its_pitch_alone(kernels: list[Kernel]) -> None:
    """Two tiles of 32 rows of 32 floats, and of 33."""

    def complaints() -> Iterator[str]:
        padded = {
            (kernel.name, kernel.architecture): kernel for kernel in _rung(kernels, "tiled_padded")
        }
        for kernel in _rung(kernels, "tiled"):
            twin = padded[kernel.name.replace("tiled<", "tiled_padded<"), kernel.architecture]
            for pattern in (FFMA, GLOBAL_LOAD, SHARED_LOAD, SHARED_STORE, BARRIER):
                counts = [
                    (k.count(pattern), k.in_k_loop(pattern), k.in_main_loop(pattern))
                    for k in (kernel, twin)
                ]
                if counts[0] != counts[1]:
                    yield f"{kernel}: {counts[0]} times {pattern}, {counts[1]} with padding"
            plain, more = kernel.resources["SHARED"], twin.resources["SHARED"]
            # Besides tiles: the Tile record, and 1 KiB that cards from 9.0 on reserve.
            if not 2 * 32 * 32 * 4 <= plain < 2 * 32 * 32 * 4 + 2048:
                yield f"{kernel}: {plain} bytes of shared memory"
            if more - plain != 2 * 32 * 4:
                yield f"{twin}: {more - plain} bytes of padding"

    _report(complaints())


@pytest.mark.parametrize("wide", [True, False])
def test_tiled_vectorized_loads_128_bits(kernels: list[Kernel], wide: bool) -> None:
    def complaints() -> Iterator[str]:
        for kernel in _rung(kernels, "tiled_vectorized", f".*, {str(wide).lower()}"):
            if kernel.count(TENSOR_CORES):
                yield f"{kernel}: uses Tensor Cores"
            # 64 multiply-adds for 16 numbers, which are four loads.
            multiplies = kernel.in_main_loop(FFMA)
            shared_loads = kernel.in_main_loop(WIDE_SHARED_LOAD)
            if not multiplies or multiplies != 16 * shared_loads:
                yield f"{kernel}: {multiplies} FFMA for {shared_loads} LDS.128 in the main loop"
            # A and B, each contiguous along K or not.
            loads = kernel.in_k_loop(WIDE_GLOBAL_LOAD)
            if wide and loads < 4:
                yield f"{kernel}: {loads} global loads of 128 bits in the loop over K"
            if not wide and loads:
                yield f"{kernel}: {loads} global loads of 128 bits in the loop over K, where none belong"

    _report(complaints())


def test_wmma_multiplies_from_global_memory(kernels: list[Kernel]) -> None:
    def complaints() -> Iterator[str]:
        for kernel in _rung(kernels, "wmma_global"):
            if not kernel.in_main_loop(r"HMMA\.") or not kernel.in_main_loop(GLOBAL_LOAD):
                yield f"{kernel}: no HMMA, or no LDG, in the main loop"
            # Operands that cannot be read directly pass through shared memory element by element,
            # within a warp. Tiles would be stored in wide pieces, and shared across barriers.
            stores = kernel.in_k_loop(SHARED_STORE)
            if stores != kernel.in_k_loop(r"STS\.U16$") or kernel.in_k_loop(BARRIER):
                yield f"{kernel}: tiles in shared memory"

    _report(complaints())


@pytest.mark.parametrize("buffers", [2, 1])
def test_wmma_double_buffered_overlaps(kernels: list[Kernel], buffers: int) -> None:
    """Tiles come in 128-bit pieces: before the multiplication and all at once, or around it."""

    def complaints() -> Iterator[str]:
        for kernel in _rung(kernels, "wmma_double_buffered", f"{buffers}, .*"):
            # ldmatrix for FP16. Of BF16, nvcc 13 makes generic loads.
            half = "__half" in kernel.name
            read = r"LDSM\.16\.MT?88\.[24]" if half else rf"LDSM|{SHARED_LOAD}|LD\."
            if not kernel.in_main_loop(r"HMMA\.") or not kernel.in_main_loop(read):
                yield f"{kernel}: no HMMA, or nothing that feeds it, in the main loop"
            if kernel.in_main_loop(GLOBAL_LOAD):
                yield f"{kernel}: reads global memory where it multiplies"
            loads_before, _ = kernel.around_main_loop(WIDE_GLOBAL_LOAD)
            stores_before, stores_after = kernel.around_main_loop(WIDE_SHARED_STORE)
            if not loads_before:
                yield f"{kernel}: no global loads of 128 bits before the multiplication"
            stored = (stores_before > 0, stores_after > 0)
            if stored != (buffers == 1, buffers == 2):
                yield (
                    f"{kernel}: {stores_before} stores of 128 bits before the multiplication, "
                    f"{stores_after} behind it"
                )
            if kernel.in_k_loop(BARRIER) != 3 - buffers:
                yield f"{kernel}: {kernel.in_k_loop(BARRIER)} barriers in the loop over K"

    _report(complaints())


def test_volta_mma_is_native_until_turing(kernels: list[Kernel]) -> None:
    """HMMA.884 from 128-bit loads on sm_75; later, subroutines that shuffle and multiply-add."""

    def complaints() -> Iterator[str]:
        for kernel in _rung(kernels, "volta_mma"):
            if kernel.architecture == "sm_75":
                multiplies = kernel.in_main_loop(r"HMMA\.")
                if not multiplies or kernel.in_main_loop(r"HMMA\.884\.F32\.F32") != multiplies:
                    yield f"{kernel}: HMMA of another shape than 884, or none"
                loads = kernel.in_main_loop(SHARED_LOAD)
                if not loads or kernel.in_main_loop(WIDE_SHARED_LOAD) != loads:
                    yield f"{kernel}: not every LDS in the main loop is 128 bits wide"
                continue
            if kernel.count(TENSOR_CORES):
                yield f"{kernel}: uses Tensor Cores"
            # 4x2 fragments, two steps.
            if kernel.calls_in_a_loop() < 16 or not kernel.count(r"SHFL\b"):
                yield f"{kernel}: no emulation, {kernel.calls_in_a_loop()} calls in a loop"

    _report(complaints())


@pytest.mark.parametrize("name", ["wgmma_tma", "wgmma_staged"])
def test_wgmma_reads_shared_memory_by_itself(kernels: list[Kernel], name: str) -> None:
    """Four HGMMA a tile between mbarriers, and not a load; TMA brings the tiles, or does not."""
    if "sm_90a" not in {kernel.architecture for kernel in kernels}:
        pytest.skip("WGMMA NOT CHECKED: this build has no sm_90a")

    def complaints() -> Iterator[str]:
        for kernel in _rung(kernels, name):
            kind = r"\.BF16$" if re.search("<true", kernel.name) else "$"
            multiplies = kernel.in_main_loop(r"HGMMA\.")
            if kernel.in_main_loop(rf"HGMMA\.64x256x16\.F32{kind}") != 4 or multiplies != 4:
                yield f"{kernel}: not four HGMMA.64x256x16 of its type in the main loop"
            if not kernel.in_main_loop(r"SYNCS\.PHASECHK"):
                yield f"{kernel}: does not wait for an mbarrier in the main loop"
            if kernel.in_main_loop(rf"LDG|LDSM|{SHARED_LOAD}|{BARRIER}"):
                yield f"{kernel}: loads or barriers in the main loop"
            requests = kernel.count(r"UTMALDG\.")
            if name == "wgmma_tma" and requests < 2:
                yield f"{kernel}: {requests} requests to TMA for A and B"
            if name == "wgmma_staged" and (requests or not kernel.count(WIDE_SHARED_STORE)):
                yield f"{kernel}: {requests} requests to TMA, or no STS of 128 bits"

    _report(complaints())


def _not_one_k_tile(kernel: Kernel, multiply: str, steps: int, loops: int) -> Iterator[str]:
    """Complaints where not each of the main loops multiplies one k-tile, in `steps` wgmma of the one kind."""
    multiplies = kernel.count(multiply)
    if multiplies != loops * steps or kernel.count(r"HGMMA\.") != multiplies:
        yield f"{kernel}: {multiplies} HGMMA, not {loops * steps}"
    if kernel.in_main_loop(r"HGMMA\.") != steps:
        yield f"{kernel}: more or less than one k-tile in the main loop"
    # Else the compiler has put the instructions of a k-tile one after the other.
    if kernel.count(r"WARPGROUP\.ARRIVE") != loops:
        yield f"{kernel}: waits between the HGMMAs of a k-tile"
    if not kernel.in_main_loop(r"SYNCS\.PHASECHK"):
        yield f"{kernel}: does not wait for an mbarrier in the main loop"


@dataclass(frozen=True)
class Sm90Tile:
    """The template arguments of one sm90 kernel, and what follows from them (cta_tile.hpp)."""

    ping_pong: bool
    block_m: int
    block_n: int
    stages: int
    cluster: int
    consumers: int
    parts: bool  # operands are FP32 in two TF32 parts

    @classmethod
    def of(cls, kernel: Kernel) -> Sm90Tile:
        arguments = re.search(r"CtaTile<\(.*?\)([\d, ]+), (true|false)>", kernel.name)
        assert arguments, kernel.name
        schedule, *sizes = map(int, arguments[1].split(", "))
        return cls(schedule == 1, *sizes, arguments[2] == "true")

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def registers(self) -> int:
        """Per thread: all of an SM's, which setmaxnreg only moves from warpgroup to warpgroup."""
        return 65536 // self.threads // 8 * 8

    @property
    def columns(self) -> int:
        """Of a consumer's part of a tile."""
        splits = self.block_m == 64 and not self.ping_pong
        return self.block_n // self.consumers if splits else self.block_n

    @property
    def blocks(self) -> int:
        """Of 64 rows, of a consumer's part of a tile."""
        return max(1, self.block_m // 64 // (1 if self.ping_pong else self.consumers))

    @property
    def boxes(self) -> int:
        """Of 64 rows and columns, of a consumer's outputs; where 64 divides no tile, they share columns."""
        return self.blocks * -(-self.columns // 64)

    @property
    def whole_boxes(self) -> bool:
        return self.columns % 64 == 0

    @property
    def operand_types(self) -> int:
        """With a main loop each: FP16 and BF16 in the orders of A and B that it takes, and TF32."""
        only_k_major_b = self.block_n // self.cluster % 64 != 0
        return 2 * 2 * (1 if only_k_major_b else 2) + 1

    @property
    def gates(self) -> bool:
        return self.columns % 128 == 0 and not self.parts

    @property
    def splits_within_a_cluster(self) -> bool:
        return not self.ping_pong and self.cluster == 1 and self.consumers == 2 and self.whole_boxes

    @property
    def common_epilogue(self) -> bool:
        return self.consumers == 2 and self.whole_boxes

    @property
    def copies_quickly(self) -> bool:
        """Unless sums take most registers: rows of outputs that TMA refuses by 16 bytes."""
        return self.blocks * self.columns // 2 * self.consumers <= (64 if self.parts else 256)

    @property
    def unrolls_residuals(self) -> bool:
        """Three consumers have 152 registers a thread, and most of them for sums."""
        return not self.parts and (self.consumers == 2 or self.blocks * self.columns < 160)


def _not_three_products(kernel: Kernel, tile: Sm90Tile) -> Iterator[str]:
    """Complaints where the main loop is not three products of TF32 parts, whose sums FMAs add up."""
    multiply = rf"HGMMA\.64x{tile.columns}x8\.F32\.TF32"
    multiplies = kernel.in_main_loop(multiply)
    if multiplies != 3 * 4 or kernel.count(r"HGMMA\.") != multiplies:
        yield f"{kernel}: {multiplies} HGMMA of TF32 in the main loop, not 12"
    # Else the compiler has put the instructions one after the other.
    if kernel.count(r"WARPGROUP\.ARRIVE") != 1:
        yield f"{kernel}: waits between the HGMMAs of a pair of k-tiles"
    sums = tile.columns // 2  # of a thread
    if kernel.in_main_loop(r"FADD\b") != sums:
        yield f"{kernel}: {kernel.in_main_loop('FADD')} FP32 additions in the main loop, not {sums}"
    if not kernel.in_main_loop(r"SYNCS\.PHASECHK"):
        yield f"{kernel}: does not wait for an mbarrier in the main loop"


def test_sm90_is_what_it_says(kernels: list[Kernel]) -> None:
    """wgmma between mbarriers, TMA both ways (by multicast in clusters), registers where they are needed."""
    if "sm_90a" not in {kernel.architecture for kernel in kernels}:
        pytest.skip("SM90 NOT CHECKED: this build has no sm_90a")

    def complaints() -> Iterator[str]:
        for kernel in _named(kernels, "sm90_gemm"):
            tile = Sm90Tile.of(kernel)
            if tile.parts:
                yield from _not_three_products(kernel, tile)
            else:
                steps = 4 * tile.blocks  # of a k-tile
                yield from _not_one_k_tile(
                    kernel, rf"HGMMA\.64x{tile.columns}x(16|8)\.F32", steps, tile.operand_types
                )
            if kernel.in_main_loop(rf"LDG|LDSM|{SHARED_LOAD}|MEMBAR"):
                yield f"{kernel}: loads or fences in the main loop"
            # Where a stage begins for each operand. With more, the descriptors are no uniform registers, and
            # narrow tiles take twice as long (benchmarks/NOTES.md).
            if not tile.parts and kernel.in_main_loop("R2UR") > 2:
                yield f"{kernel}: {kernel.in_main_loop('R2UR')} R2UR in the main loop"
            # Any fewer, and the consumers would wait for registers that nobody gives up.
            if kernel.resources["REG"] != tile.registers:
                yield f"{kernel}: {kernel.resources['REG']} registers, not {tile.registers}"
            if bool(kernel.count(r"UTMALDG\.5D\.MULTICAST")) != (tile.cluster > 1):
                yield f"{kernel}: multicast does not go with its cluster"
            if bool(kernel.count(r"STAS")) != tile.splits_within_a_cluster:
                yield f"{kernel}: sends sums to other CTAs, or does not where it divides K"
            # The common epilogue's FP32 outputs and residuals; eight rows of a box for each thread.
            wide = 2 * tile.common_epilogue + 8 * tile.copies_quickly
            if kernel.count(r"STG\.E\.128") != wide:
                yield f"{kernel}: {kernel.count(r'STG.E.128')} 16-byte stores, not {wide}"
            # Sums to the workspace by pairs; what TMA refuses, at last one by one.
            for what in (r"STG\.E\.64", r"STG\.E$", r"STG\.E\.U16"):
                if not kernel.count(what):
                    yield f"{kernel}: no {what}"
            # 16 columns each, for FP16 and for BF16: bias, unrolled, and with relu and residuals; the rest,
            # which may have a residual, rolled.
            rolled = 2 * (2 + (2 if tile.gates else 0))
            unrolled = 2 * 4 * tile.boxes
            stores = unrolled * (2 if tile.unrolls_residuals else 1) + rolled
            if kernel.count("STSM") != stores:
                yield f"{kernel}: {kernel.count('STSM')} STSM, not {stores}"
            loads = (unrolled if tile.unrolls_residuals else 0) + rolled
            if kernel.count(r"LDSM\.16\.M88\.4") != loads:
                yield f"{kernel}: {kernel.count('LDSM')} LDSM, not {loads}"
            for what in (
                r"UTMALDG\.5D$",
                r"UTMASTG\.5D",
                "USETMAXREG",
                "ACQBULK",  # griddepcontrol.wait
                "PREEXIT",  # and launch_dependents
            ):
                if not kernel.count(what):
                    yield f"{kernel}: no {what}"
            # Before griddepcontrol.wait, an operand may not have been written yet.
            if kernel.count(r"UTMAPF|CCTL\.E\.PF"):
                yield f"{kernel}: prefetches to L2"

    _report(complaints())


def test_sm90_kernels_are_those_of_the_table(kernels: list[Kernel]) -> None:
    if "sm_90a" not in {kernel.architecture for kernel in kernels}:
        pytest.skip("SM90 NOT CHECKED: this build has no sm_90a")
    if _library.cuda_missing:
        pytest.skip(f"SM90 TABLE NOT CHECKED: {_library.cuda_missing}")
    tiles = [Sm90Tile.of(kernel) for kernel in _named(kernels, "sm90_gemm")]
    compiled = sorted((t.block_m, t.block_n, t.stages, t.threads) for t in tiles)
    table = {row["name"]: row["configs"] for row in json.loads(torch.ops.tgemm._kernels())}
    sizes = ("block_m", "block_n", "stages", "threads")
    configs = table["sm90"] + table["sm90_3xtf32"]
    assert compiled == sorted(tuple(config[s] for s in sizes) for config in configs)


def _skinny_tile(kernel: Kernel) -> tuple[int, int, int]:
    """Rows of x, blocks of 64 weight rows, boxes along K: the template arguments of one skinny kernel."""
    arguments = re.search(r"CtaTile<(\d+), (\d+), (\d+)>", kernel.name)
    assert arguments, kernel.name
    return int(arguments[1]), int(arguments[2]), int(arguments[3])


def test_skinny_is_what_it_says(kernels: list[Kernel]) -> None:
    """The weight is wgmma's 64-row operand, TMA brings both, and the next kernel's CTAs fit beside these."""
    if "sm_90a" not in {kernel.architecture for kernel in kernels}:
        pytest.skip("SKINNY NOT CHECKED: this build has no sm_90a")

    def complaints() -> Iterator[str]:
        operand_types = 4  # FP16 and BF16, the weight in two layouts: a main loop for each
        for kernel in _named(kernels, "skinny_gemm"):
            rows, blocks, boxes = _skinny_tile(kernel)
            steps = 4 * blocks * boxes  # of a k-tile
            yield from _not_one_k_tile(kernel, rf"HGMMA\.64x{rows}x16\.F32", steps, operand_types)
            if kernel.in_main_loop(rf"LDG|{SHARED_LOAD}") or kernel.count("MEMBAR"):
                yield f"{kernel}: loads in the main loop, or fences"
            # Two CTAs on an SM and, of few rows, two of the next kernel.
            most = 96 if rows <= 16 else 128
            if kernel.resources["REG"] > most:
                yield f"{kernel}: {kernel.resources['REG']} registers, more than {most}"
            # Sums for the other CTAs of a cluster, 16 bytes at a time.
            if kernel.count(r"STAS\.128") != blocks * rows // 8:
                yield f"{kernel}: {kernel.count(r'STAS')} STAS, not {blocks * rows // 8}"
            for what in (
                r"UTMALDG\.5D$",
                r"UTMAPF\.L2\.5D",
                "PREEXIT",  # griddepcontrol.launch_dependents
                r"STG\.E\.64",  # four outputs of 16 bits
            ):
                if not kernel.count(what):
                    yield f"{kernel}: no {what}"
            # griddepcontrol.wait: in the consumers, before any access to memory, and in the producer,
            # before or after its requests for the first stages of the weight.
            waits, accesses = kernel.where("ACQBULK"), kernel.where(r"(LDG|STG)\.")
            if len(waits) != 3 or min(waits) > min(accesses):
                yield f"{kernel}: touches memory before it has waited for the kernel before it"

    _report(complaints())


def test_skinny_kernels_are_those_of_the_table(kernels: list[Kernel]) -> None:
    if "sm_90a" not in {kernel.architecture for kernel in kernels}:
        pytest.skip("SKINNY NOT CHECKED: this build has no sm_90a")
    if _library.cuda_missing:
        pytest.skip(f"SKINNY TABLE NOT CHECKED: {_library.cuda_missing}")
    compiled = {_skinny_tile(kernel) for kernel in _named(kernels, "skinny_gemm")}
    table = {row["name"]: row["configs"] for row in json.loads(torch.ops.tgemm._kernels())}
    assert compiled == {
        (row["block_m"], row["block_n"] // 64, row["block_k"] // 64) for row in table["skinny"]
    }


def test_tiny_is_what_it_says(kernels: list[Kernel]) -> None:
    """Runs of an operand go straight into Tensor Core fragments, as wide as a tile has blocks of eight."""

    def complaints() -> Iterator[str]:
        for kernel in _named(kernels, "tiny_gemm"):
            if kernel.architecture == "sm_75":
                continue  # empty there, and rejected on the host
            match = re.search(r"WarpTile<(\d+), (\d+), (\d+)>", kernel.name)
            assert match, kernel.name
            blocks, tiles = int(match[1]), int(match[2])
            width = {1: "", 2: r"\.64", 4: r"\.128"}[blocks]
            # FP16 and BF16.
            multiplications = 2 * tiles * (blocks * (blocks // 2) ** 2 if blocks > 1 else 1)
            shape = "16816" if blocks > 1 else "1688"
            if kernel.count(rf"HMMA\.{shape}\.F32") < multiplications:
                yield f"{kernel}: fewer than {multiplications} multiplications"
            # Of A and B: a run each where they are aligned, two where they are shifted.
            if kernel.count(rf"LDG\.E{width}\.CONSTANT$") < 2 * 3 * tiles * blocks:
                yield f"{kernel}: not every run is one load of {4 * blocks} bytes"
            if kernel.count("MOVM") < 2 * tiles * blocks**2:
                yield f"{kernel}: not every fragment of an MN-major operand is transposed"
            if kernel.count(rf"STG\.E{width}$") < tiles * blocks:
                yield f"{kernel}: too few stores of {4 * blocks} bytes"
            if kernel.architecture.startswith("sm_9"):
                waits, accesses = kernel.where("ACQBULK"), kernel.where(r"(LDG|STG)\.")
                if not waits or min(waits) > min(accesses) or not kernel.count("PREEXIT"):
                    yield f"{kernel}: no programmatic dependent launch"

    _report(complaints())


def test_gemv_is_what_it_says(kernels: list[Kernel]) -> None:
    """Rows are read 16 bytes at a time wherever they begin, and shifted into place."""

    def complaints() -> Iterator[str]:
        for kernel in _named(kernels, "gemv_kernel"):
            if kernel.architecture == "sm_75":
                continue  # empty there, and rejected on the host
            # Of x and two rows of the weight, three pieces each; one step ahead.
            if kernel.in_main_loop(r"LDG\.E\.128\.CONSTANT$") != 3 * 3:
                yield f"{kernel}: not nine loads of 16 bytes a step"
            if kernel.in_main_loop(r"LDG\.E(\.U16|\.64)?(\.CONSTANT)?$"):
                yield f"{kernel}: narrower loads in the main loop"
            # The four steps of K that a lane's 16 elements and those of its neighbours are, in two types.
            if kernel.in_main_loop(r"HMMA\.16816\.F32") != 2 * 4:
                yield f"{kernel}: not four multiplications a step"
            if kernel.architecture.startswith("sm_9"):
                waits, accesses = kernel.where("ACQBULK"), kernel.where(r"(LDG|STG)\.")
                if not waits or min(waits) > min(accesses) or not kernel.count("PREEXIT"):
                    yield f"{kernel}: no programmatic dependent launch"

    _report(complaints())


def test_pack_reads_any_alignment_and_writes_16_bytes(kernels: list[Kernel]) -> None:
    if "sm_90a" not in {kernel.architecture for kernel in kernels}:
        pytest.skip("PACK NOT CHECKED: this build has no sm_90a")

    def complaints() -> Iterator[str]:
        for kernel in _named(kernels, "pack_kernel"):
            element = r"\.U16" if "unsigned short" in kernel.name else ""
            loads = kernel.count(GLOBAL_LOAD)
            # Three ways to read a tile, 16 elements a thread each.
            if loads != 3 * 16 or kernel.count(rf"LDG\.E{element}$") != loads:
                yield f"{kernel}: {loads} global loads, not 48 of one element"
            stores = kernel.count(r"STG\.")
            if not stores or kernel.count(r"STG\.E\.128") != stores:
                yield f"{kernel}: not every global store is 128 bits wide"
            if kernel.count(SHARED_LOAD) != kernel.count(WIDE_SHARED_LOAD):
                yield f"{kernel}: not every read of shared memory is 128 bits wide"
            # griddepcontrol.wait comes before any access to memory.
            waits, accesses = kernel.where("ACQBULK"), kernel.where(r"(LDG|STG)\.")
            if not waits or min(waits) > min(accesses) or not kernel.count("PREEXIT"):
                yield f"{kernel}: no programmatic dependent launch"

    _report(complaints())
