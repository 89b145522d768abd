"""Times whole models end to end: stock, replaced, fused and compiled, each as eager code and as a CUDA graph.

All ways of running one model share its weights and inputs and are replayed in turn, in rotating order
(torch_gemm/measure.py); medians are compared with the best of torch's own ways. Outputs are compared with
those of the same weights in FP32. Each model runs in a process of its own with a time limit, each way of
running it has another, and what fails is a line in the table.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_gemm
from torch_gemm import measure
from torch_gemm._outputs import tensors
from torch_gemm.console import first_line
from torch_gemm.measure import ROUNDS, CpuRunner, CudaRunner, Runner, result_text, stamp
from torch_gemm.notation import DTYPES

MODEL_SECONDS = 900.0
CELL_SECONDS = 240.0
# Names of kernels that multiply matrices: cuBLAS's, CUTLASS's, Triton's and torch_gemm's own.
GEMM_KERNEL = re.compile(r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|mma|simt|sm90|_mm_", re.I)
# Some attention kernels are named after cards too.
OTHER_KERNEL = re.compile(r"flash|fmha|sdpa|attention", re.I)

Inputs = Mapping[str, Any]
Built = tuple[torch.nn.Module, Inputs]


# --- Models -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model with inputs. `build(device, tiny)` makes both, in FP32; tiny ones try the program."""

    what: str
    build: Callable[[str, bool], Built]


def _tokens(device: str, batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (batch, length), device=device)


def _minilm(device: str, tiny: bool) -> Built:
    from torch_gemm.demo import Embedder, load_sentences, model_folder

    embedder = Embedder.load(model_folder(None), device, torch.float32)
    batch = (load_sentences() * 8)[: 2 if tiny else 64]
    tokens = embedder.tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
    return embedder.model, dict(tokens.to(device))


def _bert(device: str, tiny: bool) -> Built:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} if tiny else {}
    config = transformers.BertConfig(**sizes, num_attention_heads=4 if tiny else 12)
    model = transformers.BertModel(config, add_pooling_layer=False)
    return model, {"input_ids": _tokens(device, 2 if tiny else 32, 128, config.vocab_size)}


def _gpt2(device: str, tiny: bool) -> Built:
    import transformers

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4} if tiny else {}
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes))
    tokens = _tokens(device, 1 if tiny else 8, 16 if tiny else 512, 50257)
    return model, {"input_ids": tokens, "use_cache": False}


def _llama(batch: int, length: int) -> Callable[[str, bool], Built]:
    def build(device: str, tiny: bool) -> Built:
        import transformers

        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8}
        if tiny:
            sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(
            **sizes,
            num_attention_heads=4 if tiny else 32,
            num_key_value_heads=2 if tiny else 8,
            vocab_size=256 if tiny else 128256,
            max_position_embeddings=8192,
        )
        model = transformers.LlamaForCausalLM(config)
        tokens = _tokens(device, batch, 16 if tiny and length > 1 else length, config.vocab_size)
        return model, {"input_ids": tokens, "use_cache": False}

    return build


def _whisper(device: str, tiny: bool) -> Built:
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    width = 64 if tiny else 768
    config = transformers.WhisperConfig(
        d_model=width,
        encoder_layers=2 if tiny else 12,
        encoder_attention_heads=4 if tiny else 12,
        encoder_ffn_dim=4 * width,
    )
    features = torch.randn(1 if tiny else 8, config.num_mel_bins, 3000, device=device)
    return WhisperEncoder(config), {"input_features": features}


def _timm(name: str, batch: int, size: int) -> Callable[[str, bool], Built]:
    def build(device: str, tiny: bool) -> Built:
        try:
            import timm
        except ImportError as error:
            raise RuntimeError("timm is not installed: pip install timm") from error
        model = timm.create_model("vit_tiny_patch16_224" if tiny else name, pretrained=False)
        size_of = 224 if tiny else size
        return model, {"x": torch.randn(1 if tiny else batch, 3, size_of, size_of, device=device)}

    return build


CASES = {
    "minilm": Case("all-MiniLM-L6-v2, its own weights, 64 sentences", _minilm),
    "bert": Case("BERT-base, 32 x 128 tokens", _bert),
    "gpt2": Case("GPT-2, 8 x 512 tokens", _gpt2),
    "llama": Case("Llama 3.1 8B with 8 layers, 1 x 2048 tokens", _llama(1, 2048)),
    "llama_decode": Case("Llama 3.1 8B with 8 layers, 16 x 1 token, no cache", _llama(16, 1)),
    "whisper": Case("Whisper small's encoder, 8 x 30 s", _whisper),
    "vit": Case("ViT-B/16 (timm), 32 images", _timm("vit_base_patch16_224", 32, 224)),
    "siglip": Case(
        "SigLIP so400m (timm), 4 images", _timm("vit_so400m_patch14_siglip_378", 4, 378)
    ),
}


def twin_of(model: torch.nn.Module) -> torch.nn.Module:
    """Modules of its own around the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


# --- Ways of running --------------------------------------------------------------------------------


Run = Callable[[], Any]


def _graphed(model: torch.nn.Module, inputs: Inputs, runner: Runner) -> Run:
    if runner.device != "cuda":
        raise RuntimeError("a CUDA graph needs a GPU")
    outputs: list[Any] = []

    def work() -> list[Tensor]:
        outputs[:] = [model(**inputs)]
        return list(tensors(outputs[0]))

    replay = runner.capture(work)

    def run() -> Any:
        replay()
        return outputs[0]

    return run


def _compiled(model: torch.nn.Module, inputs: Inputs, runner: Runner, **how: Any) -> Run:
    function = torch.compile(model, dynamic=False, **how)

    def run() -> Any:
        # With CUDA graphs of torch.compile's own, an output lives until the next step.
        torch.compiler.cudagraph_mark_step_begin()
        return function(**inputs)

    return run


def _replaced(model: torch.nn.Module, fuse: bool, inputs: Inputs) -> torch.nn.Module:
    twin = twin_of(model)
    torch_gemm.replace(twin, fuse=fuse, verify=dict(inputs) if fuse else None)
    return twin


def _eager(model: torch.nn.Module, inputs: Inputs, runner: Runner) -> Run:
    return lambda: model(**inputs)


def _pass(mode: str | None) -> dict[str, Any]:
    return {"options": torch_gemm.inductor.options(mode)}


# The names of torch's own begin with "stock".
WAYS: dict[str, Callable[[torch.nn.Module, Inputs, Runner], Run]] = {
    "stock eager": _eager,
    "stock CUDA graph": _graphed,
    "stock compile": _compiled,
    "stock compile, graphs": lambda m, i, r: _compiled(twin_of(m), i, r, mode="reduce-overhead"),
    "tgemm replace": lambda m, i, r: _eager(_replaced(m, False, i), i, r),
    "tgemm replace, CUDA graph": lambda m, i, r: _graphed(_replaced(m, False, i), i, r),
    "tgemm replace+fuse": lambda m, i, r: _eager(_replaced(m, True, i), i, r),
    "tgemm replace+fuse, CUDA graph": lambda m, i, r: _graphed(_replaced(m, True, i), i, r),
    "tgemm pass": lambda m, i, r: _compiled(twin_of(m), i, r, **_pass(None)),
    "tgemm pass, graphs": lambda m, i, r: _compiled(twin_of(m), i, r, **_pass("reduce-overhead")),
}
CONTROL = "stock eager (control)"


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises TimeoutError in the main thread."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def largest_difference(output: Any, reference: list[Tensor]) -> float:
    """Over all floating-point outputs, as a share of the reference's largest magnitude."""
    worst = scale = 0.0
    outputs = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    if len(outputs) != len(reference):
        raise RuntimeError(f"{len(outputs)} outputs where FP32 has {len(reference)}")
    for own, exact in zip(outputs, reference, strict=True):
        difference = (own.float() - exact).abs().max().item()
        worst = difference if math.isnan(difference) else max(worst, difference)
        scale = max(scale, exact.abs().max().item())
    return worst / scale


def gemm_share(run: Run, runner: Runner) -> float | None:
    """The share of GEMM kernels in the time of all kernels; None without a GPU."""
    if runner.device != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    total = gemms = 0.0
    for event in profiler.key_averages():
        total += event.self_device_time_total
        if GEMM_KERNEL.search(event.key) and not OTHER_KERNEL.search(event.key):
            gemms += event.self_device_time_total
    return gemms / total if total else None


def build(name: str, device: str, dtype: torch.dtype, tiny: bool = False) -> Built:
    """A model of CASES with frozen parameters, in eval mode, and inputs for it."""
    torch.manual_seed(0)
    with torch.device(device):
        model, inputs = CASES[name].build(device, tiny)
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    cast = {key: value.to(dtype) if _is_floating(value) else value for key, value in inputs.items()}
    return model, cast


def measure_model(
    name: str, dtype: str, runner: Runner, rounds: int, tiny: bool, cell_seconds: float
) -> dict[str, Any]:
    """One row of the result. A way that fails has an "error" in place of its time."""
    case = CASES[name]
    model, cast = build(name, runner.device, DTYPES[dtype], tiny)
    row: dict[str, Any] = {"model": name, "what": case.what, "dtype": dtype, "tiny": tiny}
    with torch.inference_mode(), measure.tf32_allowed(False):
        exact = copy.deepcopy(model).float()
        wide = {k: v.float() if _is_floating(v) else v for k, v in cast.items()}
        reference = [
            value.float().clone() for value in tensors(exact(**wide)) if value.is_floating_point()
        ]
        del exact, wide
        cells: dict[str, dict[str, Any]] = {}
        runs: dict[str, Run] = {}
        for way, prepare in WAYS.items():
            start = time.perf_counter()
            try:
                with time_limit(cell_seconds, way):
                    run = prepare(model, cast, runner)
                    for _ in range(3):  # compiles, captures, and replays what was captured
                        output = run()
                    difference = largest_difference(output, reference)
                    runner.milliseconds(run, 1)
            except Exception as error:  # a line in the table, whatever it was
                cells[way] = {"error": f"{type(error).__name__}: {first_line(error)}"}
                continue
            runs[way] = run
            seconds = time.perf_counter() - start
            cells[way] = {"difference": float(f"{difference:.3g}"), "prepared_s": round(seconds, 1)}
        if "stock eager" in runs:
            runs[CONTROL] = runs["stock eager"]
            cells[CONTROL] = dict(cells["stock eager"])
            row["gemm_share"] = _or_none(lambda: gemm_share(runs["stock eager"], runner))
        times = measure.time_in_turn(runs, runner, rounds) if runs else {}
    for way, rounds_ms in times.items():
        cells[way] |= {
            "ms": round(statistics.median(rounds_ms), 4),
            "rounds_ms": [round(ms, 4) for ms in rounds_ms],
        }
    stock = {way: cells[way]["ms"] for way in times if way.startswith("stock") and way != CONTROL}
    row["best_stock"] = min(stock, key=stock.__getitem__, default=None)
    for cell in cells.values():
        if stock and "ms" in cell:
            cell["over_best_stock"] = round(stock[row["best_stock"]] / cell["ms"], 4)
    row["cells"] = cells
    return row


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _or_none(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:  # a profiler that does not work costs the share, not the times
        print(f"the GEMM share is not known: {first_line(error)}", file=sys.stderr)
        return None


# --- Command line -----------------------------------------------------------------------------------


def table_of(row: dict[str, Any]) -> Any:
    """A rich table of one model."""
    from rich.table import Table

    share = row.get("gemm_share")
    title = f"{row['model']}: {row['what']}, {row['dtype']}"
    title += "" if share is None else f"; GEMMs take {share:.0%} of stock's kernel time"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("way", no_wrap=True)
    for column in ("ms", "best stock / ms", "difference to FP32"):
        table.add_column(column, justify="right")
    for way, cell in row.get("cells", {}).items():
        if "ms" in cell:
            best = "  (best stock)" if way == row["best_stock"] else ""
            numbers = f"{cell['ms']:.3f}", f"{cell['over_best_stock']:.3f}", cell["difference"]
            table.add_row(way + best, *numbers[:2], f"{numbers[2]:.2g}")
        else:
            table.add_row(way, "failed", "", "")
    return table


def print_row(console: Any, row: dict[str, Any]) -> None:
    """The table, and the reasons of what failed."""
    if "error" in row:
        console.print(f"[bold]{row['model']}[/bold]: failed: {row['error']}", markup=True)
        return
    console.print(table_of(row))
    for way, cell in row["cells"].items():
        if "error" in cell:
            console.print(f"  {way}: {cell['error']}", markup=False)


@dataclass(frozen=True)
class How:
    """How models are measured; times in seconds."""

    dtype: str = "bf16"
    device: str = "cuda"
    rounds: int = ROUNDS
    tiny: bool = False  # small models, to try the program
    model_seconds: float = MODEL_SECONDS
    cell_seconds: float = CELL_SECONDS

    @property
    def runner(self) -> Runner:
        """What measures."""
        return CudaRunner() if self.device == "cuda" else CpuRunner()


def run_models(
    names: Sequence[str], how: How, show: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measures models, keys of CASES, and calls `show` with the result after each row.

    Returns:
        What is stored: {"name", "stamp", "rounds", "rows"}.
    """
    name = f"models_{how.dtype}"
    result = {"name": name, "stamp": stamp(how.runner), "rounds": how.rounds, "rows": []}
    for name in names:
        result["rows"].append(in_own_process(name, how))
        show(result)
    return result


def in_own_process(name: str, how: How) -> dict[str, Any]:
    """The row of one model. A crash or a time limit is its "error"."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch_gemm.bench.models", name, str(file)]
        command.append(json.dumps(dataclasses.asdict(how)))
        failed = {"model": name, "what": CASES[name].what, "dtype": how.dtype}
        # In a process group of its own, so that compile workers end with it.
        child = subprocess.Popen(
            command,
            cwd=Path(torch_gemm.__file__).resolve().parent.parent,  # finds this torch_gemm
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = child.communicate(timeout=how.model_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return failed | {"error": f"it took more than {how.model_seconds:g} s"}
        if file.exists():
            return json.loads(file.read_text())
        lines = errors.strip().splitlines() or [f"its process ended with {child.returncode}"]
        return failed | {"error": lines[-1]}


def main(name: str, file: str, how: str) -> None:
    """What in_own_process() runs: measures one model and writes its row."""
    given = How(**json.loads(how))
    row = measure_model(
        name, given.dtype, given.runner, given.rounds, given.tiny, given.cell_seconds
    )
    Path(file).write_text(result_text(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
