from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from mosaic_kernels import (
    Cispo,
    Clip,
    EntropyBonus,
    KLPenalty,
    Layout,
    Objective,
    Reinforce,
    Sao,
    policy_loss,
)
from mosaic_kernels.testing import runnable
from tests.backends import VARIANTS, exact_dtype, using

OBJECTIVES = [
    Clip(),
    Clip(dual=1.5),
    Clip(level="segment"),
    Clip(level="trajectory"),
    Cispo(),
    Sao(),
    Reinforce(),
]
BACKENDS = runnable("reference", "cpu")


@pytest.fixture(params=VARIANTS)
def backend(request):
    with using(request.param) as name:
        yield name


# One token with ratio r: (objective, advantage, ratio, logprob, L, dL/dlogprob, limited)
HAND = [
    (Clip(), 1.0, 1.5, -1.0, -1.28, 0.0, 1),  # rose too far: clipped
    (Clip(), 1.0, 1.1, -1.0, -1.1, -1.1, 0),
    (Clip(), 1.0, 0.5, -1.0, -0.5, -0.5, 0),  # fell though good: no bound, the pull back stays
    (Clip(), -1.0, 0.5, -1.0, 0.8, 0.0, 1),  # fell too far: clipped
    (Clip(), -1.0, 0.9, -1.0, 0.9, 0.9, 0),
    (Clip(), -1.0, 1.5, -1.0, 1.5, 1.5, 0),  # rose though bad: no bound
    (Clip(), 0.0, 5.0, -1.0, 0.0, 0.0, 0),
    (Clip(), 0.0, 0.1, -1.0, 0.0, 0.0, 0),
    (Clip(dual=3.0), -1.0, 4.0, -1.0, 3.0, 0.0, 1),  # ... but for dual clip
    (Clip(dual=3.0), -1.0, 2.0, -1.0, 2.0, 2.0, 0),
    (Clip(dual=3.0), 1.0, 4.0, -1.0, -1.28, 0.0, 1),
    (Clip(dual=3.0), -1.0, 0.5, -1.0, 0.8, 0.0, 1),
    (Clip(dual=1.1), -2.0, 1.2, -1.0, 2.2, 0.0, 1),  # the cap may lie inside the clip range
    (Clip(low=1, high=math.inf), 1.0, 100.0, -1.0, -100.0, -100.0, 0),
    (Clip(low=1, high=math.inf), -1.0, 0.001, -1.0, 0.001, 0.001, 0),
    (Cispo(), 2.0, 1.5, -0.5, 1.28, -2.56, 1),  # capped, yet the gradient flows
    (Cispo(), -2.0, 1.5, -0.5, -1.28, 2.56, 1),
    (Cispo(), 2.0, 0.5, -0.5, 0.5, -1.0, 0),
    (Cispo(), -2.0, 0.5, -0.5, -0.5, 1.0, 0),
    (Cispo(), 0.0, 9.0, -0.5, 0.0, 0.0, 0),
    (Sao(), 1.0, 3.9, -1.0, 3.9, -3.9, 0),
    (Sao(), 1.0, 4.1, -1.0, 0.0, 0.0, 1),  # zeroed, not clamped
    (Sao(), 1.0, 0.19, -1.0, 0.0, 0.0, 1),
    (Sao(), -1.0, 2.0, -1.0, -2.0, 2.0, 0),
    (Sao(), -1.0, 0.19, -1.0, 0.0, 0.0, 1),
    (Sao(), -1.0, 4.1, -1.0, 0.0, 0.0, 1),
    (Sao(), 0.0, 4.1, -1.0, 0.0, 0.0, 0),
    (Reinforce(), 2.0, 7.0, -0.5, 1.0, -2.0, 0),
    (Reinforce(), -2.0, 0.1, -0.5, -1.0, 2.0, 0),
]


@pytest.mark.parametrize(("objective", "advantage", "ratio", "logprob", "loss", "gradient", "limited"), HAND)
def test_one_token_by_hand(backend, objective, advantage, ratio, logprob, loss, gradient, limited):
    x = torch.tensor([logprob], requires_grad=True)
    out = policy_loss(
        x, x.detach() - math.log(ratio), torch.tensor([advantage]), Layout([0, 1]), objective=objective, backend=backend
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, abs=1e-6, rel=1e-5)
    assert x.grad.item() == pytest.approx(gradient, abs=1e-6, rel=1e-5)
    assert out.metrics["clip_fraction"].item() == limited
    assert out.metrics["ratio_mean"].item() == pytest.approx(ratio, rel=1e-5)


def test_bounds_themselves_are_not_limited_by_clip_but_zeroed_by_sao(backend):
    def clip_fraction(x, objective):
        out = policy_loss(x, x * 0, x * 0 + 1, Layout([0, 1]), objective=objective, backend=backend)
        return out.metrics["clip_fraction"].item()

    on_policy = torch.zeros(1, dtype=exact_dtype(backend))
    for objective in (Clip(low=0, high=0), Cispo(high=0), Sao(low=1, high=1e-6)):
        assert clip_fraction(on_policy, objective) == 0
    apart = torch.tensor([1.0], dtype=on_policy.dtype)
    ratio = policy_loss(apart, apart * 0, apart, Layout([0, 1]), backend=backend).metrics["ratio_max"].item()
    # 1 + high is the ratio itself, to the last bit
    assert clip_fraction(apart, Sao(high=ratio - 1)) == 1
    assert clip_fraction(apart, Clip(high=ratio - 1)) == clip_fraction(apart, Cispo(high=ratio - 1)) == 0


def test_segment_ratio_by_hand(backend):
    # Segment 0 has differences 0.3, (masked), 0.1: s = e^0.2; segment 1 has -0.4: s = e^-0.4. One trajectory: s = e^0
    dtype = exact_dtype(backend)
    close = {"rel": 1e-6 if dtype == torch.float32 else 1e-12}
    x = torch.tensor([-1.0, -9.0, -1.0, -1.0], dtype=dtype, requires_grad=True)
    old = torch.tensor([-1.3, 50.0, -1.1, -0.6], dtype=dtype)
    advantage = torch.tensor([1.0, 1.0, 2.0, -1.0], dtype=dtype)
    mask, weight = torch.tensor([1, 0, 1, 1]), torch.ones(4, dtype=dtype)
    layout = Layout([0, 3, 4], segment_trajectory=[0, 0])
    out = policy_loss(
        x,
        old,
        advantage,
        layout,
        mask=mask,
        token_weight=weight,
        objective=Clip(high=0.25, level="segment"),
        backend=backend,
    )
    (gradient,) = torch.autograd.grad(out.loss, x)
    up, down = math.exp(0.2), math.exp(-0.4)
    assert out.loss.item() == pytest.approx(-up * 1 - up * 2 + 0.8, **close)
    assert gradient.tolist() == pytest.approx([-up, 0.0, -2 * up, 0.0], **close)
    assert out.metrics["clip_fraction"].item() == pytest.approx(1 / 3, **close)
    assert out.metrics["ratio_mean"].item() == pytest.approx((2 * up + down) / 3, **close)
    assert out.metrics["ratio_max"].item() == pytest.approx(up, **close)
    out = policy_loss(
        x, old, advantage, layout, mask=mask, token_weight=weight, objective=Clip(level="trajectory"), backend=backend
    )
    (gradient,) = torch.autograd.grad(out.loss, x)
    assert out.loss.item() == pytest.approx(-1 - 2 + 1, **close)
    assert gradient.tolist() == pytest.approx([-1.0, 0.0, -2.0, 1.0], **close)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", 0.5 + math.log(2) - 1, 0.5)],
)
def test_kl_and_entropy_by_hand(backend, estimator, value, slope):
    dtype = exact_dtype(backend)
    x = torch.tensor([math.log(0.5)], dtype=dtype, requires_grad=True)
    entropy = torch.tensor([1.5], dtype=dtype, requires_grad=True)
    ref = torch.tensor([math.log(0.25)], dtype=dtype)
    out = policy_loss(
        x, x.detach(), torch.zeros(1), Layout([0, 1]), token_weight=torch.tensor([2.0]),
        importance_weight=torch.tensor([7.0]),  # must not touch the KL and entropy terms
        kl=KLPenalty(ref, 0.1, estimator), entropy_bonus=EntropyBonus(entropy, 0.01), backend=backend,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.item() == pytest.approx(2 * (0.1 * value - 0.01 * 1.5))
    assert x.grad.item() == pytest.approx(2 * 0.1 * slope)
    assert entropy.grad.item() == pytest.approx(-2 * 0.01)
    assert (out.metrics["kl"].item(), out.metrics["entropy"].item()) == pytest.approx((value, 1.5))


def test_metrics_by_hand(backend):
    ratio = torch.tensor([2.0, 0.5, 1.0, 99.0], dtype=exact_dtype(backend))
    mask = torch.tensor([1, 1, 1, 0])
    out = policy_loss(ratio.log(), torch.zeros(4), torch.ones(4), Layout([0, 4]), mask=mask, backend=backend)
    metrics = out.metrics
    assert metrics["clip_fraction"].item() == pytest.approx(1 / 3)
    assert metrics["ratio_mean"].item() == pytest.approx(3.5 / 3)
    assert metrics["ratio_max"].item() == pytest.approx(2.0)
    assert metrics["approx_kl"].item() == pytest.approx((1 - math.log(2) - 0.5 + math.log(2) + 0) / 3)
    assert metrics["kl"].item() == metrics["entropy"].item() == 0
    assert metrics["policy_tokens"].item() == 3 and metrics["nonfinite_tokens"].item() == 0
    assert metrics["policy_tokens"].dtype == metrics["nonfinite_tokens"].dtype == torch.int64
    assert all(m.dim() == 0 and not m.requires_grad for m in metrics.values())


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_no_tokens_and_no_active_tokens(backend, objective):
    for layout in (Layout([0]), Layout([0, 0, 0], [0, 2]), Layout([0, 1]), Layout([0, 2, 2, 5], [1, 0, 1])):
        x = torch.full((layout.num_tokens,), -1.0, requires_grad=True)
        mask = torch.zeros(layout.num_tokens, dtype=torch.bool)
        out = policy_loss(x, x.detach(), x.detach(), layout, mask=mask, objective=objective, backend=backend)
        out.loss.backward()
        assert out.loss.item() == 0 and not x.grad.any()
        assert all(m.item() == 0 for m in out.metrics.values())


def test_bits_do_not_depend_on_the_thread_count(backend):
    generator = torch.Generator().manual_seed(0)
    lengths = [30_000, 1, 70_001, 0, 20_011]
    layout = Layout.from_lengths(lengths, [0, 1, 0, 2, 1])
    x = torch.rand(layout.num_tokens, generator=generator).neg().requires_grad_()
    old, advantage = (
        x.detach() + 0.3 * torch.randn(x.shape, generator=generator),
        torch.randn(x.shape, generator=generator),
    )
    threads = torch.get_num_threads()
    try:
        for objective in (Clip(), Clip(level="segment"), Clip(level="trajectory")):
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                for _ in range(2):
                    out = policy_loss(x, old, advantage, layout, objective=objective, backend=backend)
                    results.append((out.loss, *torch.autograd.grad(out.loss, x), *out.metrics.values()))
            assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_nothing_reads_a_value_back_to_the_host(objective):
    # a tensor on "meta" has no values: any .item(), bool() or data-dependent shape raises
    layout = Layout([0, 3, 5], [0, 0]).to("meta")
    x = torch.empty(5, device="meta", requires_grad=True)
    out = policy_loss(
        x,
        x,
        x,
        layout,
        mask=torch.empty(5, dtype=torch.bool, device="meta"),
        objective=objective,
        kl=KLPenalty(x, 0.1, "k3"),
    )
    out.loss.backward()
    assert out.loss.device.type == "meta" and x.grad.shape == (5,)


T3, LAYOUT3 = torch.zeros(3), Layout([0, 3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_does_not_compile_anew_for_each_length(backend):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(functools.partial(policy_loss, backend=backend), fullgraph=True, backend=counter)
    for lengths in ([3, 4], [5, 6, 2], [7, 1, 9, 2], [3, 3, 3, 3, 5]):
        layout = Layout.from_lengths(lengths)
        x = torch.zeros(layout.num_tokens)
        compiled(x, x, x, layout)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_options_compile_at_most_once_more(backend):  # pitfall 7
    logprob, old, advantage = (
        torch.tensor([-0.5, -1.0, -2.0]),
        torch.tensor([-1.0, -1.0, -1.0]),
        torch.tensor([1, -1, -1.0]),
    )

    def losses(logprob, x):
        terms = dict(kl=KLPenalty(old, x / 10, "k2"), entropy_bonus=EntropyBonus(old, x / 20), backend=backend)
        objectives = (Clip(low=x, high=x, dual=2 + x), Cispo(high=x), Sao(low=x, high=x))
        return sum(policy_loss(logprob, old, advantage, LAYOUT3, objective=o, **terms).loss for o in objectives)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(losses, fullgraph=True, backend=counter)
    for x in (0.1, 0.2, 0.3, 0.45):
        results = []
        for run in (compiled, losses):
            leaf = logprob.clone().requires_grad_()
            results.append((loss := run(leaf, x), *torch.autograd.grad(loss, leaf)))
        torch.testing.assert_close(*results)
    assert counter.frame_count <= 2


class Half(Objective):
    """A user's own objective: half of the plain policy gradient."""

    def token_loss(self, ratio, logprob, advantage):
        return -0.5 * advantage * logprob, torch.zeros_like(advantage, dtype=torch.bool)


def test_a_users_objective():
    x = torch.tensor([-1.0, -2.0])
    out = policy_loss(x, x, torch.tensor([1.0, 3.0]), Layout([0, 2]), objective=Half())
    assert out.loss.item() == pytest.approx(0.5 * (0.5 * 1 + 0.5 * 6))


@dataclass(frozen=True)
class Softened(Clip):
    """Inherits from a built-in objective, but says something else."""

    def token_loss(self, ratio, logprob, advantage):
        return -0.5 * advantage * logprob, torch.zeros_like(advantage, dtype=torch.bool)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled extension is not built")
def test_compiled_backends_refuse_objectives_they_do_not_know():
    for objective in (Half(), Softened()):
        with pytest.raises(
            NotImplementedError, match=f"cpu.*it does not know the objective {type(objective).__name__}"
        ):
            policy_loss(T3, T3, T3, LAYOUT3, objective=objective, backend="cpu")
        assert policy_loss(T3 - 1, T3, T3 + 1, LAYOUT3, objective=objective).loss.item() == pytest.approx(0.5)
    with pytest.raises(NotImplementedError, match="the float64 logprob asks for float64: use backend='reference'"):
        policy_loss(T3.double(), T3, T3, LAYOUT3, backend="cpu")
    on_meta = torch.zeros(3, device="meta")
    with pytest.raises(NotImplementedError, match="logprob is on meta"):
        policy_loss(on_meta, on_meta, on_meta, LAYOUT3.to("meta"), backend="cpu")


class BySession(Half):
    level = "session"


def test_a_users_objective_of_an_unknown_level_is_not_taken_for_another():
    with pytest.raises(ValueError, match="level must be one of token, segment, trajectory, got 'session'"):
        policy_loss(T3, T3, T3, LAYOUT3, objective=BySession())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logprob": torch.zeros(4)}, ValueError, r"logprob must have shape \[T\] = \[3\], got \[4\]"),
        ({"old_logprob": torch.zeros(3, 1)}, ValueError, r"old_logprob must have shape \[T\] = \[3\], got \[3, 1\]"),
        ({"old_logprob": None}, TypeError, r"old_logprob must be a tensor of shape \[T\], got NoneType"),
        (
            {"advantage": torch.zeros(3, dtype=torch.int64)},
            TypeError,
            "advantage must be floating point, got torch.int64",
        ),
        ({"token_weight": torch.zeros(2)}, ValueError, r"token_weight must have shape .* got \[2\]"),
        ({"importance_weight": torch.zeros(2)}, ValueError, r"importance_weight must have shape .* got \[2\]"),
        ({"kl": KLPenalty(torch.zeros(2), 0.1, "k1")}, ValueError, r"ref_logprob must have shape .* got \[2\]"),
        ({"entropy_bonus": EntropyBonus(torch.zeros(2), 0.1)}, ValueError, r"entropy must have shape .* got \[2\]"),
        ({"kl": 0.1}, TypeError, "kl must be a KLPenalty or None, got float"),
        ({"entropy_bonus": 0.1}, TypeError, "entropy_bonus must be a EntropyBonus or None, got float"),
        ({"mask": torch.zeros(3)}, TypeError, "mask must be bool or integer, got torch.float32"),
        ({"mask": torch.zeros(2, dtype=torch.bool)}, ValueError, r"mask must have shape .* got \[2\]"),
        ({"objective": "clip"}, TypeError, "objective must be an instance such as Clip.*got 'clip'"),
        ({"objective": Clip}, TypeError, "objective must be an instance such as Clip"),
        ({"layout": [0, 3]}, TypeError, "layout must be a Layout, got list"),
        ({"layout": LAYOUT3.to("meta")}, ValueError, "logprob must be on the layout's device meta, got cpu"),
        ({"backend": "fast"}, ValueError, "backend must be None or one of reference, cpu, triton, cuda, got 'fast'"),
    ],
)
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_errors_of_the_call(change, error, message, backend):
    arguments = {"logprob": T3, "old_logprob": T3, "advantage": T3, "layout": LAYOUT3, "backend": backend, **change}
    with pytest.raises(error, match=message):
        policy_loss(**arguments)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Clip(low=-0.1), ValueError, r"low must be in \[0, 1\], got -0.1"),
        (lambda: Clip(low=1.5), ValueError, r"low must be in \[0, 1\], got 1.5"),
        (lambda: Clip(high=-1), ValueError, "high must be >= 0, got -1"),
        (lambda: Clip(high=math.nan), ValueError, "high must be >= 0, got nan"),
        (lambda: Clip(low="0.2"), TypeError, "low must be a number, got '0.2'"),
        (lambda: Clip(dual=1.0), ValueError, "dual must be > 1 or None, got 1.0"),
        (lambda: Clip(level="session"), ValueError, "level must be one of token, segment, trajectory, got 'session'"),
        (lambda: Cispo(high=-0.1), ValueError, "high must be >= 0, got -0.1"),
        (lambda: Sao(low=0), ValueError, r"low must be in \(0, 1\], got 0"),
        (lambda: Sao(high=0), ValueError, "high must be > 0, got 0"),
        (lambda: Sao(high=True), TypeError, "high must be a number, got True"),
        (lambda: KLPenalty(T3, 0.1, "k4"), ValueError, "estimator must be one of k1, k2, k3, got 'k4'"),
        (lambda: KLPenalty(T3, math.inf, "k1"), ValueError, "coef must be finite, got inf"),
        (lambda: KLPenalty([0.0], 0.1, "k1"), TypeError, "ref_logprob must be a tensor"),
        (lambda: EntropyBonus(T3, None), TypeError, "coef must be a number, got None"),
        (lambda: EntropyBonus(T3.long(), 0.1), TypeError, "entropy must be floating point"),
        (lambda: Objective(), TypeError, "abstract"),
    ],
)
def test_errors_of_the_options(make, error, message):
    with pytest.raises(error, match=message):
        make()
