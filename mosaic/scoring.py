"""Marginal information gain, and the old log-probs that come out of the same pass.

The value of a state h is how likely the policy finds the true answer there (Mosaic Eq. 29):

    V(h) = (1/|Y|) sum over the answer's tokens j of log pi(Y_j | h, continuation before j)

A session's gain is V(state after) - V(state before). Every state is a prefix of some session, so one forward of each
session, with its keys and values kept, carries all its probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from mosaic.agents.chat import ChatFormat
from mosaic.models import backbone, head
from mosaic.trajectory import Session, SessionType, Trajectory
from mosaic_kernels import Layout, linear_logprob, segment_logprob

OPENING = "I have gathered enough to answer."


@dataclass(frozen=True)
class State:
    """A probed context: the first `length` tokens of session `session`."""

    session: int
    length: int


@dataclass
class TrajectoryScore:
    """What scoring one trajectory of N sessions gave.

    Args:
        gain: [N] float64, 0 where not eligible.
        eligible: [N] bool, non-terminal sessions.
        value: V (or exp V in probability space) at each distinct state that a gain needs.
        turn_gain: per session the gain of each turn, 0 for a terminal session's last; None unless asked.
        logprob: per session [len(response_ids)] float32, the policy's log-probs at the session's sampling
            temperature, 0 on environment tokens.
        answer: the ground truth that was probed.
    """

    gain: Tensor
    eligible: Tensor
    value: dict[State, float]
    turn_gain: list[list[float]] | None
    logprob: list[Tensor]
    answer: str


def session_states(trajectory: Trajectory) -> list[tuple[State, State] | None]:
    """The states before and after each session, None for a terminal session (Mosaic appendix B.1)."""
    return [None if session.terminal else _state_pair(trajectory, at) for at, session in enumerate(trajectory.sessions)]


def _state_pair(trajectory: Trajectory, at: int) -> tuple[State, State]:
    sessions = trajectory.sessions
    session = sessions[at]
    if session.type is SessionType.NORMAL:
        return State(at, len(session.prompt_ids)), State(at, len(session.token_ids))
    if session.type is SessionType.COMPACTION:
        if at == 0 or at + 1 == len(sessions):
            raise ValueError(f"session {at} is a compaction without a session before and after it")
        return State(at - 1, len(sessions[at - 1].token_ids)), State(at + 1, len(sessions[at + 1].prompt_ids))
    if session.parent is None or session.fork_index is None:
        raise ValueError(f"session {at} is a subagent: it needs parent and fork_index to find its parent's states")
    turns = turn_states(sessions[session.parent], session.parent)
    if not 0 <= session.fork_index < len(turns):
        raise ValueError(f"fork_index of session {at} must be a turn of its parent, got {session.fork_index}")
    return turns[session.fork_index]


def turn_states(session: Session, at: int) -> list[tuple[State, State]]:
    """The states before and after each turn: where it starts, and where the next one does (or the session ends)."""
    prompt = len(session.prompt_ids)
    bounds = [prompt + start for start, _ in session.turns()] + [len(session.token_ids)]
    return [(State(at, before), State(at, after)) for before, after in zip(bounds, bounds[1:])]


class MarginalGainScorer:
    """Scores sessions (and turns) by how much likelier they make the true answer.

    Args:
        model: a Hugging Face causal language model with full attention.
        tokenizer: its tokenizer, with a chat template.
        granularity: gains of sessions, of turns, or of both.
        space: "log": V(after) - V(before); "prob": exp V(after) - exp V(before).
        choose: with several ground truths, one is probed at all states of a trajectory, so that gains telescope:
            the "best" at its last state, or the "first".
        max_tokens: longest session plus probe that is scored; default: the model's context.
        autocast: the dtype in which the backbone runs; None for the model's own. The head is float32 always.

    >>> scorer = MarginalGainScorer(model, tokenizer)                          # doctest: +SKIP
    >>> scorer.score(trajectories)[0].gain                                     # doctest: +SKIP
    tensor([ 0.8130, -0.1042,  0.0000], dtype=torch.float64)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        granularity: Literal["session", "turn", "both"] = "session",
        space: Literal["log", "prob"] = "log",
        choose: Literal["best", "first"] = "best",
        max_tokens: int | None = None,
        autocast: torch.dtype | None = None,
    ):
        for name, value, known in (
            ("granularity", granularity, ("session", "turn", "both")),
            ("space", space, ("log", "prob")),
            ("choose", choose, ("best", "first")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise NotImplementedError(
                f"probes branch from kept keys and values, which needs full attention; the model has {kinds}"
            )
        self.model, self.tokenizer = model, tokenizer
        self.granularity, self.space, self.choose, self.autocast = granularity, space, choose, autocast
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, or None for the model's context, got {max_tokens}")
        self.max_tokens = model.config.max_position_embeddings if max_tokens is None else max_tokens
        self.chat = ChatFormat(tokenizer)

    @torch.no_grad()
    def score(
        self, trajectories: Sequence[Trajectory], *, on_done: Callable[[], None] = lambda: None
    ) -> list[TrajectoryScore]:
        """One result a trajectory; `on_done` is called after each.

        Raises:
            ValueError: a trajectory has no ground truth, an answer has no tokens, or a probe does not fit the context.
        """
        for at, trajectory in enumerate(trajectories):
            self._check(at, trajectory)
        was_training = self.model.training
        self.model.eval()
        try:
            scores = []
            for trajectory in trajectories:
                scores.append(self._score(trajectory))
                on_done()
            return scores
        finally:
            self.model.train(was_training)

    def _check(self, at: int, trajectory: Trajectory) -> None:
        if not trajectory.answers:
            raise ValueError(
                f"trajectory {at} (prompt {trajectory.prompt_id!r}) has no answers: gains need a ground truth"
            )
        for answer in trajectory.answers:
            if not self._answer_ids(answer):
                raise ValueError(f"trajectory {at}: answer {answer!r} has no tokens")
        longest = max(len(self._answer_ids(answer)) for answer in trajectory.answers) + len(self._opening([-1]))
        for number, session in enumerate(trajectory.sessions):
            if (needed := len(session.token_ids) + longest) > self.max_tokens:
                raise ValueError(
                    f"trajectory {at}, session {number}: {needed} tokens with a probe exceed max_tokens = "
                    f"{self.max_tokens}"
                )

    def _score(self, trajectory: Trajectory) -> TrajectoryScore:
        pairs = session_states(trajectory)
        turns = [turn_states(session, at) for at, session in enumerate(trajectory.sessions)]
        wanted = [pair for pair in pairs if pair] if self.granularity != "turn" else []
        if self.granularity != "session":
            wanted += [
                pair for at, states in enumerate(turns) for pair in self._scored_turns(trajectory.sessions[at], states)
            ]
        states = {state for pair in wanted for state in pair}
        # Time order, so that the last probed state is known: it decides which ground truth is probed.
        last = max(states, key=lambda state: (state.session, state.length), default=None)
        order = sorted(range(len(trajectory.sessions)), key=lambda at: last is None or at != last.session)

        logprob: list[Tensor] = [torch.empty(0)] * len(trajectory.sessions)
        value: dict[State, float] = {}
        answer = trajectory.answers[0]
        for at in order:
            session = trajectory.sessions[at]
            hidden, cache = self._run(session.token_ids)
            logprob[at] = self._response_logprob(session, hidden)
            if last is not None and at == last.session and self.choose == "best" and len(trajectory.answers) > 1:
                answer = max(trajectory.answers, key=lambda a: self._probe(session, cache, last.length, a))
            for state in sorted((s for s in states if s.session == at), key=lambda s: s.length):
                value[state] = self._probe(session, cache, state.length, answer)
        if self.space == "prob":
            value = {state: float(torch.tensor(v, dtype=torch.float64).exp()) for state, v in value.items()}

        gain = [value[pair[1]] - value[pair[0]] if pair and self.granularity != "turn" else 0.0 for pair in pairs]
        turn_gain = None
        if self.granularity != "session":
            turn_gain = [
                [value[b] - value[a] if a in value and b in value else 0.0 for a, b in states] for states in turns
            ]
        return TrajectoryScore(
            gain=torch.tensor(gain, dtype=torch.float64),
            eligible=torch.tensor([pair is not None for pair in pairs], dtype=torch.bool),
            value=value,
            turn_gain=turn_gain,
            logprob=logprob,
            answer=answer,
        )

    @staticmethod
    def _scored_turns(session: Session, states: list[tuple[State, State]]) -> list[tuple[State, State]]:
        return states[:-1] if session.terminal else states

    def _run(self, token_ids: list[int], cache: DynamicCache | None = None) -> tuple[Tensor, DynamicCache]:
        """Hidden states [L, H] of `token_ids` after what `cache` holds, and the cache with them."""
        past = DynamicCache() if cache is None else cache
        ids = torch.tensor([token_ids], device=self.model.device)
        with torch.autocast(self.model.device.type, self.autocast, enabled=self.autocast is not None):
            out = backbone(self.model)(input_ids=ids, past_key_values=past, use_cache=True)
        return out.last_hidden_state[0], out.past_key_values

    def _response_logprob(self, session: Session, hidden: Tensor) -> Tensor:
        weight, bias, softcap = head(self.model)
        start = len(session.prompt_ids) - 1
        return (
            linear_logprob(
                hidden[start : start + len(session.response_ids)],
                weight,
                torch.tensor(session.response_ids, dtype=torch.int64, device=hidden.device),  # of no tokens too
                bias=bias,
                softcap=softcap,
                temperature=session.temperature,
                mask=torch.tensor(session.response_mask, dtype=torch.bool, device=hidden.device),
            )
            .logprob.float()
            .cpu()
        )

    def _probe(self, session: Session, cache: DynamicCache, length: int, answer: str) -> float:
        """V at the state of the session's first `length` tokens."""
        state, answer_ids = session.token_ids[:length], self._answer_ids(answer)
        # The last token of the state is run again: where nothing stands between, it predicts the answer's first token.
        hidden, _ = self._run([state[-1], *self._opening(state), *answer_ids], _first(cache, length - 1))
        weight, bias, softcap = head(self.model)
        rows = hidden[-len(answer_ids) - 1 : -1]
        target = torch.tensor(answer_ids, device=hidden.device)
        layout = Layout([0, len(answer_ids)]).to(hidden.device)
        return float(segment_logprob(rows, weight, target, layout, bias=bias, softcap=softcap).value[0])

    def _opening(self, state: list[int]) -> list[int]:
        """What stands between a state and the answer: the start of an assistant turn, unless there is one, and the
        wrapper that closes the thinking and opens the answer."""
        prefix = self.chat.generation_prefix
        reopened = (
            [] if state[-len(prefix) :] == prefix else self.chat.reopen_ids(ended=state[-1] == self.chat.end_of_turn)
        )
        thinking = f"{OPENING}\n</think>\n\n" if self.chat.thinking_open else f"{OPENING} "
        return [*reopened, *self.tokenizer(f"{thinking}<answer>", add_special_tokens=False)["input_ids"]]

    def _answer_ids(self, answer: str) -> list[int]:
        return self.chat.encode(answer)


def _first(cache: DynamicCache, length: int) -> DynamicCache:
    """A cache of the first `length` tokens of `cache`, which stays as it is."""
    part = DynamicCache()
    for at, layer in enumerate(cache.layers):
        part.update(layer.keys[:, :, :length], layer.values[:, :, :length], at)
    return part
