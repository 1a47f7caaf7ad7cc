"""What a run did, as one HTML file that needs nothing else and as a table for the terminal."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mosaic.figures import Rollout, advantage_plot, finite, gain_plot, reward_plot, sessions_plot, update_plot
from mosaic.log import RunError, RunLog, atomic_write
from mosaic.trajectory import Session, SessionType, Trajectory

_SHOWN_ROWS = 40  # of the table; metrics.jsonl has every step
_SHOWN_CHARACTERS = 6000  # of one block of a trajectory's text
_DASH = "–"


def build_report(
    run_directory: str | os.PathLike,
    *,
    decode: Callable[[list[int]], str] | None = None,
    note: str = "",
    success_threshold: float = 0.5,
    examples: int = 4,
) -> Path:
    """Writes report.html into a run directory: figures, a table of the steps, whole trajectories and the config.

    Args:
        run_directory: what `mosaic train` or `mosaic demo` wrote; a run still going on is fine.
        decode: token ids -> text, special tokens included (a tokenizer's `decode`). Without it the trajectories show
            their structure and token counts, not their text.
        note: plain text on what is small or special about this run; empty lines part paragraphs.
        success_threshold: a reward of at least this is a success.
        examples: most trajectories to show whole.

    Returns:
        The path of report.html.

    Raises:
        RunError: the folder is no run; the message says what it lacks.
    """
    log = _open_run(run_directory)
    metrics = log.metrics()
    rollouts, chosen = _read_trajectories(log, success_threshold, examples)
    plots = (
        sessions_plot(rollouts),
        reward_plot(metrics),
        advantage_plot(rollouts, success_threshold),
        gain_plot(rollouts),
        update_plot(metrics),
    )
    config = log.directory / "config.yaml"
    html = _template().render(
        name=log.directory.resolve().name,
        note=[paragraph.strip() for paragraph in note.split("\n\n") if paragraph.strip()],
        facts=_facts(metrics, rollouts),
        plots=[plot for plot in plots if plot],
        headers=[header for _, header, _ in COLUMNS],
        rows=_rows(metrics[-_SHOWN_ROWS:]),
        hidden_rows=max(0, len(metrics) - _SHOWN_ROWS),
        dropped=_dropped(metrics),
        examples=[_example(step, record, decode, success_threshold) for step, record in chosen],
        decoded=decode is not None,
        config=config.read_text(errors="replace") if config.exists() else None,
    )
    path = log.directory / "report.html"
    atomic_write(path, html.encode(errors="replace"))  # sampled text may hold lone surrogates, which UTF-8 cannot
    return path


def print_summary(run_directory: str | os.PathLike, console: Console) -> None:
    """Prints the last steps as a table; raises RunError as `build_report` does."""
    metrics = _open_run(run_directory).metrics()
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for header, _, _ in COLUMNS:
        table.add_column(header, justify="right", no_wrap=True)
    for row in _rows(metrics[-_SHOWN_ROWS:]):
        table.add_row(*map(Text, row))
    console.print(Text(f"{run_directory}: {_count(len(metrics), 'step')}"))
    if len(metrics) > _SHOWN_ROWS:
        console.print(Text(f"the last {_SHOWN_ROWS}; metrics.jsonl has them all"))
    if metrics:
        console.print(table)
        console.print(Text(_LEGEND, style="dim"))
    for reason, count in _dropped(metrics):
        console.print(Text(f"dropped: {count} × {reason}"))
    if skipped := _skipped(metrics):
        console.print(Text(f"skipped updates (loss or gradient not finite): {skipped}"))


def _open_run(run_directory: str | os.PathLike) -> RunLog:
    log = RunLog(run_directory)
    if not log.directory.is_dir():
        raise RunError(f"{log.directory} is not a folder: give the run directory that `mosaic train` wrote")
    if not log.metrics() and not log.steps():
        raise RunError(
            f"{log.directory} is no run directory, or no step of the run has finished: it has no line in metrics.jsonl "
            "and nothing in trajectories/. Give the run directory that `mosaic train` wrote"
        )
    return log


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # everything a model wrote is data
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    return environment.get_template("report.html.jinja")


def _cell(key: str, pattern: str) -> Callable[[dict[str, Any]], str]:
    def cell(metrics: dict[str, Any]) -> str:
        value = metrics.get(key)
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return _DASH if finite(value) is None else format(value, pattern)

    return cell


def _short(value: float | None) -> str:
    """About three characters and a unit: 950, 4.2k, 131k, 1.7M."""
    if value is None:
        return _DASH
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{0 if value >= 10 * size else 1}f}{unit}"
    return f"{value:.0f}"


def _tokens(metrics: dict[str, Any]) -> str:
    return "/".join(_short(finite(metrics.get(key))) for key in ("policy_tokens", "tokens"))


def _seconds(metrics: dict[str, Any]) -> float | None:
    time = metrics.get("time")
    stages = [value for value in map(finite, time.values()) if value is not None] if isinstance(time, dict) else []
    return finite(time.get("total", sum(stages))) if stages else None


# (header on the terminal, header on the page, cell)
COLUMNS: Sequence[tuple[str, str, Callable[[dict[str, Any]], str]]] = (
    ("step", "step", _cell("step", "d")),
    ("reward", "reward", _cell("reward_mean", ".2f")),
    ("succ.", "success", _cell("success_rate", ".0%")),
    ("sess.", "sessions a trajectory", _cell("sessions_mean", ".1f")),
    ("comp.", "with compaction", _cell("compaction_share", ".0%")),
    ("fork", "with fork", _cell("fork_share", ".0%")),
    ("loss", "loss", _cell("loss", ".2g")),
    ("clip", "clipped tokens", _cell("clip_fraction", ".1%")),
    ("ratio", "largest ratio", _cell("ratio_max", ".3g")),
    ("grad", "gradient norm", _cell("grad_norm", ".2g")),
    ("tokens", "tokens policy/all", _tokens),
    ("sec.", "seconds", lambda metrics: _short(_seconds(metrics))),
)
_LEGEND = (
    "succ. success rate, sess. sessions a trajectory, comp. and fork share of trajectories with one, clip share of "
    "clipped tokens, ratio the largest, grad gradient norm before clipping, tokens sampled/all"
)


def _rows(metrics: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [[cell(step) for _, _, cell in COLUMNS] for step in metrics]


def _dropped(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """(reason, number) of the trajectories dropped in the whole run, the most frequent first."""
    total: dict[str, int] = {}
    for step in metrics:
        for reason, count in (step.get("dropped") or {}).items():
            total[reason] = total.get(reason, 0) + count
    return sorted(((reason, count) for reason, count in total.items() if count), key=lambda item: (-item[1], item[0]))


def _skipped(metrics: Sequence[dict[str, Any]]) -> int:
    return sum(bool(update.get("skipped")) for step in metrics for update in step.get("updates") or ())


def _facts(metrics: Sequence[dict[str, Any]], rollouts: Sequence[Rollout]) -> list[tuple[str, str]]:
    """The few figures that stand at the head of the page; what was not logged is left out."""
    facts = [("steps", str(len(metrics))), ("trajectories", str(len(rollouts)))]
    if rollouts:
        for label, kind in (("with compaction", SessionType.COMPACTION), ("with a fork", SessionType.SUBAGENT)):
            facts.append((label, str(sum(kind in rollout.types for rollout in rollouts))))
        facts.append(("sessions a trajectory", f"{sum(len(r.types) for r in rollouts) / len(rollouts):.1f}"))
    gains = [gain for rollout in rollouts for _, gain in rollout.gains]
    if gains:
        facts.append(("sessions with positive gain", f"{sum(gain > 0 for gain in gains) / len(gains):.0%}"))
        facts.append(("positive gain a session", f"{sum(max(gain, 0) for gain in gains) / len(gains):.3g}"))
    changes = [value for step in metrics if (value := finite(step.get("parameter_change"))) is not None]
    if changes:
        facts.append(("parameter change, last step", f"{changes[-1]:.2g}"))
    drift = [value for step in metrics if (value := finite(step.get("engine_logprob_diff_max"))) is not None]
    if drift:
        facts.append(("largest engine–trainer log-prob difference", f"{max(drift):.2g}"))
    memory = [value for step in metrics if (value := finite(step.get("peak_memory_gib"))) is not None]
    if memory:
        facts.append(("peak memory", f"{max(memory):.1f} GiB"))
    seconds = [value for step in metrics if (value := _seconds(step)) is not None]
    if seconds:
        facts.append(("time in steps", f"{sum(seconds) / 60:.1f} min"))
    if skipped := _skipped(metrics):
        facts.append(("updates skipped", str(skipped)))
    return facts


def _read_trajectories(
    log: RunLog, success_threshold: float, examples: int
) -> tuple[list[Rollout], list[tuple[int, dict[str, Any]]]]:
    """All trajectories, reduced, and (step, record) of the few to show: the latest of each kind, those with
    compaction or fork first. One step is in memory at a time."""
    rollouts: list[Rollout] = []
    latest: dict[tuple[bool, bool, bool], tuple[int, dict[str, Any]]] = {}
    for step in log.steps():
        for record in log.read_trajectories(step):
            rollout = Rollout.from_record(step, record)
            rollouts.append(rollout)
            success = rollout.reward is not None and rollout.reward >= success_threshold
            kind = SessionType.COMPACTION in rollout.types, SessionType.SUBAGENT in rollout.types, success
            latest[kind] = step, record
    order = sorted(latest, key=lambda kind: (not (kind[0] or kind[1]), not kind[2], kind))
    return rollouts, [latest[kind] for kind in order[:examples]]


def _example(
    step: int, record: dict[str, Any], decode: Callable[[list[int]], str] | None, success_threshold: float
) -> dict[str, Any]:
    trajectory = Trajectory.from_dict({key: value for key, value in record.items() if key != "training"})
    training = record.get("training") or {}
    reward = trajectory.reward
    outcome = "not judged" if reward is None else "success" if reward >= success_threshold else "failure"
    details = {key: str(value) for key, value in trajectory.metadata.items() if key != "question"}
    return {
        "title": f"Step {step}, prompt {trajectory.prompt_id}",
        "outcome": outcome,
        "count": _count(len(trajectory.sessions), "session"),
        "question": trajectory.metadata.get("question"),
        "facts": [
            ("reward", _DASH if reward is None else f"{reward:g}"),
            ("advantage", _signed(training.get("trajectory_advantage"))),
            ("accepted answers", ", ".join(trajectory.answers) or _DASH),
            *details.items(),
        ],
        "sessions": [_session(at, session, training, decode) for at, session in enumerate(trajectory.sessions)],
    }


def _session(
    at: int, session: Session, training: dict[str, Any], decode: Callable[[list[int]], str] | None
) -> dict[str, Any]:
    def trained(key: str) -> Any:
        values = training.get(key) or ()
        return values[at] if at < len(values) else None

    facts = [
        f"{len(session.token_ids)} tokens, {session.num_policy_tokens} sampled at temperature {session.temperature:g}"
    ]
    if trained("session_advantage") is not None:
        facts.append(f"advantage {_signed(trained('session_advantage'))}")
    if trained("eligible"):
        facts.append(f"gain {_signed(trained('gain'))}")
    if session.parent is not None:
        turn = "" if session.fork_index is None else f", turn {session.fork_index + 1}"
        facts.append(f"from session {session.parent + 1}{turn}")
    blocks = [("context", session.prompt_ids)]
    end = 0
    for start, stop in session.turns():
        blocks += [("environment", session.response_ids[end:start]), ("policy", session.response_ids[start:stop])]
        end = stop
    blocks.append(("environment", session.response_ids[end:]))
    return {
        "title": f"Session {at + 1}: {session.type.name.lower()}{', terminal' if session.terminal else ''}",
        "type": session.type.name.lower(),
        "turns": _count(len(session.turns()), "turn"),
        "facts": facts,
        "blocks": [(who, len(ids), _text(decode(ids)) if decode else None) for who, ids in blocks if ids],
    }


def _text(text: str) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _signed(value: Any) -> str:
    return _DASH if finite(value) is None else f"{value:+.3g}"
