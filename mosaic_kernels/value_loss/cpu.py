"""The compiled CPU kernel of `value_loss` as a torch.library op."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels._backend import extension
from mosaic_kernels._cpu import address, as_float32, refusal
from mosaic_kernels.layout import Layout
from mosaic_kernels.policy_loss.cpu import backward

__all__ = ["backward", "forward", "supports"]

_library = torch.library.Library("mosaic_kernels", "FRAGMENT")
_library.define(
    "value_loss(Tensor value, Tensor? old_value, Tensor returns, Tensor mask, Tensor? token_weight, Tensor cu_seqlens, "
    "Tensor segment_trajectory, SymInt num_trajectories, Tensor options, bool dvalue_wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def supports(value: Tensor) -> str:
    return refusal(value=value)


def forward(
    value: Tensor,
    old_value: Tensor | None,
    returns: Tensor,
    layout: Layout,
    mask: Tensor,
    token_weight: Tensor | None,
    options: Tensor,
    dvalue_wanted: bool,
) -> tuple[Tensor, ...]:
    """loss, statistics, counts, dvalue (empty if not wanted). `options` is the clip [1], read with `old_value` only."""
    return torch.ops.mosaic_kernels.value_loss(
        value, old_value, returns, mask, token_weight, layout.cu_seqlens, layout.segment_trajectory,
        layout.num_trajectories, options, dvalue_wanted,
    )  # fmt: skip


def _value_loss(
    value: Tensor,
    old_value: Tensor | None,
    returns: Tensor,
    mask: Tensor,
    token_weight: Tensor | None,
    cu_seqlens: Tensor,
    segment_trajectory: Tensor,
    num_trajectories: int,
    options: Tensor,
    dvalue_wanted: bool,
) -> tuple[Tensor, ...]:
    # Named, so that what an address points at lives until the kernel is done.
    value, old_value, returns, token_weight = map(as_float32, (value, old_value, returns, token_weight))
    mask, cu_seqlens, segment_trajectory = mask.contiguous(), cu_seqlens.contiguous(), segment_trajectory.contiguous()
    loss, statistics, counts, dvalue = outputs = _outputs(value, dvalue_wanted)
    extension.value_loss(
        value=value.data_ptr(),
        old_value=address(old_value),
        returns=returns.data_ptr(),
        mask=mask.data_ptr(),
        token_weight=address(token_weight),
        cu_seqlens=cu_seqlens.data_ptr(),
        segment_trajectory=segment_trajectory.data_ptr(),
        num_segments=segment_trajectory.numel(),
        num_trajectories=num_trajectories,
        clip=options.item(),
        threads=torch.get_num_threads(),
        loss=loss.data_ptr(),
        statistics=statistics.data_ptr(),
        counts=counts.data_ptr(),
        dvalue=dvalue.data_ptr() if dvalue_wanted else 0,
    )
    return outputs


def _outputs(value: Tensor, dvalue_wanted: bool) -> tuple[Tensor, ...]:
    return (
        value.new_empty((), dtype=torch.float32),
        value.new_empty(4, dtype=torch.float32),
        value.new_empty(2, dtype=torch.int64),
        value.new_empty(value.shape[0] if dvalue_wanted else 0, dtype=torch.float32),
    )


def _fake_value_loss(value: Tensor, *arguments: object) -> tuple[Tensor, ...]:
    return _outputs(value, arguments[-1])


_library.impl("value_loss", _value_loss, "CPU")
torch.library.register_fake("mosaic_kernels::value_loss", _fake_value_loss, lib=_library)
