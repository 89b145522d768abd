"""Fake and meta tensors against real ones, symbolic sizes, and opcheck."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_gemm  # noqa: F401  (registers the ops)

tgemm = torch.ops.tgemm
half = torch.float16


def randn(*sizes: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(sizes).to(dtype).requires_grad_(grad)


# Each as (op, args, kwargs), built anew for each use.
def samples(grad: bool = False) -> dict[str, tuple[Any, tuple, dict[str, Any]]]:
    def r(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return randn(*sizes, dtype=dtype, grad=grad)

    calls: dict[str, tuple[Any, tuple, dict[str, Any]]] = {}
    for a, b in [
        ((5,), (5,)),
        ((5,), (5, 4)),
        ((3, 5), (5,)),
        ((3, 5), (5, 4)),
        ((2, 3, 5), (5, 4)),
        ((3, 5), (2, 5, 4)),
        ((2, 1, 3, 5), (6, 5, 4)),
        ((3, 0), (0, 4)),
        ((0, 5), (5, 4)),
    ]:
        calls[f"matmul {a} {b}"] = (tgemm.matmul.default, (r(*a), r(*b)), {})
    calls["matmul half to float"] = (
        tgemm.matmul.default,
        (r(2, 3, 5, dtype=half), r(5, 4, dtype=half)),
        {"out_dtype": torch.float32},
    )
    calls["matmul transposed"] = (tgemm.matmul.default, (r(5, 3).mT, r(2, 4, 5).mT), {})
    calls["matmul bf16 precision"] = (
        tgemm.matmul.default,
        (r(3, 5), r(5, 4)),
        {"precision": "bf16"},
    )
    calls["matmul float64"] = (
        tgemm.matmul.default,
        (r(3, 5, dtype=torch.float64), r(5, 4, dtype=torch.float64)),
        {},
    )
    for activation in (None, "relu", "gelu", "gelu_tanh", "silu"):
        calls[f"linear {activation}"] = (
            tgemm.linear.default,
            (r(2, 3, 5), r(4, 5), r(4)),
            {"activation": activation},
        )
        calls[f"linear {activation} residual"] = (
            tgemm.linear.default,
            (r(2, 3, 5), r(4, 5), r(4), r(3, 1)),
            {"activation": activation, "static_weight": True},
        )
    calls["linear 1-d"] = (tgemm.linear.default, (r(5), r(4, 5)), {})
    calls["linear mixed dtypes"] = (
        tgemm.linear.default,
        (r(3, 5, dtype=half), r(4, 5, dtype=half), r(4), r(3, 4, dtype=torch.float32)),
        {"activation": "gelu", "out_dtype": torch.float32},
    )
    for activation in ("gelu", "gelu_tanh", "silu", "relu"):
        calls[f"_linear_preact {activation}"] = (
            tgemm._linear_preact.default,
            (r(2, 3, 5), r(4, 5), r(4), r(4)),
            {"activation": activation},
        )
    for activation in ("gelu", "gelu_tanh", "silu", "relu"):
        calls[f"linear_glu {activation}"] = (
            tgemm.linear_glu.default,
            (r(2, 3, 5), r(4, 5), r(4, 5), r(4), r(4)),
            {"activation": activation, "static_weight": True},
        )
    calls["linear_glu 1-d"] = (tgemm.linear_glu.default, (r(5), r(4, 5), r(5, 4).mT), {})
    calls["linear_glu mixed dtypes"] = (
        tgemm.linear_glu.default,
        (r(3, 5, dtype=half), r(4, 5, dtype=half), r(4, 5, dtype=half), None, r(4)),
        {"out_dtype": torch.float32},
    )
    calls["_linear_glu_preact"] = (
        tgemm._linear_glu_preact.default,
        (r(2, 3, 5), r(4, 5), r(4, 5), None, r(4)),
        {"activation": "gelu"},
    )
    for addend in ((), (4,), (3, 1), (3, 4)):
        calls[f"addmm {addend}"] = (
            tgemm.addmm.default,
            (r(*addend), r(3, 5), r(5, 4)),
            {"beta": 0.5, "alpha": 2.0},
        )
    return calls


def out_samples() -> dict[str, tuple[Any, tuple, dict[str, Any]]]:
    return {
        "matmul.out": (
            tgemm.matmul.out,
            (randn(2, 3, 5), randn(5, 4)),
            {"out": torch.empty(2, 3, 4)},
        ),
        "matmul.out half": (
            tgemm.matmul.out,
            (randn(3, 5, dtype=half), randn(5, 4, dtype=half)),
            {"out": torch.empty(4, 3).mT, "out_dtype": torch.float32},
        ),
        "linear.out": (
            tgemm.linear.out,
            (randn(3, 5), randn(4, 5), randn(4), randn(4)),
            {"activation": "silu", "out": torch.empty(3, 4)},
        ),
        "linear_glu.out": (
            tgemm.linear_glu.out,
            (randn(3, 5), randn(4, 5), randn(4, 5), randn(4), randn(4)),
            {"activation": "relu", "out": torch.empty(3, 4)},
        ),
        "addmm.out": (
            tgemm.addmm.out,
            (randn(4), randn(3, 5), randn(5, 4)),
            {"alpha": 2.0, "out": torch.empty(3, 4)},
        ),
    }


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_same_metadata(fake: Any, real: Any, device: str = "cpu") -> None:
    fakes, reals = as_tuple(fake), as_tuple(real)
    assert len(fakes) == len(reals)
    for x, y in zip(fakes, reals, strict=True):
        assert x.shape == y.shape
        assert x.stride() == y.stride()
        assert x.dtype == y.dtype
        assert x.device.type == device
        assert x.storage_offset() == y.storage_offset() == 0


@pytest.mark.parametrize("name", samples())
def test_meta_tensors_have_the_real_metadata(name):
    op, args, options = samples()[name]
    meta = [value.to("meta") if isinstance(value, Tensor) else value for value in args]
    assert_same_metadata(op(*meta, **options), op(*args, **options), "meta")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", samples())
def test_fake_tensors_have_the_real_metadata(name, device):
    op, args, options = samples()[name]
    real = op(*args, **options)
    with FakeTensorMode() as mode:
        fakes = [
            mode.from_tensor(value).to(device) if isinstance(value, Tensor) else value
            for value in args
        ]
        assert_same_metadata(op(*fakes, **options), real, device)


def test_fake_cuda_errors_without_a_gpu():
    with FakeTensorMode():
        a = torch.empty(2, 3, device="cuda", dtype=torch.int64)
        with pytest.raises(RuntimeError) as caught:
            tgemm.matmul(a, a.mT)
        assert str(caught.value) == (
            "tgemm.matmul: a has dtype int64; integers are supported on the CPU alone"
        )
        a = torch.empty(2, 3, device="cuda")
        with pytest.raises(RuntimeError) as caught:
            tgemm.matmul(a, torch.empty(3, 4))
        assert str(caught.value) == (
            "tgemm.matmul: b is on cpu but a is on cuda:0; all tensors must be on one device"
        )


def all_calls() -> list[str]:
    return [*samples(), *out_samples()]


@pytest.mark.parametrize("name", all_calls())
def test_opcheck(name):
    op, args, options = (samples() | out_samples())[name]
    torch.library.opcheck(op, args, options)


@pytest.mark.parametrize("name", samples())
def test_opcheck_with_gradients(name):
    op, args, options = samples(grad=True)[name]
    torch.library.opcheck(op, args, options)


def traced_sizes(function: Any, *args: Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic")(*args)


def test_symbolic_sizes_are_not_specialised():
    graphs = {
        "linear": traced_sizes(
            lambda x, w, b, r: tgemm.linear(x, w, b, r, activation="gelu"),
            randn(7, 3, 5),
            randn(4, 5),
            randn(4),
            randn(3, 4),
        ),
        "linear_glu": traced_sizes(
            lambda x, g, u, b: tgemm.linear_glu(x, g, u, None, b),
            randn(7, 3, 5),
            randn(4, 5),
            randn(4, 5),
            randn(4),
        ),
        "matmul": traced_sizes(lambda a, b: tgemm.matmul(a, b), randn(7, 3, 5), randn(7, 5, 4)),
        "addmm": traced_sizes(
            lambda s, a, b: tgemm.addmm(s, a, b), randn(4), randn(3, 5), randn(5, 4)
        ),
    }
    for name, graph in graphs.items():
        (out,) = (node for node in graph.graph.nodes if node.op == "output")
        sizes = out.args[0].meta["val"].shape
        assert all(isinstance(size, torch.SymInt) for size in sizes), (name, sizes)
    # The same graph serves other sizes.
    x, weight, bias, residual = randn(2, 6, 9), randn(11, 9), randn(11), randn(6, 11)
    torch.testing.assert_close(
        graphs["linear"](x, weight, bias, residual),
        tgemm.linear(x, weight, bias, residual, activation="gelu"),
    )


def test_unbacked_sizes():
    """A size that depends on data: compilation must not ask for its value."""

    def selected_rows(x: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return tgemm.linear(x[mask], weight, bias, activation="relu")

    compiled = torch.compile(selected_rows, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x, weight, bias = randn(6, 5), randn(4, 5), randn(4)
        for mask in (torch.tensor([1, 0, 1, 1, 0, 0]).bool(), torch.zeros(6).bool()):
            torch.testing.assert_close(
                compiled(x, mask, weight, bias), selected_rows(x, mask, weight, bias)
            )


@pytest.mark.parametrize(
    ("a_strides", "b_strides"),
    list(itertools.product(["rows", "columns", "expanded"], repeat=2)),
)
def test_output_strides_do_not_depend_on_the_operands(a_strides, b_strides):
    def matrix(rows: int, columns: int, how: str) -> Tensor:
        if how == "rows":
            return randn(6, rows, columns)
        if how == "columns":
            return randn(6, columns, rows).mT
        return randn(1, rows, columns).expand(6, rows, columns)

    a, b = matrix(3, 5, a_strides), matrix(5, 4, b_strides)
    out = tgemm.matmul(a, b)
    assert out.stride() == (12, 4, 1)
    assert_same_metadata(tgemm.matmul(a.to("meta"), b.to("meta")), out, "meta")
