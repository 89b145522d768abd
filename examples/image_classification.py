"""Image classification: a batch of images through a vision transformer, stock and on torch_gemm.

    python examples/image_classification.py --batch 32

The model is a ViT of transformers with random weights (ViT-B/16 by its sizes on a GPU, a small one
elsewhere), because it shows the same products as a trained one.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch

import torch_gemm
from torch_gemm.measure import CudaRunner, time_in_turn


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="images (default: 8)")
    arguments = parser.parse_args()
    if arguments.batch < 1:
        parser.error(f"--batch is {arguments.batch}, and must be at least 1")
    try:
        import transformers
    except ImportError:
        parser.error("transformers, which has the model, is missing: pip install transformers")

    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    small = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4}
    config = transformers.ViTConfig(**({} if gpu else small), num_labels=1000)
    stock = transformers.ViTForImageClassification(config).to(device, dtype).eval()
    stock.requires_grad_(False)
    size = config.image_size
    images = torch.randn(arguments.batch, 3, size, size, device=device, dtype=dtype)

    model = copy.deepcopy(stock)  # only to compare: replace() changes a model in place
    report = torch_gemm.replace(model, fuse=True, verify=(images,))
    print(f"{len(report.replaced)} layers replaced, {len(report.fused)} of them fused with more")

    with torch.inference_mode():
        logits, expected = model(images).logits, stock(images).logits
        same = (logits.argmax(1) == expected.argmax(1)).sum().item()
        difference = (logits - expected).abs().max().item()
        print(f"the same class for {same} of {len(images)} images", end="")
        print(f"; logits differ by at most {difference:.2g}")
        if gpu:
            ways = {"stock": lambda: stock(images), "tgemm": lambda: model(images)}
            for name, times in time_in_turn(ways, CudaRunner(), 9).items():
                print(f"{name}: {statistics.median(times):.2f} ms a batch")


if __name__ == "__main__":
    main()
