"""Correction for sampling from an engine whose probabilities are not exactly the trainer's."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mosaic_kernels._checks import check_number, check_packed
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.reductions import (
    MAX_LOG_RATIO,
    at_most,
    check_level,
    compute_dtype,
    masked_max,
    masked_mean,
    unit_of_token,
    unit_sum,
)


class RolloutCorrection(NamedTuple):
    """Result of `rollout_correction`: weight [T], keep [T] bool, and 0-d metrics by name."""

    weight: Tensor
    keep: Tensor
    metrics: dict[str, Tensor]


def rollout_correction(
    logprob: Tensor,
    rollout_logprob: Tensor,
    layout: Layout,
    *,
    mask: Tensor | None = None,
    level: str = "token",
    cap: float = 2.0,
    floor: float | None = None,
) -> RolloutCorrection:
    """Truncated importance weights of the trainer's policy against the rollout engine's.

        rho = exp(clamp(sum over the unit's active tokens of logprob - rollout_logprob, -20, 20))
        floor None:  weight = min(rho, cap), every active token is kept
        floor given: weight = rho where floor <= rho <= cap; other units are dropped (keep False, weight 0)

    The unit is the token, the segment or the trajectory. A longer unit's rho is the PRODUCT of its tokens' ratios: the
    exact importance ratio of the sampled text, as verl's sequence level takes it, not a geometric mean. It is unbiased
    before truncation, but its spread grows with length: long segments seldom stay within a tight [floor, cap]. Token
    level is biased with a small spread.

    Pass `weight` as `importance_weight` of `policy_loss`. `keep` (with the mask in it) may replace the mask: then
    dropped tokens leave the normalisation too, and the KL and entropy terms; with the weight alone they count as zeros.

    Args:
        logprob: [T] the trainer's log-probs under the weights that sampled, not those being updated.
        rollout_logprob: [T] the engine's, at the same temperature and over the same kept ids.
        layout: T tokens; all tokens of a unit must lie in this call.
        mask: [T] bool or integer, non-zero on policy tokens; None: all. Nothing is read at masked positions.
        level: "token", "segment" or "trajectory".
        cap: most weight, finite and > 0.
        floor: None, or least weight kept, 0 <= floor < cap.

    Returns:
        RolloutCorrection: weight [T] float32 (float64 for float64 `logprob`), without a gradient, 0 where not kept;
        keep [T] bool, False on masked tokens; metrics over active tokens: ratio_mean, ratio_max (before the cap),
        capped_fraction, dropped_fraction, logprob_difference and logprob_difference_max (absolute, nats: a jump from
        one step to the next means that the engine has other weights), kl = mean(rollout_logprob - logprob),
        policy_tokens and nonfinite_tokens (int64). A non-finite input at an active token makes its unit's weight NaN
        and is kept, so that the loss shows it.

    Raises:
        ValueError, TypeError: wrong shape or dtype, unknown level, cap or floor out of range.

    Source: truncated importance sampling (Ionides 2008; IMPALA, 1802.01561); verl's rollout correction.

    >>> layout = Layout([0, 2])
    >>> new, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])  # ratios 1 and e
    >>> rollout_correction(new, old, layout).weight.tolist()
    [1.0, 2.0]
    >>> rollout_correction(new, old, layout, floor=0.5).keep.tolist()
    [True, False]
    """
    mask = check_packed(layout, mask, {"logprob": logprob, "rollout_logprob": rollout_logprob}, {})
    check_level(level)
    check_number("cap", cap, "a finite number > 0", lambda x: 0 < x < math.inf)
    if floor is not None:
        check_number("floor", floor, "None or in [0, cap)", lambda x: 0 <= x < cap)
    dtype = compute_dtype(logprob)

    new = torch.where(mask, logprob.detach().to(dtype), 0.0)
    rollout = torch.where(mask, rollout_logprob.detach().to(dtype), 0.0)
    nonfinite = ~(new.isfinite() & rollout.isfinite())
    difference = torch.where(nonfinite, torch.nan, new - rollout)
    log_ratio = difference
    if level != "token":
        unit, _ = unit_of_token(layout, level)
        log_ratio = torch.where(mask, unit_sum(difference, layout, level)[unit].to(dtype), 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    above = ratio > cap
    keep = mask
    if floor is not None:
        keep = mask & ~(above | (ratio < floor))
    return RolloutCorrection(
        torch.where(keep, at_most(ratio, cap), 0.0),
        keep,
        {
            "ratio_mean": masked_mean(ratio, mask),
            "ratio_max": masked_max(ratio, mask),
            "capped_fraction": masked_mean((above & keep).to(dtype), mask),
            "dropped_fraction": masked_mean((~keep).to(dtype), mask),
            "logprob_difference": masked_mean(difference.abs(), mask),
            "logprob_difference_max": masked_max(difference.abs(), mask),
            "kl": masked_mean(-difference, mask),
            "policy_tokens": mask.sum(),
            "nonfinite_tokens": nonfinite.sum(),
        },
    )
