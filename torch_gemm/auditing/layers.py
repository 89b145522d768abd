"""The audit of a model: each linear layer's products, by tgemm and by torch, beside FP64."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from torch_gemm import _outputs, fusion, nn, numerics, ops, replacement
from torch_gemm.auditing.measures import Census, Errors, Product, compare
from torch_gemm.console import first_line
from torch_gemm.notation import plain


@dataclass
class LayerAudit:
    """One layer, over all of its calls. `what` is a formula of what its kernel computes."""

    name: str
    what: str
    calls: int = 0
    shapes: list[tuple[int, int, int]] = field(default_factory=list)  # M, N, K
    dtype: torch.dtype | None = None
    precision: str | None = None  # of FP32 operands
    kernels: list[str] = field(default_factory=list)  # empty on the CPU, where ATen computes
    c: float = 0.0  # the largest constant of the contract among the kernels
    inputs: Census = field(default_factory=Census)
    weights: Census = field(default_factory=Census)  # biases included
    outputs: Census = field(default_factory=Census)  # of tgemm
    tgemm: Errors = field(default_factory=Errors)
    torch: Errors = field(default_factory=Errors)

    @property
    def ok(self) -> bool:
        """Whether no element of tgemm's outputs breaks the numerics contract."""
        return self.tgemm.ok

    @property
    def rms_ratio(self) -> float | None:
        """Tgemm's RMS error over torch's; None where torch has none."""
        return self.tgemm.rms / self.torch.rms if self.torch.rms else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "what": self.what,
            "calls": self.calls,
            "shapes": [list(shape) for shape in self.shapes],
            "dtype": plain(self.dtype),
            "precision": self.precision,
            "kernels": self.kernels,
            "c": self.c,
            "verdict": self.tgemm.verdict,
            "rms_ratio": self.rms_ratio,
            "inputs": vars(self.inputs),
            "weights": vars(self.weights),
            "outputs": vars(self.outputs),
            "tgemm": self.tgemm.to_dict(),
            "torch": self.torch.to_dict(),
        }


@dataclass(frozen=True)
class Call:
    """What a layer multiplies, with weights as in `torch.nn.Linear`."""

    x: Tensor  # (..., K)
    weight: Tensor  # (N, K)
    bias: Tensor | None = None
    residual: Tensor | None = None
    up_weight: Tensor | None = None
    up_bias: Tensor | None = None
    activation: str | None = None

    def under_autocast(self) -> Call:
        """With the operands that the op sees: autocast casts them first."""
        kind = self.x.device.type
        if not torch.is_autocast_enabled(kind) or self.x.dtype == torch.float64:
            return self
        dtype = torch.get_autocast_dtype(kind)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(dtype) for name, value in tensors.items()})

    def tgemm(self, **options: Any) -> Tensor:
        """The result of tgemm's op."""
        if self.up_weight is not None:
            operands = (self.x, self.weight, self.up_weight, self.bias, self.up_bias)
            return ops.linear_glu(*operands, activation=self.activation, **options)
        operands = (self.x, self.weight, self.bias, self.residual)
        return ops.linear(*operands, activation=self.activation, **options)

    def stock(self) -> Tensor:
        """The same in torch, one op after the other."""
        linear = torch.nn.functional.linear
        out = numerics.activate(linear(self.x, self.weight, self.bias), self.activation)
        if self.up_weight is not None:
            return out * linear(self.x, self.up_weight, self.up_bias)
        return out if self.residual is None else out + self.residual

    def kernel(self, precision: str | None) -> str | None:
        """The kernel that tgemm chooses; None on the CPU."""
        if not self.x.is_cuda:
            return None
        options = {"activation": self.activation, "precision": precision}
        if self.up_weight is not None:
            operands = (self.x, self.weight, self.up_weight, self.bias, self.up_bias)
            plan = torch.ops.tgemm._linear_glu_plan(*operands, **options)
        else:
            operands = (self.x, self.weight.t(), self.bias, self.residual)
            plan = torch.ops.tgemm._plan(*operands, **options)
        return json.loads(plan).get("plan")


# What a hook sees of a module's call to the call of a product, or None where the module's parts are called.
Reader = Callable[[Any, tuple[Any, ...], dict[str, Any]], Call | None]


def _activation_of(module: torch.nn.Module) -> str | None:
    return module.activation if isinstance(module, nn.Linear | nn.Conv1D) else None


def _read_linear(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    x = args[0] if args else kwargs["input"]
    return Call(x, module.weight, module.bias, activation=_activation_of(module))


def _read_conv1d(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    x = args[0] if args else next(iter(kwargs.values()))
    return Call(x, module.weight.t(), module.bias, activation=_activation_of(module))


def _read_gated(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    (x,) = module._arguments(args, kwargs)
    weight, up_weight, bias, up_bias = module.operands()
    return Call(x, weight, bias, None, up_weight, up_bias, module.glu_activation)


def _read_residual(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    x, residual = module._arguments(args, kwargs)
    if not module.fuses(x, residual):
        return None
    dense = module._modules[module.dense_name]
    return Call(x, dense.weight, dense.bias, residual)


@dataclass(frozen=True)
class Target:
    """A module whose calls are products, and the layers that it computes itself."""

    name: str
    module: torch.nn.Module
    read: Reader
    what: str
    layers: tuple[torch.nn.Module, ...] = ()


def find(model: torch.nn.Module) -> tuple[list[Target], list[replacement.Skipped]]:
    """The layers of a model that can be audited, and the linear layers that cannot, with the reason."""
    targets, skipped, seen = [], [], set()
    slots = [replacement._Slot("model", torch.nn.Module(), "model", model)]
    for slot in (*slots, *replacement._slots(model)):
        module = slot.module
        if id(module) in seen:
            continue
        seen.add(id(module))
        target, reason = _target_of(slot.name, module), None
        if isinstance(module, nn.Linear | nn.Conv1D):
            reasons = (replacement._reason_against(module, name) for name in ("weight", "bias"))
            reason = next(filter(None, reasons), None)
        elif replacement._is_linear(module):
            reason = replacement._reason_to_skip(slot)
        if reason is not None:
            skipped.append(replacement.Skipped(slot.name, reason))
        elif target is not None:
            targets.append(target)
    return targets, skipped


def _target_of(name: str, module: torch.nn.Module) -> Target | None:
    if isinstance(module, fusion.GatedMLP):
        keys = filter(None, (module.gate_name, module.up_name))
        layers = tuple(module._modules[key] for key in keys)
        what = f"{module.glu_activation}(gate) * up"
        return Target(f"{name}.{module.gate_name}", module, _read_gated, what, layers)
    if isinstance(module, fusion.ResidualNorm):
        dense = module._modules[module.dense_name]
        what = "linear + residual"
        return Target(f"{name}.{module.dense_name}", module, _read_residual, what, (dense,))
    activation = _activation_of(module)
    what = f"{activation}(linear)" if activation else "linear"
    if isinstance(module, torch.nn.Linear):
        return Target(name, module, _read_linear, what)
    if isinstance(module, nn.Conv1D) or replacement._is_conv1d(module):
        return Target(name, module, _read_conv1d, what)
    return None


class Recorder:
    """Audits the calls of targets while a model runs; `rows` limits those that are compared with FP64."""

    def __init__(self, targets: list[Target], rows: int | None) -> None:
        self.rows = rows
        self.targets = targets
        self.layers = [LayerAudit(target.name, target.what) for target in targets]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks that are gone when the block ends."""
        handles = []
        try:
            for target, layer in zip(self.targets, self.layers, strict=True):
                # After the user's hooks, which may change the input, and before the module, which may
                # write into it.
                hook = self._hook(target, layer)
                handles.append(target.module.register_forward_pre_hook(hook, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, target: Target, layer: LayerAudit) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = target.read(module, args, kwargs)
            if call is None or not isinstance(call.x, Tensor):  # the module will say so itself
                return
            if call.x.is_meta or call.weight.is_meta:
                raise AuditError(
                    f"{'the input' if call.x.is_meta else 'the weight'} of layer {layer.name} is on the meta "
                    "device, and there are no numbers to audit"
                )
            try:
                self._audit(layer, call)
            except torch.OutOfMemoryError as error:
                raise AuditError(
                    f"the audit of layer {layer.name} ran out of memory: {first_line(error)}; rows=256 "
                    "compares fewer rows of each call with FP64"
                ) from error
            except RuntimeError as error:
                raise AuditError(
                    f"the audit of layer {layer.name} failed: {first_line(error)}"
                ) from error

        return hook

    def _audit(self, layer: LayerAudit, call: Call) -> None:
        # `override`, where the model runs under it, must not take what is torch's part to tgemm.
        with torch.no_grad(), _python_dispatch._disable_current_modes():
            call = call.under_autocast()
            with torch.autocast(call.x.device.type, enabled=False):
                self._compare(layer, call)

    def _compare(self, layer: LayerAudit, call: Call) -> None:
        precision = ops.fp32_precision(call.x)
        kernel = call.kernel(precision)
        actual, stock = call.tgemm(precision=precision), call.stock()
        n, k = call.weight.shape
        m = actual.numel() // n if n else 0
        layer.dtype, layer.precision = call.x.dtype, precision
        c = numerics.accuracy_constant(kernel, k)
        layer.c = max(layer.c, c)
        if (m, n, k) not in layer.shapes:
            layer.shapes.append((m, n, k))
        if kernel is not None and kernel not in layer.kernels:
            layer.kernels.append(kernel)
        layer.inputs.add(call.x)
        if layer.calls == 0:
            for tensor in (call.weight, call.bias, call.up_weight, call.up_bias):
                if tensor is not None:
                    layer.weights.add(tensor)
        layer.outputs.add(actual)

        chosen = self._rows_of(m, call.x.device)

        def picked(tensor: Tensor, columns: int) -> Tensor:
            flat = tensor.reshape(m, columns)
            return flat if chosen is None else flat[chosen]

        if m and n:
            residual = call.residual
            product = Product(
                picked(call.x, k),
                call.weight.t(),
                call.bias,
                None if residual is None else picked(residual, n),
                None if call.up_weight is None else call.up_weight.t(),
                call.up_bias,
                call.activation,
                precision,
                c,
            )
            leading = actual.shape[:-1]

            def index_of(row: int) -> tuple[int, ...]:
                at = row if chosen is None else int(chosen[row])
                return tuple(int(i) for i in torch.unravel_index(torch.tensor(at), leading))

            outs = [(layer.tgemm, picked(actual, n)), (layer.torch, picked(stock, n))]
            compare(product, outs, layer.calls, index_of)
        layer.calls += 1

    def _rows_of(self, m: int, device: torch.device) -> Tensor | None:
        """Evenly spaced rows, the first and the last among them; None: all."""
        if self.rows is None or m <= self.rows:
            return None
        return torch.linspace(0, m - 1, self.rows, dtype=torch.float64, device=device).long()


class AuditError(RuntimeError):
    """An audit that could not be made, in one sentence."""


def run(
    model: torch.nn.Module, inputs: Any, rows: int | None
) -> tuple[list[LayerAudit], list[replacement.Skipped]]:
    """Runs a model once, in eval mode without gradients; flags and hooks end as they were.

    Returns:
        The audited layers, in the order of the model, and the linear layers without an audit.
    """
    targets, skipped = find(model)
    if not targets:
        raise AuditError(
            f"{type(model).__name__} has no linear layer to audit"
            + (f": {skipped[0].name}: {skipped[0].reason}" if skipped else "")
        )
    recorder = Recorder(targets, rows)
    args, kwargs = replacement._call_arguments(inputs)
    try:
        with recorder.watching():
            _outputs.run(model, args, kwargs)
    except AuditError:
        raise
    except torch.OutOfMemoryError as error:
        raise AuditError(f"the model ran out of memory: {first_line(error)}") from error
    except Exception as error:
        raise AuditError(f"the model raised {type(error).__name__}: {first_line(error)}") from error
    # A fused block computes these itself.
    inside = {id(part) for target in targets for part in target.layers}
    audited = [layer for layer in recorder.layers if layer.calls]
    names = {layer.name for layer in audited}
    for target, layer in zip(targets, recorder.layers, strict=True):
        if layer.name not in names and id(target.module) not in inside:
            reason = "the model did not call it as a module on these inputs"
            skipped.append(replacement.Skipped(layer.name, reason))
    if not audited:
        raise AuditError(f"{type(model).__name__} called none of its linear layers on these inputs")
    return audited, skipped
