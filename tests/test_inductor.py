"""`torch_gemm.inductor.options`: what the pass matches in compiled models, and that results are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_gemm
from torch_gemm import inductor
from torch_gemm.inductor import Matched, Missed

functional = nn.functional


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    inductor._reports.clear()
    # A graph from the cache has no report.
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with uncached, torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def compiled(function, *inputs, options=None, dynamic=False):
    """The result, and the report of the only graph that was compiled."""
    with torch.no_grad():
        result = torch.compile(
            function, fullgraph=True, dynamic=dynamic, options=options or inductor.options()
        )(*inputs)
    (report,) = inductor.reports()
    return result, report


def without_codegen(function, *inputs):
    """The same with the pass's graph run as it is, which saves the C++ compiler's time."""
    run_pass = inductor.options()["post_grad_custom_pre_pass"]

    def backend(module, example_inputs):
        run_pass(module.graph)
        module.recompile()
        return module

    backend = aot_autograd(fw_compiler=backend, decompositions=select_decomp_table())
    with torch.no_grad():
        result = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)(*inputs)
    (report,) = inductor.reports()
    return result, report


def check(function, *inputs, codegen=False, **how):
    run = compiled if codegen or how else without_codegen
    result, report = run(function, *inputs, **how)
    with torch.no_grad():
        expected = function(*inputs)
    assert result.dtype == expected.dtype
    if expected.numel() > 0:  # Inductor of torch 2.11 returns an empty result with strides of 0
        assert result.stride() == expected.stride()
    low = result.dtype is not torch.float32
    close = {"rtol": 0.03, "atol": 0.03} if low else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(result, expected, **close)
    return report


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS = {
    "relu": (functional.relu, "relu"),
    "gelu": (functional.gelu, "gelu"),
    "gelu_tanh": (lambda x: functional.gelu(x, approximate="tanh"), "gelu_tanh"),
    "gelu_new": (gelu_new, "gelu_tanh"),
    "silu": (functional.silu, "silu"),
    "swish": (lambda x: x * torch.sigmoid(x), "silu"),
}
X = torch.randn(2, 3, 16)
WEIGHT, BIAS = torch.randn(8, 16) / 4, torch.randn(8)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_fp32(name):
    activate, kernel = ACTIVATIONS[name]
    report = check(lambda x, w, b: activate(functional.linear(x, w, b)), X, WEIGHT, BIAS)
    assert report.matched == [Matched("addmm", "linear", ("bias", kernel))]
    assert report.missed == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    def function(x, w, b):
        outs = [a(functional.linear(x * i, w, b)) for i, (a, _) in enumerate(LOW.values(), 1)]
        return torch.stack(outs)

    inputs = [value.to(dtype) for value in (X, WEIGHT, BIAS)]
    report = check(function, *inputs)
    expected = [("linear", ("bias", kernel)) for _, kernel in LOW.values()]
    assert [(op, fused) for _, op, fused in report.matched] == expected


# Written in Python, an activation rounds at every step.
LOW = {name: ACTIVATIONS[name] for name in ("relu", "gelu", "gelu_tanh", "silu")}


def gated(x, w, v):
    return functional.gelu(x @ w.t()) * (x @ v.t())


def packed(x, w, b):
    """As Phi-3 has it."""
    gate, up = functional.linear(x, w, b).chunk(2, dim=-1)
    return up * functional.silu(gate)


def packed_slices(x, w):
    """The second half is the gate."""
    y = x @ w.t()
    return functional.relu(y[..., 4:]) * y[..., :4]


def halves_and_more(x, w):
    up, gate = (x @ w.t()).chunk(2, dim=-1)
    return functional.relu(gate) * up + up


def halves_of_rows(x, w):
    up, gate = (x @ w.t()).chunk(2, dim=0)
    return functional.relu(gate) * up


FUNCTIONS = {
    "mm": (lambda x, w: x @ w.t(), (X[0], WEIGHT), [("matmul", ())]),
    "mm of a (K, N) weight": (
        lambda x, w: functional.relu(x @ w),
        (X, WEIGHT.t().contiguous()),
        [("linear", ("relu",))],
    ),
    "late bias": (
        lambda x, w, b: functional.silu(x @ w.t() + b),
        (X, WEIGHT, BIAS),
        [("linear", ("bias", "silu"))],
    ),
    "residual": (
        lambda x, w, b, r: r + functional.linear(x, w, b),
        (X, WEIGHT, BIAS, torch.randn(2, 3, 8)),
        [("linear", ("bias", "residual"))],
    ),
    "residual after the activation": (
        lambda x, w, r: functional.gelu(x @ w.t()) + r,
        (X, WEIGHT, torch.randn(2, 3, 8)),
        [("linear", ("gelu", "residual"))],
    ),
    "residual before the activation": (
        lambda x, w, r: functional.gelu(x @ w.t() + r),
        (X, WEIGHT, torch.randn(2, 3, 8)),
        [("linear", ("residual",))],
    ),
    "a residual that is not contiguous": (
        lambda x, w, r: x @ w.t() + r.mT,
        (X, WEIGHT, torch.randn(2, 8, 3)),
        None,
    ),
    "addmm": (torch.addmm, (torch.randn(3, 8), X[0], WEIGHT.t()), [("linear", ("residual",))]),
    "addmm with factors": (
        lambda s, a, b: functional.relu(torch.addmm(s, a, b, beta=0.5, alpha=2)),
        (BIAS, X[0], WEIGHT.t()),
        [("addmm", ())],
    ),
    "sum of two products": (
        lambda x, w, v: x @ w.t() + x @ v.t(),
        (X, WEIGHT, -WEIGHT.flip(0)),
        [("linear", ("residual",)), ("matmul", ())],
    ),
    "glu": (
        gated,
        (X, WEIGHT, WEIGHT.flip(0)),
        [("linear_glu", ("gelu", "product with mm_1"))],
    ),
    "glu of 2-d activations": (
        lambda x, w, v, b: (x @ v.t()) * functional.silu(functional.linear(x, w, b)),
        (X[0], WEIGHT, WEIGHT.flip(0), BIAS),
        [("linear_glu", ("bias", "silu", "product with mm"))],
    ),
    "glu of two inputs": (
        lambda x, y, w, v: functional.silu(x @ w.t()) * (y @ v.t()),
        (X, X.flip(0), WEIGHT, WEIGHT.flip(0)),
        [("linear", ("silu",)), ("matmul", ())],
    ),
    "packed glu": (
        packed,
        (X, WEIGHT, BIAS),
        [("linear_glu", ("bias", "silu", "product of its halves"))],
    ),
    "packed glu in 2-d": (
        packed,
        (X[0], WEIGHT, BIAS),
        [("linear_glu", ("bias", "silu", "product of its halves"))],
    ),
    "packed glu by slices": (
        packed_slices,
        (X, WEIGHT),
        [("linear_glu", ("relu", "product of its halves"))],
    ),
    "packed glu of a (K, N) weight": (
        lambda x, w, b: packed(x, w.t(), b),
        (X, WEIGHT.t().contiguous(), BIAS),
        [("linear_glu", ("bias", "silu", "product of its halves"))],
    ),
    "halves that are read elsewhere": (halves_and_more, (X, WEIGHT), [("matmul", ())]),
    "halves of rows": (halves_of_rows, (X, WEIGHT), [("matmul", ())]),
    "square": (
        lambda x, w: functional.silu(x @ w.t()) * functional.silu(x @ w.t()),
        (X, WEIGHT),
        None,
    ),
    "bmm": (lambda x, y: functional.relu(x @ y.mT), (X, X + 1), [("matmul", ())]),
    "chained": (
        lambda x, w, v: functional.relu(functional.relu(x @ w.t()) @ v) @ w.t(),
        (X[0], WEIGHT, WEIGHT),
        [("linear", ("relu",)), ("linear", ("relu",)), ("matmul", ())],
    ),
    "tanh": (lambda x, w: torch.tanh(x @ w.t()), (X, WEIGHT), [("matmul", ())]),
    "einsum": (
        lambda x, w: functional.relu(torch.einsum("bmk,nk->bmn", x, w)),
        (X, WEIGHT),
        None,
    ),
    "no rows": (
        lambda x, w, r: functional.relu(x @ w.t()) + r,
        (X[:, :0], WEIGHT, torch.randn(2, 0, 8)),
        None,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function, inputs, expected = FUNCTIONS[name]
    report = check(function, *inputs, codegen=name in ("glu", "packed glu", "chained", "no rows"))
    if expected is not None:
        assert sorted((op, fused) for _, op, fused in report.matched) == sorted(expected)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x, w, b: (lambda y: functional.gelu(y) + y.sum())(functional.linear(x, w, b)),
            "gelu follows, but its argument is read elsewhere too",
        ),
        (lambda x, w, b: functional.linear(x.double(), w.double()).float(), "float64 operands"),
    ],
)
def test_what_is_left_and_why(function, reason):
    report = check(function, X, WEIGHT, BIAS)
    assert [missed.reason for missed in report.missed] == [reason]


def test_the_report_prints_as_a_table():
    report = check(gated, X, WEIGHT, WEIGHT.flip(0))
    report.missed.append(Missed("mm_7", "because"))
    assert str(report).splitlines() == [
        "mm    tgemm.linear_glu + gelu + product with mm_1",
        "mm_7  left: because",
        "1 matched, 1 left",
    ]


class Block(nn.Module):
    """A Llama-style block without attention."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = (nn.Linear(width, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, width)
        self.inner = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + self.inner(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_contains_tgemm_ops(dynamic):
    model = Block().eval()
    with torch.no_grad():
        run = torch.compile(model, fullgraph=True, dynamic=dynamic, options=inductor.options())
        result, (code, *_) = run_and_get_code(run, X)
        torch.testing.assert_close(result, model(X))
        for x in (torch.randn(5, 7, 16), torch.randn(1, 4, 16)) if dynamic else ():
            torch.testing.assert_close(run(x), model(x))
    assert "tgemm.linear_glu.default(" in code
    assert code.count("tgemm.linear.default(") == 3
    assert "extern_kernels.mm(" not in code
    assert "extern_kernels.addmm(" not in code
    (report, *others) = inductor.reports()
    assert len(others) <= (1 if dynamic else 0)  # one more for a batch of 1
    assert [(op, fused) for _, op, fused in report.matched if op == "linear"] == [
        ("linear", ("bias", "residual")),
        ("linear", ("bias", "gelu")),
        ("linear", ("bias", "residual")),
    ]


class PackedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(16, 48), nn.Linear(24, 16)

    def forward(self, x):
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * functional.gelu(gate))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_packed_weight_is_two_views(dynamic):
    model = PackedMLP().eval()
    with torch.no_grad():
        run = torch.compile(model, fullgraph=True, dynamic=dynamic, options=inductor.options())
        result, (code, *_) = run_and_get_code(run, X)
        torch.testing.assert_close(result, model(X))
    (call,) = [
        line for line in code.splitlines() if "= torch.ops.tgemm.linear_glu.default(" in line
    ]
    # Weights and biases are read where they lie.
    assert call.count("reinterpret_tensor(") >= 3
    assert "cpp_fused" not in code
    assert inductor.reports()[0].matched[0].fused == ("bias", "gelu", "product of its halves")


def train() -> tuple[inductor.Report, inductor.Report]:
    """Compiled gradients beside those of eager torch; the reports of the forward and backward graphs."""
    model, twin = Block(), Block()
    twin.load_state_dict(model.state_dict())
    run = torch.compile(model, fullgraph=True, options=inductor.options())
    run(X).square().mean().backward()
    twin(X).square().mean().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    forward, backward = inductor.reports()
    return forward, backward


def test_training():
    forward, backward = train()
    assert len(forward.matched) == 5
    assert len(backward.matched) == 2 * 5
    # The backward pass reads what the activations are computed from.
    assert {missed.reason for missed in forward.missed} == {
        f"{name} follows, but its argument is read elsewhere too" for name in ("silu", "gelu")
    }


def test_autocast():
    model = Block().eval()

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    result, report = compiled(function, X)
    with torch.no_grad():
        torch.testing.assert_close(result, function(X), rtol=0.05, atol=0.05)
    assert "linear_glu" in [op for _, op, _ in report.matched]
    # The sums are in FP32, the products in bfloat16.
    assert sum("residual" in fused for _, _, fused in report.matched) == 2


def test_constants_are_static_weights():
    seen = []

    class Look(CustomGraphPass):
        def __call__(self, graph):
            seen.extend(node.kwargs for node in graph.nodes if "tgemm" in str(node.target))

        def uuid(self):
            return None

    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU()).eval()
    extra = {"post_grad_custom_post_pass": Look()}
    freezing = torch._inductor.config.patch({"freezing": True, "cpp.weight_prepack": False})
    with torch.no_grad(), freezing:
        run = torch.compile(model, options=inductor.options(extra=extra))
        torch.testing.assert_close(run(X), model(X))
    assert [kwargs.get("static_weight") for kwargs in seen] == [True]


def test_plain_products_can_be_left_to_inductor():
    def function(x, w):
        return (functional.relu(x @ w.t()) @ w).sin()

    report = check(function, X[0], WEIGHT, options=inductor.options(plain=False))
    assert [op for _, op, _ in report.matched] == ["linear"]
    assert report.missed == [Missed("mm_1", "nothing to fuse, and plain=False")]


SHORT = "short, which torch's own kernels do as fast"


def left_on_cuda(function, *shapes, dtype=torch.bfloat16):
    """Reasons of the products that the pass leaves, if the inputs are a GPU's; none is needed."""
    with FakeTensorMode(), torch.no_grad():
        inputs = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        graph = make_fx(function, decomposition_table=select_decomp_table())(*inputs).graph
    inductor.options()["post_grad_custom_pre_pass"](graph)
    return [reason for _, reason in inductor.reports()[-1].missed]


@pytest.mark.parametrize(
    ("function", "shapes", "dtype"),
    [
        (lambda x, w: x @ w.t(), [(2048, 384), (1536, 384)], torch.bfloat16),
        (lambda x, w: x @ w, [(64, 4096), (4096, 4096)], torch.float16),
        (functional.linear, [(16, 128, 384), (384, 384), (384,)], torch.bfloat16),
        (lambda x, w, r: (x @ w + r).sin(), [(256, 512), (512, 64), (256, 64)], torch.bfloat16),
        # Very short ones, whatever there is to fuse.
        (lambda x, w: functional.gelu(x @ w), [(2048, 384), (384, 1536)], torch.bfloat16),
        (lambda x, w, r: x @ w + r, [(512, 96), (96, 512), (512, 512)], torch.bfloat16),
    ],
)
def test_short_products_are_left_to_torch(function, shapes, dtype):
    assert left_on_cuda(function, *shapes, dtype=dtype) == [SHORT]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: x @ w, [(63, 4096), (4096, 4096)]),  # few rows
        (lambda x, w: x @ w, [(8192, 2048), (2048, 8192)]),  # long
        (lambda x, w: x @ w, [(512, 100), (100, 512)]),  # rows of 200 bytes
        (lambda x, w: x @ w, [(512, 96), (96, 514)]),
        (lambda x, w: (x @ w).relu(), [(4096, 768), (768, 3072)]),
        (lambda x, w, r: x @ w + r, [(4096, 768), (768, 3072), (4096, 3072)]),  # a result
        (lambda x, w: x @ w, [(8, 512, 96), (8, 96, 512)]),
    ],
)
def test_other_products_are_not_left_to_torch(function, shapes):
    assert left_on_cuda(function, *shapes) == []


class CountsNodes(CustomGraphPass):
    def __init__(self, uuid):
        self.own = uuid
        self.seen = []

    def __call__(self, graph):
        self.seen.append([str(node.target) for node in graph.nodes])

    def uuid(self):
        return self.own


@pytest.mark.parametrize("where", ["extra", "config"])
def test_a_users_own_pass_runs_first(where):
    own = CountsNodes("mine")
    if where == "config":
        with torch._inductor.config.patch(post_grad_custom_pre_pass=own):
            options = inductor.options()
    else:
        options = inductor.options(extra={"post_grad_custom_pre_pass": own})
    # Merging again neither loses nor repeats a pass.
    options = inductor.options(extra=options)
    report = check(lambda x, w: functional.relu(x @ w.t()), X, WEIGHT, options=options)
    assert len(own.seen) == 1
    assert "aten.mm.default" in own.seen[0]
    assert not any("tgemm" in target for target in own.seen[0])
    assert len(report.matched) == 1


@pytest.mark.parametrize(
    ("passes", "cached"),
    [(None, True), (CountsNodes("mine"), True), (CountsNodes(None), False), (print, False)],
    ids=["none", "with a uuid", "without a uuid", "function"],
)
def test_the_second_compilation_comes_from_the_cache(passes, cached):
    if passes is print:
        passes = lambda graph: None  # noqa: E731
    extra = {} if passes is None else {"post_grad_custom_pre_pass": passes}

    def function(x, w):
        return functional.gelu(x @ w.t()) * 3

    cached_graphs = torch._functorch.config.patch(enable_autograd_cache=True)
    with fresh_cache(), torch._inductor.config.patch(fx_graph_cache=True), cached_graphs:
        results = []
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            results.append(
                torch.compile(function, options=inductor.options(extra=extra))(X, WEIGHT)
            )
        hits = (
            counters["inductor"]["fxgraph_cache_hit"]
            + counters["aot_autograd"]["autograd_cache_hit"]
        )
        assert (hits > 0) == cached
        assert torch.equal(*results)
        assert len(inductor.reports()) == (1 if cached else 2)
        # Other options are another graph.
        torch._dynamo.reset()
        counters.clear()
        torch.compile(function, options=inductor.options(extra=extra, plain=False))(X, WEIGHT)
        assert counters["inductor"]["fxgraph_cache_hit"] == 0


def test_modes_are_merged():
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        options = inductor.options(mode)
        hook = options.pop("post_grad_custom_pre_pass")
        assert isinstance(hook, inductor.Pass)
        candidates = [inductor.tgemm_mm] if mode.startswith("max-autotune") else None
        assert options.pop("external_matmul", None) == candidates
        assert options == {"shape_padding": False, **torch._inductor.list_mode_options(mode)}
    options = inductor.options("max-autotune", {"max_autotune": False, "epilogue_fusion": False})
    assert options["max_autotune"] is False
    assert options["triton.cudagraphs"] is True
    assert "external_matmul" not in options
    report = check(
        lambda x, w: functional.relu(x @ w.t()),
        X,
        WEIGHT,
        options=inductor.options("reduce-overhead"),
    )
    assert len(report.matched) == 1


def relu_and_product(x, w):
    return functional.relu(x @ w.t()) @ w


def candidate_of_the_user(mat1, mat2, *, out):
    torch.mm(mat1, mat2, out=out)


def test_autotuning_has_tgemm_among_its_candidates():
    own = {"external_matmul": [candidate_of_the_user]}
    # Merging again does not repeat a candidate.
    options = inductor.options(extra=inductor.options("max-autotune-no-cudagraphs", own))
    assert options["external_matmul"] == [candidate_of_the_user, inductor.tgemm_mm]
    report = check(relu_and_product, X[0], WEIGHT, options=options)
    assert report.matched == [Matched("mm", "linear", ("relu",))]
    assert report.contested == ["mm_1"]
    (tuned,) = report.tuned
    assert tuned.shape == "3x8 @ 8x16"
    assert tuned.winner in ("mm", "tgemm_mm", "candidate_of_the_user")
    assert tuned.tgemm_us > 0
    assert tuned.best_other_us > 0
    *_, contested, result, total = str(report).splitlines()
    assert contested.split("  ")[-1] == "autotuned, tgemm_mm is a candidate"
    assert result.startswith(f"3x8 @ 8x16  {tuned.winner} wins: tgemm ")
    assert total == "1 matched, 0 left, 1 autotuned"


def test_what_tgemm_does_not_take_is_no_contest():
    """Inductor asks the candidate all the same."""

    def function(x, w):
        return relu_and_product(x.double(), w.double())

    with torch._inductor.config.patch(max_autotune_gemm_backends=""):  # nothing else to choose
        report = check(function, X[0], WEIGHT, options=inductor.options("max-autotune"))
    assert report.contested == []
    assert {missed.reason for missed in report.missed} == {"float64 operands"}


def test_autotuning_without_plain_products():
    options = inductor.options("max-autotune", plain=False)
    assert "external_matmul" not in options
    report = check(relu_and_product, X[0], WEIGHT, options=options)
    assert report.missed == [Missed("mm_1", "nothing to fuse, and plain=False")]


def test_ahead_of_time_a_plain_product_is_no_contest(tmp_path):
    """C++ code cannot call a Python function."""

    class Model(nn.Module):
        def forward(self, x, w):
            doubled = (x.double() @ w.t().double()).float()
            return relu_and_product(x, w) + doubled @ w

    model = Model()
    program = torch.export.export(model, (X[0], WEIGHT))
    package = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs=inductor.options("max-autotune"),
    )
    assert torch._inductor.config.external_matmul == []
    run = torch_gemm.load_package(package)
    torch.testing.assert_close(run(X[0], WEIGHT), model(X[0], WEIGHT), rtol=1e-4, atol=1e-5)
    (report,) = inductor.reports()
    assert len(report.matched) == 3
    assert report.contested == []


CACHED = """
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch_gemm import inductor

x, w = torch.randn(3, 16), torch.randn(16, 8)
with torch._inductor.config.patch(max_autotune_gemm_backends=""), torch.no_grad():
    options = inductor.options("max-autotune")
    run = torch.compile(lambda x, w: x @ w, options=options)
    result, (code, *_) = run_and_get_code(run, x, w)
torch.testing.assert_close(result, x @ w)
assert not code or "extern_kernels.tgemm_mm(" in code
counts = [counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]]
print("from the cache" if sum(counts) else "compiled", len(inductor.reports()))
"""


def test_the_candidate_comes_from_the_cache_of_another_process(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    script = tmp_path / "script.py"  # a file, because dynamo reads the source
    script.write_text(CACHED)
    said = [
        subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert said == ["compiled 1", "from the cache 0"]


def test_misuse():
    with pytest.raises(ValueError, match="mode is 'fast', and must be None or one of default, "):
        inductor.options("fast")
    with pytest.raises(
        TypeError, match="extra must be a dict of Inductor's options, and is a list"
    ):
        inductor.options(extra=[])
    with pytest.raises(TypeError, match="post_grad_custom_pre_pass must be a pass, and is a int"):
        inductor.options(extra={"post_grad_custom_pre_pass": 3})


def test_importing_the_package_does_not_import_inductor():
    code = "import sys, torch_gemm; print('torch._inductor' in sys.modules, torch_gemm.inductor.options)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("False <function options")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = torch_gemm.nothing


def test_a_replaced_model_is_left_alone():
    """Its ops are tgemm's already."""
    model = Block().eval()
    torch_gemm.replace(model)
    with torch.no_grad():
        expected = model(X)
    result, report = compiled(model, X)
    torch.testing.assert_close(result, expected)
    assert report.matched == report.missed == []


def test_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=64,
        use_cache=False,
    )
    model = transformers.LlamaModel(config).eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        run = torch.compile(model, options=inductor.options())
        result: Tensor = run(tokens).last_hidden_state
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    fused = [match for report in inductor.reports() for match in report.matched]
    assert [op for _, op, _ in fused].count("linear_glu") == 2
    # After attention and after the MLP, in each layer.
    assert sum("residual" in fused for _, _, fused in fused) == 4
