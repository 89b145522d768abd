"""Modules that run through the `tgemm` ops and are otherwise their torch counterparts."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_gemm import ops


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` computed by `torch.ops.tgemm.linear`, with an optional fused activation.

    Parameters, initialisation, `state_dict` and arguments are those of `torch.nn.Linear`, so either
    one loads the other's checkpoint. FP32 layers follow torch's own precision flags, read at each
    call (see `torch_gemm.linear`).

    Args:
        in_features: K, the size of the input's last dimension.
        out_features: N, the size of the output's last dimension.
        bias: whether to add a bias of shape (N,).
        device: where the parameters live.
        dtype: of the parameters: float16, bfloat16 or float32.
        activation: None, "relu", "gelu" (the erf form), "gelu_tanh" or "silu", applied to
            ``input @ weight.T + bias`` inside the kernel.

    Shape:
        input (..., K), output (..., N).

    Raises:
        ValueError: for an unknown activation.
    """

    activation: str | None
    static_weight: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation = _checked_activation(activation)
        self.static_weight = False

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, *, activation: str | None = None) -> Linear:
        """A layer that takes the place of `linear`: the same Parameter objects, nothing is copied.

        It also takes over the training flag, the buffers and the hooks, whose handles go on working.

        Args:
            linear: a `torch.nn.Linear`, or a subclass that leaves `forward` as it is.
            activation: as in the constructor.

        Raises:
            TypeError: if `linear` is not a `torch.nn.Linear` or computes something else.
            ValueError: for an unknown activation.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(
                f"from_linear expects a torch.nn.Linear, and got a {type(linear).__name__}"
            )
        if type(linear).forward is not torch.nn.Linear.forward:
            raise TypeError(
                f"from_linear expects the forward of torch.nn.Linear, and {type(linear).__name__} "
                "has one of its own"
            )
        layer = retyped(linear, cls)
        layer.activation = _checked_activation(activation)
        layer.static_weight = False
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """activation(input @ weight.T + bias); see the class."""
        return _apply(self, input, self.weight)

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks first."""
        _refuse_scripting(self)

    def extra_repr(self) -> str:
        """As torch's, followed by the activation if there is one."""
        return _with_activation(self, super().extra_repr())


class Conv1D(torch.nn.Module):
    """The linear layer of GPT-2 in transformers, `transformers.pytorch_utils.Conv1D`, through tgemm.

    Its weight is (in_features, out_features), the transpose of that of `torch.nn.Linear`; the kernels
    read it as it lies in memory. Made by `replace`; parameters and `state_dict` are the original's.
    """

    activation: str | None
    static_weight: bool

    @classmethod
    def from_conv1d(cls, layer: torch.nn.Module) -> Conv1D:
        """A layer that takes the place of `layer` and shares all its state, hooks included."""
        twin = retyped(layer, cls)
        twin.activation = None
        twin.static_weight = False
        return twin

    def forward(self, input: Tensor) -> Tensor:
        """activation(input @ weight + bias)."""
        return _apply(self, input, self.weight.t())

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks first."""
        _refuse_scripting(self)

    def extra_repr(self) -> str:
        """As transformers', followed by the activation if there is one."""
        return _with_activation(self, f"nf={self.nf}, nx={self.nx}")


def _apply(layer: Linear | Conv1D, input: Tensor, weight: Tensor) -> Tensor:
    """What a layer computes, with its weight as (out_features, in_features)."""
    return ops.linear(
        input,
        weight,
        layer.bias,
        activation=layer.activation,
        # A weight that is being trained is written by the optimiser between two calls.
        static_weight=layer.static_weight and not layer.weight.requires_grad,
    )


def _with_activation(layer: Linear | Conv1D, text: str) -> str:
    return text if layer.activation is None else f"{text}, activation={layer.activation}"


def retyped(module: torch.nn.Module, cls: type[torch.nn.Module]) -> Any:
    """A new module of type `cls` with the state of `module`, without calling any constructor.

    Parameters, buffers and submodules are the same objects in dictionaries of their own. The hook
    dictionaries are shared, because the handles that remove hooks know them by identity.
    """
    twin = cls.__new__(cls)
    twin.__dict__.update(module.__dict__)
    for registry in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        twin.__dict__[registry] = module.__dict__[registry].copy()
    return twin


def _refuse_scripting(module: torch.nn.Module) -> NoReturn:
    raise RuntimeError(
        f"torch_gemm.nn.{type(module).__name__} cannot be scripted; use torch.compile, torch.export or "
        "torch.jit.trace, or torch_gemm.restore(model) first"
    )


def _checked_activation(activation: str | None) -> str | None:
    if activation is not None and activation not in ops.ACTIVATIONS:
        known = ", ".join(ops.ACTIVATIONS)
        raise ValueError(f"activation is {activation!r}, and must be None or one of {known}")
    return activation
