"""Host side of the general backward pass: chunk after chunk of dlogit [rows, ids], and what is made of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mosaic_kernels.linear_logprob.triton_backward import dbias_kernel, dhidden_kernel, dlogit_kernel, dweight_kernel
from mosaic_kernels.linear_logprob.triton_config import GROUP, ROWS, Tile
from mosaic_kernels.linear_logprob.triton_launch import FACTOR, Head, Rows, launch, tile_constants


class Above(NamedTuple):
    """Statistics of the forward pass and the gradients from above, [T] each."""

    largest: Tensor
    log_normaliser: Tensor
    entropy: Tensor | None
    dlogprob: Tensor
    dentropy: Tensor | None


class Scale(NamedTuple):
    """Powers of two by which rows of a float16 dlogit are multiplied, so that small ones do not vanish."""

    own: Tensor  # [T], in the order of the listed rows
    least: Tensor  # [] the least of them


class Live(NamedTuple):
    """The tiles of a chunk that grad_filter lets count, as lists, and as flags [row blocks, id blocks]."""

    of_rows: tuple[Tensor, Tensor, int]  # for each row block its id blocks, their number, the lists' stride
    of_ids: tuple[Tensor, Tensor, int]
    flags: Tensor


def backward(
    head: Head,
    rows: Rows,
    above: Above,
    threshold: float | None,
    dhidden: torch.dtype | None,
    dweight: bool,
    dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients wanted, the others empty; dhidden [T, H] of the dtype given, 0 in rows that are not listed.

    dweight and dbias of a chunk of ids are finished over all rows before the next. Where only dhidden is wanted, rows
    come in launches of their own, and the chunks stay small however many there are.
    """
    length, (vocab, hidden_size), device = rows.index.shape[0], head.weight.shape, head.hidden.device
    of_rows = torch.zeros(length if dhidden else 0, hidden_size, dtype=dhidden or torch.float32, device=device)
    new = torch.empty if length else torch.zeros
    of_weight = new(vocab if dweight else 0, hidden_size, dtype=head.weight.dtype, device=device)
    of_bias = new(vocab if dbias else 0, dtype=(head.weight if head.bias is None else head.bias).dtype, device=device)
    most = length if dweight or dbias else min(length, ROWS)
    rich = not (head.bias is head.softcap is head.kept[0] is above.dentropy is None)
    tile = head.config.dlogit_rich if rich else head.config.dlogit
    ids = head.chunk_ids(most, tile.columns * head.config.dlogit_blocks)
    dlogit = torch.empty(triton.cdiv(most, tile.rows) * tile.rows, ids, dtype=head.dtype, device=device)
    sums = torch.empty(most if dhidden and ids < vocab else 0, hidden_size, device=device)
    scale = _scale(rows, above) if head.dtype == torch.float16 else None
    for first_row in range(0, length, max(most, 1)):
        part = rows.behind(first_row)
        part_scale = None if scale is None else Scale(scale.own[first_row:], scale.least)
        for first in range(0, vocab, ids):
            place = (first, min(first + ids, vocab))
            live = _dlogit(head, part, above, part_scale, tile, (first_row, most), place, dlogit, threshold)
            if dweight:
                _dweight(head, part, part_scale, live, tile, place, dlogit, of_weight)
            if dbias:
                _dbias(part, part_scale, live, tile, place, dlogit, of_bias)
            if dhidden:
                _dhidden(head, part, part_scale, live, tile, (first_row, most), place, dlogit, sums, of_rows)
    return of_rows, of_weight, of_bias


def _scale(rows: Rows, above: Above) -> Scale:
    """Brings what a row's |dlogit| can reach to between 2^13 and 2^14: beyond 2^-38 of it nothing is lost."""
    bound = above.dlogprob.abs()
    if above.dentropy is not None:
        bound = bound + above.dentropy.abs() * (1 + above.entropy)  # |p log p| < 1
    bound = bound[rows.index] * rows.inverse_temperature
    own = torch.exp2(14.0 - torch.frexp(bound).exponent.clamp(min=-100))
    listed = torch.arange(own.shape[0], device=own.device) < rows.count
    return Scale(own, torch.where(listed, own, torch.inf).amin() if own.numel() else own.new_ones(()))


def _dlogit(
    head: Head,
    rows: Rows,
    above: Above,
    scale: Scale | None,
    tile: Tile,
    launched: tuple[int, int],
    place: tuple[int, int],
    dlogit: Tensor,
    threshold: float | None,
) -> Live | None:
    row_blocks, blocks = triton.cdiv(launched[1], tile.rows), triton.cdiv(place[1] - place[0], tile.columns)
    flags = None
    if threshold is not None:
        flags = torch.zeros(row_blocks, blocks, dtype=torch.uint8, device=dlogit.device)
    launch(
        dlogit_kernel,
        row_blocks * triton.cdiv(blocks, head.config.dlogit_blocks),
        tile,
        head.hidden,
        head.hidden.stride(0),
        head.weight_tile(tile.columns, tile.depth),
        head.weight.stride(0),
        head.bias,
        rows.index,
        rows.count,
        *launched,
        rows.target,
        rows.inverse_temperature,
        head.softcap,
        *head.kept,
        *place,
        *head.weight.shape,
        *above,
        None if scale is None else scale.own,
        dlogit,
        dlogit.stride(0),
        flags,
        0.0 if threshold is None else threshold,
        TILES=head.config.dlogit_blocks,
        TMA=head.described,
        DTYPE=FACTOR[head.dtype],
        **tile_constants(tile),
    )
    return None if flags is None else Live(_listed(flags), _listed(flags.T), flags)


def _listed(flags: Tensor) -> tuple[Tensor, Tensor, int]:
    order = torch.sort(flags, dim=1, descending=True, stable=True).indices.to(torch.int32).contiguous()
    return order, flags.sum(1, dtype=torch.int32), order.stride(0)


def _dweight(
    head: Head,
    rows: Rows,
    scale: Scale | None,
    live: Live | None,
    listed: Tile,
    place: tuple[int, int],
    dlogit: Tensor,
    dweight: Tensor,
) -> None:
    tile, hidden_size = head.config.dweight, dweight.shape[1]
    launch(
        dweight_kernel,
        triton.cdiv(place[1] - place[0], tile.rows) * triton.cdiv(hidden_size, tile.columns),
        tile,
        TensorDescriptor.from_tensor(dlogit, [tile.depth, tile.rows]) if head.described else dlogit,
        dlogit.stride(0),
        head.hidden,
        head.hidden.stride(0),
        rows.index,
        rows.count,
        *((None, None) if scale is None else scale),
        *((None, None, 0) if live is None else live.of_ids),
        dweight,
        *place,
        hidden_size,
        TMA=head.described,
        DTYPE=FACTOR[head.dtype],
        BLOCK_V=tile.rows,
        BLOCK_H=tile.columns,
        BLOCK_N=tile.depth,
        LIST_T=listed.rows,
        LIST_V=listed.columns,
        GROUP=GROUP,
    )


def _dbias(
    rows: Rows,
    scale: Scale | None,
    live: Live | None,
    listed: Tile,
    place: tuple[int, int],
    dlogit: Tensor,
    dbias: Tensor,
) -> None:
    width = min(64, listed.columns)
    launch(
        dbias_kernel,
        triton.cdiv(place[1] - place[0], width),
        listed._replace(warps=4, stages=2),
        dlogit,
        dlogit.stride(0),
        rows.count,
        None if scale is None else scale.own,
        None if live is None else live.flags,
        dbias,
        *place,
        BLOCK_T=listed.rows,
        BLOCK_V=width,
        LIST_V=listed.columns,
    )


def _dhidden(
    head: Head,
    rows: Rows,
    scale: Scale | None,
    live: Live | None,
    listed: Tile,
    launched: tuple[int, int],
    place: tuple[int, int],
    dlogit: Tensor,
    sums: Tensor,
    dhidden: Tensor,
) -> None:
    tile, (vocab, hidden_size) = head.config.dhidden, head.weight.shape
    launch(
        dhidden_kernel,
        triton.cdiv(launched[1], tile.rows) * triton.cdiv(hidden_size, tile.columns),
        tile,
        TensorDescriptor.from_tensor(dlogit, [tile.rows, tile.depth]) if head.described else dlogit,
        dlogit.stride(0),
        head.weight_tile(tile.depth, tile.columns),
        head.weight.stride(0),
        rows.index,
        rows.count,
        *launched,
        None if scale is None else scale.own,
        *((None, None, 0) if live is None else live.of_rows),
        sums,
        dhidden,
        *place,
        hidden_size,
        int(place[0] == 0),
        int(place[1] == vocab),
        TMA=head.described,
        DTYPE=FACTOR[head.dtype],
        BLOCK_T=tile.rows,
        BLOCK_H=tile.columns,
        BLOCK_V=tile.depth,
        LIST_T=listed.rows,
        LIST_V=listed.columns,
        GROUP=GROUP,
    )
