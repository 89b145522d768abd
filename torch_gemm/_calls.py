"""A call of an op without its data: what `explain`, `trace` and `tune` have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_gemm import _library
from torch_gemm.cards import Card
from torch_gemm.notation import plain


@dataclass(frozen=True)
class Operand:
    """A tensor's layout."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    alignment: int = 16  # bytes: the largest power of two, at most 16, that divides its address

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        """That of a tensor, which need not have data."""
        # Fake tensors have a device and no address; neither may other subclasses.
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
        address = tensor.data_ptr() if plain else 0
        address = address or tensor.storage_offset() * tensor.dtype.itemsize
        return cls(
            tuple(map(int, tensor.shape)),
            tuple(map(int, tensor.stride())),
            tensor.dtype,
            min(16, address & -address) or 16,
        )

    @property
    def bytes(self) -> int:
        """Of the elements that are there; those that a stride of 0 repeats count once."""
        elements = 1
        for size, stride in zip(self.sizes, self.strides, strict=True):
            elements *= size if stride or size == 0 else 1
        return elements * self.dtype.itemsize

    def meta(self) -> Tensor:
        """A tensor without data."""
        return self._strided("meta")

    def random(self, device: str) -> Tensor:
        """A tensor of normally distributed values."""
        return self._strided(device, lambda storage: storage.normal_())

    def _strided(self, device: str, fill: Any = None) -> Tensor:
        # Allocations begin at multiples of 16 bytes, those without memory at 0.
        offset = self.alignment % 16 // self.dtype.itemsize
        reach = sum(
            (size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)
        )
        elements = offset + 1 + reach if all(self.sizes) else offset
        storage = torch.empty(elements, dtype=self.dtype, device=device)
        if fill is not None:
            fill(storage)
        return storage.as_strided(self.sizes, self.strides, offset)


@dataclass(frozen=True)
class Call:
    """An op and the layouts of its operands. Equal calls are computed alike."""

    op: str  # "linear", "linear.out", "_linear_preact"
    operands: tuple[tuple[str, Operand], ...]  # by argument name; absent ones are left out
    options: tuple[tuple[str, Any], ...]  # by argument name; those with their default are left out

    @classmethod
    def of(cls, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """What `torch.ops.tgemm.<op>(*args, **kwargs)` calls."""
        schema = overload(op)._schema
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
        given.update(kwargs)
        operands, options = [], []
        for argument in schema.arguments:
            value = given.get(argument.name, argument.default_value)
            if isinstance(value, Tensor):
                operands.append((argument.name, Operand.of(value)))
            elif value != argument.default_value:
                options.append((argument.name, value))
        return cls(op, tuple(operands), tuple(options))

    @property
    def kind(self) -> str:
        """The op's public name: "matmul", "linear", "linear_glu" or "addmm"."""
        return self.op.removesuffix(".out").removeprefix("_").removesuffix("_preact")

    @property
    def bytes(self) -> int:
        """Of all operands and, where the op allocates it, the result."""
        total = sum(operand.bytes for _, operand in self.operands)
        return total if "out" in dict(self.operands) else total + self.result().bytes

    def tensors(self, make: Any) -> dict[str, Any]:
        """The arguments as keywords, each operand made by `make(operand)`."""
        return {name: make(operand) for name, operand in self.operands} | dict(self.options)

    def result(self) -> Operand:
        """The layout of the (first) result.

        Raises:
            RuntimeError: the op refuses the call; one sentence.
        """
        arguments = self.tensors(Operand.meta)
        with _disable_current_modes():
            result = overload(self.op)(**arguments)
        result = arguments.get("out", result)
        return Operand.of(result[0] if isinstance(result, tuple) else result)

    def plan(self, card: Card) -> dict[str, Any]:
        """How the call would run on a card: what the op `_plan` or `_linear_glu_plan` says.

        Raises:
            RuntimeError: the CUDA library is not loaded, or the op refuses the call.
        """
        with _disable_current_modes():
            return self._plan(self.tensors(Operand.meta), card.text())

    def plan_here(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """As `plan`, of operands on CUDA and their own device, which is asked for what a kernel takes."""
        with _disable_current_modes():
            return self._plan({**dict(self.options), **tensors}, None)

    def _plan(self, arguments: dict[str, Any], card: str | None) -> dict[str, Any]:
        preact = {"preact": True} if self.op.endswith("_preact") else {}
        if self.kind == "linear_glu":
            return _planned(
                torch.ops.tgemm._linear_glu_plan, self.kind, **arguments, **preact, card=card
            )
        names = {
            "matmul": ("a", "b"),
            "linear": ("input", "weight"),
            "addmm": ("mat1", "mat2"),
        }[self.kind]
        a, b = (arguments.pop(name) for name in names)
        if self.kind == "linear":
            b = b.t()
        if self.kind == "addmm":
            arguments["residual"] = arguments.pop("input")
        return _planned(torch.ops.tgemm._plan, self.kind, a, b, **arguments, **preact, card=card)

    def __str__(self) -> str:
        shapes = []
        for name, operand in self.operands:
            shapes.append(f"{name} {'x'.join(map(str, operand.sizes)) or 'scalar'}")
        options = [f"{name}={plain(value)}" for name, value in self.options]
        dtype = plain(self.operands[0][1].dtype)
        return f"{self.op}({', '.join(shapes + options)}) {dtype}"


def _planned(plan: Any, kind: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What an op that plans says; what it refuses, it refuses by the name of the op that a user knows."""
    try:
        return json.loads(plan(*args, **kwargs))
    except RuntimeError as error:
        prefix, colon, rest = str(error).partition(":")
        if not prefix.endswith("_plan"):
            raise
        raise RuntimeError(f"tgemm.{kind}{colon}{rest}") from error


def overload(op: str) -> Any:
    """The op of a name as in `_library.TENSOR_OPS`."""
    name, _, which = op.partition(".")
    return getattr(getattr(torch.ops.tgemm, name), which or "default")


# The ops that take tensors, and what they are called in `Call.op`.
OPS = {overload(op): op for op in _library.TENSOR_OPS}
