"""`torch_gemm.nn.Linear` is `torch.nn.Linear` in everything but the kernel that computes it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from problems import activate

import torch_gemm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def same_layers(bias: bool = True, dtype: torch.dtype = torch.float32, **options):
    """A torch layer and ours with the same parameters."""
    theirs = torch.nn.Linear(24, 40, bias=bias, dtype=dtype)
    ours = torch_gemm.nn.Linear(24, 40, bias=bias, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("bias", [True, False])
def test_initialisation_is_torchs(bias):
    torch.manual_seed(3)
    theirs = torch.nn.Linear(24, 40, bias=bias)
    torch.manual_seed(3)
    ours = torch_gemm.nn.Linear(24, 40, bias=bias)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


def test_is_a_torch_linear():
    layer = torch_gemm.nn.Linear(3, 4, False, device="meta", dtype=torch.bfloat16)
    assert isinstance(layer, torch.nn.Linear)
    assert layer.weight.is_meta
    assert layer.weight.dtype is torch.bfloat16
    assert layer.bias is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24,), (1, 24), (7, 24), (2, 3, 5, 24), (0, 24), (3, 0, 24)])
def test_forward(shape, dtype, bias):
    theirs, ours = same_layers(bias, dtype)
    x = torch.randn(shape).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activation(activation):
    theirs, ours = same_layers(activation=activation)
    x = torch.randn(7, 24)
    torch.testing.assert_close(ours(x), activate(theirs(x), activation))


def test_gradients():
    theirs, ours = same_layers(activation="gelu")
    x = torch.randn(7, 24, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    activate(theirs(x), "gelu").square().sum().backward()
    ours(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)


def test_it_calls_the_op(monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch_gemm.ops, "linear", lambda *args, **options: calls.append((args, options)) or args[0]
    )
    layer = torch_gemm.nn.Linear(24, 40, activation="silu")
    x = torch.randn(7, 24)
    layer(x)
    ((args, options),) = calls
    assert args == (x, layer.weight, layer.bias)
    assert options == {"activation": "silu", "static_weight": False}


def test_static_weight_needs_a_frozen_weight(monkeypatch):
    promised = []
    monkeypatch.setattr(
        torch_gemm.ops, "linear", lambda *args, **options: promised.append(options["static_weight"])
    )
    layer = torch_gemm.nn.Linear(24, 40)
    layer.static_weight = True
    layer(torch.randn(7, 24))
    layer.requires_grad_(False)
    layer(torch.randn(7, 24))
    assert promised == [False, True]


def test_unknown_activation():
    with pytest.raises(ValueError, match="activation is 'tanh', and must be None or one of relu"):
        torch_gemm.nn.Linear(3, 4, activation="tanh")


def test_repr():
    assert repr(torch_gemm.nn.Linear(3, 4)) == repr(torch.nn.Linear(3, 4))
    layer = torch_gemm.nn.Linear(3, 4, bias=False, activation="gelu")
    assert repr(layer) == "Linear(in_features=3, out_features=4, bias=False, activation=gelu)"


def copies():
    def through_save(layer):
        file = io.BytesIO()
        torch.save(layer, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

    return {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
        "save": through_save,
    }


@pytest.mark.parametrize("how", copies())
@pytest.mark.parametrize("make", ["constructor", "from_linear"])
def test_copies(how, make):
    if make == "constructor":
        layer = torch_gemm.nn.Linear(24, 40, activation="silu")
    else:
        layer = torch_gemm.nn.Linear.from_linear(torch.nn.Linear(24, 40), activation="silu")
    twin = copies()[how](layer)
    assert type(twin) is torch_gemm.nn.Linear
    assert twin.activation == "silu"
    x = torch.randn(7, 24)
    assert torch.equal(twin(x), layer(x))


def test_state_dict_goes_both_ways():
    theirs, ours = same_layers()
    theirs.load_state_dict(torch_gemm.nn.Linear(24, 40).state_dict())
    ours.load_state_dict(theirs.state_dict(), assign=True)
    x = torch.randn(7, 24)
    torch.testing.assert_close(ours(x), theirs(x))


def test_from_linear_shares_everything():
    linear = torch.nn.Linear(24, 40).eval()
    linear.weight.requires_grad_(False)
    seen = []
    handle = linear.register_forward_hook(lambda *args: seen.append("forward"))
    layer = torch_gemm.nn.Linear.from_linear(linear)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert not layer.training
    assert (layer.in_features, layer.out_features) == (24, 40)
    layer(torch.randn(2, 24))
    assert seen == ["forward"]
    handle.remove()
    layer(torch.randn(2, 24))
    assert seen == ["forward"]
    # The dictionaries are their own: what one layer gains or loses does not show in the other.
    layer.bias = None
    assert linear.bias is not None


def test_from_linear_of_something_else():
    with pytest.raises(TypeError, match=r"expects a torch.nn.Linear, and got a Conv2d"):
        torch_gemm.nn.Linear.from_linear(torch.nn.Conv2d(1, 1, 1))

    class Doubled(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    with pytest.raises(TypeError, match="Doubled has one of its own"):
        torch_gemm.nn.Linear.from_linear(Doubled(3, 4))


def test_compile():
    layer = torch_gemm.nn.Linear(24, 40, activation="gelu")
    x = torch.randn(7, 24)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_autocast():
    _, ours = same_layers()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(torch.randn(7, 24)).dtype is torch.bfloat16
