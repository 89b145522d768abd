"""`override`: a block of code in which torch's matrix products run on tgemm.

A TorchDispatchMode does the work, because it stands where the products really happen. It sees the ones
inside einsum, nn.MultiheadAttention, nn.LSTM and every other function written in C++, and those of a
backward pass, while autograd, autocast, vmap and forward-mode derivatives stay torch's own, one layer
above. A TorchFunctionMode would see only the functions that Python code calls, and would need einsum and
attention written anew. What the choice costs: torch.compile does not trace under a dispatch mode.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

from torch_gemm import _fallbacks, ops
from torch_gemm.notation import plain

_aten = torch.ops.aten

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_DEVICES = ("cpu", "cuda", "meta")


class override(contextlib.ContextDecorator):  # noqa: N801  (used like a function)
    """Runs the matrix products of a block, or of a decorated function, on tgemm.

    ``with torch_gemm.override(): model(x)`` and ``@torch_gemm.override()``. Taken are matmul, ``@``, mm,
    bmm, mv, dot, addmm, addmv, baddbmm, their in-place and ``out=`` forms and F.linear, wherever they
    are called: in einsum and tensordot, in the projections of nn.MultiheadAttention (whose fused fast
    path is off in the block), and in a backward pass that runs in the block. float16, bfloat16 and
    float32 tensors are taken; FP32 is multiplied as torch's own precision flags say. Everything else
    (other dtypes, layouts and devices, tensor subclasses) is computed by torch as always, is counted in
    `stats`, and follows `set_fallback`.

    The block affects its own thread only, may be nested, and one object may be entered again. A
    function compiled by torch.compile runs uncompiled inside the block, or, with fullgraph=True,
    raises: `torch_gemm.inductor.options` is the way to compile a model for tgemm.

    Raises:
        TypeError: the decorated object is a generator function or coroutine, whose body would run
            after the block.
    """

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a function."""
        if not callable(function):
            raise TypeError(
                f"override() decorates a function, and was given a {type(function).__name__}"
            )
        for kind in ("generator", "coroutine", "asyncgen"):
            if getattr(inspect, f"is{kind}function")(function):
                raise TypeError(
                    f"override() cannot decorate {function.__qualname__}, whose body runs after the "
                    "call has returned: write `with torch_gemm.override():` inside it"
                )
        return super().__call__(function)

    def __enter__(self) -> override:
        with contextlib.ExitStack() as stack:
            # A second mode would find nothing left to do.
            if not any(isinstance(mode, Products) for mode in _active_modes()):
                stack.enter_context(_NoFastPath())
                stack.enter_context(Products())
            _open_blocks().append(stack.pop_all())
        return self

    def __exit__(self, *exception: object) -> None:
        _open_blocks().pop().close()


# torch.compiler.disable() would do the same, and make `import torch_gemm` load all of dynamo.
override.__enter__._torchdynamo_disable = True  # type: ignore[attr-defined]
override.__enter__._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "torch.compile cannot trace torch_gemm.override(): compile with "
    "options=torch_gemm.inductor.options() instead"
)


_this_thread = threading.local()


def _open_blocks() -> list[contextlib.ExitStack]:
    """What ends the blocks that this thread is in."""
    return _this_thread.__dict__.setdefault("open_blocks", [])


def _active_modes() -> list[Any]:
    return _python_dispatch._get_current_dispatch_mode_stack()


class _NoFastPath(TorchFunctionMode):
    """Changes nothing; the fused inference ops of nn.MultiheadAttention and nn.TransformerEncoder, whose
    products no mode can see, step back before any function mode.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Products(_python_dispatch.TorchDispatchMode):
    """Sends ATen's products to tgemm."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            reason = _reason_against((*args, *kwargs.values()))
            if reason is None:
                return replacement(*args, **kwargs)
            _fallbacks.record("override", func.overloadpacket.__name__, reason)
        elif torch.is_inference_mode_enabled() and _is_composite(func):
            # einsum, say. Outside inference mode such ops have been taken apart before they arrive.
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


@functools.cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _reason_against(arguments: tuple[Any, ...]) -> str | None:
    """Why tgemm does not take these arguments; None if it does."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"{type(tensor).__name__} operands"
        if tensor.layout is not torch.strided:
            return f"{plain(tensor.layout)} operands"
        if tensor.dtype not in _DTYPES:
            return f"{plain(tensor.dtype)} operands"
        if tensor.device.type not in _DEVICES:
            return f"operands on {tensor.device.type}"
    return None


# --- What takes the place of each ATen op: with its arguments ---------------------------------------


def _matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return ops.matmul(a, b, out_dtype=out_dtype)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.linear(input, weight, bias)


def _addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    return ops.addmm(input, mat1, mat2, beta=beta, alpha=alpha, out_dtype=out_dtype)


def _addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    column = ops.addmm(input.unsqueeze(-1), mat, vec.unsqueeze(-1), beta=beta, alpha=alpha)
    return column.squeeze(-1)


def _baddbmm(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    dtype = out_dtype or batch1.dtype
    if beta == 0 and alpha == 1:
        return ops.matmul(batch1, batch2, out_dtype=dtype)
    # No batched kernel adds; the sum is formed in FP32 and rounded once all the same.
    product = ops.matmul(batch1, batch2, out_dtype=torch.float32)
    if alpha != 1:
        product.mul_(alpha)
    if beta != 0:  # otherwise the input is never read
        product.add_(input, alpha=beta)
    return product.to(dtype)


def _into(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same with ``out=``, which is resized as torch resizes it."""

    def run(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        result = function(*args, **kwargs)
        if out.dtype != result.dtype:
            raise RuntimeError(
                f"torch_gemm.override: out has dtype {plain(out.dtype)} but must have "
                f"{plain(result.dtype)}"
            )
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return run


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.copy_(function(input, *args, **kwargs))

    return run


_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    _aten.matmul.default: _matmul,
    _aten.mm.default: _matmul,
    _aten.mm.dtype: _matmul,
    _aten.bmm.default: _matmul,
    _aten.bmm.dtype: _matmul,
    _aten.mv.default: _matmul,
    _aten.dot.default: _matmul,
    _aten.linear.default: _linear,
    _aten.addmm.default: _addmm,
    _aten.addmm.dtype: _addmm,
    _aten.addmm_.default: _in_place(_addmm),
    _aten.addmv.default: _addmv,
    _aten.addmv_.default: _in_place(_addmv),
    _aten.baddbmm.default: _baddbmm,
    _aten.baddbmm.dtype: _baddbmm,
    _aten.baddbmm_.default: _in_place(_baddbmm),
    _aten.matmul.out: _into(_matmul),
    _aten.mm.out: _into(_matmul),
    _aten.bmm.out: _into(_matmul),
    _aten.mv.out: _into(_matmul),
    _aten.dot.out: _into(_matmul),
    _aten.addmm.out: _into(_addmm),
    _aten.addmv.out: _into(_addmv),
    _aten.baddbmm.out: _into(_baddbmm),
}
