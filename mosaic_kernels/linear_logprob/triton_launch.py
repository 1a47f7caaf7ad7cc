"""Host side of the Triton kernels of `linear_logprob`: what a call is cut into, and the memory between the kernels.

Nothing here waits for the device: the number of rows to score stays on it, and grids are made for all T rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mosaic_kernels._backend import TRITON_INTERPRETED
from mosaic_kernels.linear_logprob import triton_config
from mosaic_kernels.linear_logprob.triton_config import CHUNK_ELEMENTS, CHUNK_IDS, GROUP, ROWS, Config, Tile
from mosaic_kernels.linear_logprob.triton_expected import align_probs_kernel, dhidden_expected_kernel, expected_kernel
from mosaic_kernels.linear_logprob.triton_forward import combine_kernel, forward_kernel
from mosaic_kernels.linear_logprob.triton_rows import compact_kernel

# In which the units multiply. Triton's interpreter takes the bits of a bf16 for a number; in float32 they are exact.
FACTOR = {
    torch.float32: triton.language.float32,
    torch.bfloat16: triton.language.float32 if TRITON_INTERPRETED else triton.language.bfloat16,
    torch.float16: triton.language.float16,
}


class Rows(NamedTuple):
    """The rows to work on, on the device: n stands for row `index[n]` of the call, for n < count."""

    index: Tensor  # [T] int32
    target: Tensor  # [T] int32, among this rank's ids, or -1
    inverse_temperature: Tensor  # [T] float32
    count: Tensor  # [1] int32

    def behind(self, first: int) -> Rows:
        return Rows(self.index[first:], self.target[first:], self.inverse_temperature[first:], self.count)


class Head(NamedTuple):
    """What makes the logits of a row, and how their products are cut."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: Tensor | None
    kept: tuple[Tensor | None, Tensor | None, Tensor | None]
    config: Config
    dtype: torch.dtype  # in which the matrix units multiply
    described: bool

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: Tensor | None, *kept: Tensor | None
    ) -> Head:
        hidden, weight = side_by_side(hidden), side_by_side(weight)
        dtype = hidden.dtype if hidden.dtype == weight.dtype else torch.float32
        config, described = triton_config.choose(hidden.device, dtype, weight)
        return cls(hidden, weight, None if bias is None else bias.contiguous(), softcap, kept, config, dtype, described)

    def weight_tile(self, rows: int, columns: int) -> Tensor | TensorDescriptor:
        return TensorDescriptor.from_tensor(self.weight, [rows, columns]) if self.described else self.weight

    def chunk_ids(self, rows: int, unit: int) -> int:
        """Ids of one chunk [rows, ids] between two kernels: an eighth of the vocabulary or less, in units."""
        vocab, hidden_size = self.weight.shape
        ids = min(CHUNK_IDS, vocab // 8, max(CHUNK_ELEMENTS // max(rows, 1), 2 * hidden_size))
        return max(ids // unit, 1) * unit


def side_by_side(x: Tensor) -> Tensor:
    """`x` if the elements of each row lie side by side, else a copy in which they do."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def launch(kernel: Any, programs: int, tile: Tile, *arguments: Any, **constants: Any) -> None:
    options = dict(num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)
    if programs:
        kernel[(programs,)](*arguments, **options, **constants)


def tile_constants(tile: Tile) -> dict[str, int]:
    return dict(BLOCK_T=tile.rows, BLOCK_V=tile.columns, BLOCK_H=tile.depth, PARTS=tile.parts, GROUP=GROUP)


def rows_of(
    active: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    kept_state: Tensor | None,
    place: tuple[int, int, int],
    dlogprob: Tensor | None = None,
    dentropy: Tensor | None = None,
) -> Rows:
    """The active rows; with dlogprob only those through which a gradient flows. place: start, size, total."""
    length, device = target.shape[0], target.device
    rows = Rows(
        torch.zeros(length, dtype=torch.int32, device=device),
        torch.empty(length, dtype=torch.int32, device=device),
        torch.empty(length, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    given = (active, target, temperature, kept_state, dlogprob, dentropy)
    given = [None if x is None else x.contiguous() for x in given]
    launch(compact_kernel, 1, Tile(1, 1, 1, 1, 8, 1), *given, *place, length, *rows, BLOCK=4096)
    return rows


def forward(head: Head, rows: Rows, return_entropy: bool, expected: Tensor | None) -> tuple[Tensor, ...]:
    """largest, normaliser, weighted (or empty) and target_logit, [T]; fills `expected` [T, H] if it is given."""
    length, device = rows.index.shape[0], head.hidden.device
    outputs = (
        torch.zeros(length, device=device),
        torch.zeros(length, dtype=torch.float64, device=device),
        torch.zeros(length if return_entropy else 0, dtype=torch.float64, device=device),
        torch.zeros(length, device=device),
    )
    splits = triton.cdiv(head.weight.shape[0], head.config.forward_blocks * head.config.forward.columns)
    largest, normaliser, *weighted = (
        torch.empty(splits, ROWS, device=device) for _ in range(3 if return_entropy else 2)
    )
    sums = (largest, normaliser, weighted[0] if weighted else None)
    for first in range(0, length, ROWS):
        part, target_logit = rows.behind(first), torch.zeros(ROWS, device=device)
        if splits:  # a rank may hold no ids
            _sum_up(head, part, first, splits, (*sums, target_logit), expected)
        launch(
            combine_kernel,
            triton.cdiv(min(length - first, ROWS), 128),
            Tile(128, 1, 1, 1, 4, 1),
            part.index,
            part.count,
            first,
            part.inverse_temperature,
            splits,
            *sums,
            target_logit,
            *outputs[:2],
            outputs[2] if return_entropy else None,
            outputs[3],
            ROWS=ROWS,
            BLOCK_T=128,
        )
    return outputs


def _sum_up(
    head: Head,
    rows: Rows,
    first_row: int,
    splits: int,
    sums: tuple[Tensor | None, ...],
    expected: Tensor | None,
) -> None:
    """The sums of ROWS rows over each split of the vocabulary, chunk by chunk where `expected` needs probabilities."""
    tile = head.config.forward if expected is None else head.config.forward_probs
    blocks = head.config.forward_blocks
    most = min(rows.index.shape[0], ROWS)
    ids = head.chunk_ids(most, blocks * tile.columns)
    chunk = splits if expected is None else ids // (blocks * tile.columns)
    probs = tile_largest = before = None
    if expected is not None:
        probs = torch.empty(triton.cdiv(most, tile.rows) * tile.rows, ids, dtype=head.dtype, device=head.hidden.device)
        tile_largest = torch.empty(ids * tile.parts // tile.columns, ROWS, device=head.hidden.device)
        before = torch.full((ROWS,), -torch.inf, device=head.hidden.device)
    for first in range(0, splits, chunk):
        count = min(chunk, splits - first)
        launch(
            forward_kernel,
            triton.cdiv(most, tile.rows) * count,
            tile,
            head.hidden,
            head.hidden.stride(0),
            head.weight_tile(tile.columns, tile.depth),
            head.weight.stride(0),
            head.bias,
            rows.index,
            rows.count,
            first_row,
            rows.target,
            rows.inverse_temperature,
            head.softcap,
            *head.kept,
            first,
            count,
            *head.weight.shape,
            *sums,
            probs,
            ids,
            tile_largest,
            ROWS=ROWS,
            TILES=blocks,
            TMA=head.described,
            DTYPE=FACTOR[head.dtype],
            **tile_constants(tile),
        )
        if expected is not None:
            largest = torch.maximum(before, sums[0][first : first + count].amax(0))
            place = (first * blocks * tile.columns, (first + count) * blocks * tile.columns)
            _add_expected(head, rows, first_row, place, (probs, tile_largest, before, largest), expected)
            before = largest


def _add_expected(
    head: Head,
    rows: Rows,
    first_row: int,
    place: tuple[int, int],
    chunk: tuple[Tensor, Tensor, Tensor, Tensor],
    expected: Tensor,
) -> None:
    (probs, tile_largest, before, largest), hidden_size = chunk, head.weight.shape[1]
    tile, width = head.config.dhidden, head.config.forward.columns // head.config.forward.parts
    most, place = min(rows.index.shape[0], ROWS), (place[0], min(place[1], head.weight.shape[0]))
    launch(
        align_probs_kernel,
        triton.cdiv(most, 64) * triton.cdiv(place[1] - place[0], width),
        Tile(64, width, 1, 1, 4, 1),
        probs,
        probs.stride(0),
        rows.count,
        first_row,
        tile_largest,
        largest,
        *place,
        ROWS=ROWS,
        BLOCK_T=64,
        WIDTH=width,
    )
    launch(
        expected_kernel,
        triton.cdiv(most, tile.rows) * triton.cdiv(hidden_size, tile.columns),
        tile,
        TensorDescriptor.from_tensor(probs, [tile.rows, tile.depth]) if head.described else probs,
        probs.stride(0),
        head.weight_tile(tile.depth, tile.columns),
        head.weight.stride(0),
        rows.count,
        first_row,
        before,
        largest,
        expected[first_row:],
        *place,
        hidden_size,
        int(place[0] == 0),
        ROWS=ROWS,
        TMA=head.described,
        DTYPE=FACTOR[head.dtype],
        BLOCK_T=tile.rows,
        BLOCK_H=tile.columns,
        BLOCK_V=tile.depth,
        GROUP=GROUP,
    )


def dhidden_expected(
    weight: Tensor, rows: Rows, active: Tensor, expected: Tensor, scale: Tensor, dlogprob: Tensor, dtype: torch.dtype
) -> Tensor:
    """dhidden [T, H] from the expected weights of the forward pass; 0 in rows that are not listed."""
    weight, hidden_size = side_by_side(weight), expected.shape[1]
    dhidden = torch.zeros(expected.shape, dtype=dtype, device=expected.device)
    launch(
        dhidden_expected_kernel,
        triton.cdiv(expected.shape[0], 16) * triton.cdiv(hidden_size, 256),
        Tile(16, 256, 1, 1, 4, 1),
        weight,
        weight.stride(0),
        rows.index,
        rows.count,
        rows.target,
        rows.inverse_temperature,
        expected,
        active.cumsum(0) - 1,
        scale,
        dlogprob.contiguous(),
        dhidden,
        hidden_size,
        BLOCK_T=16,
        BLOCK_H=256,
    )
    return dhidden
