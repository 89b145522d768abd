"""`explain`: which kernel would run a product, why, and what it should cost against the roofline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torch_gemm import _library, cards, notation, ops
from torch_gemm._calls import Call, Operand, overload
from torch_gemm.cards import Card

LAYOUTS = ("nn", "nt", "tn", "tt")
_OPS = ("matmul", "linear", "linear_glu", "addmm")
# Arguments that matmul does not have.
_OF_LINEAR = ("bias", "residual", "activation", "static_weight")


@dataclass(frozen=True)
class Candidate:
    """A kernel in one configuration, and a split of K: scored, or rejected with a reason."""

    plan: str  # "sm90:128x256,split_k=2": what `force_kernel` takes
    reason: str | None = None  # why it cannot run, as the end of a sentence; the rest is unset then
    predicted_us: float | None = None  # without launch overhead; the two terms below are included
    packing_us: float = 0.0  # copying operands
    partial_sums_us: float = 0.0  # split-K's traffic through the workspace
    packing: tuple[str, ...] = ()  # the operands, "a" or "b", that are copied before it runs
    workspace_bytes: int = 0
    split_k: int = 1
    tile: Mapping[str, Any] | None = None  # as an entry of "configs" in `torch_gemm.kernels`
    tiles: int = 0  # of the output
    ctas: int = 0  # that compute them, and the splits of their K
    slots: int = 0  # CTAs that the card holds at once

    @property
    def kernel_us(self) -> float | None:
        """The rest of the predicted time: the GEMM's own."""
        if self.predicted_us is None:
            return None
        return self.predicted_us - self.packing_us - self.partial_sums_us

    @property
    def waves(self) -> float:
        """How often the card is filled with CTAs."""
        return self.ctas / self.slots if self.slots else 0.0

    @property
    def sm_fill(self) -> float:
        """Share of the card's room for CTAs that is used until the last one ends."""
        return self.waves / math.ceil(self.waves) if self.ctas else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON; of a rejected one, the plan and the reason."""
        if self.reason is not None:
            return {"plan": self.plan, "reason": self.reason}
        found = dataclasses.asdict(self)
        del found["reason"]
        found["packing"] = list(self.packing)
        return {**found, "waves": round(self.waves, 4), "sm_fill": round(self.sm_fill, 4)}


@dataclass(frozen=True)
class Step:
    """One launch of a GEMM kernel, or a way to make one."""

    role: str  # "gemm"; of linear_glu "whole" (both weights at once), "gate" or "up"
    problem: (
        str  # "2048x4096x14336 nt bfloat16 -> bfloat16, bias": MxNxK, layouts, dtypes, epilogue
    )
    key: str  # all that selection sees of it: what a tuning file calls it
    m: int
    n: int
    k: int
    batch: int
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]  # those that can run, fastest first, then the rejected ones
    error: str | None = None  # why nothing was chosen
    tuned: bool = False  # chosen by a tuning file, not by prediction
    can_use_aten: bool = False  # whether torch computes the same in one op with one rounding
    resources: Mapping[str, Any] | None = None  # what the kernel takes of an SM, from its own GPU

    @property
    def scored(self) -> tuple[Candidate, ...]:
        """The candidates that can run, fastest first."""
        return tuple(candidate for candidate in self.candidates if candidate.reason is None)

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """Those that cannot, each with its reason."""
        return tuple(candidate for candidate in self.candidates if candidate.reason is not None)

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest of those that were not chosen."""
        others = [c for c in self.scored if self.chosen is None or c.plan != self.chosen.plan]
        return others[0] if others else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        chosen, runner_up = self.chosen, self.runner_up
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **found,
            "chosen": chosen and chosen.to_dict(),
            "runner_up": runner_up and runner_up.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "resources": self.resources and dict(self.resources),
        }


@dataclass(frozen=True)
class Roofline:
    """What the card's peak and its memory allow at best."""

    flops: float  # two a multiply-add
    bytes: float  # operands read once, result written once
    unit: str  # what multiplies: "tensor" (16-bit Tensor Cores), "tf32" or "fma"
    peak_tflops: (
        float | None
    )  # of that unit at the boost clock; None if it is not known of the card
    compute_us: float | None
    memory_us: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def bound_us(self) -> float:
        """No kernel can be faster."""
        return max(self.memory_us, self.compute_us or 0.0)

    @property
    def bound(self) -> str:
        """What limits: "compute" or "memory"."""
        return "compute" if (self.compute_us or 0.0) > self.memory_us else "memory"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        more = {"intensity": self.intensity, "bound": self.bound, "bound_us": self.bound_us}
        return {**dataclasses.asdict(self), **more}


@dataclass(frozen=True)
class Explanation:
    """How a product would run. Prints as text, shows as HTML in a notebook; `to_dict` is for JSON."""

    call: str  # "linear(input 2048x14336, weight 4096x14336) bfloat16"
    card: Card
    roofline: Roofline
    steps: tuple[Step, ...]  # the launches: one; of linear_glu one or two; none if nothing runs
    considered: tuple[Step, ...] = ()  # of linear_glu: what was not chosen
    copies: bool = False  # whether inputs or the output are copied because no GEMM can address them
    aten: bool = False  # a tuning file leaves it to ATen
    only_forced: tuple[str, ...] = ()  # kernels that run only when `force_kernel` names them
    built: bool = True  # whether this build of the library has code for such a card
    error: str | None = None  # why no kernel runs

    @property
    def chosen(self) -> Candidate | None:
        """What runs. Of two launches, their plans, times and workspaces together."""
        if self.error is not None or not self.steps:
            return None
        first, *others = [step.chosen for step in self.steps]
        for other in others:
            first = Candidate(
                plan=f"{first.plan} + {other.plan}",
                predicted_us=first.predicted_us + other.predicted_us,
                packing_us=first.packing_us + other.packing_us,
                partial_sums_us=first.partial_sums_us + other.partial_sums_us,
                packing=first.packing + other.packing,
                # One after the other, in memory of their own.
                workspace_bytes=max(first.workspace_bytes, other.workspace_bytes),
                tiles=first.tiles + other.tiles,
                ctas=first.ctas + other.ctas,
                slots=first.slots,
            )
        return first

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Of the first step: those that can run, fastest first, then the rejected ones."""
        steps = self.steps or self.considered
        return steps[0].candidates if steps else ()

    @property
    def runner_up(self) -> Candidate | None:
        """Of the first step."""
        return self.steps[0].runner_up if self.steps else None

    @property
    def predicted_us(self) -> float | None:
        """Time of the kernels, without launch overhead, microseconds; None if none runs."""
        return self.chosen.predicted_us if self.chosen else None

    @property
    def tflops(self) -> float | None:
        """At the predicted time."""
        return self.roofline.flops / self.predicted_us * 1e-6 if self.predicted_us else None

    @property
    def share_of_peak(self) -> float | None:
        """Of the unit that multiplies."""
        peak = self.roofline.peak_tflops
        return self.tflops / peak if self.tflops is not None and peak else None

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        chosen = self.chosen
        return {
            "call": self.call,
            "card": dataclasses.asdict(self.card),
            "chosen": chosen and chosen.to_dict(),
            "predicted_us": self.predicted_us,
            "tflops": self.tflops,
            "share_of_peak": self.share_of_peak,
            "roofline": self.roofline.to_dict(),
            "copies": self.copies,
            "aten": self.aten,
            "error": self.error,
            "only_forced": list(self.only_forced),
            "built": self.built,
            "steps": [step.to_dict() for step in self.steps],
            "considered": [step.to_dict() for step in self.considered],
        }

    def __str__(self) -> str:
        from torch_gemm.explaining.text import text_of

        return text_of(self)

    def _repr_html_(self) -> str:
        from torch_gemm.explaining.page import fragment

        return fragment(self)


def explain(
    *operands: Any,
    op: str | None = None,
    gpu: str | Card | None = None,
    dtype: torch.dtype | str | None = None,
    layout: str | None = None,
    **options: Any,
) -> Explanation:
    """How a call of an op would run: kernel, configuration, time against the roofline, and why.

    Nothing runs and no GPU is needed; tensors may be on any device, on meta or fake.

        explain(a, b)                                           # torch_gemm.matmul(a, b)
        explain(x, weight, bias, op="linear", activation="gelu")
        explain(x, gate_weight, up_weight, op="linear_glu", gpu="h100")
        explain("2048x4096x14336", dtype="bf16", layout="nt", gpu="h200")

    Args:
        operands: what the op takes; or one shape, "MxNxK" or "BxMxNxK" or those numbers as a tuple, for
            operands that it describes.
        op: "matmul", "linear", "linear_glu" or "addmm". None: linear if there is a bias, a residual, an
            activation or a static weight, otherwise matmul.
        gpu: a described card ("h200"; all: `torch_gemm.cards.DESCRIBED`), or a `torch_gemm.cards.Card`.
            None: the GPU that the operands are on, or else this machine's.
        dtype: of a shape's operands, "bf16" or torch.bfloat16, for instance; float16 by default.
        layout: of a shape's operands: "n" for row-major, "t" for its transpose, A's letter, then B's.
            None: both K-major for linear ("nt": the weight is (N, K)), "nn" otherwise.
        options: the op's other arguments. With a shape, `bias=True` and `residual=True` describe those
            too. A precision that is not given is what torch's own flags ask for, as in the wrappers.

    Returns:
        The explanation. With operands that no kernel takes, its `error` says so.

    Raises:
        TypeError: an argument that the op does not have, or of the wrong type.
        ValueError: an unknown op, GPU, dtype, layout or shape; or no GPU was named and there is none.
        RuntimeError: shapes and dtypes do not fit, or the CUDA library, which holds the table of
            kernels, is not loaded; one sentence.
    """
    if op is None:
        given = (options.get(name) for name in _OF_LINEAR)
        op = "matmul" if all(value is None or value is False for value in given) else "linear"
    if op not in _OPS:
        raise ValueError(f"explain: op is {op!r}, and must be one of {', '.join(_OPS)}")
    if _library.cuda_missing is not None:
        raise RuntimeError(_library.cuda_missing)
    if len(operands) == 1 and not isinstance(operands[0], Tensor):
        operands, options = _described_operands(op, operands[0], dtype, layout, options)
    elif dtype is not None or layout is not None:
        raise TypeError("explain: dtype and layout describe a shape; tensors have their own")
    arguments = _arguments(op, operands, options)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    card, here = _card_for(gpu, tensors)
    first = next(iter(tensors.values()))
    if arguments.get("precision") is None and first.dtype is torch.float32:
        arguments["precision"] = ops._cuda_fp32_precision()
    call = Call.of(op, (), arguments)
    result = call.result()  # checks it, with the sentences of the op itself
    plan = call.plan_here(tensors) if here else call.plan(card)
    return _explanation(call, result, card, plan)


def explain_call(call: Call, card: Card) -> Explanation:
    """The explanation of a call that has been made.

    Raises:
        RuntimeError: the CUDA library is not loaded.
    """
    return _explanation(call, call.result(), card, call.plan(card))


def _described_operands(
    op: str,
    shape: object,
    dtype: torch.dtype | str | None,
    layout: str | None,
    options: dict[str, Any],
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    try:
        *batch, m, n, k = notation.sizes_of(shape, least=0)
        dtype = torch.float16 if dtype is None else notation.dtype_of(dtype)
    except (TypeError, ValueError) as error:
        raise type(error)(f"explain: {error}") from None
    linear = op.startswith("linear")
    layout = layout or ("nt" if linear else "nn")
    if layout not in LAYOUTS:
        raise ValueError(f"explain: layout is {layout!r}, and must be nn, nt, tn or tt")
    if batch and op != "matmul":
        raise ValueError(f"explain: {op} has no batch; write MxNxK with M for all rows")

    def matrix(rows: int, columns: int, letter: str) -> Tensor:
        if letter == "n":
            return torch.empty(*batch, rows, columns, dtype=dtype, device="meta")
        return torch.empty(*batch, columns, rows, dtype=dtype, device="meta").mT

    a, b = matrix(m, k, layout[0]), matrix(k, n, layout[1])
    options = dict(options)
    result = options.get("out_dtype") or dtype
    for name, size in (
        ("bias", (n,)),
        ("gate_bias", (n,)),
        ("up_bias", (n,)),
        ("residual", (m, n)),
    ):
        if isinstance(options.get(name), bool):
            wanted = options.pop(name)
            if wanted:
                options[name] = torch.empty(
                    size, dtype=dtype if len(size) == 1 else result, device="meta"
                )
    if op == "addmm":
        return (torch.empty(m, n, dtype=result, device="meta"), a, b), options
    return (a, b.mT if linear else b, *([b.mT] if op == "linear_glu" else [])), options


def _arguments(op: str, operands: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the op by name.

    Raises:
        TypeError: there are too many, too few, or some that it does not have.
    """
    schema = overload(op)._schema.arguments
    names = [argument.name for argument in schema]
    positional = [argument.name for argument in schema if not argument.kwarg_only]
    if len(operands) > len(positional):
        raise TypeError(f"explain: {op} takes {', '.join(positional)}, and got {len(operands)}")
    arguments = dict(zip(positional, operands, strict=False))
    for name, value in options.items():
        if name not in names or name in arguments:
            raise TypeError(
                f"explain: {op} takes {', '.join(names)}; {name} is not, or twice, given"
            )
        arguments[name] = value
    for argument in schema:
        _check_argument(op, argument, arguments.get(argument.name, argument.default_value))
    return arguments


# By the type in the schema: what a value has to be, and how a sentence calls it. Of the only integer of these
# schemas, out_dtype, Python sees a dtype.
_ARGUMENT_TYPES = {
    "Tensor": (Tensor, "a Tensor"),
    "str": (str, "a str"),
    "bool": (bool, "a bool"),
    "float": (Real, "a number"),
    "int": (torch.dtype, "a torch.dtype"),
}


def _check_argument(op: str, argument: Any, value: Any) -> None:
    """Refuses in a sentence what the op would refuse in six lines, or without a word of which operand it is."""
    kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
    if value is None and kind != str(argument.type):
        return
    expected, words = _ARGUMENT_TYPES[kind]
    if not isinstance(value, expected):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise TypeError(f"explain: {argument.name} of {op} must be {words}, and is {found}")
    if not isinstance(value, Tensor):
        return
    if value.is_nested:
        raise RuntimeError(
            f"tgemm.{op}: nested tensors are not supported; use padded or packed ones"
        )
    if value.layout is not torch.strided:
        raise RuntimeError(
            f"tgemm.{op}: {argument.name} has layout {notation.plain(value.layout)}; only strided tensors "
            "are supported"
        )
    if value.is_quantized:
        raise RuntimeError(
            f"tgemm.{op}: {argument.name} has dtype {notation.plain(value.dtype)}, which is not supported; "
            "use float16, bfloat16 or float32"
        )


def _card_for(gpu: str | Card | None, tensors: Mapping[str, Tensor]) -> tuple[Card, bool]:
    """The card, and whether it is the one that the operands are on."""
    if gpu is not None:
        return cards.named(gpu), False
    first = next(iter(tensors.values()))
    if first.is_cuda and torch.cuda.is_available():
        real = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors.values())
        return cards.present(first.device.index), real
    card = cards.default()
    if card is None:
        raise ValueError(
            f"explain: there is no GPU here; name one to explain for: {', '.join(cards.DESCRIBED)}"
        )
    return card, False


def _roofline(call: Call, result: Operand, card: Card) -> Roofline:
    names = {"matmul": "a", "linear": "input", "linear_glu": "input", "addmm": "mat1"}
    operands, options = dict(call.operands), dict(call.options)
    a = operands[names[call.kind]]
    outputs = math.prod(result.sizes)
    flops = 2.0 * outputs * a.sizes[-1] * (2 if call.kind == "linear_glu" else 1)
    precision = options.get("precision") or "ieee"
    unit = "tensor"
    if a.dtype is torch.float32:
        unit = {"ieee": "fma", "tf32": "tf32", "3xtf32": "tf32"}.get(precision, "tensor")
    peak = card.peaks().get(unit)
    if peak is not None and precision == "3xtf32" and a.dtype is torch.float32:
        peak /= 3
    total = float(call.bytes)
    return Roofline(
        flops=flops,
        bytes=total,
        unit=unit,
        peak_tflops=peak,
        compute_us=flops / peak * 1e-6 if peak else None,
        memory_us=total / card.memory_bytes_per_us,
    )


def _explanation(call: Call, result: Operand, card: Card, plan: Mapping[str, Any]) -> Explanation:
    from torch_gemm import kernels

    only_forced = tuple(kernel["name"] for kernel in kernels() if not kernel["automatic"])
    common = {
        "call": str(call),
        "card": card,
        "roofline": _roofline(call, result, card),
        "only_forced": only_forced,
        "built": cards.is_built_for(card),
    }
    if "candidates" not in plan and "steps" not in plan:  # nothing for these kernels to do
        return Explanation(**common, steps=(), error=plan["error"])
    roles = [role for role in ("whole", "gate", "up") if role in plan]
    found = {role: _step(role, plan[role]) for role in roles} or {"gemm": _step("gemm", plan)}
    running = plan["steps"] if roles else ["gemm"]
    steps = tuple(found[role] for role in running)
    errors = [step.error for step in (steps or tuple(found.values())) if step.chosen is None]
    return Explanation(
        **common,
        steps=() if errors else steps,
        considered=tuple(step for step in found.values() if errors or step not in steps),
        copies=plan["copies"],
        aten=bool(plan.get("aten")),
        error=errors[0] if errors else None,
    )


def _step(role: str, selection: Mapping[str, Any]) -> Step:
    candidates = [_candidate(entry) for entry in selection["candidates"]]
    scored = [candidate for candidate in candidates if candidate.reason is None]
    rejected = [candidate for candidate in candidates if candidate.reason is not None]
    chosen = next((c for c in scored if c.plan == selection.get("plan")), None)
    return Step(
        role=role,
        problem=selection["problem"],
        key=selection["key"],
        m=selection["m"],
        n=selection["n"],
        k=selection["k"],
        batch=selection["batch"],
        chosen=chosen,
        candidates=(*sorted(scored, key=lambda candidate: candidate.predicted_us), *rejected),
        error=selection.get("error"),
        tuned=selection.get("tuned", False),
        can_use_aten=selection.get("can_use_aten", False),
        resources=selection.get("resources"),
    )


def _candidate(entry: Mapping[str, Any]) -> Candidate:
    if "reason" in entry:
        return Candidate(entry["plan"], entry["reason"])
    return Candidate(
        plan=entry["plan"],
        predicted_us=entry["predicted_us"],
        packing_us=entry.get("packing_us", 0.0),
        partial_sums_us=entry.get("partial_sums_us", 0.0),
        packing=tuple(entry.get("packing", ())),
        workspace_bytes=entry["workspace_bytes"],
        split_k=entry["split_k"],
        tile=entry["config"],
        tiles=entry["tiles"],
        ctas=entry["ctas"],
        slots=entry["slots"],
    )
