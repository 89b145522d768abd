"""The ops under torch.vmap: each becomes one larger op, with a batch in front.

Where a kernel can take the batch as it is (activations batched, weights not: the usual case) that is the
same op; where it cannot, a batched product and the epilogue in ATen's ops. Those compute in FP32 and round
once, as the kernels do.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_gemm import _library

_tgemm = torch.ops.tgemm
_aten = torch.ops.aten
_HALF_DTYPES = (torch.float16, torch.bfloat16)

Batched = tuple[Tensor, bool]  # a tensor, and whether its first dimension is the batch


def _to_front(tensor: Tensor, dim: int | None) -> Batched:
    return (tensor, False) if dim is None else (tensor.movedim(dim, 0), True)


def _logical_dim(batched: Batched) -> int:
    tensor, has_batch = batched
    return tensor.dim() - has_batch


def _padded(batched: Batched, dims: int) -> Tensor:
    """With as many dimensions behind the batch: what broadcasting would put in front goes behind it."""
    tensor, has_batch = batched
    missing = dims - _logical_dim(batched)
    if not has_batch or missing <= 0:
        return tensor
    return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:])


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """What an intermediate result has to be computed in."""
    return torch.float32 if dtype in _HALF_DTYPES else None


def _product(a: Batched, b: Batched, **options: Any) -> Tensor:
    """torch.matmul of each pair in the batch."""
    for name, operand in (("a", a), ("b", b)):
        if _logical_dim(operand) == 0:
            raise RuntimeError(
                f"tgemm.matmul: {name} is a 0-d tensor; both operands need at least 1 dimension"
            )
    row, column = _logical_dim(a) == 1, _logical_dim(b) == 1
    a = (a[0].unsqueeze(-2), a[1]) if row else a
    b = (b[0].unsqueeze(-1), b[1]) if column else b
    dims = max(_logical_dim(a), _logical_dim(b))
    out = _tgemm.matmul(_padded(a, dims), _padded(b, dims), **options)
    if row:
        out = out.squeeze(-2)
    return out.squeeze(-1) if column else out


def _matmul(
    info: Any, in_dims: tuple[int | None, ...], a: Tensor, b: Tensor, **options: Any
) -> tuple[Tensor, int]:
    return _product(_to_front(a, in_dims[0]), _to_front(b, in_dims[1]), **options), 0


def _activate(values: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return values
    if activation == "gelu_tanh":
        return _aten.gelu(values, approximate="tanh")
    return getattr(_aten, activation)(values)


def _epilogue_options(options: dict[str, Any], input: Tensor) -> tuple[dict[str, Any], torch.dtype]:
    """What a product whose epilogue comes later takes of an op's options, and the op's output dtype."""
    kept = {name: options[name] for name in ("precision", "force_kernel") if name in options}
    wide = _wide(input.dtype)
    if wide is not None:
        kept["out_dtype"] = wide
    return kept, options.get("out_dtype") or input.dtype


def _affine(
    input: Batched, weight: Batched, bias: Batched | None, options: dict[str, Any]
) -> Tensor:
    """``input @ weight.T + bias`` in the dtype of intermediate results."""
    out = _product(input, (weight[0].mT, weight[1]), **options)
    if bias is None:
        return out
    return out + _padded(bias, _logical_dim(input))


def _batched(dims: tuple[int | None, ...], *tensors: Tensor | None) -> list[Batched | None]:
    """`dims` may be shorter: what was left out at the end of the call is not batched."""
    dims = (*dims, *[None] * (len(tensors) - len(dims)))
    return [
        None if tensor is None else _to_front(tensor, dim)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def _first(has_batch: bool, tensor: Tensor, size: int) -> Tensor:
    return tensor if has_batch else tensor.expand(size, *tensor.shape)


def _linear(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    preact: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    x, w, b, r = _batched(in_dims, input, weight, bias, residual)
    op = _tgemm._linear_preact if preact else _tgemm.linear
    if x[1] and not w[1] and not (b is not None and b[1]):
        added = None if r is None else _padded(r, _logical_dim(x))
        return op(x[0], weight, bias, added, **options), (0, 0) if preact else 0

    kept, dtype = _epilogue_options(options, input)
    before = _affine(x, w, b, kept)
    out = _activate(before, options.get("activation"))
    if r is not None:
        out = out + _padded(r, _logical_dim(x))
    # Without a batch in the matrices, a residual alone has it.
    has_batch = x[1] or w[1] or (b is not None and b[1])
    if preact:
        return (
            (out.to(dtype), _first(has_batch, before, info.batch_size).to(dtype)),
            (0, 0),
        )
    return out.to(dtype), 0


def _linear_preact(*args: Any, **options: Any) -> tuple[Any, Any]:
    return _linear(*args, preact=True, **options)


def _linear_glu(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    preact: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    x, *rest = _batched(in_dims, input, gate_weight, up_weight, gate_bias, up_bias)
    if x[1] and not any(other is not None and other[1] for other in rest):
        op = _tgemm._linear_glu_preact if preact else _tgemm.linear_glu
        out = op(x[0], gate_weight, up_weight, gate_bias, up_bias, **options)
        return out, (0, 0, 0) if preact else 0

    kept, dtype = _epilogue_options(options, input)
    gate_w, up_w, gate_b, up_b = rest
    gate, up = _affine(x, gate_w, gate_b, kept), _affine(x, up_w, up_b, kept)
    dims = _logical_dim(x)
    # Only one of the two may have the batch.
    gate, up = (
        half if half.dim() > dims else half.expand(info.batch_size, *half.shape)
        for half in (gate, up)
    )
    out = _activate(gate, options.get("activation", "silu")) * up
    if preact:
        return (out.to(dtype), gate.to(dtype), up.to(dtype)), (0, 0, 0)
    return out.to(dtype), 0


def _linear_glu_preact(*args: Any, **options: Any) -> tuple[Any, Any]:
    return _linear_glu(*args, preact=True, **options)


def _addmm(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    **options: Any,
) -> tuple[Tensor, int]:
    added, a, b = _batched(in_dims, input, mat1, mat2)
    if alpha == beta == 1.0 and a[1] and not b[1]:
        residual = _padded(added, 2)
        return _tgemm.linear(a[0], mat2.mT, None, residual, **options), 0
    kept, dtype = _epilogue_options(options, mat1)
    out = alpha * _product(a, b, **kept)
    if beta != 0:  # otherwise the input is never read
        out = out + beta * _padded(added, 2)
    if out.dim() == 2:  # a batch of inputs that are not read
        out = out.expand(info.batch_size, *out.shape)
    return out.to(dtype), 0


def _refused(name: str) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"tgemm.{name}: out= is not supported under torch.vmap")

    return kernel


_RULES = {
    "matmul": _matmul,
    "linear": _linear,
    "_linear_preact": _linear_preact,
    "linear_glu": _linear_glu,
    "_linear_glu_preact": _linear_glu_preact,
    "addmm": _addmm,
}
for _name, _rule in _RULES.items():
    torch.library.register_vmap(f"tgemm::{_name}", _rule, lib=_library.registrations)
for _name in ("matmul", "linear", "linear_glu", "addmm"):
    _library.registrations.impl(f"{_name}.out", _refused(_name), "FuncTorchBatched")
