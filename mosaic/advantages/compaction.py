"""Algorithms for compacted trajectories that discount by position: CompactionRL, its critic-free twin, and SAO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mosaic.advantages.arguments import check_choice, check_range
from mosaic.advantages.registry import over_present, register, to_policy_tokens
from mosaic.advantages.trajectory import group_relative_advantage
from mosaic.trajectory import SessionType
from mosaic_kernels import adaptive_lambda, segment_gae, terminal_reward
from mosaic_kernels import whiten as whitened

if TYPE_CHECKING:
    from mosaic.batch import Batch


@register("compaction_ppo")
def compaction_ppo(
    batch: Batch,
    *,
    gamma: float = 1.0,
    lam: float | None = None,
    alpha: float = 1.5,
    scope: str = "trajectory",
    correction: str = "position",
    whiten: bool = False,
) -> Tensor:
    """Generalised advantage estimation over the sessions of a compacted trajectory, with the outcome at their ends.

        "position":  A = (gamma lam)^(policy tokens in later sessions) * A_loc, the outcome at the end of every session
        "chain":     one recursion through all sessions, the outcome once, at the very end
        "none":      A_loc, each session by itself

    Args:
        batch: with value [T] from a critic.
        gamma: discount a token, in [0, 1].
        lam: trace parameter in [0, 1]; None adapts it to the length l in policy tokens, 1 - 1/(alpha l).
        alpha: of the adaptive lam, > 0.
        scope: l counts the whole "trajectory", or the "segment" (with correction "none" only).
        correction: "position", "chain" or "none".
        whiten: standardise the result over all policy tokens of the batch.

    Returns:
        advantage [T] float32, 0 off the mask.

    Raises:
        ValueError: an option is out of range; there is no critic; a trajectory has subagent sessions, which stand in no
            linear order, and the correction is not "none".

    Source: CompactionRL (trajectory-position correction); "chain" is the exact recursion that the paper approximates.
    """
    check_range("gamma", gamma, 0, 1)
    _check_lambda(lam, alpha)
    check_choice("scope", scope, ("trajectory", "segment"))
    check_choice("correction", correction, ("position", "chain", "none"))
    if scope == "segment" and correction != "none":
        raise ValueError(
            f'scope "segment" with correction {correction!r} is refused: a lam fitted to a short session makes the '
            'discount of all later tokens vanish; use scope "trajectory", or correction "none"'
        )
    if correction != "none":
        _check_linear(batch, f"compaction_ppo with correction {correction!r}")
    return _estimate(batch, "compaction_ppo", gamma, lam, alpha, scope, correction, whiten)


@register("sao")
def sao(
    batch: Batch,
    *,
    gamma: float = 1.0,
    lam: float | None = None,
    alpha: float = 1.5,
    scope: str = "trajectory",
    whiten: bool = False,
) -> Tensor:
    """Generalised advantage estimation inside each session, with the outcome at its end: one rollout a prompt suffices.

    To be used with the objective `Sao`, whose ratio is taken against the rollout policy.

    Args:
        batch: with value [T] from a critic.
        gamma, lam, alpha, scope, whiten: as in compaction_ppo.

    Returns:
        advantage [T] float32, 0 off the mask.

    Raises:
        ValueError: an option is out of range, or there is no critic.

    Source: SAO, as CompactionRL adopts it.
    """
    check_range("gamma", gamma, 0, 1)
    _check_lambda(lam, alpha)
    check_choice("scope", scope, ("trajectory", "segment"))
    return _estimate(batch, "sao", gamma, lam, alpha, scope, "none", whiten)


@register("compaction_grpo")
def compaction_grpo(
    batch: Batch,
    *,
    gamma: float = 1.0,
    lam: float | None = None,
    alpha: float = 1.5,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """The group-relative advantage, discounted by how many policy tokens later sessions hold; needs no critic.

        A_{i,s} = A_i (gamma lam)^(policy tokens in later sessions)

    Args:
        batch: the step's trajectories.
        gamma: discount a token, in [0, 1].
        lam: in [0, 1]; None adapts it to the trajectory's length l in policy tokens, 1 - 1/(alpha l).
        alpha: of the adaptive lam, > 0.
        ddof, eps: as in group_relative_advantage.

    Returns:
        advantage [T] float32, 0 off the mask.

    Raises:
        ValueError: an option is out of range, or a trajectory has subagent sessions, which stand in no linear order.

    Source: CompactionRL's position correction on a critic-free advantage.
    """
    check_range("gamma", gamma, 0, 1)
    _check_lambda(lam, alpha)
    _check_linear(batch, "compaction_grpo")
    advantage = over_present(
        batch, lambda reward, _, group: group_relative_advantage(reward, group, ddof=ddof, eps=eps)
    )
    base = batch.layout.trajectory_to_segment(advantage).double()
    later = _later_policy_tokens(batch).to(base.device)
    trace = torch.as_tensor(_lambda(batch, lam, alpha, "trajectory"), dtype=torch.float64, device=base.device)
    return to_policy_tokens(batch, base * (gamma * trace) ** later)


def _estimate(
    batch: Batch, name: str, gamma: float, lam: float | None, alpha: float, scope: str, correction: str, whiten: bool
) -> Tensor:
    if batch.value is None:
        raise ValueError(
            f"{name} needs batch.value, the critic's values [T], got None: run a critic over the batch first, or "
            'choose an algorithm without one, such as "compaction_grpo"'
        )
    reward = terminal_reward(batch.reward, batch.layout, batch.mask, correction)
    advantage = segment_gae(
        reward.float(),
        batch.value.detach().float(),
        batch.layout,
        mask=batch.mask,
        gamma=gamma,
        lam=_lambda(batch, lam, alpha, scope),
        correction=correction,
    ).advantage
    return whitened(advantage, batch.mask) if whiten else advantage


def _lambda(batch: Batch, lam: float | None, alpha: float, scope: str) -> float | Tensor:
    return adaptive_lambda(batch.layout, batch.mask, alpha=alpha, scope=scope) if lam is None else lam


def _check_lambda(lam: float | None, alpha: float) -> None:
    if lam is not None:
        check_range("lam", lam, 0, 1)
    check_range("alpha", alpha, 0)
    if alpha == 0:
        raise ValueError("alpha must be > 0, got 0")


def _check_linear(batch: Batch, name: str) -> None:
    subagent = batch.session_type == SessionType.SUBAGENT
    if subagent.any():
        raise ValueError(
            f"{name} needs sessions in a linear order, but session {int(subagent.nonzero()[0])} is a subagent: use it "
            'on compaction rollouts, or choose an algorithm that takes forks, such as "mosaic"'
        )


def _later_policy_tokens(batch: Batch) -> Tensor:
    """[S] policy tokens in the later sessions of the same trajectory, int64 on the CPU."""
    layout = batch.layout.to("cpu")
    own = torch.bincount(layout.token_segment[batch.mask.cpu()], minlength=layout.num_segments).tolist()
    seen: dict[int, int] = {}
    backwards = []
    for tokens, trajectory in zip(reversed(own), reversed(layout.segment_trajectory.tolist())):
        backwards.append(seen.get(trajectory, 0))
        seen[trajectory] = backwards[-1] + tokens
    return torch.tensor(backwards[::-1], dtype=torch.int64)
