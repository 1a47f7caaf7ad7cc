"""The critic's loss in plain PyTorch: the definition, on any device, differentiated by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.normalization import weights_of
from mosaic_kernels.policy_loss.reductions import compute_dtype, masked_mean, nonfinite_and_poison, ordered_sum

STATISTICS = ("clip_fraction", "value_mean", "return_mean", "explained_variance")
COUNTS = ("policy_tokens", "nonfinite_tokens")


def forward(
    value: Tensor,
    old_value: Tensor | None,
    returns: Tensor,
    layout: Layout,
    mask: Tensor,
    token_weight: Tensor | None,
    clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of checked arguments; the semantics are those of the public function."""
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
    # compared with each other: the mean of equal returns is rounded, and the residue in the denominator is not 0
    largest, smallest = (
        F.pad(torch.where(mask, x, -torch.inf), (0, 1), value=-torch.inf).amax() for x in (returns, -returns)
    )
    constant = (largest == -smallest) | (spread == 0)
    residual = masked_mean((returns - value - residual_mean).square(), mask)
    return loss, {
        "clip_fraction": masked_mean(limited.to(dtype), mask),
        "value_mean": masked_mean(value, mask),
        "return_mean": return_mean,
        "explained_variance": torch.where(constant, 0.0, 1 - residual / spread),
        "policy_tokens": mask.sum(),
        "nonfinite_tokens": nonfinite.sum(),
    }
