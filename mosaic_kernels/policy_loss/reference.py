"""The policy loss in plain PyTorch: the definition, on any device, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.normalization import weights_of
from mosaic_kernels.policy_loss.objectives import EntropyBonus, KLPenalty, Objective
from mosaic_kernels.policy_loss.reductions import (
    MAX_LOG_RATIO,
    compute_dtype,
    count_by,
    masked_max,
    masked_mean,
    nonfinite_and_poison,
    ordered_sum,
    unit_of_token,
    unit_sum,
)

STATISTICS = ("clip_fraction", "approx_kl", "ratio_mean", "ratio_max", "kl", "entropy")
COUNTS = ("policy_tokens", "nonfinite_tokens")


def forward(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    layout: Layout,
    mask: Tensor,
    token_weight: Tensor | None,
    objective: Objective,
    importance_weight: Tensor | None,
    kl: KLPenalty | None,
    entropy_bonus: EntropyBonus | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of checked arguments; the semantics are those of the public function."""
    dtype = compute_dtype(logprob)
    if token_weight is None:
        token_weight = weights_of(layout, mask, "trajectory", dtype)

    def select(x: Tensor) -> Tensor:
        return torch.where(mask, x.to(dtype), 0.0)

    logprob, old_logprob = select(logprob), select(old_logprob.detach())
    advantage, weight = select(advantage.detach()), select(token_weight.detach())
    importance_weight = None if importance_weight is None else select(importance_weight.detach())
    ref_logprob = None if kl is None else select(kl.ref_logprob.detach())
    entropy = None if entropy_bonus is None else select(entropy_bonus.entropy)
    given = [logprob, old_logprob, advantage, weight, importance_weight, ref_logprob, entropy]
    nonfinite, poison = nonfinite_and_poison([x for x in given if x is not None])
    logprob = logprob * poison

    log_ratio = _log_ratio(logprob - old_logprob, layout, mask, objective.level)
    if objective.level == "token":
        ratio = log_ratio.exp()
    else:
        ratio = log_ratio.detach().exp() * (logprob - logprob.detach()).exp()

    total, limited = objective.token_loss(ratio, logprob, advantage)
    kl_term = None if kl is None else _kl(logprob - ref_logprob, kl.estimator)
    if importance_weight is not None:
        total = importance_weight * total
    if kl is not None:
        total = total + kl.coef * kl_term
    if entropy_bonus is not None:
        total = total - entropy_bonus.coef * entropy
    loss = ordered_sum(torch.where(mask, weight * total * poison, 0.0))

    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    zero = old_logprob.new_zeros(())
    return loss, {
        "clip_fraction": masked_mean(limited.to(dtype), mask),
        "approx_kl": masked_mean(log_ratio.expm1() - log_ratio, mask),
        "ratio_mean": masked_mean(ratio, mask),
        "ratio_max": masked_max(ratio, mask),
        "kl": zero if kl is None else masked_mean(kl_term.detach(), mask),
        "entropy": zero if entropy_bonus is None else masked_mean(entropy.detach(), mask),
        "policy_tokens": mask.sum(),
        "nonfinite_tokens": nonfinite.sum(),
    }


def _log_ratio(difference: Tensor, layout: Layout, mask: Tensor, level: str) -> Tensor:
    """[T] log r, clamped: each token's own, or its unit's mean over active tokens (then without a gradient)."""
    if level != "token":
        unit, size = unit_of_token(layout, level)
        mean = unit_sum(difference, layout, level) / count_by(unit, mask, size).clamp(min=1)
        difference = torch.where(mask, mean[unit].to(difference.dtype), 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _kl(k1: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return k1 * k1 / 2
    return (-k1).expm1() + k1  # exp(-k1) - 1 + k1 without the cancellation near 0
