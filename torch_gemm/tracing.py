"""`trace`: what a model asks of torch_gemm, call by call: shapes, kernels, predicted and measured time.

A TorchDispatchMode records, because it stands where the ops are called, below autograd, and costs nothing
where it is not active.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gemm import _library, cards
from torch_gemm._calls import OPS, Call
from torch_gemm.cards import Card
from torch_gemm.console import write_file
from torch_gemm.explaining.explanation import Explanation, explain_call
from torch_gemm.overriding import Products

# By which a profiler that wants NVTX ranges makes itself known: the first is NVTX's own
# (nvtx3/README), the other Nsight Systems'.
_PROFILERS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


@dataclass(frozen=True)
class TracedCall:
    """One call of an op. Times are microseconds."""

    call: Call
    device: str  # of the operands: "cuda:0", "cpu"
    thread: int
    host_start_us: float  # since the trace was made
    host_us: float  # what the call took on the host
    gpu_start_us: float | None = None  # since the first call on that GPU
    gpu_us: float | None = None  # between two events around the call


@dataclass(frozen=True)
class TracedRow:
    """All calls that are computed alike. Times are microseconds."""

    call: Call
    device: str
    kernel: str  # the plan, or what else computes it: "ATen"
    count: int
    predicted_us: float | None  # of one call
    measured_us: float | None  # median between events; None without them
    host_us: float  # median on the host
    explanation: Explanation | None  # how the kernel was chosen; None on the CPU

    @property
    def total_us(self) -> float | None:
        """Of all calls: measured or else predicted."""
        one = self.predicted_us if self.measured_us is None else self.measured_us
        return None if one is None else one * self.count

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the explanation is reduced to the problem."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del found["explanation"]
        steps = self.explanation.steps if self.explanation else ()
        more = {"problems": [step.problem for step in steps], "total_us": self.total_us}
        return {**found, "call": str(self.call), **more}


class trace:  # noqa: N801  (used like a function)
    """Records every call of the ops in a block: ``with torch_gemm.trace() as t: model(x)``.

    Seen are the ops themselves, their `out` forms, and what `replace`, `override` and autograd make of
    them; inside a function that torch.compile has compiled, the calls that its code makes (open the block
    around such a function, since inside it breaks the graph). Not seen are
    replays of CUDA graphs (the capture is), packages that run outside Python, and other threads, unless
    they enter the same object. Blocks may be nested, each records; an object may be entered again and
    goes on. Outside a block nothing is recorded and calls cost what they always do.

    Events around calls on CUDA measure them where they run. A GPU that waits for the host is measured
    waiting: small calls look slow that a CUDA graph would run at once.

    Args:
        gpu: a described card (see `explain`), to predict for calls that are not on CUDA.
        events: whether to measure calls on CUDA.
        nvtx: whether to open an NVTX range around each call. None: if a profiler is attached.

    Raises:
        TypeError, ValueError: the GPU is unknown.
        RuntimeError: a GPU is named, but the CUDA library, which knows the kernels, is not loaded.
    """

    def __init__(
        self, *, gpu: str | Card | None = None, events: bool = True, nvtx: bool | None = None
    ) -> None:
        if gpu is not None and _library.cuda_missing is not None:
            raise RuntimeError(_library.cuda_missing)
        self._card = None if gpu is None else cards.named(gpu)
        self._events = events
        self._nvtx = any(map(os.environ.get, _PROFILERS)) if nvtx is None else nvtx
        self._lock = threading.Lock()
        self._modes = threading.local()
        self._start = time.perf_counter()
        # With the events that measure it, if any.
        self._recorded: list[tuple[TracedCall, _Events | None]] = []
        self._explanations: dict[tuple[Call, str], Explanation | None] = {}
        self._origins: dict[str, torch.cuda.Event] = {}

    def __enter__(self) -> trace:
        # Below `override`, whose mode otherwise gives its products to the modes below this one.
        stack = _python_dispatch._get_current_dispatch_mode_stack()
        overriding = [index for index, mode in enumerate(stack) if isinstance(mode, Products)]
        mode = _Recorder(self)
        with _without_modes(len(stack) - min(overriding, default=len(stack))):
            mode.__enter__()
        self._open().append(mode)
        return self

    def __exit__(self, *exception: object) -> None:
        mode = self._open().pop()
        stack = _python_dispatch._get_current_dispatch_mode_stack()
        with _without_modes(len(stack) - 1 - stack.index(mode)):
            mode.__exit__(*exception)

    def _open(self) -> list[TorchDispatchMode]:
        if not hasattr(self._modes, "stack"):
            self._modes.stack = []
        return self._modes.stack

    @property
    def calls(self) -> list[TracedCall]:
        """Every call, in the order in which they began; waits for those that still run."""
        with self._lock:
            for index, (call, events) in enumerate(self._recorded):
                if events is not None:
                    self._recorded[index] = (events.measured(call), None)
            return sorted((call for call, _ in self._recorded), key=lambda call: call.host_start_us)

    def rows(self) -> list[TracedRow]:
        """One row for all calls that are computed alike, in the order of their first."""
        groups: dict[tuple[Call, str], list[TracedCall]] = {}
        for call in self.calls:
            groups.setdefault((call.call, call.device), []).append(call)
        return [self._row(key, calls) for key, calls in groups.items()]

    def _row(self, key: tuple[Call, str], calls: list[TracedCall]) -> TracedRow:
        explanation = self._explanations[key]
        gpu_us = [call.gpu_us for call in calls if call.gpu_us is not None]
        return TracedRow(
            call=key[0],
            device=key[1],
            kernel=_kernel(explanation),
            count=len(calls),
            predicted_us=explanation and explanation.predicted_us,
            measured_us=statistics.median(gpu_us) if gpu_us else None,
            host_us=statistics.median(call.host_us for call in calls),
            explanation=explanation,
        )

    def table(self) -> str:
        """The rows for people, those that take longest first, and their sums."""
        rows = sorted(self.rows(), key=lambda row: -(row.total_us or 0.0))
        heads = ("problem", "on", "kernel", "count", "predicted us", "measured us", "host us")
        cells = [heads, *(_cells(row) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for row in cells:
            aligned = [
                text.ljust(width) if column < 3 else text.rjust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(aligned).rstrip())
        totals = [row.total_us for row in rows if row.total_us is not None]
        total = f"{sum(row.count for row in rows)} calls of {len(rows)} kinds"
        if totals:
            total += f", {sum(totals):.1f} us on the GPU"
        return "\n".join([*lines, total])

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """The rows, for JSON."""
        return {"rows": [row.to_dict() for row in self.rows()]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes every call in Chrome's trace format, which https://ui.perfetto.dev opens.

        Raises:
            OSError: the file cannot be written; one sentence.
        """
        write_file(Path(path), (json.dumps(self._chrome()) + "\n").encode())

    def _chrome(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = [_process(0, "host")]
        gpus: dict[str, int] = {}
        for call in self.calls:
            explanation = self._explanations[call.call, call.device]
            event = {
                "name": call.call.op,
                "cat": "tgemm",
                "ph": "X",
                "args": {
                    "call": str(call.call),
                    "device": call.device,
                    "kernel": _kernel(explanation),
                    "problems": [s.problem for s in explanation.steps] if explanation else [],
                    "predicted_us": explanation and explanation.predicted_us,
                },
            }
            host = {"pid": 0, "tid": call.thread, "ts": call.host_start_us, "dur": call.host_us}
            found.append({**event, **host})
            if call.gpu_us is not None:
                if call.device not in gpus:
                    gpus[call.device] = len(gpus) + 1
                    found.append(_process(gpus[call.device], call.device))
                pid = gpus[call.device]
                gpu = {"pid": pid, "tid": 0, "ts": call.gpu_start_us, "dur": call.gpu_us}
                found.append({**event, **gpu, "name": _kernel(explanation)})
        return {"traceEvents": found, "displayTimeUnit": "ns"}

    # --- What the mode calls

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call.of(OPS[function], args, kwargs)
        device = next(
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
        ).device
        key = (call, str(device))
        if key not in self._explanations:
            self._explanations.setdefault(key, self._explain(call, device))
        events = self._open_events(device)
        start = time.perf_counter()
        with self._range(call):
            result = function(*args, **kwargs)
        host_us = (time.perf_counter() - start) * 1e6
        if events is not None:
            events.close()
        traced = TracedCall(
            call=call,
            device=key[1],
            thread=threading.get_native_id(),
            host_start_us=(start - self._start) * 1e6,
            host_us=host_us,
        )
        with self._lock:
            self._recorded.append((traced, events))
        return result

    def _explain(self, call: Call, device: torch.device) -> Explanation | None:
        card = self._card
        if device.type == "cuda" and torch.cuda.is_available():
            card = cards.present(device.index)
        if card is None:
            return None
        try:
            return explain_call(call, card)
        except RuntimeError:  # integers, which are the CPU's alone
            return None

    def _open_events(self, device: torch.device) -> _Events | None:
        # In a capture, events would become part of the graph.
        if not self._events or device.type != "cuda" or not torch.cuda.is_initialized():
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(device)
        with self._lock:
            if str(device) not in self._origins:
                self._origins[str(device)] = _recorded_event(stream)
            origin = self._origins[str(device)]
        return _Events(stream, origin, _recorded_event(stream))

    def _range(self, call: Call) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(str(call)) if self._nvtx else contextlib.nullcontext()


# As in overriding.py: without importing all of dynamo.
trace.__enter__._torchdynamo_disable = True  # type: ignore[attr-defined]
trace.__enter__._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "torch.compile cannot trace torch_gemm.trace(): open the block around the compiled function"
)


class _Recorder(TorchDispatchMode):
    """Passes every call on, and those of the ops through a trace."""

    def __init__(self, owner: trace) -> None:
        super().__init__()
        self._owner = owner

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function stays compiled; what it calls is seen all the same."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # While torch.compile traces a function, nothing is computed.
        if func not in OPS or torch._guards.TracingContext.try_get() is not None:
            return func(*args, **(kwargs or {}))
        return self._owner._run(func, args, kwargs or {})


@contextlib.contextmanager
def _without_modes(count: int) -> Iterator[None]:
    """Takes that many modes from the top of this thread's stack, for as long as the block lasts."""
    taken = [_python_dispatch._pop_mode() for _ in range(count)]
    try:
        yield
    finally:
        for mode in reversed(taken):
            _python_dispatch._push_mode(mode)


@dataclass
class _Events:
    """Around a call on CUDA."""

    stream: torch.cuda.Stream
    origin: torch.cuda.Event
    start: torch.cuda.Event
    end: torch.cuda.Event | None = None

    def close(self) -> None:
        self.end = _recorded_event(self.stream)

    def measured(self, call: TracedCall) -> TracedCall:
        """The call with its times; waits for its end."""
        self.origin.synchronize()  # on another stream, perhaps
        self.end.synchronize()
        return dataclasses.replace(
            call,
            gpu_start_us=self.origin.elapsed_time(self.start) * 1e3,
            gpu_us=self.start.elapsed_time(self.end) * 1e3,
        )


def _recorded_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _kernel(explanation: Explanation | None) -> str:
    if explanation is None:
        return "ATen"
    if explanation.aten:
        return "ATen (tuned)"
    return explanation.chosen.plan if explanation.chosen else f"none: {explanation.error}"


def _cells(row: TracedRow) -> tuple[str, ...]:
    steps = row.explanation.steps if row.explanation else ()
    problem = " + ".join(step.problem for step in steps) or str(row.call)
    times = [row.predicted_us, row.measured_us, row.host_us]
    shown = ["-" if us is None else f"{us:.1f}" for us in times]
    return (f"{row.call.kind} {problem}", row.device, row.kernel, str(row.count), *shown)


def _process(pid: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
