from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from mosaic_kernels import Layout, adaptive_lambda, segment_gae, terminal_reward
from mosaic_kernels.segment_gae import CORRECTIONS
from mosaic_kernels.testing import assert_as_accurate, runnable
from tests.gae_oracle import random_case, spelt_out

BACKENDS = runnable("reference", "cpu")
NAN = math.nan


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def float32(x):
    return torch.tensor(x, dtype=torch.float32)


def close(out, truth):
    assert out.advantage.dtype == out.returns.dtype == torch.float32
    for actual, expected in zip(out, truth, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-7, atol=2e-7)


def test_worked_by_hand(backend):
    # delta = [0.5*2 - 1, 0.5*4 - 2, 1 - 4] = [0, 0, -3]; A = [-3/16, -3/4, -3]
    out = segment_gae(
        torch.tensor([0.0, 0.0, 1.0]),
        torch.tensor([1.0, 2.0, 4.0]),
        Layout([0, 3]),
        gamma=0.5,
        lam=0.5,
        backend=backend,
    )
    assert out.advantage.tolist() == [-0.1875, -0.75, -3.0]
    assert out.returns.tolist() == [0.8125, 1.25, 1.0]


def test_bootstrap_value_worked_by_hand(backend):
    layout = Layout([0, 1, 2], segment_trajectory=[0, 0])
    reward, value, bootstrap = torch.zeros(2), torch.tensor([1.0, 2.0]), torch.tensor([8.0, 4.0])
    options = dict(gamma=0.5, lam=0.5, bootstrap_value=bootstrap, backend=backend)
    assert segment_gae(reward, value, layout, correction="none", **options).advantage.tolist() == [3.0, 0.0]
    assert segment_gae(reward, value, layout, correction="position", **options).advantage.tolist() == [0.75, 0.0]
    # chain: the first segment continues with the second one's value, its own bootstrap value is not read
    options["bootstrap_value"] = torch.tensor([NAN, 4.0])
    assert segment_gae(reward, value, layout, correction="chain", **options).advantage.tolist() == [0.0, 0.0]


def test_returns_worked_by_hand(backend):
    layout = Layout([0, 2, 3], segment_trajectory=[0, 0])
    reward, value = torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3)
    options = dict(lam=0.5, correction="position", backend=backend)
    assert segment_gae(reward, value, layout, **options).advantage.tolist() == [0.25, 0.5, 1.0]
    assert segment_gae(reward, value, layout, **options).returns.tolist() == [0.5, 1.0, 1.0]
    assert segment_gae(reward, value, layout, returns_from="corrected", **options).returns.tolist() == [0.25, 0.5, 1.0]
    critic = segment_gae(reward, value, layout, lam_critic=0.25, returns_from="corrected", **options)
    assert critic.advantage.tolist() == [0.25, 0.5, 1.0]
    assert critic.returns.tolist() == [0.0625, 0.25, 1.0]


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_reward_on_a_masked_token_counts_at_the_last_active_token_before_it(backend, correction):
    layout = Layout([0, 6])
    mask = torch.tensor([0, 1, 0, 0, 1, 0])
    reward = torch.tensor([1.0, 0.0, 2.0, 4.0, 0.0, 8.0])  # 1 waits for token 1, which also takes 2 and 4
    out = segment_gae(reward, torch.zeros(6), layout, mask=mask, lam=0.5, correction=correction, backend=backend)
    assert out.advantage.tolist() == [0.0, 11.0, 0.0, 0.0, 8.0, 0.0]


def test_chain_moves_a_reward_out_of_segments_without_active_tokens(backend):
    layout = Layout.from_lengths([1, 2, 1, 1, 2, 1], segment_trajectory=[0, 0, 1, 0, 0, 1])
    mask = torch.tensor([0, 0, 1, 0, 0, 1, 0, 0])
    reward = torch.tensor([1.0, 2.0, 0.0, 99.0, 4.0, 0.0, 8.0, 0.0])
    out = segment_gae(reward, torch.zeros(8), layout, mask=mask, lam=0.5, correction="chain", backend=backend)
    # Token 5 has 8; token 2 has 1 (of the first segment, before it), 2 and 4, and half of 8. Trajectory 1 has no taker.
    assert out.advantage.tolist() == [0.0, 0.0, 11.0, 0.0, 0.0, 8.0, 0.0, 0.0]


@pytest.mark.parametrize("correction", ["none", "position"])
@pytest.mark.parametrize("reward", [[1.0, 1.0, -1.0], [1.0, NAN, 0.0]])
def test_a_reward_without_an_active_token_is_an_error(backend, correction, reward):
    layout = Layout([0, 1, 3], segment_trajectory=[0, 0])
    mask = torch.tensor([1, 0, 0])
    with pytest.raises(ValueError, match="reward of segment 1 cannot count: the segment has no active token"):
        segment_gae(torch.tensor(reward), torch.zeros(3), layout, mask=mask, correction=correction, backend=backend)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("returns_from", ["local", "corrected"])
@pytest.mark.parametrize("seed", range(4))
def test_against_the_loops(backend, correction, returns_from, seed):
    lengths = [random.Random(seed).choice([0, 1, 2, 7, 33]) for _ in range(13)]
    layout, mask, reward, value, some = random_case(seed, lengths, num_trajectories=4)
    if correction != "chain":
        reward = torch.where(layout.segment_to_token(some), reward, 0)
    torch.manual_seed(seed)
    lam_of_trajectory = 0.5 + 0.5 * torch.rand(layout.num_trajectories, dtype=torch.float64)
    lam = layout.trajectory_to_segment(lam_of_trajectory)
    if correction != "chain":
        lam = torch.rand(layout.num_segments, dtype=torch.float64)
    for lam_critic, bootstrap in itertools.product([None, 1.0], [None, torch.randn(layout.num_segments)]):
        out = segment_gae(
            reward,
            value,
            layout,
            mask=mask,
            gamma=0.97,
            lam=lam,
            lam_critic=lam_critic,
            correction=correction,
            bootstrap_value=bootstrap,
            returns_from=returns_from,
            backend=backend,
        )
        critics = None if lam_critic is None else [lam_critic] * layout.num_segments
        shared = (0.97, lam.tolist(), critics, correction, None if bootstrap is None else bootstrap.tolist())
        close(out, spelt_out(reward, value, mask, layout, *shared, returns_from))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_error_against_pytorchs_own(backend, correction):
    layout, mask, reward, value, _ = random_case(5, [900, 1, 1500, 64], num_trajectories=2)
    lam = [0.9999] * 4
    arguments = (reward, value, mask, layout, 0.9999, lam, None, correction, None, "local")
    truth, peer = spelt_out(*arguments), spelt_out(*arguments, number=float32)
    out = segment_gae(
        reward, value, layout, mask=mask, gamma=0.9999, lam=0.9999, correction=correction, backend=backend
    )
    for name, *results in zip(("advantage", "returns"), out, peer, truth, strict=True):
        assert_as_accurate(*results, what=name)


def test_float64_stays_float64_on_the_reference():
    layout, mask, reward, value, _ = random_case(3, [40, 30], num_trajectories=1, active=0.9)
    reward, value = reward.double() / 3, value.double() / 3
    truth = spelt_out(reward, value, mask, layout, 0.99, [0.95] * 2, None, "chain", None, "local")
    out = segment_gae(reward, value, layout, mask=mask, gamma=0.99, correction="chain")
    for actual, expected in zip(out, truth, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_nothing_but_the_reward_is_read_at_masked_tokens(backend, correction):
    layout, mask, reward, value, some = random_case(1, [5, 1, 9, 3], num_trajectories=2, active=0.4)
    reward = torch.where(mask, reward, 0)
    bootstrap = torch.where(some, 0.5, NAN)
    options = dict(mask=mask, correction=correction, bootstrap_value=bootstrap, backend=backend)
    out = segment_gae(reward, torch.where(mask, value, NAN), layout, **options)
    expected = segment_gae(reward, value, layout, **options)
    assert torch.equal(out.advantage, expected.advantage) and torch.equal(out.returns, expected.returns)
    assert out.advantage.isfinite().all() and (out.returns[~mask] == 0).all()


def test_nan_stays_in_its_own_trajectory(backend):
    layout = Layout([0, 2, 4, 6], segment_trajectory=[0, 1, 0])
    value = torch.tensor([1.0, NAN, 1.0, 1.0, 1.0, 1.0])
    chain = segment_gae(torch.ones(6), value, layout, correction="chain", backend=backend).advantage
    assert chain.isnan().tolist() == [True, True, False, False, False, False]
    infinite = segment_gae(torch.ones(6), value.nan_to_num(math.inf), layout, backend=backend).advantage
    assert infinite.isfinite().tolist() == [False, False, True, True, True, True]


def test_a_value_on_a_masked_token_bootstraps_nothing(backend):  # pitfall 19 (ROLL#447)
    reward, mask = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1, 1, 0])
    out = segment_gae(reward, torch.tensor([0.0, 0.0, 100.0]), Layout([0, 3]), mask=mask, lam=1.0, backend=backend)
    assert out.advantage.tolist() == out.returns.tolist() == [1.0, 1.0, 0.0]


def test_earlier_segments_learn_from_a_later_reward(backend):  # pitfall 20 (verl, several outputs a session)
    layout = Layout([0, 2, 4], segment_trajectory=[0, 0])
    reward = terminal_reward(torch.tensor([1.0]), layout, None, "chain")
    none = segment_gae(reward, torch.zeros(4), layout, lam=0.5, correction="none", backend=backend)
    chain = segment_gae(reward, torch.zeros(4), layout, lam=0.5, correction="chain", backend=backend)
    assert none.advantage.tolist() == [0.0, 0.0, 0.5, 1.0]
    assert chain.advantage.tolist() == [0.125, 0.25, 0.5, 1.0]
    shared = terminal_reward(torch.tensor([1.0]), layout, None, "position")
    position = segment_gae(shared, torch.zeros(4), layout, lam=0.5, correction="position", backend=backend)
    assert position.advantage.tolist() == [0.125, 0.25, 0.5, 1.0]


def test_position_discounts_the_terminal_reward_by_the_tokens_to_the_end_of_the_trajectory(backend):
    layout, mask, *_ = random_case(8, [30, 5, 20, 11, 40], num_trajectories=2)
    lam, gamma = adaptive_lambda(layout, mask), 0.999
    reward = terminal_reward(torch.tensor([1.0, -2.0]), layout, mask, "position")
    out = segment_gae(reward, torch.zeros(layout.num_tokens), layout, mask=mask, gamma=gamma, lam=lam, backend=backend)
    for trajectory, outcome in enumerate([1.0, -2.0]):
        tokens = ((layout.token_trajectory == trajectory) & mask).nonzero().flatten().tolist()
        for remaining, token in enumerate(reversed(tokens)):  # N_{>s} + n_s - i of the i-th of n_s tokens
            decay = gamma * float(lam[layout.token_segment[token]])
            assert out.advantage[token].item() == pytest.approx(outcome * decay**remaining, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_chain_is_plain_gae_over_the_concatenation(backend, seed):
    layout, mask, reward, value, _ = random_case(seed, [4, 9, 1, 6, 12], num_trajectories=2, active=1.0)
    chain = segment_gae(reward, value, layout, gamma=0.9, correction="chain", backend=backend)
    order = torch.argsort(layout.token_trajectory, stable=True)
    lengths = torch.bincount(layout.token_trajectory, minlength=layout.num_trajectories)
    whole = segment_gae(
        reward[order], value[order], Layout.from_lengths(lengths), gamma=0.9, correction="none", backend=backend
    )
    assert torch.equal(chain.advantage[order], whole.advantage)
    assert torch.equal(chain.returns[order], whole.returns)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3], [1, 0, 2]])
def test_empty_and_all_masked(backend, correction, lengths):
    layout = Layout.from_lengths(lengths, [0] * len(lengths))
    size = layout.num_tokens
    for mask in (None, torch.zeros(size, dtype=torch.bool)):
        reward, value = torch.zeros(size), torch.full((size,), 3.0 if mask is None else NAN)
        out = segment_gae(reward, value, layout, mask=mask, correction=correction, lam=1.0, backend=backend)
        assert out.advantage.shape == out.returns.shape == (size,)
        assert (out.returns == 0).all() and (mask is None or (out.advantage == 0).all())


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_output_is_written(correction, backend):
    layout, mask, reward, value, some = random_case(2, [6, 0, 3, 8], num_trajectories=2, active=0.5)
    reward = torch.where(layout.segment_to_token(some), reward, 0)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        out = segment_gae(reward, value, layout, mask=mask, correction=correction, backend=backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.advantage.isfinite().all() and (out.advantage[~mask] == 0).all() and (out.returns[~mask] == 0).all()
