"""Times contenders side by side: CUDA graphs over rotated inputs, in turn, in rotating order.

Every contender does the same work on the same random inputs. Its calls on several input sets, together
larger than the L2 cache twice over, are captured in one CUDA graph. The graphs are replayed in turn, in
an order that rotates from round to round, so that clocks and temperature favour nobody; the medians of
all rounds are compared. torch runs twice: how far its two medians differ is the error of the method.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from torch_gemm import _library
from torch_gemm._digest import build_record, source_digest
from torch_gemm.console import CommandError
from torch_gemm.info import driver_version, why_no_gpu

ROUNDS = 9
MAX_SETS = 512  # problems below 240 KB stay in L2 all the same
# One turn of a contender: long enough for the power limit to set in, and for the event timer.
TURN_MS = 10.0


class CudaRunner:
    """Captures and times work on a GPU."""

    device = "cuda"

    def capture(self, work: Callable[[], list[Tensor]]) -> Callable[[], None]:
        """Records all launches of `work` as one graph; returns what replays it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # whatever a contender sets up at its first call is not part of the graph
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = work()

        def replay(outs: list[Tensor] = outs) -> None:  # the outputs live as long as the graph
            graph.replay()

        return replay

    def milliseconds(self, replay: Callable[[], None], repeats: int) -> float:
        """Time of one replay, averaged over `repeats` in a row."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

    def l2_bytes(self) -> int:
        """What the inputs have to exceed."""
        return torch.cuda.get_device_properties(0).L2_cache_size

    def free_bytes(self) -> int:
        """Memory that inputs and outputs may take."""
        return torch.cuda.mem_get_info()[0]


class CpuRunner:
    """The same on the CPU, to try the program where there is no GPU."""

    device = "cpu"

    def capture(self, work: Callable[[], list[Tensor]]) -> Callable[[], None]:
        """Returns what repeats `work`."""

        def replay() -> None:
            work()

        return replay

    def milliseconds(self, replay: Callable[[], None], repeats: int) -> float:
        """Time of one replay, averaged over `repeats` in a row."""
        start = time.perf_counter()
        for _ in range(repeats):
            replay()
        return (time.perf_counter() - start) * 1e3 / repeats

    def l2_bytes(self) -> int:
        """Small, to be quick."""
        return 2**20

    def free_bytes(self) -> int:
        """Memory that inputs and outputs may take."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


Runner = CudaRunner | CpuRunner


def open_runner(what: str) -> Runner:
    """What measures on this machine's GPU.

    Args:
        what: is measured, with its verb: the beginning of the sentence that says why it cannot be.

    Raises:
        CommandError: there is no GPU, or no kernels for it.
    """
    if _library.cuda_missing is not None:
        raise CommandError(_library.cuda_missing)
    if not torch.cuda.is_available():
        raise CommandError(f"{what} measured on a GPU, and there is none: {why_no_gpu()}")
    return CudaRunner()


def input_sets(problem_bytes: int, l2_bytes: int) -> int:
    """How many sets of inputs it takes that one pass over all of them leaves nothing useful in L2.

    Args:
        problem_bytes: of the operands and the output of one set.
        l2_bytes: of the cache.
    """
    return min(MAX_SETS, max(2, -(-2 * l2_bytes // problem_bytes) + 1))


def time_in_turn(
    replays: dict[str, Callable[[], None]], runner: Runner, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each replay in each round."""
    names = list(replays)
    repeats = {}
    for name in names:
        once = min(runner.milliseconds(replays[name], 1) for _ in range(2))
        repeats[name] = max(1, round(TURN_MS / max(once, 1e-3)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(runner.milliseconds(replays[name], repeats[name]))
    return times


@contextlib.contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Sets whether torch's own FP32 products on CUDA may round their operands to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def stamp(runner: Runner) -> dict[str, Any]:
    """Where and from what a result comes."""
    gpu = runner.device == "cuda"
    record = build_record()
    return {
        "card": torch.cuda.get_device_name() if gpu else f"CPU, {platform.machine()}",
        "device": json.loads(torch.ops.tgemm._device(0)) if gpu else None,
        "driver": driver_version() if gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        # Of the library that ran, which need not be that of the sources beside it.
        "csrc_digest": record["csrc_digest"] if record else source_digest(),
    }


def result_text(result: dict[str, Any]) -> str:
    """How a result is stored."""
    return json.dumps(result, indent=1) + "\n"
