"""`python -m torch_gemm ladder` on the CPU, where torch stands in for the kernels and its times mean
nothing: what is forced, computed, shown, stored and drawn, and how it fails.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import torch_gemm
from benchmarks import render
from torch_gemm import _library, console, ladder, measure, nsight
from torch_gemm.__main__ import main
from torch_gemm.ladder import contest, launch, picture, tables
from torch_gemm.ladder.rungs import RUNGS
from torch_gemm.peak import peaks

H200 = {"name": "NVIDIA H200", "compute_capability": 90, "sm_count": 132, "clock_ghz": 1.98}
RESOURCES = {
    "registers": 128,
    "threads": 256,
    "static_shared_bytes": 1024,
    "dynamic_shared_bytes": 2048,
    "local_bytes": 16,
    "ctas_per_sm": 2,
    "occupancy": 0.25,
}
CONFIGS = {
    "naive": ["8x32"],
    "tiled_vectorized": ["128x128_scalar", "128x128"],  # the ladder's own is not the first here
    "wmma_double_buffered": ["128x128", "128x128_single"],
    "mma_sync": ["128x256", "128x128_staged", "64x64_staged"],
}
KERNELS = [
    {
        "name": rung.kernel,
        "splits_k": rung.kernel == "mma_sync",
        "configs": [{"name": name} for name in CONFIGS.get(rung.kernel, ["128x128"])],
    }
    for rung in RUNGS
]


def plan(a, b, precision, force):
    """A card that cannot run wgmma, and mma_sync as it is: FP32 in the staged configurations only."""
    if force.startswith("wgmma"):
        return {"error": "wgmma:128x128 cannot run this: [sm_90a] only"}
    if precision == "fp16" and force.startswith("mma_sync") and "staged" not in force:
        return {"error": "mma_sync:128x256 cannot run this: it copies operands as they are"}
    return {"plan": force.partition(",")[0], "resources": RESOURCES}


def multiply(a, b, precision, force):
    if precision == "fp16":
        a, b = a.half(), b.half()
    return (a.float() @ b.float()).to(a.dtype if precision is None else torch.float32)


@pytest.fixture
def stand_ins(monkeypatch):
    stamp = measure.stamp
    monkeypatch.setattr(measure, "TURN_MS", 0.01)
    monkeypatch.setattr(measure, "stamp", lambda runner: {**stamp(runner), "device": H200})
    monkeypatch.setattr(ladder, "open_runner", measure.CpuRunner)
    monkeypatch.setattr(torch_gemm, "kernels", lambda: KERNELS)
    monkeypatch.setattr(contest, "plan_of", plan)
    monkeypatch.setattr(contest, "multiply", multiply)


@pytest.fixture
def measured(stand_ins):
    """A result whose times are known: naive 1000 us, and every row half of the one before."""
    result = contest.measure_ladder(16, "fp16", "nn", measure.CpuRunner(), rounds=1)
    rows = [row for row in result["rows"] if "us" in row]
    us = {row["name"]: 1000.0 / 2**i for i, row in enumerate(rows)}
    for row in rows:
        row["us"], row["tflops"] = us[row["name"]], 2 * 16**3 / us[row["name"]] * 1e-6
        row["over_naive"] = us["naive"] / row["us"]
        before = us.get(row.get("refines"))
        row["over_refined"] = before and before / row["us"]
    result["stamp"].update(card="NVIDIA H200", driver="580.1", csrc_digest="0")
    return result


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["ladder", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def fails(capsys, *arguments: str) -> str:
    """The one sentence with which the command fails."""
    status, output, errors = run(capsys, *arguments)
    assert (status, output) == (2, "")
    assert errors.count("\n") == 1
    return errors


# --- The rungs


def test_rungs_refine_earlier_ones():
    names = [rung.kernel for rung in RUNGS]
    assert len(set(names)) == len(names)
    for position, rung in enumerate(RUNGS):
        assert rung.refines is None or rung.refines in names[:position]
    assert [rung.kernel for rung in RUNGS if rung.refines is None] == ["naive", "volta_mma"]


def test_rungs_exist():
    if _library.cuda_missing is not None:
        pytest.skip(_library.cuda_missing)
    configs = {k["name"]: [c["name"] for c in k["configs"]] for k in torch_gemm.kernels()}
    missing = [rung.kernel for rung in RUNGS if rung.kernel not in configs]
    if missing:
        pytest.skip(f"not in this build: {', '.join(missing)}")
    for rung in RUNGS:
        if rung.twin:
            assert rung.twin.config in configs[rung.kernel][1:]


def test_volta_is_emulated_after_turing():
    volta = next(rung for rung in RUNGS if rung.kernel == "volta_mma")
    assert [volta.emulated(capability) for capability in (70, 75, 80, 90)] == [False] * 2 + [
        True
    ] * 2


def test_peaks():
    h200 = peaks(H200)
    assert h200["fma"] == pytest.approx(132 * 1.98e9 * 128 * 2 / 1e12)
    assert h200["tensor"] == pytest.approx(132 * 1.98e9 * 2048 * 2 / 1e12)
    assert h200["tf32"] == h200["tensor"] / 2

    def tensor(name, capability, sms, ghz):
        described = {"name": name, "compute_capability": capability}
        return peaks({**described, "sm_count": sms, "clock_ghz": ghz}).get("tensor")

    # What NVIDIA prints.
    assert tensor("NVIDIA A100-SXM4-80GB", 80, 108, 1.41) == pytest.approx(312, rel=0.01)
    assert tensor("NVIDIA H100 80GB HBM3", 90, 132, 1.83) == pytest.approx(989, rel=0.01)
    assert tensor("Tesla T4", 75, 40, 1.59) == pytest.approx(65, rel=0.01)
    assert tensor("NVIDIA RTX A6000", 86, 84, 1.80) == pytest.approx(154.8, rel=0.01)
    assert tensor("NVIDIA GeForce RTX 3090", 86, 82, 1.695) == pytest.approx(71, rel=0.01)
    assert tensor("NVIDIA GeForce RTX 4090", 89, 128, 2.52) == pytest.approx(165.2, rel=0.01)
    assert tensor("NVIDIA GeForce RTX 5090", 120, 170, 2.407) == pytest.approx(209.5, rel=0.01)
    # No Tensor Cores, and a card that nobody has described here.
    assert tensor("NVIDIA GeForce GTX 1660", 75, 22, 1.785) is None
    assert peaks({**H200, "compute_capability": 130}) == {}


# --- The measurement


def test_layouts():
    a, b = contest.make_operands(8, "bf16", "nn", "cpu")
    assert (a.dtype, a.is_contiguous(), b.is_contiguous()) == (torch.bfloat16, True, True)
    a, b = contest.make_operands(8, "fp16", "nt", "cpu")
    assert a.is_contiguous()
    assert b.stride() == (1, 8)


def test_errors_are_relative_to_the_rms_of_the_reference():
    reference = torch.tensor([[3.0, -3.0], [3.0, 3.0]], dtype=torch.float64)
    actual = torch.tensor([[3.0, -3.0], [3.0, 3.6]])
    errors = contest.errors_of(actual, reference)
    assert errors == {"largest_error": pytest.approx(0.2), "rms_error": pytest.approx(0.1)}


def test_rows(stand_ins):
    result = contest.measure_ladder(16, "fp16", "nn", measure.CpuRunner(), rounds=3)
    rows = {row["name"]: row for row in result["rows"]}
    expected = [rung.kernel for rung in RUNGS]
    expected.insert(4, "tiled_vectorized:128x128_scalar")
    expected.insert(7, "wmma_double_buffered:128x128_single")
    assert list(rows) == [*expected, contest.CUBLAS]

    # One launch per call: never split; and a twin is no substitute for its rung.
    assert rows["mma_sync"]["force"] == "mma_sync:128x256,split_k=1"
    assert rows["tiled_vectorized"]["force"] == "tiled_vectorized:128x128"
    twin = rows["tiled_vectorized:128x128_scalar"]
    assert twin["force"] == "tiled_vectorized:128x128_scalar"
    assert (twin["twin_of"], twin["refines"]) == ("tiled_vectorized", "tiled_padded")

    assert rows["wgmma"]["refused"].endswith("[sm_90a] only")
    assert "us" not in rows["wgmma"]
    for row in rows.values():
        if row is not rows["wgmma"]:
            assert len(row["rounds_us"]) == 3
            assert row["over_naive"] == pytest.approx(rows["naive"]["us"] / row["us"], rel=1e-3)
            assert 0 < row["rms_error"] < row["largest_error"] < 1e-2
    over = rows["mma_sync"]["over_refined"]
    assert over == pytest.approx(
        rows["wmma_double_buffered"]["us"] / rows["mma_sync"]["us"], rel=1e-3
    )
    assert rows["volta_mma"]["over_refined"] is None
    assert rows["volta_mma"]["emulated"]
    # Each against the unit that it uses.
    assert [rows[name]["unit"] for name in ("tiled", "volta_mma", "wmma")] == [
        "fma",
        "fma",
        "tensor",
    ]
    assert result["peaks"] == {"fma": 66.9, "tensor": 1070.5, "tf32": 535.3}
    assert json.loads(measure.result_text(result)) == result


def test_fp32_rounds_to_fp16_on_tensor_cores(stand_ins):
    result = contest.measure_ladder(32, "fp32", "nt", measure.CpuRunner(), rounds=1)
    rows = {row["name"]: row for row in result["rows"]}
    assert result["name"] == "ladder_nt_fp32"
    assert list(rows)[-2:] == [contest.CUBLAS_TF32, contest.CUBLAS]
    assert rows["mma_sync"]["force"] == "mma_sync:128x128_staged,split_k=1"
    assert (rows["tiled"]["precision"], rows["wmma"]["precision"]) == ("ieee", "fp16")
    assert rows["tiled"]["rms_error"] < 1e-6 < 1e-4 < rows["wmma"]["rms_error"] < 1e-3


def test_a_build_without_rungs(stand_ins, monkeypatch):
    monkeypatch.setattr(torch_gemm, "kernels", lambda: KERNELS[1:])
    result = contest.measure_ladder(16, "fp16", "nn", measure.CpuRunner(), rounds=1)
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["naive"]["refused"] == "there is no kernel naive in this build"
    assert rows["tiled"]["over_naive"] is None
    assert len(tables.show_ladder(result)) == 3


def test_a_kernel_that_fails_is_refused_but_torch_is_not(stand_ins, monkeypatch):
    def broken(a, b, precision, force):
        raise RuntimeError("tgemm.matmul: no\nsecond line")

    monkeypatch.setattr(contest, "multiply", broken)
    result = contest.measure_ladder(16, "fp16", "nn", measure.CpuRunner(), rounds=1)
    assert result["rows"][0]["refused"] == "tgemm.matmul: no"
    monkeypatch.setattr(contest, "_torch_matmul", lambda tf32: lambda a, b: broken(a, b, None, ""))
    with pytest.raises(RuntimeError, match="second line"):
        contest.measure_ladder(16, "fp16", "nn", measure.CpuRunner(), rounds=1)


# --- The command


def test_command(stand_ins, capsys, tmp_path):
    stored, drawn = tmp_path / "ladder.json", tmp_path / "ladder.png"
    options = ["--size", "16", "--rounds", "1", "--json", str(stored), "--plot", str(drawn)]
    status, output, _ = run(capsys, *options)
    assert status == 0
    assert "16 x 16 x 16, fp16, nn" in output
    speed, resources = output.split("Resources and errors")
    lines = {line.split()[0]: line for line in speed.splitlines() if line.strip()}
    rungs = [rung.kernel for rung in RUNGS if rung.kernel != "wgmma"]
    assert set(rungs) <= set(lines)
    assert "20.5x" in lines["wmma_double_buffered"]
    assert "(emulated)" in lines["volta_mma"]
    lines = {line.split()[0]: line.split() for line in resources.splitlines() if line.strip()}
    taken = ["128", "16", "3.0", "2", "25%"]
    for rung in rungs:
        assert [cell for cell in lines[rung] if cell != "(emulated)"][1:6] == taken
    assert output.index("  128x128_scalar") > output.index("tiled_vectorized")
    assert "wgmma: wgmma:128x128 cannot run this: [sm_90a] only" in output
    assert "correctness" in output
    assert "FP64" in output
    assert drawn.read_bytes().startswith(b"\x89PNG")
    result = json.loads(stored.read_text())
    assert len(result["stamp"]["csrc_digest"]) == 64
    assert picture.drawn_digest(drawn.read_bytes()) == picture.result_digest(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ladder.json", "ladder.png"]


def test_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(_library, "cuda_missing", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in fails(capsys)
    monkeypatch.setattr(_library, "cuda_missing", "The CUDA library is not there.")
    assert "The CUDA library is not there." in fails(capsys)


def test_sizes(capsys, stand_ins):
    assert "--size is 0, and must be at least 1" in fails(capsys, "--size", "0")
    assert "--rounds is -1, and must be at least 1" in fails(capsys, "--rounds", "-1")
    error = fails(capsys, "--size", "10000000")
    assert "--size 10000000 takes" in error
    assert "of the GPU's memory are free" in error


def test_out_of_memory(capsys, stand_ins, monkeypatch):
    def broken(a, b, precision, force):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(contest, "multiply", broken)
    assert "too large for the GPU's memory: CUDA out" in fails(capsys, "--size", "16")


@pytest.fixture
def measures_nothing(stand_ins, monkeypatch):
    def measured(*arguments):
        raise AssertionError("bad input was found after the measurement")

    monkeypatch.setattr(ladder, "measure_ladder", measured)


@pytest.mark.usefixtures("measures_nothing")
def test_files_that_cannot_be_written(capsys, tmp_path):
    assert "must end in .png or .svg" in fails(capsys, "--plot", "ladder.pdf")
    nowhere = str(tmp_path / "nowhere" / "ladder.svg")
    assert "cannot be written: No such file" in fails(capsys, "--plot", nowhere)
    assert "cannot be written: No such file" in fails(capsys, "--json", nowhere)
    assert "not a regular file" in fails(capsys, "--json", str(tmp_path))
    assert "not a regular file" in fails(capsys, "--json", os.devnull)
    assert "name too long" in fails(capsys, "--json", str(tmp_path / ("a" * 300)))
    same = str(tmp_path / "a.svg")
    assert "are the same file" in fails(capsys, "--plot", same, "--json", same)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("measures_nothing")
def test_missing_packages_and_tools(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = fails(capsys, "--plot", str(tmp_path / "ladder.svg"))
    assert "pip install 'torch_gemm[plots]'" in error
    monkeypatch.setattr(nsight.shutil, "which", lambda *arguments, **options: None)
    assert "ncu) is not on PATH" in fails(capsys, "--profile")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert "pip install 'torch_gemm[cli]'" in fails(capsys)


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    path.write_text("before")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    console.write_output(link, b"after")
    assert path.read_text() == "after"
    assert link.is_symlink()

    def full(self, content):
        with self.open("wb") as file:
            file.write(content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(console.CommandError, match="No space left on device"):
        console.write_output(path, b"never")
    assert path.read_text() == "after"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.json", "result.json"]


# --- The picture


def test_picture(measured):
    drawn = picture.draw(measured, "svg")
    assert drawn == picture.draw(copy.deepcopy(measured), "svg")
    assert picture.drawn_digest(drawn) == picture.result_digest(measured)
    measured["rows"][0]["us"] += 1
    assert picture.drawn_digest(drawn) != picture.result_digest(measured)
    assert picture.drawn_digest(b"<svg/>") is None


# --- Nsight Compute

KEPT = {**nsight.COUNTERS, **{name: nsight.STALL_METRIC.format(name) for name in nsight.STALLS}}


def raw_csv(kernels: list[tuple[str, dict[str, str]]], left_out: tuple[str, ...] = ()) -> str:
    """What ``ncu --csv --page raw`` prints around a program that prints, too."""
    columns = {metric: "" for name, metric in KEPT.items() if name not in left_out}
    columns["dram__bytes.sum.per_second"] = "Gbyte/s"
    described = ["ID", "Process ID", "Kernel Name", "Block Size", "Grid Size"]

    def line(cells):
        return ",".join(f'"{cell}"' for cell in cells)

    lines = [
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
        '==PROF== Profiling "naive" - 0 (1/2): 0%....50%....100% - 9 passes',
        "what the program prints",
        "==PROF== Disconnected from process 4711",
        line([*described, *columns]),
        line([*[""] * len(described), *columns.values()]),
    ]
    for index, (function, values) in enumerate(kernels):
        values = {KEPT[name]: value for name, value in values.items()}
        identity = [index, 4711, function, "(256, 1, 1)", "(128, 1, 1)"]
        lines.append(line([*identity, *(values.get(column, "0") for column in columns)]))
    return "\n".join(lines) + "\n"


TILED = (
    "void tgemm::ladder::tiled<__half>(tgemm::GemmParams)",
    {
        "shared_load_requests": "1,000",
        "ldmatrix_requests": "200",
        "shared_load_wavefronts": "4,800",
        "shared_store_requests": "100",
        "shared_store_wavefronts": "3,200",
        "shared_store_conflicts": "3,100",
        "dram_percent": "12.34",
        "dram_bytes_per_second": "567.8",
        "tensor_busy_percent": "n/a",
        "long_scoreboard": "5.25",
        "barrier": "0.5",
        "wait": "1.75",
        "misc": "n/a",
    },
)


def test_raw_csv():
    naive = ("void tgemm::ladder::naive<__half>(tgemm::GemmParams)", {"wait": "2"})
    first, second = map(nsight.describe, nsight.parse_raw_csv(raw_csv([TILED, naive], ("gmma",))))
    assert first["function"] == TILED[0]
    assert first["load_wavefronts_per_request"] == 4.0  # 4800 / (1000 + 200)
    assert first["store_wavefronts_per_request"] == 32.0
    assert first["shared_store_conflicts"] == 3100
    assert first["dram_percent"] == 12.34
    assert first["dram_bytes_per_second"] == pytest.approx(567.8e9)
    assert first["tensor_busy_percent"] is None
    assert first["stalls"] == [["long_scoreboard", 5.25], ["wait", 1.75], ["barrier", 0.5]]
    # No requests, no wavefronts.
    assert second["load_wavefronts_per_request"] == 0
    assert second["stalls"][0] == ["wait", 2.0]


@pytest.mark.parametrize("text", ["", "==ERROR== no\n", '"ID","Kernel Name"\n'])
def test_no_csv(text):
    assert nsight.parse_raw_csv(text) == []


@pytest.fixture
def ncu(monkeypatch, tmp_path):
    """Makes `ncu` a script that runs with its arguments in `arguments`, and returns how to set it."""

    def install(body: str) -> str:
        path = tmp_path / "ncu"
        header = f"#!{sys.executable}\nimport sys\narguments = ' '.join(sys.argv[1:])\n"
        path.write_text(header + body)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return str(path)

    return install


def test_find_ncu(ncu):
    path = ncu("")
    assert nsight.find_ncu() == path


def test_unknown_metrics_are_left_out(ncu):
    known = raw_csv([TILED], ("gmma", "wgmma_instructions"))
    path = ncu(
        "if '_gmma' in arguments:\n"
        "    name = 'sm__inst_executed_pipe_tensor_op_gmma'\n"
        "    if name not in arguments: name = 'smsp__average_warps_issue_stalled_gmma_per_issue_active'\n"
        "    print('==ERROR== Failed to find metric regex:^' + name + '(\\\\..*)?$')\n"
        "    sys.exit(1)\n"
        f"print({known!r})\n"
    )
    (kernel,) = nsight.profile(path, ["program"])
    assert kernel["wgmma_instructions"] is None
    assert kernel["tensor_instructions"] == 0
    assert kernel["dram_percent"] == 12.34


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "print('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'); sys.exit(1)",
            "run this as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
        ),
        ("print('==ERROR== Driver is not compatible'); sys.exit(9)", "Driver is not compatible"),
        ("print('==WARNING== No kernels were profiled.')", "No kernels were profiled."),
        ("sys.exit('Traceback\\nRuntimeError: no memory')", "RuntimeError: no memory"),
        ("", "it printed nothing"),
    ],
)
def test_ncu_fails(ncu, stand_ins, capsys, body, expected):
    ncu(body)
    assert expected in fails(capsys, "--size", "16", "--profile")


def test_profile(ncu, stand_ins, capsys, tmp_path):
    rungs = len(RUNGS) + 2 - 1  # with two twins, and without wgmma
    ncu(
        f"open({str(tmp_path / 'seen')!r}, 'w').write('\\n'.join(sys.argv[1:]))\n"
        f"print({raw_csv([TILED] * rungs)!r})\n"
    )
    stored = tmp_path / "ladder.json"
    options = ["--size", "16", "--dtype", "fp32", "--rounds", "1", "--profile", "--json"]
    status, output, _ = run(capsys, *options, str(stored))
    assert status == 0
    seen = (tmp_path / "seen").read_text().splitlines()
    assert {"--profile-from-start", "--clock-control", "--csv", "raw"} <= set(seen)
    assert "torch_gemm.ladder.launch" in seen
    job = json.loads(seen[-1])
    assert (job["size"], job["dtype"], job["layout"]) == (16, "fp32", "nn")
    assert job["calls"][0] == {"force": "naive:8x32", "precision": "ieee"}

    rows = json.loads(stored.read_text())["profile"]["rows"]
    assert [row["name"] for row in rows][:2] == ["naive", "tiled"]
    assert len(rows) == rungs
    for stall in ("long_scoreboard 5.25", "wait 1.75", "barrier 0.50"):
        assert output.count(stall) == rungs
    assert "32.00" in output
    assert "n/a" in output
    assert "Not counted" in output


def test_profile_needs_one_kernel_for_each_rung(ncu, stand_ins, capsys):
    ncu(f"print({raw_csv([TILED])!r})\n")
    assert "saw 1 kernels for 10 rungs" in fails(capsys, "--size", "16", "--profile")


def test_launch_runs_every_call_once_under_the_profiler(monkeypatch):
    events = []
    a = torch.ones(2, 2)
    monkeypatch.setattr(launch, "make_operands", lambda *arguments: (a, a))
    monkeypatch.setattr(launch, "multiply", lambda a, b, precision, force: events.append(force))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: events.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: events.append("stop"))
    calls = [{"force": force, "precision": None} for force in ("naive", "tiled")]
    launch.main(json.dumps({"size": 2, "dtype": "fp16", "layout": "nn", "calls": calls}))
    assert events == ["naive", "tiled", "start", "naive", "tiled", "stop"]


# --- README


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("Before\n<!-- begin: ladder -->\n<!-- end: ladder -->\nAfter\n")
    return path


def rendered(document: Path, *options: str) -> int:
    return render.main(["--document", str(document), "--results", str(document.parent), *options])


def test_readme_before_the_measurement(document):
    assert rendered(document) == 0
    assert "-->\nNot measured yet.\n<!--" in document.read_text()
    assert rendered(document, "--check") == 0
    assert not (document.parent / "docs").exists()


def test_readme(document, measured, capsys):
    store = document.parent / "ladder_nn_fp16.json"
    store.write_text(measure.result_text(measured))
    assert rendered(document, "--check") == 1
    assert "ladder.svg is not up to date" in capsys.readouterr().out
    assert rendered(document) == 0
    text = document.read_text()
    assert "![TFLOP/s of every rung](docs/ladder.svg)" in text
    assert "| `tiled` | tiles of A and B in shared memory | 500.0 | 0.0 | 2.00x | 2.00x |" in text
    assert "| &nbsp;&nbsp;`128x128_scalar` | the same without 128-bit loads |" in text
    assert "| torch (cuBLAS) | torch.matmul |" in text
    assert "`wmma_double_buffered` 20.5x" in text
    assert "`wgmma` did not run: wgmma:128x128 cannot run this: [sm_90a] only." in text
    assert "nn.Linear" not in text
    assert rendered(document, "--check") == 0
    assert "ladder_nn_fp16: measured before" in capsys.readouterr().err

    # The other layout and FP32 join it.
    (document.parent / "ladder_nt_fp16.json").write_text(measure.result_text(measured))
    fp32 = contest.measure_ladder(16, "fp32", "nn", measure.CpuRunner(), rounds=1)
    (document.parent / "ladder_nn_fp32.json").write_text(measure.result_text(fp32))
    assert rendered(document, "--check") == 1
    assert rendered(document) == 0
    text = document.read_text()
    assert "B as `nn.Linear` has it" in text
    assert "| `wmma` | FP16 |" in text
    assert "| `tiled` | FP32 |" in text
    assert "| torch (cuBLAS, TF32) | TF32 |" in text

    # A picture of other numbers.
    measured["rows"][0]["us"] = 1.0
    store.write_text(measure.result_text(measured))
    assert rendered(document) == 0
    stale = (document.parent / "docs" / "ladder.svg").read_bytes()
    measured["rows"][0]["us"] = 2.0
    store.write_text(measure.result_text(measured))
    assert rendered(document) == 0
    assert rendered(document, "--check") == 0
    (document.parent / "docs" / "ladder.svg").write_bytes(stale)
    assert rendered(document, "--check") == 1


def test_readme_without_matplotlib(document, measured, monkeypatch, capsys):
    (document.parent / "ladder_nn_fp16.json").write_text(measure.result_text(measured))
    before = document.read_text()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert rendered(document) == 2
    assert "torch_gemm[plots]" in capsys.readouterr().err
    assert document.read_text() == before


# --- The tutorial

TUTORIAL = render.ROOT / "docs" / "ladder.md"


def test_tutorial_has_a_section_with_figures_for_each_rung():
    markers = re.findall(r"<!-- begin: ladder-(\w+) -->", TUTORIAL.read_text())
    rungs = [rung.kernel for rung in RUNGS]
    assert [name for name in markers if name not in ("measured", "layouts")] == rungs
    headings = re.findall(r"^## \d\. (\w+)$", TUTORIAL.read_text(), re.M)
    assert headings == rungs


def test_tutorial_quotes_the_sources():
    quotes = re.findall(r"^```cpp\n// (\S+)\n(.*?)^```", TUTORIAL.read_text(), re.M | re.S)
    assert len(quotes) == len(RUNGS)
    for path, quoted in quotes:
        source = (render.ROOT / path).read_text()
        for piece in quoted.split("...\n"):
            assert piece in source, f"{path} has no longer:\n{piece}"


def test_figures_of_a_rung_before_the_measurement(tmp_path):
    for name in ("measured", "layouts", *(rung.kernel for rung in RUNGS)):
        assert render.block_of(f"ladder-{name}", tmp_path) == "Not measured yet.\n"


def test_figures_of_a_rung(measured, tmp_path):
    def block(name: str) -> str:
        return render.block_of(f"ladder-{name}", tmp_path)

    store = tmp_path / "ladder_nn_fp16.json"
    store.write_text(measure.result_text(measured))
    tiled = block("tiled")
    assert "| time | 500.0 us |\n" in tiled
    assert "| over naive | 2.00x |\n| over the rung before | 2.00x |\n" in tiled
    assert "| registers per thread | 128 |\n| shared memory per CTA | 3.0 KiB |\n" in tiled
    assert "| occupancy | 25%: 2 x 256 threads per SM |" in tiled
    assert "stalls" not in tiled  # it was not profiled
    assert "| over the rung before | - |" in block("naive")
    assert "| | `tiled_vectorized` | `128x128_scalar` |\n|---|---|---|\n" in block(
        "tiled_vectorized"
    )
    assert block("wgmma") == (
        "`wgmma` did not run: wgmma:128x128 cannot run this: [sm_90a] only.\n"
    )
    assert "16 x 16 x 16, fp16, both operands row-major. NVIDIA H200" in block("measured")
    assert "FP32 FMA 67, Tensor Cores 1070." in block("measured")
    assert block("layouts") == "Not measured yet.\n"

    nt = copy.deepcopy(measured)
    nt["rows"][0]["us"] = 2500.0
    (tmp_path / "ladder_nt_fp16.json").write_text(measure.result_text(nt))
    assert "| `naive` | 1000.0 us | 2500.0 us | 2.50x |\n" in block("layouts")
    assert "wgmma" not in block("layouts")

    naive = ("void tgemm::ladder::naive<__half>(tgemm::GemmParams)", {"wait": "2"})
    counted = map(nsight.describe, nsight.parse_raw_csv(raw_csv([naive, TILED], ("gmma",))))
    rows = [
        {"name": name, **counts} for name, counts in zip(("naive", "tiled"), counted, strict=True)
    ]
    measured["profile"] = {"caption": "", "rows": rows}
    store.write_text(measure.result_text(measured))
    tiled = block("tiled")
    assert "| wavefronts per shared load, store | 4.00, 32.00 |\n" in tiled
    assert "| bank conflicts of loads, stores | 0, 3,100 |\n" in tiled
    assert "| DRAM, L2 | 12.3%, 0.0% of peak |\n| Tensor Cores busy | n/a |\n" in tiled
    assert "| top stalls | long_scoreboard 5.25, wait 1.75, barrier 0.50 |\n" in tiled
    assert "stalls" not in block("tiled_padded")
