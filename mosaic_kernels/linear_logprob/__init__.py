"""Op 1: log-probs and entropies of chosen tokens, straight from hidden states and the output head."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mosaic_kernels._backend import pick
from mosaic_kernels._checks import check_layout, check_tensor
from mosaic_kernels.layout import Layout
from mosaic_kernels.linear_logprob import autograd, cpu, reference, triton
from mosaic_kernels.linear_logprob.checks import active_rows, check_arguments
from mosaic_kernels.linear_logprob.collectives import VocabShard, check_member, sum_over_ranks
from mosaic_kernels.linear_logprob.targets import shifted_targets

__all__ = ["LogprobOutput", "SegmentScore", "linear_logprob", "segment_logprob", "shifted_targets"]

_MODULES = {"cpu": cpu, "triton": triton, "reference": reference}


class LogprobOutput(NamedTuple):
    """Result of `linear_logprob`: logprob [T], and entropy [T] or None where it was not asked for."""

    logprob: Tensor
    entropy: Tensor | None


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    return_entropy: bool = False,
    kept: tuple[Tensor, Tensor] | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    grad_filter: bool = False,
    backend: str | None = None,
) -> LogprobOutput:
    """Log-prob of one token a row under softmax(hidden @ weight.T), without the [T, V] logits.

        x = hidden @ weight.T + bias;   x = softcap tanh(x / softcap);   x = x / temperature
        logprob_t = x[t, target_t] - log sum_{v in K_t} exp x[t, v]
        entropy_t = - sum_{v in K_t} p_v log p_v,  p = softmax of x[t] over K_t;   K_t: the kept ids, or the vocabulary

    Args:
        hidden: [T, H] last hidden states; bf16, fp16, fp32 or float64.
        weight: [V, H] output head, in the layout of nn.Linear; its dtype may differ from hidden's.
        target: [T] integer ids, already aligned: hidden[t] predicts target[t] (`shifted_targets`). -100: not scored.
        bias: [V] added to the logits; -inf takes an id out of the vocabulary.
        temperature: divides the logits; one float, or [T] for a value a row; > 0. Not differentiable.
        softcap: > 0, or None for no cap.
        mask: [T] bool or integer, non-zero on rows to score; None: all.
        return_entropy: also give the entropy of the same distribution.
        kept: (ids [K], offsets [T+1]): row t is normalised over ids[offsets[t]:offsets[t+1]] only, as after top-k or
            top-p sampling. The target always belongs, duplicates count once, an empty row means the whole vocabulary.
        vocab_group: torch.distributed group over which weight and bias are split by rows, in rank order, unevenly if
            need be. target and kept ids are global; every other argument is the same on all ranks.
        grad_filter: leave out of the gradients what is below the dtype's resolution: tiles of rows and ids that hold
            no target and in which every p is below eps / V, eps being torch.finfo's of the finer of hidden's and
            weight's dtypes. The p left out of a row then sum to less than eps. With
            c_t = (|dlogprob_t| + |dentropy_t| log(V / eps)) / temperature_t no element of a gradient changes by more
            than eps c_t max|weight| (dhidden[t]), eps / V sum_t c_t |hidden[t]| (dweight), eps / V sum_t c_t (dbias).
            The values stay the same. Compiled backends only.
        backend: "reference", "cpu", "triton", "cuda", or None for the fastest that can serve the call.

    Returns:
        LogprobOutput(logprob [T] <= 0, entropy [T] >= 0 or None): float32, or float64 if hidden or weight is float64.
        Both are differentiable in hidden, weight and bias, whose gradients are accumulated in float32 (float64) and
        rounded once. Rows outside the mask, and rows whose target is -100, cost no GEMM; they give 0 and a zero
        gradient, and nothing they hold is looked at: not hidden, target, temperature nor kept ids. With vocab_group
        dhidden is summed over the group, dweight and dbias are those of this rank's rows.

    The reference goes through the scored rows in chunks of 256 and computes a chunk's logits again in the backward
    pass: it holds [256, V] at a time, where compiled backends hold a tile, and a float32 copy of a bf16 or fp16 weight.
    Every chunk has the same shape, so that a row's result does not depend on the rows beside it. For another number of
    threads the BLAS library may round dhidden differently. While torch.compile traces the reference it works on the
    whole [T, V], masked rows included.

    Backend "cpu" takes float32, bf16 and fp16 in any mixture. It holds tiles of the logits alone, reads hidden and
    weight where they lie (but copies the scored rows of a hidden, or the weight, whose stride(1) is not 1), and gives
    the same bits for any number of threads. A row whose gradient from above is exactly 0, such as a clipped token, is
    skipped in the backward pass whatever it holds; on the reference a non-finite row spoils the gradients even then.
    Compiled backends have no second derivative.

    Backend "triton" takes the same on NVIDIA GPUs from compute capability 8.0 and never waits for the device: scored
    rows are gathered inside the kernels, and a CUDA graph can hold the call. float32 is multiplied as IEEE float32, not
    as tf32. The logits are float32 and stay on the chip; of their gradient one chunk of ids at a time, at most an
    eighth of the vocabulary, is kept in hidden's dtype (256 MiB, or twice [T, H] where that is more) between the two
    products that it feeds. Rows and ids are always cut in the same way, so that a row's log-prob does not depend on the
    others. Where neither weight nor bias takes a gradient, and no softcap, entropy or grad_filter is asked for, the
    forward pass also makes sum_v p_v weight_v [T, H] in float32 by the same chunks, and the backward pass computes no
    logits: two products in all instead of three.

    Raises:
        ValueError: wrong shape, device, temperature, softcap, or kept offsets.
        TypeError: wrong dtype; a DTensor; grad_filter is no bool.
        IndexError: on a scored row, a target or kept id outside the vocabulary. On a GPU, and while compiling the
            reference, values are not inspected: such a row, or one whose temperature is not > 0, gives NaN.
        NotImplementedError: the backend asked for cannot serve the call; no compiled backend can, and grad_filter
            asks for one; torch.compile meets a vocab_group.

    Source: the per-token log-prob of the policy in Mosaic Eq. 14 and 29 and in CompactionRL; the kept ids are those of
    the rollout engine's truncated sampling distribution.

    >>> import torch
    >>> weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    >>> linear_logprob(torch.ones(3, 1), weight, torch.tensor([0, 1, 2])).logprob.exp()
    tensor([0.1250, 0.2500, 0.6250])
    """
    check_arguments(hidden, weight, target, bias, temperature, softcap, kept)
    if not isinstance(grad_filter, bool):
        raise TypeError(f"grad_filter must be True or False, got {grad_filter!r}")
    active = active_rows(target, mask)
    call = dict(
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        active=active,
        return_entropy=return_entropy,
        kept=kept,
        grad_filter=grad_filter,
        shard=VocabShard.of(weight, vocab_group),
    )
    chosen = pick("linear_logprob", backend, _MODULES, hidden=hidden, weight=weight)
    if chosen is reference:
        return LogprobOutput(*reference.linear_logprob(hidden, weight, target, **call))
    return LogprobOutput(*autograd.linear_logprob(chosen, hidden, weight, target, **call))


class SegmentScore(NamedTuple):
    """Result of `segment_logprob`, each [S]: the score asked for, the sum of log-probs, and how many were scored."""

    value: Tensor
    total: Tensor
    count: Tensor


def segment_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    layout: Layout,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    group: dist.ProcessGroup | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    grad_filter: bool = False,
    backend: str | None = None,
) -> SegmentScore:
    """Log-prob of each segment's scored tokens: their mean or their sum.

        total_s = sum of logprob_t over the scored tokens t of segment s;   count_s = their number
        value_s = total_s / count_s ("mean") or total_s ("sum");   0 where count_s is 0

    Args:
        hidden, weight, target, bias, temperature, softcap, mask, kept, vocab_group, grad_filter, backend: as in
            `linear_logprob`.
        layout: T tokens in S segments. A token is scored if the mask has it and its target is not -100.
        reduction: "mean" or "sum".
        group: torch.distributed group over whose ranks the rows of the S segments are spread (sequence or context
            parallelism). Every rank passes the same S with its own rows, perhaps none; totals and counts are added
            over the ranks before dividing.

    Returns:
        SegmentScore(value [S], total [S], count [S] int64). value and total are float32 (float64 where
        `linear_logprob` gives it), equal on all ranks of `group`, and differentiable in hidden, weight and bias: each
        rank receives the gradient of its own rows, without another reduction.

    Raises:
        ValueError: an unknown reduction; hidden has not one row for each token of the layout; a group that this
            process is not in; and what `linear_logprob` raises.

    Source: Mosaic Eq. 29, the value of a state as the mean log-prob of the answer's tokens.

    >>> import torch
    >>> weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    >>> target, layout = torch.tensor([0, 1, -100]), Layout([0, 2, 3])
    >>> score = segment_logprob(torch.ones(3, 1), weight, target, layout, reduction="sum")
    >>> score.value.exp(), score.count
    (tensor([0.0312, 1.0000]), tensor([2, 0]))
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    check_layout(layout)
    check_tensor("hidden", hidden, (layout.num_tokens, None), "[T, H]")
    logprob = linear_logprob(
        hidden,
        weight,
        target,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        mask=mask,
        kept=kept,
        vocab_group=vocab_group,
        grad_filter=grad_filter,
        backend=backend,
    ).logprob
    lengths = layout.lengths.to(hidden.device)
    segment = layout.token_segment.to(hidden.device)
    # each segment's own rows in their order, without atomics; unsafe: the layout has checked the lengths
    total = torch.segment_reduce(logprob.double(), "sum", lengths=lengths, unsafe=True, initial=0)
    count = torch.zeros_like(lengths).index_add(0, segment, active_rows(target, mask).to(torch.int64))
    if group is not None:
        check_member("group", group)
        total = sum_over_ranks(total, group)
        dist.all_reduce(count, group=group)
    value = total if reduction == "sum" else torch.where(count > 0, total / count.clamp(min=1), 0.0)
    return SegmentScore(value.to(logprob.dtype), total.to(logprob.dtype), count)
