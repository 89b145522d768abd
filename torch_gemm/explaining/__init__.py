"""Explains which kernel would run a product, why, and what it should cost against the roofline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch_gemm import cards
from torch_gemm.console import CommandError, check_output, first_line, open_console, write_output
from torch_gemm.explaining.explanation import (
    LAYOUTS,
    Candidate,
    Explanation,
    Roofline,
    Step,
    explain,
)
from torch_gemm.notation import DTYPES
from torch_gemm.ops import ACTIVATIONS, PRECISIONS

__all__ = ["Candidate", "Explanation", "Roofline", "Step", "explain"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m torch_gemm explain``."""
    parser.add_argument("shape", metavar="MxNxK", help="or BxMxNxK for a batch")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="default: fp16")
    parser.add_argument(
        "--layout", choices=LAYOUTS, help="nt: nn.Linear's, its default; nn: both row-major"
    )
    parser.add_argument(
        "--gpu", help=f"{', '.join(cards.DESCRIBED)}; default: this machine's", metavar="NAME"
    )
    parser.add_argument("--bias", action="store_true", help="linear with a bias")
    parser.add_argument("--residual", action="store_true", help="linear with a residual")
    parser.add_argument("--activation", choices=ACTIVATIONS, help="linear with an activation")
    parser.add_argument("--glu", action="store_true", help="linear_glu: two weights of (N, K)")
    parser.add_argument("--static-weight", action="store_true", help="linear of a frozen weight")
    parser.add_argument("--out-dtype", choices=DTYPES, help="default: the operands'")
    parser.add_argument("--precision", choices=PRECISIONS, help="of fp32; default: ieee")
    parser.add_argument("--force-kernel", metavar="KERNEL", help='"mma_sync:128x128,split_k=4"')
    parser.add_argument("--json", action="store_true", help="print the whole as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page")


def run(arguments: argparse.Namespace) -> None:
    """Prints the explanation, or writes it.

    Raises:
        CommandError: an option or the GPU is not what it has to be; nothing was written.
    """
    console = None if arguments.json else open_console()
    if arguments.html:
        check_output(arguments.html)
    try:
        explanation = explain(
            arguments.shape,
            op="linear_glu" if arguments.glu else None,
            dtype=arguments.dtype,
            layout=arguments.layout,
            gpu=arguments.gpu,
            **_options(arguments),
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise CommandError(first_line(error)) from error
    if any(not step.candidates for step in explanation.considered):
        # The name of a kernel that does not exist: nothing was asked whether it can run.
        raise CommandError(explanation.error)
    if console is None:
        print(json.dumps(explanation.to_dict(), indent=1))
    else:
        from torch_gemm.explaining.text import tables_of

        for shown in tables_of(explanation):
            console.print(shown)
    if arguments.html:
        from torch_gemm.explaining.page import page

        write_output(arguments.html, page(explanation).encode())
        if console is not None:
            console.print(f"written: {arguments.html}", markup=False)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.glu and arguments.residual:
        raise CommandError("--glu and --residual cannot be combined: linear_glu has no residual")
    options: dict[str, Any] = {
        "activation": arguments.activation,
        "precision": arguments.precision,
        "force_kernel": arguments.force_kernel,
        "out_dtype": DTYPES[arguments.out_dtype] if arguments.out_dtype else None,
        "static_weight": arguments.static_weight,
    }
    if arguments.glu:
        options |= {"gate_bias": arguments.bias, "up_bias": arguments.bias}
    else:
        options |= {"bias": arguments.bias, "residual": arguments.residual}
    return {name: value for name, value in options.items() if value not in (None, False)}
