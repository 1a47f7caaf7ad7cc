"""The benchmarks' arithmetic and rendering, and every case at a tiny size. No time decides anything here."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import (
    bench_branch_attention,
    bench_linear_logprob,
    bench_policy_loss,
    bench_segment_gae,
    machine,
    peers,
    report,
)
from benchmarks.bench_linear_logprob import OWN_ERROR
from benchmarks.bench_policy_loss import COPY, COPY_NEW, MILLION
from benchmarks.case import Case, Check, NotApplicable, Problem, heavy_tailed_lengths, rotations, turn_mask
from benchmarks.measure import OK, Row, Timing, append_row, fill, interleave, measure_case
from benchmarks.memory import measure_memory
from benchmarks.render import figure, markdown, seconds, sizes_in_words
from benchmarks.targets import OURS, Target, evaluate, targets

BENCHES = (bench_linear_logprob, bench_policy_loss, bench_segment_gae, bench_branch_attention)
MIB = 1 << 20


def test_no_benchmark_is_collected_by_default(request):
    assert request.config.getini("testpaths") == ["tests", "mosaic_kernels"]


# Arithmetic


def test_median_quartiles_and_spread():
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0))
    assert timing.median == 3.0
    assert timing.quartiles == (2.0, 4.0)
    assert timing.spread == pytest.approx(2 / 3)
    assert Timing((7.0,)).quartiles == (7.0, 7.0)


class Clock:
    """Time that passes only when a side runs."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def __call__(self) -> float:
        return self.now

    def side(self, name: str, duration: float):
        def run():
            self.order.append(name)
            self.now += duration

        return run


def test_sides_take_turns():
    clock = Clock()
    sides = {"a": clock.side("a", 1.0), "b": clock.side("b", 2.0)}
    timings = interleave(sides, 3, side_seconds=100, clock=clock)
    assert clock.order == ["a", "b"] * 3
    assert timings["a"].samples == (1.0, 1.0, 1.0) and timings["b"].samples == (2.0, 2.0, 2.0)


def test_a_slow_side_is_sampled_less_and_a_short_one_in_groups():
    clock = Clock()
    sides = {"fast": clock.side("fast", 1e-3), "slow": clock.side("slow", 4.0), "slowest": clock.side("slowest", 20.0)}
    timings = interleave(sides, 6, side_seconds=10, clock=clock)
    assert {name: len(timing.samples) for name, timing in timings.items()} == {"fast": 6, "slow": 3, "slowest": 1}
    assert clock.order.count("fast") == 1 + 6 * 10  # once to see how short it is, then ten calls a sample
    assert timings["fast"].median == pytest.approx(1e-3)


CASE = Case("op", bench_segment_gae.ragged, {"tokens": 4}, ("limit", "mosaic cpu"))


def test_rates_and_ratio_of_a_row():
    problem = Problem({}, "limit", lambda side, outputs: [], bytes=3_000_000_000, flops=6_000_000_000, note="cold")
    row = Row.of(CASE, "mosaic cpu")
    fill(row, Timing((1.0, 2.0, 3.0)), problem, Timing((0.5,)))
    assert (row.median, row.low, row.high, row.samples) == (2.0, 1.5, 2.5, 3)
    assert (row.ratio, row.gigabytes_per_second, row.gigaflops) == (4.0, 1.5, 3.0)
    assert row.as_json()["note"] == "cold" and "extra_memory" not in row.as_json()
    fill(row, Timing((1.0,)), replace(problem, flops=0), None)
    assert row.ratio is None and row.gigaflops is None


def test_formulas_of_bytes_and_flops():
    problem = bench_linear_logprob.forward(10, 4, 50, "bf16", masked=0.5)
    assert problem.flops == 2 * 5 * 4 * 50
    assert problem.bytes == 2 * (50 * 4 + 5 * 4) + 12 * 10
    assert bench_linear_logprob.forward_backward(10, 4, 50, "fp32").flops == 8 * 10 * 4 * 50
    assert bench_policy_loss.policy_loss_forward_backward(400).bytes == 400 * (4 * 4 + 1 + 4)
    assert bench_segment_gae.ragged(400).bytes == 400 * (4 + 4 + 1 + 4 + 4)
    heads = {"heads": 2, "kv_heads": 1, "head_size": 8}
    problem = bench_branch_attention.one_segment(3, "fp32", False, **heads)
    assert problem.flops == 4 * (1 + 2 + 3) * 2 * 8 and problem.bytes == 4 * 3 * 8 * (2 + 1 + 1 + 2)
    problem = bench_branch_attention.branches_of_one_parent(4, 2, 1, "fp32", False, **heads)
    assert problem.flops == 4 * ((1 + 2 + 3 + 4) + (2 + 1) + (4 + 1)) * 2 * 8


def test_data_of_the_cases():
    lengths = heavy_tailed_lengths(1 << 20, 200)
    assert lengths.sum() == 1 << 20 and lengths.min() >= 1 and lengths.max() > 5 * lengths.median()
    assert heavy_tailed_lengths(200, 200).tolist() == [1] * 200
    mask = turn_mask(10_000)
    assert 0.5 < mask.float().mean() < 0.7 and mask[:64].unique().numel() == 1
    weight = bench_linear_logprob.random_weight(20_000, 16, 27.0)
    assert 22 < (torch.randn(64, 16) @ weight.T).amax(1).mean() < 32
    assert weight[:8192].mT.sort().values.equal(weight[8192:16384].mT.sort().values) is False
    assert weight.unique(dim=0).shape[0] == 20_000


@pytest.mark.parametrize(
    ("cache", "size", "count", "word"),
    [(None, 10, 1, "unknown"), (400, 100, 1, "in cache"), (400, 101, 16, "cold"), (400, 4000, 2, "cold")],
)
def test_rotation_over_cold_buffers(monkeypatch, cache, size, count, word):
    monkeypatch.setattr("benchmarks.case.last_level_cache", lambda: cache and cache * MIB)
    assert rotations(size * MIB)[0] == count
    assert word in rotations(size * MIB)[1]


def test_a_machine_without_memory_for_cold_buffers_is_said_to_be_partly_in_cache(monkeypatch):
    monkeypatch.setattr("benchmarks.case.last_level_cache", lambda: 8 << 30)
    assert rotations(3 << 30) == (2, "partly in cache: rotates over 2 sets of 3072 MiB, last-level cache 8192 MiB")


def test_the_machines_name_is_a_file_name_without_a_host(monkeypatch):
    cpu = {"model name": "Intel(R) Xeon(R) Gold 6430 CPU @ 2.10GHz", "cpu family": "6", "model": "143"}
    monkeypatch.setattr(machine, "processor", lambda: cpu)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert machine.machine_slug() == "intel-xeon-gold-6430-family6-model143-2-cores"


def test_the_machines_description_has_what_a_row_needs():
    described = machine.describe()
    assert {"cpu", "flags", "cores", "threads", "commit", "date", "versions"} <= set(described)
    assert described["versions"]["torch"] == torch.__version__


def test_other_work_on_the_machine_is_noticed():
    others = machine.cores_used_by_others()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass  # this process's own work does not count
    used = others()
    assert used is None or 0 <= used <= (os.cpu_count() or 1) + 0.5


def test_rows_are_appended(tmp_path):
    path = tmp_path / "results" / "history.jsonl"
    append_row(path, {"commit": "a"})
    append_row(path, {"commit": "b"})
    assert [json.loads(line)["commit"] for line in path.read_text().splitlines()] == ["a", "b"]


# What a side may be: right, wrong, absent


def build_sides(tokens: int) -> Problem:
    """A limit, a right side, a wrong one, one that is absent and one that serves nothing."""

    def absent():
        raise NotApplicable("it is not installed")

    def unserved():
        raise NotImplementedError("no such kernel")

    right = torch.arange(float(tokens))

    def check(side, outputs):
        return [] if side == "limit" else [Check("sum", (outputs[0] - right).abs().max().item(), 0.5)]

    sides = {
        "limit": lambda: (right.clone(),),
        "right": lambda: (right + 0.25,),
        "wrong": lambda: (right + 1,),
        "nan": lambda: (right * math.nan,),
        "absent": absent,
        "mosaic cpu": unserved,
    }
    return Problem(sides, "limit", check, bytes=8 * tokens)


def test_only_right_sides_are_timed():
    case = Case("op", build_sides, {"tokens": 4}, ("limit", "right", "wrong", "nan", "absent", "mosaic cpu"), 2)
    rows = {row.side: row for row in measure_case(case.without(("absent",)))}
    assert rows["limit"].ratio == 1.0
    assert rows["right"].status == OK and rows["right"].median > 0 and rows["right"].errors == {"sum": 0.25}
    assert rows["wrong"].status == "not reported: error, sum is off by 1, more than 0.5"
    assert rows["nan"].status.startswith("not reported: error") and rows["nan"].median is None
    assert rows["mosaic cpu"].status == "not applicable: no such kernel"
    assert rows["absent"].status == "not measured: in the full form only"
    late = {row.side: row for row in measure_case(case, deadline=-math.inf)}
    assert late["right"].status.startswith("not measured") and late["limit"].status == OK
    assert late["mosaic cpu"].status == "not applicable: no such kernel"


def test_a_missing_peer_is_named():
    @peers.peer("no-such-package")
    def call():
        import no_such_package  # noqa: F401

    with pytest.raises(NotApplicable, match="^no-such-package is not installed$"):
        call()

    @peers.peer("some-package")
    def broken():
        raise RuntimeError("0 active drivers\nmore")

    with pytest.raises(NotApplicable, match="^some-package on this machine: RuntimeError: 0 active drivers$"):
        broken()

    @peers.peer("some-package")
    def half_installed():
        import no_such_package  # noqa: F401

    with pytest.raises(NotApplicable, match="^some-package needs no_such_package, which is not installed$"):
        half_installed()


def test_memory_is_what_a_call_needs_beyond_its_outputs():
    case = Case("rollout_correction", bench_policy_loss.rollout_correction_weights, {"tokens": 4 * MIB}, ())
    head = Case(
        "linear_logprob", bench_linear_logprob.forward, {"tokens": 8, "hidden": 4, "vocabulary": 9, "dtype": "fp32"}, ()
    )
    requests = [(case, bench_policy_loss.tiny(case), side) for side in ("eager", COPY_NEW)]
    eager, copy, absent = measure_memory([*requests, (head, head, "liger triton")])
    # 4M float32 are 16 MiB: eager code holds at least one temporary of that size beside its output, a copy none
    assert eager.status == copy.status == OK
    assert 16 * MIB <= eager.extra_memory < 100 * MIB and copy.extra_memory < 8 * MIB
    assert absent.status.startswith("not applicable: liger-kernel") and absent.extra_memory is None


# Targets


def row_of(target: Target, side: str, median: float | None = 1.0, **values) -> Row:
    sizes = {"tokens": 2048, "hidden": 576, **{name: size for name, size in target.sizes.items() if size is not None}}
    return Row("key", target.op, target.problem, side, sizes, median=median, spread=0.1, **values)


@pytest.mark.parametrize(
    ("relation", "bound", "mine", "theirs", "verdict", "measured"),
    [
        ("<=", 0.9, 0.9, 1.0, "holds", 0.9),
        ("<=", 0.9, 0.91, 1.0, "does not hold", 0.91),
        ("<", 1.0, 1.0, 1.0, "does not hold", 1.0),
        (">=", 500.0, 0.001, 0.5, "holds", 500.0),
        (">=", 500.0, 0.001, 0.499, "does not hold", 499.0),
        ("<=", 0.9, math.nan, 1.0, "does not hold", math.nan),
    ],
)
def test_a_targets_verdict(relation, bound, mine, theirs, verdict, measured):
    target = Target("name", "op", "problem", {"tokens": 2048, "masked": None}, bound, relation, against="peer")
    other_case = replace(row_of(target, OURS, 9.0), sizes={"tokens": 2048, "masked": 0.9})
    rows = [other_case, row_of(target, OURS, mine), replace(row_of(target, "peer", theirs), spread=0.3)]
    result = evaluate(target, rows, [])
    assert result.state == verdict and result.measured == pytest.approx(measured, nan_ok=True)
    assert result.noise == 0.3


def test_memory_and_error_verdicts():
    forward = Target("memory", "op", "forward", {"tokens": 2048}, 64.0, kind="memory")
    both = replace(forward, problem="forward backward")
    rows = [row_of(forward, OURS, None, extra_memory=66 * MIB), row_of(both, OURS, None, extra_memory=66 * MIB)]
    assert evaluate(forward, [], rows).state == "does not hold"
    assert evaluate(both, [], rows).state == "holds"  # one float32 [T, H] of 4.5 MiB is allowed
    error = Target("error", "op", "forward", {}, 1.0, kind="error")
    exact = row_of(error, OURS, errors={"logprob": 4e-6}, facts={OWN_ERROR: 5e-6})
    assert evaluate(error, [exact], []).measured == pytest.approx(0.8)
    assert evaluate(error, [replace(exact, errors={"logprob": 6e-6})], []).state == "does not hold"


def test_what_was_not_measured_says_why():
    target = Target("name", "op", "problem", {}, 1.0, against="peer")
    assert "no row of 'mosaic cpu'" in evaluate(target, [], []).state
    unserved = replace(row_of(target, OURS, None), status="not applicable: no such kernel")
    assert evaluate(target, [unserved], []).state == "not measured: no such kernel"
    wrong = replace(row_of(target, OURS, None), status="not reported: error, x is off")
    assert evaluate(target, [wrong], []).state == "not measured: not reported: error, x is off"
    absent = replace(row_of(target, "peer", None), status="not applicable: peer is not installed")
    assert "peer is not installed" in evaluate(target, [row_of(target, OURS), absent], []).state
    assert "no such row" in evaluate(target, [row_of(target, OURS)], []).state


def test_every_target_finds_its_case():
    """In the quick and in the full form each target's case is run, with our side and the one it is compared with."""
    for quick in (True, False):
        cases = [case for bench in BENCHES for case in bench.cases(quick)]
        memory = bench_linear_logprob.memory_cases(quick)
        for target in targets():
            timings = [Row.of(case, side, median=1.0, spread=0.0) for case in cases for side in (OURS, *case.sides)]
            for row in timings:
                row.errors, row.facts = {"logprob": 1.0}, {OWN_ERROR: 1.0}
            rows = [Row.of(case, OURS, extra_memory=0) for case in memory]
            assert evaluate(target, timings, rows).measured is not None, target


# Rendering


def test_words():
    assert [seconds(x) for x in (None, 2.5, 0.0123, 4.5e-5)] == ["", "2.5 s", "12.3 ms", "45 µs"]
    assert [figure(x) for x in (None, 0.8766, 767.4)] == ["", "0.877", "767"]
    assert sizes_in_words({"tokens": 16 * MILLION, "dtype": "bf16", "backward": False}) == "T 16M, dtype bf16"


def test_the_report_says_every_verdict(tmp_path):
    target = next(t for t in targets() if t.op == "segment_gae" and t.against == COPY)
    gae = [row_of(target, OURS, 2.5), row_of(target, COPY, 1.0), row_of(target, "verl", None)]
    gae[2].status, gae[2].spread = "not applicable: verl is not installed", None
    for row in gae[:2]:
        row.ratio, row.gigabytes_per_second, row.samples, row.limit = row.median, 10.0, 5, COPY
    gae[0].note = "in cache"
    sweep = [Row("k", "linear_logprob", "forward", "GEMM", {"tokens": t, "masked": 0.5}, median=t) for t in (1, 2)]
    memory = [Row("k", "linear_logprob", "forward", "eager", {"tokens": 2, "vocabulary": 3}, extra_memory=MIB)]
    errors = [
        Row("k", "linear_logprob", "forward", "eager", {"dtype": "bf16", "top_logit": 22.0}, errors={"logprob": 0.1})
    ]
    for row in sweep:
        row.gigabytes_per_second = 1.0
    sections = {"segment_gae": gae, "tokens sweep": sweep, "masked sweep": sweep, "memory": memory, "errors": errors}
    verdicts = report.judge(sections)
    description = {**machine.describe(), "machine": "a-machine", "quick": True, "seconds": 1.0, "others": 0.25}
    text = markdown(description, verdicts, sections, {})
    assert "| segment_gae | ragged, 1M | T 1M, H 576 | 2.5 | <= 3 copies | 10 % | holds |" in text
    assert "| mosaic cpu | 2.5 s | 10 % of 5 | 2.5 | 10 GB/s |  |" in text
    assert "threads; other work kept 0.25 cores busy; " in text
    assert "| verl |  |  |  |  | not applicable: verl is not installed |" in text
    assert "not measured: no row of 'mosaic cpu'" in text

    paths = report.write(description, sections, verdicts, tmp_path)
    content = json.loads((tmp_path / "a-machine.json").read_text())
    assert len(content["targets"]) == len(targets()) and content["run"]["versions"]["torch"] == torch.__version__
    assert {entry["verdict"].partition(":")[0] for entry in content["targets"]} == {"holds", "not measured"}
    history = json.loads((tmp_path / "a-machine.history.jsonl").read_text())
    assert history["targets"] == {"segment_gae: ragged, 1M, <= 3 copies": 2.5} and history["commit"]
    pictures = [path for path in paths if path.suffix == ".png"]
    assert len(pictures) == 4 and all(path.stat().st_size < 100_000 for path in pictures)

    lines = []
    report.print_targets(verdicts, lines.append)
    assert len(lines) == 2 + len(targets()) and any("holds" in line for line in lines)


def test_a_folder_that_takes_no_results_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "run", lambda *_: pytest.fail("measured although nothing can be written"))
    (tmp_path / "file").write_text("")
    for folder, writable in ((tmp_path / "file", True), (tmp_path / "read-only", False)):
        monkeypatch.setattr(report.os, "access", lambda *_, writable=writable: writable)  # root may write anywhere
        with pytest.raises(SystemExit):
            report.main(["--output", str(folder)])
        assert f"--output: {folder}" in capsys.readouterr().err


def test_a_run_killed_while_it_writes_leaves_the_results_before_it(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    report.replace_text(path, "before")
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        report.replace_text(path, "after")
    assert path.read_text() == "before"


# Every case, tiny

SLOW_SIDES = ("torch.compile", "cut-cross-entropy torch_compile")  # they compile for seconds


def tiny_cases() -> dict[str, Case]:
    """Every case of every form; those that differ only in size become one, with the sides of all."""
    found: dict[str, Case] = {}
    head = bench_linear_logprob
    lists = [bench.cases for bench in BENCHES]
    lists += [head.tokens_sweep, head.masked_sweep, head.memory_cases, head.error_cases]
    for bench, cases in zip((*BENCHES, head, head, head, head), lists):
        for case in (*cases(quick=True), *cases(quick=False)):
            small = bench.tiny(case)
            others = found[small.key].sides if small.key in found else ()
            sides = dict.fromkeys((*others, *small.sides))
            found[small.key] = replace(small, sides=tuple(side for side in sides if side not in SLOW_SIDES))
    return found


@pytest.mark.parametrize("case", tiny_cases().values(), ids=tiny_cases())
def test_every_side_of_a_tiny_case_is_right_or_says_why_not(case):
    rows = measure_case(case, side_seconds=0.0)
    assert [row.side for row in rows] == list(case.sides)
    for row in rows:
        assert row.status == OK or row.status.startswith("not applicable: "), (row.side, row.status)
        if row.side in ("mosaic reference", "mosaic default", "GEMM", "eager", COPY):
            assert row.status == OK and row.median > 0, (row.side, row.status)
