"""`torch_gemm.nn.Linear` wherever torch lets a module go: what test_nn.py does not show already."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

import torch_gemm


def linear(**options) -> torch_gemm.nn.Linear:
    return torch_gemm.nn.Linear(6, 4, **options)


X = torch.randn(3, 6)


def plain(layer) -> torch.Tensor:
    """What torch computes from a layer's current weight and bias."""
    return torch.nn.functional.linear(X, layer.weight, layer.bias)


def test_hooks():
    layer, seen = linear(), []
    x = X.clone().requires_grad_()
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    layer.register_forward_hook(lambda module, args, out: out + 1)
    layer.register_full_backward_pre_hook(lambda module, grad: seen.append("pre"))
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("post"))
    out = layer(x)
    torch.testing.assert_close(out, torch.nn.functional.linear(2 * x, layer.weight, layer.bias) + 1)
    out.sum().backward()
    assert seen == ["pre", "post"]
    layer.weight.register_hook(lambda grad: seen.append("weight"))
    layer(x).sum().backward()
    assert "weight" in seen


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize(
    "apply",
    [
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ],
    ids=["own", "weight_norm", "spectral_norm", "orthogonal"],
)
def test_parametrize(apply):
    layer = linear().eval()
    apply(layer)
    torch.testing.assert_close(layer(X), plain(layer))
    layer(X).square().sum().backward()
    originals = list(layer.parametrizations.weight.parameters())
    assert all(original.grad is not None for original in originals)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is torch_gemm.nn.Linear
    torch.testing.assert_close(layer(X), plain(layer))


def test_pruning():
    layer = linear()
    prune.l1_unstructured(layer, "weight", amount=0.5)
    assert (layer.weight == 0).sum() == 12
    torch.testing.assert_close(layer(X), plain(layer))
    layer(X).sum().backward()
    assert (layer.weight_orig.grad[layer.weight_mask == 0] == 0).all()
    prune.remove(layer, "weight")
    torch.testing.assert_close(layer(X), plain(layer))


def test_pruning_of_a_static_weight():
    """It is a tensor that every forward computes, and no parameter that a promise could be about."""
    layer = linear().requires_grad_(False)
    layer.static_weight = True
    prune.l1_unstructured(layer, "weight", amount=0.5)
    torch.testing.assert_close(layer(X), plain(layer))


def test_tied_weights():
    embedding = torch.nn.Embedding(4, 6)
    layer = linear(bias=False)
    layer.weight = embedding.weight
    (layer(X).sum() + embedding(torch.tensor([0, 2])).sum()).backward()
    expected = X.sum(0).expand(4, 6).clone()
    expected[[0, 2]] += 1
    torch.testing.assert_close(embedding.weight.grad, expected)


def test_meta_device_and_to_empty():
    layer = linear(device="meta", activation="relu")
    assert layer(X.to("meta")).shape == (3, 4)
    layer.to_empty(device="cpu")
    layer.load_state_dict(torch.nn.Linear(6, 4).state_dict())
    torch.testing.assert_close(layer(X), plain(layer).relu())
    with torch.device("meta"):
        other = linear()
    other.load_state_dict(layer.state_dict(), assign=True)
    torch.testing.assert_close(other(X), plain(layer))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_of_the_module(dtype):
    layer = linear(activation="silu").to(dtype)
    assert layer.activation == "silu"
    assert layer(X.to(dtype)).dtype is dtype
    assert layer.float()(X).dtype is torch.float32
    with pytest.raises(RuntimeError, match=r"tgemm.linear: weight has dtype float32 but input has"):
        layer(X.to(dtype))


def _child(layer, x, results) -> None:
    with torch.no_grad():
        layer.bias.add_(1)
        results.put(layer(x).tolist())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_shared_memory_and_other_processes(method):
    layer = linear(activation="relu").share_memory()
    assert layer.weight.is_shared()
    context = multiprocessing.get_context(method)
    results = context.Queue()
    before = layer.bias.detach().clone()
    # ATen's threads do not survive a fork, with or without torch_gemm.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        child = context.Process(target=_child, args=(layer, X, results))
        child.start()
        result = results.get(timeout=120)
        child.join()
    finally:
        torch.set_num_threads(threads)
    assert child.exitcode == 0
    # The child wrote into the bias that both have.
    torch.testing.assert_close(layer.bias.detach(), before + 1)
    torch.testing.assert_close(torch.tensor(result), layer(X).detach())


def test_fork_after_an_op_ran():
    torch_gemm.matmul(torch.ones(2, 2), torch.ones(2, 2))
    child = os.fork()
    if child == 0:
        ok = torch_gemm.matmul(torch.ones(2, 2), torch.ones(2, 2)).sum().item() == 8
        os._exit(0 if ok else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("model", [linear(), torch.nn.Sequential(linear(), torch.nn.ReLU())])
def test_torchscript_says_what_to_use_instead(model):
    with pytest.raises(
        RuntimeError, match=r"torch_gemm.nn.Linear cannot be scripted; use .*export"
    ):
        torch.jit.script(model)
    # Tracing records the op, so it works.
    traced = torch.jit.trace(model, X)
    torch.testing.assert_close(traced(2 * X), model(2 * X))
    torch.testing.assert_close(model(X), model(X))


def test_module_utilities():
    layer = linear(activation="gelu")
    assert torch.nn.utils.parameters_to_vector(layer.parameters()).numel() == 28
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    ema = torch.optim.swa_utils.AveragedModel(layer)
    assert type(ema.module) is torch_gemm.nn.Linear
    torch.testing.assert_close(ema(X), layer(X))
    frozen = torch.nn.utils.skip_init(torch_gemm.nn.Linear, 6, 4)
    assert frozen.activation is None
