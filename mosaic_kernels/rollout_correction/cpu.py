"""The compiled CPU kernel of `rollout_correction` as a torch.library op."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels._backend import extension
from mosaic_kernels._cpu import as_float32, refusal
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.reductions import as_options
from mosaic_kernels.rollout_correction.reference import COUNTS, STATISTICS

_library = torch.library.Library("mosaic_kernels", "FRAGMENT")
_library.define(
    "rollout_correction(Tensor logprob, Tensor rollout_logprob, Tensor mask, Tensor cu_seqlens, "
    "Tensor segment_trajectory, SymInt num_trajectories, str level, Tensor options) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def supports(logprob: Tensor) -> str:
    return refusal(logprob=logprob)


def forward(
    logprob: Tensor,
    rollout_logprob: Tensor,
    layout: Layout,
    mask: Tensor,
    level: str,
    cap: float,
    floor: float | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    weight, keep, statistics, counts = torch.ops.mosaic_kernels.rollout_correction(
        logprob,
        rollout_logprob,
        mask,
        layout.cu_seqlens,
        layout.segment_trajectory,
        layout.num_trajectories,
        level,
        as_options(cap, -1.0 if floor is None else floor),
    )
    return weight, keep, dict(zip(STATISTICS, statistics.unbind())) | dict(zip(COUNTS, counts.unbind()))


def _rollout_correction(
    logprob: Tensor,
    rollout_logprob: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    segment_trajectory: Tensor,
    num_trajectories: int,
    level: str,
    options: Tensor,
) -> tuple[Tensor, ...]:
    # Named, so that what an address points at lives until the kernel is done.
    logprob, rollout_logprob = as_float32(logprob), as_float32(rollout_logprob)
    mask, cu_seqlens, segment_trajectory = mask.contiguous(), cu_seqlens.contiguous(), segment_trajectory.contiguous()
    weight, keep, statistics, counts = outputs = _outputs(logprob)
    cap, floor = options.tolist()
    extension.rollout_correction(
        logprob=logprob.data_ptr(),
        rollout_logprob=rollout_logprob.data_ptr(),
        mask=mask.data_ptr(),
        cu_seqlens=cu_seqlens.data_ptr(),
        segment_trajectory=segment_trajectory.data_ptr(),
        num_segments=segment_trajectory.numel(),
        num_trajectories=num_trajectories,
        level=getattr(extension.Level, level),
        cap=cap,
        floor=floor,
        threads=torch.get_num_threads(),
        weight=weight.data_ptr(),
        keep=keep.data_ptr(),
        statistics=statistics.data_ptr(),
        counts=counts.data_ptr(),
    )
    return outputs


def _outputs(logprob: Tensor) -> tuple[Tensor, ...]:
    return (
        logprob.new_empty(logprob.shape, dtype=torch.float32),
        logprob.new_empty(logprob.shape, dtype=torch.bool),
        logprob.new_empty(len(STATISTICS), dtype=torch.float32),
        logprob.new_empty(len(COUNTS), dtype=torch.int64),
    )


def _fake_rollout_correction(logprob: Tensor, *_: object) -> tuple[Tensor, ...]:
    return _outputs(logprob)


_library.impl("rollout_correction", _rollout_correction, "CPU")
torch.library.register_fake("mosaic_kernels::rollout_correction", _fake_rollout_correction, lib=_library)
