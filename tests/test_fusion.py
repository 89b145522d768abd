"""`replace(model, fuse=True)`: what is fused, what is not and why, and that all of it can be undone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from test_ops_autograd import Calls
from torch import nn

import torch_gemm
from torch_gemm import fusion
from torch_gemm.fusion import Fused, NotFused

functional = nn.functional


class MLP(nn.Module):
    def __init__(self, width=16, act=None, bias=True):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=bias)
        self.act = act or nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Gated(nn.Module):
    def __init__(self, width=16, act=None, bias=False, swapped=False):
        super().__init__()
        self.gate = nn.Linear(width, 24, bias=bias)
        self.up = nn.Linear(width, 24, bias=bias)
        self.down = nn.Linear(24, width)
        self.act = act or nn.SiLU()
        self.swapped = swapped

    def forward(self, x):
        if self.swapped:
            return self.down(self.up(x) * self.act(self.gate(x)))
        return self.down(self.act(self.gate(x)).mul(self.up(x)))


class Output(nn.Module):
    """The end of BERT's sublayers."""

    def __init__(self, width=16, inner=32):
        super().__init__()
        self.dense = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden, residual):
        return self.norm(self.dropout(self.dense(hidden)) + residual)


class Wrapped(nn.Module):
    """Any block as part of a model."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate = nn.Sequential(nn.Linear(16, 32), nn.GELU())
        self.output = Output()

    def forward(self, x):
        return self.output(self.intermediate(x), residual=x)


X = torch.randn(3, 5, 16)


def ops_in(model, x=X):
    with torch.no_grad(), Calls() as calls:
        model(x)
    return [name.removeprefix("tgemm.").removesuffix(".default") for name in calls.names("tgemm")]


def check_undone(model, before, kinds, state):
    assert [type(module) for module in model.modules()] == kinds
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == state
    with torch.no_grad():
        assert torch.equal(model(X), before)


ACTIVATIONS = {
    "relu": nn.ReLU(inplace=True),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
}
MODELS = {
    "sequential": lambda act: nn.Sequential(nn.Linear(16, 32), act, nn.Linear(32, 16), act),
    "mlp": lambda act: Wrapped(MLP(act=act), MLP(act=act)),
    "gated": lambda act: Wrapped(Gated(act=act), Gated(act=act, bias=True, swapped=True)),
}
FUSED = {
    "sequential": [("0", "1"), ("2", "3")],
    "mlp": [("blocks.0.up", "blocks.0.act"), ("blocks.1.up", "blocks.1.act")],
    "gated": [("blocks.0.gate", None), ("blocks.1.gate", None)],
}
LAUNCHES = {
    "sequential": ["linear"] * 2,
    "mlp": ["linear"] * 4,
    "gated": ["linear_glu", "linear"] * 2,
}


@pytest.mark.parametrize("verify", [None, X], ids=["random sample", "verify"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_activations_and_gated_mlps(name, activation, verify):
    model = MODELS[name](ACTIVATIONS[activation]).eval()
    with torch.no_grad():
        before = model(X)
    kinds = [type(module) for module in model.modules()]
    state = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    report = torch_gemm.replace(model, fuse=True, verify=verify)
    expected = []
    for layer, act in FUSED[name]:
        what = f"{activation}, which was {act}"
        if act is None:
            what = f"{activation} and the product with up: one linear_glu"
        expected.append(Fused(layer, what))
    assert list(report.fused) == expected
    assert report.not_fused == ()
    assert list(model.state_dict(keep_vars=True)) == list(state)
    assert ops_in(model) == LAUNCHES[name]
    with torch.no_grad():
        torch.testing.assert_close(model(X), before)
    torch_gemm.restore(model)
    check_undone(model, before, kinds, state)


class Packed(nn.Module):
    """Phi-3's MLP: gate and up are the halves of one layer's output."""

    def __init__(self, bias=False):
        super().__init__()
        self.gate_up = nn.Linear(16, 2 * 24, bias=bias)
        self.down = nn.Linear(24, 16)
        self.act = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


class PackedUpFirst(Packed):
    """The GEGLU layer of diffusion models: the second half is the gate, and nothing follows."""

    def forward(self, x):
        up, gate = torch.split(self.gate_up(x), 24, dim=-1)
        return up * functional.gelu(gate, approximate="tanh")


class PackedInTimm(Packed):
    def __init__(self, bias=True):
        super().__init__(bias)
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(24)

    def forward(self, x):
        halves = self.gate_up(x).chunk(2, dim=-1)
        x = self.act(halves[0]) * halves[1]
        return self.drop(self.down(self.norm(self.drop(x))))


class Functional(Gated):
    """As Llama's own code has it."""

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


HALVES = "the product of its halves: one linear_glu"
PACKED = {
    "phi3": (Packed, "gate_up", f"silu and {HALVES}", 1),
    "phi3, bias": (lambda: Packed(bias=True), "gate_up", f"silu and {HALVES}", 1),
    "up first": (lambda: PackedUpFirst(bias=True), "gate_up", f"gelu_tanh and {HALVES}", 0),
    "timm": (PackedInTimm, "gate_up", f"silu and {HALVES}", 1),
    "functional": (Functional, "gate", "silu and the product with up: one linear_glu", 1),
}


@pytest.mark.parametrize("verify", [None, X], ids=["random sample", "verify"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_and_functional_gates(name, verify):
    build, layer, what, linears = PACKED[name]
    block = build()
    model = nn.Sequential(nn.Identity(), block).eval()
    with torch.no_grad():
        before = model(X)
    kinds = [type(module) for module in model.modules()]
    state = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    report = torch_gemm.replace(model, fuse=True, verify=verify)
    assert report.fused == (Fused(f"1.{layer}", what),)
    assert report.not_fused == ()
    assert ops_in(model) == ["linear_glu"] + ["linear"] * linears
    with torch.no_grad(), Calls() as calls:
        torch.testing.assert_close(model(X), before)
    # Two views of the one weight: nothing is concatenated or copied.
    assert not {"aten.cat.default", "aten.clone.default", "aten.copy_.default"} & set(
        calls.names("aten")
    )
    twin = copy.deepcopy(model)
    torch_gemm.restore(model)
    check_undone(model, before, kinds, state)
    # Gradients reach both halves of the weight.
    for m in (model, twin):
        m(X).square().mean().backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Unequal(Packed):
    def forward(self, x):
        first, rest = self.gate_up(x).split([8, 40], dim=-1)
        return self.down(self.act(first).repeat(1, 1, 3) * rest[..., :24])


class OverRows(Packed):
    """Halves of another dimension."""

    def forward(self, x):
        first, second = self.gate_up(x.repeat(2, 1, 1)).chunk(2, dim=0)
        return self.down((self.act(first) * second)[..., :24])


class HalfIsReadTwice(Packed):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate) + gate)


@pytest.mark.parametrize("kind", [Unequal, OverRows, HalfIsReadTwice])
def test_other_halves_are_left_alone(kind):
    model = Wrapped(kind()).eval()
    report = torch_gemm.replace(model, fuse=True, verify=X)
    assert report.fused == ()
    assert type(model.blocks[0]) is kind


def test_looking_for_patterns_leaves_nothing_in_a_block():
    class RemembersTheLast(Packed):
        def forward(self, x):
            self.last = self.gate_up(x)
            return super().forward(x)

    block = RemembersTheLast()
    torch_gemm.replace(nn.Sequential(block))
    pattern = fusion._block_pattern(block, {"gate_up": block.gate_up}, {"act": "silu"})
    assert pattern is None  # it calls the layer twice
    assert not hasattr(block, "last")


def test_residual_of_a_norm_block():
    model = Bert().eval()
    with torch.no_grad():
        before = model(X)
    kinds = [type(module) for module in model.modules()]
    state = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    report = torch_gemm.replace(model, fuse=True, verify=X)
    assert report.fused == (
        Fused("intermediate.0", "gelu, which was intermediate.1"),
        Fused("output.dense", "the sum with the residual"),
    )
    with torch.no_grad(), Calls() as calls:
        torch.testing.assert_close(model(X), before)
    assert calls.names("aten.add.Tensor") == []
    assert "one linear_glu" not in str(report)
    assert str(report).splitlines()[-2] == "2 replaced, 0 skipped, 2 fused, 0 not fused"

    # Where the sum is another, the block computes what it always did.
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model.output.original()
        hidden = torch.randn(3, 5, 32)
        assert model.output(hidden, X).dtype == stock(hidden, X).dtype
    model.train()
    torch.manual_seed(0)
    dropped = model(X)
    model.eval()
    assert not torch.equal(dropped, before)
    torch_gemm.restore(model)
    check_undone(model, before, kinds, state)


def test_gradients_flow_through_what_was_fused():
    model = nn.Sequential(Wrapped(MLP(), Gated()), Bert())
    twin = copy.deepcopy(model)
    model.eval()
    torch_gemm.replace(model, fuse=True)
    twin.eval()
    for m in (model, twin):
        m(X).square().mean().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_frozen_weights_are_static():
    model = Wrapped(MLP(), Gated()).requires_grad_(False)
    torch_gemm.replace(model, fuse=True)
    seen = []
    original = torch_gemm.ops.linear_glu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch_gemm.ops,
            "linear_glu",
            lambda *args, **options: (
                seen.append(options["static_weight"]) or original(*args, **options)
            ),
        )
        model(X)
        model.blocks[1].up.requires_grad_(True)
        model(X)
    assert seen == [True, False]


class ReadsTwice(MLP):
    """The activation is not the only one that reads the layer."""

    def forward(self, x):
        hidden = self.up(x)
        return self.down(self.act(hidden) + hidden)


class CallsTwice(MLP):
    def forward(self, x):
        return self.down(self.act(self.up(x)) + self.act(self.up(-x)))


class DropsBetween(MLP):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.down(self.act(self.drop(self.up(x))))


class Unrelated(MLP):
    def forward(self, x):
        return self.down(self.up(self.act(x)))


@pytest.mark.parametrize("kind", [ReadsTwice, CallsTwice, DropsBetween, Unrelated])
def test_other_flows_of_data_are_left_alone(kind):
    model = Wrapped(kind()).eval()
    with torch.no_grad():
        before = model(X)
    report = torch_gemm.replace(model, fuse=True, verify=X)
    assert report.fused == ()
    if kind is ReadsTwice:
        ((name, reason),) = report.not_fused
        assert name == "blocks.0.act"
        assert reason.startswith("the output of its block moved by ")
    assert type(model.blocks[0].act) is nn.GELU
    assert model.blocks[0].up.activation is None
    with torch.no_grad():
        torch.testing.assert_close(model(X), before)


class GatedWithMore(Gated):
    def forward(self, x):
        hidden = self.act(self.gate(x)) * self.up(x)
        return self.down(hidden) + hidden.sum()


class GatedByAnother(Gated):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x.flip(-1)))


@pytest.mark.parametrize("kind", [GatedWithMore, GatedByAnother])
def test_blocks_that_do_more_keep_their_forward(kind):
    model = Wrapped(kind()).eval()
    report = torch_gemm.replace(model, fuse=True, verify=X)
    # The activation can move into its layer all the same.
    assert [fused.what for fused in report.fused] == ["silu, which was blocks.0.act"]
    assert type(model.blocks[0]) is kind


def test_other_activations_and_hooks_are_left_alone():
    class Mine(nn.GELU):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(nn.Linear(16, 16), Mine(), nn.Linear(16, 16), nn.Tanh())
    assert torch_gemm.replace(model, fuse=True).fused == ()
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.min().item()))
    report = torch_gemm.replace(model, fuse=True)
    assert report.not_fused == (NotFused("1", "a hook watches 0"),)
    assert [fused.name for fused in report.fused] == ["2"]
    seen.clear()
    model(X)
    assert seen[0] < 0


def test_a_layer_that_is_used_elsewhere_is_left_alone():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model.append(model[0])
    report = torch_gemm.replace(model, fuse=True)
    assert report.not_fused == (NotFused("1", "0 is used in several places"),)


def test_a_shared_block_is_fused_in_all_its_places():
    block = Gated()
    model = Wrapped(block, block, MLP()).eval()
    with torch.no_grad():
        before = model(X)
    torch_gemm.replace(model, fuse=True)
    assert type(model.blocks[0]) is fusion.GatedMLP
    assert model.blocks[0] is model.blocks[1]
    torch_gemm.restore(model)
    assert type(model.blocks[0]) is Gated
    assert model.blocks[0] is model.blocks[1]
    with torch.no_grad():
        assert torch.equal(model(X), before)


def test_the_model_itself_as_a_block():
    report = torch_gemm.replace(Gated(), fuse=True)
    assert report.not_fused == (
        NotFused("gate", "its block is the model itself, which cannot be exchanged"),
    )
    assert [fused.what for fused in report.fused] == ["silu, which was act"]


class NeedsMore(MLP):
    def forward(self, x, scale):
        return super().forward(x) * scale


class CallsIt(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = NeedsMore()

    def forward(self, x):
        return self.mlp(x, scale=2.0)


def test_a_block_that_random_numbers_cannot_run():
    model = CallsIt()
    report = torch_gemm.replace(model, fuse=True)
    ((name, reason),) = report.not_fused
    assert name == "mlp.act"
    assert reason.startswith(
        "its block could not be run alone to check the fusion; pass verify=inputs"
    )
    torch_gemm.restore(model)
    report = torch_gemm.replace(model, fuse=True, verify=X)
    assert [fused.name for fused in report.fused] == ["mlp.up"]


def test_on_the_meta_device_nothing_can_be_checked():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    report = torch_gemm.replace(model, fuse=True)
    assert report.not_fused == (
        NotFused("1", "its block returns no numbers to check the fusion by"),
    )


def test_a_model_that_was_replaced_before_can_be_fused():
    model = Wrapped(MLP(), Gated())
    torch_gemm.replace(model)
    report = torch_gemm.replace(model, fuse=True)
    assert report.replaced == ()
    assert len(report.fused) == 2
    again = torch_gemm.replace(model, fuse=True)
    assert again.fused == again.not_fused == ()
    assert torch_gemm.restore(model) == tuple(
        f"blocks.{name}" for name in ("0.up", "0.down", "1.gate", "1.up", "1.down")
    )


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_fused_model(how):
    model = Wrapped(MLP(), Gated(), Packed(bias=True)).eval()
    with torch.no_grad():
        before = model(X)
    torch_gemm.replace(model, fuse=True)
    twin = how(model)
    assert ops_in(twin) == ops_in(model)
    torch_gemm.restore(twin)
    with torch.no_grad():
        assert torch.equal(twin(X), before)
    assert type(model.blocks[1]) is fusion.GatedMLP


def test_compiled():
    model = nn.Sequential(Wrapped(MLP(), Gated(), Packed(bias=True)), Bert()).eval()
    with torch.no_grad():
        before = model(X)
        torch_gemm.replace(model, fuse=True)
        torch.testing.assert_close(
            torch.compile(model, fullgraph=True, backend="aot_eager")(X), before
        )


def test_as_a_context():
    model = Wrapped(MLP(), Gated(), MLP()).eval()
    with torch.no_grad():
        before = model(X)
    kinds = [type(module) for module in model.modules()]
    state = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    with pytest.raises(KeyError), torch_gemm.replace(model, fuse=True) as report:
        assert len(report.fused) == 3
        raise KeyError
    check_undone(model, before, kinds, state)
    # What an earlier call replaced stays replaced.
    torch_gemm.replace(model, lambda name, module: name == "blocks.0.up")
    with torch_gemm.replace(model):
        assert type(model.blocks[2].up) is torch_gemm.nn.Linear
    assert type(model.blocks[2].up) is nn.Linear
    assert type(model.blocks[0].up) is torch_gemm.nn.Linear


def test_a_context_inside_another_undoes_its_own_fusions_only():
    model = Wrapped(MLP(), Gated()).eval()
    torch_gemm.replace(model)
    with torch_gemm.replace(model, fuse=True):
        assert ops_in(model) == ["linear", "linear", "linear_glu", "linear"]
    assert ops_in(model) == ["linear"] * 5
    assert type(model.blocks[0].act) is nn.GELU
    with torch.no_grad():
        expected = model(X)
        torch_gemm.restore(model)
        torch.testing.assert_close(model(X), expected)


def test_a_report_keeps_no_model_alive_and_can_be_copied():
    model = Wrapped(MLP(), Gated())
    report = torch_gemm.replace(model, fuse=True)
    twin = pickle.loads(pickle.dumps(report))
    assert twin == report
    with twin:
        pass
    assert type(model.blocks[0].up) is torch_gemm.nn.Linear
    gone = weakref.ref(model.blocks[0].up)
    del model
    gc.collect()
    assert gone() is None
    assert "blocks.0.up" in str(report)


class FailsFused(Wrapped):
    def forward(self, x):
        if isinstance(self.blocks[1], fusion.GatedMLP):
            raise RuntimeError("not with this block")
        return super().forward(x)


def test_a_failure_undoes_everything():
    model = FailsFused(MLP(), Gated()).eval()
    with torch.no_grad():
        before = model(X)
    modules = list(model.modules())
    with pytest.raises(RuntimeError, match="not with this block"):
        torch_gemm.replace(model, fuse=True, verify=X)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    with torch.no_grad():
        assert torch.equal(model(X), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    model = Wrapped(MLP(), Gated(), MLP(act=nn.ReLU())).to(dtype)
    report = torch_gemm.replace(model, fuse=True)
    assert len(report.fused) == 3, report


def test_flags_and_random_state_are_untouched():
    model = Wrapped(MLP(), Gated()).train()
    model.blocks[0].eval()
    torch.manual_seed(3)
    torch_gemm.replace(model, fuse=True, verify=X)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4))
    assert model.training
    assert not model.blocks[0].training
    assert model.blocks[1].training
    assert all(parameter.grad is None for parameter in model.parameters())


# --- transformers -----------------------------------------------------------------------------------


def tiny(name, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")
    if name == "GPT2":
        config = config(n_embd=32, n_head=4, n_layer=2, vocab_size=64)
    elif name == "Whisper":
        config = config(d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48)
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        return WhisperEncoder(config).eval()
    else:
        if name == "Phi3":
            options["pad_token_id"] = 0
        config = config(**sizes, intermediate_size=48, vocab_size=64, **options)
    return getattr(transformers, f"{name}Model")(config).eval()


TOKENS = {"input_ids": torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])}


@pytest.mark.parametrize(
    ("name", "inputs", "fused"),
    [
        ("Bert", TOKENS, ["gelu", "the sum with the residual"]),
        (
            "Llama",
            TOKENS | {"use_cache": False},
            ["silu and the product with up_proj: one linear_glu"],
        ),
        (
            "Phi3",
            TOKENS | {"use_cache": False},
            ["silu and the product of its halves: one linear_glu"],
        ),
        ("GPT2", TOKENS, ["gelu_tanh"]),
        ("Whisper", {"input_features": torch.randn(1, 80, 3000)}, ["gelu"]),
    ],
)
def test_transformers(name, inputs, fused):
    model = tiny(name)
    with torch.no_grad():
        before = model(**inputs)[0]
    kinds = [type(module) for module in model.modules()]
    with torch_gemm.replace(model, fuse=True, verify=inputs) as report:
        for what in fused:
            hits = [found for found in report.fused if found.what.startswith(what)]
            assert len(hits) >= 2, report
        assert report.not_fused == ()
        if name == "GPT2":
            assert type(model.h[0].mlp.c_fc) is torch_gemm.nn.Conv1D
            assert "Conv1D(nf=128, nx=32, activation=gelu_tanh)" in repr(model)
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs)[0], before, rtol=1e-4, atol=1e-5)
    assert [type(module) for module in model.modules()] == kinds
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], before)
