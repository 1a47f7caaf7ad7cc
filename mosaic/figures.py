"""The figures of the report: plain functions from what a run logged to an SVG with its text alternative."""

from __future__ import annotations

import io
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mosaic.trajectory import SessionType

_INK, _GRID, _BLUE = "#22303c", "#dde3e8", "#2b6ca3"
_OUTCOME = {True: ("success", "#1b8a5a", "o"), False: ("failure", "#c4501b", "X")}
_TYPE_COLOUR = {SessionType.NORMAL: "#2b6ca3", SessionType.COMPACTION: "#d08a00", SessionType.SUBAGENT: "#8b4fa8"}
_STYLE = {
    "font.size": 9.5, "font.family": "DejaVu Sans", "axes.edgecolor": "#8a97a3", "axes.labelcolor": _INK,
    "text.color": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.grid": True, "grid.color": _GRID,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "legend.frameon": False, "lines.linewidth": 1.8,
    "svg.hashsalt": "mosaic",
}  # fmt: skip
_styled = matplotlib.rc_context(_STYLE)  # as a decorator: for the time of a call, leaving the user's settings alone


@dataclass(frozen=True)
class Rollout:
    """What the figures need of one trajectory; `gains` holds (session type, marginal gain) of eligible sessions."""

    step: int
    group: int | None
    reward: float | None
    types: tuple[SessionType, ...]
    advantage: float | None
    gains: tuple[tuple[SessionType, float], ...]

    @classmethod
    def from_record(cls, step: int, record: dict[str, Any]) -> Rollout:
        """Reads one line of trajectories/; a trajectory that was not trained may lack "training"."""
        types = tuple(SessionType(session["type"]) for session in record["sessions"])
        training = record.get("training") or {}
        gains = zip(types, training.get("gain") or (), training.get("eligible") or (), strict=False)
        return cls(
            step=step,
            group=training.get("group"),
            reward=finite(record.get("reward")),
            types=types,
            advantage=finite(training.get("trajectory_advantage")),
            gains=tuple((kind, gain) for kind, gain, eligible in gains if eligible and finite(gain) is not None),
        )


@dataclass(frozen=True)
class Plot:
    """One drawn figure: `alt` tells it in words, `svg` is a whole document, `wide` asks for the page's whole width."""

    title: str
    caption: str
    alt: str
    svg: str
    wide: bool = False


def finite(value: Any) -> float | None:
    """`value` as a float if it is a finite number, else None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


@_styled
def sessions_plot(rollouts: Sequence[Rollout]) -> Plot | None:
    """How many sessions the trajectories of each step have; None without trajectories."""
    if not rollouts:
        return None
    counts = Counter((rollout.step, len(rollout.types)) for rollout in rollouts)
    per_step = defaultdict(list)
    for rollout in rollouts:
        per_step[rollout.step].append(len(rollout.types))
    means = {step: fmean(values) for step, values in sorted(per_step.items())}
    figure, axes = _figure()
    largest = max(counts.values())
    area = max(4.0, min(17.0, 300 / len(means)) ** 2)  # in points: the discs of neighbouring steps hardly overlap
    axes.scatter(
        [step for step, _ in counts],
        [sessions for _, sessions in counts],
        s=[area * (0.1 + 0.9 * number / largest) for number in counts.values()],
        color=_BLUE, alpha=0.35, linewidths=0, rasterized=len(counts) > 500,
    )  # fmt: skip
    axes.plot(list(means), list(means.values()), color=_INK, marker="o" if len(means) <= 40 else "", markersize=4)
    axes.set(xlabel="training step", ylabel="sessions", ylim=(0, max(n for _, n in counts) + 1))
    _whole_numbers(axes.xaxis, axes.yaxis)
    return Plot(
        "Sessions a trajectory",
        "A disc is the trajectories of one step with that many sessions, its area their number; the line is the mean.",
        f"Sessions a trajectory over {len(means)} steps. Mean {_first_and_last(list(means.values()))}; "
        f"smallest {min(n for _, n in counts)}, largest {max(n for _, n in counts)}.",
        _svg(figure),
    )


@_styled
def reward_plot(metrics: Sequence[dict[str, Any]]) -> Plot | None:
    """Mean reward and success rate over the steps; None if neither was logged."""
    series = {
        "success rate": (_series(metrics, "success_rate"), "#9fd3ba", 5),  # wide, under a line that may cover it
        "mean reward": (_series(metrics, "reward_mean"), _BLUE, 1.8),
    }
    if not any(points for points, _, _ in series.values()):
        return None
    figure, axes = _figure()
    for label, (points, colour, width) in series.items():
        if points:
            marker = "o" if len(points) <= 40 else ""
            axes.plot(
                *zip(*points, strict=True), color=colour, linewidth=width, marker=marker, markersize=4, label=label
            )
    values = [value for points, _, _ in series.values() for _, value in points]
    axes.set(xlabel="training step", ylim=(min(-0.04, *values), max(1.04, *values)))
    axes.legend(loc="best")
    _whole_numbers(axes.xaxis)
    told = [f"{label} {_first_and_last([v for _, v in points])}" for label, (points, _, _) in series.items() if points]
    return Plot(
        "Reward", "Outcome reward of each step's trajectories.", f"Over the steps: {'; '.join(told)}.", _svg(figure)
    )


@_styled
def advantage_plot(rollouts: Sequence[Rollout], success_threshold: float = 0.5) -> Plot | None:
    """Trajectory advantage against session count by outcome, mixed and homogeneous groups in a panel each; None
    without advantages."""
    rollouts = [r for r in rollouts if r.advantage is not None and r.reward is not None]
    if not rollouts:
        return None
    outcomes = defaultdict(set)
    for rollout in rollouts:
        outcomes[rollout.step, rollout.group].add(rollout.reward >= success_threshold)
    figure, panels = _figure(columns=2, width=9.6)
    told = []
    for mixed, axes in zip((True, False), panels, strict=True):
        members = [r for r in rollouts if (len(outcomes[r.step, r.group]) == 2) == mixed]
        for success, (label, colour, marker) in _OUTCOME.items():
            points = [(len(r.types), r.advantage) for r in members if (r.reward >= success_threshold) == success]
            told.append(f"{'mixed' if mixed else 'homogeneous'} groups, {label}: {_spread([a for _, a in points])}")
            if points:
                # successes stand a little left of their count and failures right, so that neither hides the other
                at = [count + (-0.12 if success else 0.12) for count, _ in points]
                axes.scatter(at, [advantage for _, advantage in points], color=colour, marker=marker, s=34, alpha=0.6,
                             linewidths=0, label=f"{label} ({len(points)})", rasterized=len(points) > 500)  # fmt: skip
        _finish_advantages(axes, mixed, bool(members))
    return Plot(
        "Advantage against session count",
        "Left: groups with successes and failures. Right: groups where all ended alike and only the session count "
        "tells their trajectories apart (another scale).",
        f"Trajectory advantage against number of sessions. {'; '.join(told)}.",
        _svg(figure),
        wide=True,
    )


@_styled
def gain_plot(rollouts: Sequence[Rollout]) -> Plot | None:
    """Distributions of the marginal information gain by session type; None without eligible sessions."""
    gains = defaultdict(list)
    for rollout in rollouts:
        for kind, gain in rollout.gains:
            gains[kind].append(gain)
    kinds = [kind for kind in SessionType if gains[kind]]
    if not kinds:
        return None
    figure, axes = _figure(width=9.6)
    axes.axvline(0, color="#8a97a3", linewidth=1)
    for at, kind in enumerate(kinds):
        values, colour = gains[kind], _TYPE_COLOUR[kind]
        # golden-ratio steps spread the dots evenly and the same way in every run
        spread = [at + 0.4 * ((number * 0.618034) % 1 - 0.5) for number in range(len(values))]
        axes.scatter(values, spread, s=18, color=colour, alpha=0.5, linewidths=0, rasterized=len(values) > 500)
        axes.boxplot(values, positions=[at], widths=0.56, orientation="horizontal", showfliers=False,
                     medianprops={"color": _INK, "linewidth": 2})  # fmt: skip
    names = [f"{kind.name.lower()}\n{len(gains[kind])} sessions" for kind in kinds]
    axes.set_yticks(range(len(kinds)), names)
    axes.set(xlabel="gain (nats a token)", ylim=(len(kinds) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    told = [f"{kind.name.lower()}: {_spread(gains[kind])}, {_share(gains[kind])} above 0" for kind in kinds]
    return Plot(
        "Marginal gains by session type",
        "What each eligible session added to the mean log-prob of the true answer. Box: quartiles and median; "
        "whiskers: 1.5 quartile ranges; every dot is a session.",
        f"Marginal information gain by session type. {'; '.join(told)}.",
        _svg(figure),
        wide=True,
    )


@_styled
def update_plot(metrics: Sequence[dict[str, Any]]) -> Plot | None:
    """Loss, largest ratio, clip fraction and gradient norm over the optimiser updates (over the steps where no
    "updates" were logged); None without any of them."""
    updates = [update for step in metrics for update in (step.get("updates") or [step])]
    names = {
        "loss": "loss",
        "ratio_max": "largest ratio",
        "clip_fraction": "clip fraction",
        "grad_norm": "gradient norm",
    }
    series = {name: [(at, value) for at, value in _series(updates, key, start=1)] for key, name in names.items()}
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    skipped = [at for at, update in enumerate(updates, start=1) if update.get("skipped")]
    figure, panels = _figure(columns=2, rows=math.ceil(len(series) / 2), width=9.6)
    for axes, (name, points) in zip(panels, series.items(), strict=False):
        few = len(updates) <= 40
        axes.plot(
            *zip(*points, strict=True),
            color=_BLUE,
            marker="o" if few else "",
            markersize=4,
            linewidth=1.8 if few else 1,
        )
        for at in skipped:
            axes.axvline(at, color=_OUTCOME[False][1], linestyle=":", linewidth=1.4)
        axes.set_title(name)
        axes.set(xlabel="optimiser update" if axes in panels[-2:] else None, xlim=(0.5, len(updates) + 0.5))
        _whole_numbers(axes.xaxis)
    for axes in panels[len(series) :]:
        axes.set_visible(False)
    told = [f"{name} {_first_and_last([v for _, v in points])}" for name, points in series.items()]
    return Plot(
        "Optimiser updates",
        "Each update of the policy; a dotted line marks an update that was skipped because its loss or gradient was "
        "not finite.",
        f"Over {len(updates)} updates, {len(skipped)} of them skipped: {'; '.join(told)}.",
        _svg(figure),
        wide=True,
    )


def _finish_advantages(axes: Axes, mixed: bool, any_points: bool) -> None:
    axes.axhline(0, color="#8a97a3", linewidth=1)
    axes.set_title("mixed groups" if mixed else "homogeneous groups")
    axes.set(xlabel="sessions", ylabel="trajectory advantage" if mixed else None)
    if any_points:
        axes.legend(loc="best")
        axes.margins(x=0.12, y=0.12)
        _whole_numbers(axes.xaxis)
    else:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.6, "no such group", transform=axes.transAxes, ha="center", color="#5b6873")


def _figure(columns: int = 1, rows: int = 1, width: float = 4.7) -> tuple[Figure, Any]:
    """A figure with one Axes, or a flat list of them; without pyplot, so nothing stays in memory."""
    figure = Figure(figsize=(width, 3.1 * rows), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08, hspace=0.06)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    return figure, axes if columns * rows > 1 else axes[0]


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, dpi=150)
    return buffer.getvalue()


def _whole_numbers(*axis: Any) -> None:
    for one in axis:
        one.get_major_locator().set_params(integer=True)


def _series(rows: Sequence[dict[str, Any]], key: str, start: int | None = None) -> list[tuple[float, float]]:
    """(step, or 1-based place where `start` is given, value) of every row with a finite value."""
    points = [
        (row.get("step") if start is None else at, finite(row.get(key))) for at, row in enumerate(rows, start or 0)
    ]
    return [(at, value) for at, value in points if value is not None]


def _first_and_last(values: Sequence[float]) -> str:
    return f"{values[0]:.3g} at first, {values[-1]:.3g} at last" if len(values) > 1 else f"{values[0]:.3g}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return f"{len(values)} from {min(values):.3g} to {max(values):.3g}, median {median(values):.3g}"


def _share(values: Sequence[float]) -> str:
    return f"{sum(value > 0 for value in values) / len(values):.0%}"
