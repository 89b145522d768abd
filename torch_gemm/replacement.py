"""Swaps the `torch.nn.Linear` layers of a model for `torch_gemm.nn.Linear`, in place, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from torch_gemm import nn

Filter = Callable[[str, torch.nn.Module], bool]

_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Marks the layers that replace() made, so that restore() leaves those that a user wrote alone.
_MARK = "_replaced_by_torch_gemm"


class Skipped(NamedTuple):
    """A linear layer that stayed as it was."""

    name: str
    reason: str


@dataclass(frozen=True)
class Verification:
    """How far the outputs of a model moved when its layers were replaced."""

    tensors: int  # how many output tensors were compared
    largest_difference: float  # over all elements of all of them; NaN if only one side has a NaN
    largest_output: float  # largest magnitude among the outputs before

    def __str__(self) -> str:
        return (
            f"largest difference {self.largest_difference:.3g} in {self.tensors} output tensor"
            f"{'' if self.tensors == 1 else 's'} of magnitude up to {self.largest_output:.3g}"
        )


@dataclass(frozen=True)
class Replacement:
    """What `replace` did. Prints as a table."""

    replaced: tuple[str, ...]  # every name of every layer that runs through tgemm now
    skipped: tuple[Skipped, ...]
    verification: Verification | None = None

    def __str__(self) -> str:
        rows = [(name, "replaced") for name in self.replaced]
        rows += [(name, f"skipped: {reason}") for name, reason in self.skipped]
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"{name:<{width}}  {result}" for name, result in rows]
        lines.append(f"{len(self.replaced)} replaced, {len(self.skipped)} skipped")
        if self.verification is not None:
            lines.append(str(self.verification))
        return "\n".join(lines)


def replace(
    model: torch.nn.Module, filter: Filter | None = None, verify: Any = None
) -> Replacement:
    """Swaps every plain `torch.nn.Linear` inside `model` for a `torch_gemm.nn.Linear`, in place.

    Only modules whose type is exactly `torch.nn.Linear`, with strided float16, bfloat16 or float32
    parameters, are taken; every other linear layer is reported with the reason why it was not.
    Parameters are shared, never copied: tied weights stay tied, optimisers and `requires_grad` are
    untouched, hooks and their handles go on working, `state_dict` does not change. If anything
    fails, the model is left as it was. `restore` undoes it.

    Args:
        model: any module that contains linear layers.
        filter: called with the name and the module of each layer that could be replaced; False
            keeps it.
        verify: inputs for `model`: a tuple of arguments, a dict of keyword arguments, or a single
            argument. The model then runs before and after, in eval mode without gradients, and the
            report contains the largest difference between the outputs.

    Returns:
        The report. ``print(report)`` shows it as a table.

    Raises:
        TypeError: if `model` is not a module or is itself a linear layer.
        Whatever `filter` or the model raises, after the model has been put back as it was.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"replace expects a torch.nn.Module, and got a {type(model).__name__}")
    if isinstance(model, torch.nn.Linear):
        raise TypeError(
            "replace swaps the linear layers inside a model, and this model is itself one: use "
            "torch_gemm.nn.Linear.from_linear(model)"
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
            layer = nn.Linear.from_linear(slot.module)
            layer.static_weight = not slot.module.weight.requires_grad
            setattr(layer, _MARK, True)
            twins[id(slot.module)] = layer

    before = None if verify is None else _run(model, verify)
    for slot in slots:
        slot.parent._modules[slot.key] = twins[id(slot.module)]
    try:
        verification = None if verify is None else _compare(before, _run(model, verify))
    except BaseException:
        for slot in slots:
            slot.parent._modules[slot.key] = slot.module
        raise
    return Replacement(tuple(slot.name for slot in slots), tuple(skipped), verification)


def restore(model: torch.nn.Module) -> tuple[str, ...]:
    """Turns the layers that `replace` made back into `torch.nn.Linear`, in place.

    They keep their current parameters, hooks and training flag. A `torch_gemm.nn.Linear` that did
    not come from `replace` stays, and so does one that was given an activation since.

    Returns:
        The names of the layers that were turned back.

    Raises:
        TypeError: if `model` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"restore expects a torch.nn.Module, and got a {type(model).__name__}")
    twins: dict[int, torch.nn.Module] = {}
    names = []
    for slot in list(_slots(model)):
        layer = slot.module
        if type(layer) is not nn.Linear or not getattr(layer, _MARK, False):
            continue
        if layer.activation is not None:
            continue
        if id(layer) not in twins:
            twin = nn.retyped(layer, torch.nn.Linear)
            for name in (_MARK, "activation", "static_weight"):
                del twin.__dict__[name]
            twins[id(layer)] = twin
        slot.parent._modules[slot.key] = twins[id(layer)]
        names.append(slot.name)
    return tuple(names)


class _Slot(NamedTuple):
    """One place in the module tree. A module that is shared has several."""

    name: str
    parent: torch.nn.Module
    key: str
    module: torch.nn.Module


def _slots(model: torch.nn.Module) -> Iterator[_Slot]:
    seen = set()
    modules = dict(model.named_modules(remove_duplicate=False))
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
    return isinstance(module, torch.nn.Linear) or (
        hasattr(module, "in_features") and hasattr(module, "out_features")
    )


def _reason_to_skip(slot: _Slot) -> str | None:
    """Why a linear layer stays; None if it can be replaced."""
    module, parent = slot.module, slot.parent
    kind = type(module)
    if not isinstance(module, torch.nn.Linear):
        origin = "quantised layer" if "quant" in kind.__module__ else "layer of another type"
        return f"{origin} ({kind.__module__}.{kind.__qualname__})"
    if isinstance(parent, torch.nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weights directly"
    if isinstance(parent, torch.nn.TransformerEncoderLayer) and slot.key in ("linear1", "linear2"):
        return "the fast path of nn.TransformerEncoderLayer reads its weights directly"
    if parametrize.is_parametrized(module):
        return "parametrized: its weights are computed at each access"
    if kind is not torch.nn.Linear:
        return f"subclass of nn.Linear ({kind.__module__}.{kind.__qualname__})"
    if type(parent).__module__.partition(".")[0] == "peft" or hasattr(parent, "base_layer"):
        return "part of an adapter layer, which reads its weights directly"
    if "forward" in module.__dict__:
        return "its forward was overridden on the object"
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
        return f"its {name} has the layout {_short(parameter.layout)}"
    if parameter.dtype not in _WEIGHT_DTYPES:
        return f"its {name} is {_short(parameter.dtype)}"
    return None


def _is_plain(parameter: Tensor) -> bool:
    if type(parameter) is torch.nn.Parameter:
        return True
    # Tracing with fake tensors: the stand-in of a plain parameter.
    from torch._subclasses.fake_tensor import FakeTensor

    return type(parameter) is FakeTensor


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def _run(model: torch.nn.Module, inputs: Any) -> list[Tensor]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(inputs, Mapping):
                output = model(**inputs)
            elif isinstance(inputs, tuple):
                output = model(*inputs)
            else:
                output = model(inputs)
        # A copy, because a model may return a buffer that its next run overwrites.
        return [tensor.detach().clone() for tensor in _tensors(output)]
    finally:
        # The layers may have been swapped meanwhile, the modules themselves are the same.
        for module, flag in training.items():
            module.training = flag


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name))


def _compare(before: list[Tensor], after: list[Tensor]) -> Verification:
    if len(before) != len(after):
        raise RuntimeError(
            f"the model returned {len(before)} tensors before and {len(after)} after replacing"
        )
    difference = magnitude = 0.0
    for old, new in zip(before, after, strict=True):
        if old.shape != new.shape:
            raise RuntimeError(
                f"an output has shape {tuple(old.shape)} before and {tuple(new.shape)} after "
                "replacing"
            )
        if old.numel() == 0 or old.is_meta:
            continue
        old, new = _as_float64(old), _as_float64(new)
        # Equal infinities differ by nothing, and so do two NaNs in the same place.
        same = (old == new) | (old.isnan() & new.isnan())
        worst = torch.where(same, 0.0, (old - new).abs()).max().item()
        # Python's max() would drop a NaN that comes second.
        difference = worst if math.isnan(worst) else max(worst, difference)
        magnitude = max(magnitude, old.abs().nan_to_num(0.0, posinf=0.0).max().item())
        if math.isnan(difference):
            break
    return Verification(len(before), difference, magnitude)


def _as_float64(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()
