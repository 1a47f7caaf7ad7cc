"""What the Triton kernels of `linear_logprob` share: the order of the programs, and a tile of logits in registers.

Rows are compact: row n of a kernel is row `rows[n]` of the call, so that rows outside the mask cost nothing. Their
number is known to the device alone; a program whose rows lie behind it returns at once.
"""

import triton
import triton.language as tl


@triton.jit
def grouped(program, row_blocks, column_blocks, GROUP: tl.constexpr):
    """The (row block, column block) of a program: programs that run together share rows and columns in the L2 cache.

    GROUP row blocks go through the column blocks side by side, so that the weight comes from memory once for GROUP
    row blocks instead of once for each.
    """
    first = program // (GROUP * column_blocks) * GROUP
    size = tl.minimum(row_blocks - first, GROUP)
    inside = program % (GROUP * column_blocks)
    return first + inside % size, inside // size


@triton.jit
def product_tile(
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
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """hidden[rows] @ weight[first_id : first_id + BLOCK_V].T in float32; 0 where a row is not live or an id is >= V.

    float32 operands are multiplied as IEEE float32, never as tf32.
    """
    along = tl.arange(0, BLOCK_H)
    ids = first_id + tl.arange(0, BLOCK_V)
    row = tl.load(rows_ptr + n, mask=live, other=0).to(tl.int64)
    hidden_ptrs = hidden_ptr + (row * stride_ht)[:, None] + along[None, :]
    if not TMA:
        weight_ptrs = weight + ids.to(tl.int64)[None, :] * stride_wv + along[:, None]
    product = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for h in range(0, H, BLOCK_H):
        inside = h + along < H
        left = tl.load(hidden_ptrs, mask=live[:, None] & inside[None, :], other=0.0)
        if TMA:
            right = weight.load([first_id, h]).T
        else:
            right = tl.load(weight_ptrs, mask=inside[:, None] & (ids < V)[None, :], other=0.0)
            weight_ptrs += BLOCK_H
        product = tl.dot(left.to(DTYPE), right.to(DTYPE), product, input_precision="ieee")
        hidden_ptrs += BLOCK_H
    return product


@triton.jit
def columns_of(tile, part: tl.constexpr, PARTS: tl.constexpr):
    """One of PARTS (1, 2 or 4) equal parts of the columns of a tile, which then needs fewer registers at a time."""
    if PARTS >= 2:
        halves = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()
        tile = halves[part // (PARTS // 2)]
    if PARTS == 4:
        quarters = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()
        tile = quarters[part % 2]
    return tile


@triton.jit
def tanh(x):
    """To about 1e-7, absolute; exp(-2|x|) never overflows."""
    small = tl.exp(-2 * tl.abs(x))
    y = (1 - small) / (1 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def first_kept(kept_ptr, place, end, first_id):
    """For each row the place of its first kept id that is not below `first_id`, in [place, end]."""
    while tl.max((place < end).to(tl.int32), axis=0) > 0:
        middle = place + (end - place) // 2
        below = tl.load(kept_ptr + middle, mask=place < end, other=0) < first_id
        place = tl.where((place < end) & below, middle + 1, place)
        end = tl.where((place < end) & ~below, middle, end)
    return place


@triton.jit
def kept_tile(kept_ptr, place, end, whole, first_id, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr):
    """Which ids of the tile each row is normalised over, and the place of the first kept id behind the tile.

    Lists are ascending; an id may stand in one more than once.
    """
    ids = first_id + tl.arange(0, BLOCK_V)
    keep = tl.zeros((BLOCK_T, BLOCK_V), tl.int1) | whole[:, None]
    kept = tl.load(kept_ptr + place, mask=place < end, other=0)
    here = (place < end) & (kept < first_id + BLOCK_V)
    while tl.max(here.to(tl.int32), axis=0) > 0:
        keep |= here[:, None] & (kept[:, None] == ids[None, :])
        place += here.to(place.dtype)
        kept = tl.load(kept_ptr + place, mask=place < end, other=0)
        here = (place < end) & (kept < first_id + BLOCK_V)
    return keep, place


@triton.jit
def logits(product, ids, V, bias_ptr, softcap_ptr, inverse_temperature):
    """(x, slope): the logits of `product`, -inf where an id is >= V; slope = d x / d product before the temperature."""
    x = product
    if bias_ptr is not None:
        x += tl.load(bias_ptr + ids, mask=ids < V, other=0.0).to(tl.float32)[None, :]
    slope = tl.full(product.shape, 1.0, tl.float32)
    if softcap_ptr is not None:
        softcap = tl.load(softcap_ptr)
        capped = tanh(x / softcap)
        x = softcap * capped
        slope = 1 - capped * capped
    if inverse_temperature is not None:
        x *= inverse_temperature[:, None]
    return tl.where((ids < V)[None, :], x, float("-inf")), slope
