"""What the sessions of one rollout share: requests to the engine, tool calls, counts, the finished trajectory."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mosaic.agents import prompts
from mosaic.agents.chat import ChatFormat
from mosaic.agents.protocol import ToolCall, escape
from mosaic.config import AgentConfig
from mosaic.rollout.engine import Generation, GenerationRequest, RolloutEngine
from mosaic.tasks import Task
from mosaic.tools import Tool, ToolError
from mosaic.trajectory import Session, Trajectory

COUNTS = (
    "turns tool_calls tool_errors format_errors discarded_turns "
    "compactions failed_compactions forks refused_forks subagents failed_subagents"
).split()


class Dropped(Exception):
    """Why a rollout gives nothing to train on: raised inside it, returned by it."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class End:
    """How a session stopped: "answer", or the limit that ran out; `answer` is the extracted text or None."""

    reason: str
    answer: str | None = None


@dataclass(frozen=True)
class Observation:
    """What the policy sees after its turn, as inert text, and the counts that the turn adds."""

    text: str
    counts: tuple[str, ...]


@dataclass
class Rollout:
    """What the sessions of one rollout share.

    Args:
        task, engine, chat, tools, config: as the rollout functions take them.
        seed: of the optimiser step's rollouts; every request's own seed derives from it.
        prompt_index, rollout_index: where the rollout stands in the step's batch.
        counts: events of committed turns, summed over all sessions, and the reason of a forced answer.
    """

    task: Task
    engine: RolloutEngine
    chat: ChatFormat
    tools: Mapping[str, Tool]
    config: AgentConfig
    seed: int
    prompt_index: int
    rollout_index: int
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    engine_error: Exception | None = None
    sessions_begun: int = 0

    def begin_session(self) -> int:
        """The next session number; children take theirs in task order, so numbers do not depend on timing."""
        self.sessions_begun += 1
        return self.sessions_begun - 1

    def messages(self, user: str, *, max_children: int | None = None) -> list[dict[str, str]]:
        system = prompts.system_prompt(date=self.config.date, max_children=max_children)
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {name: tool.schema for name, tool in self.tools.items()}

    async def sample(
        self, token_ids: list[int], max_new_tokens: int, temperature: float, order: tuple[int, int]
    ) -> Generation:
        """Samples one turn; `order` is (session, sample) inside the rollout.

        Raises:
            Dropped: the engine gave no tokens, or a log-prob that is None, NaN or infinite.
        """
        place = (self.prompt_index, self.rollout_index, *order)
        digest = hashlib.blake2b(repr([int(part) for part in (self.seed, *place)]).encode(), digest_size=8).digest()
        request = GenerationRequest(
            token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=int.from_bytes(digest, "big") >> 1,  # 63 bits: engines keep seeds in a signed 64-bit integer
            stop_token_ids=self.chat.stop_token_ids,
            order=place,
        )
        try:
            generation = await self.engine.generate(request)
        except Exception as error:
            self.engine_error = error
            raise
        if not generation.token_ids or len(generation.logprobs) != len(generation.token_ids):
            raise Dropped("the engine returned no tokens, or not one log-prob for each")
        if not all(logprob is not None and math.isfinite(logprob) for logprob in generation.logprobs):
            raise Dropped("the engine returned a log-prob that is None, NaN or infinite")
        return generation

    async def call_tool(self, call: ToolCall, room: int) -> Observation:
        """Runs a search or visit; whatever goes wrong is told to the policy."""
        try:
            return Observation(escape(await self.tools[call.name](**call.arguments)), ("tool_calls",))
        except ToolError as error:
            message = str(error)
        except Exception as error:  # a tool is foreign code: its fault must not end the rollout
            message = f"the tool failed ({type(error).__name__}: {error})"
        return Observation(prompts.tool_error(message), ("tool_calls", "tool_errors"))

    def trajectory(self, scenario: str, sessions: list[Session], end: End) -> Trajectory:
        """The finished trajectory.

        Raises:
            Dropped: a session is longer than L'. Turns and summaries never make it so: its question is too long.
        """
        if any(len(session.token_ids) > self.config.session_limit for session in sessions):
            raise Dropped("the question is longer than session_limit")
        metadata = {
            "scenario": scenario,
            "question": self.task.question,
            "answer": end.answer,
            "end_reason": end.reason,
            "overlong": end.reason != "answer",
            "counts": dict(self.counts),
        }
        return Trajectory(self.task.id, sessions, answers=self.task.answers, metadata=metadata)


async def conduct(rollout: Rollout, body: Callable[[Rollout], Awaitable[Trajectory]]) -> Trajectory | Dropped:
    """Runs a scenario among the engine's running agents; a dropped rollout is returned, not raised."""
    with rollout.engine.running():
        try:
            return await body(rollout)
        except Dropped as dropped:
            return dropped
