"""The vectorised scan of the "cpu" backend, on every instruction set: boundaries, bits, layouts at random."""

from __future__ import annotations

import itertools
import math
import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_kernels import Layout, segment_gae
from mosaic_kernels._backend import extension
from mosaic_kernels.segment_gae import CORRECTIONS
from mosaic_kernels.testing import assert_as_accurate, instruction_set, instruction_sets
from tests.gae_oracle import random_case, spelt_out

pytestmark = pytest.mark.skipif(extension is None, reason="the compiled extension is not built")
NAN = math.nan
SPAN = 32768  # kSpan of csrc/cpu/segment_gae.cpp: longer segments are cut there


@pytest.fixture(params=instruction_sets())
def isa(request):
    with instruction_set(request.param):
        yield request.param


def masked(size, kind):
    generator = torch.Generator().manual_seed(size)
    if kind == "all":
        return torch.ones(size, dtype=torch.bool)
    if kind == "random":
        return torch.rand(size, generator=generator) < 0.6
    length = torch.randint(1, 120, (size // 30 + 2,), generator=generator)
    return (torch.arange(len(length)) % 2).repeat_interleave(length)[:size].bool()


def case(lengths, kind, trajectories=None):
    """A layout, its mask, and rewards (on masked tokens too, but for segments without active ones) and values."""
    layout = Layout.from_lengths(lengths, trajectories)
    mask = masked(layout.num_tokens, kind)
    generator = torch.Generator().manual_seed(7)
    reward, value = torch.randn(2, layout.num_tokens, generator=generator)
    taken = torch.zeros(layout.num_segments, dtype=torch.int64).index_add(0, layout.token_segment, mask.long()) > 0
    # Most masked tokens have no reward: blocks of them are passed faster.
    reward = torch.where(mask | (torch.arange(layout.num_tokens) % 50 == 0), reward, 0)
    return layout, mask, torch.where(layout.segment_to_token(taken), reward, 0), value


def check(reward, value, layout, **options):
    """float32 results next to the reference in float64: no further off than twice the truth's own rounding and one."""
    truth = segment_gae(reward.double(), value.double(), layout, backend="reference", **options)
    out = segment_gae(reward, value, layout, backend="cpu", **options)
    for name, actual, true in zip(("advantage", "returns"), out, truth, strict=True):
        assert_as_accurate(actual, true.float(), true, what=name)


@pytest.mark.parametrize("kind", ["all", "runs", "random"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_lengths_around_a_block(isa, kind, correction):
    lengths = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 64, 65, 1000]
    layout, mask, reward, value = case(lengths, kind, [s // 3 for s in range(len(lengths))])
    options = dict(mask=mask, gamma=0.99, lam=0.9, correction=correction)
    check(reward, value, layout, **options)
    check(reward, value, layout, lam_critic=1.0, returns_from="corrected", **options)


@pytest.mark.parametrize("kind", ["all", "runs", "random"])
@pytest.mark.parametrize("length", [SPAN - 1, SPAN, SPAN + 1, SPAN + 9, 2 * SPAN, 2 * SPAN + 1])
def test_lengths_around_a_span(isa, kind, length):
    layout, mask, reward, value = case([3, length, 5], kind)
    bootstrap = torch.tensor([1.0, -2.0, 3.0])
    options = dict(mask=mask, gamma=0.9999, lam=0.9999, bootstrap_value=bootstrap)
    check(reward, value, layout, correction="none", **options)
    check(reward, value, layout, correction="none", lam_critic=1.0, **options)


@pytest.mark.parametrize("kind", ["all", "runs", "random"])
def test_a_chain_of_many_segments_over_spans(isa, kind):
    lengths = [0, 200, 40000, 1, 0, 17, 33000] + [50] * 900 + [7]
    layout, mask, reward, value = case(lengths, kind, [0] * len(lengths))
    check(reward, value, layout, mask=mask, lam=0.9999, correction="chain")
    check(reward, value, layout, mask=mask, lam=0.999, correction="chain", lam_critic=1.0)
    check(reward, value, layout, mask=mask, lam=0.99995, correction="position", returns_from="corrected")


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_long_segment_at_lam_1_loses_no_accuracy(isa, correction):
    layout, mask, reward, value = case([150_000, 120_000], "runs", [0, 0])
    check(reward + 1.0 * mask, 100 + value, layout, mask=mask, lam=1.0, correction=correction)


def revealing_case(*arguments):
    """Values so large and level that the advantage is what their cancellation leaves: the last bits of float64 sums."""
    layout, mask, reward, value = case(*arguments)
    level = torch.full_like(value, 1e12)
    return layout, mask, reward, level, level[: layout.num_segments].double()


def bits(out):
    return [x.view(torch.int32) for x in out]


@pytest.mark.parametrize(
    ("lengths", "trajectories"),
    [([20 * SPAN + 5], None), ([300] * 2000, [0] * 2000), ([90_000, 5, 0, 40_000, 70_001, 9], [0, 1, 0, 1, 0, 1])],
)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_same_bits_run_to_run_and_for_any_thread_count(isa, lengths, trajectories, correction):
    layout, mask, reward, value, bootstrap = revealing_case(lengths, "runs", trajectories)
    options = dict(mask=mask, lam=0.999, lam_critic=0.9, correction=correction, backend="cpu")
    options["bootstrap_value"] = bootstrap
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = bits(segment_gae(reward, value, layout, **options))
        for threads in (2, 2, 2, 3, 7, 1):
            torch.set_num_threads(threads)
            for actual, one in zip(bits(segment_gae(reward, value, layout, **options)), expected, strict=True):
                assert torch.equal(actual, one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_bits_do_not_depend_on_neighbours(isa, correction):
    lengths, trajectories = [13, 40_001, 3, 500, 70_000, 33], [0, 1, 0, 2, 1, 2]
    layout, mask, reward, value, bootstrap = revealing_case(lengths, "random", trajectories)
    options = dict(lam=0.999, correction=correction, backend="cpu")
    together = bits(segment_gae(reward, value, layout, mask=mask, bootstrap_value=bootstrap, **options))
    for trajectory in range(3):
        own = layout.token_trajectory == trajectory
        alone = Layout.from_lengths([n for n, r in zip(lengths, trajectories) if r == trajectory], [0, 0])
        options["bootstrap_value"] = bootstrap[:2]
        for x, y in zip(together, bits(segment_gae(reward[own], value[own], alone, mask=mask[own], **options))):
            assert torch.equal(x[own], y)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_thousands_of_empty_segments(isa, correction):
    lengths = [0] * 5000 + [9] + [0] * 70_000 + [20, 0, 31] + [0] * 5000
    layout, mask, reward, value = case(lengths, "random", [s % 2 for s in range(len(lengths))])
    check(reward, value, layout, mask=mask, gamma=0.9, correction=correction)
    one_chain = Layout.from_lengths(lengths, [0] * len(lengths))
    check(reward, value, one_chain, mask=mask, gamma=0.9, correction=correction)


@st.composite
def layouts(draw):
    lengths = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 8, 9, 16, 17, 40]), max_size=9))
    trajectories = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    runs = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=20))
    mask = list(itertools.islice(itertools.cycle(on for on, size in runs for _ in range(size)), sum(lengths)))
    return Layout.from_lengths(lengths, trajectories), torch.tensor(mask, dtype=torch.bool)


@settings(max_examples=150, deadline=None)
@given(
    case=layouts(),
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(instruction_sets() or [""]),
    correction=st.sampled_from(CORRECTIONS),
    returns_from=st.sampled_from(["local", "corrected"]),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    lam_critic=st.sampled_from([None, 0.0, 0.7, 1.0]),
    has_bootstrap=st.booleans(),
    masked_rewards=st.booleans(),
)
def test_layouts_at_random(
    case, seed, name, correction, returns_from, gamma, lam, lam_critic, has_bootstrap, masked_rewards
):
    layout, mask = case
    generator = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, layout.num_tokens, generator=generator)
    size = layout.num_segments
    taken = torch.zeros(size, dtype=torch.int64).index_add(0, layout.token_segment, mask.long()) > 0
    if not masked_rewards:
        reward = torch.where(mask, reward, 0)
    elif correction != "chain":
        reward = torch.where(layout.segment_to_token(taken), reward, 0)
    bootstrap = torch.randn(size, generator=generator, dtype=torch.float64) if has_bootstrap else None
    with instruction_set(name):
        out = segment_gae(
            reward,
            torch.where(mask, value, NAN),
            layout,
            mask=mask,
            gamma=gamma,
            lam=lam,
            lam_critic=lam_critic,
            correction=correction,
            bootstrap_value=bootstrap,
            returns_from=returns_from,
            backend="cpu",
        )
    critics = None if lam_critic is None else [lam_critic] * size
    shared = (gamma, [lam] * size, critics, correction, None if bootstrap is None else bootstrap.tolist())
    truth = spelt_out(reward, value, mask, layout, *shared, returns_from)
    for actual, true in zip(out, truth, strict=True):
        torch.testing.assert_close(actual.double(), true, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("kind", ["runs", "random"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_output_of_long_segments_is_written(isa, kind, correction):
    layout, mask, reward, value = case([0, 2 * SPAN + 77, 5, SPAN, 0], kind, [0, 0, 1, 1, 1])
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        out = segment_gae(
            reward, torch.where(mask, value, NAN), layout, mask=mask, correction=correction, backend="cpu"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for x in out:
        assert x.isfinite().all() and (x[~mask] == 0).all()


def test_a_reward_on_a_masked_token_inside_a_block(isa):
    mask = torch.tensor([True] * 20 + [False] * 30 + [True] * 10)
    reward = torch.zeros(60)
    reward[37] = 2.0
    out = segment_gae(reward, torch.zeros(60), Layout([0, 60]), mask=mask, lam=0.5, correction="none", backend="cpu")
    assert out.advantage.tolist() == [2.0 * 0.5 ** (19 - t) for t in range(20)] + [0.0] * 40
    reward[37] = NAN  # reaches the tokens before it and none after
    out = segment_gae(reward, torch.zeros(60), Layout([0, 60]), mask=mask, lam=0.5, correction="none", backend="cpu")
    assert out.advantage[:20].isnan().all() and (out.advantage[20:] == 0).all()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="subnormal numbers cost nothing elsewhere")
def test_a_decayed_reward_becomes_zero_and_not_a_subnormal_number(isa):
    reward = torch.zeros(40_000)
    reward[-1] = 1.0
    out = segment_gae(reward, torch.zeros(40_000), Layout([0, 40_000]), lam=0.95, correction="none", backend="cpu")
    expected = 0.95 ** torch.arange(39_999, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(out.advantage.double(), expected, rtol=1e-6, atol=2e-38)
    magnitude = out.advantage[out.advantage != 0].abs()
    assert magnitude.min() >= torch.finfo(torch.float32).tiny and len(magnitude) < 2000
    assert torch.tensor(1e-40) * 1 != 0  # the caller's own arithmetic still has subnormal numbers


def test_bootstrap_value_keeps_its_precision(isa):
    precise = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    value = torch.ones(1)
    out = segment_gae(torch.zeros(1), value, Layout([0, 1]), bootstrap_value=precise, correction="none", backend="cpu")
    assert out.advantage.item() == 2.0**-40


def test_offsets_up_to_the_largest_int32(isa):
    """The kernel alone, on buffers placed so that their first token has an index near 2**31: nothing overflows."""
    size, first = 70_000, 2**31 - 1 - 70_000
    layout, mask, reward, value = case([60_000, 10_000], "runs", [0, 0])
    advantage, returns = torch.full((2, size), NAN)
    cu_seqlens = (layout.cu_seqlens.long() + first).to(torch.int32)
    assert cu_seqlens[-1] == 2**31 - 1
    lam = torch.full((2,), 0.99, dtype=torch.float64)
    extension.segment_gae(
        reward=reward.data_ptr() - 4 * first,
        value=value.data_ptr() - 4 * first,
        mask=mask.data_ptr() - first,
        cu_seqlens=cu_seqlens.data_ptr(),
        segment_trajectory=layout.segment_trajectory.data_ptr(),
        lam=lam.data_ptr(),
        lam_critic=0,
        bootstrap_value=0,
        num_segments=2,
        num_trajectories=1,
        gamma=1.0,
        correction=extension.Correction.position,
        corrected_returns=False,
        threads=2,
        advantage=advantage.data_ptr() - 4 * first,
        returns=returns.data_ptr() - 4 * first,
    )
    expected = segment_gae(reward, value, layout, mask=mask, lam=0.99, backend="cpu")
    assert torch.equal(advantage, expected.advantage) and torch.equal(returns, expected.returns)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_as_accurate_as_pytorch_on_every_instruction_set(isa, correction):
    layout, mask, reward, value, _ = random_case(5, [900, 1, 700, 64], num_trajectories=2)
    arguments = (reward, value, mask, layout, 0.9999, [0.9999] * 4, None, correction, None, "local")
    truth = spelt_out(*arguments)
    peer = spelt_out(*arguments, number=lambda x: torch.tensor(x, dtype=torch.float32))
    out = segment_gae(reward, value, layout, mask=mask, gamma=0.9999, lam=0.9999, correction=correction, backend="cpu")
    for name, *results in zip(("advantage", "returns"), out, peer, truth, strict=True):
        assert_as_accurate(*results, what=name)
