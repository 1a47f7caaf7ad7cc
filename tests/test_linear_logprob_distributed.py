"""Three gloo ranks: the vocabulary split unevenly, and the rows of segments spread over ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mosaic_kernels import Layout, linear_logprob, segment_logprob
from mosaic_kernels.testing import runnable

ROOT = Path(__file__).resolve().parents[1]
ROWS, HIDDEN, VOCAB = 6, 5, 11
BACKENDS = runnable("reference", "cpu", "triton")
pytestmark = [pytest.mark.triton] if "triton" in BACKENDS else []


def _inputs(backend: str):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if backend == "reference" else torch.float32
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )
    bias[3] = -torch.inf
    target = torch.tensor([0, 10, 5, -100, 7, 4])
    options = {
        "mask": torch.tensor([1, 1, 1, 1, 0, 1]),
        "temperature": torch.tensor([0.5, 1.0, 2.0, 1.0, -1.0, 1.5]),
        "kept": (torch.tensor([9, 1, 9, 99, 2]), torch.tensor([0, 3, 3, 3, 3, 4, 5])),
        "softcap": 3.0,
        "backend": backend,
    }
    return hidden, weight, bias, target, options


def _project(out) -> torch.Tensor:
    """A scalar in which every logprob and entropy has its own weight."""
    steps = torch.arange(1.0, ROWS + 1, dtype=torch.float64)
    return (out.logprob * steps).sum() + (out.entropy * steps.flip(0)).sum()


def _check_vocab_group(group, sizes: list[int], backend: str) -> None:
    """Values, and gradients of both outputs, of a vocabulary split by `sizes` against those of the whole."""
    hidden, weight, bias, target, options = _inputs(backend)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    whole = linear_logprob(leaves[0], leaves[1], target, bias=leaves[2], return_entropy=True, **options)
    _project(whole).backward()

    rank = dist.get_rank(group)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    shares = [x.clone().requires_grad_() for x in (hidden, weight[own], bias[own])]
    split = linear_logprob(
        shares[0], shares[1], target, bias=shares[2], return_entropy=True, vocab_group=group, **options
    )
    _project(split).backward()
    torch.testing.assert_close(split.logprob, whole.logprob)
    torch.testing.assert_close(split.entropy, whole.entropy)
    torch.testing.assert_close(shares[0].grad, leaves[0].grad)
    torch.testing.assert_close(shares[1].grad, leaves[1].grad[own])
    torch.testing.assert_close(shares[2].grad, leaves[2].grad[own])
    replicas = [torch.empty_like(split.logprob) for _ in sizes]
    dist.all_gather(replicas, split.logprob.detach(), group=group)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)

    with pytest.raises(IndexError, match=r"target of row 0 is 11, outside the vocabulary \[0, 11\)"):
        beyond = target.index_fill(0, torch.tensor([0]), VOCAB)
        linear_logprob(hidden, weight[own], beyond, vocab_group=group, backend=backend)


def _check_half_precision(group, sizes: list[int]) -> None:
    """bf16 parts of dhidden are added up before they are rounded; rows that nothing depends on may hold anything."""
    hidden, weight, _, target, _ = _inputs("cpu")
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    rank = dist.get_rank(group)
    share = weight[sum(sizes[:rank]) : sum(sizes[: rank + 1])]

    def dhidden(weight, **options):
        leaf = hidden.clone()
        leaf[1] = torch.nan
        leaf.requires_grad_()
        linear_logprob(leaf, weight, target, backend="cpu", **options).logprob[[0, 2, 5]].sum().backward()
        return leaf.grad

    whole, split = dhidden(weight), dhidden(share, vocab_group=group)
    assert split.dtype == torch.bfloat16 and split[[1, 3, 4]].abs().sum() == 0
    torch.testing.assert_close(split, whole, rtol=2**-8, atol=1e-6)  # float32 sums in another order: one rounding apart


def _check_frozen_head(group, sizes: list[int], backend: str) -> None:
    """dhidden alone, of a head that takes no gradient, against the reference; row 5's kept ids lie on one rank."""
    hidden, weight, bias, target, options = _inputs(backend)
    del options["softcap"]
    rank = dist.get_rank(group)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    steps = torch.arange(1.0, ROWS + 1)

    def dhidden(**call):
        leaf = hidden.clone().requires_grad_()
        (linear_logprob(leaf, target=target, **{**options, **call}).logprob * steps).sum().backward()
        return leaf.grad

    split = dhidden(weight=weight[own], bias=bias[own], vocab_group=group)
    torch.testing.assert_close(split, dhidden(weight=weight, bias=bias, backend="reference"))


def _check_row_group(group, rows_of_rank: list[list[int]], backend: str) -> None:
    """Segments whose rows lie on different ranks against the same segments in one process."""
    hidden, weight, _, _, _ = _inputs(backend)
    target, segment = torch.tensor([0, 10, 5, -100, 7, 4]), torch.tensor([0, 0, 0, 1, 2, 2])
    alone = [x.clone().requires_grad_() for x in (hidden, weight)]
    want = segment_logprob(*alone, target, Layout.from_lengths([3, 1, 2]), backend=backend)
    want.value.square().sum().backward()

    rows = torch.tensor(rows_of_rank[dist.get_rank(group)], dtype=torch.int64)
    layout = Layout.from_lengths(torch.bincount(segment[rows], minlength=3))
    shares = [hidden[rows].requires_grad_(), weight.clone().requires_grad_()]
    got = segment_logprob(*shares, target[rows], layout, group=group, backend=backend)
    got.value.square().sum().backward()
    assert torch.equal(got.count, want.count)
    torch.testing.assert_close(got.value, want.value)
    torch.testing.assert_close(got.total, want.total)
    torch.testing.assert_close(shares[0].grad, alone[0].grad[rows])
    total = shares[1].grad.clone()
    dist.all_reduce(total, group=group)
    torch.testing.assert_close(total, alone[1].grad)  # each rank holds its own rows' part, once


def _check_on_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    for backend in BACKENDS:
        _check_vocab_group(dist.group.WORLD, [4, 1, 6], backend)
        _check_vocab_group(dist.group.WORLD, [6, 5, 0], backend)
        _check_row_group(dist.group.WORLD, [[0, 3], [1, 4, 5], [2]], backend)
        if rank < 2:
            _check_vocab_group(pair, [9, 2], backend)
            _check_row_group(pair, [[0, 1, 2, 3, 4, 5], []], backend)
    for backend in BACKENDS[1:]:
        _check_frozen_head(dist.group.WORLD, [4, 0, 7], backend)
    if "cpu" in BACKENDS:
        _check_half_precision(dist.group.WORLD, [4, 0, 7])
    if rank == 2:
        hidden, weight, _, target, _ = _inputs("reference")
        with pytest.raises(ValueError, match="vocab_group must be a group that this process belongs to, and rank 2"):
            linear_logprob(hidden, weight, target, vocab_group=pair)
        with pytest.raises(ValueError, match="group must be a group that this process belongs to"):
            segment_logprob(hidden, weight, target, Layout([0, ROWS]), group=pair)
    _check_dtensor()
    dist.destroy_process_group()


def _check_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    hidden, weight, _, target, _ = _inputs("reference")
    sharded = distribute_tensor(weight, init_device_mesh("cpu", (3,)), [Shard(0)])
    with pytest.raises(TypeError, match=r"weight must be .* got a DTensor: .*full_tensor\(\).*vocab_group"):
        linear_logprob(hidden, sharded, target)


def test_vocabulary_and_rows_over_ranks(tmp_path):
    # This file by its path: other packages install a module `tests`, which a spawned process would find instead.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE) for rank in range(3)]
    try:
        messages = [rank.communicate(timeout=300)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], "\n".join(messages)


if __name__ == "__main__":
    _check_on_rank(int(sys.argv[2]), sys.argv[1])
