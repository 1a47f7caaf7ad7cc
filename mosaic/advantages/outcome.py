"""Algorithms that compare outcomes inside a prompt group: Mosaic and its outcome-only baselines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mosaic.advantages.registry import all_failed, over_present, register, to_policy_tokens
from mosaic.advantages.session import check_shaping_options, normalize_gain, shape_session_advantage
from mosaic.advantages.trajectory import check_session_options, group_relative_advantage, session_aware_advantage

if TYPE_CHECKING:
    from mosaic.batch import Batch


@register("mosaic")
def mosaic(
    batch: Batch,
    *,
    rho: float = 0.2,
    beta_fail: float = 0.1,
    beta_success: float = 0.2,
    success_threshold: float = 0.5,
    lambda_r: float = 0.1,
    gate: str = "clip",
    by_type: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Session-aware trajectory advantage, shaped session by session with the marginal gain.

    Args:
        batch: with gain and eligible [S]; without them only at lambda_r = 0, the ablation without shaping.
        rho, beta_fail, beta_success, success_threshold: as in session_aware_advantage.
        lambda_r, gate: as in shape_session_advantage.
        by_type: as in normalize_gain.
        ddof, eps: of both standardisations.

    Returns:
        advantage [T] float32, 0 off the mask.

    Raises:
        ValueError: an option is out of range, or the batch has no gains.

    Source: Mosaic section 3.
    """
    check_session_options(rho, beta_fail, beta_success, success_threshold)
    check_shaping_options(lambda_r, gate)
    base = batch.layout.trajectory_to_segment(
        over_present(
            batch,
            lambda reward, count, group: session_aware_advantage(
                reward,
                count,
                group,
                rho=rho,
                beta_fail=beta_fail,
                beta_success=beta_success,
                success_threshold=success_threshold,
                ddof=ddof,
                eps=eps,
            ),
        )
    )
    if lambda_r == 0:
        return to_policy_tokens(batch, base)
    if batch.gain is None or batch.eligible is None:
        raise ValueError(
            "mosaic needs batch.gain and batch.eligible, got None: score the trajectories with MarginalGainScorer, "
            "or set lambda_r=0 to train without session shaping"
        )
    group = batch.layout.trajectory_to_segment(batch.group)
    signal = normalize_gain(batch.gain, batch.session_type, group, batch.eligible, by_type=by_type, ddof=ddof, eps=eps)
    failed = all_failed(batch, success_threshold)
    return to_policy_tokens(
        batch, shape_session_advantage(base, signal, batch.eligible, failed, lambda_r=lambda_r, gate=gate)
    )


@register("grpo")
@register("broadcast")
def broadcast(batch: Batch, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """The trajectory's group-relative advantage on every policy token of all its sessions.

    On trajectories of one session this is GRPO, and is registered under that name too.

    Args:
        batch: the step's trajectories.
        ddof, eps: as in group_relative_advantage.

    Returns:
        advantage [T] float32, 0 off the mask.

    Source: Mosaic section 2.2 (broadcasting).
    """
    advantage = over_present(
        batch, lambda reward, _, group: group_relative_advantage(reward, group, ddof=ddof, eps=eps)
    )
    return to_policy_tokens(batch, batch.layout.trajectory_to_segment(advantage))


@register("supo")
def supo(batch: Batch, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """As "broadcast", but overlong trajectories, whose rewards still count in the statistics, get 0.

    An advantage of 0 gives no gradient; a token-mean loss must leave these tokens out of its mask as well, or they
    still count in the denominator.

    Args:
        batch: the step's trajectories; overlong [R] marks those that ran out of a limit.
        ddof, eps: as in group_relative_advantage.

    Returns:
        advantage [T] float32, 0 off the mask and on overlong trajectories.

    Source: SUPO, the critic-free baseline of CompactionRL (section on ablations).
    """
    kept = ~batch.layout.trajectory_to_token(batch.overlong)
    return torch.where(kept, broadcast(batch, ddof=ddof, eps=eps), 0.0)
