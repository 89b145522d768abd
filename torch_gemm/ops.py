"""The ops as Python functions: `torch.ops.tgemm.*` with docstrings, torch's FP32 precision flags, `out=`
that is returned, and TypeError and ValueError where Python code expects them.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_gemm import _library  # noqa: F401  (registers the ops)

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
PRECISIONS = ("ieee", "tf32", "3xtf32", "bf16", "fp16")

_matmul = torch.ops.tgemm.matmul.default
_matmul_out = torch.ops.tgemm.matmul.out
_linear = torch.ops.tgemm.linear.default
_linear_out = torch.ops.tgemm.linear.out
_linear_glu = torch.ops.tgemm.linear_glu.default
_linear_glu_out = torch.ops.tgemm.linear_glu.out
_addmm = torch.ops.tgemm.addmm.default
_addmm_out = torch.ops.tgemm.addmm.out


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    force_kernel: str | None = None,
) -> Tensor:
    """Matrix product of two tensors, with the shapes of `torch.matmul`.

    Args:
        a: (K,), (M, K) or (..., M, K), any strides; float16, bfloat16 or float32. float64 and complex
            go to ATen (on CUDA under the fallback policy), on the CPU integers as well.
        b: (K,), (K, N) or (..., K, N), of the same dtype and on the same device. Batch dimensions
            broadcast.
        out: receives the result, and is returned: exactly the result's shape and dtype, any strides
            under which its elements do not overlap, no memory shared with the operands.
        out_dtype: dtype of the result, rounded once from FP32: float16, bfloat16 or float32. None: the
            operands'.
        precision: how FP32 operands are multiplied, ignored for others: "ieee" (true FP32), "tf32",
            "3xtf32" (as accurate as FP32, of three products on Tensor Cores where that is faster: large
            matrices on compute capability 9.0, which takes a workspace of twice the operands; true FP32
            elsewhere), "bf16", "fp16" (operands rounded, accumulated in FP32). None: "tf32" where torch's
            own flags allow it for CUDA matmuls, otherwise "ieee"; "3xtf32" runs only where it is asked
            for. On the CPU "tf32" and "3xtf32" multiply in FP32.
        force_kernel: the kernel to run instead of the one that would be chosen, e.g. "simt",
            "mma_sync:128x128" or "mma_sync:128x128,split_k=4" (see `kernels()`).

    Returns:
        The product, contiguous, in the shape of `torch.matmul`. With K = 0 it is zeros.

    Raises:
        TypeError: an argument is of the wrong Python type.
        ValueError: `precision` is unknown.
        RuntimeError: shapes, dtypes, devices or layouts do not fit, `out` does not fit or overlaps an
            operand, or the forced kernel cannot run; one sentence says which.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        _raise_for_operands("matmul", a=a, b=b)
    options = _options("matmul", a, out_dtype, precision, force_kernel)
    if out is None:
        return _call(_matmul, (a, b), options)
    _check_out("matmul", out)
    return _call_out(_matmul_out, (a, b), out, options)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    static_weight: bool = False,
    force_kernel: str | None = None,
) -> Tensor:
    """``activation(input @ weight.T + bias) + residual`` in one kernel.

    Args:
        input: (K,) or (..., K), any strides; float16, bfloat16 or float32 (others: see `matmul`).
        weight: (N, K), as in `torch.nn.Linear`, of the same dtype and on the same device.
        bias: (N,), in the operands' dtype, the output's or float32.
        residual: broadcasts to the output's shape; dtypes as for the bias. It is added after the
            activation.
        activation: None, "relu", "gelu" (the erf form), "gelu_tanh" or "silu".
        out: as in `matmul`; it may be exactly `residual`, which accumulates in place.
        out_dtype, precision, force_kernel: as in `matmul`.
        static_weight: promises that no kernel still running writes `weight`, which lets a kernel
            fetch it before the one before it on the stream has ended (on Hopper, with up to 64 rows
            of input). Right for the frozen weights of inference; wrong if an optimiser step, or
            anything else that makes the weight, is in flight. Results are the same to the bit.

    Returns:
        (N,) or (..., N), contiguous. The epilogue is applied in FP32 and rounded once.

    Raises:
        TypeError: an argument is of the wrong Python type.
        ValueError: `activation` or `precision` is unknown.
        RuntimeError: as in `matmul`.
    """
    if not (
        isinstance(input, Tensor)
        and isinstance(weight, Tensor)
        and (bias is None or isinstance(bias, Tensor))
        and (residual is None or isinstance(residual, Tensor))
    ):
        _raise_for_operands("linear", input=input, weight=weight, bias=bias, residual=residual)
    options = _options("linear", input, out_dtype, precision, force_kernel)
    if activation is not None:
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(
                f"tgemm.linear: activation is {activation!r}, and must be None or one of {known}"
            )
        options["activation"] = activation
    if static_weight:
        options["static_weight"] = True
    if out is None:
        return _call(_linear, (input, weight, bias, residual), options)
    _check_out("linear", out)
    return _call_out(_linear_out, (input, weight, bias, residual), out, options)


def linear_glu(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    static_weight: bool = False,
    force_kernel: str | None = None,
) -> Tensor:
    """``activation(input @ gate_weight.T + gate_bias) * (input @ up_weight.T + up_bias)``.

    The gated linear unit of SwiGLU ("silu"), GEGLU ("gelu") and ReGLU ("relu") layers (Shazeer, "GLU
    Variants Improve Transformer", 2020). Nothing is concatenated: the halves of a packed (2N, K) weight
    are passed as two views of it.

    Args:
        input: (K,) or (..., K), any strides; float16, bfloat16 or float32 (float64 goes to ATen, see
            `matmul`).
        gate_weight: (N, K), as in `torch.nn.Linear`, any strides, of the same dtype and on the same
            device.
        up_weight: (N, K), likewise.
        gate_bias, up_bias: (N,), in the operands' dtype, the output's or float32.
        activation: "relu", "gelu" (the erf form), "gelu_tanh" or "silu".
        out: as in `matmul`.
        out_dtype, precision: as in `matmul`.
        static_weight: as in `linear`, of both weights.
        force_kernel: as in `matmul`. A kernel that takes one weight runs twice.

    Returns:
        (N,) or (..., N), contiguous. Gate, activation and product are computed in FP32 and rounded once.

    Raises:
        TypeError: an argument is of the wrong Python type.
        ValueError: `activation` or `precision` is unknown.
        RuntimeError: as in `matmul`.
    """
    operands = (input, gate_weight, up_weight, gate_bias, up_bias)
    if not (
        isinstance(input, Tensor)
        and isinstance(gate_weight, Tensor)
        and isinstance(up_weight, Tensor)
        and (gate_bias is None or isinstance(gate_bias, Tensor))
        and (up_bias is None or isinstance(up_bias, Tensor))
    ):
        names = ("input", "gate_weight", "up_weight", "gate_bias", "up_bias")
        _raise_for_operands("linear_glu", **dict(zip(names, operands, strict=True)))
    options = _options("linear_glu", input, out_dtype, precision, force_kernel)
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(
            f"tgemm.linear_glu: activation is {activation!r}, and must be one of {known}"
        )
    options["activation"] = activation
    if static_weight:
        options["static_weight"] = True
    if out is None:
        return _call(_linear_glu, operands, options)
    _check_out("linear_glu", out)
    return _call_out(_linear_glu_out, operands, out, options)


def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    force_kernel: str | None = None,
) -> Tensor:
    """``beta * input + alpha * (mat1 @ mat2)`` in one kernel.

    Args:
        input: broadcasts to (M, N); the operands' dtype, the output's or float32. With beta = 0 it is
            never read, so that NaN in it does not reach the result.
        mat1: (M, K), any strides; dtypes as in `matmul`.
        mat2: (K, N), of the same dtype and on the same device.
        beta, alpha: factors, applied in FP32.
        out: as in `matmul`; it may be exactly `input`, which accumulates in place.
        out_dtype, precision, force_kernel: as in `matmul`.

    Returns:
        (M, N), contiguous.

    Raises:
        TypeError, ValueError, RuntimeError: as in `matmul`.
    """
    if not (isinstance(input, Tensor) and isinstance(mat1, Tensor) and isinstance(mat2, Tensor)):
        _raise_for_operands("addmm", input=input, mat1=mat1, mat2=mat2)
    options = _options("addmm", mat1, out_dtype, precision, force_kernel)
    if not (isinstance(beta, (float, int)) and isinstance(alpha, (float, int))):
        _check_factors(beta=beta, alpha=alpha)
    options["beta"], options["alpha"] = beta, alpha
    if out is None:
        return _call(_addmm, (input, mat1, mat2), options)
    _check_out("addmm", out)
    return _call_out(_addmm_out, (input, mat1, mat2), out, options)


def fp32_precision(operand: Tensor) -> str | None:
    """The precision that torch's flags ask for: "tf32" or None (true FP32).

    Read from ``torch.backends.cuda.matmul.fp32_precision``, which ``allow_tf32`` and
    ``torch.set_float32_matmul_precision`` set as well, and ``torch.backends.fp32_precision`` by
    default. None for operands that are not float32 on CUDA.
    """
    if operand.dtype is not torch.float32 or not operand.is_cuda:
        return None
    return _cuda_fp32_precision()


def _cuda_fp32_precision() -> str | None:
    # The private getter answers in every torch >= 2.10 without the warnings of `allow_tf32`.
    return "tf32" if torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32" else None


# torch.compile takes the answer as a constant, and guards on the flag itself. This is all that
# torch.compiler.assume_constant_result does, which would make `import torch_gemm` load all of dynamo.
_cuda_fp32_precision._dynamo_marked_constant = True


def _call(op: Any, operands: tuple[Tensor | None, ...], options: dict[str, Any]) -> Tensor:
    try:
        if _autograd_may_care(*operands) or torch.is_inference_mode_enabled():
            return op(*operands, **options)
        # Nothing to differentiate: the Autograd kernel, written in Python, would find out the same and cost
        # about as much host time as the rest of the call.
        with torch._C._AutoDispatchBelowAutograd():
            return op(*operands, **options)
    except RuntimeError:
        _raise_if_nested(op, operands)
        raise


def _call_out(
    op: Any, operands: tuple[Tensor | None, ...], out: Tensor, options: dict[str, Any]
) -> Tensor:
    try:
        if (
            _autograd_may_care(*operands, out)
            or torch.is_inference_mode_enabled()
            or out.is_inference()
        ):
            op(*operands, out=out, **options)
            return out
        # As in _call; what the kernel of ADInplaceOrView does is done here.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            op(*operands, out=out, **options)
    except RuntimeError:
        _raise_if_nested(op, (*operands, out))
        raise
    torch.autograd.graph.increment_version(out)
    return out


def _raise_if_nested(op: Any, tensors: tuple[Tensor | None, ...]) -> None:
    """Says what C++ says of nested tensors where they fail before they get there: jagged ones, or with gradients."""
    if any(tensor is not None and tensor.is_nested for tensor in tensors):
        name = str(op).removesuffix(".default").removesuffix(".out")
        raise RuntimeError(f"{name}: nested tensors are not supported; use padded or packed ones")


def _autograd_may_care(*tensors: Tensor | None) -> bool:
    """Whether something may be recorded, differentiated or transformed, if only perhaps."""
    return (
        torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors))
        or forward_ad._current_level >= 0
        # Transforms hide from a tensor whether what it wraps requires grad.
        or torch._C._are_functorch_transforms_active()
    )


def _options(
    op: str,
    operand: Tensor,
    out_dtype: torch.dtype | None,
    precision: str | None,
    force_kernel: str | None,
) -> dict[str, Any]:
    """Keyword arguments of an op, without those that have their default."""
    options: dict[str, Any] = {}
    if out_dtype is not None:
        if not isinstance(out_dtype, torch.dtype):
            raise TypeError(
                f"tgemm.{op}: out_dtype must be a torch.dtype, and is a {type(out_dtype).__name__}"
            )
        options["out_dtype"] = out_dtype
    if precision is None:
        precision = fp32_precision(operand)
    elif precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise ValueError(
            f"tgemm.{op}: precision is {precision!r}, and must be None or one of {known}"
        )
    if precision is not None:
        options["precision"] = precision
    if force_kernel is not None:
        if not isinstance(force_kernel, str):
            raise TypeError(
                f"tgemm.{op}: force_kernel must be a str, and is a {type(force_kernel).__name__}"
            )
        options["force_kernel"] = force_kernel
    return options


def _check_out(op: str, out: object) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"tgemm.{op}: out must be a Tensor, and is a {type(out).__name__}")


def _check_factors(**factors: object) -> None:
    """Refuses what torch cannot convert to a float, in place of its message of six lines."""
    for name, factor in factors.items():
        one = isinstance(factor, Tensor) and factor.numel() == 1
        if not (one or isinstance(factor, (Real, torch.SymInt, torch.SymFloat))):
            raise TypeError(
                f"tgemm.addmm: {name} must be a number, and is a {type(factor).__name__}"
            )


def _raise_for_operands(op: str, **operands: object) -> None:
    """Names the operand that is not a tensor; biases and residual may be None."""
    for name, operand in operands.items():
        optional = name.endswith(("bias", "residual")) and operand is None
        if not (optional or isinstance(operand, Tensor)):
            raise TypeError(
                f"tgemm.{op}: {name} must be a Tensor, and is a {type(operand).__name__}"
            )
