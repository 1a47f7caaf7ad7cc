from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from mosaic_kernels import Layout, adaptive_lambda, segment_gae, terminal_reward
from mosaic_kernels.segment_gae import CORRECTIONS
from mosaic_kernels.testing import assert_as_accurate, runnable

BACKENDS = runnable("reference", "cpu")
NAN = math.nan


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def spelt_out(reward, value, mask, layout, gamma, lam, lam_critic, correction, bootstrap, returns_from, number=float):
    """The definition as loops over Python lists; `number` makes the numbers, so it also serves as PyTorch float32."""
    zero = number(0)
    cu, trajectory_of = layout.cu_seqlens.tolist(), layout.segment_trajectory.tolist()
    reward, value = [number(x) for x in reward.tolist()], [number(x) for x in value.tolist()]
    size, count = layout.num_tokens, layout.num_segments
    active = [[t for t in range(cu[s], cu[s + 1]) if mask[t]] for s in range(count)]
    siblings = [[s for s in range(count) if trajectory_of[s] == r] for r in range(layout.num_trajectories)]

    paid = [zero] * size
    for t, s in enumerate(layout.token_segment.tolist()):
        takers = active[s]
        at = [u for u in takers if u <= t][-1:] or takers[:1]
        if not takers and correction == "chain":
            same = siblings[trajectory_of[s]]
            at = [u for v in same if v < s for u in active[v]][-1:] or [u for v in same if v > s for u in active[v]][:1]
        for u in at:
            paid[u] = paid[u] + reward[t]

    if correction == "chain":
        units = [[(s, t) for s in same for t in active[s]] for same in siblings]
    else:
        units = [[(s, t) for t in active[s]] for s in range(count)]

    def advantages(lam):
        out = [zero] * size
        for unit in units:
            next_value = number(bootstrap[unit[-1][0]]) if unit and bootstrap is not None else zero
            running = zero
            for s, t in reversed(unit):
                delta = paid[t] + number(gamma) * next_value - value[t]
                running = delta + number(gamma) * number(lam[s]) * running
                out[t], next_value = running, value[t]
        return out

    def corrected(local, lam):
        out = list(local)
        for s in range(count) if correction == "position" else ():
            after = sum(len(active[v]) for v in siblings[trajectory_of[s]] if v > s)
            for t in active[s]:
                out[t] = out[t] * (number(gamma) * number(lam[s])) ** after
        return out

    lam_critic = lam if lam_critic is None else lam_critic
    advantage, critic = corrected(advantages(lam), lam), advantages(lam_critic)
    critic = corrected(critic, lam_critic) if returns_from == "corrected" else critic
    returns = [critic[t] + value[t] if mask[t] else zero for t in range(size)]
    return [torch.tensor([float(x) for x in column], dtype=torch.float64) for column in (advantage, returns)]


def float32(x):
    return torch.tensor(x, dtype=torch.float32)


def random_case(seed, lengths, num_trajectories, active=0.6):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layout = Layout.from_lengths(lengths, [rng.randrange(num_trajectories) for _ in lengths])
    mask = torch.rand(layout.num_tokens, generator=generator) < active
    reward, value = torch.randn(2, layout.num_tokens, generator=generator)
    some = torch.zeros(layout.num_segments, dtype=torch.int64).index_add(0, layout.token_segment, mask.long()) > 0
    return layout, mask, reward, value, some


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


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_same_bits_for_any_thread_count(backend, correction):
    lengths = [random.Random(0).randrange(12000) for _ in range(40)]
    layout, mask, reward, value, _ = random_case(0, lengths, num_trajectories=7)
    assert layout.num_tokens > 5 * 32768  # enough for the kernel to start five threads
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(segment_gae(reward, value, layout, mask=mask, correction=correction, backend=backend))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0].advantage, other.advantage) and torch.equal(results[0].returns, other.returns)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_backends_agree_on_a_large_batch(correction):
    lengths = [random.Random(1).randrange(6000) for _ in range(20)]
    layout, mask, reward, value, _ = random_case(1, lengths, num_trajectories=5)
    lam = adaptive_lambda(layout, mask)
    options = dict(mask=mask, lam=lam, correction=correction)
    expected = segment_gae(reward, value, layout, backend="reference", **options)
    for name in BACKENDS:
        out = segment_gae(reward, value, layout, backend=name, **options)
        torch.testing.assert_close(out, expected, rtol=2e-7, atol=2e-6)


def test_strided_inputs_and_integer_masks(backend):
    layout, mask, reward, value, _ = random_case(4, [5, 6, 7], num_trajectories=1)
    lam = torch.tensor([0.9, 0.9, 0.9])
    expected = segment_gae(reward, value, layout, mask=mask, lam=lam, bootstrap_value=lam, backend=backend)

    def strided(x):
        return torch.stack([x, torch.full_like(x, -7)], dim=1).flatten()[::2]

    for dtype in (torch.bool, torch.uint8, torch.int64):
        out = segment_gae(
            strided(reward),
            strided(value),
            layout,
            mask=strided(mask.to(torch.int64)).to(dtype),
            lam=strided(lam),
            bootstrap_value=strided(lam),
            backend=backend,
        )
        assert torch.equal(out.advantage, expected.advantage) and torch.equal(out.returns, expected.returns)


def test_low_precision_inputs_give_float32(backend):
    layout, _, reward, value, _ = random_case(6, [9, 4], num_trajectories=1)
    reward, value = reward.bfloat16(), value.bfloat16()
    out = segment_gae(reward, value, layout, backend=backend)
    expected = segment_gae(reward.float(), value.float(), layout, backend=backend)
    assert out.advantage.dtype == torch.float32 and torch.equal(out.advantage, expected.advantage)


def test_results_are_constants(backend):
    value = torch.ones(3, requires_grad=True)
    out = segment_gae(torch.ones(3, requires_grad=True), value, Layout([0, 3]), backend=backend)
    assert not out.advantage.requires_grad and not out.returns.requires_grad
    (out.advantage * value).sum().backward()
    assert torch.equal(value.grad, out.advantage)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled extension is not built")
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_opcheck(correction):
    import mosaic_kernels.segment_gae  # noqa: F401  defines the op

    layout, mask, reward, value, _ = random_case(7, [4, 3, 5], num_trajectories=2, active=0.9)
    lam = torch.full((3,), 0.9, dtype=torch.float64)
    ids = (layout.cu_seqlens, layout.segment_trajectory)
    for extra in ((None, None), (lam, torch.ones(3))):
        arguments = (reward, value, mask, *ids, lam, *extra, lam[0], correction, True, layout.num_trajectories)
        torch.library.opcheck(torch.ops.mosaic_kernels.segment_gae.default, arguments)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("correction", [pytest.param("none", marks=pytest.mark.slow), "position", "chain"])
def test_compiles_into_one_graph(backend, correction, compiler):
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)

    def run(reward, value, layout, mask):
        lam = adaptive_lambda(layout, mask)
        placed = terminal_reward(reward, layout, mask, correction)
        return segment_gae(placed, value, layout, mask=mask, lam=lam, correction=correction, backend=backend)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for lengths in ([4, 0, 7], [5, 1, 6], [6, 3, 2, 4]):
        layout, mask, _, value, _ = random_case(0, lengths, num_trajectories=2, active=0.8)
        call = (torch.ones(layout.num_trajectories), value, layout, mask)
        torch.testing.assert_close(compiled(*call), run(*call), rtol=2e-7, atol=2e-7)
    assert counter.frame_count <= 3  # not one for each new length: dynamic after the second


def test_other_numbers_compile_at_most_once_more(backend):  # pitfall 7
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    x, layout = torch.ones(4), Layout([0, 4])

    def run(gamma, lam):
        return segment_gae(x, x, layout, gamma=gamma, lam=lam, lam_critic=lam, backend=backend)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for gamma, lam in ((0.9, 0.5), (0.8, 0.4), (0.7, 0.3), (0.6, 0.2)):
        torch.testing.assert_close(compiled(gamma, lam), run(gamma, lam))
    assert counter.frame_count <= 2


def test_a_compiled_reference_answers_an_invalid_lam_with_nan():
    layout = Layout([0, 2, 4, 6], segment_trajectory=[0, 0, 1])

    def run(lam, correction):
        return segment_gae(torch.ones(6), torch.zeros(6), layout, lam=lam, correction=correction, backend="reference")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    above = compiled(torch.tensor([1.5, 1.0, 0.5]), "none").advantage
    assert above.isnan().tolist() == [True, True, False, False, False, False]
    unequal = compiled(torch.tensor([1.0, 0.5, 0.5]), "chain").advantage
    assert unequal.isnan().tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(reward=torch.zeros(4)), ValueError, r"reward must have shape \[T\] = \[3\], got \[4\]"),
        (dict(value=torch.zeros(3, 1)), ValueError, r"value must have shape \[T\] = \[3\], got \[3, 1\]"),
        (dict(reward=torch.zeros(3, dtype=torch.int64)), TypeError, "reward must be floating point, got torch.int64"),
        (dict(value=[0.0] * 3), TypeError, r"value must be a tensor of shape \[T\], got list"),
        (dict(value=torch.zeros(3, device="meta")), ValueError, "value must be on the layout's device cpu, got meta"),
        (dict(layout=[0, 3]), TypeError, "layout must be a Layout, got list"),
        (dict(mask=torch.ones(2)), ValueError, r"mask must have shape \[T\] = \[3\], got \[2\]"),
        (dict(mask=torch.ones(3)), TypeError, "mask must be bool or integer, got torch.float32"),
        (dict(gamma=1.01), ValueError, r"gamma must be in \[0, 1\], got 1.01"),
        (dict(gamma=NAN), ValueError, r"gamma must be in \[0, 1\], got nan"),
        (dict(gamma="1"), TypeError, "gamma must be a number, got '1'"),
        (dict(lam=-0.1), ValueError, r"lam must be in \[0, 1\], got -0.1"),
        (dict(lam=torch.tensor([0.5, 1.5])), ValueError, r"lam must be in \[0, 1\], got 1.5 for segment 1"),
        (dict(lam=torch.tensor([NAN, 1.0])), ValueError, r"lam must be in \[0, 1\], got nan for segment 0"),
        (dict(lam=torch.tensor([0.5])), ValueError, r"lam must have shape \[S\] = \[2\], got \[1\]"),
        (
            dict(lam_critic=torch.tensor([2.0, 1.0])),
            ValueError,
            r"lam_critic must be in \[0, 1\], got 2.0 for segment 0",
        ),
        (
            dict(correction="chain", lam=torch.tensor([0.5, 0.25])),
            ValueError,
            "lam must be equal within a trajectory for correction='chain', got 0.25 and 0.5 in trajectory 0",
        ),
        (
            dict(correction="chain", lam_critic=torch.tensor([0.5, 0.25])),
            ValueError,
            "lam_critic must be equal within a trajectory",
        ),
        (dict(correction="full"), ValueError, "correction must be one of none, position, chain, got 'full'"),
        (dict(returns_from="global"), ValueError, "returns_from must be one of local, corrected, got 'global'"),
        (dict(bootstrap_value=torch.zeros(3)), ValueError, r"bootstrap_value must have shape \[S\] = \[2\], got \[3\]"),
    ],
)
def test_errors_name_the_argument(backend, change, error, message):
    call = dict(reward=torch.zeros(3), value=torch.zeros(3), layout=Layout([0, 2, 3], [0, 0]), backend=backend)
    with pytest.raises(error, match=message):
        segment_gae(**{**call, **change})


def test_backends_that_cannot_serve_say_why():
    x, layout = torch.zeros(3), Layout([0, 3])
    with pytest.raises(NotImplementedError, match="segment_gae: backend='triton' .* it has no triton kernel"):
        segment_gae(x, x, layout, backend="triton")
    with pytest.raises(ValueError, match="backend must be None or one of"):
        segment_gae(x, x, layout, backend="gpu")
    if "cpu" in BACKENDS:
        with pytest.raises(NotImplementedError, match="float64 inputs ask for float64: use backend='reference'"):
            segment_gae(x.double(), x, layout, backend="cpu")


def test_terminal_reward_places_one_a_segment_or_one_a_trajectory():
    layout = Layout.from_lengths([3, 2, 2, 1], segment_trajectory=[0, 1, 0, 0], trajectory_group=[0, 0, 0])
    mask = torch.tensor([1, 1, 0, 0, 0, 1, 1, 0])
    reward = torch.tensor([2.0, NAN, NAN])  # trajectory 1 has no active token, 2 no segment
    for correction in ("none", "position"):
        assert terminal_reward(reward, layout, mask, correction).tolist() == [0, 2, 0, 0, 0, 0, 2, 0]
    assert terminal_reward(reward, layout, mask, "chain").tolist() == [0, 0, 0, 0, 0, 0, 2, 0]
    assert terminal_reward(reward.double(), layout, mask, "chain").dtype == torch.float64
    assert terminal_reward(torch.zeros(0), Layout([0]), None, "chain").shape == (0,)


def test_terminal_reward_errors():
    layout = Layout([0, 2])
    with pytest.raises(ValueError, match=r"reward must have shape \[R\] = \[1\], got \[2\]"):
        terminal_reward(torch.zeros(2), layout, None, "none")
    with pytest.raises(TypeError, match="reward must be floating point, got torch.int64"):
        terminal_reward(torch.ones(1, dtype=torch.int64), layout, None, "none")
    with pytest.raises(ValueError, match="correction must be one of none, position, chain, got 'all'"):
        terminal_reward(torch.zeros(1), layout, None, "all")


def test_adaptive_lambda_counts_the_active_tokens():
    layout = Layout.from_lengths([3, 1, 2, 0], segment_trajectory=[0, 1, 0, 2])
    mask = torch.tensor([1, 1, 0, 0, 1, 1])
    assert adaptive_lambda(layout, mask).tolist() == pytest.approx([1 - 1 / 6, 0, 1 - 1 / 6, 0], rel=1e-7)
    segment = adaptive_lambda(layout, mask, alpha=1.0, scope="segment")
    assert segment.tolist() == [0.5, 0.0, 0.5, 0.0] and segment.dtype == torch.float32
    assert adaptive_lambda(layout, mask, alpha=0.1, scope="segment").tolist() == [0.0] * 4  # 1 - 5 is clamped
    assert adaptive_lambda(Layout([0]), None).shape == (0,)


def test_adaptive_lambda_errors():
    layout = Layout([0, 2])
    with pytest.raises(ValueError, match="alpha must be > 0 and finite, got 0"):
        adaptive_lambda(layout, None, alpha=0)
    with pytest.raises(ValueError, match="scope must be 'trajectory' or 'segment', got 'token'"):
        adaptive_lambda(layout, None, scope="token")
    with pytest.raises(ValueError, match=r"mask must have shape \[T\] = \[2\]"):
        adaptive_lambda(layout, torch.ones(3, dtype=torch.bool))
