"""Tile sizes of the Triton kernels, one table; chosen by dtype and GPU, never by timing, so that bits stay the same.

Where they come from, for H 4096, V 131072 and bf16 (predictions, not measurements):

- A tile of rows x ids needs 2 rows ids FLOPs and 2 (rows + ids) bytes from the L2 cache for each hidden element: 128 x
  256 gives 85 FLOP/byte, 128 x 128 gives 64. At 989 TFLOP/s an H100's multiprocessors must then read 11.6 or 15.5 TB/s
  out of it, more than it can give: the wide tile wherever it fits.
- Its float32 sums take 128 of the 255 registers of 256 threads. The epilogue goes through it in four `parts` of 64 ids,
  since exp(x) of the whole tile beside it would not fit: that is what keeps the kernels free of spills.
- 64 hidden elements of 128 + 256 rows are 48 KiB a stage; four stages fill the 227 KiB of shared memory of sm_90 and
  sm_100. sm_80 (163 KiB) and the others (99 KiB) take steps of 32 elements, and where there is an epilogue 128 ids:
  their matrix instructions have both sides in registers too.
- One tile is 2 x 128 x 256 x 4096 FLOPs, 37 us of one of 132 multiprocessors; its epilogue has 32768 exponentials, 16 a
  clock, and about ten other operations each, 128 a clock: 2.6 us, 7 %. Smaller H pays more: 50 % at H 576.
- 1024 ids a split make 128 splits: they fill 132 multiprocessors even if one block of rows is all there is, and end
  within 2 % of each other where there are 8192 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mosaic_kernels._backend import TRITON_INTERPRETED

# Rows in one launch. It bounds the scratch memory of the forward pass: three float32 a row and split.
ROWS = 8192
# Row blocks that go through the ids side by side: 16 x 128 rows of hidden, 16 MiB at H 4096, stay in the L2 cache, and
# the weight comes from memory once for 2048 rows (4.3 GB for 8192 rows, 1.3 ms of an H100's bandwidth beside 12.5 ms).
GROUP = 16
# Ids in one chunk of the backward pass. The sums [rows, H] in float32 are read and written once a chunk: at 700 TFLOP/s
# and 3.35 TB/s that takes 5 % of the time of their product with 16384 ids, and 20 % with 4096.
CHUNK_IDS = 16384
# Elements [rows, ids] of a chunk: not more than these 256 MiB of bf16, or than twice [T, H] where that is more.
CHUNK_ELEMENTS = 2**27


class Tile(NamedTuple):
    """rows x columns of a product, `depth` elements multiplied at a step, an epilogue in `parts`."""

    rows: int
    columns: int
    depth: int
    parts: int
    warps: int
    stages: int


class Config(NamedTuple):
    """The tiles of one dtype on one GPU, and how many blocks of ids a program of `forward` and of `dlogit` takes."""

    forward: Tile  # rows x ids, depth along hidden
    # the same, but for depth and stages, which change no bit of the sums: probabilities to be written need registers
    forward_probs: Tile
    dlogit: Tile
    dlogit_rich: Tile  # with bias, softcap, kept ids or an entropy: these need registers
    dweight: Tile  # ids x hidden, depth along rows
    dhidden: Tile  # rows x hidden, depth along ids; for the expected weight too
    forward_blocks: int = 4
    dlogit_blocks: int = 2


# bf16 and fp16
_HALF = {
    # tcgen05: the epilogue of a warp has all columns of its rows
    "sm_100": Config(
        forward=Tile(128, 256, 64, 4, 8, 4),
        forward_probs=Tile(128, 256, 64, 4, 8, 4),
        dlogit=Tile(128, 256, 64, 4, 8, 4),
        dlogit_rich=Tile(128, 128, 64, 4, 4, 3),
        dweight=Tile(128, 256, 64, 1, 8, 4),
        dhidden=Tile(128, 256, 64, 1, 8, 4),
    ),
    # wgmma
    "sm_90": Config(
        forward=Tile(128, 256, 64, 4, 8, 4),
        forward_probs=Tile(128, 256, 32, 4, 8, 6),
        dlogit=Tile(128, 256, 64, 4, 8, 4),
        dlogit_rich=Tile(128, 128, 64, 4, 8, 4),
        dweight=Tile(128, 256, 64, 1, 8, 4),
        dhidden=Tile(128, 256, 64, 1, 8, 4),
    ),
    "sm_80": Config(
        forward=Tile(128, 128, 32, 4, 8, 4),
        forward_probs=Tile(128, 128, 32, 4, 8, 4),
        dlogit=Tile(128, 128, 32, 4, 8, 4),
        dlogit_rich=Tile(128, 128, 32, 4, 8, 4),
        dweight=Tile(128, 256, 32, 1, 8, 4),
        dhidden=Tile(128, 256, 32, 1, 8, 4),
    ),
    # consumer and inference chips, with 99 KiB
    "small": Config(
        forward=Tile(128, 128, 32, 4, 8, 4),
        forward_probs=Tile(128, 128, 32, 4, 8, 4),
        dlogit=Tile(128, 128, 32, 4, 8, 4),
        dlogit_rich=Tile(128, 128, 32, 4, 8, 4),
        dweight=Tile(128, 128, 32, 1, 8, 4),
        dhidden=Tile(128, 128, 32, 1, 8, 4),
    ),
    # every chip, where rows of the weight do not start on 16-byte boundaries: its addresses take registers too
    "unaligned": Config(
        forward=Tile(128, 128, 32, 4, 8, 3),
        forward_probs=Tile(128, 128, 32, 4, 8, 3),
        dlogit=Tile(128, 128, 32, 4, 8, 3),
        dlogit_rich=Tile(128, 64, 32, 2, 8, 3),
        dweight=Tile(128, 128, 32, 1, 8, 3),
        dhidden=Tile(128, 128, 32, 1, 8, 3),
    ),
}
# float32 by the ordinary units; 67 TFLOP/s on an H100 rule out every other limit
_FLOAT32 = Config(
    forward=Tile(64, 128, 32, 2, 8, 2),
    forward_probs=Tile(64, 128, 32, 2, 8, 2),
    dlogit=Tile(64, 128, 32, 2, 8, 2),
    dlogit_rich=Tile(64, 128, 32, 2, 8, 2),
    dweight=Tile(64, 128, 32, 1, 8, 2),
    dhidden=Tile(64, 128, 32, 1, 8, 2),
)
# Small enough that tests meet every edge, and Python's time for a program is not spent on many of them.
_INTERPRETED = Config(
    forward=Tile(128, 128, 64, 2, 1, 1),
    forward_probs=Tile(128, 128, 64, 2, 1, 1),
    dlogit=Tile(128, 64, 64, 2, 1, 1),
    dlogit_rich=Tile(128, 64, 64, 1, 1, 1),
    dweight=Tile(64, 128, 64, 1, 1, 1),
    dhidden=Tile(128, 128, 64, 1, 1, 1),
    forward_blocks=2,
)


def choose(device: torch.device, dtype: torch.dtype, weight: Tensor) -> tuple[Config, bool]:
    """The tiles for products in `dtype`, and whether the weight is read through a tensor descriptor."""
    stride = weight.stride(0) * weight.element_size()
    aligned = weight.numel() > 0 and weight.data_ptr() % 16 == 0 and stride % 16 == 0
    if TRITON_INTERPRETED:
        return _INTERPRETED, aligned
    if dtype == torch.float32:
        return _FLOAT32, False
    if not aligned:
        return _HALF["unaligned"], False
    major, minor = torch.cuda.get_device_capability(device)
    if major in (9, 10):
        return _HALF[f"sm_{major}0"], True
    return _HALF["sm_80" if (major, minor) in ((8, 0), (8, 7)) else "small"], False
