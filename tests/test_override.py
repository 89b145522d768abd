"""`override`: which products run on tgemm inside the block, and that everything else stays as it was."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from test_ops_autograd import Calls
from torch import nn
from torch.autograd import forward_ad

import torch_gemm

functional = nn.functional


@pytest.fixture(autouse=True)
def _fresh_stats_and_policy():
    torch_gemm.reset_stats()
    yield
    torch_gemm.set_fallback("warn")
    torch_gemm.reset_stats()


def randn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes)


def out_of(function, *arguments, sizes):
    out = torch.empty(sizes)
    assert function(*arguments, out=out) is out
    return out


# What runs in the block, and how many tgemm ops it takes.
PRODUCTS = {
    "matmul": (lambda: torch.matmul(randn(2, 3, 5), randn(5, 4)), 1),
    "matmul broadcast": (lambda: torch.matmul(randn(2, 1, 3, 5), randn(6, 5, 4)), 1),
    "@": (lambda: randn(3, 5) @ randn(5, 4), 1),
    "@ vector": (lambda: randn(3, 5) @ randn(5), 1),
    "vector @": (lambda: randn(5) @ randn(5, 4), 1),
    "dot": (lambda: torch.dot(randn(5), randn(5)), 1),
    "mv": (lambda: torch.mv(randn(3, 5), randn(5)), 1),
    "mm": (lambda: torch.mm(randn(3, 5), randn(4, 5).t()), 1),
    "bmm": (lambda: torch.bmm(randn(2, 3, 5), randn(2, 5, 4)), 1),
    "addmm": (lambda: torch.addmm(randn(4), randn(3, 5), randn(5, 4), beta=0.5, alpha=2), 1),
    "addmm_": (lambda: randn(3, 4).addmm_(randn(3, 5), randn(5, 4)), 1),
    "addmv": (lambda: torch.addmv(randn(3), randn(3, 5), randn(5), alpha=2), 1),
    "baddbmm": (lambda: torch.baddbmm(randn(4), randn(2, 3, 5), randn(2, 5, 4), beta=0.5), 1),
    "baddbmm alpha": (lambda: torch.baddbmm(randn(4), randn(2, 3, 5), randn(2, 5, 4), alpha=2), 1),
    "baddbmm beta 0": (
        lambda: torch.baddbmm(torch.full((4,), torch.nan), randn(2, 3, 5), randn(2, 5, 4), beta=0),
        1,
    ),
    "mm.out": (lambda: out_of(torch.mm, randn(3, 5), randn(5, 4), sizes=(3, 4)), 1),
    "resized out": (lambda: out_of(torch.bmm, randn(2, 3, 5), randn(2, 5, 4), sizes=0), 1),
    "linear": (lambda: functional.linear(randn(2, 3, 5), randn(4, 5), randn(4)), 1),
    "linear 1-d": (lambda: functional.linear(randn(5), randn(4, 5)), 1),
    "einsum": (lambda: torch.einsum("bij,bjk,kl->bil", randn(2, 3, 5), randn(2, 5, 4), randn(4, 6)), 2),
    "tensordot": (lambda: torch.tensordot(randn(3, 4, 5), randn(4, 5, 2), dims=2), 1),
    "multi_dot": (lambda: torch.linalg.multi_dot([randn(3, 4), randn(4, 5), randn(5, 2)]), 2),
    "lstm cell": (lambda: nn.LSTMCell(5, 4)(randn(2, 5))[0], 2),
    "gru": (lambda: nn.GRU(5, 4)(randn(3, 2, 5))[0], 4),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_run_on_tgemm(name, mode):
    function, count = PRODUCTS[name]
    torch.manual_seed(1)
    with mode():
        expected = function()
        torch.manual_seed(1)
        with Calls() as calls, torch_gemm.override():
            result = function()
    assert len(calls.names("tgemm")) == count
    assert result.dtype == expected.dtype
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    assert torch_gemm.stats()["fallbacks"] == {}


def test_nothing_happens_outside_the_block():
    with torch_gemm.override():
        pass
    with Calls() as calls:
        randn(3, 5) @ randn(5, 4)
    assert calls.names("tgemm") == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attention_leaves_its_fast_path(mode):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    with mode():
        with Calls() as calls:
            expected = model(x)
        fast = {name for name, _ in calls.calls}
        assert "aten._transformer_encoder_layer_fwd.default" in fast
        with Calls() as calls, torch_gemm.override():
            result = model(x)
        # In each layer: two projections, two feed-forward layers.
        assert len(calls.names("tgemm")) >= 2 * 4
        assert calls.names("aten.mm") == calls.names("aten.addmm") == []
        with Calls() as calls:
            model(x)
        assert {name for name, _ in calls.calls} == fast
    torch.testing.assert_close(result, expected)


def test_attention_trains():
    attention = nn.MultiheadAttention(8, 2)
    x = torch.randn(5, 3, 8, requires_grad=True)
    expected = torch.autograd.grad(
        attention(x, x, x)[0].square().sum(), (x, *attention.parameters())
    )
    with Calls() as calls, torch_gemm.override():
        out = attention(x, x, x)[0].square().sum()
        forward = len(calls.names("tgemm"))
        gradients = torch.autograd.grad(out, (x, *attention.parameters()))
    assert forward >= 2
    assert len(calls.names("tgemm")) >= 3 * forward  # the backward pass ran in the block too
    assert calls.names("aten.mm") == calls.names("aten.bmm") == []
    torch.testing.assert_close(gradients, expected)


def test_a_backward_pass_after_the_block_is_torchs():
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with torch_gemm.override():
        out = (x @ weight).square().sum()
    with Calls() as calls:
        gradients = torch.autograd.grad(out, (x, weight))
    assert calls.names("tgemm") == []
    torch.testing.assert_close(
        gradients, torch.autograd.grad((x @ weight).square().sum(), (x, weight))
    )


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_autocast_casts_first(mode):
    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    with (
        mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        Calls() as calls,
        torch_gemm.override(),
    ):
        assert functional.linear(x, weight).dtype is torch.bfloat16
    ((_, operands),) = [call for call in calls.calls if call[0].startswith("tgemm")]
    assert {operand.dtype for operand in operands if operand is not None} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_transforms_of_torch_func():
    x, weight = torch.randn(6, 3, 5), torch.randn(5, 4)
    with torch_gemm.override():
        torch.testing.assert_close(torch.vmap(lambda row: row @ weight)(x), x @ weight)
        gradient = torch.func.grad(lambda w: (x @ w).square().sum())(weight)
        _, tangent = torch.func.jvp(lambda w: x @ w, (weight,), (torch.ones_like(weight),))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(weight, torch.ones_like(weight))
            assert forward_ad.unpack_dual(x @ dual).tangent is not None
    torch.testing.assert_close(tangent, x @ torch.ones_like(weight))
    torch.testing.assert_close(gradient, 2 * torch.einsum("bij,bik->jk", x, x @ weight))


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("operands", "what"),
    [
        (lambda: (torch.eye(3, dtype=torch.int64),) * 2, "int64 operands"),
        (lambda: (torch.eye(3, dtype=torch.float64),) * 2, "float64 operands"),
        (lambda: (torch.eye(3, dtype=torch.complex64),) * 2, "complex64 operands"),
        (lambda: (torch.eye(3).to_sparse(), torch.eye(3)), "sparse_coo operands"),
        (lambda: (torch.eye(3).as_subclass(Tagged), torch.eye(3)), "Tagged operands"),
    ],
)
def test_what_tgemm_does_not_take_is_torchs_and_counted(operands, what):
    a, b = operands()
    sentence = f"torch_gemm.override: mm has {what}, which torch_gemm does not take"
    with torch_gemm.override(), pytest.warns(UserWarning) as caught:
        result = torch.mm(a, b)
    assert torch.equal(result.to(torch.complex128), torch.eye(3, dtype=torch.complex128))
    assert [str(warning.message) for warning in caught] == [f"{sentence}; ATen computes it"]
    assert caught[0].filename == __file__
    assert torch_gemm.stats()["fallbacks"] == {f"override mm: {what}": 1}

    torch_gemm.set_fallback("error")
    with torch_gemm.override(), pytest.raises(RuntimeError) as raised:
        torch.mm(a, b)
    assert str(raised.value) == f'{sentence}; the fallback policy is "error"'

    torch_gemm.set_fallback("allow")
    with torch_gemm.override(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.mm(a, b)
    assert torch_gemm.stats()["fallbacks"] == {f"override mm: {what}": 2}
    torch_gemm.reset_stats()
    assert torch_gemm.stats()["fallbacks"] == {}


def test_errors_leave_the_next_call_working():
    with torch_gemm.override():
        with pytest.raises(RuntimeError, match="inner sizes"):
            torch.mm(torch.ones(3, 5), torch.ones(4, 5))
        with pytest.raises(RuntimeError, match="out has dtype float16 but must have float32"):
            torch.mm(torch.ones(3, 3), torch.ones(3, 3), out=torch.ones(3, 3, dtype=torch.float16))
        with pytest.raises(KeyError), torch_gemm.override():
            raise KeyError
        with Calls() as calls:
            torch.ones(3, 5) @ torch.ones(5, 4)
    assert calls.names("aten.mm") == ["aten.mm.default"]  # seen before it is sent to tgemm
    with Calls() as calls:
        torch.ones(3, 5) @ torch.ones(5, 4)
    assert calls.names("tgemm") == []


def product_runs_on_tgemm() -> bool:
    """Told by the sentence about a product that nobody can compute."""
    try:
        torch.ones(3, 5) @ torch.ones(4, 5)
    except RuntimeError as error:
        return str(error).startswith("tgemm.")
    return False


def test_nested_and_entered_again():
    block = torch_gemm.override()
    with block:
        with block, torch_gemm.override():
            assert product_runs_on_tgemm()
        assert product_runs_on_tgemm()
    assert not product_runs_on_tgemm()
    with block:
        assert product_runs_on_tgemm()


def test_other_threads_are_not_affected():
    block, found = torch_gemm.override(), {}

    def other():
        found["outside"] = product_runs_on_tgemm()
        with block:
            found["inside"] = product_runs_on_tgemm()
        found["after"] = product_runs_on_tgemm()

    with block:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert product_runs_on_tgemm()
    assert found == {"outside": False, "inside": True, "after": False}


def test_decorator():
    @torch_gemm.override()
    def inside(depth: int) -> bool:
        return product_runs_on_tgemm() and (depth == 0 or inside(depth - 1))

    assert inside.__name__ == "inside"
    assert inside(2)
    assert not product_runs_on_tgemm()


def test_misused_decorators():
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match=r"cannot decorate .*, whose body runs after the call"):
            torch_gemm.override()(function)
    with pytest.raises(TypeError, match="decorates a function, and was given a Tensor"):
        torch_gemm.override()(torch.ones(3))
    with pytest.raises(TypeError):
        torch_gemm.override(lambda x: x)


def test_compiled_functions_run_uncompiled_inside_the_block():
    layer = nn.Linear(5, 4)
    x = torch.randn(3, 5)
    compiled = torch.compile(layer, backend="eager")
    expected = compiled(x)
    with Calls() as calls, torch_gemm.override():
        torch.testing.assert_close(compiled(x), expected)
    assert calls.names("tgemm") == ["tgemm.addmm.default"]


def test_compiling_the_block_says_what_to_do_instead():
    def function(x):
        with torch_gemm.override():
            return x @ x.mT

    x = torch.randn(3, 5)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"options=torch_gemm.inductor.options"):
        torch.compile(function, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend="eager")(x), x @ x.mT)
    assert not product_runs_on_tgemm()
