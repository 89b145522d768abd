"""What `replace(model, fuse=True)` does after the layers are swapped: epilogues move into the kernels.

Three patterns, each found by how data flows and none by the name of a model:

- a layer whose output is read by an activation alone: the layer gets the activation, whose place is taken
  by an `Absorbed`;
- a block that computes ``down(act(gate(x)) * up(x))``, the MLP of Llama: it becomes a `GatedMLP`, also
  where gate and up are the halves of one layer's output, as in Phi-3, and whatever follows the product;
- a block that computes ``norm(dropout(dense(x)) + residual)``, which ends the sublayers of BERT: it
  becomes a `ResidualNorm`.

Modules keep their names, and parameters stay where they are: nothing is concatenated. Each fusion is tried
on a sample of its block's inputs and undone if the block's output moves by more than roundings explain.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torch_gemm import _outputs, nn, ops

# The largest difference that fusing may make, as a share of the output's magnitude. It drops one rounding
# of an intermediate result; a wrong fusion moves the output by about all of it.
_TOLERANCES = {torch.float16: 2.0**-7, torch.bfloat16: 2.0**-5, torch.float32: 2.0**-10}
# Activation modules that may be tried out on numbers to learn what they compute.
_ACTIVATION_TYPES = (torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU)
_ACTIVATION_FUNCTIONS = {
    torch.relu: "relu",
    torch.nn.functional.relu: "relu",
    torch.nn.functional.gelu: "gelu",
    torch.nn.functional.silu: "silu",
}
_ACTIVATION_PACKAGES = ("transformers.activations", "timm.layers.activations")

# Set on a layer together with its activation by the pass, for restore() to know it from a user's.
FUSED_ACTIVATION = "_fused_by_torch_gemm"

Layer = nn.Linear | nn.Conv1D


class Fused(NamedTuple):
    """A layer whose kernel does more now."""

    name: str
    what: str  # as the end of the sentence "it also computes ..."


class NotFused(NamedTuple):
    """A pattern that was found and left as it was."""

    name: str
    reason: str


class Sample(NamedTuple):
    """Arguments that a block was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# --- What takes the place of modules ----------------------------------------------------------------


class Absorbed(torch.nn.Identity):
    """Stands where an activation was that the layer before it computes now."""

    def __init__(self, activation: torch.nn.Module, layer: Layer) -> None:
        super().__init__()
        # In a tuple, because modules would become submodules.
        self._absorbed = (activation, layer)

    def original(self) -> torch.nn.Module:
        """The activation, which the layer stops computing."""
        activation, layer = self._absorbed
        if layer.activation == layer.__dict__.pop(FUSED_ACTIVATION, None):
            layer.activation = None
        return activation


class FusedBlock(torch.nn.Module):
    """A block with another forward; everything else in it, `original_type` apart, is as it was."""

    original_type: type[torch.nn.Module]
    argument_names: tuple[str, ...]

    @classmethod
    def of(cls, block: torch.nn.Module, argument_names: tuple[str, ...], **names: Any) -> Any:
        """A block with the state of `block` and further attributes."""
        fused = nn.retyped(block, cls)
        fused.original_type = type(block)
        fused.argument_names = argument_names
        fused._fused_attributes = tuple(names)
        for name, value in names.items():
            setattr(fused, name, value)
        return fused

    def original(self) -> torch.nn.Module:
        """The block as it was, with its current state."""
        block = nn.retyped(self, self.original_type)
        for name in (
            "original_type",
            "argument_names",
            "_fused_attributes",
            *self._fused_attributes,
        ):
            del block.__dict__[name]
        return block

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not kwargs:
            return args
        return (*args, *(kwargs[name] for name in self.argument_names[len(args) :]))


class GatedMLP(FusedBlock):
    """``down(act(gate(x)) * up(x))`` with gate, activation, up and product in one kernel."""

    gate_name: str
    # None: one layer makes both, and its weight and bias are read as two views.
    up_name: str | None
    gate_is_first_half: bool
    glu_activation: str
    tail: tuple[str, ...]  # the children that the product goes through, "down" for one

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The block's output, of its only argument."""
        (x,) = self._arguments(args, kwargs)
        gate = self._modules[self.gate_name]
        static = _static(gate) and (self.up_name is None or _static(self._modules[self.up_name]))
        hidden = ops.linear_glu(
            x, *self.operands(), activation=self.glu_activation, static_weight=static
        )
        for name in self.tail:
            hidden = self._modules[name](hidden)
        return hidden

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Weights of gate and up and their biases, as linear_glu takes them after the input."""
        gate = self._modules[self.gate_name]
        if self.up_name is not None:
            up = self._modules[self.up_name]
            return gate.weight, up.weight, gate.bias, up.bias
        weights = gate.weight.chunk(2)
        biases = (None, None) if gate.bias is None else gate.bias.chunk(2)
        step = 1 if self.gate_is_first_half else -1
        return *weights[::step], *biases[::step]


class ResidualNorm(FusedBlock):
    """``norm(dropout(dense(x)) + residual)`` with the sum in dense's kernel, outside of training."""

    dense_name: str
    norm_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The block's output, of the layer's input and the residual."""
        x, residual = self._arguments(args, kwargs)
        dense = self._modules[self.dense_name]
        if not self.fuses(x, residual):
            return self.original_type.forward(self, x, residual)
        total = ops.linear(x, dense.weight, dense.bias, residual, static_weight=_static(dense))
        return self._modules[self.norm_name](total)

    def fuses(self, x: Tensor, residual: Tensor) -> bool:
        """Whether the sum happens in dense's kernel, rather than as in the original."""
        out_features = self._modules[self.dense_name].out_features
        return not (
            self.training  # with dropout between the two
            # The sum has the wider dtype of the two, and the kernel's output that of the product.
            or residual.dtype != x.dtype
            or torch.is_autocast_enabled(x.device.type)
            or residual.shape != (*x.shape[:-1], out_features)
        )


def _static(layer: Layer) -> bool:
    return layer.static_weight and not layer.weight.requires_grad


# --- The pass ---------------------------------------------------------------------------------------


class Pass:
    """Fuses inside one model. `undo` puts everything back, newest change first."""

    def __init__(self, model: torch.nn.Module, layers: set[int]) -> None:
        """`layers` are the ids of the layers that may be changed."""
        self.model = model
        self.layers = layers
        self.fused: list[Fused] = []
        self.not_fused: list[NotFused] = []
        self._undo: list[Callable[[], None]] = []
        # Every place of every module: a block that is used twice must be exchanged in both.
        self._places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for module in model.modules():
            for key, child in module._modules.items():
                if child is not None:
                    self._places.setdefault(id(child), []).append((module, key))

    def run(self, samples: dict[str, Sample]) -> None:
        """Fuses what can be fused, with the samples of the blocks, by name, where there are any."""
        blocks = list(self.model.named_modules())
        # Inner blocks first: what takes the place of a block copies the list of its children.
        for name, block in reversed(blocks):
            if self._own_layers(block):
                self._fuse_block(name, block, samples.get(name))
        order = {name: index for index, (name, _) in enumerate(blocks)}
        self.fused.sort(key=lambda found: order[found.name])
        self.not_fused.sort(key=lambda found: order[found.name])

    def undo(self, until: int = 0) -> None:
        """Takes back all changes but the first `until`."""
        while len(self._undo) > until:
            self._undo.pop()()

    @property
    def made(self) -> tuple[torch.nn.Module, ...]:
        """The modules that take the place of others now."""
        kinds = (Absorbed, FusedBlock)
        return tuple(module for module in self.model.modules() if isinstance(module, kinds))

    def _own_layers(self, block: torch.nn.Module) -> dict[str, Layer]:
        return {key: child for key, child in block._modules.items() if id(child) in self.layers}

    def _fuse_block(self, name: str, block: torch.nn.Module, sample: Sample | None) -> None:
        prefix = f"{name}." if name else ""
        layers = self._own_layers(block)
        activations = {
            key: activation
            for key, child in block._modules.items()
            if child is not None and (activation := activation_of(child)) is not None
        }
        pattern = _block_pattern(block, layers, activations)
        if not activations and pattern is None:
            return
        if sample is None:
            sample = _random_sample(block, next(iter(layers.values())))
        outcome = _outcome(block, sample)
        if isinstance(outcome, str):
            for key in activations or (pattern.layer,):
                self.not_fused.append(NotFused(prefix + key, outcome))
            return
        if pattern is not None:
            reason = self._reason_against(block, pattern.absorbed, whole=True) or self._attempt(
                block, sample, outcome, lambda: self._exchange(block, pattern.make())
            )
            if reason is None:
                self.fused.append(Fused(prefix + pattern.layer, pattern.what))
                return
            self.not_fused.append(NotFused(prefix + pattern.layer, reason))
        for layer_key, activation_key in _activated(block, layers, activations, sample):
            activation = activations[activation_key]
            reason = self._reason_against(block, (layer_key, activation_key)) or self._attempt(
                block,
                sample,
                outcome,
                lambda of=(layer_key, activation_key, activation): self._absorb(block, *of),
            )
            if reason is None:
                what = f"{activation}, which was {prefix}{activation_key}"
                self.fused.append(Fused(prefix + layer_key, what))
            else:
                self.not_fused.append(NotFused(prefix + activation_key, reason))

    def _reason_against(
        self, block: torch.nn.Module, keys: tuple[str, ...], whole: bool = False
    ) -> str | None:
        """Why the children of these names cannot stop being called as they are."""
        if whole and id(block) not in self._places:
            return "its block is the model itself, which cannot be exchanged"
        for key in keys:
            child = block._modules[key]
            if (
                child._forward_hooks
                or child._forward_pre_hooks
                or child._backward_hooks
                or child._backward_pre_hooks
            ):
                return f"a hook watches {key}"
            if id(child) in self.layers and len(self._places[id(child)]) > 1:
                return f"{key} is used in several places"
        return None

    def _attempt(
        self,
        block: torch.nn.Module,
        sample: Sample,
        before: list[Tensor],
        change: Callable[[], Any],
    ) -> str | None:
        """Makes a change and keeps it if the block's output stays the same; otherwise says why not."""
        mark = len(self._undo)
        try:
            block = change() or block
            after = _outcome(block, sample)
        except BaseException:
            self.undo(mark)
            raise
        dtype = next(iter(self._own_layers(block).values())).weight.dtype
        reason = after if isinstance(after, str) else _reason_to_doubt(before, after, dtype)
        if reason is not None:
            self.undo(mark)
        return reason

    def _absorb(
        self, block: torch.nn.Module, layer_key: str, activation_key: str, activation: str
    ) -> None:
        layer, module = block._modules[layer_key], block._modules[activation_key]

        def undo() -> None:
            layer.activation = None
            delattr(layer, FUSED_ACTIVATION)
            block._modules[activation_key] = module

        self._undo.append(undo)
        layer.activation = activation
        setattr(layer, FUSED_ACTIVATION, activation)
        block._modules[activation_key] = Absorbed(module, layer)

    def _exchange(self, block: torch.nn.Module, twin: torch.nn.Module) -> torch.nn.Module:
        places = self._places[id(block)]

        def undo() -> None:
            for parent, key in places:
                parent._modules[key] = block

        self._undo.append(undo)
        for parent, key in places:
            parent._modules[key] = twin
        for key, child in twin._modules.items():
            if child is not None:
                self._places[id(child)].append((twin, key))
        return twin


# --- Finding patterns -------------------------------------------------------------------------------


def activation_of(module: torch.nn.Module) -> str | None:
    """The name of the activation that a module computes, if it is one that the kernels know."""
    if (
        type(module) not in _ACTIVATION_TYPES
        and type(module).__module__ not in _ACTIVATION_PACKAGES
    ):
        return None
    if any(True for _ in (*module.children(), *module.parameters(), *module.buffers())):
        return None
    # Each of them goes by a dozen names and options.
    numbers = torch.linspace(-6, 6, 101, device="cpu")
    try:
        with torch.no_grad():
            result = module(numbers.clone())
    except Exception:  # it wants something else than numbers
        return None
    for name in ops.ACTIVATIONS:
        if isinstance(result, Tensor) and result.shape == numbers.shape:
            expected = _activate(numbers, name)
            if torch.allclose(result, expected, rtol=1e-5, atol=1e-6):
                return name
    return None


def _activate(numbers: Tensor, name: str) -> Tensor:
    if name == "gelu_tanh":
        return torch.nn.functional.gelu(numbers, approximate="tanh")
    return getattr(torch.nn.functional, name)(numbers)


def _activated(
    block: torch.nn.Module, layers: dict[str, Layer], activations: dict[str, str], sample: Sample
) -> Iterator[tuple[str, str]]:
    """Pairs of children, a layer and the activation that alone reads its output."""
    if type(block).forward is torch.nn.Sequential.forward:
        keys = list(block._modules)
        for key, following in itertools.pairwise(keys):
            if key in layers and following in activations and layers[key].activation is None:
                yield key, following
        return

    keys = {id(child): key for key, child in block._modules.items() if child is not None}
    calls: dict[str, int] = {}
    # The child that made a tensor last; dropout, for one, may return its argument.
    maker: dict[int, str] = {}
    alive: list[Tensor] = []  # so that no two tensors have one id
    found: list[tuple[str, str]] = []

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        key = keys[id(module)]
        calls[key] = calls.get(key, 0) + 1
        if key in activations and len(args) == 1 and maker.get(id(args[0])) in layers:
            found.append((maker[id(args[0])], key))

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            maker[id(output)] = keys[id(module)]
            alive.append(output)

    handles = []
    for child in {id(child): child for child in block._modules.values() if child}.values():
        handles += [child.register_forward_pre_hook(before), child.register_forward_hook(after)]
    try:
        _outputs.run(block, *copy.deepcopy(sample))
    finally:
        for handle in handles:
            handle.remove()
    for layer, activation in found:
        if calls[layer] == calls[activation] == 1 and layers[layer].activation is None:
            yield layer, activation


class _Pattern(NamedTuple):
    layer: str  # the child that the report names
    what: str
    absorbed: tuple[str, ...]  # children that are not called any more
    make: Callable[[], torch.nn.Module]


class _Children(fx.Tracer):
    """Traces what a block does with its children, without looking into them."""

    def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
        return True


def _block_pattern(
    block: torch.nn.Module, layers: dict[str, Layer], activations: dict[str, str]
) -> _Pattern | None:
    """The pattern that is all that the block does."""
    if "forward" in block.__dict__ or block._compiled_call_impl is not None:
        return None
    if not activations and len(layers) > 3:  # attention, for one
        return None
    state = dict(block.__dict__)
    try:
        graph = _Children().trace(block)
    except Exception:  # its forward depends on what it is given: torch.fx has many ways to say so
        return None
    finally:  # a block that keeps something of its last call would keep the tracer's stand-ins
        block.__dict__.clear()
        block.__dict__.update(state)
    nodes = list(graph.nodes)
    names = tuple(node.target for node in nodes if node.op == "placeholder")
    if any(name.startswith("*") for name in names):
        return None
    result = nodes[-1].args[0]
    pattern = _match_gated_mlp(block, layers, activations, result, names, len(nodes))
    return pattern or _match_residual_norm(block, layers, result, names, len(nodes))


def _call_of_child(node: Any) -> str | None:
    """The child that a node calls with one argument, if nothing but the next node reads the result."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    if len(node.args) != 1 or node.kwargs or len(node.users) != 1:
        return None
    return node.target


def _operands_of(node: Any, function: Any, method: str) -> tuple[Any, Any] | None:
    """The two operands, if a node computes ``function(a, b)`` and one other node reads the result."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    is_function = node.op == "call_function" and node.target in (function, getattr(torch, method))
    is_method = node.op == "call_method" and node.target == method
    if not (is_function or is_method) or len(node.args) != 2 or node.kwargs:
        return None
    return node.args


def _activation_in(node: Any, activations: dict[str, str]) -> tuple[str, Any, str | None] | None:
    """An activation's name, its argument, and the child that computes it, if it is one."""
    child = _call_of_child(node)
    if child in activations:
        return activations[child], node.args[0], child
    if not isinstance(node, fx.Node) or node.op != "call_function" or len(node.users) != 1:
        return None
    name = _ACTIVATION_FUNCTIONS.get(node.target)
    options = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    if name == "gelu" and options.pop("approximate", "none") == "tanh":
        name = "gelu_tanh"
    if name is None or options or len(node.args) != 1:
        return None
    return name, node.args[0], None


def _halves_of_one(first: Any, second: Any, layers: dict[str, Layer]) -> tuple[str, bool] | None:
    """The layer whose output is cut into two nodes, and whether the first is the first half."""
    halves = []
    for node in (first, second):
        if not isinstance(node, fx.Node) or node.target is not operator.getitem:
            return None
        if len(node.users) != 1:
            return None
        halves.append(node.args)
    (cut, index), (other_cut, other_index) = halves
    if cut is not other_cut or {index, other_index} != {0, 1} or len(cut.users) != 2:
        return None
    child = _call_of_child(cut.args[0])
    layer = layers.get(child) if child is not None else None
    if layer is None or layer.weight.shape[0] % 2:
        return None
    half = layer.weight.shape[0] // 2
    functions = {"chunk": (2,), "split": (half, [half, half], (half, half))}
    for name, sizes in functions.items():
        if cut.target in (name, getattr(torch, name)):
            rest = (*cut.args[1:], *cut.kwargs.values())
            if len(rest) == 2 and rest[0] in sizes and rest[1] == -1:
                return child, index == 0
    return None


def _match_gated_mlp(
    block: torch.nn.Module,
    layers: dict[str, Layer],
    activations: dict[str, str],
    result: Any,
    names: tuple[str, ...],
    nodes: int,
) -> _Pattern | None:
    tail: list[str] = []
    while (child := _call_of_child(result)) is not None:
        tail.insert(0, child)
        result = result.args[0]
    operands = _operands_of(result, operator.mul, "mul")
    if operands is None or len(names) != 1:
        return None
    for first, second in (operands, operands[::-1]):
        found = _activation_in(first, activations)
        if found is None:
            continue
        activation, argument, act = found
        halves = _halves_of_one(argument, second, layers)
        if halves is not None:
            (gate, is_first), up = halves, None
            # The cut and its halves; the layer, the activation and the product; input and output.
            own, read, of = 3, argument.args[0].args[0].args, "its halves"
        else:
            gate, up = _call_of_child(argument), _call_of_child(second)
            if gate is None or up is None or argument.args != second.args:
                continue
            is_first, own, read, of = True, 1, argument.args, up
        if getattr(read[0], "op", None) != "placeholder" or nodes != own + 5 + len(tail):
            continue
        keys = [key for key in (gate, up) if key is not None]
        if not all(
            isinstance(layers.get(key), nn.Linear) and layers[key].activation is None
            for key in keys
        ):
            continue
        of = f"the product of {of}" if up is None else f"the product with {of}"
        return _Pattern(
            gate,
            f"{activation} and {of}: one linear_glu",
            (*keys, *([act] if act is not None else [])),
            functools.partial(
                GatedMLP.of,
                block,
                names,
                gate_name=gate,
                up_name=up,
                gate_is_first_half=is_first,
                glu_activation=activation,
                tail=tuple(tail),
            ),
        )
    return None


def _match_residual_norm(
    block: torch.nn.Module,
    layers: dict[str, Layer],
    result: Any,
    names: tuple[str, ...],
    nodes: int,
) -> _Pattern | None:
    norm = _call_of_child(result)
    operands = _operands_of(result.args[0], operator.add, "add") if norm else None
    if operands is None or len(names) != 2:
        return None
    for summand, residual in (operands, operands[::-1]):
        absorbed: tuple[str, ...] = ()
        dense = _call_of_child(summand)
        if dense is not None and type(block._modules.get(dense)) is torch.nn.Dropout:
            absorbed, summand = (dense,), summand.args[0]
            dense = _call_of_child(summand)
        layer = layers.get(dense) if dense is not None else None
        if not isinstance(layer, nn.Linear) or layer.activation is not None:
            continue
        inputs = (summand.args[0], residual)
        # Nothing else happens, and the arguments come in this order.
        if [getattr(node, "op", None) for node in inputs] == ["placeholder"] * 2 and (
            (*(node.target for node in inputs),) == names and nodes == 6 + len(absorbed)
        ):
            return _Pattern(
                dense,
                "the sum with the residual",
                (dense, *absorbed),
                functools.partial(ResidualNorm.of, block, names, dense_name=dense, norm_name=norm),
            )
    return None


# --- Checking ---------------------------------------------------------------------------------------


def _random_sample(block: torch.nn.Module, layer: Layer) -> Sample:
    """Two rows for a block whose only argument its layer reads."""
    features = layer.weight.shape[0 if isinstance(layer, nn.Conv1D) else 1]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, features, generator=generator, device="cpu")
    return Sample((numbers.to(layer.weight),), {})


def _outcome(block: torch.nn.Module, sample: Sample) -> list[Tensor] | str:
    """The block's outputs, or why there are none."""
    try:
        outputs = _outputs.run(block, *copy.deepcopy(sample))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return (
            "its block could not be run alone to check the fusion; pass verify=inputs "
            f"({type(error).__name__}: {lines[0]})"
        )
    if any(output.is_meta or type(output) is not Tensor for output in outputs):
        return "its block returns no numbers to check the fusion by"
    return outputs


def _reason_to_doubt(before: list[Tensor], after: list[Tensor], dtype: torch.dtype) -> str | None:
    try:
        verification = _outputs.compare(before, after)
    except RuntimeError as error:
        return str(error)
    bound = _TOLERANCES[dtype] * verification.largest_output
    if verification.largest_difference <= bound:
        return None
    return (
        f"the output of its block moved by {verification.largest_difference:.3g} at a magnitude of "
        f"{verification.largest_output:.3g}"
    )
