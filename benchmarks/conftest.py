"""`pytest benchmarks/bench_<op>.py`: every side of every case under pytest-benchmark, with its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.case import Case, Problem
from benchmarks.measure import OK, first_call

_built: dict[str, Problem] = {}  # the case that ran last: its sides follow one another and share the inputs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"case", "side"} <= set(metafunc.fixturenames):
        pairs = [(case, side) for case in metafunc.module.cases(quick=False) for side in case.sides]
        metafunc.parametrize("case, side", pairs, ids=[f"{case.key} {side}" for case, side in pairs])


@pytest.fixture
def time_side(benchmark: Any) -> Callable[[Case, str], None]:
    """Checks the side against float64, then times it; a side that cannot run here is skipped with its reason."""

    def run(case: Case, side: str) -> None:
        if case.key not in _built:
            _built.clear()
            _built[case.key] = case.build()
        problem = _built[case.key]
        status, checks = first_call(problem, side)
        if status.startswith("not applicable"):
            pytest.skip(status)
        assert status == OK, status
        benchmark.group = case.key
        benchmark.extra_info.update(
            sizes=case.sizes,
            bytes=problem.bytes,
            flops=problem.flops,
            limit=problem.limit,
            note=problem.note,
            errors={check.what: check.error for check in checks},
        )
        benchmark(problem.sides[side])

    return run
