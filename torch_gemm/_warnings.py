"""Warns at the line that called into this package, for the CUDA library too: with Python's filters."""

from __future__ import annotations

import atexit
import ctypes
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

from torch_gemm import _library

# Frames of files in these folders are between the op and whoever called it.
_INSIDE = tuple(f"{Path(package).parent}/" for package in (torch.__file__, __file__))


def _caller() -> FrameType:
    """The innermost frame that is neither torch's nor ours, or the outermost one if there is none.

    There is none in a thread of torch's, which runs backwards.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return frame


def warn_caller(sentence: str) -> None:
    """Like warnings.warn, which cannot skip frames by file before Python 3.12."""
    frame = _caller()
    warnings.warn_explicit(
        sentence,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno or 1,  # generated code may have none
        frame.f_globals.get("__name__", "<unknown>"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
def _warn(sentence: bytes, error: int, size: int) -> bool:
    """`WarningCallback` of csrc/ops/cuda.cpp; ctypes takes the GIL if the calling thread lacks it."""
    try:
        warn_caller(sentence.decode())
    except BaseException as raised:  # an exception cannot leave a callback
        text = (str(raised) or type(raised).__name__).encode(errors="replace")[: size - 1]
        # Without half a character at the end.
        text = text.decode(errors="ignore").encode() + b"\0"
        ctypes.memmove(error, text, len(text))
        return True
    return False


if _library.cuda_missing is None:
    _set_callback = torch.ops.tgemm._set_warning_callback
    _set_callback(ctypes.cast(_warn, ctypes.c_void_p).value)
    # An op may still run while, or after, the interpreter takes this module apart.
    atexit.register(_set_callback, 0)
