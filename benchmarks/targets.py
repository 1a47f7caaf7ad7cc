"""The targets of the CPU kernels, and whether a run's rows hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.bench_branch_attention import SDPA
from benchmarks.bench_linear_logprob import EVERY_ROW, OWN_ERROR
from benchmarks.bench_policy_loss import COPY, MILLION
from benchmarks.bench_segment_gae import VERL_LOOP
from benchmarks.measure import OK, Row
from mosaic_kernels import available_backends

OURS = "mosaic cpu"
MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """One figure to reach.

    Args:
        name: what is compared.
        op, problem, sizes: the case: rows whose sizes include these. Sizes left out are free.
        bound: the figure.
        relation: "<=", "<" or ">=".
        against: the side whose time ours is divided by (for ">=", that is divided by ours).
        kind: "time"; "memory" (MiB beyond inputs and outputs, and for backward beyond one float32 [T, H]); or "error"
            (over that of PyTorch's own float32 product on the same rows).
        unit: what the measured figure is counted in.
        wanted: a size that the target names, where a quick run may take another.
    """

    name: str
    op: str
    problem: str
    sizes: dict[str, Any]
    bound: float
    relation: str = "<="
    against: str = ""
    kind: str = "time"
    unit: str = ""
    wanted: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    target: Target
    state: str  # "holds", "does not hold", or "not measured: why"
    measured: float | None = None
    noise: float | None = None
    sizes: dict[str, Any] = field(default_factory=dict)


HEAD, LARGE_HEAD = {"tokens": 2048, "vocabulary": 49152}, {"vocabulary": 151936}


def _linear_logprob() -> list[Target]:
    op, found = "linear_logprob", []
    for dtype, small, large, both in (("bf16", 0.90, 1.05, 3.8), ("fp32", 0.75, 0.85, 3.2)):
        head = {**HEAD, "dtype": dtype}
        whole = {**head, "masked": None}
        gemm = {"against": "GEMM", "unit": "GEMMs"}
        found += [
            Target(f"forward, {dtype}", op, "forward", whole, small, **gemm),
            Target(
                f"forward, {dtype}, large head",
                op,
                "forward",
                {**LARGE_HEAD, "dtype": dtype},
                large,
                **gemm,
                wanted={"tokens": 512},
            ),
            Target(f"forward and backward, {dtype}", op, "forward backward", head, both, **gemm),
            Target(
                f"90 % of rows masked, {dtype}",
                op,
                "forward",
                {**head, "masked": 0.9},
                0.16,
                against=EVERY_ROW,
                unit="of every row",
            ),
        ]
        for name, sizes in (("", whole), (", large head", {**LARGE_HEAD, "dtype": dtype})):
            what = f"largest log-prob error, {dtype}{name}"
            found.append(Target(what, op, "forward", sizes, 1.0, kind="error", unit="of PyTorch's float32"))
    head = {**HEAD, "dtype": "bf16"}
    found += [
        Target("extra memory, forward", op, "forward", head, 64.0, kind="memory", unit="MiB"),
        Target("extra memory, forward and backward", op, "forward backward", head, 64.0, kind="memory", unit="MiB"),
    ]
    return found


def _attention() -> list[Target]:
    return [
        Target(
            f"{what}, {direction}, {dtype}",
            "branch_attention",
            problem,
            {"dtype": dtype, "backward": backward},
            1.0,
            relation,
            against=SDPA,
            unit="of SDPA",
        )
        for problem, what, relation in (
            ("one segment", "one segment", "<="),
            ("many short segments", "many short segments", "<"),
        )
        for backward, direction in ((False, "forward"), (True, "forward and backward"))
        for dtype in ("fp32", "bf16")
    ]


def targets() -> list[Target]:
    loss, gae = "policy loss forward backward", "ragged"
    million, cold = {"tokens": MILLION}, {"tokens": 16 * MILLION}
    position = {"correction": None}
    copy = {"against": COPY, "unit": "copies"}
    batch = {"rows": 8, "length": 4096, "masked": True}
    return [
        *_linear_logprob(),
        Target("forward and backward, 1M", "policy_loss", loss, million, 0.125, against="eager", unit="of eager"),
        Target("forward and backward, 1M", "policy_loss", loss, million, 3.0, **copy),
        Target("forward and backward, 16M", "policy_loss", loss, cold, 2.0, **copy),
        Target("padded batch", "segment_gae", "padded", batch, 500.0, ">=", against=VERL_LOOP, unit="times faster"),
        Target("ragged, 1M", "segment_gae", gae, {**million, **position}, 3.0, **copy),
        Target("ragged, 16M", "segment_gae", gae, {**cold, **position}, 2.0, **copy),
        *_attention(),
    ]


def find(rows: list[Row], target: Target, side: str) -> Row | None:
    """The first row of `side` in the target's case; a size of None means that the row does not have it."""
    for row in rows:
        if (row.op, row.problem, row.side) == (target.op, target.problem, side):
            if all(row.sizes.get(name) == value for name, value in target.sizes.items()):
                return row
    return None


def evaluate(target: Target, timings: list[Row], memory: list[Row]) -> Verdict:
    """Whether the rows of a run hold the target."""
    row = find(memory if target.kind == "memory" else timings, target, OURS)
    if row is None:
        return Verdict(target, f"not measured: no row of {OURS!r}; that backend is {available_backends()['cpu']}")
    if row.status != OK:
        return Verdict(target, f"not measured: {row.status.removeprefix('not applicable: ')}", sizes=row.sizes)
    if target.kind == "memory":
        allowed = 4 * row.sizes["tokens"] * row.sizes["hidden"] if "backward" in target.problem else 0
        measured = max(0, row.extra_memory - allowed) / MIB
        return Verdict(target, state(measured, target), measured, None, row.sizes)
    if target.kind == "error":
        measured = row.errors["logprob"] / max(row.facts[OWN_ERROR], 1e-12)
        return Verdict(target, state(measured, target), measured, None, row.sizes)
    other = find(timings, target, target.against)
    if other is None or other.median is None:
        reason = "the run has no such row" if other is None else other.status
        return Verdict(target, f"not measured: {target.against}: {reason}", sizes=row.sizes)
    measured = row.median / other.median
    if target.relation == ">=":
        measured = 1 / measured
    return Verdict(target, state(measured, target), measured, max(row.spread, other.spread), row.sizes)


def state(measured: float, target: Target) -> str:
    """In words; a NaN holds nothing."""
    holds = {"<=": measured <= target.bound, "<": measured < target.bound, ">=": measured >= target.bound}
    return "holds" if holds[target.relation] else "does not hold"
