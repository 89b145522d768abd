"""Swaps the linear layers of a model for those of `torch_gemm.nn`, in place, and back."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from torch_gemm import _outputs, fusion, nn
from torch_gemm._outputs import Verification
from torch_gemm.notation import plain

Filter = Callable[[str, torch.nn.Module], bool]

_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Marks the layers that replace() made with the type that they had, so that restore() leaves those that a
# user wrote alone.
_MARK = "_replaced_by_torch_gemm"


class Skipped(NamedTuple):
    """A linear layer that stayed as it was."""

    name: str
    reason: str


@dataclass(frozen=True)
class Replacement:
    """What `replace` did. Prints as a table; as a context manager, undoes it at the end of the block."""

    replaced: tuple[str, ...]  # every name of every layer that runs through tgemm now
    skipped: tuple[Skipped, ...]
    fused: tuple[fusion.Fused, ...] = ()
    not_fused: tuple[fusion.NotFused, ...] = ()
    verification: Verification | None = None
    # Neither keeps a model alive whose report is kept.
    _model: weakref.ref[torch.nn.Module] | None = field(default=None, repr=False, compare=False)
    # What this call made: modules that restore() knows how to turn back.
    _made: weakref.WeakSet[torch.nn.Module] = field(
        default_factory=weakref.WeakSet, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, Any]:
        # A copy reports what happened, and undoes nothing.
        return {**self.__dict__, "_model": None, "_made": None}

    def __str__(self) -> str:
        rows = [(name, "replaced") for name in self.replaced]
        rows += [(name, f"skipped: {reason}") for name, reason in self.skipped]
        rows += [(name, f"also computes {what}") for name, what in self.fused]
        rows += [(name, f"not fused: {reason}") for name, reason in self.not_fused]
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"{name:<{width}}  {result}" for name, result in rows]
        total = f"{len(self.replaced)} replaced, {len(self.skipped)} skipped"
        if self.fused or self.not_fused:
            total += f", {len(self.fused)} fused, {len(self.not_fused)} not fused"
        lines.append(total)
        if self.verification is not None:
            lines.append(str(self.verification))
        return "\n".join(lines)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        model = self._model() if self._model is not None else None
        if model is not None:
            _restore(model, {id(module) for module in self._made})


def replace(
    model: torch.nn.Module, filter: Filter | None = None, verify: Any = None, fuse: bool = False
) -> Replacement:
    """Swaps every plain `torch.nn.Linear` inside `model` for a `torch_gemm.nn.Linear`, in place.

    Only modules whose type is exactly `torch.nn.Linear`, or the `Conv1D` of transformers, with strided
    float16, bfloat16 or float32 parameters, are taken; every other linear layer is reported with the
    reason why it was not. Parameters are shared, never copied: tied weights stay tied, optimisers and
    `requires_grad` are untouched, hooks and their handles go on working, `state_dict` does not change.
    Frozen weights are promised to the kernels as static. If anything fails, the model is left as it was.
    `restore` undoes it, and so does the end of ``with replace(model): ...``. Under FSDP2, replace before
    `fully_shard`; sharded layers are skipped.

    With `fuse`, what follows a layer moves into its kernel: an activation (ReLU, GELU, SiLU) that reads
    only this layer, the gate, activation and product of a Llama-style MLP (as `linear_glu`, its two
    weights as they are, or two views of the one that Phi-3 packs them in), and the sum with the residual where a block is nothing but
    ``norm(dropout(layer(x)) + residual)``. Each fusion is tried on a sample of its block's inputs, taken
    from the run on `verify` or else random, and undone if the output moved by more than roundings
    explain. Activations keep their place, as identities; hooks on the output of a fused layer would see
    another value, so layers with hooks are left alone, as are patterns that the data flow does not show.

    Args:
        model: any module that contains linear layers.
        filter: called with the name and the module of each layer that could be replaced; False
            keeps it.
        verify: inputs for `model`: a tuple of arguments, a dict of keyword arguments, or a single
            argument. The model then runs before and after, in eval mode without gradients, and the
            report contains the largest difference between the outputs.
        fuse: whether to fuse.

    Returns:
        The report. ``print(report)`` shows it as a table.

    Raises:
        TypeError: if `model` is not a module or is itself a linear layer.
        ValueError: if it contains itself.
        Whatever `filter` or the model raises, after the model has been put back as it was.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"replace expects a torch.nn.Module, and got a {type(model).__name__}")
    if isinstance(model, torch.nn.Linear):
        raise TypeError(
            "replace swaps the linear layers inside a model, and this model is itself one: use "
            "torch_gemm.nn.Linear.from_linear(model)"
        )
    if filter is not None and not callable(filter):
        raise TypeError(
            f"replace expects a function of a name and a module as filter, and got a "
            f"{type(filter).__name__}"
        )

    # Everything that can fail happens before the first layer is swapped.
    judged = [(slot, _reason_to_skip(slot)) for slot in _slots(model) if _is_linear(slot.module)]
    if filter is not None:
        judged = [
            (slot, "the filter left it out")
            if reason is None and not filter(slot.name, slot.module)
            else (slot, reason)
            for slot, reason in judged
        ]
    # A layer that is used in several places is replaced in all of them or in none.
    kept = {id(slot.module) for slot, reason in judged if reason is not None}
    twins: dict[int, torch.nn.Module] = {}
    slots: list[_Slot] = []
    skipped: list[Skipped] = []
    for slot, reason in judged:
        if id(slot.module) in kept:
            skipped.append(Skipped(slot.name, reason or "skipped under another of its names"))
            continue
        slots.append(slot)
        if id(slot.module) not in twins:
            twins[id(slot.module)] = _twin_of(slot.module)

    # An earlier replace() may have left layers that can be fused now.
    earlier = [slot for slot in _slots(model) if getattr(slot.module, _MARK, False)]
    fusable = {id(module) for module in (*twins.values(), *(slot.module for slot in earlier))}
    samples: dict[str, fusion.Sample] = {}
    before = None
    if verify is not None:
        blocks = {slot.name.rpartition(".")[0] for slot in (*slots, *earlier)} if fuse else set()
        with _Sampling(model, blocks, samples):
            before = _outputs.run(model, *_call_arguments(verify))
    for slot in slots:
        slot.parent._modules[slot.key] = twins[id(slot.module)]
    fusing = fusion.Pass(model, fusable)
    try:
        if fuse:
            fusing.run(samples)
        verification = None
        if before is not None:
            verification = _outputs.compare(before, _outputs.run(model, *_call_arguments(verify)))
    except BaseException:
        fusing.undo()
        for slot in slots:
            slot.parent._modules[slot.key] = slot.module
        raise
    return Replacement(
        tuple(slot.name for slot in slots),
        tuple(skipped),
        tuple(fusing.fused),
        tuple(fusing.not_fused),
        verification,
        weakref.ref(model),
        weakref.WeakSet((*twins.values(), *fusing.made)),
    )


def restore(model: torch.nn.Module) -> tuple[str, ...]:
    """Turns the layers that `replace` made back into what they were, in place.

    They keep their current parameters, hooks and training flag; what was fused is separate again. A
    `torch_gemm.nn.Linear` that did not come from `replace` stays, and so does one that was given an
    activation since.

    Returns:
        The names of the layers that were turned back.

    Raises:
        TypeError: if `model` is not a module.
        ValueError: if it contains itself.
        RuntimeError: if a layer that `replace` made was sharded since; nothing is changed.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"restore expects a torch.nn.Module, and got a {type(model).__name__}")
    return _restore(model, None)


def _restore(model: torch.nn.Module, only: set[int] | None) -> tuple[str, ...]:
    """With `only`, the modules with these ids alone."""
    for slot in _slots(model):
        layer = slot.module
        marked = getattr(layer, _MARK, False) and (only is None or id(layer) in only)
        if marked and any(map(_is_dtensor, layer.parameters(recurse=False))):
            raise RuntimeError(
                f"restore: the weight of {slot.name} is a DTensor, and what has sharded it (FSDP2) keeps "
                "track of the layers as they are; restore before fully_shard"
            )
    # Blocks first, because their originals hold the same layers in a list of their own.
    twins: dict[int, torch.nn.Module] = {}
    for slot in reversed(list(_slots(model))):
        block = slot.module
        fused = isinstance(block, (fusion.FusedBlock, fusion.Absorbed))
        if fused and (only is None or id(block) in only):
            if id(block) not in twins:
                twins[id(block)] = block.original()
            slot.parent._modules[slot.key] = twins[id(block)]
    names = []
    for slot in list(_slots(model)):
        layer = slot.module
        if only is not None and id(layer) not in only:
            continue
        if type(layer) not in (nn.Linear, nn.Conv1D) or not getattr(layer, _MARK, False):
            continue
        if layer.activation is not None:
            continue
        if id(layer) not in twins:
            twin = nn.retyped(layer, getattr(layer, _MARK))
            for name in (_MARK, "activation", "static_weight"):
                del twin.__dict__[name]
            twins[id(layer)] = twin
        slot.parent._modules[slot.key] = twins[id(layer)]
        names.append(slot.name)
    return tuple(names)


def _twin_of(module: torch.nn.Module) -> torch.nn.Module:
    if isinstance(module, torch.nn.Linear):
        layer = nn.Linear.from_linear(module)
    else:
        layer = nn.Conv1D.from_conv1d(module)
    layer.static_weight = not module.weight.requires_grad
    setattr(layer, _MARK, type(module))
    return layer


def _call_arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


class _Sampling:
    """Notes the arguments of the first call of each of some modules while the model runs."""

    def __init__(
        self, model: torch.nn.Module, names: set[str], samples: dict[str, fusion.Sample]
    ) -> None:
        self.modules = {name: model.get_submodule(name) for name in names}
        self.samples = samples
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self.modules.items():

            def note(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                if name not in self.samples:
                    try:  # a copy, because the model may go on to write into them
                        self.samples[name] = copy.deepcopy(fusion.Sample(args, kwargs))
                    except Exception:  # then a random sample has to do
                        return

            self.handles.append(module.register_forward_pre_hook(note, with_kwargs=True))

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()


class _Slot(NamedTuple):
    """One place in the module tree. A module that is shared has several."""

    name: str
    parent: torch.nn.Module
    key: str
    module: torch.nn.Module


def _slots(model: torch.nn.Module) -> Iterator[_Slot]:
    seen = set()
    try:
        modules = dict(model.named_modules(remove_duplicate=False))
    except RecursionError:
        raise ValueError(
            f"the {type(model).__name__} contains itself, or modules within modules without end"
        ) from None
    for name, module in modules.items():
        prefix, _, key = name.rpartition(".")
        parent = modules[prefix]
        # A place inside a shared block is listed once, although it has several names.
        if name and (id(parent), key) not in seen:
            seen.add((id(parent), key))
            yield _Slot(name, parent, key, module)


def _is_linear(module: torch.nn.Module) -> bool:
    """Whether the report mentions it: a linear layer of any make that is not ours already."""
    if isinstance(module, nn.Linear):
        return False
    return (
        isinstance(module, torch.nn.Linear)
        or _is_conv1d(module)
        or (hasattr(module, "in_features") and hasattr(module, "out_features"))
    )


def _is_conv1d(module: torch.nn.Module) -> bool:
    # transformers is not imported for it: if it was not, there is none.
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    return pytorch_utils is not None and type(module) is pytorch_utils.Conv1D


def _reason_to_skip(slot: _Slot) -> str | None:
    """Why a linear layer stays; None if it can be replaced."""
    module, parent = slot.module, slot.parent
    kind = type(module)
    if not isinstance(module, torch.nn.Linear) and not _is_conv1d(module):
        origin = "quantised layer" if "quant" in kind.__module__ else "layer of another type"
        return f"{origin} ({kind.__module__}.{kind.__qualname__})"
    if isinstance(parent, torch.nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weights directly"
    if isinstance(parent, torch.nn.TransformerEncoderLayer) and slot.key in ("linear1", "linear2"):
        return "the fast path of nn.TransformerEncoderLayer reads its weights directly"
    if any(map(_is_dtensor, module.parameters(recurse=False))):
        return (
            "its parameters are DTensors: under FSDP2, call replace before fully_shard; tensor "
            "parallelism is not supported"
        )
    if parametrize.is_parametrized(module):
        return "parametrized: its weights are computed at each access"
    if kind is not torch.nn.Linear and not _is_conv1d(module):
        return f"subclass of nn.Linear ({kind.__module__}.{kind.__qualname__})"
    if type(parent).__module__.partition(".")[0] == "peft" or hasattr(parent, "base_layer"):
        return "part of an adapter layer, which reads its weights directly"
    if "forward" in module.__dict__:
        return "its forward was overridden on the object"
    if module._compiled_call_impl is not None:
        return "it was compiled by itself, and what was compiled calls the layer as it was"
    for name in ("weight", "bias"):
        reason = _reason_against(module, name)
        if reason is not None:
            return reason
    return None


def _reason_against(module: torch.nn.Module, name: str) -> str | None:
    if name not in module._parameters:
        return f"its {name} is recomputed by a hook (weight_norm, spectral_norm, pruning, FSDP)"
    parameter = module._parameters[name]
    if parameter is None:
        return None if name == "bias" else "it has no weight"
    if not _is_plain(parameter):
        return f"its {name} is a tensor subclass ({type(parameter).__qualname__})"
    if parameter.is_quantized:
        return f"its {name} is quantised"
    if parameter.layout is not torch.strided:
        return f"its {name} has the layout {plain(parameter.layout)}"
    if parameter.dtype not in _WEIGHT_DTYPES:
        return f"its {name} is {plain(parameter.dtype)}"
    return None


def _is_plain(parameter: Tensor) -> bool:
    if type(parameter) is torch.nn.Parameter:
        return True
    # Tracing with fake tensors: the stand-in of a plain parameter.
    from torch._subclasses.fake_tensor import FakeTensor

    return type(parameter) is FakeTensor


def _is_dtensor(parameter: Tensor) -> bool:
    # torch.distributed is not imported for it: if it was not, there is none.
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(parameter, tensor.DTensor)
