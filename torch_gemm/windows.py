"""Matrices as windows in larger buffers, whose surroundings show what was read or written beside them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

GUARD = 64  # elements before and after each window: keeps its 16-byte alignment for every dtype
GUARD_VALUE = -1280.0  # exact in every dtype, and unlikely as a result


@dataclass(frozen=True)
class Alignment:
    """Where a matrix starts and how its leading stride is rounded, in elements."""

    offset: int = 0
    odd_stride: bool = False


def place(values: Tensor, alignment: Alignment, column_major: bool, fill: float) -> Tensor:
    """Copies a matrix into a window of a new buffer that is otherwise full of `fill`.

    The leading stride leaves a gap between rows (columns), so the window has neighbours on all sides.
    """
    rows, columns = values.shape
    minor, major = (rows, columns) if column_major else (columns, rows)
    per_vector = 16 // values.element_size()
    leading = (minor + 2) | 1 if alignment.odd_stride else (minor // per_vector + 2) * per_vector
    start = GUARD + alignment.offset
    whole = values.new_full((start + major * leading + GUARD,), fill)
    strides = (1, leading) if column_major else (leading, 1)
    window = whole.as_strided((rows, columns), strides, start)
    window.copy_(values)
    return window


def whole_of(window: Tensor) -> Tensor:
    """The buffer in which `place` put a window."""
    size = window.untyped_storage().nbytes() // window.element_size()
    return window.as_strided((size,), (1,), 0)
