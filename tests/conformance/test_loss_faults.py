"""Faults of the pitfalls list that a policy loss can have (8 to 13), each as a whole kind of fault."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

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
    rollout_correction,
)
from mosaic_kernels._backend import BACKENDS
from tests.backends import VARIANTS, using

OBJECTIVES = [Clip(), Clip(dual=3.0), Clip(level="segment"), Clip(level="trajectory"), Cispo(), Sao(), Reinforce()]
INPUTS = ("logprob", "old_logprob", "advantage", "token_weight", "importance_weight", "ref_logprob", "entropy")
BAD = (math.nan, math.inf, -math.inf)
LAYOUT = Layout([0, 3, 5, 6], [0, 1, 0])
MASK = torch.tensor([0, 1, 1, 1, 0, 1], dtype=torch.bool)


@pytest.fixture(params=VARIANTS)
def backend(request):
    with using(request.param) as name:
        yield name


def inputs(seed=0):
    values = torch.randn(len(INPUTS), 6, generator=torch.Generator().manual_seed(seed))
    return dict(zip(INPUTS, values * 0.3, strict=True))


def loss_and_gradients(x, objective, backend, mask=MASK, layout=LAYOUT):
    logprob, entropy = x["logprob"].clone().requires_grad_(), x["entropy"].clone().requires_grad_()
    out = policy_loss(
        logprob, x["old_logprob"], x["advantage"], layout, mask=mask, token_weight=x["token_weight"],
        objective=objective, importance_weight=x["importance_weight"], kl=KLPenalty(x["ref_logprob"], 0.1, "k3"),
        entropy_bonus=EntropyBonus(entropy, 0.1), backend=backend,
    )  # fmt: skip
    return out, *torch.autograd.grad(out.loss, (logprob, entropy))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_08_nothing_at_a_masked_position_is_read(backend, objective):
    clean = loss_and_gradients(inputs(), objective, backend)
    for name, bad in itertools.product(INPUTS, BAD):
        x = inputs()
        x[name][~MASK] = bad
        out, *gradients = loss_and_gradients(x, objective, backend)
        assert torch.equal(out.loss, clean[0].loss), (name, bad)
        assert all(torch.equal(a, b) for a, b in zip(gradients, clean[1:], strict=True)), (name, bad)
        assert all(torch.equal(out.metrics[k], v) for k, v in clean[0].metrics.items()), (name, bad)
    every = {name: torch.where(MASK, v, math.nan) for name, v in inputs().items()}
    out, *gradients = loss_and_gradients(every, objective, backend)
    assert torch.equal(out.loss, clean[0].loss) and all(g[~MASK].eq(0).all() for g in gradients)


def test_08_masked_rollout_log_prob_of_minus_100(backend):
    logprob, rollout = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -100.0])
    mask = torch.tensor([True, False])
    weight = rollout_correction(logprob, rollout, Layout([0, 2]), mask=mask, cap=1e9, backend=backend).weight
    assert weight.tolist() == [1.0, 0.0]
    assert policy_loss(logprob, rollout, logprob, Layout([0, 2]), mask=mask, backend=backend).loss.item() == 1.0


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_08_a_non_finite_active_input_is_never_swallowed(backend, objective):
    # inf survives a clamp as exp(20), NaN a comparison as "outside": both would make a finite, wrong loss
    for name, bad in itertools.product(INPUTS, BAD):
        x = inputs()
        x[name][3] = bad  # alone in its segment and trajectory among the active tokens
        out, gradient, _ = loss_and_gradients(x, objective, backend)
        assert out.loss.isnan(), (name, bad)
        assert out.metrics["nonfinite_tokens"].item() == 1 and out.metrics["policy_tokens"].item() == 4
        assert gradient.isnan().tolist() == [False, False, False, True, False, False], (name, bad)
    for name, bad in itertools.product(INPUTS[:4], BAD):  # no KL term that would carry the NaN through a dropped token
        x = inputs()
        x[name][3] = bad
        logprob = x["logprob"].requires_grad_()
        out = policy_loss(
            logprob, x["old_logprob"], x["advantage"], LAYOUT, mask=MASK, token_weight=x["token_weight"],
            objective=objective, backend=backend,
        )  # fmt: skip
        assert out.loss.isnan() and torch.autograd.grad(out.loss, logprob)[0][3].isnan(), (name, bad)
    x = inputs()
    for name in INPUTS:
        x[name][3] = math.nan
    x["advantage"][5] = -math.inf
    assert loss_and_gradients(x, objective, backend)[0].metrics["nonfinite_tokens"].item() == 2


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("kind", ["trajectory", "token", "prompt", "segment", "segment_flat"])
def test_09_fully_masked_batch(backend, objective, kind):
    nothing = torch.zeros(6, dtype=torch.bool)
    x = {name: torch.full((6,), math.nan) for name in INPUTS}
    x["token_weight"] = normalization_weights(LAYOUT, nothing, kind)
    assert not x["token_weight"].any()
    out, *gradients = loss_and_gradients(x, objective, backend, mask=nothing)
    assert out.loss.item() == 0 and not any(g.any() for g in gradients)
    assert all(m.item() == 0 for m in out.metrics.values())


def test_10_one_rollout_in_several_rows_keeps_its_mass():
    # one rollout of 6 tokens, once as a single row and once as three; another of 2 tokens beside it
    one, several = Layout([0, 6, 8], [0, 1]), Layout([0, 1, 4, 6, 8], [0, 0, 0, 1])
    for kind in ("trajectory", "token", "prompt"):
        a, b = (normalization_weights(layout, None, kind) for layout in (one, several))
        assert torch.equal(a, b)
    assert normalization_weights(several, None, "trajectory")[:6].sum().item() == pytest.approx(0.5)


def test_10_fully_masked_rollouts_do_not_dilute_the_others():
    layout = Layout([0, 2, 4, 6], trajectory_group=[0, 1, 2])
    mask = torch.tensor([1, 1, 0, 0, 1, 1])
    for kind in ("trajectory", "token", "prompt", "segment", "segment_flat"):
        assert normalization_weights(layout, mask, kind).tolist() == [0.25, 0.25, 0, 0, 0.25, 0.25]


def test_11_micro_batches_of_10_and_1000_tokens():
    layout = Layout([0, 10, 1010])
    generator = torch.Generator().manual_seed(0)
    x, advantage = -torch.rand(1010, generator=generator).double(), torch.randn(1010, generator=generator).double()
    for kind, masses in (("token", (10 / 1010, 1000 / 1010)), ("trajectory", (0.5, 0.5))):
        weight = normalization_weights(layout, None, kind)
        whole = policy_loss(x, x, advantage, layout, token_weight=weight).loss.item()
        parts = 0.0
        for rows, mass in zip((slice(0, 10), slice(10, 1010)), masses, strict=True):
            assert weight[rows].sum().item() == pytest.approx(mass)
            micro = Layout([0, rows.stop - rows.start])
            parts += policy_loss(x[rows], x[rows], advantage[rows], micro, token_weight=weight[rows]).loss.item()
        assert parts == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("difference", [100.0, -100.0, 1e30, -1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_12_a_huge_log_ratio_stays_finite(backend, objective, advantage, difference):
    x = torch.tensor([difference], requires_grad=True)
    arguments = x, torch.zeros(1), torch.tensor([advantage]), Layout([0, 1])
    out = policy_loss(*arguments, objective=objective, backend=backend)
    out.loss.backward()
    assert out.loss.isfinite() and x.grad.isfinite().all()
    assert all(m.isfinite() for m in out.metrics.values())
    assert out.metrics["ratio_max"].item() == pytest.approx(math.exp(math.copysign(20, difference)))
    if type(objective) is Clip and objective.level == "token":
        assert x.grad.item() == 0  # beyond the clamp the ratio has no slope, whatever the sign


OVERLAP = {
    Clip(): -1.28,
    Clip(high=0.1): -1.1,
    Clip(level="segment"): -1.28,
    Cispo(): 1.28 * 0.7,
    Sao(): 1.4,
    Reinforce(): 0.7,
}


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("objective", OVERLAP, ids=str)
def test_13_no_backend_trains_another_objective(objective, backend):
    # logprob -0.7, ratio 2, advantage 1: each objective has another value here, so that a mix-up shows
    logprob = torch.tensor([-0.7])
    arguments = logprob, logprob - math.log(2), torch.ones(1), Layout([0, 1])
    try:
        loss = policy_loss(*arguments, objective=objective, backend=backend).loss
    except NotImplementedError as refusal:
        assert backend is not None and backend != "reference"
        assert f"policy_loss: backend='{backend}' cannot serve this call: " in str(refusal)
    else:
        assert loss.item() == pytest.approx(OVERLAP[objective])
