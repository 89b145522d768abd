"""What each kernel configuration promises to run, as data.

The counterpart of the `rejects` functions in csrc/kernels. The GPU tests force every configuration on problems
that it promises to run, and see it refuse those that it does not; so a configuration that runs less than this
table says fails, and so does one that runs more.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TypeVar

import torch
from problems import ALIGNMENTS, EPILOGUES, LAYOUTS, MODES, Case, out_dtype
from torch import Tensor

from torch_gemm import _library

T = TypeVar("T")


@dataclass(frozen=True)
class Promise:
    """The problems that a configuration runs; of what is not mentioned here, all."""

    modes: tuple[str, ...]
    # Of the operands as the kernel sees them: a column-major out swaps them, see SWAPPED.
    layouts: tuple[str, ...] = LAYOUTS
    # Addresses and leading strides of the operands are multiples of 16 bytes.
    aligned: bool = False
    # Moreover, so are their sizes along the contiguous dimension.
    whole_chunks: bool = False
    # With one k, or none, operands in any layout may count as K-major.
    one_k_in_any_layout: bool = False
    # With no k, or with one k and one row of the first operand, that may have any layout.
    one_row_in_any_layout: bool = False
    # Of all these, only problems with an operand that TMA cannot read as it is.
    packs: bool = False
    # Of all these, only problems for which leaves_in_boxes holds.
    boxes: bool = False
    # Its boxes share columns: of these, only FP32 outputs without a residual.
    boxes_share_columns: bool = False
    # One kernel makes gated products, of those for which leaves_in_boxes holds.
    gates: bool = False
    # It makes them whatever their outputs, and splits their K.
    gates_all: bool = False


SM90 = Promise(("fp16", "bf16"), aligned=True)
SM90_TF32 = Promise(("fp32/tf32",), layouts=("nt",), aligned=True, one_k_in_any_layout=True)
# The few rows of x have to be contiguous along K.
SKINNY = Promise(("fp16", "bf16"), layouts=("nn", "nt"), aligned=True, one_row_in_any_layout=True)
SM90_3XTF32 = Promise(("fp32/3xtf32",))  # always packs
SM90_PACKED = Promise(("fp32/bf16", "fp32/fp16", "fp32/tf32", "fp16", "bf16"), packs=True)

# By the name of the kernel and its configuration; the first pattern that matches counts.
PROMISES = {
    "mma_sync:*_staged": Promise(("fp16", "bf16", "fp32/tf32", "fp32/bf16", "fp32/fp16")),
    "mma_sync:128x256": Promise(
        ("fp16", "bf16"), layouts=("nn", "nt"), aligned=True, whole_chunks=True
    ),
    "mma_sync:128x128": Promise(("fp16", "bf16", "fp32/tf32"), aligned=True, whole_chunks=True),
    "mma_sync:*": Promise(("fp16", "bf16"), aligned=True, whole_chunks=True),
    "gemv:*": Promise(("fp16", "bf16"), layouts=("nt",), one_k_in_any_layout=True),
    "tiny:*": Promise(("fp16", "bf16")),
    "naive:*": Promise(("fp16", "bf16", "fp32")),
    "tiled*:*": Promise(("fp16", "bf16", "fp32")),
    "wmma*:*": Promise(("fp16", "bf16", "fp32/bf16", "fp32/fp16")),
    "volta_mma:*": Promise(("fp16", "fp32/fp16")),
    "wgmma:*_staged": Promise(("fp16", "bf16", "fp32/bf16", "fp32/fp16")),
    # Tiles of 64 weight rows have no room for two weights.
    "skinny:*x64": SKINNY,
    "skinny:*": dataclasses.replace(SKINNY, gates=True, gates_all=True),
    # Three consumers have no registers for the common epilogue.
    "sm90:192x128": dataclasses.replace(SM90, boxes=True, gates=True),
    "sm90:192x192": dataclasses.replace(SM90, boxes=True),
    "sm90_tf32:192x*": dataclasses.replace(SM90_TF32, boxes=True),
    "sm90_packed:192x*": dataclasses.replace(SM90_PACKED, boxes=True),
    # Boxes of 64 columns do not divide their tiles.
    **{
        f"{kernel}:*x{width}*": dataclasses.replace(
            promise,
            layouts=tuple(layout for layout in promise.layouts if layout[1] == "t"),
            one_k_in_any_layout=True,
            boxes=True,
            boxes_share_columns=True,
        )
        for kernel, promise in (("sm90", SM90), ("sm90_tf32", SM90_TF32))
        for width in (96, 144, 160, 176, 224, 240)
    },
    # A consumer that has 128 columns has 64 of each weight.
    "sm90:128x128*": dataclasses.replace(SM90, gates=True),
    "sm90:128x256*": dataclasses.replace(SM90, gates=True),
    "sm90:64x128_pingpong*": dataclasses.replace(SM90, gates=True),
    "sm90:*": SM90,
    "sm90_tf32:*": SM90_TF32,
    "sm90_packed:*": SM90_PACKED,
    "sm90_3xtf32:*": SM90_3XTF32,
    "wgmma:*": Promise(("fp16", "bf16"), aligned=True),
    "simt:*_staged": Promise(("fp16", "bf16", "fp32", "fp32/3xtf32")),
    "simt:*": Promise(("fp32", "fp32/3xtf32")),
}

# With a column-major out the kernel computes out.T = b.T @ a.T: the layouts of b.T and a.T.
SWAPPED = {"nn": "tt", "nt": "nt", "tn": "tn", "tt": "nn"}


def contiguous_sizes(case: Case) -> set[str]:
    """Names of the sizes along which the operands are contiguous."""
    names = {"k" if case.layout[0] == "n" else "m", "k" if case.layout[1] == "t" else "n"}
    if case.k == 0 and case.n == 1:
        names.add("n")  # without elements, one column is as good as a row: it counts as row-major
    return names


def has_to_be_packed(case: Case) -> bool:
    """Whether TMA cannot read one of the operands as it is, in the type that is multiplied."""
    if case.mode in ("fp32/bf16", "fp32/fp16"):
        return True
    alignment = ALIGNMENTS[case.alignment]
    for mn, k_major in ((case.m, case.layout[0] == "n"), (case.n, case.layout[1] == "t")):
        lines = mn if k_major else case.k
        # Neither the stride of a dimension of size 1 nor the address of nothing counts.
        if alignment.odd_stride and lines > 1:
            return True
        if alignment.offset % chunk(case.mode) != 0 and mn * case.k > 0:
            return True
        # wgmma reads TF32 along K alone.
        if case.mode == "fp32/tf32" and not k_major and max(mn, case.k) > 1:
            return True
    return False


def row_major_out(case: Case) -> bool:
    """Whether out counts as row-major: the kernel sees a column-major one as a transposed one."""
    return case.out_layout == "row" or max(case.m, case.n) <= 1


def leaves_in_boxes(case: Case) -> bool:
    """Whether sm90's outputs can leave its registers in boxes of 16 bits or, with no more than relu, of FP32."""
    epilogue = EPILOGUES[case.epilogue]
    dtype = out_dtype(case)
    wide = dtype == torch.float32
    # As the kernel sees them: a column-major out is the transpose of a row-major one.
    row_major = case.out_layout == "row" or max(case.m, case.n) <= 1
    columns = case.n if row_major else case.m
    if epilogue.preact:
        return False
    # Only relu is as accurate as FP32 needs.
    if wide and (epilogue.gated or epilogue.activation not in (None, "relu")):
        return False
    if epilogue.gated and (not row_major or case.k == 0):
        return False
    if epilogue.bias and not row_major:
        return False
    if epilogue.residual is None:
        return True
    if (epilogue.residual_dtype or MODES[case.mode].dtype) != dtype:
        return False
    repeated = "row" if row_major else "column"  # is what lies along the rows of out
    return columns <= 1 or (epilogue.residual in ("full", repeated) and not case.across)


@dataclass(frozen=True)
class Config:
    """One row of the kernel table with one of its configurations."""

    kernel: str
    name: str
    block_m: int
    block_n: int
    block_k: int
    stages: int
    splits_k: bool
    automatic: bool = True

    def __str__(self) -> str:
        return f"{self.kernel}:{self.name}"

    def force(self, split_k: int) -> str:
        """Forces this configuration and split; without a split, selection would be free to choose one."""
        return f"{self},split_k={split_k}" if self.splits_k else f"{self}"

    def plan(self, split_k: int) -> str:
        """What that is called in torch_gemm.stats()."""
        return f"{self}" if split_k == 1 else self.force(split_k)

    @property
    def promise(self) -> Promise:
        """A configuration that no pattern matches promises nothing, and fails a test of its own."""
        matching = (promise for pattern, promise in PROMISES.items() if fnmatch(str(self), pattern))
        return next(matching, Promise(()))

    @property
    def modes(self) -> tuple[str, ...]:
        return self.promise.modes

    def sample(self, cases: Iterable[T], rng: random.Random) -> list[T]:
        """All of the cases, or some, evenly: of kernels that only differ from others in that their operands
        are packed, and of those that teach.

        The steps have no factor in common with the numbers of layouts and epilogues, so all of those meet. At
        least one case.
        """
        step = 11 if self.promise.packs else 1 if self.automatic else 5
        cases = list(cases)
        return cases[rng.randrange(max(1, min(step, len(cases)))) :: step]

    def out_layouts(self, layout: str) -> tuple[str, ...]:
        """With which layouts of out it runs operands of this layout."""
        seen = {"row": layout, "column": SWAPPED[layout]}
        return tuple(out for out, kernels in seen.items() if kernels in self.promise.layouts)

    def layouts(self) -> tuple[str, ...]:
        """Of the operands that it runs with a row-major out."""
        return tuple(layout for layout in LAYOUTS if "row" in self.out_layouts(layout))

    def alignments(self, mode: str) -> tuple[str, ...]:
        if not self.promise.aligned:
            return tuple(ALIGNMENTS)
        return tuple(
            name
            for name, alignment in ALIGNMENTS.items()
            if not alignment.odd_stride and alignment.offset % chunk(mode) == 0
        )

    def fit(self, case: Case) -> Case:
        """The next case that it promises to run: with larger sizes, or with operands aligned otherwise.

        What it never runs, such as an epilogue, stays.
        """
        if self.promise.boxes and not leaves_in_boxes(case):
            case = dataclasses.replace(case, across=False)
        if self.promise.packs and not has_to_be_packed(case):
            unaligned = [dataclasses.replace(case, alignment=a) for a in ("offset 1", "odd stride")]
            case = next(filter(has_to_be_packed, unaligned), case)
        if not self.promise.whole_chunks:
            return case
        step = chunk(case.mode)
        sizes = {name: -(-getattr(case, name) // step) * step for name in contiguous_sizes(case)}
        return dataclasses.replace(case, **sizes)

    def runs(self, case: Case) -> bool:
        """Whether it promises to run the case."""
        outs = {"row" if row_major_out(case) else "column"}
        if EPILOGUES[case.epilogue].preact:
            # Asked for through an op that allocates its outputs; a single column counts as a row's transpose.
            outs.add("row" if case.n > 1 or case.m <= 1 else "column")
        return (
            case.mode in self.modes
            and all(self._reads(case, out) for out in outs)
            and case.alignment in self.alignments(case.mode)
            and case == self.fit(case)
            and (has_to_be_packed(case) or not self.promise.packs)
            and (self._leaves_in_boxes(case) or not self.promise.boxes)
        )

    def _reads(self, case: Case, out: str) -> bool:
        """Whether it promises to read the operands in their layouts."""
        rows = case.m if out == "row" else case.n  # of the first operand, as the kernel sees it
        return (
            out in self.out_layouts(case.layout)
            or (self.promise.one_k_in_any_layout and case.k <= 1)
            or (self.promise.one_row_in_any_layout and case.k <= 1 and (case.k == 0 or rows <= 1))
        )

    def gates(self, case: Case) -> bool:
        """Whether it promises to run this gated product in one kernel."""
        if not (self.promise.gates and self.runs(case)):
            return False
        if not self.promise.gates_all:
            return leaves_in_boxes(case)
        # What a kernel with two weights is never asked for.
        return row_major_out(case) and case.k > 0 and not EPILOGUES[case.epilogue].preact

    def _leaves_in_boxes(self, case: Case) -> bool:
        epilogue = EPILOGUES[case.epilogue]
        wide = out_dtype(case) == torch.float32
        if self.promise.boxes_share_columns and wide and epilogue.residual:
            return False
        # Of a gated product in two kernels, the second multiplies by what the first has written. So it is
        # where K is split.
        splits = "split_k=" in (case.force_kernel or "") and case.force_kernel != self.force(1)
        one_kernel = self.promise.gates and not splits
        return leaves_in_boxes(case) and (one_kernel or not epilogue.gated)

    def second(self, matrix: Tensor) -> Tensor:
        """A second operand, with K along its columns in memory where the configuration reads no other order."""
        return matrix if "nn" in self.layouts() else matrix.mT.contiguous().mT

    def operand(self, matrix: Tensor) -> Tensor:
        """The same matrix or matrices, with an odd leading stride where the configuration needs it."""
        if not self.promise.packs:
            return matrix
        columns = matrix.shape[-1]
        return torch.nn.functional.pad(matrix, (0, 1 + columns % 2))[..., :columns]


def chunk(mode: str) -> int:
    """Elements in 16 bytes."""
    return 16 // MODES[mode].dtype.itemsize


def configurations() -> list[Config]:
    """All of the kernel table, none where the CUDA library is not loaded."""
    table = [] if _library.cuda_missing else json.loads(torch.ops.tgemm._kernels())
    return [
        Config(
            kernel["name"],
            config["name"],
            config["block_m"],
            config["block_n"],
            config["block_k"],
            config["stages"],
            kernel["splits_k"],
            kernel["automatic"],
        )
        for kernel in table
        for config in kernel["configs"]
    ]


CONFIGS = configurations()


def running(mode: str) -> list[Config]:
    """The configurations that run a mode."""
    return [config for config in CONFIGS if mode in config.modes]
