"""Autocast in each cell of {parameter dtype} x {input dtype} x {on, off}: as torch's own ops do it."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch
from test_ops_autograd import Calls
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_gemm

functional = nn.functional
tgemm = torch.ops.tgemm

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS = {
    "matmul": (
        lambda x, w, b: torch.matmul(x, w.mT),
        lambda x, w, b: tgemm.matmul(x, w.mT),
    ),
    "linear": (functional.linear, tgemm.linear),
    "linear gelu": (
        lambda x, w, b: functional.gelu(functional.linear(x, w, b)),
        lambda x, w, b: tgemm.linear(x, w, b, activation="gelu"),
    ),
    "linear_glu": (
        lambda x, w, b: functional.silu(functional.linear(x, w, b)) * functional.linear(x, -w),
        lambda x, w, b: tgemm.linear_glu(x, w, -w, b),
    ),
    "addmm": (
        lambda x, w, b: torch.addmm(b, x, w.mT),
        lambda x, w, b: tgemm.addmm(b, x, w.mT),
    ),
}


def autocast(to):
    return contextlib.nullcontext() if to is None else torch.autocast("cpu", dtype=to)


def tensors(parameters, inputs) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = (((6, 16), inputs), ((8, 16), parameters), ((8,), parameters))
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in shapes)


def cells():
    return [
        pytest.param(*cell, id="-".join(str(dtype).removeprefix("torch.") for dtype in cell))
        for cell in itertools.product((None, torch.bfloat16, torch.float16), DTYPES, DTYPES)
    ]


def works(to, parameters, inputs) -> bool:
    if to is None or torch.float64 in (parameters, inputs):
        return parameters == inputs
    return True


def tolerance(*dtypes) -> dict[str, float]:
    worst = max(torch.finfo(dtype).eps for dtype in dtypes if dtype is not None)
    return {"rtol": 8 * worst, "atol": 8 * worst}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("to", "parameters", "inputs"), cells())
def test_cell(to, parameters, inputs, name):
    theirs, ours = OPS[name]
    reference, arguments = tensors(parameters, inputs), tensors(parameters, inputs)
    if not works(to, parameters, inputs):
        for function in (theirs, ours):
            with autocast(to), pytest.raises(RuntimeError):
                function(*arguments)
        return
    with autocast(to):
        expected, result = theirs(*reference), ours(*arguments)
    assert result.dtype == expected.dtype
    close = tolerance(parameters, inputs, to)
    torch.testing.assert_close(result, expected, **close)
    grad = torch.randn(result.shape).to(result.dtype)
    expected.backward(grad)
    result.backward(grad)
    for own, other in zip(arguments, reference, strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            assert own.grad.dtype == own.dtype
            torch.testing.assert_close(
                own.grad, other.grad, **tolerance(parameters, inputs, to), check_dtype=True
            )


@pytest.mark.parametrize(
    ("to", "parameters", "inputs"),
    [
        (to, parameters, inputs)
        for to, parameters, inputs in itertools.product(
            (None, torch.bfloat16), DTYPES[:3], DTYPES[:3]
        )
        if works(to, parameters, inputs)
    ],
)
def test_compiled_cell(to, parameters, inputs):
    def function(x, w, b):
        with autocast(to):
            return tuple(ours(x, w, b) for _, ours in OPS.values())

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    arguments, reference = tensors(parameters, inputs), tensors(parameters, inputs)
    result, expected = compiled(*arguments), function(*reference)
    assert [out.dtype for out in result] == [out.dtype for out in expected]
    torch.testing.assert_close(result, expected)
    for outs in (result, expected):
        sum(out.float().sum() for out in outs).backward()
    for own, other in zip(arguments, reference, strict=True):
        torch.testing.assert_close(own.grad, other.grad, **tolerance(parameters, inputs, to))


def casts(function) -> list[int]:
    """The addresses of what is cast, in order."""
    with Calls() as calls:
        function()
    return [args[0].data_ptr() for name, args in calls.calls if name == "aten._to_copy.default"]


@pytest.fixture
def cuda_autocast():
    """torch.autocast("cuda") without a GPU, for fake tensors."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    with FakeTensorMode():
        yield
    torch.clear_autocast_cache()
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_the_cast_of_a_leaf_weight_is_cached_as_torchs(cuda_autocast, mode):
    x, weight = torch.randn(6, 16, device="cuda"), torch.randn(8, 16, device="cuda")
    learning = weight.clone().requires_grad_()

    def casts(weight, *functions) -> int:
        torch.clear_autocast_cache()
        with mode(), Calls() as calls:
            for function in functions:
                assert function(x, weight).dtype is torch.bfloat16
        return sum(
            args[0] is weight for name, args in calls.calls if name == "aten._to_copy.default"
        )

    for linear in (functional.linear, tgemm.linear):
        assert casts(learning, linear, linear) == 1
        # Only what requires grad is cached.
        assert casts(weight, linear, linear) == 2
    # One cache: what F.linear has cast is not cast again.
    assert casts(learning, functional.linear, tgemm.linear) == 1
    assert casts(learning, tgemm.linear, functional.linear) == 1
    assert casts(learning, lambda x, w: tgemm.linear_glu(x, w, w)) == 1
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        assert casts(learning, tgemm.linear, tgemm.linear) == 2
    finally:
        torch.set_autocast_cache_enabled(before)


def test_a_changed_weight_is_cast_again():
    x, weight = torch.ones(1, 4), torch.ones(2, 4, requires_grad=True)
    results = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(tgemm.linear(x, weight))
        weight.data.mul_(2)  # unseen by the version counter
    assert [result[0, 0].item() for result in results] == [4.0, 8.0]


def test_gradients_of_a_weight_used_twice_add_up():
    weights = [torch.randn(4, 4, requires_grad=True)]
    weights.append(weights[0].detach().clone().requires_grad_())
    x = torch.randn(3, 4)
    for weight, linear in zip(weights, (functional.linear, tgemm.linear), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            linear(linear(x, weight), weight).float().square().sum().backward()
    torch.testing.assert_close(weights[1].grad, weights[0].grad, rtol=0.05, atol=0.05)


def test_layers_train_under_autocast_in_several_threads():
    layer = torch_gemm.nn.Linear(8, 4)
    failed = []

    def work():
        try:
            for _ in range(5):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    assert layer(torch.randn(3, 8)).dtype is torch.bfloat16
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
