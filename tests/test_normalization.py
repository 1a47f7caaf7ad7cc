from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mosaic_kernels import Clip, Layout, normalization_weights, policy_loss, whiten

KINDS = ("trajectory", "token", "prompt", "segment", "segment_flat")
# Four segments of 2, 1, 3 and 2 tokens: trajectory 0 = segments 0 and 2, trajectory 1 = segment 1, 2 = segment 3; ids 3
# and 4 are empty. Prompt 0 = trajectories 0 and 1; prompt 2 = trajectory 2. One token of segment 2 is masked.
LAYOUT = Layout([0, 2, 3, 6, 8], [0, 1, 0, 2], [0, 0, 2, 1, 1])
MASK = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("trajectory", [1 / 12, 1 / 12, 1 / 3, 1 / 12, 0, 1 / 12, 1 / 6, 1 / 6]),
        ("token", [1 / 7, 1 / 7, 1 / 7, 1 / 7, 0, 1 / 7, 1 / 7, 1 / 7]),
        ("prompt", [1 / 10, 1 / 10, 1 / 10, 1 / 10, 0, 1 / 10, 1 / 4, 1 / 4]),
        ("segment", [1 / 12, 1 / 12, 1 / 3, 1 / 12, 0, 1 / 12, 1 / 6, 1 / 6]),
        ("segment_flat", [1 / 8, 1 / 8, 1 / 4, 1 / 8, 0, 1 / 8, 1 / 8, 1 / 8]),
    ],
)
def test_weights_by_hand(kind, want):
    weights = normalization_weights(LAYOUT, MASK, kind)
    torch.testing.assert_close(weights, torch.tensor(want))
    assert weights.sum().item() == pytest.approx(1)


def test_segment_kind_weighs_segments_of_a_trajectory_alike():
    weights = normalization_weights(Layout([0, 1, 4, 5], [0, 0, 1]), None, "segment")
    torch.testing.assert_close(weights, torch.tensor([1 / 4, 1 / 12, 1 / 12, 1 / 12, 1 / 2]))


def test_empty_entities_are_not_counted():
    # segment 1 has no active token, so N_0 = 1; trajectory 1 and prompt 1 have none at all
    layout = Layout([0, 2, 4, 6, 6], [0, 0, 1, 2], [0, 1, 0])
    mask = torch.tensor([1, 1, 0, 0, 0, 0])
    for kind in KINDS:
        assert normalization_weights(layout, mask, kind).tolist() == [0.5, 0.5, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_active_and_nothing_at_all(kind):
    assert normalization_weights(LAYOUT, MASK * 0, kind).tolist() == [0.0] * 8
    assert normalization_weights(Layout([0]), None, kind).shape == (0,)


def test_errors():
    with pytest.raises(ValueError, match="kind must be one of trajectory, token, .*, got 'mean'"):
        normalization_weights(LAYOUT, MASK, "mean")
    with pytest.raises(ValueError, match=r"mask must have shape \[T\] = \[8\], got \[3\]"):
        normalization_weights(LAYOUT, MASK[:3], "token")
    with pytest.raises(TypeError, match="mask must be bool or integer, got torch.float32"):
        normalization_weights(LAYOUT, MASK.float(), "token")
    with pytest.raises(TypeError, match="x must be floating point, got torch.int64"):
        whiten(MASK, MASK)
    with pytest.raises(ValueError, match=r"mask must have shape \[T\] = \[2\], got \[8\]"):
        whiten(torch.zeros(2), MASK)


def test_weights_and_whiten_read_nothing_back_and_compile():
    layout, mask = LAYOUT.to("meta"), torch.empty(8, dtype=torch.bool, device="meta")
    assert all(normalization_weights(layout, mask, kind).shape == (8,) for kind in KINDS)
    assert whiten(torch.empty(8, device="meta"), mask).shape == (8,)
    torch._dynamo.reset()
    x = torch.randn(8)
    compiled = torch.compile(
        lambda layout, x, mask: (normalization_weights(layout, mask, "prompt"), whiten(x, mask)),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    torch.testing.assert_close(
        compiled(LAYOUT, x, MASK), (normalization_weights(LAYOUT, MASK, "prompt"), whiten(x, MASK))
    )


def random_step(seed):
    """Segments of one optimiser step: (trajectory, prompt, per-token columns)."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    prompt_of = [rng.randrange(3) for _ in range(5)]
    segments = []
    for _ in range(rng.randrange(1, 9)):
        length = rng.choice([0, 1, 2, 5, 9])
        columns = torch.randn(4, length, generator=generator, dtype=torch.float64)
        logprob = -columns[0].abs()
        mask = torch.rand(length, generator=generator) < rng.choice([0.0, 0.6, 1.0])
        segments.append((rng.randrange(5), (logprob, logprob + 0.6 * columns[1], columns[2], mask.double())))
    return segments, prompt_of


def pack(segments, prompt_of, keep_all_trajectories=True):
    lengths = [columns[0].shape[0] for _, columns in segments]
    ids = [trajectory for trajectory, _ in segments]
    groups = prompt_of if keep_all_trajectories else prompt_of[: max(ids, default=-1) + 1]
    empty = torch.zeros(4, 0, dtype=torch.float64)
    columns = torch.cat([empty, *[torch.stack(columns) for _, columns in segments]], dim=1)
    return Layout.from_lengths(lengths, ids, groups), columns


def loss_and_gradient(layout, columns, weight):
    x = columns[0].clone().requires_grad_()
    out = policy_loss(x, columns[1], columns[2], layout, mask=columns[3].bool(), token_weight=weight, objective=Clip())
    return out.loss.detach(), torch.autograd.grad(out.loss, x)[0]


def cut(segments, rng):
    """The same tokens in the same order, each segment cut at random places."""
    pieces = []
    for trajectory, columns in segments:
        length = columns[0].shape[0]
        marks = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.randrange(3)))})
        spans = list(zip(marks[:-1], marks[1:], strict=True)) or [(0, 0)]
        pieces += [(trajectory, tuple(c[a:b] for c in columns)) for a, b in spans]
    return pieces


@pytest.mark.parametrize("kind", ["trajectory", "token", "prompt"])
def test_more_segments_change_neither_loss_nor_gradient(kind):
    for seed in range(60):
        segments, prompt_of = random_step(seed)
        pieces = cut(segments, random.Random(seed))
        results = []
        for each in (segments, pieces):
            layout, columns = pack(each, prompt_of)
            weight = normalization_weights(layout, columns[3].bool(), kind)
            results.append(loss_and_gradient(layout, columns, weight))
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_more_segments_do_change_the_per_segment_kinds():
    whole, halves = Layout([0, 4, 6], [0, 1]), Layout([0, 1, 4, 6], [0, 0, 1])
    for kind in ("segment", "segment_flat"):
        assert not torch.allclose(normalization_weights(whole, None, kind), normalization_weights(halves, None, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_neither_loss_nor_gradient(kind):
    for seed in range(40):
        segments, prompt_of = random_step(seed)
        layout, columns = pack(segments, prompt_of)
        weight = normalization_weights(layout, columns[3].bool(), kind)
        loss, gradient = loss_and_gradient(layout, columns, weight)
        at, parts = 0, []
        rng = random.Random(seed)
        while at < len(segments):
            size = rng.randrange(1, 4)
            micro, micro_columns = pack(segments[at : at + size], prompt_of)
            lo = layout.cu_seqlens[at].item()
            parts.append(loss_and_gradient(micro, micro_columns, weight[lo : lo + micro.num_tokens]))
            at += size
        torch.testing.assert_close(torch.stack([part[0] for part in parts]).sum(), loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, rtol=1e-12, atol=1e-14)


def rank_results(rank, path, seeds):
    """What one of two ranks computes: {(seed, kind): (loss, gradient)} and {seed: whitened}."""
    dist.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    results = {}
    for seed in seeds:
        segments, prompt_of = random_step(seed)
        # every third step: rank 1 has nothing; ids are global but a rank may not know the largest ones
        mine = [s for at, s in enumerate(segments) if (0 if seed % 3 == 0 else at % 2) == rank]
        layout, columns = pack(mine, prompt_of, keep_all_trajectories=seed % 2 == 0)
        for kind in KINDS:
            weight = normalization_weights(layout, columns[3].bool(), kind, group=dist.group.WORLD)
            results[seed, kind] = loss_and_gradient(layout, columns, weight)
        results[seed] = whiten(columns[2], columns[3].bool(), group=dist.group.WORLD)
    results["equal"] = whiten(torch.full((2 + rank,), 0.1), None, group=dist.group.WORLD)
    results["nan"] = whiten(torch.tensor([1.0, float("nan") if rank else 1.0]), None, group=dist.group.WORLD)
    torch.save(results, f"{path}/rank{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_change_neither_loss_nor_gradient(tmp_path):
    seeds = range(18)
    mp.spawn(rank_results, args=(str(tmp_path), seeds), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for seed in seeds:
        segments, prompt_of = random_step(seed)
        order = segments if seed % 3 == 0 else segments[::2] + segments[1::2]  # rank 0's segments, then rank 1's
        layout, columns = pack(order, prompt_of)
        for kind in KINDS:
            weight = normalization_weights(layout, columns[3].bool(), kind)
            loss, gradient = loss_and_gradient(layout, columns, weight)
            torch.testing.assert_close(ranks[0][seed, kind][0] + ranks[1][seed, kind][0], loss, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(torch.cat([r[seed, kind][1] for r in ranks]), gradient, rtol=1e-12, atol=1e-14)
        whitened = whiten(columns[2], columns[3].bool())
        torch.testing.assert_close(torch.cat([r[seed] for r in ranks]), whitened, rtol=1e-12, atol=1e-12)
    assert not any(r["equal"].any() for r in ranks)
    assert all(r["nan"].isnan().all() for r in ranks)


def test_whiten_by_hand():
    out = whiten(torch.tensor([2.0, float("nan"), 4.0, 6.0]), torch.tensor([1, 0, 1, 1]))
    assert out.tolist() == pytest.approx([-1.0, 0.0, 0.0, 1.0], abs=1e-5)
    x = torch.randn(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5 + 3
    out = whiten(x, None)
    assert out.dtype == torch.float64
    assert (out.mean().item(), out.std().item()) == pytest.approx((0.0, 1.0), abs=1e-6)
    assert whiten(x.bfloat16(), None).dtype == torch.float32


def test_whiten_of_one_or_of_equals_is_exactly_zero():
    assert whiten(torch.zeros(0), None).shape == (0,)
    assert whiten(torch.tensor([5.0]), None).tolist() == [0.0]
    assert whiten(torch.tensor([5.0, 7.0]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([5.0, 7.0]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]
    for value in (0.1, 1e-30, 3e5, 1 / 3):  # their float64 mean over 1,001 entries need not equal them
        assert not whiten(torch.full((1001,), value, dtype=torch.float64), None).any()


def test_whiten_shows_a_non_finite_entry():
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert whiten(torch.tensor([1.0, bad, 2.0]), None).isnan().all()
        assert whiten(torch.tensor([bad, 1.0]), torch.tensor([1, 0])).tolist()[1] == 0.0
