"""`mosaic demo`: the whole of the method on a small real model, in minutes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

from mosaic.config import RunConfig, load_config
from mosaic.log import RunLog
from mosaic.parts import make_decoder
from mosaic.progress import Progress
from mosaic.report import build_report, print_summary
from mosaic.train import train

CONFIG = Path(__file__).with_name("demo.yaml")
QUICK = ("steps=1", "rollout.group_size=2")
NOTE = (
    "This is a demonstration on a small scale. The policy has 135 million parameters, sessions hold {limit} tokens "
    "instead of 131,072, groups have {group} rollouts instead of 8, a step has {prompts} prompts instead of 16, and "
    "{steps} steps are far too few to learn from: expect to see the machinery at work, not the reward rise. The model "
    "was warm-started on a scripted expert, so that it calls tools, forks, summarises and answers at all."
)


def demo_config(output: str, overrides: Sequence[str] = (), *, quick: bool = False) -> RunConfig:
    return load_config(CONFIG, [*(QUICK if quick else ()), f"output={yaml.safe_dump(output).strip()}", *overrides])


def run(output: str, overrides: Sequence[str], *, quick: bool, resume: bool) -> Path:
    """Trains, prints the table and writes the report; returns the report's path."""
    config = demo_config(output, overrides, quick=quick)
    progress = Progress()
    note = NOTE.format(
        limit=config.agent.session_limit,
        group=config.rollout.group_size,
        prompts=config.rollout.prompts,
        steps=config.steps,
    )
    progress.console.print(note, highlight=False)
    directory = train(config, resume=resume, progress=progress)
    print_summary(directory, progress.console)
    progress.console.print(outcome(RunLog(directory).metrics()), highlight=False)
    report = build_report(directory, note=note, decode=make_decoder(directory))
    progress.console.print(Text(f"report: {report}"), soft_wrap=True)
    return report


def outcome(metrics: Sequence[dict[str, Any]]) -> str:
    """What the policy did of its own accord over the run, in one sentence."""

    def trajectories(share: str) -> int:
        return sum(round(step[share] * step["trajectories"]) for step in metrics)

    mixed, updates = (
        sum(step["groups_mixed"] for step in metrics),
        sum(len(step.get("updates", ())) for step in metrics),
    )
    return (
        f"The policy compacted in {trajectories('compaction_share')} and forked in {trajectories('fork_share')} of "
        f"{sum(step['trajectories'] for step in metrics)} trajectories; rewards varied inside {mixed} prompt groups; "
        f"{updates} optimiser updates, of which {sum(step.get('skipped_updates', 0) for step in metrics)} were skipped."
    )
