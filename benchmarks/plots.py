"""The report's pictures: time against T and against the masked share, memory against T V, error against the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import OK, Row


def draw(sections: dict[str, list[Row]], folder: Path, stem: str) -> dict[str, str]:
    """Writes one PNG a plot that has data; {title: file name}. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    plots = {
        "Log-probs of a 576 x 49152 head in bf16: time against T": (
            "time-tokens",
            _lines(
                sections["tokens sweep"], lambda row: row.sizes["tokens"], lambda row: row.median and 1e3 * row.median
            ),
            ("T, rows", "ms"),
            ("log", "log"),
        ),
        "Log-probs in bf16: time against the share of masked rows": (
            "time-masked",
            _lines(
                sections["masked sweep"], lambda row: row.sizes["masked"], lambda row: row.median and 1e3 * row.median
            ),
            ("share of rows masked", "ms"),
            ("linear", "linear"),
        ),
        "Log-probs in bf16: memory beyond inputs and outputs against T V": (
            "memory",
            _lines(
                sections["memory"],
                lambda row: row.sizes["tokens"] * row.sizes["vocabulary"],
                lambda row: row.extra_memory and row.extra_memory / 2**20,
                by=lambda row: f"{row.side}, {row.problem}",
            ),
            ("T V", "MiB"),
            ("log", "log"),
        ),
        "Largest log-prob error against float64, 576 x 49152": (
            "error",
            _lines(
                sections["errors"],
                lambda row: row.sizes["top_logit"],
                lambda row: row.errors.get("logprob"),
                by=lambda row: f"{row.side}, {row.sizes['dtype']} {'logits' if row.side == 'eager' else 'inputs'}",
            ),
            ("top logit", "nats"),
            ("linear", "log"),
        ),
    }
    written = {}
    for title, (name, lines, labels, scales) in plots.items():
        if lines:
            _plot(folder / f"{stem}-{name}.png", title, lines, labels, scales)
            written[title] = f"{stem}-{name}.png"
    return written


Lines = dict[str, list[tuple[float, float]]]


def _lines(
    rows: list[Row],
    x: Callable[[Row], float],
    y: Callable[[Row], float | None],
    by: Callable[[Row], str] = lambda row: row.side,
) -> Lines:
    """Points by side, in order of x; sides without any are left out."""
    lines: Lines = {}
    for row in rows:
        if row.status == OK and y(row):
            lines.setdefault(by(row), []).append((x(row), y(row)))
    return {name: sorted(points) for name, points in lines.items()}


def _plot(path: Path, title: str, lines: Lines, labels: tuple[str, str], scales: tuple[str, str]) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6.4, 4.0), dpi=90, layout="constrained")
    axes = picture.subplots()
    for name, points in lines.items():
        axes.plot(*zip(*points), marker="o", markersize=4, label=name)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_xscale(scales[0])
    axes.set_yscale(scales[1])
    if scales[1] == "linear":
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    picture.savefig(path, metadata={"Software": None})
