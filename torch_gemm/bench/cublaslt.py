"""cuBLASLt's own choice of algorithms for a linear layer, which torch does not offer.

Calls the library that torch has loaded. Types, attributes and signatures: the cuBLASLt API of the cuBLAS
manual (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api).
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 * 2**20  # as much as torch gives cuBLAS on Hopper
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77  # cublasComputeType_t
OP_N, OP_T = 0, 1
DESC_TRANSA, DESC_TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
LAYOUT_BATCH_COUNT, LAYOUT_STRIDED_BATCH_OFFSET = 5, 6  # cublasLtMatrixLayoutAttribute_t
# cublasLtMatmulPreferenceAttributes_t; the alignments of the four matrices follow each other.
PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENT_A_BYTES = 1, 5
MOST_ALIGNED = 256  # bytes: what cuBLASLt takes for granted unless told otherwise


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasLtError(RuntimeError):
    """A call that cuBLASLt refused."""


def call(name: str, *arguments: Any) -> None:
    """Calls a function of cuBLASLt.

    Raises:
        CublasLtError: if it returns anything but CUBLAS_STATUS_SUCCESS.
    """
    status = getattr(library(), name)(*arguments)
    if status != 0:
        raise CublasLtError(f"{name} returned status {status}")


@functools.cache
def library() -> ctypes.CDLL:
    """The library, which torch has loaded by the time there are CUDA tensors."""
    major = (torch.version.cuda or "").split(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}")


@functools.cache
def handle() -> c_void_p:
    """One for the process."""
    created = c_void_p()
    call("cublasLtCreate", byref(created))
    return created


@functools.cache
def workspace() -> Tensor:
    """Shared by all products: they run one after the other."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def alignment_of(matrix: Tensor) -> int:
    """Bytes that a matrix's address is a multiple of, a power of two."""
    address = matrix.data_ptr() | MOST_ALIGNED
    return address & -address


class Linear:
    """``x (M, K) @ weight (N, K).T`` by cuBLASLt, with up to `count` algorithms that it proposes, best first.

    With a batch, x is (batch, M, K) and weight (batch, N, K).
    Matrices are column-major there, so it multiplies ``weight @ x.T`` to get the transpose of the result.
    Operands of later calls have to have the strides, and the alignment, of those that it is made for.

    Raises:
        CublasLtError: if cuBLASLt has no algorithm for it.
    """

    def __init__(self, x: Tensor, weight: Tensor, count: int = 8) -> None:
        *batch, m, k = x.shape
        n = weight.shape[-2]
        self._shape = (*batch, m, n)
        compute = COMPUTE_32F
        if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            compute = COMPUTE_32F_FAST_TF32
        self._desc = self._create("MatmulDesc", c_int(compute), c_int(DATA_TYPES[torch.float32]))
        weight_k_major, x_k_major = weight.stride(-1) == 1, x.stride(-1) == 1
        for attribute, transposed in ((DESC_TRANSA, weight_k_major), (DESC_TRANSB, not x_k_major)):
            operation = c_int(OP_T if transposed else OP_N)
            call(
                "cublasLtMatmulDescSetAttribute",
                self._desc,
                c_int(attribute),
                byref(operation),
                c_size_t(4),
            )
        self._weight = self._layout(weight, (k, n) if weight_k_major else (n, k))
        self._x = self._layout(x, (k, m) if x_k_major else (m, k))
        self._out = self._layout(torch.empty(self._shape, dtype=x.dtype, device="meta"), (n, m))

        preference = self._create("MatmulPreference")
        limit = c_size_t(WORKSPACE_BYTES)
        call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            c_int(PREF_MAX_WORKSPACE_BYTES),
            byref(limit),
            c_size_t(8),
        )
        for i, matrix in enumerate((weight, x)):
            alignment = c_uint32(alignment_of(matrix))
            call(
                "cublasLtMatmulPreferenceSetAttribute",
                preference,
                c_int(PREF_MIN_ALIGNMENT_A_BYTES + i),
                byref(alignment),
                c_size_t(4),
            )
        found, results = c_int(), (HeuristicResult * count)()
        call(
            "cublasLtMatmulAlgoGetHeuristic",
            handle(),
            self._desc,
            *(self._weight, self._x, self._out, self._out),
            preference,
            c_int(count),
            results,
            byref(found),
        )
        self.algorithms = [result for result in results[: found.value] if result.state == 0]

    def _create(self, what: str, *arguments: Any) -> c_void_p:
        created = c_void_p()
        call(f"cublasLt{what}Create", byref(created), *arguments)
        weakref.finalize(self, call, f"cublasLt{what}Destroy", created)
        return created

    def _layout(self, matrix: Tensor, rows_and_columns: tuple[int, int]) -> c_void_p:
        rows, columns = rows_and_columns
        layout = self._create(
            "MatrixLayout",
            c_int(DATA_TYPES[matrix.dtype]),
            c_uint64(rows),
            c_uint64(columns),
            c_int64(max(matrix.stride()[-2:])),
        )
        if matrix.dim() == 3:
            for attribute, value in (
                (LAYOUT_BATCH_COUNT, c_int32(matrix.shape[0])),
                (LAYOUT_STRIDED_BATCH_OFFSET, c_int64(matrix.stride(0))),
            ):
                call(
                    "cublasLtMatrixLayoutSetAttribute",
                    layout,
                    c_int(attribute),
                    byref(value),
                    c_size_t(ctypes.sizeof(value)),
                )
        return layout

    def __call__(self, x: Tensor, weight: Tensor, algorithm: HeuristicResult) -> Tensor:
        """The product, on the current stream."""
        out = torch.empty(self._shape, dtype=x.dtype, device=x.device)
        one, zero = c_float(1.0), c_float(0.0)
        call(
            "cublasLtMatmul",
            handle(),
            self._desc,
            byref(one),
            *(c_void_p(weight.data_ptr()), self._weight),
            *(c_void_p(x.data_ptr()), self._x),
            byref(zero),
            *(c_void_p(out.data_ptr()), self._out),
            *(c_void_p(out.data_ptr()), self._out),
            byref(algorithm),
            c_void_p(workspace().data_ptr()),
            c_size_t(WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        return out
