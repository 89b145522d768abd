"""What PyTorch puts around the ops, on CUDA: override, fusion, Inductor, autocast, packages, torch.func.

Where the CPU's test says it all, its body runs here once more with CUDA as the default device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading

import pytest
import test_autocast
import test_fusion
import test_inductor
import test_ops_compile
import test_ops_func
import test_override
import torch
from test_fusion import Bert, Gated, Packed, Wrapped
from torch import Tensor, nn

import torch_gemm
from torch_gemm import inductor

HALF = torch.float16
SPLIT_K = "mma_sync:64x64,split_k=4"  # with a workspace of its own
functional = nn.functional


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    inductor._reports.clear()
    torch_gemm.reset_stats()
    yield
    torch._dynamo.reset()
    torch_gemm.set_fallback("warn")


@pytest.fixture
def uncached():
    """A graph from Inductor's cache has no report."""
    config, functorch = torch._inductor.config, torch._functorch.config
    with config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


def captured(work):
    """The graph of what `work` does, and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def assert_as_good(result: Tensor, stock: Tensor, exact: Tensor) -> None:
    """Against FP64, with what torch itself achieves."""
    own, theirs = ((out.double() - exact).abs().max().item() for out in (result, stock))
    slack = 4 * torch.finfo(result.dtype).eps * exact.abs().max().item()
    assert own <= theirs + slack, (own, theirs)


# --- override --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [name for name in test_override.PRODUCTS if name != "gru"])
def test_override_of_products(name: str, mode, device: str):
    """nn.GRU is cuDNN's here."""
    with torch.device(device):
        test_override.test_products_run_on_tgemm(name, mode)


def test_override_of_attention(device: str):
    with torch.device(device):
        test_override.test_attention_trains()
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
        x = torch.randn(3, 17, 64)
    encoder.eval()
    with torch.inference_mode():  # stock takes the fast path, which the block does not
        expected = encoder(x)
        torch_gemm.reset_stats()
        with torch_gemm.override():
            result = encoder(x)
    assert sum(torch_gemm.stats()["kernels"].values()) >= 2 * 4
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_override_of_transforms(device: str):
    with torch.device(device):
        test_override.test_transforms_of_torch_func()


@torch.inference_mode()
def test_override_under_capture(device: str):
    attention = nn.MultiheadAttention(64, 4, batch_first=True, device=device, dtype=HALF).eval()
    linear = nn.Linear(64, 48, device=device, dtype=HALF)
    x = torch.randn(3, 17, 64, device=device, dtype=HALF)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        hidden = attention(x, x, x, need_weights=False)[0]
        return linear(hidden), torch.einsum("bik,bjk->bij", x, x), x @ x.mT

    def overridden():
        with torch_gemm.override():
            return work()

    graph, results = captured(overridden)
    assert torch_gemm.stats()["fallbacks"] == {}
    assert sum(torch_gemm.stats()["kernels"].values()) >= 2 * 5
    for _ in range(2):
        x.normal_()
        graph.replay()
        for result, expected in zip(results, overridden(), strict=True):
            assert torch.equal(result, expected)
        for result, expected in zip(results, work(), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)


# --- replace(fuse=True) ----------------------------------------------------------------------------


def block_model() -> nn.Module:
    return nn.Sequential(Wrapped(test_fusion.MLP(), Gated(), Packed(bias=True)), Bert()).eval()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@torch.inference_mode()
def test_fused_model_under_a_cuda_graph(dtype: torch.dtype, device: str):
    with torch.inference_mode(False):
        stock = block_model().requires_grad_(False).to(device, dtype)
        model = copy.deepcopy(stock)
    x = torch.randn(3, 5, 16, device=device, dtype=dtype)
    report = torch_gemm.replace(model, fuse=True, verify=x)
    assert len(report.fused) == 5, report
    assert report.not_fused == ()
    torch_gemm.reset_stats()
    graph, result = captured(lambda: model(x))
    # Six linears (of MLP, Gated, Packed and Bert), two of whose blocks are one linear_glu.
    assert torch_gemm.stats()["fallbacks"] == {}
    exact = copy.deepcopy(stock).double()
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(result, model(x))
        assert_as_good(result, stock(x), exact(x.double()))
    torch_gemm.restore(model)
    assert torch.equal(model(x), stock(x))


def test_fused_model_trains(device: str, monkeypatch):
    monkeypatch.setattr(test_fusion, "X", test_fusion.X.to(device))
    with torch.device(device):
        test_fusion.test_gradients_flow_through_what_was_fused()


# --- Inductor --------------------------------------------------------------------------------------


class Model(nn.Module):
    """Every fusion of the pass, and a product with nothing to fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.block = test_inductor.Block(64)
        self.packed = nn.Linear(64, 256)
        self.head = nn.Linear(128, 200, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.packed(self.block(x)).chunk(2, dim=-1)
        return self.head(functional.silu(gate) * up)


@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune"])
@torch.inference_mode()
def test_compiled_by_the_pass(mode: str | None, device: str, uncached, monkeypatch):
    monkeypatch.setattr(inductor, "_MANY_ROWS", 10**9)  # none is left to torch
    with torch.inference_mode(False):
        model = Model().eval().requires_grad_(False).to(device, HALF)
    exact = copy.deepcopy(model).double()
    run = torch.compile(model, fullgraph=True, dynamic=False, options=inductor.options(mode))
    for _ in range(4):  # with graphs: warm-up, recording, replays
        x = torch.randn(4, 33, 64, device=device, dtype=HALF)
        torch.compiler.cudagraph_mark_step_begin()
        assert_as_good(run(x).clone(), model(x), exact(x.double()))
    (report,) = inductor.reports()
    matched = [op for _, op, _ in report.matched]
    assert matched.count("linear_glu") == 2, report
    assert matched.count("linear") == 3, report
    tunes = mode == "max-autotune"
    assert matched.count("matmul") == (0 if tunes else 1), report
    assert len(report.contested) == len(report.tuned) == (1 if tunes else 0), report
    for tuned in report.tuned:
        # Not infinite, which stands for a candidate that failed.
        assert math.isfinite(tuned.tgemm_us), report
        assert math.isfinite(tuned.best_other_us), report


@torch.inference_mode()
def test_the_candidate_wins_where_it_is_the_only_one(device: str, uncached):
    a = torch.randn(100, 136, device=device, dtype=HALF)
    b = torch.randn(136, 72, device=device, dtype=HALF)
    with torch._inductor.config.patch(max_autotune_gemm_backends=""):
        run = torch.compile(
            lambda a, b: (a @ b).relu() + 1, options=inductor.options("max-autotune")
        )
        plain = torch.compile(lambda a, b: a @ b, options=inductor.options("max-autotune"))
        for _ in range(4):
            a.normal_()
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(run(a, b).clone(), (a @ b).relu() + 1, rtol=1e-2, atol=1e-2)
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(plain(a, b).clone(), torch_gemm.matmul(a, b))
    assert inductor.reports()[-1].contested == ["mm"]


def test_training_with_the_pass(device: str, uncached, monkeypatch):
    monkeypatch.setattr(test_inductor, "X", test_inductor.X.to(device))
    with torch.device(device):
        forward, backward = test_inductor.train()
    # Of products in true FP32, those with something to fuse.
    assert len(forward.matched) == 3
    assert len(backward.matched) + len(backward.missed) == 2 * 5


@pytest.mark.parametrize("how", ["dynamic", "mark_dynamic"])
def test_any_number_of_rows(how: str, device: str):
    with torch.device(device):
        test_ops_compile.test_any_number_of_rows_takes_few_graphs(how)


# --- Autocast --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*ATen:UserWarning")  # float64 cells
@pytest.mark.parametrize("name", test_autocast.OPS)
@pytest.mark.parametrize(("to", "parameters", "inputs"), test_autocast.cells())
def test_autocast_cell(to, parameters, inputs, name: str, device: str, monkeypatch):
    def autocast(to):
        return contextlib.nullcontext() if to is None else torch.autocast(device, dtype=to)

    def tolerance(*dtypes):  # FP32 sums are added in another order than torch's
        return {name: max(value, 1e-5) for name, value in on_cpu(*dtypes).items()}

    on_cpu = test_autocast.tolerance
    monkeypatch.setattr(test_autocast, "autocast", autocast)
    monkeypatch.setattr(test_autocast, "tolerance", tolerance)
    with torch.device(device):
        test_autocast.test_cell(to, parameters, inputs, name)


# --- torch.func ------------------------------------------------------------------------------------


@pytest.fixture
def func_tests(device: str, monkeypatch):
    """test_ops_func with FP32 operands on the GPU, where FP64 is not the kernels'."""
    monkeypatch.setattr(test_ops_func, "randn", lambda *sizes: torch.randn(sizes, device=device))
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(torch.testing, "assert_close", close)
    return test_ops_func


def test_vmap(func_tests):
    for which in test_ops_func.subsets(2):
        for shapes in (((5,), (5, 4)), ((2, 5), (5, 4)), ((6, 1, 2, 5), (7, 5, 4))):
            func_tests.test_matmul(shapes, which)
    for which in test_ops_func.subsets(4):
        func_tests.test_linear(which, (2, 5))
    for which in test_ops_func.subsets(5):
        func_tests.test_linear_glu(which, (2, 5))
    for which in test_ops_func.subsets(3):
        func_tests.test_addmm((2, 4), which)
        func_tests.test_linear_with_a_full_residual(which)
    func_tests.test_nested()
    assert torch_gemm.stats()["fallbacks"] == {}


@pytest.mark.parametrize("name", test_ops_func.FUNCTIONS)
def test_gradients_as_a_transform(name: str, func_tests):
    func_tests.test_grad(name, torch_gemm)
    func_tests.test_forward_mode_is_refused(name)


def test_ensembles(device: str):
    with torch.device(device):
        test_ops_func.test_functional_call_and_ensembles()


# --- Packages --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cuda_headers")
def test_package_in_a_fresh_process(device: str, tmp_path):
    """From C++: tests/test_examples.py."""
    with torch.device(device):
        test_ops_compile.test_aot_inductor(tmp_path)


# --- CUDA graphs -----------------------------------------------------------------------------------


def operands(device: str, k: int = 2048) -> tuple[Tensor, Tensor]:
    a = torch.randn(96, k, device=device, dtype=HALF)
    return a, torch.randn(k, 80, device=device, dtype=HALF) * k**-0.5


def test_graphs_captured_by_threads_that_have_ended(device: str):
    """What a thread has set up for its graph, workspaces included, must not end with the thread."""
    made: list[tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = []
    failed: list[BaseException] = []

    def capture() -> None:
        try:
            a, b = operands(device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = torch_gemm.matmul(a, b, force_kernel=SPLIT_K)
            made.append((graph, a, b, out))
        except BaseException as error:
            failed.append(error)

    for _ in range(4):
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join()
    assert failed == []
    junk = [torch.full((1 << 20,), torch.nan, device=device) for _ in range(8)]
    for graph, a, b, out in made:
        a.normal_()
        graph.replay()
        assert torch.equal(out, torch_gemm.matmul(a, b, force_kernel=SPLIT_K))
    del junk


def test_several_graphs_alive_on_several_streams(device: str):
    """Each graph's workspace and intermediates are its own, also while eager calls come between."""
    work = [operands(device, k) for k in (1024, 2048, 4096)]

    def chain(a: Tensor, b: Tensor) -> Tensor:
        first = torch_gemm.matmul(a, b, force_kernel=SPLIT_K)
        second = torch_gemm.linear(first, first, activation="relu", force_kernel="simt")
        return torch_gemm.matmul(second / 64, first, force_kernel=SPLIT_K.replace("=4", "=2"))

    graphs = [captured(lambda a=a, b=b: chain(a, b)) for a, b in work]
    expected = [chain(a, b) for a, b in work]
    streams = [torch.cuda.Stream() for _ in work]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        chain(*work[0])
    torch.cuda.synchronize()
    for (_, out), truth in zip(graphs, expected, strict=True):
        assert torch.equal(out, truth)
    # One that is gone takes nothing from the others.
    del graphs[1], graph
    torch.cuda.empty_cache()
    for (remaining, out), truth in zip(graphs, (expected[0], expected[2]), strict=True):
        out.zero_()
        remaining.replay()
        assert torch.equal(out, truth)


def test_a_model_and_its_graph_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda:1")
    model = block_model().requires_grad_(False).to(other, HALF)
    x = torch.randn(3, 5, 16, device=other, dtype=HALF)
    torch_gemm.replace(model, fuse=True, verify=x)
    assert torch.cuda.current_device() == 0
    with torch.no_grad():
        expected = model(x)
        with torch.cuda.device(other):
            graph, result = captured(lambda: model(x))
            graph.replay()
        with torch_gemm.override():
            product = x[0] @ x[0].mT
    assert torch.cuda.current_device() == 0
    assert result.device == product.device == other
    assert torch.equal(result, expected)
