"""How `segment_gae` is called: threads, strides, dtypes, torch.compile, errors; and the two functions beside it."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mosaic_kernels import Layout, adaptive_lambda, segment_gae, terminal_reward
from mosaic_kernels.segment_gae import CORRECTIONS
from mosaic_kernels.testing import runnable
from tests.gae_oracle import random_case

BACKENDS = runnable("reference", "cpu")
NAN = math.nan


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


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
        with pytest.raises(NotImplementedError, match="the float64 reward asks for float64: use backend='reference'"):
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
