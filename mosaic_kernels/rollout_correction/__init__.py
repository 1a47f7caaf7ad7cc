"""Correction for sampling from an engine whose probabilities are not exactly the trainer's."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from mosaic_kernels._backend import pick
from mosaic_kernels._checks import check_number, check_packed
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.reductions import check_level
from mosaic_kernels.rollout_correction import cpu, reference

__all__ = ["RolloutCorrection", "rollout_correction"]

_MODULES = {"cpu": cpu, "reference": reference}


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
    backend: str | None = None,
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
        backend: "reference", "cpu", "triton", "cuda", or None for the fastest that can serve the call.

    Returns:
        RolloutCorrection: weight [T] float32 (float64 for float64 `logprob`), without a gradient, 0 where not kept;
        keep [T] bool, False on masked tokens; metrics over active tokens: ratio_mean, ratio_max (before the cap),
        capped_fraction, dropped_fraction, logprob_difference and logprob_difference_max (absolute, nats: a jump from
        one step to the next means that the engine has other weights), kl = mean(rollout_logprob - logprob),
        policy_tokens and nonfinite_tokens (int64). A non-finite input at an active token makes its unit's weight NaN
        and is kept, so that the loss shows it.

    Raises:
        ValueError, TypeError: wrong shape or dtype, unknown level, cap or floor out of range, or no backend's name.
        NotImplementedError: the backend asked for cannot serve the call.

    Source: truncated importance sampling (Ionides 2008; IMPALA, 1802.01561); verl's rollout correction.

    >>> import torch
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
    module = pick("rollout_correction", backend, _MODULES, logprob=logprob)
    return RolloutCorrection(
        *module.forward(logprob.detach(), rollout_logprob.detach(), layout, mask, level, cap, floor)
    )
