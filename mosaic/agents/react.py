"""The session loop that every scenario shares: think, call, observe, until an answer or a limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mosaic.agents import prompts
from mosaic.agents.chat import ChatFormat
from mosaic.agents.protocol import Answer, Malformed, ToolCall, extract_answer, parse_turn
from mosaic.agents.rollout import Dropped, End, Observation, Rollout, conduct
from mosaic.config import AgentConfig
from mosaic.rollout.engine import Generation, RolloutEngine
from mosaic.tasks import Task
from mosaic.tools import Tool
from mosaic.trajectory import Session, SessionType, Trajectory


@dataclass(frozen=True)
class Step:
    """A committed turn and its observation: token_ids[start:end] of its session, up to the next generation prefix."""

    start: int
    end: int
    text: str
    move: ToolCall | Malformed
    observation: str


Act = Callable[[ToolCall, int], Awaitable["Observation | None"]]


class ReactSession:
    """One session as it grows: tokens are appended, never changed, and each is kept as it was sampled or shown.

    Args:
        rollout: what all sessions share.
        prompt_ids: the exact context at the start, generation prefix included.
        schemas: function schema of each tool that may be called.
        act: answers a valid call, given the tokens that its observation may take; None discards the turn.
        type: for the exported Session.
        steps: earlier steps that stand verbatim inside prompt_ids.
    """

    def __init__(
        self,
        rollout: Rollout,
        prompt_ids: list[int],
        *,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        act: Act | None = None,
        type: SessionType = SessionType.NORMAL,
        steps: Sequence[Step] = (),
    ):
        self.rollout, self.chat, self.config = rollout, rollout.chat, rollout.config
        self.number = rollout.begin_session()
        self.type, self.prompt_ids, self.steps = type, prompt_ids, list(steps)
        self.schemas = rollout.schemas if schemas is None else schemas
        self.act = act or rollout.call_tool
        self.response_ids: list[int] = []
        self.response_mask: list[bool] = []
        self.response_logprobs: list[float | None] = []
        self.turns = self.format_errors = self.samples = 0
        self.weights_version: int | None = None
        self.ended = False  # whether the last token is an end-of-turn that the policy sampled

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def limit(self) -> int:
        """L' - B: the most tokens that a committed turn may leave behind."""
        return self.config.session_limit - self.config.reserve

    async def run(self, until: Callable[[], bool] = lambda: False) -> End:
        """Takes turns until an answer, a limit, or `until` is true after a committed turn (reason "until")."""
        while True:
            end = await self._turn()
            if end is not None:
                return end
            if until():
                return End("until")

    async def force_answer(self, reason: str) -> End:
        """Asks for the answer in one last turn, which may use the room up to L'; what it says ends the session.

        The message stands behind an empty assistant turn where a turn was discarded: tokens are only ever appended.
        """
        self.rollout.counts[f"forced:{reason}"] += 1
        message = self.chat.user_ids(prompts.FORCED_ANSWER, ended=self.ended)
        room = min(self.config.max_turn_tokens, self.config.session_limit - len(self) - len(message))
        if room <= 0:
            self.rollout.counts["no_room_to_answer"] += 1
            return End(reason)
        generation = await self._sample(room, message)
        self._append(message)
        self._commit(generation)
        text, self.ended = self.chat.decode_turn(generation.token_ids)
        return End(reason, extract_answer(text, opened=self.chat.thinking_open))

    def export(self, *, terminal: bool = False, parent: int | None = None, fork_index: int | None = None) -> Session:
        return Session(
            self.type,
            self.prompt_ids,
            self.response_ids,
            self.response_mask,
            self.response_logprobs,
            temperature=self.config.temperature,
            parent=parent,
            fork_index=fork_index,
            terminal=terminal,
            weights_version=self.weights_version or 0,
        )

    async def _turn(self) -> End | None:
        if self.turns >= self.config.max_turns:
            return End("max_turns")
        if len(self) >= self.limit:  # whatever was sampled would be discarded
            return End("context_limit")
        room = min(self.config.max_turn_tokens, self.config.session_limit - len(self))
        generation = await self._sample(room)
        text, ended = self.chat.decode_turn(generation.token_ids)
        move = parse_turn(text, self.schemas, opened=self.chat.thinking_open)
        if isinstance(move, Answer):
            return self._finish_turn(generation, ended, End("answer", move.text))
        if isinstance(move, Malformed):
            if generation.finish_reason == "length":
                move = Malformed(f"it was cut off after {len(generation.token_ids)} tokens; {move.reason}")
            if self.format_errors >= self.config.max_format_errors:
                return self._finish_turn(generation, ended, End("max_format_errors"), ("format_errors",))
        return await self._observe(generation, text, ended, move)

    def _finish_turn(self, generation: Generation, ended: bool, end: End, counts: tuple[str, ...] = ()) -> End:
        """Commits a turn that nothing answers, if it fits."""
        if len(self) + len(generation.token_ids) > self.limit:
            return self._discard()
        self._commit(generation)
        self.rollout.counts.update(counts)
        self.ended = ended
        return end

    async def _observe(self, generation: Generation, text: str, ended: bool, move: ToolCall | Malformed) -> End | None:
        """Answers a call or a malformed turn and commits both, if they fit with the next generation prefix."""
        frame = len(self.chat.observation_ids("", ended=ended))
        room = self.limit - len(self) - len(generation.token_ids) - frame
        if room < 0:  # no observation would fit: do not even call the tool
            return self._discard()
        if isinstance(move, Malformed):
            observation: Observation | None = Observation(prompts.format_error(move.reason), ("format_errors",))
        else:
            observation = await self.act(move, room)
        if observation is None:
            return self._discard()
        response = self.chat.observation_ids(observation.text, ended=ended)
        if len(response) > room + frame:
            return self._discard()
        start = len(self)
        self._commit(generation)
        self._append(response)
        self.steps.append(Step(start, len(self), text, move, observation.text))
        self.format_errors += isinstance(move, Malformed)
        self.rollout.counts.update(observation.counts)
        return None

    def _discard(self) -> End:
        self.rollout.counts["discarded_turns"] += 1
        return End("context_limit")

    async def _sample(self, max_new_tokens: int, message: Sequence[int] = ()) -> Generation:
        order = (self.number, self.samples)
        self.samples += 1
        return await self.rollout.sample([*self.token_ids, *message], max_new_tokens, self.config.temperature, order)

    def _commit(self, generation: Generation) -> None:
        self.response_ids += generation.token_ids
        self.response_mask += [True] * len(generation.token_ids)
        self.response_logprobs += generation.logprobs
        self.turns += 1
        self.rollout.counts["turns"] += 1
        version = generation.weights_version  # a session that spans an update counts as the older weights
        self.weights_version = version if self.weights_version is None else min(self.weights_version, version)

    def _append(self, token_ids: Sequence[int]) -> None:
        """Environment tokens."""
        self.response_ids += token_ids
        self.response_mask += [False] * len(token_ids)
        self.response_logprobs += [None] * len(token_ids)


async def single_rollout(
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
    """Plain ReAct in one session; at a limit the answer is forced.

    Args:
        task: the question.
        engine: samples tokens.
        chat: the tokenizer's chat format.
        tools: by name; those of the agent.
        config: limits.
        seed: of the step's rollouts. prompt_index, rollout_index: of this one in the step; together with the session
            and the turn they make each request's order and its own seed.

    Returns:
        The trajectory, its metadata holding scenario, question, answer (text or None), end_reason, overlong (a limit
        ran out) and counts; or why it was dropped.
    """
    return await conduct(Rollout(task, engine, chat, tools, config, seed, prompt_index, rollout_index), _single)


async def _single(rollout: Rollout) -> Trajectory:
    messages = rollout.messages(prompts.question_prompt(rollout.task.question))
    session = ReactSession(rollout, rollout.chat.prompt_ids(messages, list(rollout.schemas.values())))
    end = await session.run()
    if end.reason != "answer":
        end = await session.force_answer(end.reason)
    return rollout.trajectory("single", [session.export(terminal=True)], end)
