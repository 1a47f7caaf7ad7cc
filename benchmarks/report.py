"""`python -m benchmarks.report [--quick]`: everything on this machine, in one run, with the targets' verdicts.

Writes `benchmarks/results/<machine>.md`, `.json` and plots, and adds a line to `<machine>.history.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import bench_branch_attention, bench_linear_logprob, bench_policy_loss, bench_segment_gae
from benchmarks.case import Case
from benchmarks.machine import ROOT, cores_used_by_others, describe
from benchmarks.measure import Row, append_row, errors_of_case, measure_case
from benchmarks.memory import measure_memory
from benchmarks.render import figure, in_words, markdown, target_lines
from benchmarks.targets import Verdict, evaluate, targets

RESULTS = ROOT / "benchmarks" / "results"
# From here on a quick run leaves out what no target needs; what runs then still has to end within three minutes.
QUICK_SECONDS = 155.0
QUICK_SIDE_SECONDS, FULL_SIDE_SECONDS = 2.5, 6.0


def sweep_spent(case: Case, deadline: float) -> list[Row]:
    """Rows that say that the case was left out, if its turn comes after the deadline."""
    if time.monotonic() <= deadline:
        return []
    return [Row.of(case, side, status="not measured: the quick form's time is spent") for side in case.sides]


def run(quick: bool, say: Callable[[str], None]) -> dict[str, list[Row]]:
    """All rows, by section. The targets' cases come first, so that a slow machine still measures them."""
    start = time.monotonic()
    deadline = start + QUICK_SECONDS if quick else math.inf
    side_seconds = QUICK_SIDE_SECONDS if quick else FULL_SIDE_SECONDS

    def timed(case: Case) -> list[Row]:
        say(f"{time.monotonic() - start:4.0f} s  {case.key}")
        return measure_case(case, deadline=deadline, side_seconds=side_seconds)

    def unless_spent(case: Case, measure: Callable[[Case], list[Row]]) -> list[Row]:
        return sweep_spent(case, deadline) or measure(case)

    wanted = {
        "segment_gae": bench_segment_gae.cases(quick),
        "policy_loss": bench_policy_loss.cases(quick),
        "branch_attention": bench_branch_attention.cases(quick),
        "linear_logprob": bench_linear_logprob.target_cases(quick),
    }
    sections = {op: [row for case in cases for row in timed(case)] for op, cases in wanted.items()}
    memory = bench_linear_logprob.memory_cases(quick)
    say(f"{time.monotonic() - start:4.0f} s  memory")
    requests = [(case, bench_linear_logprob.tiny(case), side) for case in memory for side in case.sides]
    sections["memory"] = measure_memory(requests)
    say(f"{time.monotonic() - start:4.0f} s  errors")
    errors = bench_linear_logprob.error_cases(quick)
    sections["errors"] = [row for case in errors for row in unless_spent(case, errors_of_case)]
    for name, cases in (
        ("tokens sweep", bench_linear_logprob.tokens_sweep(quick)),
        ("masked sweep", bench_linear_logprob.masked_sweep(quick)),
        ("linear_logprob, peers", bench_linear_logprob.peer_cases(quick)),
    ):
        sections[name] = [row for case in cases for row in unless_spent(case, timed)]
    return sections


def judge(sections: dict[str, list[Row]]) -> list[Verdict]:
    timings = [row for name, rows in sections.items() if name not in ("memory", "errors") for row in rows]
    return [evaluate(target, timings, sections["memory"]) for target in targets()]


def write(description: dict, sections: dict[str, list[Row]], verdicts: list[Verdict], folder: Path) -> list[Path]:
    """Writes the report's files into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = description["machine"]
    try:
        from benchmarks.plots import draw

        plots = draw(sections, folder, stem)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        plots = {}
        description = {**description, "plots": "none: matplotlib is not installed"}
    judged = [
        {
            "op": verdict.target.op,
            "target": verdict.target.name,
            "sizes": verdict.sizes,
            "measured": verdict.measured,
            "limit": f"{verdict.target.relation} {figure(verdict.target.bound)} {verdict.target.unit}".rstrip(),
            "spread": verdict.noise,
            "verdict": verdict.state,
        }
        for verdict in verdicts
    ]
    content = {
        "run": description,
        "targets": judged,
        "sections": {name: [row.as_json() for row in rows] for name, rows in sections.items()},
        "plots": plots,
    }
    paths = [folder / f"{stem}.md", folder / f"{stem}.json", folder / f"{stem}.history.jsonl"]
    replace_text(paths[0], markdown(description, verdicts, sections, plots))
    replace_text(paths[1], json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    measured = {
        f"{entry['op']}: {entry['target']}, {entry['limit']}": entry["measured"]
        for entry in judged
        if entry["measured"] is not None
    }
    append_row(paths[2], {**description, "targets": measured})
    return paths + [folder / name for name in plots.values()]


def replace_text(path: Path, text: str) -> None:
    """Writes the file beside its place first: a run killed meanwhile leaves the results of the one before."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)


def unusable(folder: Path) -> str:
    """Why results cannot be written into `folder`, which is made if need be, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"


def print_targets(verdicts: list[Verdict], say: Callable[[str], None]) -> None:
    lines = [["op (backend cpu)", "target", "measured at", "measured", "limit", "spread", "verdict"]]
    lines += target_lines(verdicts)
    shown = [[line[0], line[1], line[3], line[4], line[5], line[6]] for line in lines]
    widths = [max(len(line[i]) for line in shown) for i in range(5)]
    say("\nTARGETS")
    for line in shown:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths)) + "  " + line[5])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="within three minutes on two cores; fewer repeats and sizes"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    options = parser.parse_args(arguments)
    if reason := unusable(options.output):
        parser.error(f"--output: {reason}: name another folder")
    start, others = time.monotonic(), cores_used_by_others()

    def say(line: str) -> None:
        print(line, flush=True)

    sections = run(options.quick, say)
    verdicts = judge(sections)
    elapsed, others_used = time.monotonic() - start, others()
    description = {**describe(), "quick": options.quick, "seconds": round(elapsed, 1), "others": others_used}
    print_targets(verdicts, say)
    paths = write(description, sections, verdicts, options.output)
    say(f"\n{elapsed:.0f} s on {torch.get_num_threads()} threads{in_words(others_used)}")
    say("\n".join(f"wrote {path}" for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
