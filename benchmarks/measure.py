"""Time: sides run by turns in one process, medians of several repeats, ratios to the limit of the same run."""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Check, NotApplicable, Problem

OK = "ok"
# A side whose call is shorter than this is called several times for one sample.
SHORTEST_SAMPLE = 10e-3
MOST_CALLS = 500
# Of a side that takes long, fewer samples are taken, but no fewer than this unless one alone takes longer.
SIDE_SECONDS = 12.0
FEWEST_SAMPLES = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, sampled several times."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median: the noise of this run."""
        low, high = self.quartiles
        return (high - low) / self.median


@dataclass
class Row:
    """One side of one case. Times are in seconds, memory in bytes; None where not measured."""

    case: str
    op: str
    problem: str
    side: str
    sizes: dict[str, Any]
    status: str = OK
    median: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    spread: float | None = None
    limit: str = ""
    ratio: float | None = None
    gigabytes_per_second: float | None = None
    gigaflops: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    extra_memory: int | None = None
    note: str = ""
    facts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, side: str, **values: Any) -> Row:
        return cls(case.key, case.op, case.name, side, case.sizes, **values)

    def as_json(self) -> dict:
        """Without the fields that hold nothing; figures that are no numbers as words, which JSON has none for."""
        return {key: _plain(value) for key, value in asdict(self).items() if value not in (None, "", {})}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def interleave(
    sides: dict[str, Callable[[], Any]],
    repeats: int,
    *,
    side_seconds: float = SIDE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times the sides by turns, `repeats` rounds, so that a slow spell of the machine meets them all.

    Every side must have been called before (warm-up). A side that has taken `side_seconds` is left out of further
    rounds once it has FEWEST_SAMPLES samples, or at once if a single call takes that long. A sample of a short side is
    the mean of several calls.
    """

    def sample(run: Callable[[], Any], calls: int) -> float:
        start = clock()
        for _ in range(calls):
            run()
        return (clock() - start) / calls

    collecting = gc.isenabled()
    gc.disable()
    calls: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    try:
        for name, run in sides.items():
            once = sample(run, 1)
            long = once >= SHORTEST_SAMPLE
            calls[name] = 1 if long else min(MOST_CALLS, math.ceil(SHORTEST_SAMPLE / max(once, 1e-7)))
            samples[name] = [once] if long else []
        for _ in range(repeats):
            for name, run in sides.items():
                taken, spent = len(samples[name]), sum(samples[name])
                few = taken < FEWEST_SAMPLES and spent < taken * side_seconds
                if taken == 0 or (taken < repeats and (few or spent < side_seconds)):
                    samples[name].append(sample(run, calls[name]))
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


def first_call(problem: Problem, side: str) -> tuple[str, list[Check]]:
    """Warms the side up and checks its outputs: (status, checks). Only a status of OK may be timed."""
    try:
        checks = problem.check(side, problem.sides[side]())
    except (NotApplicable, NotImplementedError) as reason:
        return f"not applicable: {reason}", []
    for check in checks:
        if not check.passed:
            wrong = f"{check.what} is off by {check.error:.3g}, more than {check.tolerance:.3g}"
            return f"not reported: error, {wrong}", checks
    return OK, checks


def measure_case(case: Case, *, deadline: float = math.inf, side_seconds: float = SIDE_SECONDS) -> list[Row]:
    """Runs the case: one row a side, in the order of its sides.

    Sides whose turn to warm up comes after `deadline` (time.monotonic) are not run, but for the limit and ours, which
    the targets need.
    """
    problem = case.build()
    rows, runnable = {}, {}
    for side in case.sides:
        if time.monotonic() > deadline and side != problem.limit and not side.startswith("mosaic"):
            rows[side] = Row.of(case, side, status="not measured: the time of this section is spent")
            continue
        status, checks = first_call(problem, side)
        rows[side] = Row.of(case, side, status=status, errors={check.what: check.error for check in checks})
        if status == OK:
            runnable[side] = problem.sides[side]
    timings = interleave(runnable, case.repeats, side_seconds=side_seconds)
    limit = timings.get(problem.limit)
    for side, timing in timings.items():
        fill(rows[side], timing, problem, limit)
    left_out = [Row.of(case, side, status="not measured: in the full form only") for side in case.left_out]
    return [rows[side] for side in case.sides] + left_out


def errors_of_case(case: Case) -> list[Row]:
    """Runs each side once and compares it with float64; no timing."""
    problem, rows = case.build(), []
    for side in case.sides:
        status, checks = first_call(problem, side)
        rows.append(Row.of(case, side, status=status, errors={check.what: check.error for check in checks}))
    return rows


def fill(row: Row, timing: Timing, problem: Problem, limit: Timing | None) -> None:
    """Puts a timing's figures into a row: rates from the bytes and FLOPs of the problem, the ratio to the limit."""
    row.median, (row.low, row.high) = timing.median, timing.quartiles
    row.samples, row.spread = len(timing.samples), timing.spread
    row.limit, row.note, row.facts = problem.limit, problem.note, problem.facts
    row.ratio = None if limit is None else timing.median / limit.median
    row.gigabytes_per_second = problem.bytes / timing.median / 1e9
    row.gigaflops = problem.flops / timing.median / 1e9 if problem.flops else None


def append_row(path: Path, row: dict) -> None:
    """Adds one line of JSON to `path`, which grows by a line a measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")
