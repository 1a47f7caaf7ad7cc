"""Triton kernels of the backward pass of `linear_logprob`.

The gradient of a chunk of logits, [rows, ids], is computed once, rounded to the dtype that the matrix units multiply,
and used twice: for dhidden and for dweight. Computing it anew for every tile of either product would cost H / BLOCK_H
times the work, since no register file holds a row of H float32 sums.
"""

import triton
import triton.language as tl

from mosaic_kernels.linear_logprob.triton_tiles import columns_of, first_kept, grouped, kept_tile, logits, product_tile


@triton.jit(do_not_specialize=["first_row", "most_rows", "first_id", "last_id", "V", "threshold"])
def dlogit_kernel(
    hidden_ptr,
    stride_ht,
    weight,
    stride_wv,
    bias_ptr,
    rows_ptr,
    count_ptr,
    first_row,
    most_rows,
    target_ptr,
    inverse_temperature_ptr,
    softcap_ptr,
    kept_ptr,
    kept_offsets_ptr,
    kept_state_ptr,
    first_id,
    last_id,
    V,
    H,
    largest_ptr,
    log_normaliser_ptr,
    entropy_ptr,
    dlogprob_ptr,
    dentropy_ptr,
    scale_ptr,
    dlogit_ptr,
    stride_dn,
    counts_ptr,
    threshold,
    TILES: tl.constexpr,
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """d loss / d (hidden @ weight.T + bias) of the ids from first_id to last_id, 0 in rows of the last block not used.

    dx = (dlogprob (1[target] - p) - dentropy p (log p + entropy)) slope / temperature,  p = exp(x - log normaliser).
    """
    rows = tl.minimum(tl.load(count_ptr) - first_row, most_rows)
    row_blocks = tl.cdiv(rows, BLOCK_T)
    blocks = tl.cdiv(last_id - first_id, TILES * BLOCK_V)
    if tl.program_id(0) >= row_blocks * blocks:
        return
    row_block, block = grouped(tl.program_id(0), row_blocks, blocks, GROUP)
    n = row_block * BLOCK_T + tl.arange(0, BLOCK_T)
    live = n < rows
    WIDTH: tl.constexpr = BLOCK_V // PARTS
    begin = first_id + block * (TILES * BLOCK_V)
    for tile_id in tl.range(begin, tl.minimum(begin + TILES * BLOCK_V, last_id), BLOCK_V, disable_licm=True):
        product = product_tile(
            hidden_ptr,
            stride_ht,
            rows_ptr,
            n,
            live,
            weight,
            stride_wv,
            tile_id,
            V,
            H,
            TMA,
            DTYPE,
            BLOCK_T,
            BLOCK_V,
            BLOCK_H,
        )
        counts = False
        for part in tl.static_range(PARTS):
            first = tile_id + part * WIDTH
            ids = first + tl.arange(0, WIDTH)
            row = tl.load(rows_ptr + n, mask=live, other=0)
            inverse_temperature = tl.load(inverse_temperature_ptr + n, mask=live, other=1.0)
            x, slope = logits(columns_of(product, part, PARTS), ids, V, bias_ptr, softcap_ptr, inverse_temperature)
            if kept_ptr is not None:
                end = tl.load(kept_offsets_ptr + row + 1, mask=live, other=0)
                place = first_kept(kept_ptr, tl.load(kept_offsets_ptr + row, mask=live, other=0), end, first)
                whole = tl.load(kept_state_ptr + row, mask=live, other=1) != 0
                x = tl.where(kept_tile(kept_ptr, place, end, whole, first, BLOCK_T, WIDTH)[0], x, float("-inf"))
            x -= tl.load(largest_ptr + row, mask=live, other=0.0)[:, None]
            logp = x - tl.load(log_normaliser_ptr + row, mask=live, other=0.0)[:, None]
            p = tl.exp(logp)
            hit = tl.load(target_ptr + n, mask=live, other=-1)[:, None] == ids[None, :]
            dx = tl.load(dlogprob_ptr + row, mask=live, other=0.0)[:, None] * (tl.where(hit, 1.0, 0.0) - p)
            if dentropy_ptr is not None:
                dentropy = tl.load(dentropy_ptr + row, mask=live, other=0.0)[:, None]
                entropy = tl.load(entropy_ptr + row, mask=live, other=0.0)[:, None]
                # p log p is 0 at p = 0, where the product would be 0 * inf
                dx -= tl.where(p == 0.0, 0.0, dentropy * p * (logp + entropy))
            if softcap_ptr is not None:
                dx = tl.where(slope == 0.0, 0.0, dx * slope)
            if scale_ptr is not None:
                inverse_temperature *= tl.load(scale_ptr + n, mask=live, other=1.0)
            used = live[:, None] & (ids < V)[None, :]
            dx = tl.where(used, dx * inverse_temperature[:, None], 0.0)
            if counts_ptr is not None:
                # not (p < threshold): a NaN counts
                counts |= tl.max(tl.max((used & (hit | ~(p < threshold))).to(tl.int32), axis=1), axis=0) > 0
            at = n.to(tl.int64) * stride_dn + (first - first_id)
            tl.store(dlogit_ptr + at[:, None] + tl.arange(0, WIDTH)[None, :], dx.to(dlogit_ptr.dtype.element_ty))
        if counts_ptr is not None:
            at = row_block.to(tl.int64) * tl.cdiv(last_id - first_id, BLOCK_V) + (tile_id - first_id) // BLOCK_V
            tl.store(counts_ptr + at, counts.to(tl.uint8))


@triton.jit(do_not_specialize=["live_stride", "first_id", "last_id"])
def dweight_kernel(
    dlogit,
    stride_dn,
    hidden_ptr,
    stride_ht,
    rows_ptr,
    count_ptr,
    scale_ptr,
    least_scale_ptr,
    live_blocks_ptr,
    live_counts_ptr,
    live_stride,
    dweight_ptr,
    first_id,
    last_id,
    H,
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIST_T: tl.constexpr,
    LIST_V: tl.constexpr,
    GROUP: tl.constexpr,
):
    """dweight [ids, H] of the ids from first_id to last_id: over all rows in float32 registers, rounded once."""
    count = tl.load(count_ptr)
    block, h_block = grouped(tl.program_id(0), tl.cdiv(last_id - first_id, BLOCK_V), tl.cdiv(H, BLOCK_H), GROUP)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    h = h_block * BLOCK_H + tl.arange(0, BLOCK_H)
    steps = tl.cdiv(count, BLOCK_N)
    if live_blocks_ptr is not None:
        live_blocks_ptr += (block * BLOCK_V // LIST_V).to(tl.int64) * live_stride
        steps = tl.load(live_counts_ptr + block * BLOCK_V // LIST_V) * (LIST_T // BLOCK_N)
    total = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
    along = tl.arange(0, BLOCK_N)
    # The rows of a step are looked up one step ahead: their loads then wait for no other load.
    first = 0
    if live_blocks_ptr is not None:
        first = tl.load(live_blocks_ptr) * LIST_T
    row = tl.load(rows_ptr + first + along, mask=first + along < count, other=0)
    for step in range(0, steps):
        n = first + along
        live = n < count
        hidden_ptrs = hidden_ptr + (row.to(tl.int64) * stride_ht)[:, None] + h[None, :]
        right = tl.load(hidden_ptrs, mask=live[:, None] & (h < H)[None, :], other=0.0)
        if TMA:
            left = dlogit.load([first, block * BLOCK_V])
        else:
            left = tl.load(dlogit + (n.to(tl.int64) * stride_dn)[:, None] + column[None, :])
        if scale_ptr is not None:
            # from each row's own scale to the least of them: a power of two <= 1
            own = tl.load(scale_ptr + n, mask=live, other=1.0)
            left = (left * (tl.load(least_scale_ptr) / own)[:, None]).to(left.dtype)
        total = tl.dot(left.to(DTYPE).T, right.to(DTYPE), total, input_precision="ieee")
        first = (step + 1) * BLOCK_N
        if live_blocks_ptr is not None:
            first = tl.minimum(first, (steps - 1) * BLOCK_N)
            first = tl.load(live_blocks_ptr + first // LIST_T) * LIST_T + first % LIST_T
        row = tl.load(rows_ptr + first + along, mask=first + along < count, other=0)
    if scale_ptr is not None:
        total /= tl.load(least_scale_ptr)
    inside = (first_id + column < last_id)[:, None] & (h < H)[None, :]
    at = (first_id + column).to(tl.int64)[:, None] * H + h[None, :]
    tl.store(dweight_ptr + at, total.to(dweight_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row", "most_rows", "live_stride", "first_id", "last_id", "first", "last"])
def dhidden_kernel(
    dlogit,
    stride_dn,
    weight,
    stride_wv,
    rows_ptr,
    count_ptr,
    first_row,
    most_rows,
    scale_ptr,
    live_blocks_ptr,
    live_counts_ptr,
    live_stride,
    sum_ptr,
    dhidden_ptr,
    first_id,
    last_id,
    H,
    first,
    last,
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LIST_T: tl.constexpr,
    LIST_V: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Adds to the float32 sums [rows, H] what the ids from first_id to last_id give; after the last, writes dhidden.

    The ids are added one block after the other whatever the size of a chunk, so that it does not change a bit.
    """
    rows = tl.minimum(tl.load(count_ptr) - first_row, most_rows)
    row_blocks = tl.cdiv(rows, BLOCK_T)
    if tl.program_id(0) >= row_blocks * tl.cdiv(H, BLOCK_H):
        return
    row_block, h_block = grouped(tl.program_id(0), row_blocks, tl.cdiv(H, BLOCK_H), GROUP)
    n = row_block * BLOCK_T + tl.arange(0, BLOCK_T)
    h = h_block * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (n < rows)[:, None] & (h < H)[None, :]
    along = tl.arange(0, BLOCK_V)
    sum_ptrs = sum_ptr + (n.to(tl.int64) * H)[:, None] + h[None, :]
    added = (n < rows * (1 - first))[:, None] & (h < H)[None, :]
    total = tl.load(sum_ptrs, mask=added, other=0.0)
    steps = tl.cdiv(last_id - first_id, BLOCK_V)
    if live_blocks_ptr is not None:
        live_blocks_ptr += (row_block * BLOCK_T // LIST_T).to(tl.int64) * live_stride
        steps = tl.load(live_counts_ptr + row_block * BLOCK_T // LIST_T) * (LIST_V // BLOCK_V)
    for step in range(0, steps):
        column = step * BLOCK_V
        if live_blocks_ptr is not None:
            column = tl.load(live_blocks_ptr + column // LIST_V) * LIST_V + column % LIST_V
        if TMA:
            left = dlogit.load([row_block * BLOCK_T, column])
            right = weight.load([first_id + column, h_block * BLOCK_H])
        else:
            ids = first_id + column + along
            left = tl.load(dlogit + (n.to(tl.int64) * stride_dn)[:, None] + (column + along)[None, :])
            right_ptrs = weight + (ids.to(tl.int64) * stride_wv)[:, None] + h[None, :]
            right = tl.load(right_ptrs, mask=(ids < last_id)[:, None] & (h < H)[None, :], other=0.0)
        total = tl.dot(left.to(DTYPE), right.to(DTYPE), total, input_precision="ieee")
    if last == 0:
        tl.store(sum_ptrs, total, mask=inside)
    else:
        if scale_ptr is not None:
            total /= tl.load(scale_ptr + n, mask=n < rows, other=1.0)[:, None]
        row = tl.load(rows_ptr + n, mask=n < rows, other=0).to(tl.int64)
        at = (row * H)[:, None] + h[None, :]
        tl.store(dhidden_ptr + at, total.to(dhidden_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_id", "last_id"])
def dbias_kernel(
    dlogit_ptr,
    stride_dn,
    count_ptr,
    scale_ptr,
    counts_ptr,
    dbias_ptr,
    first_id,
    last_id,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LIST_V: tl.constexpr,
):
    """dbias of the ids from first_id to last_id: the column sums of dlogit over all rows."""
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    count = tl.load(count_ptr)
    total = tl.zeros((BLOCK_V,), tl.float32)
    for first in range(0, count, BLOCK_T):
        n = first + tl.arange(0, BLOCK_T)
        part = tl.load(dlogit_ptr + (n.to(tl.int64) * stride_dn)[:, None] + column[None, :]).to(tl.float32)
        if scale_ptr is not None:
            part /= tl.load(scale_ptr + n, mask=n < count, other=1.0)[:, None]
        added = tl.sum(part, axis=0)
        if counts_ptr is not None:
            added = tl.where(tl.load(counts_ptr + tl.program_id(0) * BLOCK_V // LIST_V) != 0, added, 0.0)
            counts_ptr += tl.cdiv(last_id - first_id, LIST_V)
        total += added
    tl.store(dbias_ptr + first_id + column, total.to(dbias_ptr.dtype.element_ty), mask=first_id + column < last_id)
