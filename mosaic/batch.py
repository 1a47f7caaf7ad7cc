"""Trajectories -> the packed tensors that every later stage passes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mosaic.trajectory import Trajectory
from mosaic_kernels import Layout, shifted_targets


@dataclass
class Batch:
    """Packed trajectories: a segment is a session, segments stand in trajectory order.

    Row convention: row t of every [T] tensor speaks of the token it predicts, input_ids[t + 1] of the same segment, as
    `linear_logprob` does.

    Args:
        input_ids, target: [T] int64; target is -100 on the last row of a segment.
        layout: T tokens, S sessions, R trajectories, G prompt groups.
        mask: [T] bool, True where the predicted token was sampled by the policy.
        temperature: [T] float32, the session's sampling temperature.
        turn: [T] int64, 0-based index of the policy turn inside its session; -1 off the mask.
        rollout_logprob: [T] float32, the engine's; 0 off the mask.
        reward: [R] float32. session_count: [R] int64.
        overlong: [R] bool, the trajectory ended because a limit ran out.
        session_type: [S] int64, values of SessionType. terminal: [S] bool.
        old_logprob: [T] float32, the trainer's before the update, 0 off the mask; None until scored.
        gain, eligible: [S] float64 and bool, the marginal information gain; None until scored.
        turn_gain: [T] float64, on each policy row the gain of its turn; None unless turns were scored.
        gain_space: "log" or "prob", the scorer's: whether gains are differences of V or of exp V.
        value: [T] float32, the critic's; None without a critic.
        advantage: [T] float32, 0 off the mask; None until estimated.
        weight: [T] float32, the loss weight of each token in its optimiser update; None until normalised.
    """

    input_ids: Tensor
    target: Tensor
    layout: Layout
    mask: Tensor
    temperature: Tensor
    turn: Tensor
    rollout_logprob: Tensor
    reward: Tensor
    session_count: Tensor
    overlong: Tensor
    session_type: Tensor
    terminal: Tensor
    old_logprob: Tensor | None = None
    gain: Tensor | None = None
    eligible: Tensor | None = None
    turn_gain: Tensor | None = None
    value: Tensor | None = None
    advantage: Tensor | None = None
    weight: Tensor | None = None
    gain_space: str = "log"

    @property
    def group(self) -> Tensor:
        """[R] prompt group of each trajectory."""
        return self.layout.trajectory_group

    def trajectories(self, keep: Tensor) -> Batch:
        """The segments of the trajectories where `keep` [R] is True; ids, and so [R] tensors, stay as they are."""
        return self._segments(self.layout.trajectory_to_segment(keep))

    def micro_batches(self, max_tokens: int, *, whole_trajectories: bool = False) -> Iterator[Batch]:
        """Consecutive segments of at most `max_tokens` together; a longer segment stands alone.

        `whole_trajectories` keeps all segments of a trajectory in one micro-batch, however many tokens that takes.
        """
        lengths = self.layout.lengths.tolist()
        owner = self.layout.segment_trajectory.tolist() if whole_trajectories else range(self.layout.num_segments)
        units: dict[int, list[int]] = {}
        for segment, unit in enumerate(owner):
            units.setdefault(unit, []).append(segment)
        chosen: list[int] = []
        for segments in units.values():
            if chosen and sum(lengths[s] for s in (*chosen, *segments)) > max_tokens:
                yield self._pick(chosen)
                chosen = []
            chosen += segments
        if chosen:
            yield self._pick(chosen)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device`."""
        fields = vars(self).items()
        return Batch(**{name: x.to(device) if isinstance(x, (Tensor, Layout)) else x for name, x in fields})

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, the layout's included: what `torch.load` reads back without knowing this class."""
        ids = ("cu_seqlens", "segment_trajectory", "trajectory_group")
        layout = {name: getattr(self.layout, name) for name in ids}
        return {**{name: x for name, x in vars(self).items() if isinstance(x, Tensor)}, **layout}

    def _pick(self, segments: list[int]) -> Batch:
        keep = torch.zeros(self.layout.num_segments, dtype=torch.bool)
        keep[segments] = True
        return self._segments(keep)

    def _segments(self, keep: Tensor) -> Batch:
        layout = self.layout
        rows = layout.segment_to_token(keep)
        part = Layout.from_lengths(layout.lengths[keep], layout.segment_trajectory[keep], layout.trajectory_group)
        chosen = {
            name: x[rows] if size == "T" else x[keep]
            for name, size in _SHAPES.items()
            if (x := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, layout=part, **chosen)


_SHAPES = {
    **dict.fromkeys(("input_ids", "target", "mask", "temperature", "turn", "rollout_logprob", "old_logprob"), "T"),
    **dict.fromkeys(("turn_gain", "value", "advantage", "weight"), "T"),
    **dict.fromkeys(("session_type", "terminal", "gain", "eligible"), "S"),
}


def pack(trajectories: Sequence[Trajectory]) -> Batch:
    """Packs judged trajectories; prompt groups are numbered in order of first appearance.

    Raises:
        ValueError: a trajectory has no reward yet, or a policy token has no finite engine log-prob.
    """
    groups: dict[str, int] = {}
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise ValueError(f"trajectory of prompt {trajectory.prompt_id!r} has reward None: judge it before packing")
        groups.setdefault(trajectory.prompt_id, len(groups))
    sessions = [(i, session) for i, trajectory in enumerate(trajectories) for session in trajectory.sessions]
    layout = Layout.from_lengths(
        [len(session.token_ids) for _, session in sessions],
        [i for i, _ in sessions],
        [groups[trajectory.prompt_id] for trajectory in trajectories],
    )
    input_ids = torch.tensor([token for _, session in sessions for token in session.token_ids], dtype=torch.int64)
    rows = [_rows(session) for _, session in sessions]
    mask, turn, rollout_logprob = (
        # An empty piece first: without trajectories there is nothing to take the dtype from.
        torch.cat([torch.empty(0, dtype=dtype), *(row[k] for row in rows)])
        for k, dtype in enumerate((torch.bool, torch.int64, torch.float32))
    )
    if not rollout_logprob[mask].isfinite().all():
        raise ValueError("response_logprobs must be finite on policy tokens: drop such a trajectory before packing")
    temperature = torch.tensor([session.temperature for _, session in sessions], dtype=torch.float32)
    return Batch(
        input_ids=input_ids,
        target=shifted_targets(input_ids, layout),
        layout=layout,
        mask=mask,
        temperature=layout.segment_to_token(temperature),
        turn=turn,
        rollout_logprob=rollout_logprob,
        reward=torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float32),
        session_count=torch.tensor([len(trajectory.sessions) for trajectory in trajectories], dtype=torch.int64),
        overlong=torch.tensor([bool(t.metadata.get("overlong", False)) for t in trajectories], dtype=torch.bool),
        session_type=torch.tensor([int(session.type) for _, session in sessions], dtype=torch.int64),
        terminal=torch.tensor([session.terminal for _, session in sessions], dtype=torch.bool),
    )


def response_rows(session, values: Sequence[float]) -> Tensor:
    """Values [len(response_ids)] of response tokens as rows [L] that predict them, 0 elsewhere (float32)."""
    start = len(session.prompt_ids) - 1
    rows = torch.zeros(len(session.token_ids), dtype=torch.float32)
    rows[start : start + len(values)] = torch.as_tensor(values, dtype=torch.float32)
    return rows


def _rows(session) -> tuple[Tensor, Tensor, Tensor]:
    """Mask, turn index and engine log-prob of one session's rows."""
    length, start = len(session.token_ids), len(session.prompt_ids) - 1
    mask = torch.zeros(length, dtype=torch.bool)
    turn = torch.full((length,), -1, dtype=torch.int64)
    for index, (first, last) in enumerate(session.turns()):
        mask[start + first : start + last] = True
        turn[start + first : start + last] = index
    logprobs = [
        float("nan") if sampled and logprob is None else logprob if sampled else 0.0
        for sampled, logprob in zip(session.response_mask, session.response_logprobs)
    ]
    return mask, turn, response_rows(session, logprobs)
