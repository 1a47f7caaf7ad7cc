"""The one autograd.Function under which every compiled backend of `linear_logprob` runs."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mosaic_kernels.linear_logprob.collectives import VocabShard


def linear_logprob(
    backend: ModuleType,
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
    """logprob [T] and entropy [T] or None, float32; 0 outside `active`.

    A backend has `kept_lists`, `forward` and `backward`, whose arguments are those of the ops in cpu.py. It may have
    `forward_expected` and `backward_expected`, a shorter way where dhidden is the only gradient: triton.py.
    """
    device, target = hidden.device, target.to(torch.int64)
    if weight is hidden:  # torch.compile refuses a Function that is given one tensor twice
        weight = weight.view_as(weight)
    # Numbers travel as tensors, by products: torch.compile would compile anew for each value of a constant.
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(torch.float32)
    elif temperature != 1.0:
        temperature = torch.ones(target.shape, dtype=torch.float32, device=device) * temperature
    else:
        temperature = None
    softcap = None if softcap is None else torch.ones((), dtype=torch.float32, device=device) * softcap
    start, total = int(shard.start), int(shard.total)
    lists = (None, None, None)
    if kept is not None:
        lists = backend.kept_lists(*kept, target, active, start, weight.shape[0], total)
    expected = (
        hasattr(backend, "forward_expected")
        and torch.is_grad_enabled()
        and hidden.requires_grad
        and not (weight.requires_grad or (bias is not None and bias.requires_grad))
        and not (return_entropy or grad_filter or softcap is not None)
    )
    outputs = _LinearLogprob.apply(
        backend,
        shard.group,
        return_entropy,
        grad_filter,
        expected,
        hidden,
        weight,
        bias,
        target,
        active,
        temperature,
        softcap,
        *lists,
        start,
        total,
    )
    return outputs if return_entropy else (outputs, None)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, group, return_entropy, grad_filter, expected, *call):
        if expected:
            *statistics, expected = backend.forward_expected(*call)
        else:
            statistics, expected = backend.forward(*call, return_entropy), None
        own = statistics[0]
        if group is not None:
            statistics = _over_ranks(*statistics, group)
        largest, normaliser, weighted, target_logit = statistics
        active = call[4]
        log_normaliser = normaliser.log()
        logprob = (target_logit.double() - largest.double() - log_normaliser).clamp(max=0).float()
        logprob = torch.where(active, logprob, 0.0)
        entropy = None
        if return_entropy:
            entropy = torch.where(active, (log_normaliser - weighted / normaliser).clamp(min=0).float(), 0.0)
        scale = None
        if expected is not None:  # p = exp(x - own) scale; a rank may have none of a row's ids
            scale = (own.double() - largest.double() - log_normaliser).exp()
            scale = torch.where(own == -torch.inf, 0.0, scale).float()
        ctx.save_for_backward(*call[:-2], largest, log_normaliser.float(), entropy, expected, scale)
        ctx.backend, ctx.group, ctx.grad_filter, ctx.place = backend, group, grad_filter, call[-2:]
        ctx.set_materialize_grads(False)
        return (logprob, entropy) if return_entropy else logprob

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogprob, dentropy=None):
        *call, largest, log_normaliser, entropy, expected, scale = ctx.saved_tensors
        hidden, active = call[0], call[4]
        wanted = ctx.needs_input_grad[5:8]
        # The ranks' parts are added up before they are rounded.
        dtype = hidden.dtype if ctx.group is None else torch.float32
        if expected is None:
            gradients = ctx.backend.backward(
                *call,
                *ctx.place,
                largest,
                log_normaliser,
                entropy,
                dlogprob,
                dentropy,
                ctx.grad_filter,
                dtype if wanted[0] else None,
                *wanted[1:],
            )
        else:
            _, weight, _, target, active, temperature, _, _, _, kept_state = call
            row = (weight, target, active, temperature, kept_state, *ctx.place)
            gradients = (ctx.backend.backward_expected(*row, expected, scale, dlogprob, dtype), None, None)
        dhidden, dweight, dbias = (x if want else None for x, want in zip(gradients, wanted))
        if ctx.group is not None and dhidden is not None:
            dhidden = _sum_rows(dhidden, active, ctx.group).to(hidden.dtype)
        return None, None, None, None, None, dhidden, dweight, dbias, *(None,) * 9


def _over_ranks(
    largest: Tensor, normaliser: Tensor, weighted: Tensor, target_logit: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The statistics of the whole vocabulary, from those of each rank's part; equal on all ranks."""
    own = largest.double()
    largest = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    # Parts relative to this rank's largest become relative to that of all; a rank without any finite x adds nothing.
    shift = torch.where(own == -torch.inf, 0.0, own - largest.double())
    scale = torch.where(own == -torch.inf, 0.0, shift.exp())
    sums = [scale * normaliser, target_logit.double()]
    if weighted.numel():
        sums.append(scale * (weighted + shift * normaliser))
    sums = torch.stack(sums)
    dist.all_reduce(sums, group=group)
    return largest, sums[0], sums[2] if weighted.numel() else weighted, sums[1]


def _sum_rows(x: Tensor, active: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x` [T, H], zero outside `active`, added up over the ranks; only the active rows are sent."""
    rows = active.nonzero().flatten()
    if rows.shape[0] == x.shape[0]:
        dist.all_reduce(x, group=group)
        return x
    part = x[rows]
    dist.all_reduce(part, group=group)
    return x.index_copy(0, rows, part)
