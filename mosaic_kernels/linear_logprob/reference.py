"""Plain PyTorch, differentiated by autograd, any dtype and device: the definition of `linear_logprob`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mosaic_kernels.linear_logprob.checks import check_values, usable_temperature
from mosaic_kernels.linear_logprob.collectives import VocabShard
from mosaic_kernels.linear_logprob.kept import lists_of

# Every GEMM has this many rows, the last one padded: how a GEMM rounds a row may depend on its number of rows.
CHUNK_ROWS = 256

# MKL chooses the code of each vector function at its first call, and when two threads make that call together one of
# them can get a version good to 1e-4 only (pytorch/pytorch#188792). One element is never shared between threads.
for _function in (torch.exp, torch.log, torch.tanh):
    for _dtype in (torch.float32, torch.float64):
        _function(torch.ones(1, dtype=_dtype))


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    active: Tensor,
    return_entropy: bool,
    kept: tuple[Tensor, Tensor] | None,
    grad_filter: bool,
    shard: VocabShard,
) -> tuple[Tensor, Tensor | None]:
    """logprob [T] and entropy [T] or None; 0 outside `active`."""
    if grad_filter:
        raise NotImplementedError(
            "linear_logprob: the reference leaves nothing out of a gradient: pass grad_filter=False, or tensors that a "
            f"compiled backend takes (hidden is {hidden.dtype} on {hidden.device}, weight {weight.dtype})"
        )
    compiling = torch.compiler.is_compiling()
    if not compiling and hidden.device.type == "cpu":
        check_values(target, active, temperature, kept, int(shard.total))
    dtype = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    # one copy each, outside the chunks: their gradients add up in `dtype` and are rounded once, by the copy's backward
    head = (weight.to(dtype), None if bias is None else bias.to(dtype))
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(dtype)
    elif temperature != 1.0:
        # by a product: torch.compile would compile torch.full anew for each temperature
        temperature = torch.ones(target.shape, dtype=dtype, device=target.device) * temperature
    else:
        temperature = None
    score = _score_in_place if compiling else _score_chunks
    outputs = score(hidden, head, target.to(torch.int64), temperature, kept, active, (softcap, return_entropy, shard))
    return outputs[0], outputs[1] if return_entropy else None


def _score_chunks(hidden, head, target, temperature, kept, active, options) -> list[Tensor]:
    """[T] outputs: the active rows are gathered, scored chunk by chunk, and put back."""
    index = active.nonzero().flatten()
    count = index.shape[0]
    # repeating the last row pads without bringing in a value that the batch has not
    rows = torch.cat([index, index[-1:].expand(-count % CHUNK_ROWS)])
    shard = options[-1]
    compact = shard.replicated(hidden[rows].to(head[0].dtype))
    ids, offsets = (None, None) if kept is None else lists_of(rows, *kept)
    parts = []
    for at in range(0, max(count, 1), CHUNK_ROWS):  # one empty chunk if no row is active: zero gradients, not None
        chunk = rows[at : at + CHUNK_ROWS]
        lists = None
        if offsets is not None:
            bounds = offsets[at : at + CHUNK_ROWS + 1]
            lists = (ids[bounds[0] : bounds[-1]], bounds - bounds[0])
        arguments = (
            compact[at : at + CHUNK_ROWS],
            *head,
            target[chunk],
            None if temperature is None else temperature[chunk],
            lists,
            *options,
        )
        parts.append(checkpoint(_score_rows, *arguments, use_reentrant=False, preserve_rng_state=False))
    zeros = compact.new_zeros(target.shape)
    return [zeros.index_copy(0, index, torch.cat(part)[:count]) for part in zip(*parts)]


def _score_in_place(hidden, head, target, temperature, kept, active, options) -> list[Tensor]:
    """[T] outputs with shapes known beforehand, for torch.compile: inactive rows are blanked, scored and dropped."""
    hidden = options[-1].replicated(torch.where(active[:, None], hidden, 0).to(head[0].dtype))
    target = torch.where(active, target, 0)
    temperature = None if temperature is None else torch.where(active, temperature, 1.0)
    outputs = _score_rows(hidden, *head, target, temperature, kept, *options, active=active)
    return [torch.where(active, output, 0.0) for output in outputs]


def _score_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: Tensor | None,
    kept: tuple[Tensor, Tensor] | None,
    softcap: float | None,
    return_entropy: bool,
    shard: VocabShard,
    active: Tensor | None = None,
) -> list[Tensor]:
    """The outputs of the rows given, from their logits [rows, local V]; `active` None means all."""
    with torch.autocast(hidden.device.type, enabled=False):  # the promise is float32, whatever surrounds the call
        logits = F.linear(hidden, weight, bias)
    valid = (target >= 0) & (target < shard.total)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature is not None:
        logits = logits / temperature[:, None]
        valid = valid & usable_temperature(temperature)
    size = weight.shape[0]
    owned = (target >= shard.start) & (target < shard.start + size)
    column = torch.where(owned, target - shard.start, size)
    if kept is not None:
        keep, kept_valid = _keep_mask(kept, column, size, shard, active)
        logits = torch.where(keep, logits, -torch.inf)
        valid = valid & kept_valid

    # Any shift gives the same result, so it is a constant. A row of -inf only (on one rank, say) is shifted by 0.
    largest = logits.detach().amax(dim=1) if size else logits.new_full(target.shape, -torch.inf)
    largest = shard.max(largest)
    shifted = logits - torch.where(largest == -torch.inf, 0.0, largest)[:, None]
    unnormalised = shifted.exp()
    of_target = shifted.gather(1, column.clamp(max=size - 1)[:, None])[:, 0] if size else shifted.sum(dim=1)
    sums = [unnormalised.sum(dim=1), torch.where(owned, of_target, 0.0)]
    if return_entropy:
        # p log p is 0 at p = 0, where the product would be 0 * inf
        sums.append((unnormalised * torch.where(shifted == -torch.inf, 0.0, shifted)).sum(dim=1))
    normaliser, of_target, *weighted = shard.sum(torch.stack(sums))
    log_normaliser = normaliser.log()
    outputs = [of_target - log_normaliser]
    if return_entropy:
        outputs.append(log_normaliser - weighted[0] / normaliser)
    return [torch.where(valid, output, torch.nan) for output in outputs]


def _keep_mask(
    kept: tuple[Tensor, Tensor], target_column: Tensor, size: int, shard: VocabShard, active: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Which local ids each row is normalised over [rows, local V], and whether all of its kept ids exist [rows]."""
    ids, offsets = kept
    rows = target_column.shape[0]
    place = torch.arange(ids.shape[0], device=ids.device)
    row_of_id = torch.searchsorted(offsets.contiguous(), place.to(offsets.dtype), right=True) - 1
    local = (ids >= shard.start) & (ids < shard.start + size)
    keep = torch.zeros(rows, size + 1, dtype=torch.bool, device=ids.device)  # the last column takes other ranks' ids
    keep[row_of_id, torch.where(local, ids - shard.start, size)] = True
    keep[torch.arange(rows, device=ids.device), target_column] = True
    whole = offsets.diff() == 0
    if active is not None:
        whole = whole | ~active
    outside = ((ids < 0) | (ids >= shard.total)).to(torch.int32)
    faults = torch.zeros(rows, dtype=torch.int32, device=ids.device).index_add(0, row_of_id, outside)
    return keep[:, :size] | whole[:, None], whole | (faults == 0)
