"""The training loop, top to bottom: rollout, judge, pack, score, advantages, updates, log, checkpoint."""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from mosaic.advantages import ADVANTAGES, session_utility
from mosaic.agents.chat import ChatFormat
from mosaic.batch import Batch, pack, response_rows
from mosaic.checkpoint import (
    derive_seed,
    discard_leftovers,
    list_checkpoints,
    restore_training,
    save_checkpoint,
    seed_everything,
)
from mosaic.config import ConfigError, RunConfig, flat_keys
from mosaic.log import RunLog, atomic_write
from mosaic.models import load_policy
from mosaic.parts import check_context, make_engine, make_judge, make_tasks, make_tools
from mosaic.progress import Progress
from mosaic.rollout.collect import collect
from mosaic.scoring import MarginalGainScorer, TrajectoryScore
from mosaic.tasks import Task
from mosaic.trajectory import SessionType, Trajectory
from mosaic.update import update_policy

SUCCESS = 0.5  # least reward of what the metrics call a success
PROBE_TOKENS = 128  # of the model's context, kept free behind a session for the probe of its gain


def train(config: RunConfig, *, resume: bool = False, progress: Progress | None = None) -> Path:
    """Trains `config.steps` steps and returns the run directory; `resume` goes on after its newest checkpoint."""
    progress = progress or Progress(quiet=True)
    tasks, tools, judge = make_tasks(config), make_tools(config), make_judge(config)
    tasks_of_step(tasks, config, 1)  # refuses a step of more prompts than there are tasks before a model loads
    log, checkpoint = open_run(config, resume)
    if checkpoint:
        model, tokenizer = load_policy(str(checkpoint / "policy"))
    else:
        model, tokenizer = load_policy(config.model.path, adapter=config.model.adapter)
    check_context(model, config, probe_tokens=PROBE_TOKENS)
    if config.model.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer, schedule = make_optimizer(model, config)
    done = restore_training(checkpoint, optimizer=optimizer, schedule=schedule) if checkpoint else 0
    record_config(log, config)
    log.rewind(done)

    engine = make_engine(model, config)
    chat = ChatFormat(tokenizer, tool_format=config.agent.tool_format)
    scorer = MarginalGainScorer(
        model,
        tokenizer,
        granularity="both" if config.algorithm.name == "igpo" else "session",
        space=config.algorithm.gain_space,
        autocast=config.autocast_dtype,
    )

    for step in range(done + 1, config.steps + 1):
        seed_everything(config.seed, "step", step)
        clock, title = Clock(), f"step {step}/{config.steps}"
        engine.load_weights(model.state_dict().items(), version=step - 1)

        with clock("rollout"), progress.stage(f"{title}: rollouts", config.num_rollouts) as advance:
            trajectories, dropped = asyncio.run(
                collect(
                    tasks_of_step(tasks, config, step),
                    engine=engine,
                    chat=chat,
                    tools=tools,
                    judge=judge,
                    config=config,
                    seed=derive_seed(config.seed, "rollout", step),
                    on_done=advance,
                )
            )
        metrics = rollout_metrics(trajectories, dropped)

        if trajectories:
            batch = pack(trajectories)
            with clock("score"), progress.stage(f"{title}: old log-probs and gains", len(trajectories)) as advance:
                scores = scorer.score(trajectories, on_done=advance)
            add_scores(batch, trajectories, scores, config.algorithm.gain_space)
            batch.advantage = ADVANTAGES[config.algorithm.name](batch, **config.algorithm.options)
            if config.algorithm.mask_overlong:
                batch.mask = batch.mask & ~batch.layout.trajectory_to_token(batch.overlong)
            with clock("update"), progress.stage(f"{title}: updates", config.num_updates) as advance:
                metrics |= update_policy(
                    model,
                    optimizer,
                    schedule,
                    batch,
                    config,
                    on_skip=partial(log.save_skipped, step),
                    on_update=advance,
                )
            metrics |= batch_metrics(batch)
            log.write_trajectories(step, records(trajectories, scores, batch))
        else:
            log.write_trajectories(step, [])

        metrics["peak_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        log.write_metrics(step, {**metrics, "time": clock.seconds})
        progress.step_done(step, metrics)
        if step % config.checkpoint_every == 0 or step == config.steps:
            save_checkpoint(
                log.directory / "checkpoints",
                step,
                model=model,
                tokenizer=tokenizer,
                optimizer=optimizer,
                schedule=schedule,
                keep=config.keep_checkpoints,
            )
    return log.directory


def open_run(config: RunConfig, resume: bool) -> tuple[RunLog, Path | None]:
    """The run's log and the checkpoint to go on from; refuses to overwrite a run or to resume it with other settings.

    Writes nothing yet, so that a run whose model does not load can be started again with the right one.
    """
    directory = Path(config.output)
    saved = directory / "config.yaml"
    checkpoints = list_checkpoints(directory / "checkpoints")
    if (saved.exists() or checkpoints) and not resume:
        raise ConfigError(
            f"output: {directory} holds a run already; give another output (output=...), or let mosaic train or demo "
            "go on with it by --resume"
        )
    if saved.exists():
        before, now = (flat_keys(x) for x in (yaml.safe_load(saved.read_text()), config.model_dump(mode="json")))
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if changed := [key for key in changed if key not in ("steps", "output")]:
            raise ConfigError(f"--resume: {', '.join(changed)} differ from {saved}; only steps may change")
    return RunLog(directory), checkpoints[-1] if checkpoints else None


def record_config(log: RunLog, config: RunConfig) -> None:
    """Makes the run directory, with the resolved configuration and without what a killed run left half done."""
    atomic_write(log.directory / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    discard_leftovers(log.directory / "checkpoints", config.keep_checkpoints)


def make_optimizer(model: torch.nn.Module, config: RunConfig) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW over the master weights, and its learning-rate schedule over all updates of the run."""
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    total = config.steps * config.num_updates

    def scale(done: int) -> float:
        if done < options.warmup_updates:
            return (done + 1) / options.warmup_updates
        share = min(1.0, (done - options.warmup_updates) / max(1, total - options.warmup_updates))
        return {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[options.schedule]

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def tasks_of_step(tasks: Sequence[Task], config: RunConfig, step: int) -> list[Task]:
    """The step's prompts: whole steps out of a shuffle of all tasks that is new in each epoch."""
    count = config.rollout.prompts
    if count > len(tasks):
        raise ConfigError(f"rollout.prompts: {count} prompts a step exceed the {len(tasks)} tasks there are")
    epoch, at = divmod(step - 1, len(tasks) // count)
    generator = torch.Generator().manual_seed(derive_seed(config.seed, "tasks", epoch))
    order = torch.randperm(len(tasks), generator=generator).tolist()
    return [tasks[i] for i in order[at * count : (at + 1) * count]]


def add_scores(
    batch: Batch, trajectories: Sequence[Trajectory], scores: Sequence[TrajectoryScore], gain_space: str
) -> None:
    """Puts old log-probs and gains into the batch."""
    sessions = [session for trajectory in trajectories for session in trajectory.sessions]
    logprobs = [logprob for score in scores for logprob in score.logprob]
    batch.old_logprob = torch.cat([response_rows(session, x) for session, x in zip(sessions, logprobs)])
    batch.gain_space = gain_space
    batch.gain = torch.cat([score.gain for score in scores])
    batch.eligible = torch.cat([score.eligible for score in scores])
    if all(score.turn_gain is not None for score in scores):
        gains = [torch.tensor([*turns, 0.0], dtype=torch.float64) for score in scores for turns in score.turn_gain]
        turns = batch.turn.split(batch.layout.lengths.tolist())
        # Rows without a turn carry index -1, which reads the appended 0.
        batch.turn_gain = torch.cat([gain[turn] for gain, turn in zip(gains, turns)])


def records(
    trajectories: Sequence[Trajectory], scores: Sequence[TrajectoryScore], batch: Batch
) -> list[dict[str, Any]]:
    """What the run keeps of each trajectory: everything, and what training made of it."""
    per_session = [
        float(advantage[mask][0]) if mask.any() else 0.0
        for advantage, mask in zip(*(x.split(batch.layout.lengths.tolist()) for x in (batch.advantage, batch.mask)))
    ]
    out, start = [], 0
    for i, (trajectory, score) in enumerate(zip(trajectories, scores)):
        end = start + len(trajectory.sessions)
        terminal = next(s for s in range(start, end) if batch.terminal[s])
        training = {
            "session_advantage": per_session[start:end],
            # A terminal session takes the trajectory's advantage unshaped.
            "trajectory_advantage": per_session[terminal],
            "gain": [g if e else None for g, e in zip(score.gain.tolist(), score.eligible.tolist())],
            "eligible": score.eligible.tolist(),
            "group": int(batch.group[i]),
        }
        out.append({**trajectory.to_dict(), "training": training})
        start = end
    return out


def rollout_metrics(trajectories: Sequence[Trajectory], dropped: Counter[str]) -> dict[str, Any]:
    """What the rollouts were like, before any training."""
    groups: dict[str, set[float]] = defaultdict(set)
    for trajectory in trajectories:
        groups[trajectory.prompt_id].add(trajectory.reward)
    count = max(1, len(trajectories))

    def share(session_type: SessionType) -> float:
        return sum(any(s.type is session_type for s in t.sessions) for t in trajectories) / count

    return {
        "trajectories": len(trajectories),
        "dropped": dict(dropped),
        "reward_mean": sum(t.reward for t in trajectories) / count,
        "success_rate": sum(t.reward >= SUCCESS for t in trajectories) / count,
        "sessions_mean": sum(len(t.sessions) for t in trajectories) / count,
        "compaction_share": share(SessionType.COMPACTION),
        "fork_share": share(SessionType.SUBAGENT),
        "groups_mixed": sum(len(rewards) > 1 for rewards in groups.values()),
        "tokens": sum(len(s.token_ids) for t in trajectories for s in t.sessions),
    }


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Session utility, and how far the engine's log-probs are from the trainer's."""
    difference = (batch.rollout_logprob - batch.old_logprob)[batch.mask].abs()
    return {
        **session_utility(batch.gain, batch.eligible)._asdict(),
        "engine_logprob_diff_mean": float(difference.mean()) if difference.numel() else 0.0,
        "engine_logprob_diff_max": float(difference.max()) if difference.numel() else 0.0,
    }


class Clock:
    """Seconds of each stage of a step."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start
