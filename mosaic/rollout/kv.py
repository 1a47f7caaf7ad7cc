"""Keys and values during generation: the rows being decoded, and the sequences kept between turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Slots added at a time when a row outgrows its buffer.
GROWTH = 256


class RowBuffers:
    """Keys and values of B rows in preallocated buffers, where a token's slot is its position.

    Rows start at slot 0 whatever their length, so that neither a prefix copied from elsewhere nor a neighbour's length
    moves a position. It stands in for a transformers cache: attention layers call `update`. Slots past a row's end are
    zero or of the same row's past, thus finite, and the attention mask hides them.
    """

    def __init__(self, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        self.keys: list[Tensor] = []  # one [B, Hkv, capacity, D] a layer, made when the layer first writes
        self.values: list[Tensor] = []
        self._row: int | None = None
        self._slots = self._visible = slice(0)
        self._at: tuple[Tensor, Tensor] | None = None

    def write_row(self, row: int, start: int, end: int) -> None:
        """The next forward holds tokens [start, end) of one row."""
        self._reserve(end)
        self._row, self._slots, self._visible = row, slice(start, end), slice(0, end)

    def write_last(self, positions: Tensor) -> None:
        """The next forward holds one token, at its position, of each of the first len(positions) rows."""
        end = 1 + int(positions.max())
        self._reserve(end)
        self._row, self._visible = None, slice(0, end)
        self._at = torch.arange(len(positions), device=positions.device), positions

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values [b, Hkv, q, D] and returns all that its queries may see."""
        if layer_idx == len(self.keys):
            for buffers, x in ((self.keys, key), (self.values, value)):
                buffers.append(x.new_zeros(self.rows, x.shape[1], self.capacity, x.shape[3]))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._row is not None:
            keys[self._row, :, self._slots], values[self._row, :, self._slots] = key[0], value[0]
            rows = slice(self._row, self._row + 1)
        else:
            row, at = self._at
            keys[row, :, at], values[row, :, at] = key[:, :, 0], value[:, :, 0]
            rows = slice(len(row))
        return keys[rows, :, self._visible], values[rows, :, self._visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._visible.stop

    def read(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Views of the first `length` slots of a row, (key, value) [Hkv, length, D] a layer."""
        return [
            (keys[row, :, :length], values[row, :, :length])
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def load(self, row: int, length: int, source: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Fills the first `length` slots of a row from `source`, as `read` gives it."""
        self._reserve(length)
        for layer, (key, value) in enumerate(source):
            if layer == len(self.keys):
                for buffers, x in ((self.keys, key), (self.values, value)):
                    buffers.append(x.new_zeros(self.rows, x.shape[0], self.capacity, x.shape[2]))
            self.keys[layer][row, :, :length] = key[:, :length]
            self.values[layer][row, :, :length] = value[:, :length]

    def move(self, source: int, target: int) -> None:
        """Copies a whole row over another, its empty slots too: the target may have held NaN there."""
        for buffer in (*self.keys, *self.values):
            buffer[target] = buffer[source]

    def _reserve(self, slots: int) -> None:
        if slots <= self.capacity:
            return
        more = -(-(slots - self.capacity) // GROWTH) * GROWTH
        self.capacity += more
        for buffers in (self.keys, self.values):
            buffers[:] = [functional.pad(x, (0, 0, 0, more)) for x in buffers]


@dataclass(frozen=True)
class _Kept:
    token_ids: list[int]
    layers: list[tuple[Tensor, Tensor]]


class PrefixCache:
    """Finished sequences with their keys and values, least recently used first out.

    Args:
        max_tokens: most tokens kept, over all sequences; 0 keeps nothing.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._kept: list[_Kept] = []  # least recently used first

    @property
    def num_tokens(self) -> int:
        return sum(len(kept.token_ids) for kept in self._kept)

    def longest(self, token_ids: list[int]) -> tuple[int, list[tuple[Tensor, Tensor]]]:
        """How many leading tokens of `token_ids` some kept sequence shares, and that sequence's layers."""
        lengths = [common_prefix(token_ids, kept.token_ids) for kept in self._kept]
        best = max(lengths, default=0)
        if best == 0:
            return 0, []
        kept = self._kept.pop(lengths.index(best))
        self._kept.append(kept)
        return best, kept.layers

    def keep(self, token_ids: list[int], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies a sequence in; what it extends goes, and the least recently used as far as room is needed."""
        if len(token_ids) > self.max_tokens:
            return
        if any(common_prefix(token_ids, kept.token_ids) == len(token_ids) for kept in self._kept):
            return
        self._kept = [k for k in self._kept if common_prefix(token_ids, k.token_ids) < len(k.token_ids)]
        self._kept.append(_Kept(list(token_ids), [(key.clone(), value.clone()) for key, value in layers]))
        while self.num_tokens > self.max_tokens:
            self._kept.pop(0)

    def clear(self) -> None:
        self._kept.clear()


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading entries two lists share.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection over slices: they compare in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
