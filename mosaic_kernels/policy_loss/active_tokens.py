"""The two passes over all tokens that loss weights need: counting each segment's active tokens, and spreading to them.

On the CPU by compiled kernels where they are built, as torch.library ops; elsewhere by plain PyTorch, to the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels._backend import extension
from mosaic_kernels.layout import Layout

_library = torch.library.Library("mosaic_kernels", "FRAGMENT")
_library.define("count_active(Tensor mask, Tensor cu_seqlens) -> Tensor")
_library.define("spread_active(Tensor value, Tensor mask, Tensor cu_seqlens) -> Tensor")


def count_active(layout: Layout, mask: Tensor) -> Tensor:
    """Active tokens of each segment: [S] int64, from the mask [T] bool."""
    if extension is not None and mask.device.type == "cpu":
        return torch.ops.mosaic_kernels.count_active(mask, layout.cu_seqlens)
    # Integers, so that the order of additions is no matter.
    zeros = torch.zeros(layout.num_segments, dtype=torch.int64, device=mask.device)
    return zeros.index_add(0, layout.token_segment, mask.to(torch.int64))


def spread_active(value: Tensor, layout: Layout, mask: Tensor) -> Tensor:
    """`value` [S] on the active tokens of each segment, 0 on the others: [T]. Not differentiable."""
    if extension is not None and mask.device.type == "cpu" and value.dtype == torch.float32:
        return torch.ops.mosaic_kernels.spread_active(value, mask, layout.cu_seqlens)
    return torch.where(mask, value[layout.token_segment], 0.0)


def _count_active(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    # Named, so that what an address points at lives until the kernel is done.
    mask, cu_seqlens = mask.contiguous(), cu_seqlens.contiguous()
    count = _empty_count(mask, cu_seqlens)
    extension.count_active(
        mask=mask.data_ptr(),
        cu_seqlens=cu_seqlens.data_ptr(),
        num_segments=count.numel(),
        threads=torch.get_num_threads(),
        count=count.data_ptr(),
    )
    return count


def _spread_active(value: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    value, mask, cu_seqlens = value.contiguous(), mask.contiguous(), cu_seqlens.contiguous()
    out = _empty_spread(value, mask, cu_seqlens)
    extension.spread_active(
        value=value.data_ptr(),
        mask=mask.data_ptr(),
        cu_seqlens=cu_seqlens.data_ptr(),
        num_segments=value.numel(),
        threads=torch.get_num_threads(),
        out=out.data_ptr(),
    )
    return out


def _empty_count(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return mask.new_empty(cu_seqlens.shape[0] - 1, dtype=torch.int64)


def _empty_spread(value: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return value.new_empty(mask.shape)


_library.impl("count_active", _count_active, "CPU")
_library.impl("spread_active", _spread_active, "CPU")
torch.library.register_fake("mosaic_kernels::count_active", _empty_count, lib=_library)
torch.library.register_fake("mosaic_kernels::spread_active", _empty_spread, lib=_library)
