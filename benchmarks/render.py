"""The report as Markdown: targets first, then every case with its sides, then the plots."""

from __future__ import annotations

from typing import Any

from benchmarks.measure import OK, Row
from benchmarks.targets import Verdict

SYMBOLS = {
    "tokens": "T",
    "hidden": "H",
    "vocabulary": "V",
    "segments": "S",
    "heads": "Hq",
    "kv_heads": "Hkv",
    "head_size": "D",
}
HOW = """\
Both sides of every ratio ran by turns in one process, after a warm-up, on random data; times are medians, the spread is
the distance of the quartiles over the median. A side is timed only after its outputs were compared with float64 in this
run ("error": the largest; of gradients, losses and attention relative to the largest value). "copy" reads and writes as
many bytes in all as the op must. Extra memory is the peak of resident memory beyond inputs and outputs, in a fresh
process. GB/s and GFLOP/s count what the op must move and multiply, whatever a side does beyond that."""


def in_words(others: float | None) -> str:
    """How far the machine was this run's own."""
    return "" if others is None else f"; other work kept {others:.2f} cores busy"


def sizes_in_words(sizes: dict[str, Any]) -> str:
    return ", ".join(
        f"{SYMBOLS.get(name, name.replace('_', ' '))} {_size(value)}"
        for name, value in sizes.items()
        if value is not False
    )


def _size(value: Any) -> str:
    if value is True:
        return "yes"
    return f"{value >> 20}M" if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0 else str(value)


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def target_lines(verdicts: list[Verdict]) -> list[list[str]]:
    lines = []
    for verdict in verdicts:
        target = verdict.target
        sizes = sizes_in_words(verdict.sizes)
        smaller = {name: size for name, size in target.wanted.items() if verdict.sizes.get(name, size) != size}
        if smaller:
            sizes += f" (the target says {sizes_in_words(smaller)}: the full form)"
        limit = f"{target.relation} {figure(target.bound)} {target.unit}".rstrip()
        noise = "" if verdict.noise is None else f"{100 * verdict.noise:.0f} %"
        lines.append([target.op, target.name, sizes, figure(verdict.measured), limit, noise, verdict.state])
    return lines


def targets_table(verdicts: list[Verdict]) -> str:
    head = ["op (backend cpu)", "target", "measured at", "measured", "limit", "spread", "verdict"]
    return table(head, target_lines(verdicts))


def case_table(rows: list[Row]) -> str:
    """The sides of one case."""
    lines = []
    for row in rows:
        rate = "" if row.median is None else f"{row.gigabytes_per_second:.3g} GB/s"
        if row.gigaflops is not None:
            rate = f"{row.gigaflops:.0f} GFLOP/s"
        lines.append(
            [
                row.side,
                seconds(row.median),
                "" if row.spread is None else f"{100 * row.spread:.0f} % of {row.samples}",
                figure(row.ratio),
                rate,
                f"{max(row.errors.values()):.1e}" if row.errors else "",
                "" if row.extra_memory is None else f"{row.extra_memory / 2**20:.0f} MiB",
                "" if row.status == OK else row.status,
            ]
        )
    head = ["side", "time", "spread", f"over {limit_of(rows)}", "rate", "error", "extra memory", ""]
    used = [i for i in range(len(head)) if i == 0 or any(line[i] for line in lines)]
    return table([head[i] for i in used], [[line[i] for i in used] for line in lines])


def limit_of(rows: list[Row]) -> str:
    return next((row.limit for row in rows if row.limit), "the limit")


def markdown(run: dict, verdicts: list[Verdict], sections: dict[str, list[Row]], plots: dict[str, str]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    cache = run["last_level_cache"]
    parts = [
        f"# Benchmarks: {run['cpu']}, {run['cores']} cores",
        f"{run['date']}, commit {run['commit']}, {'quick' if run['quick'] else 'full'} form, {run['seconds']:.0f} s; "
        f"{run['threads']} threads{in_words(run['others'])}; "
        f"{' '.join(run['flags']) or 'none of the flags that matter here'}; "
        f"last-level cache {'unknown' if cache is None else f'{cache >> 20} MiB'}; {versions}.",
        f"Written by `python -m benchmarks.report{' --quick' if run['quick'] else ''}`.",
        HOW,
        "## Targets",
        targets_table(verdicts),
    ]
    for section, rows in sections.items():
        parts.append(f"## {section}")
        for case in dict.fromkeys(row.case for row in rows):
            of_case = [row for row in rows if row.case == case]
            notes = dict.fromkeys(row.note for row in of_case if row.note)
            first = of_case[0]
            parts.append(f"**{first.op}, {first.problem}**: {'; '.join([sizes_in_words(first.sizes), *notes])}")
            parts.append(case_table(of_case))
    if plots:
        parts += ["## Plots", *(f"![{title}]({name})" for title, name in plots.items())]
    return "\n\n".join(parts) + "\n"
