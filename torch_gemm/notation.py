"""How sizes and dtypes are written: "2048x4096x14336", "bf16"."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# A size beyond this is no tensor's, nor is one of more elements: torch counts bytes in 64 bits, 16 of complex128.
MAX_SIZE = 2**40
MAX_ELEMENTS = 2**59


def sizes_of(shape: Any, least: int = 1) -> tuple[int, ...]:
    """(M, N, K) or, of a batch, (B, M, N, K).

    Args:
        shape: "MxNxK", "BxMxNxK", "Bx(MxNxK)", or those numbers as a tuple. "X", "*" and "," stand for "x"
            as well.
        least: the smallest size that will do.

    Raises:
        ValueError: it is nothing of that, or a size is below `least` or above MAX_SIZE, or a matrix larger
            than torch can count.
    """
    sizes: tuple[int, ...] = ()
    if isinstance(shape, str):
        separator = r"\s*[xX*,]\s*"
        size = r"(\d{1,30})"
        tail = separator.join([size] * 3)
        pattern = rf"\s*(?:{size}{separator}(\()?)?{tail}(?(2)\))\s*"
        if found := re.fullmatch(pattern, shape, re.ASCII):
            sizes = tuple(int(size) for size in found.group(1, 3, 4, 5) if size is not None)
    else:
        try:
            sizes = tuple(operator.index(size) for size in shape)
        except TypeError:
            sizes = ()
    if len(sizes) not in (3, 4) or min(sizes) < 0:
        raise ValueError(
            f"{reprlib.repr(shape)} is no shape; write MxNxK, 2048x4096x14336, or BxMxNxK for a batch"
        )
    if min(sizes) < least:
        raise ValueError(f"{reprlib.repr(shape)} has a size below {least}")
    if max(sizes) > MAX_SIZE:
        raise ValueError(f"{reprlib.repr(shape)} has a size above 2^{MAX_SIZE.bit_length() - 1}")
    *batch, m, n, k = sizes
    if math.prod(batch) * max(m * n, m * k, n * k) > MAX_ELEMENTS:
        raise ValueError(f"{reprlib.repr(shape)} has a matrix of more bytes than torch can count")
    return sizes


def dtype_of(dtype: Any) -> torch.dtype:
    """The dtype that "bf16" or "bfloat16" names, float16 and float32 likewise; a torch.dtype is itself.

    Raises:
        TypeError: it is neither a name nor a dtype.
        ValueError: the name is of none of them.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str):
        raise TypeError(f"dtype must be a name or a torch.dtype, and is a {type(dtype).__name__}")
    for name, known in DTYPES.items():
        if dtype in (name, plain(known)):
            return known
    raise ValueError(f"dtype is {dtype!r}, and must be fp16, bf16 or fp32")


def plain(value: object) -> str:
    """The name of a dtype or layout without its module: "float16", "sparse_coo"."""
    return str(value).removeprefix("torch.").lstrip("_")
