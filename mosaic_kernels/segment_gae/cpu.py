"""The compiled CPU kernel of `segment_gae` as a torch.library op."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels._backend import extension
from mosaic_kernels._cpu import address, as_float32, refusal
from mosaic_kernels.layout import Layout
from mosaic_kernels.segment_gae.lam import check_values
from mosaic_kernels.segment_gae.reference import raise_orphan

_library = torch.library.Library("mosaic_kernels", "FRAGMENT")
_library.define(
    "segment_gae(Tensor reward, Tensor value, Tensor mask, Tensor cu_seqlens, Tensor segment_trajectory, Tensor lam, "
    "Tensor? lam_critic, Tensor? bootstrap_value, Tensor gamma, str correction, bool corrected_returns, "
    "SymInt num_trajectories) -> Tensor"
)


def supports(reward: Tensor, value: Tensor) -> str:
    return refusal(reward=reward, value=value)


def forward(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    layout: Layout,
    lam: Tensor,
    lam_critic: Tensor | None,
    bootstrap_value: Tensor | None,
    gamma: Tensor,
    correction: str,
    corrected_returns: bool,
) -> tuple[Tensor, Tensor]:
    both = torch.ops.mosaic_kernels.segment_gae(
        reward,
        value,
        mask,
        layout.cu_seqlens,
        layout.segment_trajectory,
        lam,
        lam_critic,
        bootstrap_value,
        gamma,
        correction,
        corrected_returns,
        layout.num_trajectories,
    )
    return both[0], both[1]


def _segment_gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    segment_trajectory: Tensor,
    lam: Tensor,
    lam_critic: Tensor | None,
    bootstrap_value: Tensor | None,
    gamma: Tensor,
    correction: str,
    corrected_returns: bool,
    num_trajectories: int,
) -> Tensor:
    check_values("lam", lam, segment_trajectory, num_trajectories, correction)
    if lam_critic is not None:
        check_values("lam_critic", lam_critic, segment_trajectory, num_trajectories, correction)
    reward, value = as_float32(reward), as_float32(value)
    # In one piece, which the C library keeps for the next call; of two, it gives the memory back after every call, and
    # taking it anew costs as much as the kernel.
    both = reward.new_empty(2, *reward.shape)
    # Named, so that what a pointer points at lives until the kernel is done.
    mask, cu_seqlens, segment_trajectory = mask.contiguous(), cu_seqlens.contiguous(), segment_trajectory.contiguous()
    lam = lam.contiguous()
    lam_critic = None if lam_critic is None else lam_critic.contiguous()
    bootstrap_value = None if bootstrap_value is None else bootstrap_value.double().contiguous()
    orphan = extension.segment_gae(
        reward=reward.data_ptr(),
        value=value.data_ptr(),
        mask=mask.data_ptr(),
        cu_seqlens=cu_seqlens.data_ptr(),
        segment_trajectory=segment_trajectory.data_ptr(),
        lam=lam.data_ptr(),
        lam_critic=address(lam_critic),
        bootstrap_value=address(bootstrap_value),
        num_segments=segment_trajectory.numel(),
        num_trajectories=num_trajectories,
        gamma=gamma.item(),
        correction=getattr(extension.Correction, correction),
        corrected_returns=corrected_returns,
        threads=torch.get_num_threads(),
        advantage=both[0].data_ptr(),
        returns=both[1].data_ptr(),
    )
    if orphan >= 0:
        raise_orphan(orphan, correction)
    return both


def _fake_segment_gae(reward: Tensor, *_: object) -> Tensor:
    return reward.new_empty(2, *reward.shape, dtype=torch.float32)


_library.impl("segment_gae", _segment_gae, "CPU")
torch.library.register_fake("mosaic_kernels::segment_gae", _fake_segment_gae, lib=_library)
