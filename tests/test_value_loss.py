from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mosaic_kernels import Layout, value_loss
from mosaic_kernels.testing import runnable
from tests.backends import CPU_VARIANTS, VARIANTS, assert_draws_as_accurate, using

BACKENDS = runnable("reference", "cpu")


@pytest.fixture(params=VARIANTS)
def backend(request):
    with using(request.param) as name:
        yield name


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
def test_one_token_by_hand(backend, value, old, target, clip, loss, gradient, clipped):
    v = torch.tensor([value], requires_grad=True)
    out = value_loss(v, torch.tensor([old]), torch.tensor([target]), Layout([0, 1]), clip=clip, backend=backend)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss)
    assert v.grad.item() == pytest.approx(gradient)
    assert out.metrics["clip_fraction"].item() == clipped


def test_weights_mask_and_metrics_by_hand(backend):
    layout = Layout([0, 3, 4], [0, 1])
    value = torch.tensor([1.0, float("nan"), 2.0, 0.0], requires_grad=True)
    returns = torch.tensor([0.0, float("inf"), 2.0, 4.0])
    out = value_loss(value, None, returns, layout, mask=torch.tensor([1, 0, 1, 1]), backend=backend)
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
    weighted = value_loss(
        value, None, returns, layout, mask=torch.tensor([1, 0, 1, 1]), token_weight=torch.ones(4), backend=backend
    )
    assert weighted.loss.item() == pytest.approx(8.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["value", "old_value", "returns", "token_weight"])
def test_non_finite_active_input_shows(backend, name, bad):
    inputs = {k: torch.ones(3) for k in ("value", "old_value", "returns", "token_weight")}
    inputs[name][1] = bad
    inputs["value"].requires_grad_()
    out = value_loss(**inputs, layout=Layout([0, 3]), clip=0.2, backend=backend)
    out.loss.backward()
    assert out.loss.isnan() and out.metrics["nonfinite_tokens"].item() == 1
    assert inputs["value"].grad.isnan().tolist() == [False, True, False]
    masked = value_loss(**inputs, layout=Layout([0, 3]), clip=0.2, mask=torch.tensor([1, 0, 1]), backend=backend)
    assert masked.loss.item() == 0 and masked.metrics["nonfinite_tokens"].item() == 0
    assert torch.autograd.grad(masked.loss, inputs["value"])[0].tolist() == [0, 0, 0]


def test_old_value_is_not_read_without_clip(backend):
    v = torch.ones(2)
    assert value_loss(v, torch.full((2,), float("nan")), v, Layout([0, 2]), backend=backend).loss.item() == 0


def test_constants_get_no_gradient(backend):
    value, old, returns, weight = (torch.tensor([x], requires_grad=True) for x in (1.0, 0.5, 3.0, 1.0))
    value_loss(value, old, returns, Layout([0, 1]), token_weight=weight, clip=0.1, backend=backend).loss.backward()
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


def test_empty_and_masked_batches_and_dtypes(backend):
    for layout in (Layout([0]), Layout([0, 0], [3]), Layout([0, 3])):
        value = torch.zeros(layout.num_tokens, requires_grad=True)
        mask = torch.zeros(layout.num_tokens, dtype=torch.bool)
        out = value_loss(value, value, value, layout, mask=mask, clip=0.1, backend=backend)
        out.loss.backward()
        assert out.loss.item() == 0 and not value.grad.any() and not any(m.item() for m in out.metrics.values())
    half = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    out = value_loss(half, None, torch.zeros(3), Layout([0, 3]), backend=backend)
    out.loss.backward()
    assert out.loss.dtype == torch.float32 and half.grad.dtype == torch.bfloat16


def test_explained_variance_of_equal_returns_is_exactly_zero(backend):
    for level in (0.1, 1 / 3, -3e5):  # the mean of 1,001 of them need not be equal to them
        returns, value = torch.full((1001,), level), torch.linspace(0, 1, 1001)
        out = value_loss(value, None, returns, Layout([0, 1001]), backend=backend)
        assert out.metrics["explained_variance"].item() == 0


def random_inputs(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old, noise, returns, weight = torch.randn(4, size, generator=generator)
    cuts = sorted(torch.randint(0, size + 1, (4,), generator=generator).tolist())
    layout = Layout([0, *cuts, size], [0, 1, 0, 2, 1])
    mask = torch.rand(size, generator=generator) < 0.7
    return (old + 0.3 * noise, old, returns + 5), layout, {"mask": mask, "token_weight": weight.abs() / (size + 1)}


def result(inputs, layout, options, dtype=torch.float32, **more):
    value, *constants = (x.to(dtype).clone() for x in inputs)
    options = options | {"token_weight": options["token_weight"].to(dtype)} if "token_weight" in options else options
    value.requires_grad_()
    out = value_loss(value, *constants, layout, **options, **more)
    return {"loss": out.loss.detach(), "gradient": torch.autograd.grad(out.loss, value)[0], **out.metrics}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("size", [1, 7, 255, 257, 16384, 16385, 70001])
def test_as_accurate_as_pytorch(backend, size, clip, weighted):
    def draw(seed):
        inputs, layout, options = random_inputs(size, seed)
        options = {"mask": options["mask"], "clip": clip} | ({} if not weighted else options)
        return (
            result(inputs, layout, options, backend=backend),
            result(inputs, layout, options, backend="reference"),
            result(inputs, layout, options, torch.float64, backend="reference"),
        )

    assert_draws_as_accurate(draw)


@pytest.mark.parametrize("far", [0.0, 1e4])
def test_explained_variance_far_from_zero_and_after_an_outlier(backend, far):
    (value, old, returns), layout, options = random_inputs(40_000)
    returns = value + 0.5 * (returns - 5) + far
    returns[:3] = 0 if far else 1e3
    actual = result((value + far, old, returns), layout, options, backend=backend)["explained_variance"]
    truth = result((value + far, old, returns), layout, options, torch.float64)["explained_variance"]
    assert actual.item() == pytest.approx(truth.item(), abs=2e-5)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled extension is not built")
def test_same_bits_for_any_thread_count_and_run():
    inputs, layout, options = random_inputs(150_001)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            results.append(result(inputs, layout, options, clip=0.2, backend="cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0][k], other[k]) for other in results[1:] for k in other)


@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_non_finite_inputs_give_what_the_reference_gives(variant):
    for seed in range(40):
        inputs, layout, options = random_inputs(70, seed)
        generator = torch.Generator().manual_seed(seed)
        for x in (*inputs, options["token_weight"]):
            if torch.rand((), generator=generator) < 0.5:
                at = torch.randint(0, 70, (), generator=generator)
                x[at] = [float("nan"), float("inf"), -float("inf")][seed % 3]
        with using(variant):
            actual = result(inputs, layout, options, clip=0.2, backend="cpu")
        torch.testing.assert_close(
            actual, result(inputs, layout, options, clip=0.2, backend="reference"), equal_nan=True
        )


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled extension is not built")
def test_every_output_is_written_and_opcheck():
    inputs, layout, options = random_inputs(300)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        out = result(inputs, layout, options, clip=0.2, backend="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in out.values()) and not out["gradient"][~options["mask"]].any()
    ids = (layout.cu_seqlens, layout.segment_trajectory, layout.num_trajectories)
    value, old, returns = inputs
    clip = torch.tensor([0.2], dtype=torch.float64)
    for old_value, weight, wanted in ((old, None, True), (None, options["token_weight"], False)):
        arguments = (value, old_value, returns, options["mask"], weight, *ids, clip, wanted)
        torch.library.opcheck(torch.ops.mosaic_kernels.value_loss.default, arguments)


def test_meta_tensors():
    meta = torch.empty(3, device="meta")
    assert value_loss(meta, meta, meta, Layout([0, 3]).to("meta"), clip=0.1).loss.device.type == "meta"


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_numbers_and_lengths_compile_at_most_once_more(backend):  # pitfall 7
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(functools.partial(value_loss, backend=backend), fullgraph=True, backend=counter)
    for clip, lengths in ((0.1, [3, 4]), (0.2, [2, 6]), (0.3, [5, 5, 1]), (0.6, [1, 2, 3, 4])):
        layout = Layout.from_lengths(lengths)
        value, old, returns = torch.randn(3, layout.num_tokens, generator=torch.Generator().manual_seed(len(lengths)))
        results = []
        for f in (compiled, functools.partial(value_loss, backend=backend)):
            leaf = value.clone().requires_grad_()
            out = f(leaf, old, returns, layout, clip=clip)
            results.append((out.loss, torch.autograd.grad(out.loss, leaf)[0], out.metrics))
        torch.testing.assert_close(*results)
    assert counter.frame_count <= 3


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
        ({"backend": "fast"}, ValueError, "backend must be None or one of reference, cpu, triton, cuda, got 'fast'"),
        ({"backend": "triton"}, NotImplementedError, "value_loss: backend='triton' cannot serve this call: "),
    ],
)
def test_errors(change, error, message):
    zeros = torch.zeros(3)
    arguments = {"value": zeros, "old_value": zeros, "returns": zeros, "layout": Layout([0, 3]), **change}
    with pytest.raises(error, match=message):
        value_loss(**arguments)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled extension is not built")
def test_float64_is_for_the_reference():
    x = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="the float64 value asks for float64: use backend='reference'"):
        value_loss(x, None, x, Layout([0, 3]), backend="cpu")
    assert value_loss(x, None, x, Layout([0, 3])).loss.dtype == torch.float64
