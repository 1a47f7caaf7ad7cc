from __future__ import annotations

import functools
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mosaic_kernels import Layout, policy_loss, rollout_correction
from mosaic_kernels.testing import runnable
from tests.backends import CPU_VARIANTS, VARIANTS, assert_draws_as_accurate, exact_dtype, using

BACKENDS = runnable("reference", "cpu")

LAYOUT = Layout([0, 2, 5, 6], [0, 1, 0])
MASK = torch.tensor([1, 1, 1, 0, 1, 1])
RATIO = torch.tensor(
    [3.0, 0.5, 1.2, 1e9, 0.5, 0.1], dtype=torch.float64
)  # segments: 1.5, 0.6, 0.1; trajectories: 0.15, 0.6
ROLLOUT = torch.full((6,), -2.0, dtype=torch.float64)


@pytest.fixture(params=VARIANTS)
def backend(request):
    with using(request.param) as name:
        yield name


@pytest.mark.parametrize(
    ("level", "floor", "weight", "keep"),
    [
        ("token", None, [2.0, 0.5, 1.2, 0, 0.5, 0.1], [1, 1, 1, 0, 1, 1]),
        ("token", 0.3, [0, 0.5, 1.2, 0, 0.5, 0], [0, 1, 1, 0, 1, 0]),
        ("segment", None, [1.5, 1.5, 0.6, 0, 0.6, 0.1], [1, 1, 1, 0, 1, 1]),
        ("segment", 0.3, [1.5, 1.5, 0.6, 0, 0.6, 0], [1, 1, 1, 0, 1, 0]),
        ("trajectory", None, [0.15, 0.15, 0.6, 0, 0.6, 0.15], [1, 1, 1, 0, 1, 1]),
        ("trajectory", 0.3, [0, 0, 0.6, 0, 0.6, 0], [0, 0, 1, 0, 1, 0]),
    ],
)
def test_weights_by_hand(backend, level, floor, weight, keep):
    new, old = ((ROLLOUT + x).to(exact_dtype(backend)) for x in (RATIO.log(), 0))
    options = dict(mask=MASK, level=level, cap=2.0, floor=floor, backend=backend)
    out = rollout_correction(new, old, LAYOUT, **options)
    assert out.weight.tolist() == pytest.approx(weight)
    assert out.keep.tolist() == [bool(k) for k in keep]
    assert not out.weight.requires_grad


def test_bounds_belong_to_the_kept_interval(backend):
    logprob = torch.tensor([1.0, -0.5], dtype=exact_dtype(backend))
    cap, floor = rollout_correction(logprob, torch.zeros(2), Layout([0, 2]), cap=9.0, backend=backend).weight.tolist()
    out = rollout_correction(logprob, torch.zeros(2), Layout([0, 2]), cap=cap, floor=floor, backend=backend)
    assert out.keep.tolist() == [True, True] and out.metrics["dropped_fraction"].item() == 0
    assert out.weight.tolist() == [cap, floor] == pytest.approx([math.exp(1), math.exp(-0.5)])


def test_metrics_by_hand(backend):
    new, old = ((ROLLOUT + x).to(exact_dtype(backend)) for x in (RATIO.log(), 0))
    metrics = rollout_correction(new, old, LAYOUT, mask=MASK, cap=2.0, backend=backend).metrics
    active = torch.cat([RATIO[:3], RATIO[4:]])
    assert {k: v.item() for k, v in metrics.items()} == pytest.approx(
        {
            "ratio_mean": active.mean().item(),
            "ratio_max": 3.0,
            "capped_fraction": 1 / 5,
            "dropped_fraction": 0.0,
            "logprob_difference": active.log().abs().mean().item(),
            "logprob_difference_max": -math.log(0.1),
            "kl": -active.log().mean().item(),
            "policy_tokens": 5,
            "nonfinite_tokens": 0,
        },
        rel=1e-6,
    )
    dropped = rollout_correction(new, old, LAYOUT, mask=MASK, cap=2.0, floor=0.3, backend=backend).metrics
    assert (dropped["dropped_fraction"].item(), dropped["capped_fraction"].item()) == pytest.approx((2 / 5, 0.0))


@pytest.mark.parametrize("level", ["token", "segment", "trajectory"])
def test_extremes_are_clamped_and_masked_values_not_read(backend, level):
    logprob, rollout = torch.tensor([-1.0, -1.0, float("nan")]), torch.tensor([-101.0, -1.0, float("-inf")])
    options = dict(mask=torch.tensor([1, 1, 0]), level=level, cap=1e30, backend=backend)
    out = rollout_correction(logprob, rollout, Layout([0, 1, 3]), **options)
    assert out.weight.tolist() == pytest.approx([math.exp(20), 1.0, 0.0], rel=1e-6)
    assert out.metrics["nonfinite_tokens"].item() == 0


@pytest.mark.parametrize("floor", [None, 0.5])
@pytest.mark.parametrize("level", ["token", "segment"])
def test_a_non_finite_log_prob_reaches_the_loss(backend, level, floor):
    # dropping it in silence would hide an engine that returns NaN
    rollout = torch.tensor([-1.0, float("-inf"), -1.0])
    layout, logprob = Layout([0, 2, 3]), torch.full((3,), -1.0)
    out = rollout_correction(logprob, rollout, layout, level=level, floor=floor, backend=backend)
    assert out.weight.isnan().tolist() == [level == "segment", True, False] and out.keep.all()
    assert out.metrics["nonfinite_tokens"].item() == 1
    assert policy_loss(logprob, logprob, logprob, layout, mask=out.keep, importance_weight=out.weight).loss.isnan()


def test_empty(backend):
    for layout in (Layout([0]), Layout([0, 0], [2]), Layout([0, 0, 2])):
        x, mask = torch.zeros(layout.num_tokens), torch.zeros(layout.num_tokens, dtype=torch.bool)
        for level in ("token", "segment", "trajectory"):
            out = rollout_correction(x, x, layout, mask=mask, level=level, floor=0.1, backend=backend)
            assert out.weight.shape == out.keep.shape == (layout.num_tokens,) and out.keep.dtype == torch.bool
            assert not out.weight.any() and not out.keep.any() and not any(m.item() for m in out.metrics.values())


def random_inputs(size, seed=0, spread=0.4):
    generator = torch.Generator().manual_seed(seed)
    rollout, noise = -torch.rand(size, generator=generator), torch.randn(size, generator=generator)
    cuts = sorted(torch.randint(0, size + 1, (5,), generator=generator).tolist())
    layout = Layout([0, *cuts, size], [0, 1, 0, 2, 1, 4])
    return rollout + spread * noise, rollout, layout, torch.rand(size, generator=generator) < 0.7


@pytest.mark.parametrize("floor", [None, 0.4])
@pytest.mark.parametrize("level", ["token", "segment", "trajectory"])
@pytest.mark.parametrize("size", [1, 7, 255, 257, 16384, 16385, 70001])
def test_as_accurate_as_pytorch(backend, size, level, floor):
    def draw(seed):
        new, rollout, layout, mask = random_inputs(size, seed, 0.4 if level == "token" else 0.4 / size**0.5)

        def result(dtype, backend):
            out = rollout_correction(
                new.to(dtype), rollout.to(dtype), layout, mask=mask, level=level, cap=1.5, floor=floor, backend=backend
            )
            return {"weight": out.weight, "keep": out.keep, **out.metrics}

        return (
            result(torch.float32, backend),
            result(torch.float32, "reference"),
            result(torch.float64, "reference"),
        )

    assert_draws_as_accurate(draw)


@pytest.mark.parametrize("level", ["token", "segment", "trajectory"])
@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_non_finite_inputs_give_what_the_reference_gives(variant, level):
    for seed in range(40):
        new, rollout, layout, mask = random_inputs(70, seed, 0.1)
        generator = torch.Generator().manual_seed(seed)
        for x in (new, rollout):
            x[torch.randint(0, 70, (2,), generator=generator)] = [math.nan, math.inf, -math.inf][seed % 3]
        options = dict(mask=mask, level=level, floor=0.5 if seed % 2 else None)
        with using(variant):
            actual = rollout_correction(new, rollout, layout, backend="cpu", **options)
        want = rollout_correction(new, rollout, layout, backend="reference", **options)
        torch.testing.assert_close(actual, want, equal_nan=True)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled extension is not built")
@pytest.mark.parametrize("level", ["token", "segment", "trajectory"])
def test_same_bits_for_any_thread_count_and_every_output_written(level):
    new, rollout, layout, mask = random_inputs(150_001, spread=1e-3)
    before, results = torch.get_num_threads(), []
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            out = rollout_correction(new, rollout, layout, mask=mask, level=level, backend="cpu")
            results.append((out.weight, out.keep, *out.metrics.values()))
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert all(x.isfinite().all() for x in results[0])


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled extension is not built")
def test_opcheck():
    new, rollout, layout, mask = random_inputs(60)
    ids = (layout.cu_seqlens, layout.segment_trajectory, layout.num_trajectories)
    for level in ("token", "trajectory"):
        arguments = (new, rollout, mask, *ids, level, torch.tensor([2.0, -1.0], dtype=torch.float64))
        torch.library.opcheck(torch.ops.mosaic_kernels.rollout_correction.default, arguments)


def test_strided_inputs_and_other_dtypes(backend):
    new, rollout, layout, mask = random_inputs(100)
    want = rollout_correction(new, rollout, layout, mask=mask, backend=backend)
    strided = [torch.stack([x, x], dim=1)[:, 0] for x in (new, rollout, mask)]
    got = rollout_correction(strided[0].requires_grad_(), strided[1], layout, mask=strided[2], backend=backend)
    assert torch.equal(got.weight, want.weight) and torch.equal(got.keep, want.keep) and not got.weight.requires_grad
    half, single = (
        rollout_correction(new.bfloat16().to(d), rollout, layout, mask=mask, backend=backend)
        for d in (torch.bfloat16, torch.float32)
    )
    assert half.weight.dtype == torch.float32 and torch.equal(half.weight, single.weight)


def test_meta_tensors():
    meta = torch.empty(6, device="meta")
    assert rollout_correction(meta, meta, LAYOUT.to("meta"), level="trajectory").weight.device.type == "meta"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", ["token", "trajectory"])
def test_other_bounds_and_lengths_compile_at_most_once_more(backend, level):  # pitfall 7
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = functools.partial(rollout_correction, level=level, backend=backend)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for (cap, floor), size in zip(((2.0, 0.5), (2.5, 0.4), (3.0, 0.3), (1.5, 0.9)), (20, 30, 41, 52), strict=True):
        new, rollout, layout, mask = random_inputs(size, spread=0.1)
        torch.testing.assert_close(
            compiled(new, rollout, layout, mask=mask, cap=cap, floor=floor),
            run(new, rollout, layout, mask=mask, cap=cap, floor=floor),
        )
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logprob": torch.zeros(2)}, ValueError, r"logprob must have shape \[T\] = \[3\], got \[2\]"),
        ({"rollout_logprob": None}, TypeError, "rollout_logprob must be a tensor .* got NoneType"),
        ({"level": "turn"}, ValueError, "level must be one of token, segment, trajectory, got 'turn'"),
        ({"cap": 0}, ValueError, "cap must be a finite number > 0, got 0"),
        ({"cap": math.inf}, ValueError, "cap must be a finite number > 0, got inf"),
        ({"floor": 2.0}, ValueError, r"floor must be None or in \[0, cap\), got 2.0"),
        ({"floor": -0.1}, ValueError, r"floor must be None or in \[0, cap\), got -0.1"),
        ({"floor": "a"}, TypeError, "floor must be a number, got 'a'"),
        ({"backend": "fast"}, ValueError, "backend must be None or one of reference, cpu, triton, cuda, got 'fast'"),
        ({"backend": "triton"}, NotImplementedError, "rollout_correction: backend='triton' cannot serve this call: "),
    ],
)
def test_errors(change, error, message):
    arguments = {"logprob": torch.zeros(3), "rollout_logprob": torch.zeros(3), "layout": Layout([0, 3]), **change}
    with pytest.raises(error, match=message):
        rollout_correction(**arguments)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled extension is not built")
def test_float64_is_for_the_reference():
    with pytest.raises(NotImplementedError, match="the float64 logprob asks for float64: use backend='reference'"):
        rollout_correction(ROLLOUT, ROLLOUT, LAYOUT, backend="cpu")
    assert rollout_correction(ROLLOUT, ROLLOUT, LAYOUT).weight.dtype == torch.float64


@pytest.mark.parametrize("level", ["segment", "trajectory"])
def test_a_unit_of_large_differences_that_cancel_is_as_accurate_as_pytorch(backend, level):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        half = 30 * torch.randn(4, 100, generator=generator)
        logprob = torch.cat([half, 0.01 - half.flip(1)], 1).flatten()
        zero, layout = torch.zeros(800), Layout.from_lengths([200] * 4, [0, 1, 2, 3])
        options = dict(level=level, cap=1e6)
        results = (
            rollout_correction(logprob, zero, layout, backend=backend, **options),
            rollout_correction(logprob, zero, layout, backend="reference", **options),
            rollout_correction(logprob.double(), zero.double(), layout, backend="reference", **options),
        )
        return [{"weight": out.weight} for out in results]

    assert_draws_as_accurate(draw)
