"""torch.func: vmap over each operand, gradients as a transform, functional_call; forward mode is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_ops_autograd import Calls
from torch import Tensor

import torch_gemm
from torch_gemm import nn

tgemm = torch.ops.tgemm
functional = torch.nn.functional
func = torch.func

pytestmark = pytest.mark.filterwarnings(
    "error:There is a performance drop",
    "ignore:.torch.jit.script. is deprecated:FutureWarning",
)
BATCH = 3


def randn(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def check_vmap(function, shapes, which, dims=None) -> None:
    """Against one call for each element of the batch, with gradients."""
    dims = [(0 if dims is None else dim) if batched else None
            for batched, dim in zip(which, dims or [None] * len(which), strict=True)]  # fmt: skip
    inputs = []
    for shape, dim in zip(shapes, dims, strict=True):
        value = randn(*shape) if dim is None else randn(BATCH, *shape).movedim(0, dim)
        inputs.append(value.requires_grad_())

    def one(index: int) -> Tensor:
        picked = [
            value if dim is None else value.select(dim, index)
            for value, dim in zip(inputs, dims, strict=True)
        ]
        return function(*picked)

    result = torch.vmap(function, tuple(dims))(*inputs)
    expected = torch.stack([one(index) for index in range(BATCH)])
    torch.testing.assert_close(result, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(result, inputs, grad, materialize_grads=True),
        torch.autograd.grad(expected, inputs, grad, materialize_grads=True),
    )


def subsets(count: int):
    return [which for which in itertools.product([True, False], repeat=count) if any(which)]


@pytest.mark.parametrize("which", subsets(2))
@pytest.mark.parametrize(
    "shapes",
    [
        ((5,), (5,)),
        ((5,), (5, 4)),
        ((2, 5), (5,)),
        ((2, 5), (5, 4)),
        ((7, 2, 5), (5, 4)),
        ((2, 5), (7, 5, 4)),
        ((5,), (7, 5, 4)),
        ((7, 2, 5), (5,)),
        ((6, 1, 2, 5), (7, 5, 4)),
    ],
)
def test_matmul(shapes, which):
    check_vmap(tgemm.matmul, shapes, which)


@pytest.mark.parametrize("x_shape", [(5,), (2, 5), (7, 2, 5)])
@pytest.mark.parametrize("which", subsets(4))
def test_linear(which, x_shape):
    for activation in (None, "gelu"):
        check_vmap(
            lambda *args, activation=activation: tgemm.linear(*args, activation=activation),
            (x_shape, (4, 5), (4,), (4,)),
            which,
        )


@pytest.mark.parametrize("which", subsets(3))
def test_linear_with_a_full_residual(which):
    check_vmap(
        lambda x, w, r: tgemm.linear(x, w, None, r, activation="relu"),
        ((2, 5), (4, 5), (2, 4)),
        which,
    )


@pytest.mark.parametrize("x_shape", [(5,), (2, 5)])
@pytest.mark.parametrize("which", subsets(5))
def test_linear_glu(which, x_shape):
    check_vmap(tgemm.linear_glu, (x_shape, (4, 5), (4, 5), (4,), (4,)), which)


@pytest.mark.parametrize("which", subsets(3))
@pytest.mark.parametrize("input_shape", [(), (4,), (2, 1), (2, 4)])
def test_addmm(input_shape, which):
    for beta, alpha in ((1.0, 1.0), (0.5, -2.0), (0.0, 1.0)):
        check_vmap(
            lambda *args, beta=beta, alpha=alpha: tgemm.addmm(*args, beta=beta, alpha=alpha),
            (input_shape, (2, 5), (5, 4)),
            which,
        )


def test_the_batch_may_be_any_dimension():
    check_vmap(tgemm.matmul, ((2, 5), (5, 4)), (True, True), (1, 2))
    check_vmap(tgemm.linear, ((2, 5), (4, 5), (4,)), (True, True, True), (-1, 1, 1))


@pytest.mark.parametrize("op", ["linear", "linear_glu"])
def test_preactivations(op):
    weights = [randn(4, 5)] * (2 if op == "linear_glu" else 1)
    preact = getattr(tgemm, f"_{op}_preact")
    for dims in ((0, *[None] * len(weights)), (None, *[0] * len(weights))):
        arguments = [randn(2, 5), *weights]
        arguments = [
            value if dim is None else torch.stack([value, 2 * value])
            for value, dim in zip(arguments, dims, strict=True)
        ]
        batched = torch.vmap(lambda *args: preact(*args, activation="silu"), dims)(*arguments)
        for index in range(2):
            picked = [v if d is None else v[index] for v, d in zip(arguments, dims, strict=True)]
            expected = preact(*picked, activation="silu")
            torch.testing.assert_close([out[index] for out in batched], list(expected))


def test_nested():
    x, weight, bias = randn(3, 6, 2, 5), randn(6, 4, 5), randn(3, 4)
    inner = torch.vmap(tgemm.linear, (0, 0, None))
    result = torch.vmap(inner, (0, None, 0))(x, weight, bias)
    expected = torch.stack(
        [
            torch.stack([functional.linear(x[i, j], weight[j], bias[i]) for j in range(6)])
            for i in range(3)
        ]
    )
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("call", [tgemm.linear, torch_gemm.linear])
def test_a_batch_of_activations_is_one_op(call):
    x, weight, bias, residual = randn(6, 3, 5), randn(4, 5), randn(4), randn(6, 3, 4)
    with Calls() as calls:
        torch.vmap(lambda x, r: call(x, weight, bias, r, activation="gelu"))(x, residual)
    assert calls.names() == ["tgemm.linear.default"]
    with Calls() as calls:
        torch.vmap(lambda x: tgemm.linear_glu(x, weight, -weight, bias))(x)
    assert calls.names() == ["tgemm.linear_glu.default"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_rounds_once(dtype):
    x, weight, bias = (randn(*s).to(dtype) for s in ((2, 500), (3, 4, 500), (3, 4)))
    result = torch.vmap(
        lambda w, b: tgemm.linear(x, w, b, activation="silu"),
    )(weight, bias)
    assert result.dtype == dtype
    exact = torch.stack(
        [functional.silu(functional.linear(x.double(), w.double(), b.double()))
         for w, b in zip(weight, bias, strict=True)]
    )  # fmt: skip
    ulp = torch.finfo(dtype).eps
    assert ((result.double() - exact).abs() <= 0.51 * ulp * exact.abs() + 1e-3).all()
    wide = torch.vmap(lambda w: tgemm.matmul(x, w.mT, out_dtype=torch.float32))(weight)
    assert wide.dtype == torch.float32


def test_out_is_refused():
    out = torch.empty(3, 2, 4)
    with pytest.raises(NotImplementedError) as caught:
        torch.vmap(lambda a, o: tgemm.matmul.out(a, torch.ones(5, 4), out=o))(
            torch.ones(3, 2, 5), out
        )
    assert str(caught.value) == "tgemm.matmul: out= is not supported under torch.vmap"
    with pytest.raises(RuntimeError, match="a is a 0-d tensor; both operands need"):
        torch.vmap(lambda a: tgemm.matmul(a, torch.ones(5)))(torch.ones(3))


# --- Gradients as a transform -------------------------------------------------------------------------

FUNCTIONS = {
    "matmul": (lambda f: f.matmul, lambda: (randn(2, 5), randn(5, 4))),
    "linear": (
        lambda f: lambda *args: f.linear(*args, activation="gelu"),
        lambda: (randn(2, 5), randn(4, 5), randn(4), randn(4)),
    ),
    "linear relu": (
        lambda f: lambda *args: f.linear(*args, activation="relu"),
        lambda: (randn(2, 5), randn(4, 5), randn(4)),
    ),
    "linear_glu": (lambda f: f.linear_glu, lambda: (randn(2, 5), randn(4, 5), randn(4, 5), randn(4))),
    "addmm": (
        lambda f: lambda *args: f.addmm(*args, alpha=2.0),
        lambda: (randn(4), randn(2, 5), randn(5, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("module", [tgemm, torch_gemm], ids=["op", "wrapper"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_grad(name, module):
    make, inputs = FUNCTIONS[name]
    function, values = make(module), inputs()
    argnums = tuple(range(len(values)))

    def loss(*args: Tensor) -> Tensor:
        return function(*args).square().sum()

    leaves = [value.clone().requires_grad_() for value in values]
    expected = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    torch.testing.assert_close(func.grad(loss, argnums)(*values), expected)
    # Each example's own gradients, where torch.vmap is outside.
    stacked = [torch.stack([value, -value]) for value in values]
    result = torch.vmap(func.grad(loss, argnums))(*stacked)
    for own, first in zip(result, expected, strict=True):
        torch.testing.assert_close(own[0], first.detach())
    # Two levels of gradients.
    second = func.grad(lambda *args: func.grad(loss)(*args).square().sum(), argnums)(*values)
    again = torch.autograd.grad(expected[0].square().sum(), leaves, allow_unused=True)
    for own, other in zip(second, again, strict=True):
        torch.testing.assert_close(own, torch.zeros_like(own) if other is None else other)


def test_gradients_of_a_vmapped_function_and_jacobians():
    x, weight = randn(3, 2, 5), randn(4, 5)

    def loss(w: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch_gemm.linear(row, w, activation="silu"))(x).sum()

    expected = func.grad(lambda w: functional.silu(functional.linear(x, w)).sum())(weight)
    torch.testing.assert_close(func.grad(loss)(weight), expected)
    torch.testing.assert_close(
        func.jacrev(lambda w: torch_gemm.linear(x[0], w))(weight),
        func.jacrev(lambda w: functional.linear(x[0], w))(weight),
    )
    torch.testing.assert_close(
        func.jacrev(func.jacrev(lambda w: torch_gemm.linear(x[0], w).pow(3).sum()))(weight),
        func.hessian(lambda w: functional.linear(x[0], w).pow(3).sum())(weight),
    )


def test_a_gradient_outside_of_the_transform_is_not_lost():
    weight = randn(4, 5).requires_grad_()
    out = torch.vmap(lambda x: torch_gemm.linear(x, weight))(randn(3, 2, 5))
    assert out.requires_grad
    with torch.no_grad():
        assert not torch.vmap(lambda x: torch_gemm.linear(x, weight))(randn(3, 2, 5)).requires_grad


def test_functional_call_and_ensembles():
    x = torch.randn(2, 5)
    layers = [nn.Linear(5, 4, activation="gelu") for _ in range(3)]
    parameters, buffers = func.stack_module_state(layers)

    def call(parameters, buffers, x):
        return func.functional_call(layers[0], (parameters, buffers), (x,))

    result = torch.vmap(call, (0, 0, None))(parameters, buffers, x)
    torch.testing.assert_close(result, torch.stack([layer(x) for layer in layers]))
    own = dict(layers[1].named_parameters())
    torch.testing.assert_close(func.functional_call(layers[0], own, (x,)), layers[1](x))
    gradients = func.grad(lambda p: func.functional_call(layers[0], p, (x,)).sum())(own)
    layers[1](x).sum().backward()
    torch.testing.assert_close(gradients["weight"], layers[1].weight.grad)
    torch.testing.assert_close(gradients["bias"], layers[1].bias.grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_is_refused(name):
    make, inputs = FUNCTIONS[name]
    values = inputs()
    for module in (tgemm, torch_gemm):
        function = make(module)
        for transform in (
            lambda f=function: func.jvp(f, values, tuple(map(torch.ones_like, values))),
            lambda f=function: func.jacfwd(f)(*values),
            lambda f=function: func.hessian(lambda *args: f(*args).square().sum())(*values),
        ):
            with pytest.raises(NotImplementedError) as caught:
                transform()
            assert str(caught.value) == "tgemm: forward-mode derivatives are not supported"
        assert torch.equal(function(*values), function(*values))
