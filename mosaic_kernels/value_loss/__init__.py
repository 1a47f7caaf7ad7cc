"""The critic's loss over packed tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mosaic_kernels._backend import pick
from mosaic_kernels._checks import check_number, check_packed
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.gradients import with_gradients
from mosaic_kernels.policy_loss.reductions import as_options
from mosaic_kernels.value_loss import cpu, reference

__all__ = ["ValueLoss", "value_loss"]

_MODULES = {"cpu": cpu, "reference": reference}


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
    backend: str | None = None,
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
        backend: "reference", "cpu", "triton", "cuda", or None for the fastest that can serve the call.

    Returns:
        ValueLoss: the loss, differentiable in `value`; metrics, means over active tokens: clip_fraction (the clipped
        error decides), value_mean, return_mean, explained_variance (1 - var(R - v) / var(R); 0 where R does not vary);
        policy_tokens and nonfinite_tokens, int64. A non-finite input at an active token makes the loss and that token's
        gradient NaN. Maths in float32, float64 for a float64 `value`. All on the inputs' device: nothing waits for it.
        Compiled backends differentiate once, the reference as often as autograd can.

    Raises:
        ValueError, TypeError: wrong shape or dtype, clip <= 0, clip without old_value, or no backend's name.
        NotImplementedError: the backend asked for cannot serve the call.

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
    module = pick("value_loss", backend, _MODULES, value=value)
    if module is reference:
        return ValueLoss(*reference.forward(value, old_value, returns, layout, mask, token_weight, clip))
    wanted = torch.is_grad_enabled() and value.requires_grad
    with torch.no_grad():
        loss, statistics, counts, dvalue = module.forward(
            value,
            None if clip is None else old_value,
            returns,
            layout,
            mask,
            token_weight,
            as_options(0.0 if clip is None else clip),
            wanted,
        )
    metrics = dict(zip(reference.STATISTICS, statistics.unbind())) | dict(zip(reference.COUNTS, counts.unbind()))
    return ValueLoss(with_gradients(module, loss, *[(value, dvalue)] * wanted), metrics)
