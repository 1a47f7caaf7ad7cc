"""Objectives (what one token contributes) and the terms beside them: frozen dataclasses with their own options."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from mosaic_kernels._checks import check_number, check_tensor
from mosaic_kernels.policy_loss.reductions import at_most, check_level


class Objective(ABC):
    """What one token contributes to the policy loss. To add one: subclass, as a frozen dataclass.

    `level` says over which unit the ratio is taken: "token", or one ratio for a whole "segment" or "trajectory".
    """

    level: str = "token"

    @abstractmethod
    def token_loss(self, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The definition, in plain PyTorch.

        Args:
            ratio: [T] exp(logprob - old_logprob), guarded against overflow; differentiable.
            logprob, advantage: [T]; the advantage is a constant.

        Returns:
            (L, limited): L [T] to minimise, and a bool [T] that is True where a bound of the objective, not the plain
            ratio, decides L. An advantage of 0 leaves nothing to decide.
        """


@dataclass(frozen=True)
class Clip(Objective):
    """The clipped surrogate of PPO: separate bounds, optional dual clip, a ratio per token, segment or trajectory.

        L = max(-r A, -clamp(r, 1 - low, 1 + high) A);    dual = c and A < 0:  L = min(L, -c A)

    | A | ratio | L | gradient in r |
    | --- | --- | --- | --- |
    | > 0 | r > 1 + high | -(1 + high) A | 0, limited |
    | > 0 | otherwise, however small | -r A | -A |
    | < 0 | r < 1 - low | -(1 - low) A | 0, limited |
    | < 0 | r > dual | -dual A | 0, limited |
    | < 0 | otherwise | -r A | -A |
    | = 0 | any | 0 | 0 |

    Args:
        low: how far the ratio may fall, in [0, 1]; 1 switches the lower bound off.
        high: how far it may rise, >= 0; inf switches the upper bound off.
        dual: None, or c > 1.
        level: "token"; or "segment" or "trajectory" (GSPO-token), where every token of a unit bears the ratio
            s = exp(clamp(mean over the unit's active tokens of logprob - old_logprob, -20, 20)) and the gradient of its
            own log-prob: r_t = sg(s) exp(logprob_t - sg(logprob_t)). All tokens of a unit must lie in one call.

    Raises:
        ValueError, TypeError: an option is out of range or no number.

    Source: PPO (1707.06347) Eq. 7; dual clip (1912.09729); separate bounds, DAPO (2503.14476) Eq. 10; GSPO-token
    (2507.18071) Eq. 13-14; the policy loss of Mosaic and CompactionRL.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    level: str = "token"

    def __post_init__(self):
        check_number("low", self.low, "in [0, 1]", lambda x: 0 <= x <= 1)
        check_number("high", self.high, ">= 0", lambda x: x >= 0)
        if self.dual is not None:
            check_number("dual", self.dual, "> 1 or None", lambda x: x > 1)
        check_level(self.level)

    def token_loss(self, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        least, most = 1 - self.low, 1 + self.high
        above, below = (advantage > 0) & (ratio > most), (advantage < 0) & (ratio < least)
        limited = above | below
        loss = torch.where(above, -most * advantage, torch.where(below, -least * advantage, -ratio * advantage))
        if self.dual is not None:
            capped = (advantage < 0) & (ratio > self.dual)
            loss = torch.where(capped, -self.dual * advantage, loss)
            limited = limited | capped
        return loss, limited


@dataclass(frozen=True)
class Cispo(Objective):
    """Weighted REINFORCE whose importance ratio is capped but never stops the gradient.

        L = -sg(min(r, 1 + high)) A logprob

    Args:
        high: how far the weight may exceed 1, >= 0.

    Raises:
        ValueError, TypeError: `high` is negative, NaN or no number.

    Source: CISPO, MiniMax-M1 (2506.13585) Eq. 4-5 with the upper bound alone.
    """

    high: float = 0.28

    def __post_init__(self):
        check_number("high", self.high, ">= 0", lambda x: x >= 0)

    def token_loss(self, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        weight = at_most(ratio.detach(), 1 + self.high)
        return -weight * advantage * logprob, (advantage != 0) & (ratio > 1 + self.high)


@dataclass(frozen=True)
class Sao(Objective):
    """Weighted REINFORCE that drops tokens whose ratio left an open interval: zeroed, not clamped.

        L = -sg(r) A logprob   where 1 - low < r < 1 + high,   else 0

    For SAO itself `old_logprob` is the rollout engine's log-prob.

    Args:
        low: in (0, 1]; 1 switches the lower bound off.
        high: > 0.

    Raises:
        ValueError, TypeError: an option is out of range or no number. 0 would drop on-policy tokens (r = 1) too.
    """

    low: float = 0.8
    high: float = 3.0

    def __post_init__(self):
        check_number("low", self.low, "in (0, 1]", lambda x: 0 < x <= 1)
        check_number("high", self.high, "> 0", lambda x: x > 0)

    def token_loss(self, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        inside = (ratio > 1 - self.low) & (ratio < 1 + self.high)
        loss = torch.where(inside, -ratio.detach() * advantage * logprob, 0.0)
        return loss, (advantage != 0) & ~inside


@dataclass(frozen=True)
class Reinforce(Objective):
    """The plain policy gradient: L = -A logprob. The ratio enters the metrics only."""

    def token_loss(self, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        return -advantage * logprob, torch.zeros_like(advantage, dtype=torch.bool)


# What compiled backends know; by exact type, for a subclass may say something else.
BUILT_IN = {Clip: "clip", Cispo: "cispo", Sao: "sao", Reinforce: "reinforce"}

ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, eq=False)
class KLPenalty:
    """coef * KL(policy || reference), estimated on the sampled tokens and differentiated as written.

        k1 = logprob - ref;    k2 = k1**2 / 2;    k3 = exp(-k1) + k1 - 1

    k3's exponential is not clamped: a bound would turn its pull towards the reference around. Where it overflows
    (k1 < -88 in float32) the loss is infinite and the step should be skipped.

    Args:
        ref_logprob: [T] log-probs of the reference policy, a constant.
        coef: weight of the term.
        estimator: "k1", "k2" or "k3". As a loss, k1 has no gradient in expectation; k2 has the KL's.

    Raises:
        ValueError, TypeError: `coef` is not finite or no number, `estimator` unknown, `ref_logprob` no [T] tensor.

    Source: Schulman, "Approximating KL divergence" (2020).
    """

    ref_logprob: Tensor
    coef: float
    estimator: str

    def __post_init__(self):
        check_tensor("ref_logprob", self.ref_logprob, (None,), "[T]")
        check_number("coef", self.coef, "finite", lambda x: -math.inf < x < math.inf)
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {self.estimator!r}")


@dataclass(frozen=True, eq=False)
class EntropyBonus:
    """coef * entropy, subtracted from the loss: a positive coef rewards a spread-out policy.

    Args:
        entropy: [T] entropy of each token's distribution in nats; the loss is differentiable in it.
        coef: weight of the term.

    Raises:
        ValueError, TypeError: `coef` is not finite or no number, `entropy` no [T] tensor.
    """

    entropy: Tensor
    coef: float

    def __post_init__(self):
        check_tensor("entropy", self.entropy, (None,), "[T]")
        check_number("coef", self.coef, "finite", lambda x: -math.inf < x < math.inf)
