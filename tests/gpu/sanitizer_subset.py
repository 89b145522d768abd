"""A few small problems for every kernel configuration, run under compute-sanitizer.

Checks results on the CPU, so that the tool watches no kernels but ours.
Usage: sanitizer_subset.py TOOL SHARE SHARES, which runs every SHARES-th problem from number SHARE on.
"""

from __future__ import annotations

import sys
from functools import partial

import problems
import torch
from problems import EPILOGUES, MODES, Case, Operands
from promises import CONFIGS, Config

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


def run(case: Case, odd: bool, tool: str) -> None:
    m, n, k, layout = case.m, case.n, case.k, case.layout
    dtype, precision = MODES[case.mode].dtype, MODES[case.mode].precision
    a = operand(m, k, dtype, layout[0] == "t", odd)
    b = operand(k, n, dtype, layout[1] == "t", odd)
    bias = torch.randn(n).to(dtype).cuda()
    residual = operand(m, n, dtype, False, odd)
    out = operand(m, n, dtype, False, odd)
    options = {"activation": "gelu", "precision": precision, "force_kernel": case.force_kernel}
    fused, _ = tgemm._linear_preact(a, b.t(), bias, residual, **options)
    results = [fused]
    # racecheck never comes back from sm90's clusters that divide K where other warps write the
    # outputs, which without it run by the thousand; where the consumers do, it finds no race.
    if tool != "racecheck" or not case.force_kernel.startswith("sm90:128x128,split_k"):
        tgemm.linear.out(a, b.t(), bias, residual, out=out, **options)
        results.append(out)
    else:
        print("without linear.out")
    a, b, bias, residual = (tensor.cpu().double() for tensor in (a, b, bias, residual))
    truth = torch.nn.functional.gelu(a @ b + bias) + residual
    for result in results:
        result = result.cpu().double()
        error = (result - truth).abs().max().item()
        assert error < 0.5, (case, odd, error)


def run_fused(case: Case) -> None:
    """One op with what TMA brings and writes; unlike `run`, without a pre-activation."""
    dtype, epilogue = MODES[case.mode].dtype, EPILOGUES[case.epilogue]
    out_dtype = problems.out_dtype(case)
    weights = [operand(case.k, case.n, dtype, case.layout[1] == "t", False) for _ in range(2)]
    biases = [torch.randn(case.n).to(dtype).cuda() for _ in range(2)]
    operands = Operands(
        a=operand(case.m, case.k, dtype, case.layout[0] == "t", False),
        b=weights[0],
        bias=biases[0] if epilogue.bias else None,
        residual=operand(case.m, case.n, out_dtype, False, False) if epilogue.residual else None,
        up=weights[1] if epilogue.gated else None,
        up_bias=biases[1] if epilogue.gated and epilogue.bias else None,
    )
    out = operand(case.m, case.n, out_dtype, False, False)
    problems.call(case, operands, out)
    on_cpu = Operands(**{name: t if t is None else t.cpu() for name, t in vars(operands).items()})
    truth = problems.reference(case, on_cpu)
    c = problems.accuracy_constant(case.force_kernel, case.k)
    share = problems.excess(out.cpu(), truth.out, truth.magnitude, c).item()
    assert share <= 1.0, (case, share)


def runs_of(config: Config) -> list[tuple[Case, bool]]:
    """What to run of a configuration: sizes that end inside a tile, and whether strides are odd."""
    layouts = [layout for layout in ("nt", "tn") if layout in config.layouts()]
    chosen = []
    for i, mode in enumerate(config.modes):
        strided = "odd stride" in config.alignments(mode)
        for j, layout in enumerate(layouts):
            case = Case(71, 75, 83, mode, layout, force_kernel=str(config))
            odd = strided and ((i + j) % 2 == 1 or config.promise.packs)
            chosen.append((config.fit(case), odd))
    if config.splits_k:
        split = Case(71, 75, 83, config.modes[0], "nn", force_kernel=config.force(2))
        chosen.append((config.fit(split), config.promise.packs))
    return chosen


# One of each schedule: the others of these kernels differ in numbers alone.
SCHEDULES = (
    "sm90:128x128_pingpong_cluster",
    "sm90:128x256_cluster",
    "sm90:128x128",
    "sm90_packed:128x128",
    "sm90_3xtf32:128x128",
)

# What leaves through TMA, of sizes that end inside a tile: 16 bits from three consumers, FP32 in two
# rounds, two weights in the stages of a cluster, and boxes that share columns.
FUSED = (
    Case(200, 200, 200, "fp16", "tn", epilogue="residual", force_kernel="sm90:192x192"),
    Case(71, 76, 200, "bf16", "nt", epilogue="fp32 residual", force_kernel="sm90:128x128"),
    Case(140, 72, 200, "fp16", "nt", epilogue="swiglu", force_kernel="sm90:128x256_cluster"),
    Case(140, 200, 200, "bf16", "nt", epilogue="residual", force_kernel="sm90:128x144"),
    Case(
        140, 200, 200, "fp16", "nt", epilogue="residual", force_kernel="sm90:64x96_pingpong_cluster"
    ),
)


def main(tool: str, share: int, shares: int) -> None:
    watched = [c for c in CONFIGS if not c.kernel.startswith("sm90") or str(c) in SCHEDULES]
    checks = [partial(run_fused, case) for case in FUSED]
    checks += [partial(run, case, odd, tool) for config in watched for case, odd in runs_of(config)]
    mine = checks[share::shares]
    for check in mine:
        print(*check.args, flush=True)  # the last one, should the tool not come back
        check()
    torch.cuda.synchronize()
    print(f"{len(mine)} problems right")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
