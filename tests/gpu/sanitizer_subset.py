"""A few small problems for every kernel configuration, run under compute-sanitizer.

Checks results on the CPU, so that the tool watches no kernels but ours. Usage: sanitizer_subset.py
"""

from __future__ import annotations

import json

import torch

import torch_gemm  # noqa: F401  (registers the ops)

tgemm = torch.ops.tgemm


def operand(rows: int, columns: int, dtype: torch.dtype, column_major: bool, odd: bool):
    """Random values whose last element is the last of its allocation, so that any read past it shows."""
    minor, major = (rows, columns) if column_major else (columns, rows)
    vector = 16 // dtype.itemsize
    leading = minor | 1 if odd else -(-minor // vector) * vector
    size = (major - 1) * leading + minor
    memory = torch.randn(size).to(dtype).cuda()
    strides = (1, leading) if column_major else (leading, 1)
    return memory.as_strided((rows, columns), strides)


def run(force: str, dtype: torch.dtype, precision: str | None, layout: str, odd: bool) -> None:
    m, n, k = 71, 75, 83
    a = operand(m, k, dtype, layout[0] == "t", odd)
    b = operand(k, n, dtype, layout[1] == "t", odd)
    bias = torch.randn(n).to(dtype).cuda()
    residual = operand(m, n, dtype, False, odd)
    out = operand(m, n, dtype, False, odd)
    options = {"activation": "gelu", "precision": precision, "force_kernel": force}
    tgemm.linear.out(a, b.t(), bias, residual, out=out, **options)
    fused, _ = tgemm._linear_preact(a, b.t(), bias, residual, **options)
    a, b, bias, residual, out, fused = (
        tensor.cpu().double() for tensor in (a, b, bias, residual, out, fused)
    )
    truth = torch.nn.functional.gelu(a @ b + bias) + residual
    for result in (out, fused):
        error = (result - truth).abs().max().item()
        assert error < 0.5, (force, dtype, precision, layout, odd, error)


def main() -> None:
    runs = 0
    for kernel in json.loads(tgemm._kernels()):
        for config in kernel["configs"]:
            name = f"{kernel['name']}:{config['name']}"
            staged = config["name"].endswith("_staged")
            modes = [(torch.float16, None), (torch.bfloat16, None), (torch.float32, "tf32")]
            if kernel["name"] == "simt":
                modes = [(torch.float32, "ieee")] + [(torch.float16, None)] * staged
            elif staged:
                modes.append((torch.float32, "bf16"))
            aligned_only = kernel["name"] == "mma_sync" and not staged
            for i, (dtype, precision) in enumerate(modes):
                for j, layout in enumerate(("nt", "tn")):
                    odd = not aligned_only and (i + j) % 2 == 1
                    run(name, dtype, precision, layout, odd)
                    runs += 1
            run(f"{name},split_k=2", modes[0][0], modes[0][1], "nn", False)
            runs += 1
    torch.cuda.synchronize()
    print(f"{runs} problems right")


if __name__ == "__main__":
    main()
