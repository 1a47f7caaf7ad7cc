"""What to average over: loss weights per token for a whole optimiser step, and whitening; both across ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mosaic_kernels._checks import as_mask, check_packed, check_tensor
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.active_tokens import count_active, spread_active
from mosaic_kernels.policy_loss.reductions import compute_dtype, ordered_sum

KINDS = ("trajectory", "token", "prompt", "segment", "segment_flat")


def normalization_weights(
    layout: Layout, mask: Tensor | None, kind: str, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The loss weight of every policy token, counted over a whole optimiser step.

    | kind | weight of an active token of segment s, trajectory i, prompt p |
    | --- | --- |
    | trajectory | 1 / (R T_i): every trajectory weighs the same (Mosaic) |
    | token | 1 / sum T_i: every token weighs the same (CompactionRL, SUPO) |
    | prompt | 1 / (P tokens of prompt p): every prompt weighs the same |
    | segment | 1 / (R N_i n_s): every trajectory the same, and inside it every segment |
    | segment_flat | 1 / (S n_s): every segment the same, so long trajectories weigh more |

    T_i, n_s count active tokens; R, P, S, N_i count only entities that have one. The weights add up to 1 over the step.

    Call it once on the layout of the whole step, then slice the result into micro-batches: weights counted inside a
    micro-batch would change with the split.

    Args:
        layout: T tokens. With `group`, trajectory and prompt ids are global to the step, so that a trajectory with
            segments on several ranks counts once; a segment lies on one rank.
        mask: [T] bool or integer, non-zero on policy tokens; None: all.
        kind: one of the table's.
        group: process group of the data-parallel ranks; counts are summed over it. Ranks whose largest ids differ are
            aligned first, which waits for the device; without a group nothing does. The weights suit SUMMED gradients:
            where gradients are averaged over ranks (FSDP, DDP), multiply them by the world size.

    Returns:
        [T] float32, 0 on masked tokens; all 0 if nothing is active.

    Raises:
        ValueError, TypeError: unknown kind, or a mask of wrong shape or dtype.

    Source: Mosaic's objective (each rollout averaged over its own T_i tokens); CompactionRL's mean over all optimised
    tokens.

    >>> layout = Layout([0, 1, 3, 4], segment_trajectory=[0, 0, 1])  # trajectories of 3 and 1 tokens
    >>> [round(w, 3) for w in normalization_weights(layout, None, "trajectory").tolist()]
    [0.167, 0.167, 0.167, 0.5]
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    mask = check_packed(layout, mask, {})
    return weights_of(layout, mask, kind, torch.float32, group)


def weights_of(
    layout: Layout, mask: Tensor, kind: str, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> Tensor:
    """`normalization_weights` of checked arguments, in `dtype`."""
    active = count_active(layout, mask)
    denominator = _denominator(layout, active, kind, group).clamp(min=1)
    return spread_active((1 / denominator.to(torch.float64)).to(dtype), layout, mask)


def _denominator(layout: Layout, active: Tensor, kind: str, group: dist.ProcessGroup | None) -> Tensor:
    """What an active token of each segment is divided by [S] int64, from each segment's active tokens [S]."""

    def by_id(ids: Tensor, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Sum of `x` [S] over the entity of each segment [S], and how many entities have any (0-d)."""
        sums = x.new_zeros(size).index_add(0, ids, x)
        if group is not None:
            sums = _sum_by_id(sums, group)
        return sums[ids], (sums > 0).sum()

    if kind == "token":
        return _sum_over(active.sum(), group).expand(layout.num_segments)
    if kind == "segment_flat":
        return active * _sum_over((active > 0).sum(), group)
    trajectory = layout.segment_trajectory
    if kind == "trajectory":
        tokens, trajectories = by_id(trajectory, active, layout.num_trajectories)
        return tokens * trajectories
    if kind == "prompt":
        tokens, prompts = by_id(layout.trajectory_group[trajectory], active, layout.num_groups)
        return tokens * prompts
    segments, trajectories = by_id(trajectory, (active > 0).to(torch.int64), layout.num_trajectories)
    return active * segments * trajectories


def whiten(x: Tensor, mask: Tensor | None, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """`x` shifted and scaled to mean 0 and standard deviation 1 over the active entries.

        out = (x - mean) / (std + 1e-6),    std with n - 1 in the denominator

    Fewer than two active entries, or all of them equal, give exactly 0. The statistics are float64.

    Args:
        x: [T] floating point (any one-dimensional tensor).
        mask: [T] bool or integer; masked entries are not read and give 0. None: all.
        group: process group over which the statistics are taken.

    Returns:
        [T] float32 (float64 for float64 input), without a gradient. NaN throughout if an active entry is not finite.

    Raises:
        ValueError, TypeError: wrong shape or dtype.

    >>> [round(y, 3) for y in whiten(torch.tensor([1.0, 9.0, 3.0]), torch.tensor([1, 0, 1])).tolist()]
    [-0.707, 0.0, 0.707]
    """
    check_tensor("x", x, (None,), "[T]")
    mask = as_mask(mask, x.shape[0], x.device)
    values = x.detach().double()
    count = _sum_over(mask.sum(), group)
    mean = _sum_over(ordered_sum(torch.where(mask, values, 0.0)), group) / count.clamp(min=1)
    centred = torch.where(mask, values - mean, 0.0)
    deviation = (_sum_over(ordered_sum(centred * centred), group) / (count - 1).clamp(min=1)).sqrt()
    bounds = torch.stack(
        [F.pad(torch.where(mask, y, -torch.inf), (0, 1), value=-torch.inf).amax() for y in (values, -values)]
    )
    if group is not None:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    # compared with the largest and smallest entry themselves: their mean is rounded, and the residue over eps is not 0
    constant = (count < 2) | (bounds[0] == -bounds[1])
    out = torch.where(constant & mean.isfinite(), 0.0, centred / (deviation + 1e-6))
    return torch.where(mask, out, 0.0).to(compute_dtype(x))


def _sum_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def _sum_by_id(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums `counts` over the ranks by id, though a rank may know only smaller ids than another."""
    size = torch.tensor(counts.shape[0], device=counts.device)
    dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
    return _sum_over(F.pad(counts, (0, int(size) - counts.shape[0])), group)
