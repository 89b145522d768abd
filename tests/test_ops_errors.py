"""What the ops refuse: the exact sentence, from real and from fake tensors, and that the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import torch_gemm

tgemm = torch.ops.tgemm
half, bf16 = torch.float16, torch.bfloat16


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


class Bad(NamedTuple):
    """A call that must fail. `arguments` builds them, so that each use gets its own."""

    op: Any
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    sentence: str


def bad(op: Any, sentence: str, *arguments: Any, **options: Any) -> Bad:
    """Tensors are given as callables, everything else as it is."""

    def build():
        args = tuple(value() if callable(value) else value for value in arguments)
        return args, {name: v() if callable(v) else v for name, v in options.items()}

    return Bad(op, build, sentence)


def t(*sizes: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: zeros(*sizes, dtype=dtype)


# Checked on CPU tensors and on meta tensors alike.
BAD_CALLS = {
    "matmul inner sizes": bad(
        tgemm.matmul.default,
        "tgemm.matmul: a is (2, 3) and b is (4, 5): the inner sizes 3 and 4 differ",
        t(2, 3),
        t(4, 5),
    ),
    "matmul inner sizes of 1-d": bad(
        tgemm.matmul.default,
        "tgemm.matmul: a is (3,) and b is (4,): the inner sizes 3 and 4 differ",
        t(3),
        t(4),
    ),
    "matmul batch sizes": bad(
        tgemm.matmul.default,
        "tgemm.matmul: a is (2, 3, 5) and b is (4, 5, 6): the batch sizes 2 and 4 do not broadcast",
        t(2, 3, 5),
        t(4, 5, 6),
    ),
    "matmul 0-d": bad(
        tgemm.matmul.default,
        "tgemm.matmul: b is a 0-d tensor; both operands need at least 1 dimension",
        t(2, 3),
        t(),
    ),
    "matmul dtypes": bad(
        tgemm.matmul.default,
        "tgemm.matmul: b has dtype bfloat16 but a has float16; both operands need one dtype",
        t(2, 3, dtype=half),
        t(3, 4, dtype=bf16),
    ),
    "matmul bool": bad(
        tgemm.matmul.default,
        "tgemm.matmul: a has dtype bool, which is not supported; use float16, bfloat16 or float32",
        t(2, 3, dtype=torch.bool),
        t(3, 4, dtype=torch.bool),
    ),
    "matmul float8": bad(
        tgemm.matmul.default,
        "tgemm.matmul: b has dtype float8_e4m3fn, which is not supported; "
        "use float16, bfloat16 or float32",
        t(2, 3),
        t(3, 4, dtype=torch.float8_e4m3fn),
    ),
    "matmul precision": bad(
        tgemm.matmul.default,
        "tgemm.matmul: precision 'fp8' is unknown; use ieee, tf32, 3xtf32, bf16 or fp16",
        t(2, 3),
        t(3, 4),
        precision="fp8",
    ),
    "matmul out_dtype": bad(
        tgemm.matmul.default,
        "tgemm.matmul: out_dtype float64 is not supported for float16 operands; "
        "use float16, bfloat16 or float32",
        t(2, 3, dtype=half),
        t(3, 4, dtype=half),
        out_dtype=torch.float64,
    ),
    "matmul out_dtype of float64": bad(
        tgemm.matmul.default,
        "tgemm.matmul: out_dtype float32 is not supported for float64 operands; use float64",
        t(2, 3, dtype=torch.float64),
        t(3, 4, dtype=torch.float64),
        out_dtype=torch.float32,
    ),
    "matmul.out shape": bad(
        tgemm.matmul.out,
        "tgemm.matmul: out has shape (2, 5) but the result has (2, 4)",
        t(2, 3),
        t(3, 4),
        out=t(2, 5),
    ),
    "matmul.out rank": bad(
        tgemm.matmul.out,
        "tgemm.matmul: out has shape (1, 2, 4) but the result has (2, 4)",
        t(2, 3),
        t(3, 4),
        out=t(1, 2, 4),
    ),
    "matmul.out dtype": bad(
        tgemm.matmul.out,
        "tgemm.matmul: out has dtype float32 but the result has float16",
        t(2, 3, dtype=half),
        t(3, 4, dtype=half),
        out=t(2, 4),
    ),
    "linear activation": bad(
        tgemm.linear.default,
        "tgemm.linear: activation 'tanh' is unknown; use relu, gelu, gelu_tanh or silu",
        t(2, 3),
        t(4, 3),
        activation="tanh",
    ),
    "linear sizes": bad(
        tgemm.linear.default,
        "tgemm.linear: input is (2, 3) and weight is (4, 5): the last sizes 3 and 5 differ",
        t(2, 3),
        t(4, 5),
    ),
    "linear weight rank": bad(
        tgemm.linear.default,
        "tgemm.linear: weight has shape (3,) but must be 2-d, (out_features, in_features)",
        t(2, 3),
        t(3),
    ),
    "linear 0-d": bad(
        tgemm.linear.default,
        "tgemm.linear: input is a 0-d tensor; it needs at least 1 dimension",
        t(),
        t(4, 3),
    ),
    "linear dtypes": bad(
        tgemm.linear.default,
        "tgemm.linear: weight has dtype bfloat16 but input has float16; both operands need one dtype",
        t(2, 3, dtype=half),
        t(4, 3, dtype=bf16),
    ),
    "linear integers": bad(
        tgemm.linear.default,
        "tgemm.linear: input has dtype int64; integers are supported by tgemm.matmul alone",
        t(2, 3, dtype=torch.int64),
        t(4, 3, dtype=torch.int64),
    ),
    "linear bias shape": bad(
        tgemm.linear.default,
        "tgemm.linear: bias has shape (5,) but must be (4,), one value per output feature",
        t(2, 3),
        t(4, 3),
        t(5),
    ),
    "linear bias rank": bad(
        tgemm.linear.default,
        "tgemm.linear: bias has shape (1, 4) but must be (4,), one value per output feature",
        t(2, 3),
        t(4, 3),
        t(1, 4),
    ),
    "linear bias dtype": bad(
        tgemm.linear.default,
        "tgemm.linear: bias has dtype bfloat16 but must have float16 or float32",
        t(2, 3, dtype=half),
        t(4, 3, dtype=half),
        t(4, dtype=bf16),
    ),
    "linear bias dtype of float64": bad(
        tgemm.linear.default,
        "tgemm.linear: bias has dtype float32 but must have float64",
        t(2, 3, dtype=torch.float64),
        t(4, 3, dtype=torch.float64),
        t(4),
    ),
    "linear residual shape": bad(
        tgemm.linear.default,
        "tgemm.linear: residual has shape (3, 4), which does not broadcast to the output's (2, 4)",
        t(2, 3),
        t(4, 3),
        None,
        t(3, 4),
    ),
    "linear residual rank": bad(
        tgemm.linear.default,
        "tgemm.linear: residual has shape (1, 2, 4), which does not broadcast to the output's (2, 4)",
        t(2, 3),
        t(4, 3),
        None,
        t(1, 2, 4),
    ),
    "linear residual dtype": bad(
        tgemm.linear.default,
        "tgemm.linear: residual has dtype float64 but must have float16 or bfloat16 or float32",
        t(2, 3, dtype=half),
        t(4, 3, dtype=half),
        None,
        t(2, 4, dtype=torch.float64),
        out_dtype=bf16,
    ),
    "linear complex activation": bad(
        tgemm.linear.default,
        "tgemm.linear: activation 'relu' is not defined for complex64",
        t(2, 3, dtype=torch.complex64),
        t(4, 3, dtype=torch.complex64),
        activation="relu",
    ),
    "linear.out shape": bad(
        tgemm.linear.out,
        "tgemm.linear: out has shape (4, 2) but the result has (2, 4)",
        t(2, 3),
        t(4, 3),
        out=t(4, 2),
    ),
    "_linear_preact activation": bad(
        tgemm._linear_preact.default,
        "tgemm.linear: activation 'selu' is unknown; use relu, gelu, gelu_tanh or silu",
        t(2, 3),
        t(4, 3),
        activation="selu",
    ),
    "linear_glu activation": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: activation 'tanh' is unknown; use relu, gelu, gelu_tanh or silu",
        t(2, 3),
        t(4, 3),
        t(4, 3),
        activation="tanh",
    ),
    "linear_glu precision": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: precision 'fp8' is unknown; use ieee, tf32, 3xtf32, bf16 or fp16",
        t(2, 3),
        t(4, 3),
        t(4, 3),
        precision="fp8",
    ),
    "linear_glu 0-d": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: input is a 0-d tensor; it needs at least 1 dimension",
        t(),
        t(4, 3),
        t(4, 3),
    ),
    "linear_glu gate_weight rank": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: gate_weight has shape (3,) but must be 2-d, (out_features, in_features)",
        t(2, 3),
        t(3),
        t(3),
    ),
    "linear_glu sizes": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: input is (2, 3) and gate_weight is (4, 5): the last sizes 3 and 5 differ",
        t(2, 3),
        t(4, 5),
        t(4, 3),
    ),
    "linear_glu up_weight shape": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: up_weight has shape (5, 3) but must be (4, 3), the shape of gate_weight",
        t(2, 3),
        t(4, 3),
        t(5, 3),
    ),
    "linear_glu up_weight inner size": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: up_weight has shape (4, 2) but must be (4, 3), the shape of gate_weight",
        t(2, 3),
        t(4, 3),
        t(4, 2),
    ),
    "linear_glu up_weight rank": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: up_weight has shape (1, 4, 3) but must be (4, 3), "
        "the shape of gate_weight",
        t(2, 3),
        t(4, 3),
        t(1, 4, 3),
    ),
    "linear_glu gate_weight dtype": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: gate_weight has dtype float32 but input has float16; "
        "all operands need one dtype",
        t(2, 3, dtype=half),
        t(4, 3),
        t(4, 3, dtype=half),
    ),
    "linear_glu up_weight dtype": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: up_weight has dtype bfloat16 but input has float16; "
        "all operands need one dtype",
        t(2, 3, dtype=half),
        t(4, 3, dtype=half),
        t(4, 3, dtype=bf16),
    ),
    "linear_glu up_weight bool": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: up_weight has dtype bool, which is not supported; "
        "use float16, bfloat16 or float32",
        t(2, 3),
        t(4, 3),
        t(4, 3, dtype=torch.bool),
    ),
    "linear_glu integers": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: input has dtype int64; integers are supported by tgemm.matmul alone",
        t(2, 3, dtype=torch.int64),
        t(4, 3, dtype=torch.int64),
        t(4, 3, dtype=torch.int64),
    ),
    "linear_glu complex": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: activation 'silu' is not defined for complex64",
        t(2, 3, dtype=torch.complex64),
        t(4, 3, dtype=torch.complex64),
        t(4, 3, dtype=torch.complex64),
    ),
    "linear_glu out_dtype": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: out_dtype int32 is not supported for float32 operands; "
        "use float16, bfloat16 or float32",
        t(2, 3),
        t(4, 3),
        t(4, 3),
        out_dtype=torch.int32,
    ),
    "linear_glu gate_bias shape": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: gate_bias has shape (5,) but must be (4,), one value per output feature",
        t(2, 3),
        t(4, 3),
        t(4, 3),
        t(5),
    ),
    "linear_glu up_bias rank": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: up_bias has shape (1, 4) but must be (4,), one value per output feature",
        t(2, 3),
        t(4, 3),
        t(4, 3),
        None,
        t(1, 4),
    ),
    "linear_glu up_bias dtype": bad(
        tgemm.linear_glu.default,
        "tgemm.linear_glu: up_bias has dtype bfloat16 but must have float16 or float32",
        t(2, 3, dtype=half),
        t(4, 3, dtype=half),
        t(4, 3, dtype=half),
        t(4),
        t(4, dtype=bf16),
    ),
    "linear_glu.out shape": bad(
        tgemm.linear_glu.out,
        "tgemm.linear_glu: out has shape (4, 2) but the result has (2, 4)",
        t(2, 3),
        t(4, 3),
        t(4, 3),
        out=t(4, 2),
    ),
    "linear_glu.out dtype": bad(
        tgemm.linear_glu.out,
        "tgemm.linear_glu: out has dtype float32 but the result has float16",
        t(2, 3, dtype=half),
        t(4, 3, dtype=half),
        t(4, 3, dtype=half),
        out=t(2, 4),
    ),
    "_linear_glu_preact activation": bad(
        tgemm._linear_glu_preact.default,
        "tgemm.linear_glu: activation 'selu' is unknown; use relu, gelu, gelu_tanh or silu",
        t(2, 3),
        t(4, 3),
        t(4, 3),
        activation="selu",
    ),
    "addmm rank": bad(
        tgemm.addmm.default,
        "tgemm.addmm: mat2 has shape (1, 3, 4) but must be 2-d",
        t(2, 4),
        t(2, 3),
        t(1, 3, 4),
    ),
    "addmm sizes": bad(
        tgemm.addmm.default,
        "tgemm.addmm: mat1 is (2, 3) and mat2 is (4, 5): the inner sizes 3 and 4 differ",
        t(2, 5),
        t(2, 3),
        t(4, 5),
    ),
    "addmm input": bad(
        tgemm.addmm.default,
        "tgemm.addmm: input has shape (3, 4), which does not broadcast to the output's (2, 4)",
        t(3, 4),
        t(2, 3),
        t(3, 4),
    ),
    "addmm input dtype": bad(
        tgemm.addmm.default,
        "tgemm.addmm: input has dtype int32 but must have float32",
        t(2, 4, dtype=torch.int32),
        t(2, 3),
        t(3, 4),
    ),
    "addmm dtypes": bad(
        tgemm.addmm.default,
        "tgemm.addmm: mat2 has dtype float64 but mat1 has float32; both operands need one dtype",
        t(2, 4),
        t(2, 3),
        t(3, 4, dtype=torch.float64),
    ),
    "addmm.out shape": bad(
        tgemm.addmm.out,
        "tgemm.addmm: out has shape (2,) but the result has (2, 4)",
        t(2, 4),
        t(2, 3),
        t(3, 4),
        out=t(2),
    ),
}


def assert_raises(
    sentence: str, op: Any, *arguments: Any, error: type = RuntimeError, **options: Any
) -> None:
    """The sentence is the whole message: nothing before it, no stack, no file."""
    with pytest.raises(error) as caught:
        op(*arguments, **options)
    assert str(caught.value) == sentence


def assert_works() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    assert torch.equal(tgemm.matmul(a, b), torch.full((2, 4), 3.0))
    assert torch.equal(tgemm.linear(a, b.mT), torch.full((2, 4), 3.0))


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name):
    op, arguments, sentence = BAD_CALLS[name]
    args, options = arguments()
    assert_raises(sentence, op, *args, **options)
    assert_works()


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_on_meta(name):
    op, arguments, sentence = BAD_CALLS[name]
    with torch.device("meta"):
        args, options = arguments()
    assert_raises(sentence, op, *args, **options)


def with_layout(layout: str) -> Tensor:
    dense = torch.eye(3)
    if layout == "mkldnn":
        return dense.to_mkldnn()
    return {
        "sparse_coo": dense.to_sparse,
        "sparse_csr": dense.to_sparse_csr,
        "sparse_csc": dense.to_sparse_csc,
        "sparse_bsr": lambda: dense.to_sparse_bsr((1, 1)),
        "sparse_bsc": lambda: dense.to_sparse_bsc((1, 1)),
    }[layout]()


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "mkldnn"]
)
def test_layouts(layout):
    dense, other = torch.eye(3), with_layout(layout)
    rest = f" has layout {layout}; only strided tensors are supported"
    assert_raises("tgemm.matmul: a" + rest, tgemm.matmul, other, dense)
    assert_raises("tgemm.matmul: b" + rest, tgemm.matmul, dense, other)
    assert_raises("tgemm.linear: weight" + rest, tgemm.linear, dense, other)
    assert_raises("tgemm.linear: residual" + rest, tgemm.linear, dense, dense, None, other)
    assert_raises("tgemm.linear_glu: up_weight" + rest, tgemm.linear_glu, dense, dense, other)
    assert_raises("tgemm.addmm: input" + rest, tgemm.addmm, other, dense, dense)
    assert_works()


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_quantized():
    quantized = torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)
    rest = " has dtype qint8, which is not supported; use float16, bfloat16 or float32"
    assert_raises("tgemm.matmul: a" + rest, tgemm.matmul, quantized, quantized)
    assert_raises("tgemm.linear: weight" + rest, tgemm.linear, torch.eye(3), quantized)
    assert_works()


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested():
    nested = torch.nested.nested_tensor([torch.eye(3), torch.eye(3)])
    sentence = "tgemm.matmul: nested tensors are not supported; use padded or packed ones"
    assert_raises(sentence, tgemm.matmul, nested, nested)
    assert_works()


def test_devices():
    on_cpu, on_meta = torch.eye(3), torch.empty(3, 3, device="meta")
    sentence = "tgemm.matmul: b is on meta but a is on cpu; all tensors must be on one device"
    assert_raises(sentence, tgemm.matmul, on_cpu, on_meta)
    sentence = (
        "tgemm.linear: residual is on meta but input is on cpu; all tensors must be on one device"
    )
    assert_raises(sentence, tgemm.linear, on_cpu, on_cpu, None, on_meta)
    sentence = (
        "tgemm.linear_glu: up_weight is on meta but input is on cpu; "
        "all tensors must be on one device"
    )
    assert_raises(sentence, tgemm.linear_glu, on_cpu, on_cpu, on_meta)
    sentence = "tgemm.addmm: input is on meta but mat1 is on cpu; all tensors must be on one device"
    assert_raises(sentence, tgemm.addmm, on_meta, on_cpu, on_cpu)
    assert_works()


def test_force_kernel_on_the_cpu():
    eye = torch.eye(3)
    sentence = "tgemm.matmul: force_kernel 'simt' names a CUDA kernel, but a is on the CPU"
    assert_raises(sentence, tgemm.matmul, eye, eye, force_kernel="simt")
    sentence = "tgemm.linear: force_kernel 'simt' names a CUDA kernel, but input is on the CPU"
    assert_raises(sentence, tgemm.linear, eye, eye, force_kernel="simt")
    sentence = sentence.replace("linear", "linear_glu")
    assert_raises(sentence, tgemm.linear_glu, eye, eye, eye, force_kernel="simt")
    assert_works()


# --- out= -------------------------------------------------------------------------------------------


def test_out_that_overlaps_itself():
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    sentence = "tgemm.matmul: out has elements that share memory with each other"
    assert_raises(sentence, tgemm.matmul.out, a, b, out=torch.empty(1, 4).expand(2, 4))
    overlapping = torch.empty(20).as_strided((2, 4), (3, 1))
    assert_raises(sentence, tgemm.matmul.out, a, b, out=overlapping)
    same_stride = torch.empty(20).as_strided((2, 4), (1, 1))
    assert_raises(sentence, tgemm.matmul.out, a, b, out=same_stride)


@pytest.mark.parametrize("argument", ["input", "weight", "bias"])
def test_out_that_overlaps_an_input(argument):
    inputs = {"input": torch.ones(4, 4), "weight": torch.ones(4, 4), "bias": torch.ones(4)}
    out = torch.empty(5, 4)
    shared = out[:4] if argument != "bias" else out[1]
    inputs[argument] = shared
    sentence = (
        f"tgemm.linear: out shares memory with {argument}, which is read while out is written"
    )
    assert_raises(
        sentence,
        tgemm.linear.out,
        inputs["input"],
        inputs["weight"],
        inputs["bias"],
        out=out[:4],
    )


@pytest.mark.parametrize("argument", ["input", "gate_weight", "up_weight", "gate_bias", "up_bias"])
def test_out_of_linear_glu_that_overlaps_an_input(argument):
    names = ("input", "gate_weight", "up_weight", "gate_bias", "up_bias")
    inputs = {name: torch.ones(4) if "bias" in name else torch.ones(4, 4) for name in names}
    out = torch.empty(4, 4)
    inputs[argument] = out[0] if "bias" in argument else out
    sentence = (
        f"tgemm.linear_glu: out shares memory with {argument}, which is read while out is written"
    )
    assert_raises(sentence, tgemm.linear_glu.out, *inputs.values(), out=out)


def test_out_that_overlaps_the_residual_otherwise():
    x, weight, buffer = torch.ones(3, 5), torch.ones(4, 5), torch.zeros(4, 4)
    sentence = (
        "tgemm.linear: out shares memory with residual without being exactly the same view of it"
    )
    assert_raises(sentence, tgemm.linear.out, x, weight, None, buffer[1:], out=buffer[:3])
    square, eye = torch.zeros(4, 4), torch.eye(4)
    assert_raises(sentence, tgemm.linear.out, eye, eye, None, square.mT, out=square)
    assert_raises(sentence, tgemm.linear.out, eye, eye, None, square[0], out=square)
    sentence = sentence.replace("linear", "addmm").replace("residual", "input")
    assert_raises(sentence, tgemm.addmm.out, square[1], eye, eye, out=square)


def test_out_with_an_operand_that_requires_grad():
    a, b, out = torch.ones(2, 3), torch.ones(3, 4), torch.empty(2, 4)
    learning = torch.ones(3, 4, requires_grad=True)
    sentence = "tgemm.matmul: out= does not support gradients, but b requires grad"
    assert_raises(sentence, tgemm.matmul.out, a, learning, out=out)
    sentence = "tgemm.linear: out= does not support gradients, but weight requires grad"
    assert_raises(sentence, tgemm.linear.out, b.mT, learning.mT, out=torch.empty(4, 4))
    sentence = "tgemm.linear_glu: out= does not support gradients, but up_weight requires grad"
    arguments = b.mT, b.mT, learning.mT
    assert_raises(sentence, tgemm.linear_glu.out, *arguments, out=torch.empty(4, 4))
    sentence = "tgemm.addmm: out= does not support gradients, but out requires grad"
    target = torch.empty(2, 4, requires_grad=True)
    assert_raises(sentence, tgemm.addmm.out, out, a, b, out=target)
    with torch.no_grad():
        tgemm.matmul.out(a, learning, out=out)
    assert torch.equal(out, torch.full((2, 4), 3.0))


# --- The Python wrappers ----------------------------------------------------------------------------


def test_wrappers_raise_python_errors():
    a, b = torch.ones(2, 3), torch.ones(3, 4)

    def raises(error: type, sentence: str, function: Any, *args: Any, **options: Any) -> None:
        assert_raises(sentence, function, *args, error=error, **options)

    raises(TypeError, "tgemm.matmul: a must be a Tensor, and is a list", torch_gemm.matmul, [1], b)
    raises(
        TypeError,
        "tgemm.linear: bias must be a Tensor, and is a int",
        torch_gemm.linear,
        a,
        b.mT,
        1,
    )
    raises(
        TypeError, "tgemm.addmm: mat2 must be a Tensor, and is a float", torch_gemm.addmm, b, a, 2.0
    )
    for factor, kind in (("alpha", "str"), ("beta", "NoneType"), ("alpha", "complex")):
        value = {"str": "1", "NoneType": None, "complex": 1j}[kind]
        raises(
            TypeError,
            f"tgemm.addmm: {factor} must be a number, and is a {kind}",
            torch_gemm.addmm,
            torch.ones(2, 4),
            a,
            b,
            **{factor: value},
        )
    raises(
        TypeError,
        "tgemm.matmul: out must be a Tensor, and is a tuple",
        torch_gemm.matmul,
        a,
        b,
        out=(1,),
    )
    raises(
        TypeError,
        "tgemm.matmul: out_dtype must be a torch.dtype, and is a str",
        torch_gemm.matmul,
        a,
        b,
        out_dtype="float32",
    )
    raises(
        TypeError,
        "tgemm.matmul: force_kernel must be a str, and is a int",
        torch_gemm.matmul,
        a,
        b,
        force_kernel=3,
    )
    raises(
        ValueError,
        "tgemm.matmul: precision is 'fp8', and must be None or one of ieee, tf32, 3xtf32, bf16, fp16",
        torch_gemm.matmul,
        a,
        b,
        precision="fp8",
    )
    raises(
        ValueError,
        "tgemm.linear: activation is 'elu', and must be None or one of relu, gelu, gelu_tanh, silu",
        torch_gemm.linear,
        a,
        b.mT,
        activation="elu",
    )
    raises(
        ValueError,
        "tgemm.linear_glu: activation is None, and must be one of relu, gelu, gelu_tanh, silu",
        torch_gemm.linear_glu,
        a,
        b.mT,
        b.mT,
        activation=None,
    )
    for arguments, name, kind in (
        ((a, b.mT), "up_bias", "int"),
        ((a, None), "gate_weight", "NoneType"),
    ):
        raises(
            TypeError,
            f"tgemm.linear_glu: {name} must be a Tensor, and is a {kind}",
            torch_gemm.linear_glu,
            *arguments,
            b.mT,
            None,
            1,
        )
    raises(
        ValueError,
        "tgemm: the fallback policy is 'never', and must be one of allow, warn, error",
        torch_gemm.set_fallback,
        "never",
    )
    raises(
        RuntimeError,
        "tgemm.matmul: a is (2, 3) and b is (2, 3): the inner sizes 3 and 2 differ",
        torch_gemm.matmul,
        a,
        a,
    )
    assert_works()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_in_the_wrappers(layout, gradients):
    rows = [torch.ones(2, 4, requires_grad=gradients), torch.ones(3, 4)]
    nested = torch.nested.as_nested_tensor(rows, layout=layout)
    square = torch.eye(4)
    for call in (
        lambda: torch_gemm.matmul(nested, square),
        lambda: torch_gemm.linear(square, square, nested),
        lambda: torch_gemm.linear_glu(nested, square, square),
        lambda: torch_gemm.addmm(nested, square, square),
        lambda: torch_gemm.matmul(square, square, out=nested.detach()),
    ):
        with pytest.raises(
            RuntimeError, match=r"tgemm.\w+: nested tensors are not supported"
        ) as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1


def test_a_factor_of_several_numbers():
    square = torch.eye(4)
    with pytest.raises(TypeError, match="beta must be a number, and is a Tensor"):
        torch_gemm.addmm(square, square, square, beta=torch.ones(2))
