"""The Triton kernels of `linear_logprob` as torch.library ops. Semantics of the arguments: cpu.py.

Hidden rows are read where they lie; nothing waits for the device. The kernels are imported at the first call, so that
the package needs no triton.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mosaic_kernels._backend import TRITON_INTERPRETED, available_backends
from mosaic_kernels.linear_logprob.checks import check_values
from mosaic_kernels.linear_logprob.cpu import filter_threshold

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INVALID, _WHOLE = 2, 1  # states of a row's list of kept ids

_library = torch.library.Library("mosaic_kernels", "FRAGMENT")
_library.define(
    "linear_logprob_triton_kept(Tensor ids, Tensor offsets, Tensor target, Tensor active, SymInt start, SymInt size, "
    "SymInt total) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "linear_logprob_triton_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor active, "
    "Tensor? temperature, Tensor? softcap, Tensor? kept, Tensor? kept_offsets, Tensor? kept_state, SymInt start, "
    "SymInt total, bool return_entropy, bool expected) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "linear_logprob_triton_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor active, "
    "Tensor? temperature, Tensor? softcap, Tensor? kept, Tensor? kept_offsets, Tensor? kept_state, SymInt start, "
    "SymInt total, Tensor largest, Tensor log_normaliser, Tensor? entropy, Tensor? dlogprob, Tensor? dentropy, "
    "bool grad_filter, ScalarType? dhidden, bool dweight, bool dbias) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "linear_logprob_triton_backward_expected(Tensor weight, Tensor target, Tensor active, Tensor? temperature, "
    "Tensor? kept_state, SymInt start, SymInt total, Tensor expected, Tensor scale, Tensor dlogprob, "
    "ScalarType dhidden) -> Tensor"
)

_ops = torch.ops.mosaic_kernels
kept_lists = _ops.linear_logprob_triton_kept
backward = _ops.linear_logprob_triton_backward
backward_expected = _ops.linear_logprob_triton_backward_expected


def forward(*call: Any) -> tuple[Tensor, ...]:
    return _ops.linear_logprob_triton_forward(*call, False)[:4]


def forward_expected(*call: Any) -> tuple[Tensor, ...]:
    """The statistics of `forward`, bit by bit, and the expected weights [T, H] that `backward_expected` needs."""
    return _ops.linear_logprob_triton_forward(*call, False, True)


def supports(hidden: Tensor, weight: Tensor) -> str:
    if (reason := available_backends()["triton"]) != "available":
        return reason
    if hidden.device.type != "cuda" and not (TRITON_INTERPRETED and hidden.device.type == "cpu"):
        return f"the tensors are on {hidden.device}"
    for name, x in (("hidden", hidden), ("weight", weight)):
        if x.dtype == torch.float64:
            return f"it returns float32, and {name} asks for float64: use backend='reference'"
        if x.dtype not in _DTYPES:
            return f"it takes float32, bfloat16 and float16, and {name} is {x.dtype}"
    return ""


def _kept_lists(
    ids: Tensor, offsets: Tensor, target: Tensor, active: Tensor, start: int, size: int, total: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kept.sorted_lists`, but nothing waits for the device: ids may stand in a list twice, and are int32.

    The third result is 1 for a row that keeps the whole vocabulary, and 2 for one with a kept id that means nothing.
    """
    if ids.device.type == "cpu":
        check_values(target, active, 1.0, (ids, offsets), total)
    rows, ids = target.shape[0], ids.to(torch.int64)
    whole = (offsets.diff() == 0) | ~active
    outside = F.pad(((ids < 0) | (ids >= total)).cumsum(0), (1, 0))
    invalid = ~whole & (outside[offsets[1:]] != outside[offsets[:-1]])
    every_row = torch.arange(rows, device=ids.device)
    row = torch.cat([torch.repeat_interleave(every_row, offsets.diff(), output_size=ids.shape[0]), every_row])
    local = torch.cat([ids, target]) - start
    here = ~whole[row] & (local >= 0) & (local < size)
    stride = max(size, 1)
    place = torch.where(here, row * stride + local, torch.iinfo(torch.int64).max).sort().values
    bounds = torch.searchsorted(place, torch.arange(rows + 1, device=ids.device) * stride)
    state = torch.where(invalid, _INVALID, torch.where(whole, _WHOLE, 0)).to(torch.uint8)
    return (place % stride).to(torch.int32), bounds, state


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
    kept_state: Tensor | None,
    start: int,
    total: int,
    return_entropy: bool,
    expected: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """largest, normaliser, weighted (or empty) and target_logit [T] as in cpu.py, and expected [T, H] (or empty).

    expected = sum over the ids here of exp(x - largest) weight, float32, for the active rows in their order; the rest
    is not written.
    """
    from mosaic_kernels.linear_logprob import triton_launch

    if hidden.device.type == "cpu":
        check_values(target, active, 1.0 if temperature is None else temperature, None, total)
    size, hidden_size = weight.shape
    of_head = torch.empty(hidden.shape[0] if expected else 0, hidden_size, device=hidden.device)
    with _on(hidden):
        rows = triton_launch.rows_of(active, target, temperature, kept_state, (start, size, total))
        head = triton_launch.Head.of(hidden, weight, bias, softcap, kept, kept_offsets, kept_state)
        statistics = triton_launch.forward(head, rows, return_entropy, of_head if expected else None)
    return *statistics, of_head


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
    kept_state: Tensor | None,
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
    from mosaic_kernels.linear_logprob import triton_gradients, triton_launch

    if dlogprob is None:
        dlogprob = torch.zeros_like(largest)
    above = triton_gradients.Above(
        largest,
        log_normaliser,
        None if dentropy is None else entropy,
        dlogprob.contiguous(),
        None if dentropy is None else dentropy.contiguous(),
    )
    place = (start, weight.shape[0], total)
    with _on(hidden):
        # A row whose gradient from above is 0 adds nothing, whatever it holds.
        rows = triton_launch.rows_of(active, target, temperature, kept_state, place, above.dlogprob, above.dentropy)
        head = triton_launch.Head.of(hidden, weight, bias, softcap, kept, kept_offsets, kept_state)
        threshold = filter_threshold(hidden, weight, total) if grad_filter else None
        return triton_gradients.backward(head, rows, above, threshold, dhidden, dweight, dbias)


def _backward_expected(
    weight: Tensor,
    target: Tensor,
    active: Tensor,
    temperature: Tensor | None,
    kept_state: Tensor | None,
    start: int,
    total: int,
    expected: Tensor,
    scale: Tensor,
    dlogprob: Tensor,
    dhidden: torch.dtype,
) -> Tensor:
    """dhidden [T, H] = dlogprob (weight[target] - scale expected) / temperature, of the dtype given."""
    from mosaic_kernels.linear_logprob import triton_launch

    with _on(weight):
        place = (start, weight.shape[0], total)
        rows = triton_launch.rows_of(active, target, temperature, kept_state, place, dlogprob)
        return triton_launch.dhidden_expected(weight, rows, active, expected, scale, dlogprob, dhidden)


def _on(x: Tensor) -> Any:
    """The device that kernels are launched on."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _fake_kept_lists(ids: Tensor, offsets: Tensor, target: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = target.shape[0]
    return (
        ids.new_empty(ids.shape[0] + rows, dtype=torch.int32),
        ids.new_empty(rows + 1, dtype=torch.int64),
        ids.new_empty(rows, dtype=torch.uint8),
    )


def _fake_forward(hidden: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    rows, (return_entropy, expected) = hidden.shape[0], arguments[-2:]
    return (
        hidden.new_empty(rows, dtype=torch.float32),
        hidden.new_empty(rows, dtype=torch.float64),
        hidden.new_empty(rows if return_entropy else 0, dtype=torch.float64),
        hidden.new_empty(rows, dtype=torch.float32),
        hidden.new_empty(rows if expected else 0, hidden.shape[1], dtype=torch.float32),
    )


def _fake_backward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    dhidden, dweight, dbias = arguments[-3:]
    return (
        hidden.new_empty(hidden.shape[0] if dhidden else 0, hidden.shape[1], dtype=dhidden or torch.float32),
        weight.new_empty(weight.shape[0] if dweight else 0, weight.shape[1]),
        weight.new_empty(weight.shape[0] if dbias else 0, dtype=weight.dtype if bias is None else bias.dtype),
    )


def _fake_backward_expected(weight: Tensor, *arguments: Any) -> Tensor:
    expected, dhidden = arguments[-4], arguments[-1]
    return expected.new_empty(expected.shape, dtype=dhidden)


for _name, _kernel, _fake in (
    ("kept", _kept_lists, _fake_kept_lists),
    ("forward", _forward, _fake_forward),
    ("backward", _backward, _fake_backward),
    ("backward_expected", _backward_expected, _fake_backward_expected),
):
    for _key in ("CUDA", "CPU"):  # on the CPU by Triton's interpreter
        _library.impl(f"linear_logprob_triton_{_name}", _kernel, _key)
    torch.library.register_fake(f"mosaic_kernels::linear_logprob_triton_{_name}", _fake, lib=_library)
