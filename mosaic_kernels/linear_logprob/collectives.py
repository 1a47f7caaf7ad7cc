"""Sums and maxima over the ranks of a torch.distributed group, as autograd sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


class _SumOverRanks(torch.autograd.Function):
    """all-reduce whose result every rank goes on to use in the same way: the gradient is already the same on each."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, dtotal):
        return dtotal, None


class _Replicated(torch.autograd.Function):
    """Identity on a tensor equal on all ranks; each rank's gradient is a part, and the parts are added."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of `x` over the group, equal on all ranks; backward gives each rank the gradient unchanged."""
    return _SumOverRanks.apply(x, group)


def check_member(name: str, group: dist.ProcessGroup) -> None:
    """Raises unless this process is a rank of `group`, where a collective would do nothing and say nothing."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{name}: torch.compile cannot trace its collectives; call outside the region")
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name} must be a group that this process belongs to, and rank {dist.get_rank()} does not")


@dataclass(frozen=True)
class VocabShard:
    """Which rows of the whole output head this rank holds; without a group, all of them.

    Args:
        start: global id of the first local row (a 0-d tensor where a group is given, so that no rank waits for it).
        total: V of the whole vocabulary, likewise.
        group: the ranks that share the vocabulary.
    """

    start: int | Tensor
    total: int | Tensor
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, weight: Tensor, group: dist.ProcessGroup | None) -> VocabShard:
        """The shard that `weight` is; asks the other ranks for the size of theirs."""
        if group is None:
            return cls(0, weight.shape[0], None)
        check_member("vocab_group", group)
        own = torch.tensor([weight.shape[0]], device=weight.device)
        sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, own, group=group)
        ends = torch.cat(sizes).cumsum(0)
        return cls(ends[dist.get_rank(group)] - weight.shape[0], ends[-1], group)

    def replicated(self, x: Tensor) -> Tensor:
        """`x`, whose gradient is the sum of all ranks' gradients."""
        return x if self.group is None else _Replicated.apply(x, self.group)

    def sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else sum_over_ranks(x, self.group)

    def max(self, x: Tensor) -> Tensor:
        """Maximum over the ranks. Not differentiable."""
        if self.group is None:
            return x
        largest = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest
