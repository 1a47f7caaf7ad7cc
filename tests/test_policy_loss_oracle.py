"""policy_loss against a loop over tokens in Python floats, and across dtypes, layouts in memory and compilation."""

from __future__ import annotations

import math
import random

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
)
from mosaic_kernels.testing import runnable
from tests.backends import VARIANTS, using

OBJECTIVES = [
    Clip(),
    Clip(low=0.1, high=0.5, dual=1.5),
    Clip(low=1, high=math.inf),
    Clip(level="segment"),
    Clip(level="trajectory", dual=1.2, low=0.05, high=0.05),
    Cispo(),
    Sao(),
    Sao(low=0.2, high=0.2),
    Reinforce(),
]
BACKENDS = runnable("reference", "cpu")


@pytest.fixture(params=VARIANTS)
def backend(request):
    with using(request.param) as name:
        yield name


def naive(case, objective):
    """Loss, gradients and two metrics in Python floats, token by token, straight from the formulas."""
    layout, mask = case["layout"], case["mask"].tolist()
    values = {k: v.double().tolist() for k, v in case.items() if k not in ("layout", "mask", "estimator")}
    unit = {"token": range(len(mask)), "segment": layout.token_segment.tolist()}.get(
        objective.level, layout.token_trajectory.tolist()
    )
    loss, gradient, entropy_gradient, limited, kl_sum = 0.0, [0.0] * len(mask), [0.0] * len(mask), 0, 0.0
    for t in range(len(mask)):
        if not mask[t]:
            continue
        same = [j for j in range(len(mask)) if mask[j] and unit[j] == unit[t]]
        difference = sum(values["logprob"][j] - values["old_logprob"][j] for j in same) / len(same)
        r = math.exp(max(-20.0, min(20.0, difference)))
        dr = r if objective.level != "token" or -20 <= difference <= 20 else 0.0
        a, x = values["advantage"][t], values["logprob"][t]
        if isinstance(objective, Clip):
            choices = [(-r * a, -a * dr, 0)]
            bounded = max(1 - objective.low, min(1 + objective.high, r))
            choices.append((-bounded * a, 0.0, 1))
            best = max(choices, key=lambda c: (c[0], -c[2]))
            if objective.dual is not None and a < 0 and -objective.dual * a < best[0]:
                best = (-objective.dual * a, 0.0, 1)
        elif isinstance(objective, Cispo):
            w = min(r, 1 + objective.high)
            best = (-w * a * x, -w * a, int(r > 1 + objective.high and a != 0))
        elif isinstance(objective, Sao):
            inside = 1 - objective.low < r < 1 + objective.high
            best = (-r * a * x, -r * a, 0) if inside else (0.0, 0.0, int(a != 0))
        else:
            best = (-a * x, -a, 0)
        k1 = x - values["ref"][t]
        kl, dkl = {"k1": (k1, 1.0), "k2": (k1 * k1 / 2, k1), "k3": (math.exp(-k1) + k1 - 1, 1 - math.exp(-k1))}[
            case["estimator"]
        ]
        w, iw = values["weight"][t], values["iw"][t]
        loss += w * (iw * best[0] + 0.3 * kl - 0.2 * values["entropy"][t])
        gradient[t] = w * (iw * best[1] + 0.3 * dkl)
        entropy_gradient[t] = -0.2 * w
        limited += best[2]
        kl_sum += kl
    n = max(1, sum(map(bool, mask)))
    return loss, gradient, entropy_gradient, limited / n, kl_sum / n


def random_case(seed, dtype=torch.float64, max_tokens=40):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < max_tokens and len(lengths) < 9:
        lengths.append(rng.choice([0, 1, 1, 2, 3, 5, 8]))
    total = sum(lengths)
    trajectory = [rng.randrange(4) for _ in lengths]
    layout = Layout.from_lengths(lengths, trajectory, [rng.randrange(3) for _ in range(4)])

    def draw(scale=1.0):
        return (torch.randn(total, generator=generator, dtype=torch.float64) * scale).to(dtype)

    logprob = -draw().abs()
    advantage = draw()
    advantage[torch.rand(total, generator=generator) < 0.1] = 0
    return {
        "layout": layout,
        "logprob": logprob,
        "old_logprob": logprob + draw(0.7),
        "advantage": advantage,
        "mask": torch.rand(total, generator=generator) < 0.7,
        "weight": draw().abs(),
        "iw": draw().abs(),
        "ref": logprob + draw(0.5),
        "entropy": draw().abs(),
        "estimator": rng.choice(["k1", "k2", "k3"]),
    }


def run(case, objective, **overrides):
    x = case["logprob"].clone().requires_grad_()
    entropy = case["entropy"].clone().requires_grad_()
    out = policy_loss(
        x, case["old_logprob"], case["advantage"], case["layout"], mask=case["mask"], token_weight=case["weight"],
        objective=objective, importance_weight=case["iw"], kl=KLPenalty(case["ref"], 0.3, case["estimator"]),
        entropy_bonus=EntropyBonus(entropy, 0.2), **overrides,
    )  # fmt: skip
    return out, *torch.autograd.grad(out.loss, (x, entropy))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_agrees_with_a_loop_over_tokens(objective):
    for seed in range(25):
        case = random_case(seed)
        out, gradient, entropy_gradient = run(case, objective, backend="reference")
        loss, want, want_entropy, limited, kl = naive(case, objective)
        assert out.loss.item() == pytest.approx(loss, rel=1e-11, abs=1e-12)
        assert gradient.tolist() == pytest.approx(want, rel=1e-11, abs=1e-12)
        assert entropy_gradient.tolist() == pytest.approx(want_entropy, rel=1e-11, abs=1e-12)
        assert out.metrics["clip_fraction"].item() == pytest.approx(limited)
        assert out.metrics["kl"].item() == pytest.approx(kl)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_float32_agrees_with_a_loop_over_tokens(backend, objective):
    for seed in range(12):
        case = random_case(seed, torch.float32, max_tokens=60)
        out, gradient, entropy_gradient = run(case, objective, backend=backend)
        loss, want, want_entropy, limited, kl = naive(case, objective)
        assert out.loss.dtype == gradient.dtype == entropy_gradient.dtype == torch.float32
        assert gradient.tolist() == pytest.approx(want, rel=2e-5, abs=2e-6)
        assert entropy_gradient.tolist() == pytest.approx(want_entropy, rel=1e-6)
        assert out.loss.item() == pytest.approx(loss, rel=1e-5, abs=1e-5)
        assert out.metrics["clip_fraction"].item() == pytest.approx(limited)
        assert out.metrics["kl"].item() == pytest.approx(kl, rel=1e-5)


def test_half_inputs_compute_in_float32_and_float64_stays(backend):
    case = random_case(5)
    wanted = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)]
    for dtype, want in wanted if backend == "reference" else wanted[:2]:
        x = case["logprob"].to(dtype).requires_grad_()
        out = policy_loss(
            x, case["old_logprob"].to(dtype), case["advantage"], case["layout"], mask=case["mask"], backend=backend
        )
        out.loss.backward()
        assert out.loss.dtype == want and x.grad.dtype == dtype
        assert out.metrics["ratio_mean"].dtype == want
    # inputs are cast before the arithmetic: the same numbers in float32 give the same bits
    half, single = (
        policy_loss(
            case["logprob"].bfloat16().to(d),
            case["old_logprob"].bfloat16().to(d),
            case["advantage"],
            case["layout"],
            backend=backend,
        )  # fmt: skip
        for d in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(half.loss, single.loss)


@pytest.mark.parametrize("objective", [Clip(), Clip(dual=1.5), Reinforce()], ids=str)
def test_gradcheck_where_nothing_is_stopped(objective):
    # Cispo, Sao and segment ratios stop gradients on purpose; the loop above holds their gradients
    case = random_case(8, max_tokens=12)

    def loss(x, entropy):
        return policy_loss(
            x, case["old_logprob"], case["advantage"], case["layout"], mask=case["mask"], objective=objective,
            kl=KLPenalty(case["ref"], 0.3, "k3"), entropy_bonus=EntropyBonus(entropy, 0.2),
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(loss, (case["logprob"].requires_grad_(), case["entropy"].requires_grad_()))


def test_constants_get_no_gradient(backend):
    case = random_case(2, torch.float32)
    leaves = {k: case[k].clone().requires_grad_() for k in ("old_logprob", "advantage", "weight", "iw", "ref")}
    out, gradient, _ = run({**case, **leaves}, Clip(), backend=backend)
    plain, want, _ = run(case, Clip(), backend=backend)
    assert torch.equal(gradient, want) and torch.equal(out.loss, plain.loss)
    x = case["logprob"].clone().requires_grad_()
    loss = policy_loss(
        x, leaves["old_logprob"], leaves["advantage"], case["layout"], token_weight=leaves["weight"], backend=backend
    ).loss
    loss.backward()
    assert all(leaf.grad is None for leaf in leaves.values())


def test_default_weights_are_those_of_the_trajectories(backend):
    case = random_case(11, torch.float32)
    arguments = case["logprob"], case["old_logprob"], case["advantage"], case["layout"]
    weight = normalization_weights(case["layout"], case["mask"], "trajectory")
    for objective in OBJECTIVES:
        options = dict(mask=case["mask"], objective=objective, backend=backend)
        default, explicit = policy_loss(*arguments, **options), policy_loss(*arguments, token_weight=weight, **options)
        assert torch.equal(default.loss, explicit.loss)
        assert all(torch.equal(default.metrics[k], v) for k, v in explicit.metrics.items())


def test_non_contiguous_inputs(backend):
    case = random_case(4, torch.float32)
    strided = {
        k: torch.stack([v, v + 1], dim=1)[:, 0] if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in case.items()
    }
    assert not strided["logprob"].is_contiguous()
    strided["mask"] = torch.stack([case["mask"], ~case["mask"]], dim=1)[:, 0]
    packed, other = (run(x, Clip(level="segment"), backend=backend) for x in (case, strided))
    assert torch.equal(packed[0].loss, other[0].loss) and torch.equal(packed[1], other[1])


@pytest.mark.parametrize("objective", [Clip(dual=1.5), Clip(level="trajectory"), Cispo(), Sao(), Reinforce()], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_without_a_graph_break(objective, backend):
    case = random_case(6, torch.float32)
    eager = run(case, objective, backend=backend)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, entropy, case_old, ref, layout):
        return policy_loss(
            x, case_old, case["advantage"], layout, mask=case["mask"], token_weight=case["weight"], objective=objective,
            importance_weight=case["iw"], kl=KLPenalty(ref, 0.3, case["estimator"]),
            entropy_bonus=EntropyBonus(entropy, 0.2), backend=backend,
        )  # fmt: skip

    x, entropy = case["logprob"].clone().requires_grad_(), case["entropy"].clone().requires_grad_()
    out = compiled(x, entropy, case["old_logprob"], case["ref"], case["layout"])
    gradients = torch.autograd.grad(out.loss, (x, entropy))
    torch.testing.assert_close((out.loss, *gradients), (eager[0].loss, *eager[1:]))
    torch.testing.assert_close(out.metrics, eager[0].metrics)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_with_inductor(backend):
    case = random_case(6, torch.float32)
    for objective in (Clip(dual=1.5), Clip(level="trajectory")):
        torch._dynamo.reset()
        arguments = case["old_logprob"], case["advantage"], case["layout"]
        options = dict(mask=case["mask"], objective=objective, backend=backend)
        eager_x, x = (case["logprob"].clone().requires_grad_() for _ in range(2))
        eager = policy_loss(eager_x, *arguments, **options)
        out = torch.compile(policy_loss, fullgraph=True)(x, *arguments, **options)
        torch.testing.assert_close(out.loss, eager.loss)
        torch.testing.assert_close(torch.autograd.grad(out.loss, x), torch.autograd.grad(eager.loss, eager_x))
