"""Op 3: generalised advantage estimation over segments that continue one another."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mosaic_kernels._backend import pick
from mosaic_kernels._checks import check_number, check_packed, check_tensor
from mosaic_kernels.layout import Layout
from mosaic_kernels.segment_gae import cpu, reference
from mosaic_kernels.segment_gae.lam import adaptive_lambda, as_constant, per_segment

__all__ = ["GAEOutput", "adaptive_lambda", "segment_gae", "terminal_reward"]

CORRECTIONS = ("none", "position", "chain")
_MODULES = {"cpu": cpu, "reference": reference}


class GAEOutput(NamedTuple):
    """Result of `segment_gae`: two [T] tensors, constants for autograd, 0 on masked tokens."""

    advantage: Tensor
    returns: Tensor


def segment_gae(
    reward: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    mask: Tensor | None = None,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    correction: Literal["none", "position", "chain"] = "position",
    bootstrap_value: Tensor | None = None,
    lam_critic: float | Tensor | None = None,
    returns_from: Literal["local", "corrected"] = "local",
    backend: str | None = None,
) -> GAEOutput:
    """Advantages and value targets of packed tokens whose trajectories are cut into segments.

        delta_t = reward_t + gamma V_{t+1} - V_t        A_loc_t = delta_t + gamma lam A_loc_{t+1}
        "none":      A = A_loc, the recursion inside each segment; after its last token V = bootstrap_value, A_loc = 0
        "position":  A = (gamma lam[s])^(active tokens after segment s in its trajectory) * A_loc
        "chain":     A = A_loc, one recursion through the trajectory's segments in time order
        returns = A_loc + V, with lam_critic in place of lam if given; from A instead of A_loc for "corrected"

    t+1 is the next active token: masked tokens are no transitions, and nothing but their reward is read.

    Args:
        reward: [T] used as given. A reward on a masked token counts at the last active token before it in the segment
            (the first one if there is none before). In a segment without active tokens, "chain" moves it to the
            preceding active segment of the trajectory (else the following one; it is lost if there is none at all).
        value: [T] V, the critic's; not read at masked tokens.
        layout: T tokens in S segments of R trajectories.
        mask: [T] bool or integer, non-zero on active (policy) tokens; None: all.
        gamma: discount in [0, 1].
        lam: trace parameter in [0, 1]; float or [S]. For "chain" equal within each trajectory.
        correction: how the segments of one trajectory are tied together.
        bootstrap_value: [S] V after the last active token of each segment; None: 0. "chain" reads that of the
            trajectory's last active segment only.
        lam_critic: trace parameter of the returns, as `lam`; None: the same.
        returns_from: "local" or "corrected"; they differ for "position" only.
        backend: "reference", "cpu", "triton", "cuda", or None for the fastest that can serve the call.

    Returns:
        GAEOutput(advantage [T], returns [T]), 0 on masked tokens. float32, on the reference float64 for float64
        inputs; summed in float64 either way. Not differentiable: both are constants to autograd.

    Raises:
        ValueError: a tensor has the wrong shape or device; gamma or lam outside [0, 1]; lam unequal within a trajectory
            for "chain"; a reward in a segment without active tokens for "none" and "position"; an unknown option.
            On a GPU and while compiling the reference, values are not inspected: an invalid lam tensor gives NaN, and
            such a reward is left out.
        TypeError: a tensor is not floating point, or the mask neither bool nor integer.
        NotImplementedError: the backend asked for cannot serve the call.

    Source: CompactionRL (local GAE and its trajectory-position correction); "chain" is the full-trajectory GAE that it
    approximates.

    >>> layout = Layout([0, 2, 3], segment_trajectory=[0, 0])
    >>> reward = terminal_reward(torch.tensor([1.0]), layout, None, "position")
    >>> segment_gae(reward, torch.zeros(3), layout, lam=0.5).advantage.tolist()
    [0.25, 0.5, 1.0]
    """
    mask = check_packed(layout, mask, {"reward": reward, "value": value})
    check_number("gamma", gamma, "in [0, 1]", lambda x: 0 <= x <= 1)
    _check_option("correction", correction, CORRECTIONS)
    _check_option("returns_from", returns_from, ("local", "corrected"))
    if bootstrap_value is not None:
        check_tensor("bootstrap_value", bootstrap_value, (layout.num_segments,), "[S]")
        bootstrap_value = bootstrap_value.detach().to(layout.device)
    module = pick("segment_gae", backend, _MODULES, reward=reward, value=value)
    advantage, returns = module.forward(
        reward.detach(),
        value.detach(),
        mask,
        layout,
        per_segment("lam", lam, layout),
        None if lam_critic is None else per_segment("lam_critic", lam_critic, layout),
        bootstrap_value,
        as_constant(gamma, (), layout.device),
        correction,
        returns_from == "corrected",
    )
    return GAEOutput(advantage, returns)


def terminal_reward(
    reward: Tensor, layout: Layout, mask: Tensor | None, correction: Literal["none", "position", "chain"]
) -> Tensor:
    """Each trajectory's outcome, placed where `segment_gae` expects it.

    Args:
        reward: [R] one outcome for each trajectory.
        layout: T tokens in S segments of R trajectories.
        mask: [T] bool or integer, non-zero on active tokens; None: all.
        correction: as given to `segment_gae`: "none" and "position" put the reward on the last active token of every
            segment, "chain" on the last active token of the trajectory.

    Returns:
        [T] zeros but for those tokens; float64 for a float64 reward, else float32. A segment (for "chain", a
        trajectory) without active tokens gets none.

    Raises:
        ValueError: `reward` is not [R], the mask not [T], or `correction` is unknown.
        TypeError: `reward` is not floating point, or the mask neither bool nor integer.

    Source: CompactionRL (one shared terminal reward at the end of every segment).

    >>> layout = Layout([0, 2, 3], segment_trajectory=[0, 0])
    >>> terminal_reward(torch.tensor([2.0]), layout, None, "position").tolist()
    [0.0, 2.0, 2.0]
    >>> terminal_reward(torch.tensor([2.0]), layout, None, "chain").tolist()
    [0.0, 0.0, 2.0]
    """
    mask = check_packed(layout, mask, {})
    check_tensor("reward", reward, (layout.num_trajectories,), "[R]")
    _check_option("correction", correction, CORRECTIONS)
    chain = correction == "chain"
    unit = layout.token_trajectory if chain else layout.token_segment
    position = torch.arange(layout.num_tokens, device=layout.device)
    last = position.new_full((layout.num_trajectories if chain else layout.num_segments,), -1)
    last = last.scatter_reduce(0, unit, torch.where(mask, position, -1), "amax")[unit]
    reward = reward.to(layout.device, torch.float64 if reward.dtype == torch.float64 else torch.float32)
    return torch.where(position == last, layout.trajectory_to_token(reward), 0)


def _check_option(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
