from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mosaic_kernels import Layout, policy_loss, rollout_correction

LAYOUT = Layout([0, 2, 5, 6], [0, 1, 0])
MASK = torch.tensor([1, 1, 1, 0, 1, 1])
RATIO = torch.tensor(
    [3.0, 0.5, 1.2, 1e9, 0.5, 0.1], dtype=torch.float64
)  # segments: 1.5, 0.6, 0.1; trajectories: 0.15, 0.6
ROLLOUT = torch.full((6,), -2.0, dtype=torch.float64)


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
def test_weights_by_hand(level, floor, weight, keep):
    out = rollout_correction(ROLLOUT + RATIO.log(), ROLLOUT, LAYOUT, mask=MASK, level=level, cap=2.0, floor=floor)
    assert out.weight.tolist() == pytest.approx(weight)
    assert out.keep.tolist() == [bool(k) for k in keep]
    assert not out.weight.requires_grad


def test_bounds_belong_to_the_kept_interval():
    logprob = torch.tensor([2.0, 0.5], dtype=torch.float64).log()
    out = rollout_correction(logprob, torch.zeros(2), Layout([0, 2]), cap=2.0, floor=0.5)
    assert out.keep.tolist() == [True, True] and out.metrics["dropped_fraction"].item() == 0
    assert out.weight.tolist() == pytest.approx([2.0, 0.5])


def test_metrics_by_hand():
    metrics = rollout_correction(ROLLOUT + RATIO.log(), ROLLOUT, LAYOUT, mask=MASK, cap=2.0).metrics
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
        }
    )
    dropped = rollout_correction(ROLLOUT + RATIO.log(), ROLLOUT, LAYOUT, mask=MASK, cap=2.0, floor=0.3).metrics
    assert (dropped["dropped_fraction"].item(), dropped["capped_fraction"].item()) == pytest.approx((2 / 5, 0.0))


@pytest.mark.parametrize("level", ["token", "segment", "trajectory"])
def test_extremes_are_clamped_and_masked_values_not_read(level):
    logprob, rollout = torch.tensor([-1.0, -1.0, float("nan")]), torch.tensor([-101.0, -1.0, float("-inf")])
    out = rollout_correction(logprob, rollout, Layout([0, 1, 3]), mask=torch.tensor([1, 1, 0]), level=level, cap=1e30)
    assert out.weight.tolist() == pytest.approx([math.exp(20), 1.0, 0.0])
    assert out.metrics["nonfinite_tokens"].item() == 0


@pytest.mark.parametrize("floor", [None, 0.5])
@pytest.mark.parametrize("level", ["token", "segment"])
def test_a_non_finite_log_prob_reaches_the_loss(level, floor):
    # dropping it in silence would hide an engine that returns NaN
    rollout = torch.tensor([-1.0, float("-inf"), -1.0])
    layout, logprob = Layout([0, 2, 3]), torch.full((3,), -1.0)
    out = rollout_correction(logprob, rollout, layout, level=level, floor=floor)
    assert out.weight.isnan().tolist() == [level == "segment", True, False] and out.keep.all()
    assert out.metrics["nonfinite_tokens"].item() == 1
    assert policy_loss(logprob, logprob, logprob, layout, mask=out.keep, importance_weight=out.weight).loss.isnan()


def test_empty_meta_and_compile():
    for layout in (Layout([0]), Layout([0, 0, 2])):
        x, mask = torch.zeros(layout.num_tokens), torch.zeros(layout.num_tokens, dtype=torch.bool)
        for level in ("token", "segment", "trajectory"):
            out = rollout_correction(x, x, layout, mask=mask, level=level, floor=0.1)
            assert not out.weight.any() and not out.keep.any() and not any(m.item() for m in out.metrics.values())
    meta = torch.empty(6, device="meta")
    assert rollout_correction(meta, meta, LAYOUT.to("meta"), level="trajectory").weight.device.type == "meta"
    torch._dynamo.reset()
    compiled = torch.compile(rollout_correction, fullgraph=True, backend="aot_eager")
    arguments = {"mask": MASK, "level": "trajectory", "floor": 0.3}
    torch.testing.assert_close(
        compiled(RATIO.log(), ROLLOUT, LAYOUT, **arguments).weight,
        rollout_correction(RATIO.log(), ROLLOUT, LAYOUT, **arguments).weight,
    )


def test_other_bounds_compile_at_most_once_more():  # pitfall 7
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rollout_correction, fullgraph=True, backend=counter)
    for cap, floor in ((2.0, 0.5), (2.5, 0.4), (3.0, 0.3), (1.5, 0.9)):
        arguments = {"mask": MASK, "cap": cap, "floor": floor}
        got, want = (f(RATIO.log(), ROLLOUT, LAYOUT, **arguments) for f in (compiled, rollout_correction))
        torch.testing.assert_close(got.weight, want.weight)
        assert torch.equal(got.keep, want.keep)
    assert counter.frame_count <= 2


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
    ],
)
def test_errors(change, error, message):
    arguments = {"logprob": torch.zeros(3), "rollout_logprob": torch.zeros(3), "layout": Layout([0, 3]), **change}
    with pytest.raises(error, match=message):
        rollout_correction(**arguments)
