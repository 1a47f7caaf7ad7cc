"""The calls of `linear_logprob` whose kernels are inspected, and the floors that their tiles were argued from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mosaic_kernels.linear_logprob import triton

ROWS, HIDDEN, VOCAB = 300, 512, 8192


def _call(
    dtype: torch.dtype,
    *,
    everything: bool = False,
    expected: bool = False,
    grad_filter: bool = False,
    described: bool = True,
    backward: bool = True,
) -> None:
    """Both passes, as autograd calls them. everything: bias, softcap, temperature, kept ids and entropy."""
    width = HIDDEN if described else HIDDEN + 1  # a tensor descriptor wants rows on 16-byte boundaries
    hidden = torch.zeros(ROWS, HIDDEN, dtype=dtype)
    weight = torch.zeros(VOCAB, width, dtype=dtype)[:, :HIDDEN]
    target, active = torch.zeros(ROWS, dtype=torch.int64), torch.ones(ROWS, dtype=torch.bool)
    bias, temperature, softcap, lists = None, None, None, (None, None, None)
    if everything:
        bias, temperature = torch.zeros(VOCAB, dtype=dtype), torch.ones(ROWS)
        kept = (torch.zeros(ROWS, dtype=torch.int64), torch.arange(ROWS + 1))
        lists = triton.kept_lists(*kept, target, active, 0, VOCAB, VOCAB)
        softcap = None if expected else torch.ones(())
    call = (hidden, weight, bias, target, active, temperature, softcap, *lists, 0, VOCAB)
    ones = torch.ones(ROWS)
    if expected:
        *_, sums = triton.forward_expected(*call)
        triton.backward_expected(weight, target, active, temperature, lists[2], 0, VOCAB, sums, ones, ones, dtype)
        return
    triton.forward(*call, everything)
    if backward:
        above = (ones, ones, ones, ones, ones) if everything else (ones, ones, None, ones, None)
        triton.backward(*call, *above, grad_filter, dtype, True, bias is not None)


CALLS: dict[str, Callable[[], Any]] = {
    "bf16": partial(_call, torch.bfloat16),
    "bf16, every option": partial(_call, torch.bfloat16, everything=True),
    "bf16, frozen head": partial(_call, torch.bfloat16, expected=True),
    "bf16, frozen head, every option": partial(_call, torch.bfloat16, expected=True, everything=True),
    "bf16, grad_filter": partial(_call, torch.bfloat16, grad_filter=True),
    "bf16, weight off 16-byte boundaries": partial(_call, torch.bfloat16, described=False, everything=True),
    "fp16": partial(_call, torch.float16),
    "fp32": partial(_call, torch.float32),
    "fp32, frozen head": partial(_call, torch.float32, expected=True),
}
# Kernels whose time is that of their matrix products
PRODUCTS = ("forward_kernel", "dlogit_kernel", "dweight_kernel", "dhidden_kernel", "expected_kernel")


@dataclass(frozen=True)
class Chip:
    """Published peaks: dense bf16 FLOP/s, and bytes/s of memory."""

    flops: float
    bandwidth: float


CHIPS = {"A100": Chip(312e12, 2.04e12), "H100": Chip(989e12, 3.35e12), "H200": Chip(989e12, 4.8e12)}


@dataclass(frozen=True)
class Floor:
    """What a pass cannot do without: `products` of 2 T H V FLOPs, and the bytes that must cross the memory once."""

    what: str
    rows: int
    hidden_size: int
    vocab: int
    products: int
    bytes: float

    @property
    def flops(self) -> float:
        return 2.0 * self.products * self.rows * self.hidden_size * self.vocab

    def milliseconds(self, chip: Chip) -> float:
        """A prediction: the longer of the matrix units' time and the memory's, both at their published peaks."""
        return 1e3 * max(self.flops / chip.flops, self.bytes / chip.bandwidth)


def _floors(rows: int, hidden_size: int, vocab: int) -> list[Floor]:
    """bf16. Chunks of 16384 dlogits are written once and read twice; float32 sums of dhidden are read and written.

    With a frozen head chunks of probabilities are written twice and read twice, and the sums are those of the weight.
    """
    weight, hidden, sums = 2 * vocab * hidden_size, 2 * rows * hidden_size, 4 * rows * hidden_size
    chunks = -(-vocab // 16384)
    once, logits = weight + hidden, 2 * rows * vocab
    sizes = (rows, hidden_size, vocab)
    return [
        Floor("forward", *sizes, 1, once),
        Floor("forward and backward", *sizes, 4, 4 * once + weight + hidden + 3 * logits + 2 * chunks * sums),
        Floor("forward and backward, frozen head", *sizes, 2, 2 * once + 4 * logits + 2 * chunks * sums),
    ]


FLOORS = [*_floors(8192, 4096, 131072), *_floors(2048, 576, 49152)]
