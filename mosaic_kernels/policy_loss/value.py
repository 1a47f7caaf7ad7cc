"""The critic's loss over packed tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mosaic_kernels._checks import check_number, check_packed
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.normalization import weights_of
from mosaic_kernels.policy_loss.reductions import compute_dtype, masked_mean, nonfinite_and_poison, ordered_sum


class ValueLoss(NamedTuple):
    """Result of `value_loss`: the 0-d loss, and detached 0-d metrics by name."""

    loss: Tensor
    metrics: dict[str, Tensor]


def value_loss(
    value: Tensor,
    old_value: Tensor | None,
    returns: Tensor,
    layout: Layout,
    *,
    mask: Tensor | None = None,
    token_weight: Tensor | None = None,
    clip: float | None = None,
) -> ValueLoss:
    """Weighted squared error of a critic, optionally clipped around its old value as in PPO.

        loss = sum over active t of w_t L_t,    L = 0.5 (v - R)^2
        with clip = c:  L = 0.5 max((v - R)^2, (old + clamp(v - old, -c, c) - R)^2)

    Args:
        value, returns: [T] floating point; `returns` is a constant.
        old_value: [T] the critic's output before the update; read only with `clip`, otherwise None will do.
        layout: T tokens.
        mask: [T] bool or integer, non-zero on active tokens; None: all. Nothing is read at masked positions.
        token_weight: [T] w; default: each trajectory of this call weighs the same (`normalization_weights`).
        clip: None, or c > 0 in the units of the value.

    Returns:
        ValueLoss: the loss, differentiable in `value`; metrics, means over active tokens: clip_fraction (the clipped
        error decides), value_mean, return_mean, explained_variance (1 - var(R - v) / var(R); 0 where R does not vary);
        policy_tokens and nonfinite_tokens, int64. A non-finite input at an active token makes the loss and that token's
        gradient NaN. Maths in float32, float64 for a float64 `value`.

    Raises:
        ValueError, TypeError: wrong shape or dtype, clip <= 0, or clip without old_value.

    Source: PPO (1707.06347) Eq. 9; the clipped form of its published implementation.

    >>> out = value_loss(torch.tensor([1.0, 2.0]), None, torch.tensor([0.0, 0.0]), Layout([0, 2]))
    >>> out.loss.item()  # (0.5 * 1 + 0.5 * 4) / 2
    1.25
    """
    optional = {"old_value": old_value, "token_weight": token_weight}
    mask = check_packed(layout, mask, {"value": value, "returns": returns}, optional)
    if clip is not None:
        check_number("clip", clip, "a finite number > 0, or None", lambda x: 0 < x < math.inf)
        if old_value is None:
            raise ValueError("old_value must be given with clip: pass the values the critic gave before the update")
    dtype = compute_dtype(value)
    if token_weight is None:
        token_weight = weights_of(layout, mask, "trajectory", dtype)

    def select(x: Tensor) -> Tensor:
        return torch.where(mask, x.to(dtype), 0.0)

    value, returns, weight = select(value), select(returns.detach()), select(token_weight.detach())
    used = [value, returns, weight]
    if clip is not None:
        old_value = select(old_value.detach())
        used.append(old_value)
    nonfinite, poison = nonfinite_and_poison(used)
    value = value * poison

    error = (value - returns).square()
    limited = torch.zeros_like(mask)
    if clip is not None:
        change = value.detach() - old_value
        # read only where the change exceeds clip; not by clamp, which torch.compile would compile anew for each clip
        bounded = (old_value + change.sign() * clip - returns).square()
        limited = (change.abs() > clip) & (bounded > error.detach())
        error = torch.where(limited, bounded, error)
    loss = ordered_sum(torch.where(mask, weight * 0.5 * error * poison, 0.0))

    value = value.detach()
    return_mean, residual_mean = masked_mean(returns, mask), masked_mean(returns - value, mask)
    spread = masked_mean((returns - return_mean).square(), mask)
    residual = masked_mean((returns - value - residual_mean).square(), mask)
    return ValueLoss(
        loss,
        {
            "clip_fraction": masked_mean(limited.to(dtype), mask),
            "value_mean": masked_mean(value, mask),
            "return_mean": return_mean,
            "explained_variance": torch.where(spread == 0, 0.0, 1 - residual / spread),
            "policy_tokens": mask.sum(),
            "nonfinite_tokens": nonfinite.sum(),
        },
    )
