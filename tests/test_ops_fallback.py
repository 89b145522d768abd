"""What goes to ATen on CUDA: counted, and by default with a warning at the line that asked for it.

None of it needs a GPU: the CUDA implementation decides by dtype, before it looks at a device, and ATen
computes on the CPU what lies there.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_gemm
from torch_gemm import _library, _warnings

pytestmark = pytest.mark.skipif(
    _library.cuda_missing is not None, reason=str(_library.cuda_missing)
)

ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
EYE = torch.eye(3, dtype=torch.float64)
SENTENCE = (
    "tgemm.matmul: a has dtype float64, which no kernel of torch_gemm multiplies; ATen computes it"
)


def multiply() -> Tensor:
    return torch.ops.tgemm.matmul.default.redispatch(ON_CUDA, EYE, EYE)


THE_LINE = multiply.__code__.co_firstlineno + 1


@pytest.fixture(autouse=True)
def _fresh_stats_and_policy():
    torch_gemm.reset_stats()
    yield
    torch_gemm.set_fallback("warn")


def test_a_warning_names_the_line_that_called():
    with pytest.warns(UserWarning) as caught:
        out = multiply()
    assert torch.equal(out, EYE)
    (warning,) = caught
    assert str(warning.message) == SENTENCE
    assert (warning.filename, warning.lineno) == (__file__, THE_LINE)
    assert torch_gemm.stats()["fallbacks"] == {"matmul: float64": 1}


def test_pythons_default_shows_it_once_for_each_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            multiply()
        assert len(caught) == 1
        torch.ops.tgemm.matmul.default.redispatch(ON_CUDA, EYE, EYE)
    assert len(caught) == 2
    assert torch_gemm.stats()["fallbacks"] == {"matmul: float64": 4}


def test_warnings_as_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError) as raised:
            multiply()
    assert str(raised.value) == SENTENCE
    with pytest.warns(UserWarning):
        assert torch.equal(multiply(), EYE)


def test_an_error_while_warning_is_not_lost(monkeypatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("the log is full: " + "ü" * 1000)

    monkeypatch.setattr(warnings, "showwarning", broken)
    warnings.simplefilter("always")  # pytest restores the filters
    with pytest.raises(RuntimeError) as raised:
        multiply()
    text = str(raised.value)
    # Cut to what the library has room for, between two characters.
    assert text == "the log is full: " + "ü" * (len(text) - 17)
    assert 1020 <= len(text.encode()) < 1024


def test_policies():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_gemm.set_fallback("allow")
        multiply()
        torch_gemm.set_fallback("error")
        with pytest.raises(RuntimeError, match=r"the fallback policy is 'error'$"):
            multiply()
    assert torch_gemm.stats()["fallbacks"] == {"matmul: float64": 1}


def test_linear_glu():
    with pytest.warns(UserWarning, match="tgemm.linear_glu: input has dtype float64"):
        out = torch.ops.tgemm.linear_glu.default.redispatch(ON_CUDA, EYE, EYE, 2 * EYE)
    torch.testing.assert_close(out, 2 * torch.nn.functional.silu(EYE))
    assert torch_gemm.stats()["fallbacks"] == {"linear_glu: float64": 1}


def test_from_many_threads():
    results: list[Tensor] = []

    def work() -> None:
        for _ in range(50):
            results.append(multiply())  # noqa: PERF401  (each is a call that warns)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == len(caught) == 200
    assert torch_gemm.stats()["fallbacks"] == {"matmul: float64": 200}


def test_without_the_gil():
    # ctypes releases it for the time of a call, so the callback has to take it.
    error = ctypes.create_string_buffer(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _warnings._warn(b"a sentence", error, 8)
    assert error.value == b"a sente"
    with pytest.warns(UserWarning, match="a sentence"):
        assert not _warnings._warn(b"a sentence", error, 8)


def test_after_the_interpreter_let_go():
    script = """
import atexit, torch
def late():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    eye = torch.eye(3, dtype=torch.float64)
    print(torch.equal(torch.ops.tgemm.matmul.default.redispatch(keys, eye, eye), eye))
atexit.register(late)  # runs after the handlers that are registered later
import torch_gemm
"""
    finished = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(torch_gemm.__file__).parents[1],
    )
    assert (finished.returncode, finished.stdout) == (0, "True\n"), finished.stderr
    assert SENTENCE in finished.stderr
