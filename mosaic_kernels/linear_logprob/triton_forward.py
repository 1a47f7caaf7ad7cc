"""Triton kernels of the forward pass of `linear_logprob`."""

import triton
import triton.language as tl

from mosaic_kernels.linear_logprob.triton_tiles import columns_of, first_kept, grouped, kept_tile, logits, product_tile

# Keeps probabilities down to 2^-38 of a row's largest in float16, whose smallest number is 2^-24; exact in every dtype.
PROBS_SCALE = tl.constexpr(16384.0)


@triton.jit
def add_to_sums(x, largest, normaliser, weighted, ENTROPY: tl.constexpr):
    """The online sums of each row, with the tile `x` added; and exp(x - largest) by the new largest."""
    before = largest
    largest = tl.maximum(before, tl.max(x, axis=1))
    # A row of -inf only is shifted by 0: there is no exp(-inf - -inf).
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    scale = tl.exp(before - shift)
    distance = x - shift[:, None]
    e = tl.exp(distance)
    if ENTROPY:
        moved = tl.where(before == float("-inf"), 0.0, before - shift) * normaliser
        # p log p is 0 at p = 0, where the product would be 0 * inf
        weighted = scale * (weighted + moved) + tl.sum(tl.where(distance == float("-inf"), 0.0, e * distance), axis=1)
    return largest, scale * normaliser + tl.sum(e, axis=1), weighted, e


@triton.jit(do_not_specialize=["first_row", "first_split", "splits", "V"])
def forward_kernel(
    hidden_ptr,
    stride_ht,
    weight,
    stride_wv,
    bias_ptr,
    rows_ptr,
    count_ptr,
    first_row,
    target_ptr,
    inverse_temperature_ptr,
    softcap_ptr,
    kept_ptr,
    kept_offsets_ptr,
    kept_state_ptr,
    first_split,
    splits,
    V,
    H,
    largest_ptr,
    normaliser_ptr,
    weighted_ptr,
    target_logit_ptr,
    probs_ptr,
    stride_pn,
    tile_largest_ptr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The sums of each row over the ids of one split of the vocabulary, and the target's logit where it lies there.

    A split has the same ids however many rows there are, so that a row's sums do not depend on the others. With probs,
    exp(x - the row's largest x of the split until then) is written too, for `expected_kernel`.
    """
    rows = tl.minimum(tl.load(count_ptr) - first_row, ROWS)
    row_blocks = tl.cdiv(rows, BLOCK_T)
    if tl.program_id(0) >= row_blocks * splits:
        return
    row_block, split = grouped(tl.program_id(0), row_blocks, splits, GROUP)
    split += first_split
    n = row_block * BLOCK_T + tl.arange(0, BLOCK_T)
    live = n < rows
    begin = split * (TILES * BLOCK_V)
    WIDTH: tl.constexpr = BLOCK_V // PARTS
    if kept_ptr is not None:
        row = tl.load(rows_ptr + n, mask=live, other=0)
        end = tl.load(kept_offsets_ptr + row + 1, mask=live, other=0)
        place = first_kept(kept_ptr, tl.load(kept_offsets_ptr + row, mask=live, other=0), end, begin)
        whole = tl.load(kept_state_ptr + row, mask=live, other=1) != 0

    largest = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    normaliser = tl.zeros((BLOCK_T,), tl.float32)
    weighted = tl.zeros((BLOCK_T,), tl.float32)
    for first_id in tl.range(begin, tl.minimum(begin + TILES * BLOCK_V, V), BLOCK_V, disable_licm=True):
        product = product_tile(
            hidden_ptr,
            stride_ht,
            rows_ptr,
            n,
            live,
            weight,
            stride_wv,
            first_id,
            V,
            H,
            TMA,
            DTYPE,
            BLOCK_T,
            BLOCK_V,
            BLOCK_H,
        )
        for part in tl.static_range(PARTS):
            first = first_id + part * WIDTH
            ids = first + tl.arange(0, WIDTH)
            chosen = columns_of(product, part, PARTS)
            inverse_temperature = tl.load(inverse_temperature_ptr + n, mask=live, other=1.0)
            x, _slope = logits(chosen, ids, V, bias_ptr, softcap_ptr, inverse_temperature)
            if kept_ptr is not None:
                keep, place = kept_tile(kept_ptr, place, end, whole, first, BLOCK_T, WIDTH)
                x = tl.where(keep, x, float("-inf"))
            target = tl.load(target_ptr + n, mask=live, other=-1)
            here = (target >= first) & (target < first + WIDTH)
            if tl.max(here.to(tl.int32), axis=0) > 0:
                of_target = tl.sum(tl.where(target[:, None] == ids[None, :], x, 0.0), axis=1)
                tl.store(target_logit_ptr + n, of_target, mask=here)
            largest, normaliser, weighted, e = add_to_sums(x, largest, normaliser, weighted, weighted_ptr is not None)
            if probs_ptr is not None:
                # a chunk has at most ROWS x 16384 elements: 32 bits hold a place in it
                at = n * stride_pn + (first - first_split * (TILES * BLOCK_V))
                probs = (e * PROBS_SCALE).to(probs_ptr.dtype.element_ty)
                tl.store(probs_ptr + at[:, None] + tl.arange(0, WIDTH)[None, :], probs)
                tile = (first - first_split * (TILES * BLOCK_V)) // WIDTH
                tl.store(tile_largest_ptr + tile * ROWS + n, largest)

    at = split.to(tl.int64) * ROWS + n
    tl.store(largest_ptr + at, largest, mask=live)
    tl.store(normaliser_ptr + at, normaliser, mask=live)
    if weighted_ptr is not None:
        tl.store(weighted_ptr + at, weighted, mask=live)


@triton.jit(do_not_specialize=["first_row", "splits"])
def combine_kernel(
    rows_ptr,
    count_ptr,
    first_row,
    inverse_temperature_ptr,
    splits,
    part_largest_ptr,
    part_normaliser_ptr,
    part_weighted_ptr,
    part_target_logit_ptr,
    largest_ptr,
    normaliser_ptr,
    weighted_ptr,
    target_logit_ptr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The statistics of each row from those of the splits, in order, in float64; NaN for a row that is invalid."""
    rows = tl.minimum(tl.load(count_ptr) - first_row, ROWS)
    n = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = n < rows
    largest = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    at = n.to(tl.int64)
    for _ in range(0, splits):
        largest = tl.maximum(largest, tl.load(part_largest_ptr + at, mask=live, other=0.0))
        at += ROWS
    # NaN where the target, the temperature or a kept id means nothing
    normaliser = 0.0 * tl.load(inverse_temperature_ptr + n, mask=live, other=1.0).to(tl.float64)
    weighted = tl.zeros((BLOCK_T,), tl.float64)
    at = n.to(tl.int64)
    for _ in range(0, splits):
        part_largest = tl.load(part_largest_ptr + at, mask=live, other=0.0)
        moved = tl.where(part_largest == float("-inf"), 0.0, part_largest - largest)
        scale = tl.where(part_largest == float("-inf"), 0.0, tl.exp(moved)).to(tl.float64)
        part = tl.load(part_normaliser_ptr + at, mask=live, other=0.0).to(tl.float64)
        normaliser += scale * part
        if weighted_ptr is not None:
            part_weighted = tl.load(part_weighted_ptr + at, mask=live, other=0.0).to(tl.float64)
            weighted += scale * (part_weighted + moved.to(tl.float64) * part)
        at += ROWS
    row = tl.load(rows_ptr + n, mask=live, other=0)
    tl.store(largest_ptr + row, largest, mask=live)
    tl.store(normaliser_ptr + row, normaliser, mask=live)
    if weighted_ptr is not None:
        tl.store(weighted_ptr + row, weighted, mask=live)
    tl.store(target_logit_ptr + row, tl.load(part_target_logit_ptr + n, mask=live, other=0.0), mask=live)
