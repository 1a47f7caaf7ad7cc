"""Trajectory-level advantages: group-relative outcome, and Mosaic's calibration of it by session count."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.advantages.arguments import as_flags, as_labels, as_reals, check_choice, check_range, like_input
from mosaic.advantages.grouped import centred_rank, compact, extremes, standard_score


def group_relative_advantage(reward: Tensor, group: Tensor, *, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """How much better than its prompt group each trajectory did.

        A_i = (R_i - mean_g R) / (std_g R + eps)

    Args:
        reward: [R] outcome rewards, any real dtype.
        group: [R] integer ids of the prompt groups, gaps allowed.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: added to the standard deviation.

    Returns:
        [R], float64 for float64 rewards, else float32; detached. A group of one, or of equal rewards, gives exactly 0.

    Raises:
        ValueError: lengths differ, a reward is not finite, an id is negative, an option is out of range.
        TypeError: `group` does not hold integers.

    Source: GRPO, as used by Mosaic (section 3.1).

    >>> group_relative_advantage(torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 7]))
    tensor([ 1.1547, -0.5773, -0.5773,  0.0000])
    """
    _check_scaling(ddof, eps)
    x = as_reals("reward", reward, None, "R")
    return like_input(standard_score(x, as_labels("group", group, x.numel(), "R"), ddof, eps), reward)


def session_rank_signal(session_count: Tensor, success: Tensor, group: Tensor) -> Tensor:
    """Where a trajectory's session count stands among those of its group with the same outcome.

        u_i = (2 avgrank(N_i) - n - 1) / (n - 1) = 1/(n-1) sum_j sign(N_i - N_j)

    over the n successes, or the n failures, of one prompt group; ties share their average rank.

    Args:
        session_count: [R] sessions of each trajectory.
        success: [R] bool.
        group: [R] integer ids of the prompt groups, gaps allowed.

    Returns:
        [R] in [-1, 1], rising with the count; exactly 0 in a subgroup of one or of equal counts. float64 for float64
        counts, else float32; detached.

    Raises:
        ValueError, TypeError: an argument has the wrong length or kind.

    Source: Mosaic section 3.1 and appendix A.1.

    >>> signal = session_rank_signal(torch.tensor([1, 3, 3, 5]), torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0, 0, 0]))
    >>> signal.tolist()
    [-1.0, 0.5, 0.5, 0.0]
    """
    count = as_reals("session_count", session_count, None, "R")
    signal = _rank_signal(
        count, as_flags("success", success, count.numel(), "R"), as_labels("group", group, count.numel(), "R")
    )
    return like_input(signal, session_count)


def session_aware_advantage(
    reward: Tensor,
    session_count: Tensor,
    group: Tensor,
    *,
    rho: float = 0.2,
    beta_fail: float = 0.1,
    beta_success: float = 0.2,
    success_threshold: float = 0.5,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """The group-relative advantage, calibrated by how many sessions a trajectory used.

        rewards of the group differ:   A_i * (1 - rho u_i)      A: group_relative_advantage, u: session_rank_signal
        equal, and all succeed:        -beta_success u_i
        equal, and all fail:           beta_fail min(u_i, 0)

    With binary rewards: among successes fewer sessions are better, among failures more sessions are (weakly where all
    fail); every success of a mixed group stands above every failure, with the sign of A kept, and the group sums to 0;
    a group that failed throughout is never rewarded. Other rewards are allowed, without these promises.

    Args:
        reward: [R] outcome rewards.
        session_count: [R] sessions of each trajectory, compactions and subagents included.
        group: [R] integer ids of the prompt groups, gaps allowed.
        rho: strength where rewards differ, in [0, 1).
        beta_fail, beta_success: strength where all fail, or all succeed; >= 0.
        success_threshold: a reward of at least this is a success.
        ddof, eps: as in group_relative_advantage.

    Returns:
        [R], float64 for float64 rewards, else float32; detached.

    Raises:
        ValueError, TypeError: an argument has the wrong length, kind or range.

    Source: Mosaic Eq. 14.

    >>> reward, count = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1, 3, 1, 3])
    >>> group = torch.tensor([0, 0, 0, 0])
    >>> session_aware_advantage(reward, count, group)
    tensor([ 1.0392,  0.6928, -1.0392, -0.6928])
    """
    check_session_options(rho, beta_fail, beta_success, success_threshold)
    _check_scaling(ddof, eps)
    x = as_reals("reward", reward, None, "R")
    count = as_reals("session_count", session_count, x.numel(), "R")
    group = as_labels("group", group, x.numel(), "R")
    success = x >= success_threshold
    signal = _rank_signal(count, success, group)
    cell, cells = compact(group)
    low, high = extremes(x, cell, cells)
    modulated = standard_score(x, group, ddof, eps) * (1 - rho * signal)
    homogeneous = torch.where(success, -beta_success * signal, beta_fail * signal.clamp(max=0))
    return like_input(torch.where((high > low)[cell], modulated, homogeneous), reward)


def check_session_options(rho: float, beta_fail: float, beta_success: float, success_threshold: float) -> None:
    """Raises ValueError unless Eq. 14 keeps its promises with these options."""
    # At rho = 1 the longest success and the shortest failure would both fall to 0 and no longer be told apart.
    check_range("rho", rho, 0, 1, below=True)
    check_range("beta_fail", beta_fail, 0)
    check_range("beta_success", beta_success, 0)
    check_range("success_threshold", success_threshold)


def _check_scaling(ddof: int, eps: float) -> None:
    check_choice("ddof", ddof, (0, 1))
    check_range("eps", eps, 0)


def _rank_signal(count: Tensor, success: Tensor, group: Tensor) -> Tensor:
    return centred_rank(count, 2 * compact(group)[0] + success)
