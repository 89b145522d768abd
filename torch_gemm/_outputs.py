"""Runs modules before and after a change, and says how far their outputs moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


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


def run(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a module returns in eval mode without gradients; its flags stay as they are."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            output = model(*args, **kwargs)
        # A copy, because a model may return a buffer that its next run overwrites.
        return [tensor.detach().clone() for tensor in tensors(output)]
    finally:
        # The layers may have been swapped meanwhile, the modules themselves are the same.
        for module, flag in training.items():
            module.training = flag


def tensors(output: Any) -> Iterator[Tensor]:
    """All tensors inside what a model returned, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors(getattr(output, field.name))


def compare(before: list[Tensor], after: list[Tensor]) -> Verification:
    """How far `after` is from `before`.

    Raises:
        RuntimeError: their number or shapes differ.
    """
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
