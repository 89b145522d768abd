"""`replace` swaps exactly the layers it promises to, changes nothing else, and can be undone."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass

import pytest
import torch
from test_ops_autograd import Calls
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import torch_gemm
from torch_gemm.replacement import Skipped


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Nested layers, a tied head and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


NAMES = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head")
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def types(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def reasons(report) -> dict[str, str]:
    return dict(report.skipped)


def test_replace_and_restore():
    model = Model().eval()
    before, kinds = model(TOKENS), types(model)
    state = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    report = torch_gemm.replace(model)
    assert report.replaced == NAMES
    assert report.skipped == ()
    for name in NAMES:
        assert type(model.get_submodule(name)) is torch_gemm.nn.Linear
    torch.testing.assert_close(model(TOKENS), before)
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == state

    assert torch_gemm.restore(model) == NAMES
    assert types(model) == kinds
    assert model.head.__dict__.keys() == nn.Linear(1, 1).__dict__.keys()
    assert torch.equal(model(TOKENS), before)
    assert torch_gemm.restore(model) == ()


def test_weights_stay_tied():
    model = Model()
    torch_gemm.replace(model)
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        model.embed.weight.zero_()
    assert not model.eval()(TOKENS).any()


def test_replacing_again_changes_nothing():
    model = Model()
    torch_gemm.replace(model)
    modules = list(model.modules())
    report = torch_gemm.replace(model)
    assert report.replaced == ()
    assert report.skipped == ()
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))


def test_shared_modules_stay_shared():
    model = nn.Module()
    model.first = nn.Linear(4, 4)
    model.second = model.first
    model.block = Block()
    model.again = model.block
    report = torch_gemm.replace(model)
    assert report.replaced == ("first", "second", "block.up", "block.down")
    assert model.first is model.second
    assert type(model.again.up) is torch_gemm.nn.Linear
    torch_gemm.restore(model)
    assert model.first is model.second
    assert type(model.first) is nn.Linear


def test_training_goes_on_where_it_was():
    torch.manual_seed(0)
    model = Model().train()
    model.dropout.p = 0.0
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    torch_gemm.replace(model)
    for optimizer, m in zip(optimizers, (model, twin), strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            m(TOKENS).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_flags_and_hooks_are_kept():
    model = Model()
    model.blocks[0].eval()
    model.blocks[0].up.weight.requires_grad_(False)
    seen = []
    pre = model.blocks[0].up.register_forward_pre_hook(lambda *args: seen.append("pre"))
    post = model.head.register_forward_hook(lambda *args: seen.append("post"))
    model.head.remark = "mine"
    torch_gemm.replace(model)
    assert not model.blocks[0].up.training
    assert model.blocks[1].up.training
    assert not model.blocks[0].up.weight.requires_grad
    assert model.head.remark == "mine"
    model(TOKENS)
    assert seen == ["pre", "post"]
    pre.remove()
    torch_gemm.restore(model)
    model(TOKENS)
    assert seen == ["pre", "post", "post"]
    post.remove()
    model(TOKENS)
    assert seen == ["pre", "post", "post"]


def test_frozen_weights_are_promised_to_be_static():
    model = Model()
    model.blocks[0].requires_grad_(False)
    torch_gemm.replace(model)
    assert model.blocks[0].up.static_weight
    assert not model.blocks[1].up.static_weight


def test_filter():
    model = Model()
    asked = []

    def keep_head(name, module):
        asked.append((name, type(module)))
        return name != "head"

    report = torch_gemm.replace(model, keep_head)
    assert asked == [(name, nn.Linear) for name in NAMES]
    assert report.replaced == NAMES[:-1]
    assert report.skipped == (Skipped("head", "the filter left it out"),)


def test_a_shared_layer_is_replaced_everywhere_or_nowhere():
    model = nn.Module()
    model.first = nn.Linear(4, 4)
    model.second = model.first
    report = torch_gemm.replace(model, lambda name, module: name == "first")
    assert report.replaced == ()
    assert reasons(report) == {
        "first": "skipped under another of its names",
        "second": "the filter left it out",
    }
    assert type(model.first) is nn.Linear


class MyLinear(nn.Linear):
    pass


def test_subclasses_are_skipped():
    model = nn.Sequential(MyLinear(4, 4), nn.LazyLinear(4), nn.Linear(4, 4))
    report = torch_gemm.replace(model)
    assert report.replaced == ("2",)
    assert "subclass of nn.Linear (test_replace.MyLinear)" in reasons(report)["0"]
    assert "LazyLinear" in reasons(report)["1"]


def test_attention_and_encoder_layers_are_skipped():
    model = nn.Module()
    model.attention = nn.MultiheadAttention(8, 2)
    model.encoder = nn.TransformerEncoderLayer(8, 2, 16)
    model.decoder = nn.TransformerDecoderLayer(8, 2, 16)
    report = torch_gemm.replace(model)
    # The decoder layer has no fast path: its feed-forward layers are called as modules.
    assert report.replaced == ("decoder.linear1", "decoder.linear2")
    attention = "nn.MultiheadAttention reads its weights directly"
    encoder = "the fast path of nn.TransformerEncoderLayer reads its weights directly"
    assert reasons(report) == {
        "attention.out_proj": attention,
        "encoder.self_attn.out_proj": attention,
        "encoder.linear1": encoder,
        "encoder.linear2": encoder,
        "decoder.self_attn.out_proj": attention,
        "decoder.multihead_attn.out_proj": attention,
    }


def test_encoder_gives_the_same_on_its_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)).eval()
    report = torch_gemm.replace(model, verify=torch.randn(2, 5, 8))
    assert report.replaced == ("1",)
    assert report.verification.largest_difference < 1e-5


def test_parametrized_layers_are_skipped():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    parametrizations.weight_norm(model[1])
    before = model(torch.ones(4))
    report = torch_gemm.replace(model)
    assert report.replaced == ("2",)
    for name in "01":
        assert reasons(report)[name] == "parametrized: its weights are computed at each access"
    torch.testing.assert_close(model(torch.ones(4)), before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_hook_computes_are_skipped():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    nn.utils.weight_norm(model[0])
    nn.utils.spectral_norm(model[1])
    report = torch_gemm.replace(model)
    assert report.replaced == ("2",)
    assert "recomputed by a hook" in reasons(report)["0"]
    assert "recomputed by a hook" in reasons(report)["1"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_skipped(dtype):
    model = nn.Sequential(nn.Linear(4, 4, dtype=dtype))
    report = torch_gemm.replace(model)
    assert reasons(report) == {"0": f"its weight is {dtype}".replace("torch.", "")}


def test_integer_weights_are_skipped():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    assert reasons(torch_gemm.replace(model)) == {"0": "its weight is int8"}


def test_sparse_weights_are_skipped():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.eye(4).to_sparse())
    assert reasons(torch_gemm.replace(model)) == {"0": "its weight has the layout sparse_coo"}


class TaggedTensor(torch.Tensor):
    pass


def test_tensor_subclasses_are_skipped():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.eye(4).as_subclass(TaggedTensor))
    assert reasons(torch_gemm.replace(model)) == {
        "0": "its weight is a tensor subclass (TaggedTensor)"
    }


class GEGLU(nn.Module):
    """The layers of diffusers' feed-forward blocks take arguments that they ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 2 * 12)

    def gelu(self, gate):
        return nn.functional.gelu(gate.float() if gate.device.type == "mps" else gate)

    def forward(self, hidden_states, *args, **kwargs):
        if len(args) > 0 or kwargs.get("scale") is not None:
            raise ValueError("scale is deprecated")
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * self.gelu(gate)


class Diffusion(nn.Module):
    """A transformer block as diffusers writes it, with a time embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(8, 8), nn.Dropout(0.0)])
        self.net = nn.ModuleList([GEGLU(), nn.Dropout(0.0), nn.Linear(12, 8)])

    def forward(self, sample, timestep, encoder_hidden_states=None):
        sample = sample + self.time(timestep)[:, None]
        context = sample if encoder_hidden_states is None else encoder_hidden_states
        hidden = nn.functional.scaled_dot_product_attention(
            self.to_q(sample), self.to_k(context), self.to_v(context)
        )
        for module in self.to_out:
            hidden = module(hidden)
        sample = hidden = sample + hidden
        for module in self.net:
            hidden = module(hidden)
        return {"sample": sample + hidden}


@pytest.mark.parametrize("fuse", [False, True])
def test_diffusion_models(fuse):
    model = Diffusion().eval()
    inputs = {
        "sample": torch.randn(2, 5, 8),
        "timestep": torch.randn(2, 8),
        "encoder_hidden_states": torch.randn(2, 3, 8),
    }
    with torch.no_grad():
        expected = model(**inputs)["sample"]
    report = torch_gemm.replace(model, fuse=fuse, verify=inputs)
    assert len(report.replaced) == 8
    assert report.skipped == report.not_fused == ()
    assert [fused.name for fused in report.fused] == (["time.0"] if fuse else [])
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)["sample"], expected)
    assert len(torch_gemm.restore(model)) == 8


@pytest.fixture
def mesh(tmp_path):
    """Of a single process."""
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_fsdp2(mesh):
    from torch.distributed.fsdp import fully_shard

    def shard(model):
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    stock = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model = copy.deepcopy(stock)
    x = torch.randn(3, 4)
    reason = (
        "its parameters are DTensors: under FSDP2, call replace before fully_shard; tensor "
        "parallelism is not supported"
    )
    sharded = shard(copy.deepcopy(stock))
    assert reasons(torch_gemm.replace(sharded, fuse=True)) == {"0": reason, "2": reason}
    torch.testing.assert_close(sharded(x), stock(x))

    # The other way round both work: the layers run on tgemm, their weights are sharded.
    assert len(torch_gemm.replace(model, fuse=True).fused) == 1
    shard(model)
    with Calls() as calls:
        out = model(x)
    assert len(calls.names("tgemm")) == 2
    torch.testing.assert_close(out, stock(x))
    for m in (model, stock):
        m(x).square().sum().backward()
    for own, other in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad)
    modules = list(model.modules())
    with pytest.raises(RuntimeError, match="restore: the weight of 0 is a DTensor, and what has"):
        torch_gemm.restore(model)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    torch.testing.assert_close(model(x), stock(x))


class QuantLinear(nn.Module):
    """What quantisation packages put in the place of a layer."""

    __module__ = "some_package.quantization"

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = 4


class LowRank(nn.Module):
    """What adapter packages wrap around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = 4
        self.base_layer = nn.Linear(4, 4)
        self.down = nn.Linear(4, 1)


def test_foreign_layers_are_reported():
    model = nn.Module()
    model.quantised = QuantLinear()
    model.adapter = LowRank()
    report = torch_gemm.replace(model)
    assert report.replaced == ()
    assert reasons(report)["quantised"] == "quantised layer (some_package.quantization.QuantLinear)"
    assert reasons(report)["adapter"].startswith("layer of another type (test_replace.LowRank")
    for name in ("adapter.base_layer", "adapter.down"):
        assert "adapter" in reasons(report)[name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamically_quantised_layers_are_skipped():
    quantization = pytest.importorskip("torch.ao.quantization")
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no quantisation engine")
    model = quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    (reason,) = reasons(torch_gemm.replace(model)).values()
    assert reason.startswith("quantised layer")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripted_models_are_left_alone():
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    expected = model(x)
    report = torch_gemm.replace(model)
    assert report.replaced == ()
    assert reasons(report)["0"].startswith("layer of another type (torch.jit.")
    assert torch_gemm.restore(model) == ()
    assert torch.equal(model(x), expected)


def test_overridden_forward_is_skipped():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].forward = lambda x: x
    assert reasons(torch_gemm.replace(model)) == {"0": "its forward was overridden on the object"}


def test_meta_and_fake_models():
    with torch.device("meta"):
        model = Model()
    assert torch_gemm.replace(model).replaced == NAMES
    assert model(TOKENS.to("meta")).shape == (2, 3, 10)
    model.to_empty(device="cpu")
    assert model.eval()(TOKENS).device.type == "cpu"

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = Model()
        assert torch_gemm.replace(fake).replaced == NAMES
        assert fake(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 10)


def test_copies_and_checkpoints_of_a_replaced_model(tmp_path):
    model = Model().eval()
    torch_gemm.replace(model)
    expected = model(TOKENS)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS), expected)
    assert twin.head.weight is twin.embed.weight
    assert torch_gemm.restore(twin) == NAMES
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(TOKENS), expected)
    stock = Model().eval()
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(stock(TOKENS), expected)


def test_restore_keeps_what_replace_did_not_make():
    model = nn.Sequential(torch_gemm.nn.Linear(4, 4, activation="relu"), nn.Linear(4, 4))
    torch_gemm.replace(model)
    model[1].activation = "silu"
    assert torch_gemm.restore(model) == ()
    model[1].activation = None
    assert torch_gemm.restore(model) == ("1",)
    assert type(model[0]) is torch_gemm.nn.Linear


def test_a_moved_model_is_restored_with_its_new_parameters():
    model = Model()
    torch_gemm.replace(model)
    model.to(torch.bfloat16)
    torch_gemm.restore(model)
    assert model.head.weight.dtype is torch.bfloat16
    assert model.eval()(TOKENS).dtype is torch.bfloat16


def test_compiled_model():
    model = Model().eval()
    expected = model(TOKENS)
    torch_gemm.replace(model)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS), expected)


def test_a_linear_layer_is_no_model():
    for layer in (nn.Linear(3, 4), torch_gemm.nn.Linear(3, 4)):
        with pytest.raises(TypeError, match=r"this model is itself one: use .*from_linear"):
            torch_gemm.replace(layer)
    with pytest.raises(TypeError, match=r"expects a torch.nn.Module, and got a dict"):
        torch_gemm.replace({})
    with pytest.raises(TypeError, match=r"expects a torch.nn.Module, and got a NoneType"):
        torch_gemm.restore(None)


def test_a_filter_is_a_function():
    with pytest.raises(TypeError, match="expects a function of a name and a module as filter, and"):
        torch_gemm.replace(Model(), ["head"])


def test_a_layer_that_was_compiled_by_itself_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].compile(backend="eager")
    report = torch_gemm.replace(model)
    assert report.replaced == ("1",)
    assert reasons(report)["0"].startswith("it was compiled by itself")


def test_failing_filter_changes_nothing():
    model = Model()
    modules = list(model.modules())

    def filter(name, module):
        if name == "head":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        torch_gemm.replace(model, filter)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))


class FailsAfterReplacing(Model):
    def forward(self, tokens):
        if isinstance(self.head, torch_gemm.nn.Linear):
            raise RuntimeError("not with this head")
        return super().forward(tokens)


def test_failing_verification_changes_nothing():
    model = FailsAfterReplacing()
    model.blocks[0].eval()
    modules = list(model.modules())
    training = [module.training for module in modules]
    with pytest.raises(RuntimeError, match="not with this head"):
        torch_gemm.replace(model, verify=TOKENS)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert [module.training for module in model.modules()] == training
    with pytest.raises(IndexError):
        torch_gemm.replace(Model(), verify=TOKENS + 100)


@dataclass
class Output:
    logits: torch.Tensor
    extras: dict


class Elaborate(Model):
    def forward(self, tokens, scale=1.0):
        logits = super().forward(tokens)
        return Output(logits * scale, {"sum": [logits.sum()], "none": None, "bool": logits > 0})


@pytest.mark.parametrize("inputs", [TOKENS, (TOKENS, 2.0), {"tokens": TOKENS, "scale": 2.0}])
def test_verification(inputs):
    model = Elaborate()  # in training mode, with dropout: the verification must not be random
    model.blocks[1].eval()
    report = torch_gemm.replace(model, verify=inputs)
    assert report.verification.tensors == 3
    assert 0.0 <= report.verification.largest_difference < 1e-4
    assert report.verification.largest_output > 0.1
    assert model.training
    assert not model.blocks[1].training
    assert not model.blocks[1].up.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "largest difference" in str(report)


class Broken(Model):
    """Returns `wrong` once its layers are replaced."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def forward(self, tokens):
        right = torch.tensor([1.0, float("nan"), float("inf")])
        return self.wrong if isinstance(self.head, torch_gemm.nn.Linear) else right


@pytest.mark.parametrize(
    ("wrong", "difference"),
    [
        ([1.0, float("nan"), float("inf")], 0.0),
        ([3.5, float("nan"), float("inf")], 2.5),
        ([1.0, float("nan"), float("-inf")], float("inf")),
        ([float("nan"), float("nan"), float("inf")], float("nan")),
    ],
)
def test_verification_tells_special_values_apart(wrong, difference):
    report = torch_gemm.replace(Broken(torch.tensor(wrong)), verify=TOKENS)
    assert report.verification.largest_difference == pytest.approx(difference, nan_ok=True)


def test_verification_of_another_number_or_shape_of_outputs_fails():
    for wrong in ((torch.zeros(3),) * 2, torch.zeros(4)):
        model = Broken(wrong)
        with pytest.raises(RuntimeError, match="before and"):
            torch_gemm.replace(model, verify=TOKENS)
        assert type(model.head) is nn.Linear


def test_report_prints_as_a_table():
    model = Model()
    model.attention = nn.MultiheadAttention(8, 2)
    lines = str(torch_gemm.replace(model)).splitlines()
    assert lines[0].split() == ["blocks.0.up", "replaced"]
    assert lines[-2].startswith("attention.out_proj  skipped: nn.MultiheadAttention")
    assert lines[-1] == "5 replaced, 1 skipped"


def test_a_module_that_contains_itself():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.again = model
    for work in (torch_gemm.replace, torch_gemm.restore, lambda it: torch_gemm.audit(it, None)):
        with pytest.raises(ValueError, match="the Sequential contains itself"):
            work(model)
    assert type(model[0]) is torch.nn.Linear
