"""promises.py says of every configuration what the kernel table says.

On any machine: a program that the C++ tests build (tests/cpp/selection.cpp) answers for an H200.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import problems
import pytest
import torch
from problems import ALIGNMENTS, EPILOGUES, LAYOUTS, MODES, Case
from promises import CONFIGS, Config
from torch import Tensor

PROGRAM = Path(__file__).parents[1] / "build" / "cmake" / "tests" / "cpp" / "selection"


def described(name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    sizes = (tensor.dim(), *tensor.shape, *tensor.stride())
    return " ".join((name, dtype, str(tensor.data_ptr()), *map(str, sizes)))


@functools.cache
def calls(case: Case) -> tuple[str, ...]:
    """What problems.check calls for a case, as the program reads it, without the forced kernel."""
    epilogue = EPILOGUES[case.epilogue]
    operands = problems.draw(case, "cpu")
    tensors = {name: t for name, t in vars(operands).items() if t is not None}
    how = f"{MODES[case.mode].precision or 'ieee'} {epilogue.activation or 'none'}"

    def call(**outs: Tensor) -> str:
        return " ".join([how, *(described(*item) for item in (tensors | outs).items())])

    lines = [call(out=problems.poisoned_out(case, "cpu"))]
    if epilogue.preact:  # the op allocates its outputs
        fresh = torch.empty(case.m, case.n, dtype=problems.out_dtype(case))
        lines.append(call(out=fresh, preact=fresh))
    return tuple(lines)


def answers(asked: Iterable[tuple[Config, Case]]) -> Iterator[tuple[Config, Case, list[str]]]:
    """For each case, a plan or the sentence of a refusal for each of its calls."""
    if not CONFIGS:
        pytest.skip("PROMISES NOT CHECKED: there is no kernel table without the CUDA library")
    if not PROGRAM.is_file():
        pytest.skip("PROMISES NOT CHECKED: make test-cpp has not built tests/cpp/selection.cpp")
    asked = [(config, case, calls(case)) for config, case in asked]
    lines = [f"{config} {line}" for config, _, calls in asked for line in calls]
    text = "\n".join(lines) + "\n"
    run = subprocess.run([PROGRAM], input=text, capture_output=True, text=True, check=True)
    given = iter(run.stdout.splitlines())
    for config, case, calls_ in asked:
        yield config, case, list(itertools.islice(given, len(calls_)))


def refuses(config: Config, answer: str) -> bool:
    """Whether the answer is a refusal, and not the name of a plan."""
    assert answer.startswith(str(config)), answer
    return answer.startswith(f"{config} cannot run ")


def random_cases(rng: random.Random, count: int, sizes: tuple[int, ...]) -> list[Case]:
    return [
        Case(
            m=rng.choice(sizes),
            n=rng.choice(sizes),
            k=rng.choice(sizes),
            mode=rng.choice(tuple(MODES)),
            layout=rng.choice(LAYOUTS),
            alignment=rng.choice(("aligned", *ALIGNMENTS)),
            epilogue=rng.choice(tuple(EPILOGUES)),
            out_layout=rng.choice(("row", "column")),
            out_alignment=rng.choice((None, *ALIGNMENTS)),
            across=rng.random() < 0.2,
        )
        for _ in range(count)
    ]


def test_promises_are_what_the_table_runs():
    cases = random_cases(random.Random(1), 1500, (2, 8, 24, 33, 40, 44, 64))
    seen = set()
    for config, case, given in answers(itertools.product(CONFIGS, cases)):
        ran = not any(refuses(config, answer) for answer in given)
        assert config.runs(case) == ran, (config, case, given)
        whole = ran and EPILOGUES[case.epilogue].gated and given == [str(config)]
        if EPILOGUES[case.epilogue].gated:
            assert config.gates(case) == whole, (config, case, given)
        seen.add((config, ran, whole))
    for config in CONFIGS:
        assert (config, False, False) in seen
        assert (config, True, False) in seen
        assert ((config, True, True) in seen) == config.promise.gates


@pytest.mark.parametrize("sizes", [(2, 8, 33, 64, 75), (1, 2, 17)], ids=["larger", "smallest"])
def test_fitted_cases_run(sizes: tuple[int, ...]):
    """What the GPU suite asks for: every configuration gets problems that fit it, and runs them."""
    asked = []
    for config in CONFIGS:
        rng = random.Random(str(config))
        for case in random_cases(rng, 400, sizes):
            alignments = config.alignments(case.mode)
            outs = config.out_layouts(case.layout)
            if case.mode not in config.modes or not outs:
                continue
            case = dataclasses.replace(
                case,
                alignment=rng.choice(alignments),
                out_layout=rng.choice(outs),
                epilogue=rng.choice(("none", "bias", "residual", case.epilogue)),
            )
            case = config.fit(case)
            assert config.fit(case) == case
            if config.runs(case):
                asked.append((config, case))
            if case.out_layout == "row" and case.epilogue in ("none", "bias"):
                assert config.runs(case)
    assert {config for config, _ in asked} == set(CONFIGS)
    for config, case, given in answers(asked):
        assert not any(refuses(config, answer) for answer in given), (config, case, given)


def test_promises_of_nothing_to_add_up_or_nowhere_to_put_it():
    sizes = ((65, 33, 0), (1, 1, 0), (0, 33, 16), (65, 0, 16), (0, 0, 0))
    cases = [
        (config, config.fit(Case(m, n, k, mode, epilogue=epilogue, out_layout=out_layout)))
        for config in CONFIGS
        for mode in config.modes
        for (m, n, k), epilogue in itertools.product(sizes, EPILOGUES)
        for out_layout in ("row", "column")
    ]
    for config, case, given in answers((c, case) for c, case in cases if c.runs(case)):
        assert not any(refuses(config, answer) for answer in given), (config, case, given)
