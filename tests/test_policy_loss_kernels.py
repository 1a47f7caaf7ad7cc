"""The compiled backends of `policy_loss`: accuracy, odd sizes, bits, non-finite inputs, gradients, and fuzzing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_kernels import (
    Cispo,
    Clip,
    EntropyBonus,
    KLPenalty,
    Layout,
    Reinforce,
    Sao,
    normalization_weights,
    policy_loss,
)
from mosaic_kernels.policy_loss.normalization import KINDS, weights_of
from tests.backends import CPU_VARIANTS, assert_draws_as_accurate, using

pytestmark = pytest.mark.skipif(not CPU_VARIANTS, reason="the compiled extension is not built")
OBJECTIVES = [
    Clip(),
    Clip(low=0.1, high=0.5, dual=1.5),
    Clip(low=1, high=math.inf),
    Clip(level="segment", low=0.02, high=0.02),
    Clip(level="trajectory", low=0.02, high=0.02, dual=1.01),
    Cispo(),
    Sao(low=0.3, high=0.3),
    Reinforce(),
]
NAMES = ("logprob", "old_logprob", "advantage", "weight", "importance", "ref", "entropy")


@pytest.fixture(params=CPU_VARIANTS)
def variant(request):
    with using(request.param):
        yield request.param


def random_layout(lengths, seed=0, trajectories=4):
    generator = torch.Generator().manual_seed(seed)
    return Layout.from_lengths(lengths, torch.randint(0, trajectories, (len(lengths),), generator=generator))


def cut(size, seed):
    """Six lengths that add up to `size`, some of them 0."""
    marks = torch.randint(0, size + 1, (5,), generator=torch.Generator().manual_seed(seed)).sort().values.tolist()
    return [b - a for a, b in zip([0, *marks], [*marks, size], strict=True)]


def random_inputs(layout, seed=0, active=0.7):
    size, generator = layout.num_tokens, torch.Generator().manual_seed(seed)
    values = torch.randn(len(NAMES), size, generator=generator)
    x = dict(zip(NAMES, values, strict=True))
    x["logprob"] = -x["logprob"].abs()
    x["old_logprob"], x["ref"] = x["logprob"] + 0.3 * x["old_logprob"], x["logprob"] + 0.5 * x["ref"]
    x["advantage"][torch.rand(size, generator=generator) < 0.1] = 0
    x["weight"], x["importance"], x["entropy"] = (
        x["weight"].abs() / (1 + size),
        x["importance"].abs(),
        x["entropy"].abs(),
    )
    return x, torch.rand(size, generator=generator) < active


def result(x, mask, layout, objective, backend="cpu", dtype=torch.float32, estimator="k3", terms=True, weighted=True):
    x = {name: value.to(dtype).clone() for name, value in x.items()}
    logprob, entropy = x["logprob"].requires_grad_(), x["entropy"].requires_grad_()
    options = {"token_weight": x["weight"]} if weighted else {}
    if terms:
        options["importance_weight"] = x["importance"]
        options["kl"], options["entropy_bonus"] = KLPenalty(x["ref"], 0.3, estimator), EntropyBonus(entropy, 0.2)
    out = policy_loss(
        logprob, x["old_logprob"], x["advantage"], layout, mask=mask, objective=objective, backend=backend, **options
    )
    dlogprob, dentropy = torch.autograd.grad(out.loss, (logprob, entropy), allow_unused=True)
    found = {"loss": out.loss.detach(), "dlogprob": dlogprob, **out.metrics}
    return found if dentropy is None else {**found, "dentropy": dentropy}


@pytest.mark.parametrize("terms", [True, False])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 255, 257, 16384, 16385])
def test_as_accurate_as_pytorch(variant, size, objective, terms):
    def draw(seed):
        layout = random_layout(cut(size, seed), seed)
        x, mask = random_inputs(layout, seed)
        options = dict(estimator=("k1", "k2", "k3")[seed % 3], terms=terms, weighted=terms or seed % 2 == 0)
        return (
            result(x, mask, layout, objective, **options),
            result(x, mask, layout, objective, "reference", **options),
            result(x, mask, layout, objective, "reference", torch.float64, **options),
        )

    assert_draws_as_accurate(draw)


@pytest.mark.parametrize("objective", [Clip(), Clip(level="segment", low=1e-3, high=1e-3)], ids=str)
def test_a_long_segment_is_as_accurate_as_pytorch(variant, objective):
    def draw(seed):
        layout = random_layout([200_001, 0, 40_000], seed)
        x, mask = random_inputs(layout, seed)
        return (
            result(x, mask, layout, objective),
            result(x, mask, layout, objective, "reference"),
            result(x, mask, layout, objective, "reference", torch.float64),
        )

    assert_draws_as_accurate(draw, draws=3)


@pytest.mark.parametrize("level", ["segment", "trajectory"])
def test_a_unit_of_large_differences_that_cancel_is_as_accurate_as_pytorch(variant, level):
    def draw(seed):
        layout = Layout.from_lengths([200] * 4, [0, 1, 2, 3])
        x, mask = random_inputs(layout, seed, active=1.1)
        half = 300 * torch.randn(4, 100, generator=torch.Generator().manual_seed(seed))
        x["old_logprob"], x["logprob"] = torch.zeros(800), torch.cat([half, 0.01 - half.flip(1)], 1).flatten()
        options = dict(terms=False)
        arguments = x, mask, layout, Clip(low=1.0, high=math.inf, level=level)
        results = (
            result(*arguments, **options),
            result(*arguments, "reference", **options),
            result(*arguments, "reference", torch.float64, **options),
        )
        return [{name: found[name] for name in ("dlogprob", "ratio_max")} for found in results]

    assert_draws_as_accurate(draw)


@pytest.mark.parametrize("level", ["segment", "trajectory"])
def test_a_unit_does_not_depend_on_its_neighbours(variant, level):
    lengths = [5, 33_000, 1, 0, 20_000]
    layout = random_layout(lengths, trajectories=1 if level == "trajectory" else 5)
    x, mask = random_inputs(layout)
    objective = Clip(level=level)
    alone = result(x, mask, layout, objective)["dlogprob"]
    shift = 777
    moved = Layout.from_lengths([shift, *lengths], [9, *layout.segment_trajectory.tolist()])
    padded = {name: torch.cat([torch.full((shift,), -0.5), value]) for name, value in x.items()}
    mask = torch.cat([torch.ones(shift, dtype=torch.bool), mask])
    assert torch.equal(result(padded, mask, moved, objective)["dlogprob"][shift:], alone)


def test_thousands_of_empty_segments(variant):
    lengths = torch.zeros(30_000, dtype=torch.int64)
    lengths[torch.randint(0, 30_000, (400,), generator=torch.Generator().manual_seed(0))] = 11
    layout = random_layout(lengths.tolist(), trajectories=7000)
    x, mask = random_inputs(layout)
    for objective in OBJECTIVES[:5]:
        for weighted in (True, False):
            actual, want = (result(x, mask, layout, objective, b, weighted=weighted) for b in ("cpu", "reference"))
            torch.testing.assert_close(actual, want, rtol=2e-5, atol=1e-6)


def test_every_token_its_own_segment(variant):
    layout = random_layout([1] * 20_000, trajectories=3000)
    x, mask = random_inputs(layout)
    for objective in (Clip(level="segment"), Clip(level="trajectory")):
        actual, want = (result(x, mask, layout, objective, b, weighted=False) for b in ("cpu", "reference"))
        torch.testing.assert_close(actual, want, rtol=2e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 64, 300]), max_size=12),
    trajectories=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    active=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    objective=st.sampled_from(OBJECTIVES),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    terms=st.booleans(),
    weighted=st.booleans(),
    variant=st.sampled_from(CPU_VARIANTS or ["none"]),
)
def test_any_layout_and_options(lengths, trajectories, seed, active, objective, estimator, terms, weighted, variant):
    layout = random_layout(lengths, seed, trajectories)
    x, mask = random_inputs(layout, seed, active)
    options = dict(estimator=estimator, terms=terms, weighted=weighted)
    with using(variant):
        actual = result(x, mask, layout, objective, **options)
    want = result(x, mask, layout, objective, "reference", **options)
    torch.testing.assert_close(actual, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_non_finite_inputs_give_what_the_reference_gives(variant, objective):
    layout = random_layout([7, 0, 20, 3, 40], trajectories=3)
    for seed, name in itertools.product(range(6), NAMES):
        x, mask = random_inputs(layout, seed)
        at = torch.randint(0, 70, (2,), generator=torch.Generator().manual_seed(seed))
        x[name][at] = [math.nan, math.inf, -math.inf][seed % 3]
        actual, want = (result(x, mask, layout, objective, backend) for backend in ("cpu", "reference"))
        torch.testing.assert_close(actual, want, rtol=2e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergence_that_overflows_is_infinite_as_on_the_reference(variant, estimator):
    x = {name: torch.zeros(3) for name in NAMES} | {"ref": torch.tensor([0.0, 100.0, 3e38]), "weight": torch.ones(3)}
    for backend in ("cpu", "reference"):
        found = result(x, torch.tensor([True, True, False]), Layout([0, 3]), Clip(), backend, estimator=estimator)
        loss, slope = {"k1": (-30.0, 0.3), "k2": (1500.0, -30.0), "k3": (math.inf, -math.inf)}[estimator]
        assert found["loss"].item() == pytest.approx(loss, rel=1e-6)
        assert found["dlogprob"].tolist()[1:] == pytest.approx([slope, 0.0], rel=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_every_output_is_written(objective):
    layout = random_layout([100, 0, 233, 1])
    x, mask = random_inputs(layout)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        found = result(x, mask, layout, objective)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(value.isfinite().all() for value in found.values())
    assert not found["dlogprob"][~mask].any() and not found["dentropy"][~mask].any()


def graph(scale=1.0):
    layout = random_layout([30, 41])
    x, mask = random_inputs(layout)
    leaf = x["logprob"].clone().requires_grad_()
    out = policy_loss(leaf * scale, x["old_logprob"], x["advantage"], layout, mask=mask, backend="cpu")
    return leaf, out.loss


def test_the_gradient_is_scaled_by_the_incoming_one():
    leaf, loss = graph()
    (once,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (three,) = torch.autograd.grad(3 * loss, leaf, retain_graph=True)
    torch.testing.assert_close(three, 3 * once)
    (nothing,) = torch.autograd.grad(0 * loss, leaf)
    assert not nothing.any()


def test_a_graph_can_be_used_twice():
    leaf, loss = graph()
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    leaf.grad.mul_(7)  # the accumulated gradient is the caller's own
    loss.backward()
    torch.testing.assert_close(leaf.grad, 8 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_loss_used_twice_and_through_other_nodes():
    leaf, loss = graph(scale=0.5)
    (gradient,) = torch.autograd.grad(loss + 2 * loss, leaf)
    leaf, loss = graph(scale=0.5)
    torch.testing.assert_close(gradient, 3 * torch.autograd.grad(loss, leaf)[0])


def test_a_second_derivative_is_refused_and_not_zero():
    leaf, loss = graph()
    (plain,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    assert torch.equal(gradient, plain)
    with pytest.raises(NotImplementedError, match="differentiate once: use backend='reference' for second derivatives"):
        (gradient.sum() + leaf.sum()).backward()


def test_no_gradient_where_none_is_wanted():
    layout = random_layout([30, 41])
    x, mask = random_inputs(layout)
    arguments = x["old_logprob"], x["advantage"], layout
    assert not policy_loss(x["logprob"], *arguments, mask=mask, backend="cpu").loss.requires_grad
    leaf = x["logprob"].clone().requires_grad_()
    with torch.no_grad():
        assert not policy_loss(leaf, *arguments, mask=mask, backend="cpu").loss.requires_grad
    entropy = x["entropy"].clone().requires_grad_()
    bonus = EntropyBonus(entropy, 0.1)
    loss = policy_loss(x["logprob"], *arguments, mask=mask, entropy_bonus=bonus, backend="cpu").loss
    weight = normalization_weights(layout, mask, "trajectory")
    torch.testing.assert_close(torch.autograd.grad(loss, entropy)[0], -0.1 * weight)


def test_the_entropys_gradient_has_its_dtype():
    layout = random_layout([9])
    x, mask = random_inputs(layout)
    entropy, logprob = (x[k].bfloat16().requires_grad_() for k in ("entropy", "logprob"))
    bonus = EntropyBonus(entropy, 0.1)
    loss = policy_loss(logprob, x["old_logprob"], x["advantage"], layout, entropy_bonus=bonus, backend="cpu").loss
    loss.backward()
    assert entropy.grad.dtype == logprob.grad.dtype == torch.bfloat16 and loss.dtype == torch.float32


def test_one_tensor_given_for_all_compiles_and_gets_the_sum_of_its_gradients():
    torch._dynamo.reset()
    layout = random_layout([9, 4])
    leaf = random_inputs(layout)[0]["logprob"].requires_grad_()

    def loss(x, entropy, constant, backend):
        terms = {"kl": KLPenalty(constant, 0.3, "k3"), "entropy_bonus": EntropyBonus(entropy, 0.2)}
        options = {"token_weight": constant, "importance_weight": constant, **terms}
        return policy_loss(x, constant, constant, layout, **options, backend=backend).loss

    copies = [leaf.detach().double().requires_grad_() for _ in range(3)]
    want = sum(torch.autograd.grad(loss(*copies, "reference"), copies[:2]))
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        (gradient,) = torch.autograd.grad(run(leaf, leaf, leaf, "cpu"), leaf)
        torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", ["clip", "cispo", "sao", "reinforce"])
def test_opcheck(objective):
    layout = random_layout([5, 0, 9], trajectories=2)
    x, mask = random_inputs(layout)
    columns = [x[k] for k in ("logprob", "old_logprob", "advantage")]
    ids = (layout.cu_seqlens, layout.segment_trajectory, layout.num_trajectories)
    numbers = torch.tensor([0.2, 0.28, math.inf, 0.1, 0.1], dtype=torch.float64)
    level = "segment" if objective == "clip" else "token"
    for optional, wanted in (((None,) * 4, (True, False)), ([x[k] for k in NAMES[3:]], (True, True))):
        arguments = (*columns, mask, *optional, *ids, objective, level, "k3", numbers, *wanted)
        torch.library.opcheck(torch.ops.mosaic_kernels.policy_loss.default, arguments)
    torch.library.opcheck(torch.ops.mosaic_kernels.count_active.default, (mask, layout.cu_seqlens))
    spread = (torch.rand(3), mask, layout.cu_seqlens)
    torch.library.opcheck(torch.ops.mosaic_kernels.spread_active.default, spread)


@pytest.mark.parametrize("kind", KINDS)
def test_normalization_weights_have_the_bits_of_plain_pytorch(variant, kind):
    for lengths in ([], [0, 0], [1], [300, 0, 17_000, 5, 40_001]):
        layout = random_layout(lengths, trajectories=3)
        _, mask = random_inputs(layout)
        compiled = normalization_weights(layout, mask, kind)
        assert torch.equal(compiled, weights_of(layout, mask, kind, torch.float64).float())
