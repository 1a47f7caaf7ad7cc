"""What the tests of `linear_logprob` share: its definition spelt out, random inputs, and every implementation of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from mosaic_kernels._backend import extension
from mosaic_kernels.testing import instruction_set, instruction_sets, runnable

# The last set once more with its dot products of bfloat16, which are on by themselves on AMD's processors only.
CPU_VARIANTS = instruction_sets()
if "avx512_bf16" in CPU_VARIANTS:
    CPU_VARIANTS.append("avx512_bf16+dot")


@contextmanager
def cpu_variant(name: str) -> Iterator[None]:
    """Inside, backend "cpu" runs as `name`, one of CPU_VARIANTS, says; without dot products unless it names them."""
    chosen, _, dot = name.partition("+")
    before = extension.bfloat16_dot()
    with instruction_set(chosen):
        extension.use_bfloat16_dot(bool(dot))
        try:
            yield
        finally:
            extension.use_bfloat16_dot(before)


@pytest.fixture(name="backend", params=[*runnable("reference", "triton"), *(f"cpu {name}" for name in CPU_VARIANTS)])
def every_backend(request) -> Iterator[str]:
    """Every backend; "cpu" once in each of its variants."""
    name, _, variant = request.param.partition(" ")
    if not variant:
        yield name
        return
    with cpu_variant(variant):
        yield name


def dense(hidden, weight, target, bias=None, temperature=1.0, softcap=None, kept=None) -> tuple[Tensor, Tensor]:
    """logprob and entropy [T] of the definition, with the full logits, in the inputs' dtype."""
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    if kept is not None:
        ids, offsets = kept
        for row in range(len(target)):
            if chosen := ids[offsets[row] : offsets[row + 1]].tolist():
                dropped = sorted(set(range(weight.shape[0])) - {*chosen, int(target[row])})
                blank = torch.zeros_like(logits, dtype=torch.bool)
                blank[row, dropped] = True
                logits = logits.masked_fill(blank, -torch.inf)
    logp = logits.log_softmax(dim=1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(dim=1)
    return logp[torch.arange(len(target)), target], entropy


def sample(rows: int, hidden_size: int, vocab: int, dtype=torch.float64, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "hidden": randn(rows, hidden_size).to(dtype),
        "weight": randn(vocab, hidden_size).to(dtype),
        "bias": randn(vocab).to(dtype),
        "target": torch.randint(vocab, (rows,), generator=generator),
    }


def some_kept(rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Kept lists of 0, 1, 2, ... ids, with duplicates."""
    lengths = torch.arange(rows) % 5
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (int(lengths.sum()),), generator=generator)
    return ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
