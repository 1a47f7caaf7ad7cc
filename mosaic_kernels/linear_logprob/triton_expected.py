"""Triton kernels of the route for a head that takes no gradient.

Then dhidden = dlogprob (weight[target] - sum_v p_v weight_v) / temperature, and the sum does not depend on what comes
from above: the forward pass makes it beside the log-probs, and the backward pass has no logits to compute again, two
products instead of three. With a softcap or an entropy other factors than p stand in the sum, and the general route
serves.
"""

import triton
import triton.language as tl

from mosaic_kernels.linear_logprob.triton_forward import PROBS_SCALE
from mosaic_kernels.linear_logprob.triton_tiles import columns_of, grouped


@triton.jit(do_not_specialize=["first_row", "first_id", "last_id"])
def align_probs_kernel(
    probs_ptr,
    stride_pn,
    count_ptr,
    first_row,
    tile_largest_ptr,
    largest_ptr,
    first_id,
    last_id,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """probs, which a tile of ids has relative to its split's largest x until then, made relative to that of the chunk.

    A pass of its own: within the product the factors would force its left side through the registers, and they spill.
    """
    rows = tl.minimum(tl.load(count_ptr) - first_row, ROWS)
    tiles = tl.cdiv(last_id - first_id, WIDTH)
    n = tl.program_id(0) // tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    tile = tl.program_id(0) % tiles
    live = n < rows
    largest = tl.load(largest_ptr + n, mask=live, other=0.0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    factor = tl.exp(tl.load(tile_largest_ptr + tile * ROWS + n, mask=live, other=0.0) - largest)
    ptrs = probs_ptr + (n.to(tl.int64) * stride_pn)[:, None] + (tile * WIDTH + tl.arange(0, WIDTH))[None, :]
    probs = tl.load(ptrs, mask=live[:, None], other=0.0).to(tl.float32) * factor[:, None]
    tl.store(ptrs, probs.to(probs_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["first_row", "first_id", "last_id", "first"])
def expected_kernel(
    probs,
    stride_pn,
    weight,
    stride_wv,
    count_ptr,
    first_row,
    before_ptr,
    largest_ptr,
    expected_ptr,
    first_id,
    last_id,
    H,
    first,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
):
    """expected[n] = sum over the ids until last_id of exp(x - largest) weight, largest being that of these ids."""
    rows = tl.minimum(tl.load(count_ptr) - first_row, ROWS)
    row_blocks = tl.cdiv(rows, BLOCK_T)
    if tl.program_id(0) >= row_blocks * tl.cdiv(H, BLOCK_H):
        return
    row_block, h_block = grouped(tl.program_id(0), row_blocks, tl.cdiv(H, BLOCK_H), GROUP)
    n = row_block * BLOCK_T + tl.arange(0, BLOCK_T)
    live = n < rows
    h = h_block * BLOCK_H + tl.arange(0, BLOCK_H)
    along = tl.arange(0, BLOCK_V)
    total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for step in range(0, tl.cdiv(last_id - first_id, BLOCK_V)):
        column = step * BLOCK_V
        if TMA:
            left = probs.load([row_block * BLOCK_T, column])
            right = weight.load([first_id + column, h_block * BLOCK_H])
        else:
            ids = first_id + column + along
            left = tl.load(probs + (n.to(tl.int64) * stride_pn)[:, None] + (column + along)[None, :])
            right_ptrs = weight + (ids.to(tl.int64) * stride_wv)[:, None] + h[None, :]
            right = tl.load(right_ptrs, mask=(ids < last_id)[:, None] & (h < H)[None, :], other=0.0)
        total = tl.dot(left.to(DTYPE), right.to(DTYPE), total, input_precision="ieee")
    largest = tl.load(largest_ptr + n, mask=live, other=0.0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    # exp(-inf) is 0: a part without any id adds nothing
    scale = tl.exp(tl.load(before_ptr + n, mask=live, other=0.0) - largest)
    # The earlier sums come in by parts: beside the whole tile they would not fit into the registers.
    WIDTH: tl.constexpr = BLOCK_H // 4
    for part in tl.static_range(4):
        h = h_block * BLOCK_H + part * WIDTH + tl.arange(0, WIDTH)
        ptrs = expected_ptr + (n.to(tl.int64) * H)[:, None] + h[None, :]
        earlier = tl.load(ptrs, mask=(n < rows * (1 - first))[:, None] & (h < H)[None, :], other=0.0)
        added = columns_of(total, part, 4) / PROBS_SCALE
        tl.store(ptrs, scale[:, None] * earlier + added, mask=live[:, None] & (h < H)[None, :])


@triton.jit
def dhidden_expected_kernel(
    weight_ptr,
    stride_wv,
    rows_ptr,
    count_ptr,
    target_ptr,
    inverse_temperature_ptr,
    expected_ptr,
    place_ptr,
    scale_ptr,
    dlogprob_ptr,
    dhidden_ptr,
    H,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """dhidden[row] = dlogprob (weight[target] - scale expected) / temperature; target -1: its weight is elsewhere."""
    count = tl.load(count_ptr)
    h_blocks = tl.cdiv(H, BLOCK_H)
    n = tl.program_id(0) // h_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.program_id(0) % h_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    live = n < count
    inside = live[:, None] & (h < H)[None, :]
    row = tl.load(rows_ptr + n, mask=live, other=0).to(tl.int64)
    target = tl.load(target_ptr + n, mask=live, other=-1).to(tl.int64)
    own = inside & (target >= 0)[:, None]
    of_target = tl.load(weight_ptr + (target * stride_wv)[:, None] + h[None, :], mask=own, other=0.0).to(tl.float32)
    place = tl.load(place_ptr + row, mask=live, other=0)
    expected = tl.load(expected_ptr + (place * H)[:, None] + h[None, :], mask=inside, other=0.0)
    factor = tl.load(inverse_temperature_ptr + n, mask=live, other=0.0)
    factor *= tl.load(dlogprob_ptr + row, mask=live, other=0.0)
    scale = tl.load(scale_ptr + row, mask=live, other=0.0)
    # p is 0 in every column of a rank that holds none of the row's ids
    mean = tl.where(scale[:, None] == 0.0, 0.0, scale[:, None] * expected)
    dhidden = factor[:, None] * (of_target - mean)
    tl.store(dhidden_ptr + (row * H)[:, None] + h[None, :], dhidden.to(dhidden_ptr.dtype.element_ty), mask=inside)
