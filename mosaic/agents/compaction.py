"""Context compaction: at the boundary of its context the policy writes a summary, from which a new session starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mosaic.agents import prompts
from mosaic.agents.chat import ChatFormat
from mosaic.agents.protocol import escape, extract_summary, split_thinking
from mosaic.agents.react import ReactSession, Step
from mosaic.agents.rollout import Dropped, Rollout, conduct
from mosaic.config import AgentConfig
from mosaic.rollout.engine import RolloutEngine
from mosaic.tasks import Task
from mosaic.tools import Tool
from mosaic.trajectory import Session, SessionType, Trajectory


async def compaction_rollout(
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
    """ReAct that compacts its context when it is full: sessions NORMAL, COMPACTION, NORMAL, ..., the last one terminal.

    Record style (Mosaic appendix C.1): a summariser session reads the session as an inert record; the next session
    starts from question and summary. Live style (CompactionRL): an instruction behind the live history asks for the
    summary, also as soon as fewer than `compaction_threshold` tokens are left; the next session keeps the last steps
    word for word. A compaction that fails leaves no session and forces the answer. The parent of every session but the
    first is the session before it.

    Arguments and result: as `mosaic.agents.react.single_rollout`.
    """
    return await conduct(Rollout(task, engine, chat, tools, config, seed, prompt_index, rollout_index), _compacting)


@dataclass(frozen=True)
class _Attempt:
    """A compaction that is about to be sampled: its prompt, its temperature, and how many steps stay verbatim."""

    prompt_ids: list[int]
    temperature: float
    kept: int = 0


async def _compacting(rollout: Rollout) -> Trajectory:
    config = rollout.config
    session = ReactSession(rollout, _prompt(rollout, prompts.question_prompt(rollout.task.question)))
    sessions: list[Session] = []
    summary: str | None = None

    def is_nearly_full() -> bool:
        left = config.session_limit - len(session)
        may_compact = rollout.counts["compactions"] < config.max_compactions
        return config.compaction_style == "live" and may_compact and left < config.compaction_threshold

    while True:
        end = await session.run(is_nearly_full)
        if end.reason == "answer":
            break
        reason = end.reason
        if reason in ("context_limit", "until"):
            outcome = await _compact(rollout, session, summary)
            if not isinstance(outcome, str):
                written, following, summary = outcome
                at = len(sessions)
                written = replace(written, parent=at)
                sessions += [session.export(parent=at - 1 if at else None), written]
                session = following
                continue
            reason = outcome
        end = await session.force_answer(reason)
        break
    sessions.append(session.export(terminal=True, parent=len(sessions) - 1 if sessions else None))
    return rollout.trajectory("compaction", sessions, end)


def _prompt(rollout: Rollout, user: str) -> list[int]:
    return rollout.chat.prompt_ids(rollout.messages(user), list(rollout.schemas.values()))


async def _compact(
    rollout: Rollout, session: ReactSession, earlier: str | None
) -> tuple[Session, ReactSession, str] | str:
    """(summary session, next normal session, summary), or why there is none."""
    if rollout.counts["compactions"] >= rollout.config.max_compactions:
        return "max_compactions"
    if not session.turns:
        return "nothing_to_compact"
    live = rollout.config.compaction_style == "live"
    attempt = _live_attempt(rollout, session) if live else _record_attempt(rollout, session, earlier)
    outcome = attempt if isinstance(attempt, str) else await _summarise(rollout, session, attempt)
    rollout.counts["failed_compactions" if isinstance(outcome, str) else "compactions"] += 1
    return outcome


def _record_attempt(rollout: Rollout, session: ReactSession, earlier: str | None) -> _Attempt | str:
    """The summariser's prompt; a record over L' - B loses its oldest tool responses first."""
    chat = rollout.chat
    opened = chat.thinking_open
    turns = [(_reasoning(step.text, opened), step.move, step.observation) for step in session.steps]
    sizes = [len(chat.encode(observation)) for *_, observation in turns]
    note = len(chat.encode(prompts.DROPPED_RESPONSE))
    dropped = 0
    while True:
        record = prompts.session_record(rollout.task.question, earlier, turns)
        prompt_ids = chat.prompt_ids(prompts.summariser_messages(record))
        excess = len(prompt_ids) - session.limit
        if excess <= 0:
            return _Attempt(prompt_ids, rollout.config.summary_temperature)
        while excess > 0 and dropped < len(turns):
            if sizes[dropped] > note:
                excess -= sizes[dropped] - note
                turns[dropped] = (*turns[dropped][:2], prompts.DROPPED_RESPONSE)
            dropped += 1
        if excess > 0:
            return "record_too_long"


def _reasoning(text: str, opened: bool) -> str:
    """The thinking and the words before the call."""
    thinking, body = split_thinking(text, opened=opened)
    return "\n".join(filter(None, (thinking, body.partition("<tool_call>")[0].strip())))


def _live_attempt(rollout: Rollout, session: ReactSession) -> _Attempt:
    """The history with the instruction behind it. The steps that stay are chosen before the summary is sampled, with
    room for the longest summary, so that none is lost to it; at least one step is left to summarise."""
    config = rollout.config
    limit = config.session_limit - max(config.reserve, config.compaction_threshold)
    used = len(_prompt(rollout, prompts.resume_prompt(rollout.task.question, ""))) + config.summary_tokens
    kept = 0
    while kept < min(config.keep_steps, len(session.steps) - 1):
        used += session.steps[-1 - kept].end - session.steps[-1 - kept].start
        if used >= limit:
            break
        kept += 1
    instruction = rollout.chat.user_ids(prompts.live_instruction(kept), ended=session.ended)
    return _Attempt([*session.token_ids, *instruction], config.temperature, kept)


async def _summarise(
    rollout: Rollout, session: ReactSession, attempt: _Attempt
) -> tuple[Session, ReactSession, str] | str:
    config, chat = rollout.config, rollout.chat
    room = min(config.summary_tokens, config.session_limit - len(attempt.prompt_ids))
    if room <= 0:
        return "no_room_for_summary"
    order = (rollout.begin_session(), 0)
    generation = await rollout.sample(attempt.prompt_ids, room, attempt.temperature, order)
    text, _ = chat.decode_turn(generation.token_ids)
    summary = extract_summary(text, opened=chat.thinking_open)
    if summary is None:
        return "no_summary"
    following = _next_session(rollout, session, summary, attempt.kept)
    if len(following) >= following.limit:
        return "no_room_after_summary"
    size = len(generation.token_ids)
    written = Session(
        SessionType.COMPACTION,
        attempt.prompt_ids,
        list(generation.token_ids),
        [True] * size,
        list(generation.logprobs),
        temperature=attempt.temperature,
        weights_version=generation.weights_version,
    )
    return written, following, summary


def _next_session(rollout: Rollout, session: ReactSession, summary: str, kept: int) -> ReactSession:
    question = rollout.task.question
    if rollout.config.compaction_style == "record":
        return ReactSession(rollout, _prompt(rollout, prompts.continuation_prompt(question, summary)))
    # Written out again a summary may take more tokens than it had: never more than were kept free for it.
    summary = rollout.chat.truncate(escape(summary), rollout.config.summary_tokens)
    prompt_ids = _prompt(rollout, prompts.resume_prompt(question, summary))
    steps = _moved(session.steps[len(session.steps) - kept :], len(prompt_ids))
    tokens = session.token_ids
    for step in session.steps[len(session.steps) - kept :]:
        prompt_ids += tokens[step.start : step.end]
    return ReactSession(rollout, prompt_ids, steps=steps)


def _moved(steps: Sequence[Step], start: int) -> list[Step]:
    """The steps one behind the other from `start` on."""
    moved = []
    for step in steps:
        moved.append(replace(step, start=start, end=start + step.end - step.start))
        start = moved[-1].end
    return moved
