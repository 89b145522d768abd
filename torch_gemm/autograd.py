"""Gradients and autocast of the ops: kernels for torch's Autograd, ADInplaceOrView and Autocast keys.

`torch.library.register_autograd` would refuse the .out overloads and could not let `linear` save what its
activation needs, so the kernels are registered directly. Every backward is written in differentiable ops,
so that it can be differentiated again, and its GEMMs are tgemm ops on transposed views, without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from torch_gemm import _library

_C = torch._C
_aten = torch.ops.aten
_tgemm = torch.ops.tgemm

_AUTOCAST_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
_ALL_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastCUDA) | _C.DispatchKeySet(
    _C.DispatchKey.AutocastCPU
)
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_MATMUL, _MATMUL_OUT = _tgemm.matmul.default, _tgemm.matmul.out
_LINEAR, _LINEAR_OUT = _tgemm.linear.default, _tgemm.linear.out
_LINEAR_PREACT = _tgemm._linear_preact.default
_LINEAR_GLU, _LINEAR_GLU_OUT = _tgemm.linear_glu.default, _tgemm.linear_glu.out
_LINEAR_GLU_PREACT = _tgemm._linear_glu_preact.default
_ADDMM, _ADDMM_OUT = _tgemm.addmm.default, _tgemm.addmm.out


_AFTER_AUTOGRAD = _C._after_autograd_keyset


def _below_autograd(op: Any, keyset: Any, *args: Any, **options: Any) -> Any:
    with _C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & _AFTER_AUTOGRAD, *args, **options)


def _forward(op: Any, keyset: Any, *args: Any, **options: Any) -> Any:
    """The op inside a forward, where autograd has switched itself off."""
    if not _C._are_functorch_transforms_active():
        return _below_autograd(op, keyset, *args, **options)
    # Outer transforms are still to come, and they must see what happens here.
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below_autograd(op, keyset, *args, **options)


def _apply(function: Any, *args: Any) -> Any:
    """``function.apply`` on one level of torch.func's transforms."""
    if not _C._are_functorch_transforms_active():
        return function.apply(*args)
    # When the dispatcher calls an Autograd kernel it has come down to one level already, and what the
    # forward redispatches goes on to the next. Only torch.autograd.Function would start from the top.
    before = _C._functorch.get_single_level_autograd_function_allowed()
    _C._functorch.set_single_level_autograd_function_allowed(True)
    try:
        return function.apply(*args)
    finally:
        _C._functorch.set_single_level_autograd_function_allowed(before)


def _wants_gradient(*tensors: Tensor | None) -> bool:
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    return torch.is_grad_enabled() and _C._any_requires_grad(*tensors)


def _refuse_tangents(tensors: tuple[Tensor | None, ...]) -> None:
    """Dropping a tangent would be a derivative of zero, without a word."""
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError("tgemm: forward-mode derivatives are not supported")


# --- The backward GEMMs ---------------------------------------------------------------------------


def _product(
    x: Tensor,
    y: Tensor,
    precision: str | None,
    alpha: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``alpha * (x @ y)``, in `dtype`."""
    if alpha == 1.0:
        return _MATMUL(x, y, precision=precision, out_dtype=dtype)
    # With beta = 0 the first argument is never read.
    return _ADDMM(
        x.new_empty(()), x, y, beta=0.0, alpha=alpha, precision=precision, out_dtype=dtype
    )


def _sum_to(grad: Tensor, sizes: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """The gradient of broadcasting a tensor of these sizes and dtype."""
    return grad.sum_to_size(sizes).to(dtype)


def _reduced_product(x: Tensor, y: Tensor, sizes: Sequence[Any], precision: str | None) -> Tensor:
    """``x @ y``, summed over the batch dimensions that an operand of these sizes was broadcast along."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    if tuple(batch) == tuple(sizes[:-2]):
        return _product(x, y, precision)
    # The partial products stay in FP32 until they are added.
    partial = torch.float32 if x.dtype in _HALF_DTYPES else None
    return _sum_to(_product(x, y, precision, dtype=partial), sizes, x.dtype)


def _matmul_gradients(
    grad: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    a_sizes: Sequence[Any],
    b_sizes: Sequence[Any],
    precision: str | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``a @ b``. `a` may be None if b needs no gradient, and the other way round."""
    # As torch.matmul does: a 1-d operand is a matrix with one row or column.
    if len(b_sizes) == 1:
        grad = grad.unsqueeze(-1)
    if len(a_sizes) == 1:
        grad = grad.unsqueeze(-2)
    a_matrix = (1, *a_sizes) if len(a_sizes) == 1 else tuple(a_sizes)
    b_matrix = (*b_sizes, 1) if len(b_sizes) == 1 else tuple(b_sizes)

    grad_a = grad_b = None
    if needs[0] and b is not None:
        b = b.view(b_matrix) if len(b_sizes) == 1 else b
        grad_a = _reduced_product(grad, b.mH, a_matrix, precision)
        grad_a = grad_a.squeeze(-2) if len(a_sizes) == 1 else grad_a
    if needs[1] and a is not None:
        a = a.unsqueeze(0) if len(a_sizes) == 1 else a
        if len(b_matrix) == 2:
            # One GEMM over all rows, where a batched one would leave partial sums to add.
            grad_b = _product(a.flatten(0, -2).mH, grad.flatten(0, -2), precision)
        else:
            grad_b = _reduced_product(a.mH, grad, b_matrix, precision)
        grad_b = grad_b.squeeze(-1) if len(b_sizes) == 1 else grad_b
    return grad_a, grad_b


class _Matmul(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, keyset: Any, a: Tensor, b: Tensor, options: dict[str, Any]) -> Tensor:
        _, needs_a, needs_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.a_sizes, ctx.b_sizes, ctx.dtype = a.shape, b.shape, a.dtype
        ctx.precision = options.get("precision")
        return _forward(_MATMUL, keyset, a, b, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        with _C._ExcludeDispatchKeyGuard(_ALL_AUTOCAST):
            grads = _matmul_gradients(
                grad.to(ctx.dtype),
                a,
                b,
                ctx.a_sizes,
                ctx.b_sizes,
                ctx.precision,
                ctx.needs_input_grad[1:3],
            )
        return None, *grads, None


class _Addmm(_SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, keyset: Any, input: Tensor, mat1: Tensor, mat2: Tensor, options: dict[str, Any]
    ) -> Tensor:
        _, _, needs_mat1, needs_mat2, _ = ctx.needs_input_grad
        ctx.save_for_backward(mat1 if needs_mat2 else None, mat2 if needs_mat1 else None)
        ctx.input_sizes, ctx.input_dtype, ctx.dtype = input.shape, input.dtype, mat1.dtype
        ctx.alpha, ctx.beta = options.get("alpha", 1.0), options.get("beta", 1.0)
        ctx.precision = options.get("precision")
        return _forward(_ADDMM, keyset, input, mat1, mat2, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mat1, mat2 = ctx.saved_tensors
        grad_input = grad_mat1 = grad_mat2 = None
        with _C._ExcludeDispatchKeyGuard(_ALL_AUTOCAST):
            if ctx.needs_input_grad[1]:
                scaled = grad if ctx.beta == 1.0 else grad * ctx.beta
                grad_input = _sum_to(scaled, ctx.input_sizes, ctx.input_dtype)
            grad = grad.to(ctx.dtype)
            if ctx.needs_input_grad[2]:
                grad_mat1 = _product(grad, mat2.mH, ctx.precision, ctx.alpha)
            if ctx.needs_input_grad[3]:
                grad_mat2 = _product(mat1.mH, grad, ctx.precision, ctx.alpha)
        return None, grad_input, grad_mat1, grad_mat2, None


def _activation_gradient(grad: Tensor, saved: Tensor, activation: str) -> Tensor:
    """`saved` is the pre-activation; for relu the output does as well, having the same sign."""
    if activation == "relu":
        return _aten.threshold_backward(grad, saved, 0)
    if activation == "silu":
        if not torch.is_grad_enabled():
            return _aten.silu_backward(grad, saved)
        # torch has no derivative of silu_backward.
        gate = saved.sigmoid()
        return grad * gate * (1 + saved * (1 - gate))
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return _aten.gelu_backward(grad, saved, approximate=approximate)


def _bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    rows = list(range(grad.dim() - 1))
    wide = torch.promote_types(grad.dtype, dtype)
    return (grad.sum(rows, dtype=wide) if rows else grad).to(dtype)


def _weight_gradient(grad: Tensor, input: Tensor, precision: str | None) -> Tensor:
    if grad.dim() == 1:
        grad, input = grad.unsqueeze(0), input.unsqueeze(0)
    return _product(grad.flatten(0, -2).mT, input.flatten(0, -2).conj(), precision)


def _save_linear(
    ctx: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    options: dict[str, Any],
    for_activation: Tensor | None,
) -> None:
    _, needs_input, needs_weight, _, _, _ = ctx.needs_input_grad
    ctx.save_for_backward(
        input if needs_weight else None, weight if needs_input else None, for_activation
    )
    ctx.set_materialize_grads(False)
    ctx.dtype = input.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_sizes = None if residual is None else residual.shape
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.activation, ctx.precision = options.get("activation"), options.get("precision")


def _linear_gradients(
    ctx: Any, grad: Tensor | None, grad_preact: Tensor | None
) -> tuple[Tensor | None, ...]:
    input, weight, for_activation = ctx.saved_tensors
    _, needs_input, needs_weight, needs_bias, needs_residual, _ = ctx.needs_input_grad
    grad_input = grad_weight = grad_bias = grad_residual = None
    with _C._ExcludeDispatchKeyGuard(_ALL_AUTOCAST):
        if needs_residual and grad is not None:
            grad_residual = _sum_to(grad, ctx.residual_sizes, ctx.residual_dtype)
        # From here on `grad` is the gradient of input @ weight.T + bias.
        if needs_input or needs_weight or needs_bias:
            if grad is not None and ctx.activation is not None:
                grad = _activation_gradient(grad, for_activation, ctx.activation)
            if grad_preact is not None:
                grad = grad_preact if grad is None else grad + grad_preact
        if grad is not None and needs_bias:
            grad_bias = _bias_gradient(grad, ctx.bias_dtype)
        if grad is not None and (needs_input or needs_weight):
            grad = grad.to(ctx.dtype)
            if needs_input:
                grad_input = _product(grad, weight.conj(), ctx.precision)
            if needs_weight:
                grad_weight = _weight_gradient(grad, input, ctx.precision)
    return None, grad_input, grad_weight, grad_bias, grad_residual, None


class _Linear(_SingleLevelFunction):
    """No activation, or a relu whose output shows its sign."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        out = _forward(_LINEAR, keyset, input, weight, bias, residual, **options)
        saved = out if options.get("activation") == "relu" and residual is None else None
        _save_linear(ctx, input, weight, bias, residual, options, saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return _linear_gradients(ctx, grad, None)


class _LinearPreact(_SingleLevelFunction):
    """Any activation. The pre-activation is an output, so that a second derivative flows through it."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        out, preact = _forward(_LINEAR_PREACT, keyset, input, weight, bias, residual, **options)
        _save_linear(ctx, input, weight, bias, residual, options, preact)
        return out, preact

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_preact: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return _linear_gradients(ctx, grad, grad_preact)


def _activation(values: Tensor, activation: str) -> Tensor:
    if activation == "gelu_tanh":
        return _aten.gelu(values, approximate="tanh")
    return {"relu": _aten.relu, "gelu": _aten.gelu, "silu": _aten.silu}[activation](values)


class _LinearGluPreact(_SingleLevelFunction):
    """``act(gate) * up`` with gate and up as outputs, so that second derivatives flow through them."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: Any,
        input: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, gate, up = _forward(
            _LINEAR_GLU_PREACT,
            keyset,
            input,
            gate_weight,
            up_weight,
            gate_bias,
            up_bias,
            **options,
        )
        _, needs_input, needs_gate_weight, needs_up_weight, needs_gate_bias, _, _ = (
            ctx.needs_input_grad
        )
        needs_gate = needs_input or needs_gate_weight or needs_gate_bias
        ctx.save_for_backward(
            input if needs_gate_weight or needs_up_weight else None,
            gate_weight if needs_input else None,
            up_weight if needs_input else None,
            gate,
            up if needs_gate else None,
        )
        ctx.set_materialize_grads(False)
        ctx.dtype = input.dtype
        ctx.gate_bias_dtype = None if gate_bias is None else gate_bias.dtype
        ctx.up_bias_dtype = None if up_bias is None else up_bias.dtype
        ctx.activation, ctx.precision = options.get("activation", "silu"), options.get("precision")
        return out, gate, up

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_gate: Tensor | None, grad_up: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        input, gate_weight, up_weight, gate, up = ctx.saved_tensors
        _, needs_input, needs_gate_weight, needs_up_weight, needs_gate_bias, needs_up_bias, _ = (
            ctx.needs_input_grad
        )
        grad_input = grad_gate_weight = grad_up_weight = grad_gate_bias = grad_up_bias = None
        with _C._ExcludeDispatchKeyGuard(_ALL_AUTOCAST):
            if grad is not None and (needs_input or needs_gate_weight or needs_gate_bias):
                through = _activation_gradient(grad * up, gate, ctx.activation)
                grad_gate = through if grad_gate is None else grad_gate + through
            if grad is not None and (needs_input or needs_up_weight or needs_up_bias):
                through = grad * _activation(gate, ctx.activation)
                grad_up = through if grad_up is None else grad_up + through
            if grad_gate is not None:
                if needs_gate_bias:
                    grad_gate_bias = _bias_gradient(grad_gate, ctx.gate_bias_dtype)
                grad_gate = grad_gate.to(ctx.dtype)
                if needs_gate_weight:
                    grad_gate_weight = _weight_gradient(grad_gate, input, ctx.precision)
            if grad_up is not None:
                if needs_up_bias:
                    grad_up_bias = _bias_gradient(grad_up, ctx.up_bias_dtype)
                grad_up = grad_up.to(ctx.dtype)
                if needs_up_weight:
                    grad_up_weight = _weight_gradient(grad_up, input, ctx.precision)
            if needs_input:
                grad_input = _glu_input_gradient(
                    [(grad_gate, gate_weight), (grad_up, up_weight)], ctx.precision
                )
        return (
            None,
            grad_input,
            grad_gate_weight,
            grad_up_weight,
            grad_gate_bias,
            grad_up_bias,
            None,
        )


def _glu_input_gradient(
    factors: Sequence[tuple[Tensor | None, Tensor]], precision: str | None
) -> Tensor | None:
    """The sum of ``grad @ weight``, each but the first added by the epilogue of its own GEMM."""
    present = [(grad, weight) for grad, weight in factors if grad is not None]
    total = None
    for index, (grad, weight) in enumerate(present):
        last = index == len(present) - 1
        # A sum that is still added to stays in FP32.
        dtype = torch.float32 if grad.dtype in _HALF_DTYPES and not last else None
        total = _LINEAR(grad, weight.mT, None, total, precision=precision, out_dtype=dtype)
    return total


# --- Autograd kernels -----------------------------------------------------------------------------
# The dispatcher passes positional arguments in args, keyword-only ones in kwargs, without those that
# equal their defaults.


def _matmul(keyset: Any, a: Tensor, b: Tensor, **options: Any) -> Tensor:
    if _wants_gradient(a, b):
        return _apply(_Matmul, keyset, a, b, options)
    return _below_autograd(_MATMUL, keyset, a, b, **options)


def _addmm(keyset: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    if _wants_gradient(input, mat1, mat2):
        return _apply(_Addmm, keyset, input, mat1, mat2, options)
    return _below_autograd(_ADDMM, keyset, input, mat1, mat2, **options)


def _linear(
    keyset: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    **options: Any,
) -> Tensor:
    if not _wants_gradient(input, weight, bias, residual):
        return _below_autograd(_LINEAR, keyset, input, weight, bias, residual, **options)
    activation = options.get("activation")
    # A relu's output tells where it was active, unless a residual was added to it.
    output_tells = activation is None or (activation == "relu" and residual is None)
    if not output_tells and _C._any_requires_grad(input, weight, bias):
        return _linear_preact(keyset, input, weight, bias, residual, **options)[0]
    return _apply(_Linear, keyset, input, weight, bias, residual, options)


def _linear_preact(
    keyset: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    if _wants_gradient(input, weight, bias, residual):
        return _apply(_LinearPreact, keyset, input, weight, bias, residual, options)
    return _below_autograd(_LINEAR_PREACT, keyset, input, weight, bias, residual, **options)


def _linear_glu(keyset: Any, *tensors: Tensor | None, **options: Any) -> Tensor:
    if _wants_gradient(*tensors):
        return _linear_glu_preact(keyset, *tensors, **options)[0]
    return _below_autograd(_LINEAR_GLU, keyset, *tensors, **options)


def _linear_glu_preact(
    keyset: Any,
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = input, gate_weight, up_weight, gate_bias, up_bias
    if _wants_gradient(*tensors):
        return _apply(_LinearGluPreact, keyset, *tensors, options)
    return _below_autograd(_LINEAR_GLU_PREACT, keyset, *tensors, **options)


def _without_gradient(op: Any) -> Callable[..., None]:
    name = op._schema.name.replace("::", ".")
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> None:
        if torch.is_grad_enabled():
            for argument, value in (*zip(names, args, strict=False), *kwargs.items()):
                if isinstance(value, Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"{name}: out= does not support gradients, but {argument} requires grad"
                    )
        _below_autograd(op, keyset, *args, **kwargs)

    return kernel


def _bumping_version(op: Any) -> Callable[..., None]:
    """Tells autograd that `out` was written, so that a graph which saved it notices."""

    def kernel(keyset: Any, *args: Any, out: Tensor, **kwargs: Any) -> None:
        torch.autograd.graph.increment_version(out)
        op.redispatch(keyset & _C._after_ADInplaceOrView_keyset, *args, out=out, **kwargs)

    return kernel


def _resolving_bits(op: Any) -> Callable[..., None]:
    """For negated and conjugated views. torch's own fallback expects a mutating op to return `out`."""

    def kernel(*args: Any, out: Tensor, **kwargs: Any) -> None:
        plain = [
            value.resolve_conj().resolve_neg() if isinstance(value, Tensor) else value
            for value in args
        ]
        if not (out.is_conj() or out.is_neg()):
            op(*plain, out=out, **kwargs)
            return
        result = torch.empty_like(out)
        op(*plain, out=result, **kwargs)
        out.copy_(result)

    return kernel


# --- Autocast kernels -----------------------------------------------------------------------------


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value.to(dtype)``; on CUDA from torch's own cache where torch would cache it."""
    if (
        value.is_cuda
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and value.dim() == 2
        and not torch.compiler.is_compiling()
    ):
        # The cache, which autocast empties when it ends, has no interface. But einsum on CUDA casts
        # through it, and of a single operand whose indices stay in order it returns just a view.
        return _aten.einsum.default("ij->ij", [value])
    return value.to(dtype)


def _autocast(op: Any, device_type: str, operands: Sequence[int]) -> Callable[..., Any]:
    """Casts as F.linear and matmul do under autocast, then calls `op` with autocast off.

    `operands` are the positions of the matrices. A bias or residual in float32 stays what it is:
    the kernels read it as it is, more exactly and without another pass over memory.
    """
    key = _C.DispatchKeySet(getattr(_C.DispatchKey, _AUTOCAST_KEYS[device_type]))

    def castable(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type == device_type
        )

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        cast = [
            _cast(value, dtype)
            if castable(value) and (index in operands or value.dtype is not torch.float32)
            else value
            for index, value in enumerate(args)
        ]
        with _C._ExcludeDispatchKeyGuard(key):
            return op(*cast, **kwargs)

    return kernel


def _without_autocast(op: Any, device_type: str) -> Callable[..., None]:
    """The .out overloads do not cast, as in torch; nor may the ATen ops inside."""
    key = _C.DispatchKeySet(getattr(_C.DispatchKey, _AUTOCAST_KEYS[device_type]))

    def kernel(*args: Any, **kwargs: Any) -> None:
        with _C._ExcludeDispatchKeyGuard(key):
            op(*args, **kwargs)

    return kernel


def _register() -> None:
    impl = _library.registrations.impl
    functional = (
        ("matmul", _matmul, _MATMUL, (0, 1)),
        ("linear", _linear, _LINEAR, (0, 1)),
        ("_linear_preact", _linear_preact, _LINEAR_PREACT, (0, 1)),
        ("linear_glu", _linear_glu, _LINEAR_GLU, (0, 1, 2)),
        ("_linear_glu_preact", _linear_glu_preact, _LINEAR_GLU_PREACT, (0, 1, 2)),
        ("addmm", _addmm, _ADDMM, (1, 2)),
    )
    for name, kernel, op, operands in functional:
        impl(name, kernel, "Autograd", with_keyset=True)
        for device_type, key in _AUTOCAST_KEYS.items():
            impl(name, _autocast(op, device_type, operands), key)
    for name, op in (
        ("matmul.out", _MATMUL_OUT),
        ("linear.out", _LINEAR_OUT),
        ("linear_glu.out", _LINEAR_GLU_OUT),
        ("addmm.out", _ADDMM_OUT),
    ):
        impl(name, _without_gradient(op), "Autograd", with_keyset=True)
        impl(name, _bumping_version(op), "ADInplaceOrView", with_keyset=True)
        impl(name, _resolving_bits(op), "Conjugate")
        impl(name, _resolving_bits(op), "Negative")
        for device_type, key in _AUTOCAST_KEYS.items():
            impl(name, _without_autocast(op, device_type), key)


_register()
