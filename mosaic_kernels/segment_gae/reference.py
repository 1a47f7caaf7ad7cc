"""The definition of `segment_gae` in plain PyTorch: any device, no loop over tokens, so that it also compiles.

Everything is computed in float64 and rounded once to the result's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels.layout import Layout
from mosaic_kernels.segment_gae.lam import check_values, nan_where_invalid


def forward(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    layout: Layout,
    lam: Tensor,
    lam_critic: Tensor | None,
    bootstrap_value: Tensor | None,
    gamma: Tensor,
    correction: str,
    corrected_returns: bool,
) -> tuple[Tensor, Tensor]:
    ids = (layout.segment_trajectory, layout.num_trajectories, correction)
    if not torch.compiler.is_compiling() and reward.device.type == "cpu":
        check_values("lam", lam, *ids)
        if lam_critic is not None:
            check_values("lam_critic", lam_critic, *ids)
        if correction != "chain":
            check_rewards(reward, mask, layout, correction)
    # One unit, one recursion: a segment, or for "chain" a trajectory, whose segments are brought side by side.
    chain = correction == "chain"
    order = torch.argsort(layout.token_trajectory if chain else layout.token_segment, stable=True)
    mask, segment, trajectory = mask[order], layout.token_segment[order], layout.token_trajectory[order]
    active_value = torch.where(mask, value[order].double(), 0)
    paid = _paid_reward(reward[order].double(), mask, segment, trajectory, layout, chain)
    unit, num_units = (trajectory, layout.num_trajectories) if chain else (segment, layout.num_segments)
    following = _following_active(mask, unit, num_units)

    bootstrap = torch.zeros_like(lam) if bootstrap_value is None else bootstrap_value.double()
    next_value = _with_sentinel(active_value, 0)[following]
    next_value = torch.where(following == reward.numel(), bootstrap[segment], next_value)
    delta = torch.where(mask, paid + gamma * next_value - active_value, 0)
    after = _active_after(mask, segment, layout)[segment] if correction == "position" else None

    def advantages(lam: Tensor) -> tuple[Tensor, Tensor]:
        """Before and after the position correction."""
        decay = gamma * nan_where_invalid(lam, *ids)[segment]
        local = _discounted_sum(delta, decay, following)
        return local, local if after is None else decay**after * local

    local, corrected = advantages(lam)
    critic = (local, corrected) if lam_critic is None else advantages(lam_critic)
    returns = critic[1 if corrected_returns else 0] + active_value

    dtype = torch.float64 if torch.float64 in (reward.dtype, value.dtype) else torch.float32
    in_order = [torch.where(mask, x, 0).to(dtype) for x in (corrected, returns)]
    return tuple(torch.empty_like(x).index_copy(0, order, x) for x in in_order)


def check_rewards(reward: Tensor, mask: Tensor, layout: Layout, correction: str) -> None:
    """ValueError if a segment without active tokens holds a reward, which then no token could take."""
    active = torch.zeros(layout.num_segments, dtype=torch.int64, device=mask.device)
    active = active.index_add(0, layout.token_segment, mask.to(torch.int64))
    orphan = (reward != 0) & (active == 0)[layout.token_segment]
    if bool(orphan.any()):
        raise_orphan(int(layout.token_segment[orphan.nonzero()[0]]), correction)


def raise_orphan(segment: int, correction: str) -> None:
    raise ValueError(
        f"reward of segment {segment} cannot count: the segment has no active token and correction={correction!r} "
        "keeps rewards in their segment; put it on a segment with active tokens, set it to 0, or use correction='chain'"
    )


def _with_sentinel(x: Tensor, fill: float) -> Tensor:
    """`x` [T] with one more entry, which index T ("there is none") reads."""
    return torch.cat([x, x.new_full((1,), fill)])


def _last_active_so_far(mask: Tensor, unit: Tensor, num_units: int) -> Tensor:
    """For each token the last active token of its unit at or before it, else the first after it, else T: [T]."""
    position = torch.arange(mask.numel(), device=mask.device)
    first = position.new_full((num_units,), mask.numel())
    first = first.scatter_reduce(0, unit, torch.where(mask, position, mask.numel()), "amin")[unit]
    last = torch.where(mask, position, -1).cummax(0).values  # perhaps of an earlier unit: then it lies before `first`
    return torch.maximum(first, last)


def _following_active(mask: Tensor, unit: Tensor, num_units: int) -> Tensor:
    """For each token the next active token of its unit, or T: [T]."""
    size = mask.numel()
    position = torch.arange(size, device=mask.device)
    final = position.new_full((num_units,), -1)
    final = final.scatter_reduce(0, unit, torch.where(mask, position, -1), "amax")[unit]
    upcoming = torch.where(mask, position, size).flip(0).cummin(0).values.flip(0)
    upcoming = _with_sentinel(upcoming, size)[1:]
    return torch.where(upcoming <= final, upcoming, size)


def _paid_reward(
    reward: Tensor, mask: Tensor, segment: Tensor, trajectory: Tensor, layout: Layout, chain: bool
) -> Tensor:
    """Every reward moved to the active token at which it counts: [T]."""
    size = reward.numel()
    target = _last_active_so_far(mask, segment, layout.num_segments)
    if chain:  # a segment without active tokens pays the active segment before it, else the one after it
        in_trajectory = _last_active_so_far(mask, trajectory, layout.num_trajectories)
        target = torch.where(target == size, in_trajectory, target)
    return reward.new_zeros(size + 1).index_add(0, target, reward)[:size]


def _discounted_sum(delta: Tensor, decay: Tensor, following: Tensor) -> Tensor:
    """A[t] = delta[t] + decay[t] * A[following[t]], with A[T] = 0 and `decay` constant along every such path: [T].

    By doubling: after k rounds each token has summed 2^k steps of its path, and `following` points 2^k steps on.
    """
    total, decay = _with_sentinel(delta, 0), _with_sentinel(decay, 0)
    following = _with_sentinel(following, delta.numel())
    steps = 1
    while steps < delta.numel():
        total = total + decay * total[following]
        decay, following, steps = decay * decay, following[following], 2 * steps
    return total[:-1]


def _active_after(mask: Tensor, segment: Tensor, layout: Layout) -> Tensor:
    """Active tokens in the later segments of each segment's trajectory: [S]."""
    own = torch.zeros(layout.num_segments, dtype=torch.int64, device=mask.device)
    own = own.index_add(0, segment, mask.to(torch.int64))
    of_trajectory = own.new_zeros(layout.num_trajectories).index_add(0, layout.segment_trajectory, own)
    order = torch.argsort(layout.segment_trajectory, stable=True)
    up_to_here = own[order].cumsum(0)  # over all trajectories, in the order of their ids
    after = of_trajectory.cumsum(0)[layout.segment_trajectory[order]] - up_to_here
    return torch.empty_like(after).index_copy(0, order, after)
