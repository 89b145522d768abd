"""Packages a small model with tgemm ops by AOTInductor, for the C++ program beside it (see main.cpp).

    python examples/aoti_cpp/export.py FOLDER [--device cuda]

The package takes any number of rows. FOLDER gets model.pt2, input.pt, and what the model makes of it in
Python, expected.pt.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import torch_gemm

FEATURES, HIDDEN, MAX_ROWS = 64, 96, 4096


class Block(torch.nn.Module):
    """A gated MLP as Llama has it, behind a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(FEATURES)
        self.gate = torch.nn.Linear(FEATURES, HIDDEN, bias=False)
        self.up = torch.nn.Linear(FEATURES, HIDDEN, bias=False)
        self.down = torch.nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, FEATURES) to the same."""
        hidden = torch_gemm.linear_glu(self.norm(x), self.gate.weight, self.up.weight)
        return torch_gemm.linear(hidden, self.down.weight, residual=x)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=5, help="of input.pt (default: 5)")
    arguments = parser.parse_args()
    if not 1 <= arguments.rows <= MAX_ROWS:
        parser.error(f"--rows is {arguments.rows}, and must be between 1 and {MAX_ROWS}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    arguments.folder.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    dtype = torch.float16 if arguments.device == "cuda" else torch.float32
    model = Block().eval().requires_grad_(False).to(arguments.device, dtype)
    x = torch.randn(arguments.rows, FEATURES, device=arguments.device, dtype=dtype)
    rows = torch.export.Dim("rows", min=1, max=MAX_ROWS)
    # Two rows: torch.export takes a size of 1 for a constant.
    example = torch.randn(2, FEATURES, device=arguments.device, dtype=dtype)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: rows},))
    # The options also fuse the products of ops that are torch's own.
    package = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(arguments.folder / "model.pt2"),
        inductor_configs=torch_gemm.inductor.options(),
    )
    torch.save(x.cpu(), arguments.folder / "input.pt")
    torch.save(model(x).cpu(), arguments.folder / "expected.pt")
    print(f"written: {package}, and input.pt and expected.pt beside it")


if __name__ == "__main__":
    main()
