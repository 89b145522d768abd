"""The kernels on a GPU; a complete run of this folder leaves tests/gpu_receipt.json."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import problems
import pytest
import receipt
import torch

from torch_gemm._digest import build_record, source_digest
from torch_gemm.info import driver_version

FOLDER = Path(__file__).parent


class Run:
    """What the receipt says of a run, collected while it goes on."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.gemm_problems = 0
        self.constants: dict[str, float] = {}
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        if not name.startswith("tests/gpu/"):
            return
        if report.failed:
            self.failed.add(name)
            self.passed.discard(name)
        elif report.skipped:
            # (file, line, "Skipped: reason") for a skip, text for an expected failure.
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.skipped[name] = str(text).removeprefix("Skipped: ")
        elif report.when == "call":
            self.passed.add(name)

    def count(self, gemm_problems: int, constants: dict[str, float]) -> None:
        """Adds problems that were checked and, by name, the share of the accuracy constant they used."""
        self.gemm_problems += gemm_problems
        for name, used in constants.items():
            self.constants[name] = max(self.constants.get(name, 0.0), used)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error: object) -> None:
        """With pytest-xdist, tests run in processes of their own; reports arrive here, counts do not."""
        self.count(
            **getattr(node, "workeroutput", {}).get("counts", {"gemm_problems": 0, "constants": {}})
        )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RUN] = Run()
    config.pluginmanager.register(config.stash[_RUN], "torch_gemm_gpu_receipt")


_RUN: pytest.StashKey[Run] = pytest.StashKey()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest tests go one each to the shares into which pytest-xdist first cuts the list, lest
    # all other processes wait at the end for one that has several of them.
    long = [item for item in items if item.path.name == "test_sanitizer.py"]
    rest = [item for item in items if item.path.name != "test_sanitizer.py"]
    step = len(rest) // max(len(long), 1)
    for i, item in enumerate(long):
        rest.insert(i * (step + 1), item)
    items[:] = rest


@pytest.fixture
def count_problems(request: pytest.FixtureRequest) -> Callable[[int], None]:
    """Adds to the number of GEMM problems that the receipt reports."""
    run = request.config.stash[_RUN]
    return lambda problems: run.count(problems, {})


@pytest.fixture
def ledger(
    device: str, count_problems: Callable[[int], None], request: pytest.FixtureRequest
) -> Iterator[problems.Ledger]:
    ledger = problems.Ledger(device, count_problems)
    yield ledger
    request.config.stash[_RUN].count(0, ledger.constants)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(problems.BASE_SEED)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    run = config.stash[_RUN]
    if hasattr(config, "workeroutput"):  # one of pytest-xdist's processes
        config.workeroutput["counts"] = {
            "gemm_problems": run.gemm_problems,
            "constants": run.constants,
        }
        return
    if not (_is_complete(config, exitstatus) and run.passed | run.failed):
        return
    record = build_record()
    receipt.write(
        {
            # Of the library that ran, which need not be that of the sources beside it.
            "csrc_digest": record["csrc_digest"] if record else str(source_digest()),
            "card": torch.cuda.get_device_name(),
            "driver": driver_version() or "unknown",
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "python": platform.python_version(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "seconds": round(time.monotonic() - run.start, 1),
            "seed": problems.BASE_SEED,
            "passed": len(run.passed),
            "failed": len(run.failed),
            "skipped": len(run.skipped),
            "skip_reasons": run.skipped,
            "failures": sorted(run.failed),
            "gemm_problems": run.gemm_problems,
        }
    )


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    run = config.stash[_RUN]
    if run.gemm_problems:
        terminalreporter.write_line(
            f"{run.gemm_problems} GEMM problems checked against FP64 "
            f"(TGEMM_TEST_SEED={problems.BASE_SEED})"
        )
    if run.constants:
        used = ", ".join(f"{name} {share:.2f}" for name, share in sorted(run.constants.items()))
        terminalreporter.write_line(f"largest share of the accuracy constant c: {used}")
    if config.option.markexpr == "gpu" and not _is_complete(config, exitstatus):
        terminalreporter.write_line("tests/gpu_receipt.json not written: not a complete run")


def _is_complete(config: pytest.Config, exitstatus: int) -> bool:
    """Whether this was `pytest -m gpu` with nothing left out."""
    option = config.option
    whole_folder = all(
        "::" not in argument and not Path(argument).is_file() for argument in config.args
    )
    finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    narrowed = option.keyword or getattr(option, "deselect", None) or getattr(option, "lf", False)
    cut_short = option.maxfail and exitstatus == pytest.ExitCode.TESTS_FAILED
    complete = whole_folder and finished and not narrowed and not cut_short
    return option.markexpr == "gpu" and complete
