"""IGPO: the turn-level baseline, in which every turn is rewarded with its own marginal gain."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mosaic.advantages.arguments import as_reals, check_choice, check_range
from mosaic.advantages.grouped import standard_score
from mosaic.advantages.registry import register
from mosaic.trajectory import SessionType

if TYPE_CHECKING:
    from mosaic.batch import Batch

_SPACE = {"v1": "prob", "v2": "log"}


@register("igpo")
def igpo(
    batch: Batch,
    *,
    version: str = "v2",
    normalization: str = "separate",
    gamma: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """The discounted return of standardised turn rewards.

        x_t = gain of turn t, for the last turn of the trajectory the outcome reward instead
        A_t = sum over k >= t of gamma^(k-t) z_k,   z = (x - mean_g x) / (std_g x + eps)

    with the population's standard deviation over the prompt group, on all policy tokens of turn t. Turns follow one
    another through the trajectory's sessions. A subagent's turns are a line of their own that ends in the outcome too:
    their parent's turns before the fork are not their future, and the parent's gains already hold what they found.

    Args:
        batch: with turn_gain [T].
        version: "v2" takes gains of log-probabilities, "v1" gains of probabilities; the batch must hold that kind.
        normalization: "separate" standardises gains and outcomes each among themselves, "joint" in one pool.
        gamma: discount a turn, in [0, 1].
        eps: added to the standard deviation.

    Returns:
        advantage [T] float32, 0 off the mask.

    Raises:
        ValueError: an option is out of range; the batch has no turn gains, or those of the other version.

    Source: IGPO (arXiv 2510.14967), its two versions.
    """
    check_choice("version", version, tuple(_SPACE))
    check_choice("normalization", normalization, ("separate", "joint"))
    check_range("gamma", gamma, 0, 1)
    check_range("eps", eps, 0)
    if batch.turn_gain is None:
        raise ValueError(
            'igpo needs batch.turn_gain, got None: score with MarginalGainScorer(granularity="turn"), or "both"'
        )
    if batch.gain_space != _SPACE[version]:
        raise ValueError(
            f"igpo version {version!r} needs {_SPACE[version]!r} gains, got batch.gain_space = {batch.gain_space!r}: "
            f'score with MarginalGainScorer(space="{_SPACE[version]}") or choose the other version'
        )
    turns = _turns(batch)
    advantage = _returns(_standardised(batch, turns, normalization, eps), turns.line, gamma)
    result = torch.zeros(batch.mask.shape, dtype=torch.float32, device=batch.mask.device)
    result[batch.mask] = advantage[turns.of_row].float().to(result.device)
    return result


class _Turns(NamedTuple):
    """The K turns of a batch in time order, on the CPU: each is some of the rows where the mask is True."""

    of_row: Tensor  # [policy tokens] turn of each
    line: Tensor  # [K] turns that follow one another share a line
    trajectory: Tensor  # [K]
    last: Tensor  # [K] bool, the last turn of its line
    gain: Tensor  # [K] float64


def _turns(batch: Batch) -> _Turns:
    mask, layout = batch.mask.cpu(), batch.layout.to("cpu")
    turn, segment = batch.turn.cpu()[mask], layout.token_segment[mask]
    if turn.numel() and int(turn.min()) < 0:
        raise ValueError(f"turn must be >= 0 on the mask, got {int(turn.min())}")
    width = int(turn.max()) + 1 if turn.numel() else 1
    key, of_row = torch.unique(segment * width + turn, return_inverse=True)
    segment = key // width
    trajectory = layout.segment_trajectory[segment]
    alone = batch.session_type.cpu()[segment] == SessionType.SUBAGENT
    line = torch.where(alone, layout.num_trajectories + segment, trajectory)
    index = torch.arange(key.numel())
    end = index.new_full((layout.num_trajectories + layout.num_segments,), -1).scatter_reduce(0, line, index, "amax")
    # All rows of a turn carry the same gain: any one of them will do.
    gain = torch.zeros(key.numel(), dtype=torch.float64).scatter_reduce(
        0, of_row, batch.turn_gain.cpu()[mask].double(), "amax", include_self=False
    )
    return _Turns(of_row, line, trajectory, index == end[line], gain)


def _standardised(batch: Batch, turns: _Turns, normalization: str, eps: float) -> Tensor:
    """[K] z of each turn's reward."""
    present, group = batch.session_count.cpu() > 0, batch.group.cpu()
    outcome = as_reals("reward", batch.reward.cpu()[present], None, "R")
    gain = as_reals("turn_gain", turns.gain, None, "turns", ~turns.last)[~turns.last]
    outcome_group, gain_group = group[present], group[turns.trajectory][~turns.last]
    if normalization == "joint":
        score = standard_score(torch.cat([outcome, gain]), torch.cat([outcome_group, gain_group]), 0, eps)
        outcome, gain = score.split([outcome.numel(), gain.numel()])
    else:
        outcome, gain = (standard_score(x, g, 0, eps) for x, g in ((outcome, outcome_group), (gain, gain_group)))
    by_trajectory = torch.zeros(present.numel(), dtype=torch.float64)
    by_trajectory[present] = outcome
    z = by_trajectory[turns.trajectory]
    z[~turns.last] = gain
    return z


def _returns(z: Tensor, line: Tensor, gamma: float) -> Tensor:
    """[K] discounted sum of this and all later z of the same line."""
    future: dict[int, float] = {}
    backwards = []
    for reward, owner in zip(reversed(z.tolist()), reversed(line.tolist())):
        future[owner] = reward + gamma * future.get(owner, 0.0)
        backwards.append(future[owner])
    return torch.tensor(backwards[::-1], dtype=torch.float64)
