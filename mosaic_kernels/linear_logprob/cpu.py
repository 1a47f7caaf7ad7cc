"""The compiled CPU kernels of `linear_logprob` as torch.library ops.

Each op gathers the rows that count before a kernel starts and puts the results back, so that all shapes are known to
torch.compile. Targets and kept ids are global; `start` and `total` place this rank's rows in the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mosaic_kernels._backend import extension
from mosaic_kernels._cpu import ELEMENT_TYPES, address, refusal
from mosaic_kernels.linear_logprob.checks import check_values
from mosaic_kernels.linear_logprob.kept import lists_of, sorted_lists

_library = torch.library.Library("mosaic_kernels", "FRAGMENT")
_library.define(
    "linear_logprob_kept(Tensor ids, Tensor offsets, Tensor target, Tensor active, SymInt start, SymInt size, "
    "SymInt total) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "linear_logprob_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor active, "
    "Tensor? temperature, Tensor? softcap, Tensor? kept, Tensor? kept_offsets, Tensor? kept_whole, SymInt start, "
    "SymInt total, bool return_entropy) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "linear_logprob_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor active, "
    "Tensor? temperature, Tensor? softcap, Tensor? kept, Tensor? kept_offsets, Tensor? kept_whole, SymInt start, "
    "SymInt total, Tensor largest, Tensor log_normaliser, Tensor? entropy, Tensor? dlogprob, Tensor? dentropy, "
    "bool grad_filter, ScalarType? dhidden, bool dweight, bool dbias) -> (Tensor, Tensor, Tensor)"
)

kept_lists = torch.ops.mosaic_kernels.linear_logprob_kept
forward = torch.ops.mosaic_kernels.linear_logprob_forward
backward = torch.ops.mosaic_kernels.linear_logprob_backward


def supports(hidden: Tensor, weight: Tensor) -> str:
    return refusal(in_place=True, hidden=hidden, weight=weight)


def filter_threshold(hidden: Tensor, weight: Tensor, total: int) -> float:
    """The probability below which `grad_filter` drops a tile: what a row can lose sums to less than one eps."""
    return min(torch.finfo(hidden.dtype).eps, torch.finfo(weight.dtype).eps) / max(total, 1)


def _kept_lists(
    ids: Tensor, offsets: Tensor, target: Tensor, active: Tensor, start: int, size: int, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    check_values(target, active, 1.0, (ids, offsets), total)
    return sorted_lists(ids, offsets, target, active, start, size)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    active: Tensor,
    temperature: Tensor | None,
    softcap: Tensor | None,
    kept: Tensor | None,
    kept_offsets: Tensor | None,
    kept_whole: Tensor | None,
    start: int,
    total: int,
    return_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """largest, normaliser, weighted (or empty) and target_logit of csrc/linear_logprob.h, [T] each."""
    check_values(target, active, 1.0 if temperature is None else temperature, None, total)
    row = active.nonzero().flatten()
    rows, vocab_size = row.shape[0], weight.shape[0]
    # dtypes are always named, and devices taken from a tensor: the defaults are the user's to change
    largest = hidden.new_empty(rows, dtype=torch.float32)
    normaliser = hidden.new_empty(rows, dtype=torch.float64)
    weighted = hidden.new_empty(rows if return_entropy else 0, dtype=torch.float64)
    target_logit = hidden.new_empty(rows, dtype=torch.float32)
    if rows and vocab_size:
        inputs, _alive = _inputs(
            hidden, weight, bias, row, target, temperature, softcap, kept, kept_offsets, kept_whole, start
        )
        extension.linear_logprob_forward(
            inputs,
            largest=largest.data_ptr(),
            normaliser=normaliser.data_ptr(),
            weighted=weighted.data_ptr() if return_entropy else 0,
            target_logit=target_logit.data_ptr(),
        )
    else:  # no row, or a rank that holds no ids
        largest.fill_(-torch.inf)
        for x in (normaliser, weighted, target_logit):
            x.zero_()
    size = target.shape[0]
    return (
        _spread(largest, row, size),
        _spread(normaliser, row, size),
        _spread(weighted, row, size) if return_entropy else weighted,
        _spread(target_logit, row, size),
    )


def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    active: Tensor,
    temperature: Tensor | None,
    softcap: Tensor | None,
    kept: Tensor | None,
    kept_offsets: Tensor | None,
    kept_whole: Tensor | None,
    start: int,
    total: int,
    largest: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor | None,
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    grad_filter: bool,
    dhidden: torch.dtype | None,
    dweight: bool,
    dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients wanted, the others empty; dhidden [T, H] of the dtype given."""
    if dlogprob is None:
        dlogprob = torch.zeros_like(largest)
    # A row whose gradient from above is 0 adds nothing, whatever it holds: clipped tokens and zero advantages are free.
    row = (active & ((dlogprob != 0) if dentropy is None else (dlogprob != 0) | (dentropy != 0))).nonzero().flatten()
    rows, (vocab_size, hidden_size) = row.shape[0], weight.shape
    dhidden_rows = hidden.new_empty(rows if dhidden else 0, hidden_size, dtype=torch.float32)
    dweight_out = weight.new_empty(vocab_size if dweight else 0, hidden_size)
    dbias_out = weight.new_empty(vocab_size if dbias else 0, dtype=torch.float32)
    if rows and vocab_size:
        inputs, _alive = _inputs(
            hidden, weight, bias, row, target, temperature, softcap, kept, kept_offsets, kept_whole, start
        )
        statistics = [None if x is None else x[row] for x in (largest, log_normaliser, entropy, dlogprob, dentropy)]
        addresses = [address(x) for x in statistics]
        if dentropy is None:
            addresses[2] = 0
        extension.linear_logprob_backward(
            inputs,
            largest=addresses[0],
            log_normaliser=addresses[1],
            entropy=addresses[2],
            dlogprob=addresses[3],
            dentropy=addresses[4],
            filter=filter_threshold(hidden, weight, total) if grad_filter else 0.0,
            dhidden=dhidden_rows.data_ptr() if dhidden else 0,
            dweight=dweight_out.data_ptr() if dweight else 0,
            dbias=dbias_out.data_ptr() if dbias else 0,
        )
    else:
        for x in (dhidden_rows, dweight_out, dbias_out):
            x.zero_()
    return (
        _spread(dhidden_rows, row, hidden.shape[0], dhidden) if dhidden else dhidden_rows,
        dweight_out,
        dbias_out if bias is None else dbias_out.to(bias.dtype),
    )


def _inputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    softcap: Tensor | None,
    kept: Tensor | None,
    kept_offsets: Tensor | None,
    kept_whole: Tensor | None,
    start: int,
) -> tuple[Any, list[Tensor | None]]:
    """The kernels' description of the call, and the tensors that it points into."""
    vocab_size, hidden_size = weight.shape
    at = row
    if not _side_by_side(hidden):
        hidden, at = hidden.index_select(0, row), torch.arange(row.shape[0], device=row.device)
    if not _side_by_side(weight):
        weight = weight.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    local = target[row] - start
    local = torch.where((local >= 0) & (local < vocab_size), local, -1)
    temperature = None if temperature is None else temperature[row]
    if kept is not None:
        kept, kept_offsets = lists_of(row, kept, kept_offsets)
        kept_whole = kept_whole[row]
    inputs = extension.LogprobInputs(
        hidden=hidden.data_ptr(),
        hidden_stride=hidden.stride(0),
        hidden_type=getattr(extension.ElementType, ELEMENT_TYPES[hidden.dtype]),
        weight=weight.data_ptr(),
        weight_stride=weight.stride(0),
        weight_type=getattr(extension.ElementType, ELEMENT_TYPES[weight.dtype]),
        bias=address(bias),
        row=at.data_ptr(),
        target=local.data_ptr(),
        temperature=address(temperature),
        softcap=0.0 if softcap is None else softcap.item(),
        kept=address(kept),
        kept_offsets=address(kept_offsets),
        kept_whole=address(kept_whole),
        num_rows=row.shape[0],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        threads=torch.get_num_threads(),
    )
    return inputs, [hidden, weight, bias, at, local, temperature, kept, kept_offsets, kept_whole]


def _side_by_side(x: Tensor) -> bool:
    """Whether the elements of each row of `x` are adjacent, as the kernels need them."""
    return x.stride(1) == 1 or x.shape[1] <= 1


def _spread(x: Tensor, row: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """`x`, of `row`, among zeros for the other of `rows` rows; in `dtype`."""
    x = x.to(dtype or x.dtype)
    return x if row.shape[0] == rows else x.new_zeros(rows, *x.shape[1:]).index_copy_(0, row, x)


def _fake_kept_lists(ids: Tensor, offsets: Tensor, target: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = target.shape[0]
    longest = ids.shape[0] + rows
    return (
        ids.new_empty(longest, dtype=torch.int64),
        ids.new_empty(rows + 1, dtype=torch.int64),
        ids.new_empty(rows, dtype=torch.bool),
    )


def _fake_forward(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, return_entropy = hidden.shape[0], arguments[-1]
    return (
        hidden.new_empty(rows, dtype=torch.float32),
        hidden.new_empty(rows, dtype=torch.float64),
        hidden.new_empty(rows if return_entropy else 0, dtype=torch.float64),
        hidden.new_empty(rows, dtype=torch.float32),
    )


def _fake_backward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    dhidden, dweight, dbias = arguments[-3:]
    return (
        hidden.new_empty(hidden.shape[0] if dhidden else 0, hidden.shape[1], dtype=dhidden or torch.float32),
        weight.new_empty(weight.shape[0] if dweight else 0, weight.shape[1]),
        weight.new_empty(weight.shape[0] if dbias else 0, dtype=torch.float32 if bias is None else bias.dtype),
    )


for _name, _kernel, _fake in (
    ("linear_logprob_kept", _kept_lists, _fake_kept_lists),
    ("linear_logprob_forward", _forward, _fake_forward),
    ("linear_logprob_backward", _backward, _fake_backward),
):
    _library.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"mosaic_kernels::{_name}", _fake, lib=_library)
