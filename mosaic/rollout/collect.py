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

JUDGED_AT_ONCE = 32  # answers: a judge's endpoint bears so many connections, an evaluation has thousands


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
    free = asyncio.Semaphore(JUDGED_AT_ONCE)

    async def roll_out(prompt: int, rollout: int) -> Trajectory | Dropped:
        result = await SCENARIOS[scenarios[prompt % len(scenarios)]](
            tasks[prompt],
            engine=engine,
            chat=chat,
            tools=tools,
            config=config.agent,
            seed=seed,
            prompt_index=prompt,
            rollout_index=rollout,
        )
        on_done()
        return result

    async def judged(result: Trajectory | Dropped) -> Trajectory | Dropped:
        if isinstance(result, Dropped):
            return result
        async with free:
            result.reward = await judge(result.metadata["question"], result.answers, result.metadata["answer"])
        return Dropped("the judge gave no verdict") if result.reward is None else result

    pairs = [(prompt, rollout) for prompt in range(len(tasks)) for rollout in range(config.rollout.group_size)]
    results = await asyncio.gather(*(roll_out(prompt, rollout) for prompt, rollout in pairs))
    # Only now: an engine in this process holds the event loop, and a judge's time limits would run out meanwhile.
    results = await asyncio.gather(*map(judged, results))
    kept = [result for result in results if isinstance(result, Trajectory)]
    return kept, Counter(result.reason for result in results if isinstance(result, Dropped))
