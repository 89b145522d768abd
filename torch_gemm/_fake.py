"""The ops on fake and meta tensors: what torch.compile and torch.export see.

The counterpart of csrc/ops/arguments.cpp, with the same checks in the same order and the same sentences;
only what needs memory (overlap) or the kernel table (`force_kernel`) is left to the real call. Sizes may
be symbolic: they are compared through `torch._check`, which does not specialise them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_gemm import _library
from torch_gemm.notation import plain
from torch_gemm.ops import ACTIVATIONS, PRECISIONS

_GEMM_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_COMPLEX_DTYPES = (torch.complex64, torch.complex128)
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _check(condition: Any, sentence: str) -> None:
    """For what is known without sizes."""
    if not condition:
        raise RuntimeError(sentence)


def _is_one(size: Any) -> bool:
    """Whether a size is known to be 1; one that depends on data is taken as another."""
    if isinstance(size, int):
        return size == 1
    # Costs more than a second to import, so it waits for a symbolic size.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size == 1)


def _shape(sizes: Sequence[Any]) -> str:
    return str(tuple(sizes))


def _check_names(op: str, activation: str | None, precision: str | None) -> None:
    _check(
        activation is None or activation in ACTIVATIONS,
        f"{op}: activation '{activation}' is unknown; use relu, gelu, gelu_tanh or silu",
    )
    _check(
        precision is None or precision in PRECISIONS,
        f"{op}: precision '{precision}' is unknown; use ieee, tf32, 3xtf32, bf16 or fp16",
    )


def _check_tensors(op: str, tensors: dict[str, Tensor | None]) -> None:
    """Layouts and devices. The first tensor is the first operand."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in present.items():
        layout = plain(tensor.layout)
        _check(
            tensor.layout is torch.strided,
            f"{op}: {name} has layout {layout}; only strided tensors are supported",
        )
    first_name, first = next(iter(present.items()))
    for name, tensor in present.items():
        _check(
            tensor.device == first.device,
            f"{op}: {name} is on {tensor.device} but {first_name} is on {first.device}; "
            "all tensors must be on one device",
        )


def _check_operand_dtypes(op: str, operands: dict[str, Tensor]) -> None:
    for name, operand in operands.items():
        _check(
            operand.dtype in _GEMM_DTYPES
            or operand.dtype is torch.float64
            or operand.dtype in _COMPLEX_DTYPES
            or operand.dtype in _INTEGER_DTYPES,
            f"{op}: {name} has dtype {plain(operand.dtype)}, which is not supported; "
            "use float16, bfloat16 or float32",
        )
    (first_name, first), *others = operands.items()
    every = "both" if len(operands) == 2 else "all"
    for name, operand in others:
        _check(
            operand.dtype == first.dtype,
            f"{op}: {name} has dtype {plain(operand.dtype)} but {first_name} has "
            f"{plain(first.dtype)}; {every} operands need one dtype",
        )
    if first.dtype in _INTEGER_DTYPES:
        start = f"{op}: {first_name} has dtype {plain(first.dtype)}"
        _check(op == "tgemm.matmul", f"{start}; integers are supported by tgemm.matmul alone")
        _check(first.device.type != "cuda", f"{start}; integers are supported on the CPU alone")


def _result_dtype(op: str, operands: torch.dtype, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is None or out_dtype == operands:
        return operands
    usable = "float16, bfloat16 or float32" if operands in _GEMM_DTYPES else plain(operands)
    _check(
        operands in _GEMM_DTYPES and out_dtype in _GEMM_DTYPES,
        f"{op}: out_dtype {plain(out_dtype)} is not supported for {plain(operands)} operands; "
        f"use {usable}",
    )
    return out_dtype


def _check_addend_dtype(
    op: str, name: str, addend: Tensor, operands: torch.dtype, result: torch.dtype
) -> None:
    usable = [operands, result, torch.float32] if operands in _GEMM_DTYPES else [operands]
    names = " or ".join(dict.fromkeys(map(plain, usable)))
    _check(
        addend.dtype in usable,
        f"{op}: {name} has dtype {plain(addend.dtype)} but must have {names}",
    )


def _check_activation_dtype(op: str, activation: str | None, operands: torch.dtype) -> None:
    _check(
        activation is None or operands not in _COMPLEX_DTYPES,
        f"{op}: activation '{activation}' is not defined for {plain(operands)}",
    )


def _check_bias(
    op: str,
    name: str,
    bias: Tensor | None,
    operands: torch.dtype,
    result: torch.dtype,
    sizes: Sequence[Any],
) -> None:
    if bias is None:
        return
    _check_addend_dtype(op, name, bias, operands, result)

    def sentence() -> str:
        return (
            f"{op}: {name} has shape {_shape(bias.shape)} but must be {_shape(sizes[-1:])}, "
            "one value per output feature"
        )

    if bias.dim() != 1:
        raise RuntimeError(sentence())
    torch._check(bias.shape[0] == sizes[-1], sentence)


def _check_residual(
    op: str,
    name: str,
    residual: Tensor | None,
    operands: torch.dtype,
    result: torch.dtype,
    sizes: Sequence[Any],
) -> None:
    if residual is None:
        return
    _check_addend_dtype(op, name, residual, operands, result)

    def sentence() -> str:
        return (
            f"{op}: {name} has shape {_shape(residual.shape)}, which does not broadcast to the "
            f"output's {_shape(sizes)}"
        )

    if residual.dim() > len(sizes):
        raise RuntimeError(sentence())
    for own, size in zip(residual.shape, sizes[len(sizes) - residual.dim() :], strict=True):
        if not _is_one(own):
            torch._check(own == size, sentence)


def _check_out(op: str, out: Tensor, dtype: torch.dtype, sizes: Sequence[Any]) -> None:
    _check(
        out.dtype == dtype,
        f"{op}: out has dtype {plain(out.dtype)} but the result has {plain(dtype)}",
    )

    def sentence() -> str:
        return f"{op}: out has shape {_shape(out.shape)} but the result has {_shape(sizes)}"

    if out.dim() != len(sizes):
        raise RuntimeError(sentence())
    for own, size in zip(out.shape, sizes, strict=True):
        torch._check(own == size, sentence)


def _check_force_kernel(op: str, name: str, operand: Tensor, force_kernel: str | None) -> None:
    _check(
        force_kernel is None or operand.device.type != "cpu",
        f"{op}: force_kernel '{force_kernel}' names a CUDA kernel, but {name} is on the CPU",
    )


def _matmul_sizes(op: str, a: Tensor, b: Tensor) -> list[Any]:
    start = f"{op}: a is {_shape(a.shape)} and b is {_shape(b.shape)}: "
    inner_a = a.shape[-1]
    inner_b = b.shape[0] if b.dim() == 1 else b.shape[-2]
    torch._check(
        inner_a == inner_b, lambda: f"{start}the inner sizes {inner_a} and {inner_b} differ"
    )
    batch_a, batch_b = list(a.shape[:-2]), list(b.shape[:-2])
    batch = max(len(batch_a), len(batch_b))
    batch_a = [1] * (batch - len(batch_a)) + batch_a
    batch_b = [1] * (batch - len(batch_b)) + batch_b
    sizes = []
    for size_a, size_b in zip(batch_a, batch_b, strict=True):
        if _is_one(size_a):
            sizes.append(size_b)
        elif _is_one(size_b):
            sizes.append(size_a)
        else:
            torch._check(
                size_a == size_b,
                lambda x=size_a, y=size_b: f"{start}the batch sizes {x} and {y} do not broadcast",
            )
            sizes.append(size_a)
    if a.dim() > 1:
        sizes.append(a.shape[-2])
    if b.dim() > 1:
        sizes.append(b.shape[-1])
    return sizes


def _linear_sizes(op: str, input: Tensor, name: str, weight: Tensor) -> list[Any]:
    _check(input.dim() > 0, f"{op}: input is a 0-d tensor; it needs at least 1 dimension")
    _check(
        weight.dim() == 2,
        f"{op}: {name} has shape {_shape(weight.shape)} but must be 2-d, "
        "(out_features, in_features)",
    )
    torch._check(
        input.shape[-1] == weight.shape[1],
        lambda: (
            f"{op}: input is {_shape(input.shape)} and {name} is {_shape(weight.shape)}: "
            f"the last sizes {input.shape[-1]} and {weight.shape[1]} differ"
        ),
    )
    return [*input.shape[:-1], weight.shape[0]]


def _matmul(
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    force_kernel: str | None = None,
) -> tuple[list[Any], torch.dtype]:
    op = "tgemm.matmul"
    _check_names(op, None, precision)
    _check_tensors(op, {"a": a, "b": b, "out": out})
    _check_operand_dtypes(op, {"a": a, "b": b})
    for name, operand in (("a", a), ("b", b)):
        _check(
            operand.dim() > 0,
            f"{op}: {name} is a 0-d tensor; both operands need at least 1 dimension",
        )
    sizes = _matmul_sizes(op, a, b)
    dtype = _result_dtype(op, a.dtype, out_dtype)
    if out is not None:
        _check_out(op, out, dtype, sizes)
    _check_force_kernel(op, "a", a, force_kernel)
    return sizes, dtype


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    static_weight: bool = False,
    force_kernel: str | None = None,
) -> tuple[list[Any], torch.dtype]:
    op = "tgemm.linear"
    _check_names(op, activation, precision)
    _check_tensors(
        op, {"input": input, "weight": weight, "bias": bias, "residual": residual, "out": out}
    )
    _check_operand_dtypes(op, {"input": input, "weight": weight})
    sizes = _linear_sizes(op, input, "weight", weight)
    dtype = _result_dtype(op, input.dtype, out_dtype)
    _check_activation_dtype(op, activation, input.dtype)
    _check_bias(op, "bias", bias, input.dtype, dtype, sizes)
    _check_residual(op, "residual", residual, input.dtype, dtype, sizes)
    if out is not None:
        _check_out(op, out, dtype, sizes)
    _check_force_kernel(op, "input", input, force_kernel)
    return sizes, dtype


def _linear_glu(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    out: Tensor | None,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    static_weight: bool = False,
    force_kernel: str | None = None,
) -> tuple[list[Any], torch.dtype]:
    op = "tgemm.linear_glu"
    operands = {"input": input, "gate_weight": gate_weight, "up_weight": up_weight}
    _check_names(op, activation, precision)
    _check_tensors(op, operands | {"gate_bias": gate_bias, "up_bias": up_bias, "out": out})
    _check_operand_dtypes(op, operands)
    sizes = _linear_sizes(op, input, "gate_weight", gate_weight)

    def up_weight_sentence() -> str:
        return (
            f"{op}: up_weight has shape {_shape(up_weight.shape)} but must be "
            f"{_shape(gate_weight.shape)}, the shape of gate_weight"
        )

    if up_weight.dim() != 2:
        raise RuntimeError(up_weight_sentence())
    for own, size in zip(up_weight.shape, gate_weight.shape, strict=True):
        torch._check(own == size, up_weight_sentence)
    dtype = _result_dtype(op, input.dtype, out_dtype)
    _check_activation_dtype(op, activation, input.dtype)
    _check_bias(op, "gate_bias", gate_bias, input.dtype, dtype, sizes)
    _check_bias(op, "up_bias", up_bias, input.dtype, dtype, sizes)
    if out is not None:
        _check_out(op, out, dtype, sizes)
    _check_force_kernel(op, "input", input, force_kernel)
    return sizes, dtype


def _addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out: Tensor | None,
    beta: float = 1.0,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    force_kernel: str | None = None,
) -> tuple[list[Any], torch.dtype]:
    op = "tgemm.addmm"
    _check_names(op, None, precision)
    _check_tensors(op, {"mat1": mat1, "mat2": mat2, "input": input, "out": out})
    _check_operand_dtypes(op, {"mat1": mat1, "mat2": mat2})
    for name, operand in (("mat1", mat1), ("mat2", mat2)):
        _check(
            operand.dim() == 2,
            f"{op}: {name} has shape {_shape(operand.shape)} but must be 2-d",
        )
    torch._check(
        mat1.shape[1] == mat2.shape[0],
        lambda: (
            f"{op}: mat1 is {_shape(mat1.shape)} and mat2 is {_shape(mat2.shape)}: "
            f"the inner sizes {mat1.shape[1]} and {mat2.shape[0]} differ"
        ),
    )
    sizes = [mat1.shape[0], mat2.shape[1]]
    dtype = _result_dtype(op, mat1.dtype, out_dtype)
    _check_residual(op, "input", input, mat1.dtype, dtype, sizes)
    if out is not None:
        _check_out(op, out, dtype, sizes)
    _check_force_kernel(op, "mat1", mat1, force_kernel)
    return sizes, dtype


def _fake_matmul(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    sizes, dtype = _matmul(a, b, None, **options)
    return a.new_empty(sizes, dtype=dtype)


def _fake_matmul_out(a: Tensor, b: Tensor, *, out: Tensor, **options: Any) -> None:
    _matmul(a, b, out, **options)


def _fake_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    **options: Any,
) -> Tensor:
    sizes, dtype = _linear(input, weight, bias, residual, None, **options)
    return input.new_empty(sizes, dtype=dtype)


def _fake_linear_out(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor,
    **options: Any,
) -> None:
    _linear(input, weight, bias, residual, out, **options)


def _fake_linear_preact(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    sizes, dtype = _linear(input, weight, bias, residual, None, **options)
    return input.new_empty(sizes, dtype=dtype), input.new_empty(sizes, dtype=dtype)


def _fake_linear_glu(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    sizes, dtype = _linear_glu(input, gate_weight, up_weight, gate_bias, up_bias, None, **options)
    return input.new_empty(sizes, dtype=dtype)


def _fake_linear_glu_out(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    out: Tensor,
    **options: Any,
) -> None:
    _linear_glu(input, gate_weight, up_weight, gate_bias, up_bias, out, **options)


def _fake_linear_glu_preact(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes, dtype = _linear_glu(input, gate_weight, up_weight, gate_bias, up_bias, None, **options)
    out, gate, up = (input.new_empty(sizes, dtype=dtype) for _ in range(3))
    return out, gate, up


def _fake_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    sizes, dtype = _addmm(input, mat1, mat2, None, **options)
    return mat1.new_empty(sizes, dtype=dtype)


def _fake_addmm_out(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, out: Tensor, **options: Any
) -> None:
    _addmm(input, mat1, mat2, out, **options)


_FAKES = {
    "matmul": _fake_matmul,
    "matmul.out": _fake_matmul_out,
    "linear": _fake_linear,
    "linear.out": _fake_linear_out,
    "_linear_preact": _fake_linear_preact,
    "linear_glu": _fake_linear_glu,
    "linear_glu.out": _fake_linear_glu_out,
    "_linear_glu_preact": _fake_linear_glu_preact,
    "addmm": _fake_addmm,
    "addmm.out": _fake_addmm_out,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"tgemm::{_name}", _fake, lib=_library.registrations)
