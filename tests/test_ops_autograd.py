"""Gradients: gradcheck and gradgradcheck in FP64, dtypes, what is saved and what is skipped; autocast."""

from __future__ import annotations

from typing import Any

import problems
import pytest
import torch
import torch.utils.checkpoint
from test_ops import FlagPrecision
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import torch_gemm

tgemm = torch.ops.tgemm
functional = torch.nn.functional
f64 = torch.float64
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


def leaf(*sizes: int, dtype: torch.dtype = f64, grad: bool = True) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64).to(dtype).requires_grad_(grad)


def check_gradients(function: Any, *inputs: Tensor) -> None:
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


class Calls(TorchDispatchMode):
    """Records the ops that reach the backend, with their tensor arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((str(func), args))
        return func(*args, **(kwargs or {}))

    def names(self, prefix: str = "tgemm") -> list[str]:
        return [name for name, _ in self.calls if name.startswith(prefix)]


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((5,), (5,)),
        ((5,), (5, 4)),
        ((3, 5), (5,)),
        ((3, 5), (5, 4)),
        ((2, 3, 5), (5,)),
        ((2, 3, 5), (5, 4)),
        ((5,), (2, 5, 4)),
        ((3, 5), (2, 5, 4)),
        ((2, 3, 5), (2, 5, 4)),
        ((2, 3, 5), (1, 5, 4)),
        ((2, 1, 3, 5), (3, 5, 4)),
        ((1, 2, 3, 5), (3, 1, 5, 4)),
        ((0, 5), (5, 4)),
        ((3, 0), (0, 4)),
        ((0, 3, 5), (5, 4)),
    ],
)
def test_matmul(a_shape, b_shape):
    check_gradients(tgemm.matmul, leaf(*a_shape), leaf(*b_shape))


def test_matmul_of_views():
    check_gradients(lambda a, b: tgemm.matmul(a.mT, b.mT), leaf(5, 3), leaf(2, 4, 5))
    check_gradients(lambda a, b: tgemm.matmul(a.expand(2, 3, 5), b[:, ::2]), leaf(3, 5), leaf(5, 8))


def test_complex():
    def complex_leaf(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.complex128, requires_grad=True)

    check_gradients(tgemm.matmul, complex_leaf(2, 3, 5), complex_leaf(5, 4))
    check_gradients(tgemm.matmul, complex_leaf(3, 5), complex_leaf(2, 5, 4))
    check_gradients(tgemm.linear, complex_leaf(3, 5), complex_leaf(4, 5), complex_leaf(4))
    check_gradients(
        lambda s, a, b: tgemm.addmm(s, a, b, beta=0.5, alpha=-2.0),
        complex_leaf(4),
        complex_leaf(3, 5),
        complex_leaf(5, 4),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("x_shape", [(5,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual_shape", [None, (4,), "full"])
def test_linear(x_shape, bias, residual_shape, activation):
    inputs = {"x": leaf(*x_shape), "weight": leaf(4, 5)}
    if bias:
        inputs["bias"] = leaf(4)
    if residual_shape is not None:
        shape = (*x_shape[:-1], 4) if residual_shape == "full" else residual_shape
        inputs["residual"] = leaf(*shape)
    names = list(inputs)

    def function(*values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return tgemm.linear(
            given["x"],
            given["weight"],
            given.get("bias"),
            given.get("residual"),
            activation=activation,
        )

    check_gradients(function, *inputs.values())


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_linear_preact(activation):
    check_gradients(
        lambda x, w, b, r: tgemm._linear_preact(x, w, b, r, activation=activation),
        leaf(3, 5),
        leaf(4, 5),
        leaf(4),
        leaf(4),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("x_shape", [(5,), (3, 5), (2, 3, 5)])
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)])
def test_linear_glu(x_shape, biases, activation):
    given = [leaf(4) if bias else None for bias in biases]
    check_gradients(
        lambda x, g, u, *_: tgemm.linear_glu(x, g, u, *given, activation=activation),
        leaf(*x_shape),
        leaf(4, 5),
        leaf(4, 5),
        *(bias for bias in given if bias is not None),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_linear_glu_preact(activation):
    check_gradients(
        lambda *arguments: tgemm._linear_glu_preact(*arguments, activation=activation),
        leaf(3, 5),
        leaf(4, 5),
        leaf(4, 5),
        leaf(4),
        leaf(4),
    )


def test_each_output_of_linear_glu_preact_has_gradients_of_its_own():
    arguments = leaf(3, 5), leaf(4, 5), leaf(4, 5)
    for index in range(3):
        assert gradcheck(lambda *a, index=index: tgemm._linear_glu_preact(*a)[index], arguments)
    # Neither half depends on the other's weight.
    for index, other in ((1, arguments[2]), (2, arguments[1])):
        half = tgemm._linear_glu_preact(*arguments)[index]
        assert torch.autograd.grad(half.sum(), other, allow_unused=True) == (None,)


def test_linear_glu_of_a_packed_weight():
    x, packed = leaf(3, 5), leaf(8, 5)
    check_gradients(lambda x, packed: tgemm.linear_glu(x, *packed.chunk(2)), x, packed)


@pytest.mark.parametrize("input_shape", [(), (1,), (4,), (3, 1), (3, 4)])
@pytest.mark.parametrize(("beta", "alpha"), [(1.0, 1.0), (0.5, -2.0), (0.0, 3.0)])
def test_addmm(input_shape, beta, alpha):
    check_gradients(
        lambda s, a, b: tgemm.addmm(s, a, b, beta=beta, alpha=alpha),
        leaf(*input_shape),
        leaf(3, 5),
        leaf(5, 4),
    )


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_frozen_arguments(activation, frozen):
    """A frozen argument gets no gradient, and the others the same as before."""
    values = {"x": leaf(3, 5), "weight": leaf(4, 5), "bias": leaf(4), "residual": leaf(3, 4)}

    def gradients(names: list[str]) -> tuple[Tensor, ...]:
        given = {name: value if name in names else value.detach() for name, value in values.items()}
        out = tgemm.linear(*given.values(), activation=activation)
        return torch.autograd.grad(out.square().sum(), [values[name] for name in names])

    everything = dict(zip(values, gradients(list(values)), strict=True))
    learning = [name for name in values if name != frozen]
    for name, grad in zip(learning, gradients(learning), strict=True):
        torch.testing.assert_close(grad, everything[name])


@pytest.mark.parametrize(
    ("learning", "products"),
    [({"x"}, 1), ({"weight"}, 1), ({"x", "weight"}, 2), ({"bias"}, 0), ({"residual"}, 0)],
)
def test_backward_computes_no_gemm_that_nobody_asked_for(learning, products):
    x, weight = leaf(3, 5, grad="x" in learning), leaf(4, 5, grad="weight" in learning)
    bias, residual = leaf(4, grad="bias" in learning), leaf(3, 4, grad="residual" in learning)
    out = tgemm.linear(x, weight, bias, residual)
    with Calls() as calls:
        out.sum().backward()
    assert calls.names() == ["tgemm.matmul.default"] * products


GLU_ARGUMENTS = {"x": (3, 5), "gate": (4, 5), "up": (4, 5), "gate_bias": (4,), "up_bias": (4,)}


@pytest.mark.parametrize("frozen", GLU_ARGUMENTS)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_frozen_arguments_of_linear_glu(activation, frozen):
    values = {name: leaf(*shape) for name, shape in GLU_ARGUMENTS.items()}

    def gradients(names: list[str]) -> tuple[Tensor, ...]:
        given = {name: value if name in names else value.detach() for name, value in values.items()}
        out = tgemm.linear_glu(*given.values(), activation=activation)
        return torch.autograd.grad(out.square().sum(), [values[name] for name in names])

    everything = dict(zip(values, gradients(list(values)), strict=True))
    learning = [name for name in values if name != frozen]
    for name, grad in zip(learning, gradients(learning), strict=True):
        torch.testing.assert_close(grad, everything[name])


@pytest.mark.parametrize(
    ("learning", "products"),
    [
        ({"x"}, ["linear", "linear"]),  # the second adds the first
        ({"gate"}, ["matmul"]),
        ({"up"}, ["matmul"]),
        ({"gate", "up"}, ["matmul", "matmul"]),
        ({"gate_bias"}, []),
        ({"up_bias"}, []),
    ],
)
def test_backward_of_linear_glu_computes_no_gemm_that_nobody_asked_for(learning, products):
    arguments = [leaf(*shape, grad=name in learning) for name, shape in GLU_ARGUMENTS.items()]
    out = tgemm.linear_glu(*arguments)
    with Calls() as calls:
        out.sum().backward()
    assert calls.names() == [f"tgemm.{product}.default" for product in products]
    assert [value.grad is not None for value in arguments] == [
        name in learning for name in GLU_ARGUMENTS
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_backward_gemms_are_zero_copy(dtype):
    x, weight = leaf(2, 3, 5, dtype=dtype), leaf(4, 5, dtype=dtype)
    out = tgemm.linear(x, weight)
    with Calls() as calls:
        out.backward(torch.ones_like(out))
    copies = [name for name in calls.names("aten") if "clone" in name or "copy" in name]
    assert copies == []
    memory = {x.data_ptr(), weight.data_ptr()}
    operands = [
        {arg.data_ptr() for arg in args if isinstance(arg, Tensor)}
        for name, args in calls.calls
        if name.startswith("tgemm")
    ]
    assert all(pointers & memory for pointers in operands)

    a, b = leaf(2, 3, 5, dtype=dtype), leaf(2, 5, 4, dtype=dtype)
    out = tgemm.matmul(a, b.mT.contiguous().mT)
    with Calls() as calls:
        out.backward(torch.ones_like(out))
    assert calls.names() == ["tgemm.matmul.default"] * 2


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_preactivation_is_written_only_for_a_gradient(activation):
    x, weight, bias = leaf(3, 5), leaf(4, 5), leaf(4)
    needs_preact = activation in ("gelu", "gelu_tanh", "silu")
    with Calls() as calls:
        tgemm.linear(x, weight, bias, activation=activation)
    with_gradient = calls.names()
    expected = "tgemm._linear_preact.default" if needs_preact else "tgemm.linear.default"
    assert with_gradient == [expected]
    with torch.no_grad(), Calls() as calls:
        tgemm.linear(x, weight, bias, activation=activation)
    assert calls.names() == ["tgemm.linear.default"]
    with torch.inference_mode(), Calls() as calls:
        tgemm.linear(x, weight, bias, activation=activation)
    assert calls.names() == ["tgemm.linear.default"]
    # A gradient for the residual alone passes by the activation.
    residual = leaf(3, 4)
    with Calls() as calls:
        out = tgemm.linear(x.detach(), weight.detach(), None, residual, activation=activation)
    assert calls.names() == ["tgemm.linear.default"]
    out.sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(residual))


def test_linear_glu_writes_preactivations_only_for_a_gradient():
    arguments = leaf(3, 5), leaf(4, 5), leaf(4, 5)
    with Calls() as calls:
        tgemm.linear_glu(*arguments)
    assert calls.names() == ["tgemm._linear_glu_preact.default"]
    for without in (torch.no_grad, torch.inference_mode):
        with without(), Calls() as calls:
            tgemm.linear_glu(*arguments)
        assert calls.names() == ["tgemm.linear_glu.default"]
    with Calls() as calls:
        tgemm.linear_glu(*(value.detach() for value in arguments))
    assert calls.names() == ["tgemm.linear_glu.default"]


def test_relu_saves_its_output_alone():
    x, weight = leaf(3, 5), leaf(4, 5, grad=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = tgemm.linear(x, weight, activation="relu")
    assert sorted(t.data_ptr() for t in saved) == sorted([weight.data_ptr(), out.data_ptr()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_as_good_as_torchs(dtype, activation):
    """In low precision, against FP64, with at most 1.5 times the error of torch's own ops."""
    torch.manual_seed(1)
    exact = [leaf(64, 96), leaf(80, 96), leaf(80)]
    arguments = [value.detach().to(dtype).requires_grad_() for value in exact]
    truths = [value.detach().double().requires_grad_() for value in arguments]
    grad = torch.randn(64, 80, dtype=f64).to(dtype)

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = functional.linear(x, weight, bias)
        if activation is None:
            return out
        if activation == "gelu_tanh":
            return functional.gelu(out, approximate="tanh")
        return getattr(functional, activation)(out)

    truth = torch.autograd.grad(torchs(*truths), truths, grad.double())
    theirs = torch.autograd.grad(torchs(*arguments), arguments, grad)
    ours = torch.autograd.grad(tgemm.linear(*arguments, activation=activation), arguments, grad)
    for own, other, true, argument in zip(ours, theirs, truth, arguments, strict=True):
        assert own.dtype == argument.dtype
        assert own.shape == argument.shape
        error, other_error = (own.double() - true).norm(), (other.double() - true).norm()
        assert error <= 1.5 * other_error + 1e-6 * true.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_gradients_of_linear_glu_are_as_good_as_torchs(dtype, activation):
    torch.manual_seed(1)
    shapes = (64, 96), (80, 96), (80, 96), (80,), (80,)
    arguments = [leaf(*shape).detach().to(dtype).requires_grad_() for shape in shapes]
    truths = [value.detach().double().requires_grad_() for value in arguments]
    grad = torch.randn(64, 80, dtype=f64).to(dtype)

    def torchs(x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor, up_bias: Tensor) -> Tensor:
        activated = problems.activate(functional.linear(x, gate, gate_bias), activation)
        return activated * functional.linear(x, up, up_bias)

    truth = torch.autograd.grad(torchs(*truths), truths, grad.double())
    theirs = torch.autograd.grad(torchs(*arguments), arguments, grad)
    ours = torch.autograd.grad(tgemm.linear_glu(*arguments, activation=activation), arguments, grad)
    for own, other, true, argument in zip(ours, theirs, truth, arguments, strict=True):
        assert own.dtype == argument.dtype
        assert own.shape == argument.shape
        error, other_error = (own.double() - true).norm(), (other.double() - true).norm()
        assert error <= 1.5 * other_error + 1e-6 * true.norm()


def test_dtypes_of_gradients():
    x, weight = leaf(3, 5, dtype=torch.float16), leaf(4, 5, dtype=torch.float16)
    bias, residual = leaf(4, dtype=torch.float32), leaf(4, dtype=torch.float32)
    out = tgemm.linear(x, weight, bias, residual, activation="silu", out_dtype=torch.float32)
    assert out.dtype == torch.float32
    out.sum().backward()
    for value in (x, weight, bias, residual):
        assert value.grad.dtype == value.dtype
    arguments = [x, weight, leaf(4, 5, dtype=torch.float16), leaf(4, dtype=torch.float32)]
    for value in arguments:
        value.grad = None
    tgemm.linear_glu(*arguments, out_dtype=torch.float32).sum().backward()
    for value in arguments:
        assert value.grad.dtype == value.dtype
    a, b = leaf(2, 3, 5, dtype=torch.float32), leaf(5, 4, dtype=torch.float32)
    tgemm.matmul(a, b, out_dtype=torch.bfloat16).sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32


def test_sums_over_broadcast_batches_are_kept_in_fp32():
    """400 partial products of 1 sum to 400 + 400 / 4096 in FP32; in FP16 each would lose its tail."""
    a = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    b = torch.full((400, 1, 2), 1.0, dtype=torch.float16)
    b[:, :, 1] = 2.0**-12
    tgemm.matmul(a, b).sum().backward()
    assert a.grad.item() == torch.tensor(400 + 400 * 2.0**-12).half().item()


def test_precision_reaches_the_backward_gemms():
    x, weight = leaf(3, 300, dtype=torch.float32), leaf(300, 300, dtype=torch.float32)
    grad = torch.randn(3, 300)
    (rounded,) = torch.autograd.grad(tgemm.linear(x, weight, precision="bf16"), x, grad)
    (exact,) = torch.autograd.grad(tgemm.linear(x, weight), x, grad)
    expected = tgemm.matmul(grad, weight.detach(), precision="bf16")
    assert torch.equal(rounded, expected)
    assert not torch.equal(rounded, exact)


def test_precision_reaches_the_backward_gemms_of_linear_glu():
    x, gate_weight, up_weight = (leaf(300, 300, dtype=torch.float32) for _ in range(3))
    arguments = x, gate_weight, up_weight
    grad = torch.randn(300, 300)
    _, gate, up = tgemm._linear_glu_preact(*(a.detach() for a in arguments), precision="bf16")
    ours = torch.autograd.grad(tgemm.linear_glu(*arguments, precision="bf16"), arguments, grad)
    grad_up = grad * functional.silu(gate)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)

    def expected(precision: str | None) -> list[Tensor]:
        with torch.no_grad():
            through_gate = tgemm.matmul(grad_gate, gate_weight, precision=precision)
            return [
                tgemm.linear(grad_up, up_weight.mT, None, through_gate, precision=precision),
                tgemm.matmul(grad_gate.mT, x, precision=precision),
                tgemm.matmul(grad_up.mT, x, precision=precision),
            ]

    torch.testing.assert_close(list(ours), expected("bf16"))
    for own, exact in zip(ours, expected(None), strict=True):
        assert not torch.allclose(own, exact)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_forward_mode_is_refused():
    """A dropped tangent would be a silent zero."""
    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (tgemm.linear, torch_gemm.linear):
            with pytest.raises(NotImplementedError) as caught:
                call(dual, weight)
            assert str(caught.value) == "tgemm: forward-mode derivatives are not supported"
        for call in (tgemm.linear_glu, torch_gemm.linear_glu):
            with pytest.raises(NotImplementedError):
                call(dual, weight, weight)
        assert torch.equal(torch_gemm.linear(x, weight), tgemm.linear(x, weight))


def test_checkpointing():
    x, weight = leaf(3, 5), leaf(4, 5)

    def block(x: Tensor) -> Tensor:
        return tgemm.linear(x, weight, activation="gelu")

    plain = torch.autograd.grad(block(x).sum(), (x, weight))
    again = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), (x, weight)), plain)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_wrapper_has_the_same_gradients(activation):
    x, weight, bias = leaf(3, 5), leaf(4, 5), leaf(4)
    ours = torch_gemm.linear(x, weight, bias, activation=activation)
    ops = tgemm.linear(x, weight, bias, activation=activation)
    assert ours.grad_fn is not None
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), (x, weight, bias)),
        torch.autograd.grad(ops.sum(), (x, weight, bias)),
    )
    with torch.no_grad():
        assert torch.equal(torch_gemm.linear(x, weight, bias, activation=activation), ops)
        assert not torch_gemm.linear(x, weight, bias).requires_grad
    with torch.inference_mode():
        assert torch.equal(torch_gemm.linear(x, weight, bias, activation=activation), ops)


def test_nn_linear_trains():
    torch.manual_seed(0)
    layer = torch_gemm.nn.Linear(5, 1, activation="gelu")
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
    x = torch.randn(200, 5)
    target = functional.gelu(x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0], [3.0]]) + 0.25)
    losses = []
    for _ in range(200):
        optimiser.zero_grad()
        loss = functional.mse_loss(layer(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-3 * losses[0]


# --- Autocast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_operands(dtype):
    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    bias, residual = torch.randn(4), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=dtype):
        out = tgemm.linear(x, weight, bias, residual, activation="relu")
        product = tgemm.matmul(x, weight.mT)
        sum_ = tgemm.addmm(residual, x, weight.mT)
        assert functional.linear(x, weight).dtype == dtype
        glu = tgemm.linear_glu(x, weight, -weight, bias, bias)
    assert out.dtype == product.dtype == sum_.dtype == glu.dtype == dtype
    low = x.to(dtype), weight.to(dtype)
    assert torch.equal(out, tgemm.linear(*low, bias, residual, activation="relu"))
    assert torch.equal(product, tgemm.matmul(low[0], low[1].mT))
    assert torch.equal(sum_, tgemm.addmm(residual, low[0], low[1].mT))
    assert torch.equal(glu, tgemm.linear_glu(*low, -low[1], bias, bias))


def test_autocast_mixes_dtypes_as_torch_does():
    x, weight = torch.randn(3, 5).half(), torch.randn(4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tgemm.linear(x, weight, torch.randn(4).half()).dtype == torch.bfloat16
        doubles = torch.randn(3, 5, dtype=f64)
        assert tgemm.matmul(doubles, doubles.mT).dtype == f64
        out = torch.empty(3, 3)
        exact = torch.randn(3, 5)
        tgemm.matmul.out(exact, exact.mT, out=out)  # as in torch, out= does not cast
        torch.testing.assert_close(out, (exact.double() @ exact.double().mT).float())


def test_gradients_under_autocast():
    x, weight, bias = leaf(3, 5), leaf(4, 5), leaf(4)
    x, weight, bias = (value.detach().float().requires_grad_() for value in (x, weight, bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tgemm.linear(x, weight, bias, activation="gelu").sum().backward()
    for value in (x, weight, bias):
        assert value.grad.dtype == torch.float32
    reference = [value.detach().clone().requires_grad_() for value in (x, weight, bias)]
    functional.gelu(functional.linear(*reference)).sum().backward()
    for value, other in zip((x, weight, bias), reference, strict=True):
        torch.testing.assert_close(value.grad, other.grad, rtol=0.05, atol=0.05)


def test_backward_inside_autocast_stays_exact():
    x, weight = (leaf(8, 64, dtype=torch.float32) for _ in range(2))
    out = tgemm.linear(x, weight)
    grad = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (inside,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    (outside,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(inside, outside)


def test_wrapper_takes_the_flags_into_the_graph():
    with FlagPrecision():
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        x, weight = leaf(3, 5, dtype=torch.float32), leaf(4, 5, dtype=torch.float32)
        # The flags are those of CUDA matmuls: nothing changes on the CPU.
        assert torch.equal(torch_gemm.linear(x, weight), tgemm.linear(x, weight))
