from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mosaic_kernels import Layout, value_loss

# One token: (value, old, return, clip, L, dL/dvalue, clipped)
HAND = [
    (1.0, 0.0, 3.0, None, 2.0, -2.0, 0),
    (1.0, 0.0, 3.0, 0.5, 3.125, 0.0, 1),  # moved towards the return beyond the range: the bounded error is larger
    (1.0, 0.0, -1.0, 0.5, 2.0, 2.0, 0),  # moved away: the plain error is larger and pulls back
    (0.3, 0.0, 3.0, 0.5, 3.645, -2.7, 0),  # inside the range
    (-1.0, 0.0, -3.0, 0.5, 3.125, 0.0, 1),
    (0.5, 0.0, 3.0, 0.5, 3.125, -2.5, 0),  # on the bound itself the gradient stays
    (4.0, 0.0, 2.25, 0.5, 1.53125, 1.75, 0),  # overshot by as much as the bounded value falls short
]


@pytest.mark.parametrize(("value", "old", "target", "clip", "loss", "gradient", "clipped"), HAND)
def test_one_token_by_hand(value, old, target, clip, loss, gradient, clipped):
    v = torch.tensor([value], requires_grad=True)
    out = value_loss(v, torch.tensor([old]), torch.tensor([target]), Layout([0, 1]), clip=clip)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss)
    assert v.grad.item() == pytest.approx(gradient)
    assert out.metrics["clip_fraction"].item() == clipped


def test_weights_mask_and_metrics_by_hand():
    layout = Layout([0, 3, 4], [0, 1])
    value = torch.tensor([1.0, float("nan"), 2.0, 0.0], requires_grad=True)
    returns = torch.tensor([0.0, float("inf"), 2.0, 4.0])
    out = value_loss(value, None, returns, layout, mask=torch.tensor([1, 0, 1, 1]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5 / 4 + 0 + 8 / 2)
    assert value.grad.tolist() == pytest.approx([0.25, 0.0, 0.0, -2.0])
    metrics = {k: v.item() for k, v in out.metrics.items()}
    residual = torch.tensor([-1.0, 0.0, 4.0]).var(unbiased=False) / torch.tensor([0.0, 2.0, 4.0]).var(unbiased=False)
    assert metrics == pytest.approx(
        {
            "clip_fraction": 0.0,
            "value_mean": 1.0,
            "return_mean": 2.0,
            "explained_variance": 1 - residual.item(),
            "policy_tokens": 3,
            "nonfinite_tokens": 0,
        }
    )
    weighted = value_loss(value, None, returns, layout, mask=torch.tensor([1, 0, 1, 1]), token_weight=torch.ones(4))
    assert weighted.loss.item() == pytest.approx(8.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["value", "old_value", "returns", "token_weight"])
def test_non_finite_active_input_shows(name, bad):
    inputs = {k: torch.ones(3) for k in ("value", "old_value", "returns", "token_weight")}
    inputs[name][1] = bad
    inputs["value"].requires_grad_()
    out = value_loss(**inputs, layout=Layout([0, 3]), clip=0.2)
    out.loss.backward()
    assert out.loss.isnan() and out.metrics["nonfinite_tokens"].item() == 1
    assert inputs["value"].grad.isnan().tolist() == [False, True, False]
    masked = value_loss(**inputs, layout=Layout([0, 3]), clip=0.2, mask=torch.tensor([1, 0, 1]))
    assert masked.loss.item() == 0 and masked.metrics["nonfinite_tokens"].item() == 0
    assert torch.autograd.grad(masked.loss, inputs["value"])[0].tolist() == [0, 0, 0]


def test_old_value_is_not_read_without_clip():
    v = torch.ones(2)
    assert value_loss(v, torch.full((2,), float("nan")), v, Layout([0, 2])).loss.item() == 0


def test_constants_get_no_gradient():
    value, old, returns, weight = (torch.tensor([x], requires_grad=True) for x in (1.0, 0.5, 3.0, 1.0))
    value_loss(value, old, returns, Layout([0, 1]), token_weight=weight, clip=0.1).loss.backward()
    assert old.grad is None and returns.grad is None and weight.grad is None and value.grad is not None


def test_gradcheck_and_loop():
    generator = torch.Generator().manual_seed(0)
    value, old, returns, weight = torch.randn(4, 30, generator=generator, dtype=torch.float64)
    layout, mask = Layout([0, 10, 10, 30], [0, 1, 0]), torch.rand(30, generator=generator) < 0.7
    value.requires_grad_()
    want = 0.0
    for t in range(30):
        if mask[t]:
            v, o, target = value[t].item(), old[t].item(), returns[t].item()
            bounded = o + max(-0.2, min(0.2, v - o))
            want += weight[t].item() * 0.5 * max((v - target) ** 2, (bounded - target) ** 2)
    arguments = {"mask": mask, "token_weight": weight, "clip": 0.2}
    assert value_loss(value, old, returns, layout, **arguments).loss.item() == pytest.approx(want, rel=1e-12)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, layout, **arguments).loss, (value,))


def test_empty_and_masked_batches_dtypes_meta_and_compile():
    for layout in (Layout([0]), Layout([0, 3])):
        value = torch.zeros(layout.num_tokens, requires_grad=True)
        mask = torch.zeros(layout.num_tokens, dtype=torch.bool)
        out = value_loss(value, value, value, layout, mask=mask, clip=0.1)
        out.loss.backward()
        assert out.loss.item() == 0 and not value.grad.any() and not any(m.item() for m in out.metrics.values())
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    out = value_loss(half, None, torch.zeros(3), Layout([0, 3]))
    out.loss.backward()
    assert out.loss.dtype == torch.float32 and half.grad.dtype == torch.bfloat16
    meta = torch.empty(3, device="meta")
    assert value_loss(meta, meta, meta, Layout([0, 3]).to("meta"), clip=0.1).loss.device.type == "meta"
    torch._dynamo.reset()
    value, returns = torch.randn(2, 3)
    compiled = torch.compile(value_loss, fullgraph=True, backend="aot_eager")(
        value, value - 1, returns, Layout([0, 3]), clip=0.1
    )
    torch.testing.assert_close(compiled.loss, value_loss(value, value - 1, returns, Layout([0, 3]), clip=0.1).loss)


def test_another_clip_compiles_at_most_once_more():  # pitfall 7
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(value_loss, fullgraph=True, backend=counter)
    value, old, returns = torch.tensor([1.0, -1.0, 0.5]), torch.zeros(3), torch.tensor([0.9, -0.9, 3.0])
    for clip in (0.1, 0.2, 0.3, 0.6):
        got, want = (f(value, old, returns, Layout([0, 3]), clip=clip).loss for f in (compiled, value_loss))
        torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"value": torch.zeros(2)}, ValueError, r"value must have shape \[T\] = \[3\], got \[2\]"),
        ({"old_value": torch.zeros(2)}, ValueError, r"old_value must have shape .* got \[2\]"),
        ({"returns": torch.zeros(3, dtype=torch.int32)}, TypeError, "returns must be floating point, got torch.int32"),
        ({"token_weight": torch.zeros(2)}, ValueError, r"token_weight must have shape .* got \[2\]"),
        ({"clip": 0.0}, ValueError, "clip must be a finite number > 0, or None, got 0.0"),
        ({"clip": "x"}, TypeError, "clip must be a number, got 'x'"),
        ({"clip": 0.2, "old_value": None}, ValueError, "old_value must be given with clip: pass the values"),
        ({"mask": torch.zeros(3)}, TypeError, "mask must be bool or integer"),
        ({"layout": None}, TypeError, "layout must be a Layout, got NoneType"),
    ],
)
def test_errors(change, error, message):
    zeros = torch.zeros(3)
    arguments = {"value": zeros, "old_value": zeros, "returns": zeros, "layout": Layout([0, 3]), **change}
    with pytest.raises(error, match=message):
        value_loss(**arguments)
