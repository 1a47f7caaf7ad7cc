"""What an agent did: sessions of exact token ids, gathered into a trajectory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any


class SessionType(IntEnum):
    """What a session is for; the value is what the packed batch carries."""

    NORMAL = 0
    COMPACTION = 1
    SUBAGENT = 2


@dataclass
class Session:
    """One context from its start to its end, token by token as the policy saw it.

    Args:
        type: what the session is for.
        prompt_ids: the exact context at the session's start.
        response_ids: everything after it, sampled and environment tokens alike, exactly as seen (never re-tokenised).
        response_mask: one entry a response token; True = sampled by the policy (a sampled end-of-turn included).
        response_logprobs: the engine's log-prob of each sampled token at `temperature`; None on environment tokens.
        temperature: the sampling temperature of all policy tokens of the session.
        parent: index in the trajectory of the session that created this one (for a subagent: the forking session).
        fork_index: for a subagent, the 0-based index of the parent's turn (its run of policy tokens) that made the
            fork call; children of one call share it.
        terminal: whether the trajectory's final answer was due in this session.
        weights_version: the version of the weights that sampled it.
    """

    type: SessionType
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[bool]
    response_logprobs: list[float | None]
    temperature: float = field(default=1.0, kw_only=True)
    parent: int | None = field(default=None, kw_only=True)
    fork_index: int | None = field(default=None, kw_only=True)
    terminal: bool = field(default=False, kw_only=True)
    weights_version: int = field(default=0, kw_only=True)

    def __post_init__(self):
        self.type = SessionType(self.type)
        length = len(self.response_ids)
        for name in ("response_mask", "response_logprobs"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{name} must have one entry for each of the {length} response_ids, got {len(getattr(self, name))}"
                )
        if not self.prompt_ids:
            raise ValueError("prompt_ids must not be empty: the first sampled token needs a context")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response, the packed segment."""
        return [*self.prompt_ids, *self.response_ids]

    @property
    def num_policy_tokens(self) -> int:
        return sum(map(bool, self.response_mask))

    def turns(self) -> list[tuple[int, int]]:
        """Maximal runs of policy tokens, as (start, end) offsets into response_ids."""
        runs: list[tuple[int, int]] = []
        start = None
        for at, sampled in enumerate([*self.response_mask, False]):
            if sampled and start is None:
                start = at
            elif not sampled and start is not None:
                runs.append((start, at))
                start = None
        return runs


@dataclass
class Trajectory:
    """One rollout of one prompt.

    Args:
        prompt_id: the prompt group it belongs to.
        sessions: in time order, by their last policy token: children before the main session that waited for them.
        reward: the outcome reward; None until judged.
        answers: the accepted ground-truth answers.
        metadata: JSON-serialisable extras (scenario, extracted answer, counts).
    """

    prompt_id: str
    sessions: list[Session]
    reward: float | None = field(default=None, kw_only=True)
    answers: tuple[str, ...] = field(default=(), kw_only=True)
    metadata: dict[str, Any] | None = field(default=None, kw_only=True)

    def __post_init__(self):
        if isinstance(self.answers, str):  # a tuple of it would be its letters
            raise ValueError(f"answers must hold the accepted answers, got {self.answers!r}: write ({self.answers!r},)")
        self.answers = tuple(self.answers)
        self.metadata = {} if self.metadata is None else self.metadata
        for at, session in enumerate(self.sessions):
            if session.parent is not None and (session.parent == at or not 0 <= session.parent < len(self.sessions)):
                raise ValueError(
                    f"parent of session {at} must be another session of the trajectory, got {session.parent}"
                )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form that `from_dict` turns back into an equal trajectory."""
        record = asdict(self)
        for session in record["sessions"]:
            session["type"] = int(session["type"])
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Trajectory:
        sessions = [Session(**session) for session in record["sessions"]]
        return cls(**{**record, "sessions": sessions})
