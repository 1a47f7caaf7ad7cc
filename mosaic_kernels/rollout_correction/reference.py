"""Truncated importance weights in plain PyTorch: the definition, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.reductions import (
    MAX_LOG_RATIO,
    at_most,
    compute_dtype,
    masked_max,
    masked_mean,
    unit_of_token,
    unit_sum,
)

STATISTICS = (
    "ratio_mean",
    "ratio_max",
    "capped_fraction",
    "dropped_fraction",
    "logprob_difference",
    "logprob_difference_max",
    "kl",
)
COUNTS = ("policy_tokens", "nonfinite_tokens")


def forward(
    logprob: Tensor,
    rollout_logprob: Tensor,
    layout: Layout,
    mask: Tensor,
    level: str,
    cap: float,
    floor: float | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(weight, keep, metrics) of checked constants; the semantics are those of the public function."""
    dtype = compute_dtype(logprob)

    new = torch.where(mask, logprob.to(dtype), 0.0)
    rollout = torch.where(mask, rollout_logprob.to(dtype), 0.0)
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
    return (
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
