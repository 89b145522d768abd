"""Text generation: greedy decoding with a static cache, each step one replay of a CUDA graph.

    python examples/llm_generation.py --tokens 64

The model is a Llama of transformers (version 5) with random weights. Without a GPU the same steps run
one by one, without graphs.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor

import torch_gemm


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A function that replays what `step` puts on the GPU."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # whatever is set up at the first call stays out of the graph
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.inference_mode()
def generate(
    model: torch.nn.Module, prompt: Tensor, count: int, graphs: bool
) -> tuple[Tensor, float]:
    """The next `count` tokens, (batch, count), and the milliseconds of a step."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + count)
    token = torch.empty_like(prompt[:, :1])  # what a step reads, and replaces by the next

    def feed(tokens: Tensor) -> None:
        logits = model(tokens, None, None, cache).logits  # no mask; the cache knows the positions
        token.copy_(logits[:, -1:].argmax(-1))

    def step() -> None:
        feed(token)

    feed(prompt)
    if graphs:
        step = captured(step)
        cache.reset()  # capturing took a step
        feed(prompt)
    tokens = [token.clone()]
    wait = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count - 1):
        step()
        tokens.append(token.clone())
    wait()
    return torch.cat(tokens, dim=1), (time.perf_counter() - start) * 1e3 / max(1, count - 1)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32, help="to generate (default: 32)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: 1)")
    parser.add_argument("--hidden", type=int, default=512, help="size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    for name in ("tokens", "batch", "layers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, and must be at least 1")
    if arguments.hidden < 64 or arguments.hidden % 64:
        parser.error(f"--hidden is {arguments.hidden}, and must be a multiple of 64")
    try:
        import transformers
    except ImportError:
        parser.error("transformers, which has the model, is missing: pip install transformers")

    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.float16) if gpu else ("cpu", torch.float32)
    config = transformers.LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        vocab_size=4096,
    )
    stock = transformers.LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)
    prompt = torch.randint(config.vocab_size, (arguments.batch, 16), device=device)

    model = copy.deepcopy(stock)  # only to compare: replace() changes a model in place
    report = torch_gemm.replace(model, fuse=True, verify={"input_ids": prompt, "use_cache": False})
    glus = sum("linear_glu" in fused.what for fused in report.fused)
    print(f"{len(report.replaced)} layers replaced, {glus} gated MLPs fused")
    print(report.verification)

    ways = [("stock, eager", stock, False), ("tgemm, eager", model, False)]
    if gpu:
        ways += [("stock, CUDA graph", stock, True), ("tgemm, CUDA graph", model, True)]
    else:
        print("no GPU: the steps run without CUDA graphs, and their times mean nothing")
    expected = None
    for name, run, graphs in ways:
        tokens, ms = generate(run, prompt, arguments.tokens, graphs)
        expected = tokens if expected is None else expected
        same = (tokens == expected).sum().item()
        speed = f", {ms:.2f} ms a step" if gpu else ""
        print(f"{name:<18} {same} of {tokens.numel()} tokens as stock has them{speed}")


if __name__ == "__main__":
    main()
