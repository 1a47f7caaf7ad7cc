"""Op 2: the ragged token-level policy loss, and what it averages over."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mosaic_kernels._backend import pick
from mosaic_kernels._checks import check_packed
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss import cpu, reference
from mosaic_kernels.policy_loss.gradients import with_gradients
from mosaic_kernels.policy_loss.normalization import normalization_weights, whiten
from mosaic_kernels.policy_loss.objectives import (
    BUILT_IN,
    Cispo,
    Clip,
    EntropyBonus,
    KLPenalty,
    Objective,
    Reinforce,
    Sao,
)
from mosaic_kernels.policy_loss.reductions import as_options, check_level

__all__ = [
    "Cispo",
    "Clip",
    "EntropyBonus",
    "KLPenalty",
    "Objective",
    "PolicyLoss",
    "Reinforce",
    "Sao",
    "normalization_weights",
    "policy_loss",
    "whiten",
]

_MODULES = {"cpu": cpu, "reference": reference}


class PolicyLoss(NamedTuple):
    """Result of `policy_loss`: the 0-d loss to minimise, and detached 0-d metrics by name."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    layout: Layout,
    *,
    mask: Tensor | None = None,
    token_weight: Tensor | None = None,
    objective: Objective = Clip(),  # noqa: B008 (frozen)
    importance_weight: Tensor | None = None,
    kl: KLPenalty | None = None,
    entropy_bonus: EntropyBonus | None = None,
    backend: str | None = None,
) -> PolicyLoss:
    """The policy-gradient loss of packed tokens, with its metrics.

        loss = sum over active t of w_t (iw_t L_t + kl.coef kl_t - entropy_bonus.coef entropy_t)
        L_t from the objective and r_t = exp(clamp(logprob_t - old_logprob_t, -20, 20)); no gradient outside the clamp

    Args:
        logprob: [T] log-probs under the policy being trained, floating point.
        old_logprob: [T] log-probs under the policy before the update (for `Sao`, the rollout engine's); a constant.
        advantage: [T]; a constant.
        layout: T tokens.
        mask: [T] bool or integer, non-zero on active (policy) tokens; None: all. Nothing is read at masked positions.
        token_weight: [T] w, a constant. Default `normalization_weights(layout, mask, "trajectory")`, which is right
            only if this call holds the whole optimiser step: for micro-batches and ranks compute the weights of the
            step first and pass their slice.
        objective: `Clip`, `Cispo`, `Sao`, `Reinforce`, or another `Objective`.
        importance_weight: [T] iw, a constant, for instance `rollout_correction(...).weight`; default 1.
        kl: `KLPenalty`, or None.
        entropy_bonus: `EntropyBonus`, or None; differentiable in its entropy.
        backend: "reference", "cpu", "triton", "cuda", or None for the fastest that can serve the call.

    Returns:
        PolicyLoss: the loss, differentiable in `logprob` and in the entropy given; and metrics over active tokens (0
        if there are none): clip_fraction (tokens where the clipped, zeroed or capped branch decides L; never those
        with advantage 0), approx_kl = mean(r - 1 - log r), ratio_mean and ratio_max (before clipping; r is the
        objective's, so one value a unit for `Clip(level="segment")`), kl, entropy (0 if not given), policy_tokens and
        nonfinite_tokens (int64). All on the inputs' device: nothing here waits for it.
        Maths in float32, in float64 for a float64 `logprob`. A non-finite value of any tensor given, at an active
        position, makes the loss and that token's gradient NaN and is counted in nonfinite_tokens. Compiled backends
        serve the objectives of this library and differentiate once; the reference serves every `Objective` and
        differentiates as often as autograd can.

    Raises:
        ValueError: a tensor is not [T], lies on another device than the layout, or `backend` is no backend's name.
        TypeError: a tensor is not floating point, the mask not bool or integer, or an argument of the wrong kind.
        NotImplementedError: the backend asked for cannot serve the call.

    Source: the objectives of Mosaic (each rollout averaged over its own tokens) and of CompactionRL (kind "token").

    >>> import torch
    >>> logprob = torch.log(torch.tensor([0.75, 0.25]))
    >>> old, advantage = torch.log(torch.tensor([0.5, 0.5])), torch.tensor([1.0, 1.0])  # ratios 1.5 and 0.5
    >>> out = policy_loss(logprob, old, advantage, Layout([0, 2]))
    >>> round(out.loss.item(), 3), out.metrics["clip_fraction"].item()  # -(1.28 + 0.5) / 2
    (-0.89, 0.5)
    """
    if not isinstance(objective, Objective):
        raise TypeError(f"objective must be an instance such as Clip() or Cispo(high=0.28), got {objective!r}")
    check_level(objective.level)
    for name, term, kind in (("kl", kl, KLPenalty), ("entropy_bonus", entropy_bonus, EntropyBonus)):
        if term is not None and not isinstance(term, kind):
            raise TypeError(f"{name} must be a {kind.__name__} or None, got {type(term).__name__}")
    mask = check_packed(
        layout,
        mask,
        {"logprob": logprob, "old_logprob": old_logprob, "advantage": advantage},
        {
            "token_weight": token_weight,
            "importance_weight": importance_weight,
            "ref_logprob": None if kl is None else kl.ref_logprob,
            "entropy": None if entropy_bonus is None else entropy_bonus.entropy,
        },
    )
    module = pick("policy_loss", backend, _MODULES, objective=objective, logprob=logprob)
    if module is reference:
        return PolicyLoss(
            *reference.forward(
                logprob, old_logprob, advantage, layout, mask, token_weight, objective, importance_weight, kl,
                entropy_bonus,
            )
        )  # fmt: skip
    entropy = None if entropy_bonus is None else entropy_bonus.entropy
    if entropy is logprob:  # torch.compile refuses a Function that is given one tensor twice
        entropy = entropy.view_as(entropy)
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (logprob, entropy)]
    with torch.no_grad():
        loss, statistics, counts, *gradients = module.forward(
            logprob, old_logprob, advantage, layout, mask, token_weight, BUILT_IN[type(objective)], objective.level,
            importance_weight, None if kl is None else kl.ref_logprob, "k1" if kl is None else kl.estimator, entropy,
            _options(objective, kl, entropy_bonus), *wanted,
        )  # fmt: skip
    pairs = [(x, dx) for x, dx, needed in zip((logprob, entropy), gradients, wanted) if needed]
    metrics = dict(zip(reference.STATISTICS, statistics.unbind())) | dict(zip(reference.COUNTS, counts.unbind()))
    return PolicyLoss(with_gradients(module, loss, *pairs), metrics)


def _options(objective: Objective, kl: KLPenalty | None, entropy_bonus: EntropyBonus | None) -> Tensor:
    """low, high, dual (inf: none), kl.coef, entropy_bonus.coef as a float64 CPU tensor: compiled once for any value."""
    dual = getattr(objective, "dual", None)
    return as_options(
        getattr(objective, "low", 0.0),
        getattr(objective, "high", 0.0),
        math.inf if dual is None else dual,
        0.0 if kl is None else kl.coef,
        0.0 if entropy_bonus is None else entropy_bonus.coef,
    )
