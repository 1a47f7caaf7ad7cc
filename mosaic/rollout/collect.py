"""One step's rollouts: every prompt group at once, judged, each kept whole or dropped with a counted reason."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from mosaic.agents import SCENARIOS, Dropped
from mosaic.agents.chat import ChatFormat
from mosaic.config import RunConfig
from mosaic.rewards import Judge
from mosaic.rollout.engine import RolloutEngine
from mosaic.tasks import Task
from mosaic.tools import Tool
from mosaic.trajectory import Trajectory


async def collect(
    tasks: Sequence[Task],
    *,
    engine: RolloutEngine,
    chat: ChatFormat,
    tools: Mapping[str, Tool],
    judge: Judge,
    config: RunConfig,
    seed: int,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[list[Trajectory], Counter[str]]:
    """Runs `config.rollout.group_size` rollouts of each task, task i in scenario i modulo their number.

    Returns:
        (trajectories, dropped): judged trajectories in the order of tasks and rollouts, and how many were dropped for
        which reason.
    """
    scenarios = config.rollout.scenarios

    async def one(prompt: int, rollout: int) -> Trajectory | Dropped:
        task = tasks[prompt]
        result = await SCENARIOS[scenarios[prompt % len(scenarios)]](
            task,
            engine=engine,
            chat=chat,
            tools=tools,
            config=config.agent,
            seed=seed,
            prompt_index=prompt,
            rollout_index=rollout,
        )
        if isinstance(result, Trajectory):
            result.reward = await judge(task.question, task.answers, result.metadata["answer"])
            if result.reward is None:
                result = Dropped("the judge gave no verdict")
        on_done()
        return result

    pairs = [(prompt, rollout) for prompt in range(len(tasks)) for rollout in range(config.rollout.group_size)]
    results = await asyncio.gather(*(one(prompt, rollout) for prompt, rollout in pairs))
    kept = [result for result in results if isinstance(result, Trajectory)]
    return kept, Counter(result.reason for result in results if isinstance(result, Dropped))
