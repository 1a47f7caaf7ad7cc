"""`mosaic demo`: the whole of the method on a small real model, in minutes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from mosaic.config import RunConfig, load_config
from mosaic.parts import make_decoder
from mosaic.progress import Progress
from mosaic.report import build_report, print_summary
from mosaic.train import train

CONFIG = Path(__file__).with_name("demo.yaml")
QUICK = ("steps=1", "rollout.group_size=2")
NOTE = (
    "This is a demonstration on a small scale. The policy has 135 million parameters, sessions hold {limit} tokens "
    "instead of 131,072, groups have {group} rollouts instead of 8, a step has {prompts} prompts instead of 16, and {steps} "
    "steps are far too few to learn from: expect the machinery to be visible, not the reward to rise. The model was "
    "warm-started on a scripted expert, so that it calls tools, forks, summarises and answers at all."
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
    report = build_report(directory, note=note, decode=make_decoder(directory))
    progress.console.print(f"report: {report}", highlight=False)
    return report
