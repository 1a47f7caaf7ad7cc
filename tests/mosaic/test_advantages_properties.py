"""What the papers promise of the advantages, on 20,000 random groups, and a naive twin in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from mosaic.advantages import (
    group_relative_advantage,
    normalize_gain,
    session_aware_advantage,
    session_rank_signal,
    shape_session_advantage,
)
from mosaic.trajectory import Session, SessionType, Trajectory

GROUPS = 20_000


class Sweep:
    """Random groups of 1 to 16 trajectories, shuffled, with ids that have gaps; `slot` finds them again, padded."""

    def __init__(self):
        draw = torch.Generator().manual_seed(7)
        size = torch.randint(1, 17, (GROUPS,), generator=draw)
        label = torch.randperm(3 * GROUPS, generator=draw)[:GROUPS]
        chance = torch.tensor([0, 1, 0.5, 0.1, 0.9])[torch.randint(5, (GROUPS,), generator=draw)]
        spread = torch.tensor([1, 2, 5, 60])[torch.randint(4, (GROUPS,), generator=draw)]
        owner = torch.arange(GROUPS).repeat_interleave(size)
        order = torch.randperm(owner.numel(), generator=draw)
        owner = owner[order]
        self.size, self.group = size, label[owner]
        self.reward = (torch.rand(owner.numel(), generator=draw, dtype=torch.float64) < chance[owner]).double()
        self.count = 1 + (torch.rand(owner.numel(), generator=draw) * spread[owner]).long()
        first = size.cumsum(0) - size
        self.present = torch.arange(16) < size[:, None]
        at = torch.empty_like(order).scatter(0, order, torch.arange(order.numel()))
        self.slot = torch.where(self.present, at[(first[:, None] + torch.arange(16)).clamp(max=order.numel() - 1)], 0)
        won = self.padded(self.reward) == 1
        self.won, self.lost = won & self.present, ~won & self.present
        self.mixed = self.won.any(1) & self.lost.any(1)

    def padded(self, x):
        return x[self.slot]

    def members(self):
        """Per group the list of its trajectories, for the naive twin."""
        return [row[:n] for row, n in zip(self.slot.tolist(), self.size.tolist())]


@pytest.fixture(scope="module")
def sweep():
    return Sweep()


@pytest.fixture(scope="module", params=[torch.float64, torch.float32])
def advantage(request, sweep):
    return session_aware_advantage(sweep.reward.to(request.param), sweep.count, sweep.group)


def test_sweep_covers_every_kind_of_group(sweep):
    assert sweep.mixed.sum() > 5000
    assert (sweep.won.any(1) & ~sweep.mixed & (sweep.size > 1)).sum() > 2000
    assert (sweep.lost.any(1) & ~sweep.mixed & (sweep.size > 1)).sum() > 2000
    assert (sweep.size == 1).sum() > 500


def pairs(sweep, mask):
    """[G, 16, 16] pairs (i, j) of one group, both in `mask`, of which i used fewer sessions."""
    count = sweep.padded(sweep.count)
    return (count[:, :, None] < count[:, None, :]) & mask[:, :, None] & mask[:, None, :]


def test_c1_among_successes_fewer_sessions_are_strictly_better(sweep, advantage):
    fewer, a = pairs(sweep, sweep.won), sweep.padded(advantage)
    assert fewer.sum() > 100_000
    assert (a[:, :, None] > a[:, None, :])[fewer].all()


def test_c2_among_failures_more_sessions_are_better(sweep, advantage):
    fewer, a = pairs(sweep, sweep.lost), sweep.padded(advantage)
    assert fewer.sum() > 100_000
    assert (a[:, :, None] < a[:, None, :])[fewer & sweep.mixed[:, None, None]].all()
    assert (a[:, :, None] <= a[:, None, :])[fewer & ~sweep.mixed[:, None, None]].all()


def test_c3_every_success_above_every_failure_and_signs_kept(sweep, advantage):
    a, mixed = sweep.padded(advantage), sweep.mixed[:, None]
    plain = sweep.padded(group_relative_advantage(sweep.reward, sweep.group))
    assert (a[sweep.won & mixed] > 0).all()
    assert (a[sweep.lost & mixed] < 0).all()
    assert torch.equal(a.sign().double()[mixed & sweep.present], plain.sign()[mixed & sweep.present])


def test_mixed_groups_sum_to_zero(sweep, advantage):
    total = torch.where(sweep.present, sweep.padded(advantage), 0).sum(1)[sweep.mixed]
    assert total.abs().max() < (1e-12 if advantage.dtype == torch.float64 else 1e-5)


def test_all_failed_groups_are_never_positive(sweep, advantage):
    failed = sweep.lost & ~sweep.mixed[:, None]
    assert (sweep.padded(advantage)[failed] <= 0).all()
    assert (sweep.padded(advantage)[failed] < 0).any()


def test_equal_members_get_equal_bits_and_lone_ones_exactly_zero(sweep, advantage):
    a, count = sweep.padded(advantage), sweep.padded(sweep.count)
    same = (count[:, :, None] == count[:, None, :]) & (sweep.won[:, :, None] == sweep.won[:, None, :])
    same &= sweep.present[:, :, None] & sweep.present[:, None, :]
    assert (a[:, :, None] == a[:, None, :])[same].all()
    homogeneous = ~sweep.mixed & (same | ~sweep.present[:, :, None] | ~sweep.present[:, None, :]).all(2).all(1)
    assert homogeneous.sum() > 1000
    assert a[homogeneous[:, None] & sweep.present].eq(0).all()


def test_sweep_equals_the_naive_twin(sweep):
    reward, count = sweep.reward.tolist(), sweep.count.tolist()
    plain, signal, aware = ([0.0] * len(reward) for _ in range(3))
    for members in sweep.members():
        scores = naive_scores([reward[i] for i in members])
        for i, score in zip(members, scores):
            peers = [count[j] for j in members if reward[j] == reward[i]]
            plain[i], signal[i] = score, naive_signal(count[i], peers)
            if len(peers) < len(members):
                aware[i] = plain[i] * (1 - 0.2 * signal[i])
            else:
                aware[i] = -0.2 * signal[i] if reward[i] == 1 else 0.1 * min(signal[i], 0.0)
    for actual, naive in (
        (group_relative_advantage(sweep.reward, sweep.group), plain),
        (session_rank_signal(sweep.count.double(), sweep.reward.bool(), sweep.group), signal),
        (session_aware_advantage(sweep.reward, sweep.count, sweep.group), aware),
    ):
        torch.testing.assert_close(actual, torch.tensor(naive, dtype=torch.float64), rtol=0, atol=1e-13)


def naive_scores(values, ddof=1):
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof)
    return [(v - mean) / (math.sqrt(variance) + 1e-6) for v in values]


def naive_signal(count, counts):
    size = len(counts)
    if size == 1:
        return 0.0
    ranks = [rank for rank, value in enumerate(sorted(counts), start=1) if value == count]
    return (2 * sum(ranks) / len(ranks) - size - 1) / (size - 1)


class Sessions:
    """One to six sessions for each trajectory of a sweep, with random types and gains; the last is terminal."""

    def __init__(self, sweep):
        draw = torch.Generator().manual_seed(11)
        self.count = sweep.count.clamp(max=6)
        self.trajectory = torch.arange(self.count.numel()).repeat_interleave(self.count)
        size = self.trajectory.numel()
        self.kind = torch.randint(3, (size,), generator=draw)
        self.eligible = torch.ones(size, dtype=torch.bool)
        self.eligible[self.count.cumsum(0) - 1] = False
        # Coarse steps make ties and cells of equal gains.
        self.gain = torch.randint(-2, 3, (size,), generator=draw).double() / 10
        self.group = sweep.group[self.trajectory]
        best = torch.zeros(3 * GROUPS, dtype=torch.float64).scatter_reduce(0, sweep.group, sweep.reward, "amax")
        self.all_failed = best[self.group] == 0
        self.base = session_aware_advantage(sweep.reward, self.count, sweep.group)[self.trajectory]


@pytest.fixture(scope="module")
def sessions(sweep):
    return Sessions(sweep)


@pytest.mark.parametrize("by_type", [True, False])
def test_normalised_gains_equal_the_naive_twin(sessions, by_type):
    cells, eligible = {}, sessions.eligible.tolist()
    kinds = sessions.kind.tolist() if by_type else [0] * sessions.kind.numel()
    for at, key in enumerate(zip(sessions.group.tolist(), kinds)):
        if eligible[at]:
            cells.setdefault(key, []).append(at)
    gain, naive = sessions.gain.tolist(), [0.0] * len(kinds)
    equal = []
    for members in cells.values():
        values = [gain[at] for at in members]
        for at, score in zip(members, naive_scores(values)):
            naive[at] = score
        if len(set(values)) == 1:
            equal += members
    actual = normalize_gain(sessions.gain, sessions.kind, sessions.group, sessions.eligible, by_type=by_type)
    torch.testing.assert_close(actual, torch.tensor(naive, dtype=torch.float64), rtol=0, atol=1e-12)
    assert len(equal) > 1000
    assert actual[equal].eq(0).all()


@pytest.mark.parametrize("gate", ["clip", "drop", "cap", "agree"])
def test_gates_keep_their_promise(sessions, gate):
    signal = normalize_gain(sessions.gain, sessions.kind, sessions.group, sessions.eligible)
    shaped = shape_session_advantage(
        sessions.base, signal, sessions.eligible, sessions.all_failed, gate=gate, lambda_r=0.9
    )
    base, used = sessions.base, sessions.eligible
    wanted = 0.9 * torch.where(sessions.all_failed, signal.clamp(max=0), signal)
    crosses = base * (base + wanted) < 0
    assert torch.equal(shaped[~used], base[~used])
    assert (shaped[sessions.all_failed] <= 0).all()
    assert (shaped[sessions.all_failed] <= base[sessions.all_failed]).all()
    assert (base * shaped >= 0).all()
    idle = used & (base == 0)
    assert idle.sum() > 1000
    assert torch.equal(shaped[idle], wanted[idle])
    on, off = used & (base != 0) & ~crosses, used & crosses
    assert off.sum() > 1000
    if gate in ("clip", "drop"):
        assert torch.equal(shaped[on], (base + wanted)[on])
        assert torch.equal(shaped[off], torch.zeros_like(base)[off] if gate == "clip" else base[off])
    elif gate == "cap":
        moved = (shaped - base).abs()[used & (base != 0)]
        assert (moved <= base.abs()[used & (base != 0)] * (1 + 1e-15)).all()
        small = used & (wanted.abs() <= base.abs())
        assert torch.equal(shaped[small], (base + wanted)[small])
    else:
        assert (shaped.abs() >= base.abs()).all()
        agreeing = used & (wanted * base > 0)
        assert torch.equal(shaped[agreeing], (base + wanted)[agreeing])


def test_gains_telescope_in_compaction_chains():
    from mosaic.scoring import session_states

    draw = torch.Generator().manual_seed(5)
    summaries = torch.randint(0, 4, (GROUPS,), generator=draw).tolist()
    lengths = iter(torch.randint(1, 4, (GROUPS * 14,), generator=draw).tolist())
    values = iter(torch.randn(GROUPS * 16, generator=draw, dtype=torch.float64).tolist())
    for m in summaries:
        trajectory = Trajectory(
            "p",
            [
                chain_session(kind, lengths)
                for kind in (*[SessionType.NORMAL, SessionType.COMPACTION] * m, SessionType.NORMAL)
            ],
        )
        trajectory.sessions[-1].terminal = True
        value, total = {}, 0.0
        pairs = session_states(trajectory)
        assert [pair is not None for pair in pairs] == [True] * 2 * m + [False]
        for before, after in pairs[:-1]:
            for state in (before, after):
                if state not in value:
                    value[state] = next(values)
            total += value[after] - value[before]
        assert len(value) == (2 * m + 1 if m else 0)
        assert math.isclose(total, value[pairs[-2][1]] - value[pairs[0][0]] if m else 0.0, abs_tol=1e-12)


def chain_session(kind, lengths):
    prompt, response = next(lengths), next(lengths)
    return Session(kind, [0] * prompt, [0] * response, [True] * response, [-1.0] * response)
