"""The trace parameter: length-adaptive values, and the checks of those a caller gives."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from mosaic_kernels._checks import check_number, check_packed, check_tensor
from mosaic_kernels.layout import Layout


def adaptive_lambda(
    layout: Layout, mask: Tensor | None, *, alpha: float = 1.5, scope: Literal["trajectory", "segment"] = "trajectory"
) -> Tensor:
    """A trace parameter for each segment that grows with the number of tokens its reward has to travel.

        lam[s] = clamp(1 - 1 / (alpha * l), 0, 1)      l = active tokens of the segment's trajectory, or of the segment

    Args:
        layout: T tokens in S segments of R trajectories.
        mask: [T] bool or integer, non-zero on active tokens; None: all.
        alpha: how many times l the trace reaches, > 0.
        scope: "trajectory" counts l over the whole trajectory, so that every segment of it gets the same value, as
            `segment_gae` needs for correction="chain" and as suits its factor for "position". "segment" counts each
            segment's own tokens: then that factor, a power of a short segment's lam, can vanish.

    Returns:
        [S] float32, not differentiable; l = 0 gives 0.

    Raises:
        ValueError: alpha is not positive and finite, `scope` is unknown, or the mask is not [T].
        TypeError: the mask is not bool or integer, or the layout no Layout.

    Source: CompactionRL (length-adaptive GAE, alpha 1.5).

    >>> adaptive_lambda(Layout([0, 2, 4], segment_trajectory=[0, 0]), torch.tensor([1, 1, 0, 0])).tolist()
    [0.6666666865348816, 0.6666666865348816]
    >>> adaptive_lambda(Layout([0, 2, 4]), torch.tensor([1, 1, 0, 0]), scope="segment").tolist()
    [0.6666666865348816, 0.0]
    """
    check_number("alpha", alpha, "> 0 and finite", lambda x: 0 < x < math.inf)
    if scope not in ("trajectory", "segment"):
        raise ValueError(f"scope must be 'trajectory' or 'segment', got {scope!r}")
    mask = check_packed(layout, mask, {})
    active = torch.zeros(layout.num_segments, dtype=torch.int64, device=layout.device)
    active = active.index_add(0, layout.token_segment, mask.to(torch.int64))
    if scope == "trajectory":
        total = active.new_zeros(layout.num_trajectories).index_add(0, layout.segment_trajectory, active)
        active = layout.trajectory_to_segment(total)
    return (1 - 1 / (alpha * active.double())).clamp(0, 1).float()


def per_segment(name: str, lam: float | Tensor, layout: Layout) -> Tensor:
    """`lam` as a constant [S] float64 tensor. Raises unless it is a float in [0, 1] or a floating-point tensor [S]."""
    if not isinstance(lam, Tensor):
        check_number(name, lam, "in [0, 1]", lambda x: 0 <= x <= 1)
        return as_constant(lam, (layout.num_segments,), layout.device)
    check_tensor(name, lam, (layout.num_segments,), "[S]")
    return lam.detach().to(device=layout.device, dtype=torch.float64)


def as_constant(x: float, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A float64 tensor full of `x`. By a product: torch.compile would compile torch.full anew for each value of `x`."""
    return torch.ones(shape, dtype=torch.float64, device=device) * x


def check_values(name: str, lam: Tensor, segment_trajectory: Tensor, num_trajectories: int, correction: str) -> None:
    """ValueError unless `lam` [S] lies in [0, 1] and, for "chain", is equal within each trajectory."""
    if not lam.numel():
        return
    smallest, largest = (x.item() for x in lam.aminmax())  # NaN if any is NaN
    if not (smallest >= 0 and largest <= 1):
        at = int((~((lam >= 0) & (lam <= 1))).nonzero()[0])
        raise ValueError(f"{name} must be in [0, 1], got {float(lam[at])} for segment {at}")
    if correction == "chain" and smallest != largest:
        lowest, highest = _range_in_trajectory(lam, segment_trajectory, num_trajectories)
        fault = lowest != highest
        if bool(fault.any()):
            at = int(segment_trajectory[fault.nonzero()[0]])
            raise ValueError(
                f"{name} must be equal within a trajectory for correction='chain', got {float(lowest[fault][0])} and "
                f"{float(highest[fault][0])} in trajectory {at}: use adaptive_lambda(scope='trajectory') or 'position'"
            )


def nan_where_invalid(lam: Tensor, segment_trajectory: Tensor, num_trajectories: int, correction: str) -> Tensor:
    """`lam` [S] with NaN in place of what `check_values` rejects, for places where raising would have to wait."""
    valid = (lam >= 0) & (lam <= 1)
    if correction == "chain":
        lowest, highest = _range_in_trajectory(lam, segment_trajectory, num_trajectories)
        valid = valid & (lowest == highest)
    return torch.where(valid, lam, math.nan)


def _range_in_trajectory(lam: Tensor, segment_trajectory: Tensor, num_trajectories: int) -> tuple[Tensor, Tensor]:
    """The lowest and the highest `lam` of each segment's trajectory: two [S]."""
    ends = []
    for reduce, start in (("amin", math.inf), ("amax", -math.inf)):
        by_trajectory = lam.new_full((num_trajectories,), start).scatter_reduce(0, segment_trajectory, lam, reduce)
        ends.append(by_trajectory[segment_trajectory])
    return ends[0], ends[1]
