"""What each command of the command line does."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from mosaic import demo
from mosaic.agents.chat import ChatFormat
from mosaic.checkpoint import derive_seed
from mosaic.config import ConfigError, RunConfig, load_config
from mosaic.log import RunError, read_trajectory_file
from mosaic.models import FetchError, load_policy
from mosaic.parts import check_context, make_decoder, make_engine, make_judge, make_tasks, make_tools
from mosaic.progress import Progress
from mosaic.report import build_report, print_summary
from mosaic.rewards import JudgeError
from mosaic.rollout.collect import collect
from mosaic.scoring import MarginalGainScorer
from mosaic.tasks import Task
from mosaic.train import open_run, record_config, rollout_metrics, tasks_of_step, train
from mosaic.trajectory import Trajectory

# Loading and saving take a second; their bars would stand between those of the run.
transformers_logging.disable_progress_bar()

# What a user can put right: shown as one message.
USER_ERRORS = (ConfigError, RunError, FetchError, JudgeError, NotImplementedError, OSError)


def run_demo(arguments: argparse.Namespace) -> None:
    output = arguments.output or ("runs/demo-quick" if arguments.quick else "runs/demo")
    demo.run(output, arguments.overrides, quick=arguments.quick, resume=arguments.resume)


def run_train(arguments: argparse.Namespace) -> None:
    progress = Progress()
    directory = train(load_config(arguments.config, arguments.overrides), resume=arguments.resume, progress=progress)
    _finish(directory, progress.console)


def run_rollout(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides)
    _sample(config, tasks_of_step(make_tasks(config), config, 1), title="rollouts")


def run_score(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides)
    records = read_trajectory_file(arguments.trajectories)
    trajectories = [_trajectory(at, record, arguments.trajectories) for at, record in enumerate(records, start=1)]
    model, tokenizer = load_policy(config.model.path, adapter=config.model.adapter)
    scorer = MarginalGainScorer(
        model,
        tokenizer,
        granularity=arguments.granularity,
        space=config.algorithm.gain_space,
        autocast=config.autocast_dtype,
    )
    try:
        scores = scorer.score(trajectories)
    except ValueError as error:
        raise RunError(f"{arguments.trajectories}: {error}") from None
    for trajectory, score in zip(trajectories, scores):
        line: dict[str, Any] = {"prompt_id": trajectory.prompt_id, "answer": score.answer}
        line |= {"gain": score.gain.tolist(), "eligible": score.eligible.tolist(), "turn_gain": score.turn_gain}
        line["value"] = [{"session": s.session, "length": s.length, "value": v} for s, v in score.value.items()]
        print(json.dumps(line))


def _trajectory(number: int, record: Any, path: str) -> Trajectory:
    try:
        trajectory = Trajectory.from_dict({key: value for key, value in record.items() if key != "training"})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}, line {number} is no trajectory: {error}") from None
    if not trajectory.answers:
        raise RunError(f"{path}, line {number}: the trajectory has no answers, and gains need a ground truth")
    return trajectory


def run_eval(arguments: argparse.Namespace) -> None:
    config = load_config(arguments.config, arguments.overrides)
    tasks = make_tasks(config)
    if arguments.count is not None:
        if not 0 < arguments.count <= len(tasks):
            raise ConfigError(f"--count must be between 1 and the {len(tasks)} tasks there are, got {arguments.count}")
        tasks = tasks[: arguments.count]
    _sample(config, tasks, title=f"evaluation of {len(tasks)} prompts")


def _sample(config: RunConfig, tasks: Sequence[Task], title: str) -> None:
    """Judged rollouts of `tasks` by the configured policy, as step 1 of a run directory, and their metrics."""
    judge, tools, progress = make_judge(config), make_tools(config), Progress()
    log, _ = open_run(config, resume=False)
    model, tokenizer = load_policy(config.model.path, adapter=config.model.adapter)
    check_context(model, config)
    engine = make_engine(model, config)
    del model
    record_config(log, config)
    with progress.stage("rollouts", len(tasks) * config.rollout.group_size) as advance:
        trajectories, dropped = asyncio.run(
            collect(
                tasks,
                engine=engine,
                chat=ChatFormat(tokenizer, tool_format=config.agent.tool_format),
                tools=tools,
                judge=judge,
                config=config,
                seed=derive_seed(config.seed, "rollout", 1),
                on_done=advance,
            )
        )
    metrics = rollout_metrics(trajectories, dropped)
    log.write_trajectories(1, [trajectory.to_dict() for trajectory in trajectories])
    log.write_metrics(1, metrics)
    _print_metrics(metrics, progress.console, title=title)
    progress.console.print(Text(f"trajectories and metrics: {log.directory}"), soft_wrap=True)


def run_report(arguments: argparse.Namespace) -> None:
    _finish(Path(arguments.run), Console())


def run_warmstart(arguments: argparse.Namespace) -> None:
    from mosaic.warmstart import roomier, train_adapter

    config = demo.demo_config(arguments.output)
    train_adapter(
        Path(arguments.output),
        agent=roomier(config.agent),
        hops=config.task.hops,
        seed=arguments.seed,
        updates=arguments.updates,
        progress=Progress(),
    )


def _finish(directory: Path, console: Console) -> None:
    print_summary(directory, console)
    report = build_report(directory, decode=make_decoder(directory))
    console.print(Text(f"report: {report}"), soft_wrap=True)


def _print_metrics(metrics: dict[str, Any], console: Console, title: str) -> None:
    table = Table("metric", "value", title=title)
    for key, value in metrics.items():
        table.add_row(key, Text(f"{value:.4g}" if isinstance(value, float) else str(value)))
    console.print(table)


COMMANDS = {
    "demo": run_demo,
    "train": run_train,
    "rollout": run_rollout,
    "score": run_score,
    "eval": run_eval,
    "report": run_report,
    "warmstart": run_warmstart,
}
