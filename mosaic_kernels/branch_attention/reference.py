"""Prefix-branch attention in plain PyTorch: the definition.

One block of query rows after another, against exactly the keys that its segment can see. A single mask over all pairs
of tokens would say the same in fewer lines, but its scores grow with the square of the packed length, and a NaN that it
weighs with 0 is still a NaN. How many blocks there are depends on the layout's values, which a compiler may not look
at: while compiling, the same loop runs inside an opaque op, so that values, memory and messages stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mosaic_kernels.layout import Branches, Layout

# Query rows of one block: without gradients, scores take this times the segment's length, a head, and no more.
_ROWS = 512


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    branches: Branches | None,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    parent = None if branches is None else branches.parent
    prefix_length = None if branches is None else branches.prefix_length
    attend = _opaque if torch.compiler.is_compiling() else _attend
    return attend(query, key, value, layout.cu_seqlens, parent, prefix_length, scale, softcap, window)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    parent: Tensor | None,
    prefix_length: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype, value.dtype) else torch.float32
    # Autocast would take the products, and with them the scores, down to its low precision.
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
        outputs = []
        for rows, inherited, own, first in _blocks(cu_seqlens, parent, prefix_length):
            seen_k, seen_v = (torch.cat([x[inherited], x[own]]) for x in (k, v))
            outputs.append(_softmax_attention(q[rows], seen_k, seen_v, first, scale, softcap, window))
        return torch.cat(outputs).to(query.dtype)


def _blocks(
    cu_seqlens: Tensor, parent: Tensor | None, prefix_length: Tensor | None
) -> Iterator[tuple[slice, slice, slice, int]]:
    """Blocks of rows in order: the rows, the keys inherited, the segment's own keys, the position of the first row."""
    offsets = cu_seqlens.tolist()
    segments = len(offsets) - 1
    parents = [-1] * segments if parent is None else parent.tolist()
    prefixes = [0] * segments if prefix_length is None else prefix_length.tolist()
    if offsets[-1] == 0:
        # One empty block keeps the result of nothing connected to its inputs.
        yield slice(0, 0), slice(0, 0), slice(0, 0), 0
    for begin, end, origin, prefix in zip(offsets, offsets[1:], parents, prefixes):
        root = offsets[origin] if prefix else 0
        for start in range(begin, end, _ROWS):
            stop = min(start + _ROWS, end)
            yield slice(start, stop), slice(root, root + prefix), slice(begin, stop), prefix + start - begin


def _softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, first: int, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """Attention of rows at positions first, first + 1, ... to keys at positions 0, 1, ...: [rows, Hq, D]."""
    rows, heads, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    score = torch.einsum("thrd,uhd->hrtu", grouped, key) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    position = first + torch.arange(rows, device=query.device)[:, None]
    seen = torch.arange(key.shape[0], device=query.device)
    visible = seen <= position
    if window is not None:
        visible = visible & (seen > position - window)
    weight = torch.where(visible, score, -torch.inf).softmax(dim=-1)
    return torch.einsum("hrtu,uhd->thrd", weight, value).reshape(query.shape)


@torch.library.custom_op("mosaic_kernels::branch_attention_reference", mutates_args=())
def _opaque(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    parent: Tensor | None,
    prefix_length: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    layout = Layout(cu_seqlens)
    if layout.num_tokens != query.shape[0]:
        raise ValueError(f"query must have a row for each of the layout's {layout.num_tokens} tokens, got {len(query)}")
    if parent is not None and prefix_length is not None:
        Branches(parent, prefix_length).check(layout)
    return _attend(query, key, value, cu_seqlens, parent, prefix_length, scale, softcap, window)


@torch.library.custom_op("mosaic_kernels::branch_attention_reference_backward", mutates_args=())
def _opaque_backward(
    doutput: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    parent: Tensor | None,
    prefix_length: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = {"cu_seqlens": cu_seqlens, "parent": parent, "prefix_length": prefix_length}
    run = partial(_attend, **layout, scale=scale, softcap=softcap, window=window)
    # Inside an op autograd does not record; torch.func differentiates there nevertheless.
    return torch.func.vjp(run, query, key, value)[1](doutput)


@_opaque.register_fake
def _(query, key, value, *rest):
    return query.new_empty(query.shape)


@_opaque_backward.register_fake
def _(doutput, query, key, value, *rest):
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _keep(ctx, inputs, output):
    *tensors, ctx.scale, ctx.softcap, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, doutput):
    grads = _opaque_backward(doutput, *ctx.saved_tensors, ctx.scale, ctx.softcap, ctx.window)
    return (*grads, *[None] * 6)


_opaque.register_autograd(_differentiate, setup_context=_keep)
