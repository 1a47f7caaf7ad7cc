"""Subagent forking: the main agent hands tasks to children that run at once, and goes on with all their reports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from mosaic.agents import prompts
from mosaic.agents.chat import ChatFormat
from mosaic.agents.protocol import ToolCall
from mosaic.agents.react import ReactSession
from mosaic.agents.rollout import Dropped, End, Observation, Rollout, conduct
from mosaic.config import AgentConfig
from mosaic.rollout.engine import RolloutEngine
from mosaic.tasks import Task
from mosaic.tools import Tool
from mosaic.trajectory import SessionType, Trajectory

# A fork call is made only if its observation has room for this much of each child's report, in tokens.
MIN_REPORT_TOKENS = 16
_CUT = " [cut]"


async def forking_rollout(
    task: Task,
    *,
    engine: RolloutEngine,
    chat: ChatFormat,
    tools: Mapping[str, Tool],
    config: AgentConfig,
    seed: int,
    prompt_index: int,
    rollout_index: int,
) -> Trajectory | Dropped:
    """ReAct whose main agent may fork 1 to `max_children` subagents a call (Mosaic appendix C.2).

    Sessions: the children in the order in which they finished, then the main session, terminal and their parent.
    Nobody compacts: at a limit the answer of that session is forced. A child that fails or crashes is reported, and
    counts as a session; only the engine's own failure ends the rollout.

    Arguments and result: as `mosaic.agents.react.single_rollout`; `tools` are the children's, and with fork the main
    agent's.

    Raises:
        ValueError: `tools` already has a fork.
    """
    if "fork" in tools:
        raise ValueError("tools must not hold 'fork': the main agent gets its own, and children must not have one")
    return await conduct(Rollout(task, engine, chat, tools, config, seed, prompt_index, rollout_index), _forking)


async def _forking(rollout: Rollout) -> Trajectory:
    main = _Main(rollout)
    end = await main.session.run()
    if end.reason != "answer":
        end = await main.session.force_answer(end.reason)
    sessions = [child.session.export(parent=len(main.finished), fork_index=child.fork_index) for child in main.finished]
    return rollout.trajectory("forking", [*sessions, main.session.export(terminal=True)], end)


@dataclass
class _Child:
    """One subagent: its place among the engine's running agents is taken before the parent starts to wait."""

    task: str
    session: ReactSession
    fork_index: int
    place: ExitStack = field(default_factory=ExitStack)
    answer: str | None = None
    failure: str = ""

    @property
    def report(self) -> str:
        return self.failure if self.answer is None else self.answer


class _Main:
    def __init__(self, rollout: Rollout):
        self.rollout = rollout
        self.finished: list[_Child] = []
        most = rollout.config.max_children
        schemas = {**rollout.schemas, "fork": prompts.fork_schema(most)}
        messages = rollout.messages(prompts.question_prompt(rollout.task.question), max_children=most)
        prompt_ids = rollout.chat.prompt_ids(messages, list(schemas.values()))
        self.session = ReactSession(rollout, prompt_ids, schemas=schemas, act=self._act)

    async def _act(self, call: ToolCall, room: int) -> Observation | None:
        rollout, limit = self.rollout, self.rollout.config.max_fork_calls
        if call.name != "fork":
            return await rollout.call_tool(call, room)
        if rollout.counts["forks"] >= limit:
            return Observation(prompts.fork_refused(limit), ("refused_forks",))
        tasks = [subagent["task"] for subagent in call.arguments["subagents"]]
        if _aggregated_size(rollout.chat, tasks) > room:
            return None
        children = [self._child(task) for task in tasks]
        await self._run(children)
        failed = sum(child.answer is None for child in children)
        rollout.counts.update({"subagents": len(children), "failed_subagents": failed})
        results = [(child.task, child.answer is not None, child.report) for child in children]
        return Observation(fit_results(rollout.chat, results, room), ("forks",))

    def _child(self, task: str) -> _Child:
        rollout = self.rollout
        messages = rollout.messages(prompts.child_prompt(task))
        prompt_ids = rollout.chat.prompt_ids(messages, list(rollout.schemas.values()))
        return _Child(task, ReactSession(rollout, prompt_ids, type=SessionType.SUBAGENT), self.session.turns)

    async def _run(self, children: list[_Child]) -> None:
        """Runs the children at once and waits for all. Children enter `running` before the parent enters `waiting`, and
        the last one leaves only after the parent is back, so that a lock-step engine never sees the rollout idle."""
        unfinished = len(children)

        async def run(child: _Child) -> None:
            nonlocal unfinished
            await self._run_child(child)
            self.finished.append(child)
            unfinished -= 1
            if unfinished:
                child.place.close()

        running: list[asyncio.Task[None]] = []
        try:
            for child in children:
                child.place.enter_context(self.rollout.engine.running())
            with self.rollout.engine.waiting():
                running += [asyncio.ensure_future(run(child)) for child in children]
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for child in children:
                child.place.close()

    async def _run_child(self, child: _Child) -> None:
        try:
            end = await child.session.run()
            if end.reason != "answer":
                end = await child.session.force_answer(end.reason)
        except Exception as error:
            if isinstance(error, Dropped) or error is self.rollout.engine_error:
                raise
            end = End(f"it crashed ({type(error).__name__}: {error})")
        child.answer = end.answer
        child.failure = f"no answer ({end.reason})"


def _aggregated_size(chat: ChatFormat, tasks: list[str]) -> int:
    """Tokens that a fork call's observation needs at the least."""
    smallest = prompts.subagent_results([(task, True, _CUT) for task in tasks])
    return len(chat.encode(smallest)) + MIN_REPORT_TOKENS * len(tasks)


def fit_results(chat: ChatFormat, results: list[tuple[str, bool, str]], room: int) -> str:
    """The aggregated observation in at most `room` tokens, the longest reports cut to one common length.

    Args:
        chat: counts tokens.
        results: (task, success, report) of each child, in task order; what is not a report must fit `room`.
        room: most tokens.
    """
    text = prompts.subagent_results(results)
    if len(chat.encode(text)) <= room:
        return text
    # The common length is found by bisection over the whole text: reports merge with what stands around them.
    low, high = 0, max(len(chat.encode(report)) for *_, report in results)
    while low < high:
        middle = (low + high + 1) // 2
        if len(chat.encode(prompts.subagent_results(_shortened(chat, results, middle)))) <= room:
            low = middle
        else:
            high = middle - 1
    return prompts.subagent_results(_shortened(chat, results, low))


def _shortened(chat: ChatFormat, results: list[tuple[str, bool, str]], tokens: int) -> list[tuple[str, bool, str]]:
    shortened = []
    for task, success, report in results:
        beginning = chat.truncate(report, tokens)
        shortened.append((task, success, report if beginning == report else beginning + _CUT))
    return shortened
