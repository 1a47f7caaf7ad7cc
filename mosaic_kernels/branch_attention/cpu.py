"""The compiled CPU kernels of `branch_attention` as torch.library ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mosaic_kernels._backend import extension
from mosaic_kernels._cpu import ELEMENT_TYPES, refusal
from mosaic_kernels.layout import Branches, Layout

_library = torch.library.Library("mosaic_kernels", "FRAGMENT")
_CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, Tensor? parent, Tensor? prefix_length, Tensor options, "
    "SymInt window"
)
_library.define(f"branch_attention({_CALL}) -> (Tensor output, Tensor statistics)")
_library.define(
    f"branch_attention_backward({_CALL}, Tensor output, Tensor statistics, Tensor doutput) -> (Tensor, Tensor, Tensor)"
)


def supports(query: Tensor, key: Tensor, value: Tensor) -> str:
    return refusal(in_place=True, query=query, key=key, value=value)


def forward(*call: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.mosaic_kernels.branch_attention(*call)


def backward(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.mosaic_kernels.branch_attention_backward(*call)


def _branch_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call, _alive = _inputs(query, key, value, *rest)
    output, statistics = _outputs(query)
    extension.branch_attention_forward(call, output=output.data_ptr(), statistics=statistics.data_ptr())
    return output, statistics


def _branch_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    parent: Tensor | None,
    prefix_length: Tensor | None,
    options: Tensor,
    window: int,
    output: Tensor,
    statistics: Tensor,
    doutput: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    call, _alive = _inputs(query, key, value, cu_seqlens, parent, prefix_length, options, window)
    output, doutput, statistics = _readable(output), _readable(doutput), statistics.contiguous()
    # Several blocks of keys add to a row of dquery: in float32, rounded when all have.
    dquery = query.new_empty(query.shape, dtype=torch.float32)
    dkey, dvalue = key.new_empty(key.shape), value.new_empty(value.shape)
    extension.branch_attention_backward(
        call,
        output=_pointer(output),
        doutput=_pointer(doutput),
        statistics=statistics.data_ptr(),
        dquery=dquery.data_ptr(),
        dkey=dkey.data_ptr(),
        dvalue=dvalue.data_ptr(),
    )
    return dquery.to(query.dtype), dkey, dvalue


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    parent: Tensor | None,
    prefix_length: Tensor | None,
    options: Tensor,
    window: int,
) -> tuple[Any, Any]:
    """The kernels' arguments, checked, and the tensors that must live as long as their addresses are used."""
    query, key, value = _readable(query), _readable(key), _readable(value)
    cu_seqlens = cu_seqlens.contiguous()
    if parent is not None and prefix_length is not None:
        parent, prefix_length = parent.contiguous(), prefix_length.contiguous()
    scale, softcap = options.tolist()
    call = extension.AttentionInputs(
        query=_pointer(query),
        key=_pointer(key),
        value=_pointer(value),
        type=getattr(extension.ElementType, ELEMENT_TYPES[query.dtype]),
        cu_seqlens=cu_seqlens.data_ptr(),
        parent=0 if parent is None else parent.data_ptr(),
        prefix_length=0 if prefix_length is None else prefix_length.data_ptr(),
        num_segments=cu_seqlens.numel() - 1,
        query_heads=query.shape[1],
        key_heads=key.shape[1],
        head_size=query.shape[2],
        scale=scale,
        softcap=softcap,
        window=min(window, 2**31 - 1),
        threads=torch.get_num_threads(),
    )
    if parent is not None and parent.numel() != cu_seqlens.numel() - 1 or not call.fits(query.shape[0]):
        layout = Layout(cu_seqlens)
        if parent is not None and prefix_length is not None:
            Branches(parent, prefix_length).check(layout)
        raise ValueError(f"layout must have as many tokens as query, {query.shape[0]}, got {layout.num_tokens}")
    return call, (query, key, value, cu_seqlens, parent, prefix_length)


def _readable(x: Tensor) -> Tensor:
    """`x` itself if the elements of each head are adjacent, else a contiguous copy."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _pointer(x: Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.stride(0), x.stride(1)


def _outputs(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty((*query.shape[:2], 2), dtype=torch.float32)


def _fake_branch_attention_backward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


for _name, _kernel, _fake in (
    ("branch_attention", _branch_attention, _outputs),
    ("branch_attention_backward", _branch_attention_backward, _fake_branch_attention_backward),
):
    _library.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"mosaic_kernels::{_name}", _fake, lib=_library)
