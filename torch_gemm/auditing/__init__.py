"""Audits the numerics of a model's linear layers, or of one product, against FP64."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_gemm import measure
from torch_gemm.auditing import gemm, layers, tables
from torch_gemm.auditing.gemm import GemmAudit
from torch_gemm.auditing.layers import AuditError, LayerAudit
from torch_gemm.console import (
    CommandError,
    check_outputs,
    first_line,
    load_function,
    open_console,
    write_output,
)
from torch_gemm.notation import DTYPES
from torch_gemm.replacement import Skipped


@dataclass(frozen=True)
class Audit:
    """What `audit` found. Prints as a table."""

    model: str  # its type
    where: str  # the device
    layers: list[LayerAudit]
    skipped: list[Skipped]
    stamp: dict[str, Any] = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether no audited element breaks the numerics contract."""
        return all(layer.ok for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": "audit",
            "stamp": self.stamp,
            "model": self.model,
            "where": self.where,
            "ok": self.ok,
            "layers": [layer.to_dict() for layer in self.layers],
            "skipped": [skipped._asdict() for skipped in self.skipped],
        }

    def to_html(self) -> str:
        """A page that needs nothing besides itself.

        Raises:
            CommandError: matplotlib is not installed.
        """
        return tables.audit_page(self)

    def __str__(self) -> str:
        return tables.audit_text(self)


def audit(model: torch.nn.Module, inputs: Any, *, rows: int | None = None) -> Audit:
    """Computes every linear layer of a model by tgemm, by torch and in FP64, and compares.

    The model runs once on `inputs`, in eval mode without gradients, as it is: what it computes does not
    change, and neither does it. On the way, each call of a linear layer is also computed by
    `torch_gemm.linear` (`linear_glu`, with its residual) and by stock torch, whoever computes it in the
    model; the layers of `replace(model, fuse=True)` with what was fused into them. FP32 operands are
    multiplied as torch's flags say. Layers are `torch.nn.Linear`, `torch_gemm.nn.Linear` and the `Conv1D`
    of transformers, with float16, bfloat16 or float32 parameters; others are listed with the reason.

    Args:
        model: a module; of a compiled one, what was compiled.
        inputs: a tuple of arguments, a dict of keyword arguments, or a single argument.
        rows: compare at most so many rows of each call's output with FP64, evenly spaced, instead of all.

    Returns:
        For each layer its errors, a census of its numbers, and the verdict on the numerics contract
        (`torch_gemm.numerics`): "kept"; "outliers" where a few products dominate their sums so that it is
        kept only with the constant for any operands; or "broken".

    Raises:
        TypeError: `model` is not a module.
        ValueError: `rows` is not a number of at least 1, or the model contains itself.
        AuditError: the model has no linear layer that can be audited, or it or the audit failed; a
            RuntimeError whose message is one sentence.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"audit expects a torch.nn.Module, and got a {type(model).__name__}")
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ValueError(f"audit: rows is {rows!r}, and must be a whole number of at least 1")
    model = getattr(model, "_orig_mod", model)
    audited, skipped = layers.run(model, inputs, rows)
    on_gpu = any(layer.kernels for layer in audited)
    runner = measure.CudaRunner() if on_gpu else measure.CpuRunner()
    stamp = measure.stamp(runner)
    return Audit(type(model).__name__, stamp["card"], audited, skipped, stamp)


def audit_gemm(a: Any, b: Tensor | None = None, *, device: str | None = None) -> GemmAudit:
    """What each way to multiply costs in accuracy and, on a GPU, gains in speed.

    Args:
        a: (M, K), float32 (for every `precision`), float16 or bfloat16, any strides; or, for normally
            distributed float32 operands, the sizes as (M, N, K) or "MxNxK", with b as nn.Linear has it.
        b: (K, N), of the same dtype and on the same device; None with sizes.
        device: of operands that are drawn; default: the GPU if there is one.

    Returns:
        For torch, and for each precision that tgemm knows, errors against the FP64 product of the operands
        as they are, their share of the contract, and times as CUDA graphs in turn over operands beyond L2.
        A precision that this build or card does not have is listed with the op's reason.

    Raises:
        TypeError, ValueError: the operands are of another kind or do not fit.
        AuditError: there is not enough memory, or torch cannot make or multiply such operands.
    """
    if b is None and not (isinstance(a, str) or (isinstance(a, tuple) and len(a) == 3)):
        raise TypeError('audit_gemm expects two matrices, or sizes like (M, N, K) or "MxNxK"')
    try:
        with torch.inference_mode():
            return gemm.run(*gemm.operands_of(a, b, device))
    except torch.OutOfMemoryError as error:
        raise AuditError(f"audit_gemm ran out of memory: {first_line(error)}") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # of the CPU, where it is no OutOfMemoryError
            size = re.search(r"\d+(?= bytes)", str(error))
            raise AuditError(
                "audit_gemm ran out of memory"
                + (f": it needs a matrix of {int(size[0]) / 2**30:.1f} GiB" if size else "")
            ) from error
        raise AuditError(f"audit_gemm failed: {first_line(error)}") from error


# --- python -m torch_gemm audit ----------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m torch_gemm audit``."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="MODULE:FUNCTION, which returns a model and its inputs; or a model of the benchmarks, "
        "minilm for one; or the sizes of one product, MxNxK",
    )
    parser.add_argument(
        "--rows", type=int, metavar="N", help="compare at most N rows of each call with FP64"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="not for a function; default: cuda if there is one",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of a model of the benchmarks; default: fp16 on cuda, fp32 on cpu",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the whole audit")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page with tables and plots")


def run(arguments: argparse.Namespace) -> int:
    """Audits, prints and stores.

    Returns:
        The exit status: 1 if an element broke the numerics contract.

    Raises:
        CommandError: the target, an option, a file, a package or the device is not what it has to be, or
            the model failed; no file was written.
    """
    console = open_console()
    check_outputs({"--json": arguments.json, "--html": arguments.html})
    if arguments.html is not None:
        tables.html.require_matplotlib()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda needs a GPU and a torch with CUDA, and torch sees none.")
    try:
        audited = _audit_target(arguments)
    except (AuditError, ValueError) as error:
        raise CommandError(str(error)) from error
    console.width = max(console.width, 150)
    if isinstance(audited, GemmAudit):
        console.print(tables.gemm_table(audited))
        page = tables.gemm_page
    else:
        console.print(tables.audit_table(audited))
        for name, reason in audited.skipped:
            console.print(f"not audited: {name}: {reason}", markup=False)
        for layer in audited.layers:
            if notes := tables.notes_of(layer):
                console.print(f"{layer.name}: {notes}", markup=False)
        console.print(tables.reading_of(audited))
        console.print(tables.verdict_of(audited), style="bold" if audited.ok else "bold red")
        page = tables.audit_page
    outputs = []
    if arguments.json is not None:
        outputs.append((arguments.json, json.dumps(audited.to_dict(), indent=1) + "\n"))
    if arguments.html is not None:
        outputs.append((arguments.html, page(audited)))
    for path, text in outputs:
        write_output(path, text.encode())
        console.print(f"written: {path}", markup=False)
    return 0 if audited.ok else 1


def _audit_target(arguments: argparse.Namespace) -> Audit | GemmAudit:
    from torch_gemm.bench.models import CASES

    target = arguments.target
    if target in CASES:
        device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = DTYPES[arguments.dtype or ("fp16" if device == "cuda" else "fp32")]
        return audit(*_benchmark_model(target, device, dtype), rows=arguments.rows)
    if ":" in target:
        for option in ("device", "dtype"):
            if getattr(arguments, option) is not None:
                raise CommandError(f"--{option} is for the function {target} to decide")
        return audit(*load(target), rows=arguments.rows)
    for option in ("rows", "dtype"):
        if getattr(arguments, option) is not None:
            raise CommandError(f"--{option} is for models, and {target} names none")
    try:
        shape = gemm.sizes_of(target)
    except ValueError as error:
        if "is no shape" not in str(error):
            raise
        raise CommandError(
            f"{target!r} is neither MODULE:FUNCTION nor sizes like 2048x4096x1024 nor a model of the "
            f"benchmarks ({', '.join(CASES)})"
        ) from error
    return audit_gemm(shape, device=arguments.device)


def _benchmark_model(name: str, device: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
    from torch_gemm.bench.models import build

    try:
        return build(name, device, dtype)
    except CommandError:
        raise
    except Exception as error:  # of any of the packages that models come from
        raise CommandError(f"the model {name} could not be built: {first_line(error)}") from error


def load(target: str) -> tuple[torch.nn.Module, Any]:
    """The model and the inputs that ``package.module:function`` returns.

    Raises:
        CommandError: it cannot be imported or called, or returns something else.
    """
    function = load_function(target)
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"{target} raised {type(error).__name__}: {first_line(error)}"
        ) from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
        raise CommandError(f"{target} must return a tuple of a model and its inputs")
    return made
