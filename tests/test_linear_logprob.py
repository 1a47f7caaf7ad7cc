from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mosaic_kernels import Layout, linear_logprob, segment_logprob, shifted_targets
from mosaic_kernels.linear_logprob import _MODULES
from mosaic_kernels.testing import assert_as_accurate, runnable, value_and_grads
from tests.logprob_cases import dense, every_backend, sample, some_kept  # noqa: F401

BACKENDS = runnable(*_MODULES)
ODDS = torch.tensor([[1.0], [2.0], [5.0]]).log()  # hidden 1 gives the probabilities 1/8, 2/8, 5/8
ONE = torch.ones(1, 1)


def test_numbers_worked_by_hand(backend):
    def probability(target: int, **options) -> float:
        return linear_logprob(ONE, ODDS, torch.tensor([target]), backend=backend, **options).logprob.exp().item()

    assert probability(1) == pytest.approx(2 / 8)
    assert probability(1, bias=torch.tensor([1.0, 2.0, 1.0]).log()) == pytest.approx(4 / 10)
    assert probability(1, temperature=0.5) == pytest.approx(4 / 30)  # squared odds: 1, 4, 25
    assert probability(1, temperature=torch.tensor([0.5])) == pytest.approx(4 / 30)
    assert probability(2, softcap=1.0) == pytest.approx(
        math.exp(math.tanh(math.log(5))) / sum(math.exp(math.tanh(math.log(x))) for x in (1, 2, 5))
    )
    # the cap comes first: tanh(log 2) / 2, not tanh(log 2 / 2)
    assert probability(1, softcap=1.0, temperature=2.0) == pytest.approx(
        math.exp(math.tanh(math.log(2)) / 2) / sum(math.exp(math.tanh(math.log(x)) / 2) for x in (1, 2, 5))
    )
    entropy = linear_logprob(ONE, ODDS, torch.tensor([0]), return_entropy=True, backend=backend).entropy
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)))


def test_kept_ids_worked_by_hand(backend):
    kept = (torch.tensor([2, 2, 1]), torch.tensor([0, 3, 3, 3]))
    out = linear_logprob(
        torch.ones(3, 1), ODDS, torch.tensor([1, 1, 0]), kept=kept, return_entropy=True, backend=backend
    )
    assert out.logprob.exp().tolist() == pytest.approx([2 / 7, 2 / 8, 1 / 8])  # 2 counts once; empty: everything
    assert out.entropy[0].item() == pytest.approx(-(2 / 7 * math.log(2 / 7) + 5 / 7 * math.log(5 / 7)))
    only_target = linear_logprob(
        ONE,
        ODDS,
        torch.tensor([0]),
        kept=(torch.tensor([0]), torch.tensor([0, 1])),
        return_entropy=True,
        backend=backend,
    )
    assert only_target.logprob.item() == 0 and only_target.entropy.item() == 0
    target_outside = linear_logprob(
        ONE, ODDS, torch.tensor([0]), kept=(torch.tensor([2]), torch.tensor([0, 1])), backend=backend
    )
    assert target_outside.logprob.exp().item() == pytest.approx(1 / 6)


@pytest.mark.parametrize("rows, hidden_size, vocab", [(1, 1, 1), (1, 3, 17), (5, 7, 11), (256, 4, 3), (257, 16, 101)])
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_equals_the_definition(backend, rows, hidden_size, vocab, options):
    inputs = sample(rows, hidden_size, vocab)
    dtype = torch.float64 if backend == "reference" else torch.float32
    tolerance = {} if backend == "reference" else {"rtol": 1e-5, "atol": 3e-5}
    if options == "everything":
        inputs |= {"softcap": 2.0, "temperature": torch.linspace(0.3, 2, rows).double(), "kept": some_kept(rows, vocab)}
    else:
        del inputs["bias"]
    wrt = tuple(name for name in ("hidden", "weight", "bias") if name in inputs)
    for at in (0, 1):
        fused = lambda at=at, **kw: linear_logprob(return_entropy=True, backend=backend, **kw)[at]  # noqa: E731
        cast = {name: x.to(dtype) if name in ("temperature", *wrt) else x for name, x in inputs.items()}
        got, got_grads = value_and_grads(fused, cast, wrt)
        want, want_grads = value_and_grads(lambda at=at, **kw: dense(**kw)[at], inputs, wrt)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **tolerance)
        for name in wrt:
            torch.testing.assert_close(got_grads[name].double(), want_grads[name], **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_as_accurate_as_pytorch(backend, dtype):
    inputs = sample(300, 64, 501, dtype)
    inputs["weight"] /= 8
    wrt = ("hidden", "weight", "bias")
    upcast = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    for at in (0, 1):
        fused = lambda at=at, **kw: linear_logprob(return_entropy=True, backend=backend, **kw)[at]  # noqa: E731
        plain = lambda at=at, **kw: dense(**kw)[at]  # noqa: E731
        (got, got_grads), (own, own_grads), (truth, true_grads) = (
            value_and_grads(fused, inputs, wrt),
            value_and_grads(plain, inputs, wrt),
            value_and_grads(plain, upcast, wrt),
        )
        assert got.dtype == torch.float32
        assert_as_accurate(got, own, truth, what="value")
        # whatever the inputs' dtype, the values themselves are those of float32 arithmetic
        torch.testing.assert_close(got.double(), truth, rtol=2e-5, atol=2e-5)
        for name in wrt:
            assert got_grads[name].dtype == dtype
            assert_as_accurate(got_grads[name], own_grads[name], true_grads[name], what=f"d{name}")


def test_float32_weight_under_bf16_autocast_and_mixed_dtypes(backend):
    inputs = sample(9, 16, 33, torch.float32)
    plain = linear_logprob(**inputs, backend=backend).logprob
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_logprob(**inputs, backend=backend).logprob, plain)
    hidden = inputs["hidden"].bfloat16().requires_grad_()
    weight = inputs["weight"].requires_grad_()
    mixed = linear_logprob(hidden, weight, inputs["target"], backend=backend).logprob
    assert torch.equal(mixed, linear_logprob(hidden.float(), weight, inputs["target"], backend=backend).logprob)
    mixed.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32


@pytest.mark.parametrize("options", ["plain", "softcap", "temperature", "kept"])
def test_gradcheck(options):
    inputs = sample(3, 4, 6)
    leaves = [inputs[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    extra = {
        "plain": {},
        "softcap": {"softcap": 1.5},
        "temperature": {"temperature": torch.tensor([0.5, 1.0, 2.0]).double()},
        "kept": {"kept": (torch.tensor([1, 2, 4, 0]), torch.tensor([0, 3, 3, 4]))},
    }[options]
    mask = torch.tensor([1, 0, 1])

    def both(hidden, weight, bias):
        return tuple(
            linear_logprob(hidden, weight, inputs["target"], bias=bias, mask=mask, return_entropy=True, **extra)
        )

    assert torch.autograd.gradcheck(both, leaves)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_as_one_graph(backend, compiler):
    torch._dynamo.reset()
    inputs = sample(7, 5, 13, torch.float32)
    inputs["hidden"][1] = torch.nan
    inputs["target"][2], inputs["target"][3] = -100, 99
    mask = torch.tensor([1, 0, 1, 0, 1, 1, 1])
    ids, offsets = some_kept(7, 13)
    ids[offsets[3] : offsets[4]] = 99  # of a masked row: not looked at
    inputs["bias"][0] = -torch.inf
    temperature = torch.tensor([1.0, 0.0, 1.0, -1.0, 0.5, 2.0, 1.0])
    layout = Layout([0, 3, 7])

    def loss(hidden, weight, bias):
        options = dict(bias=bias, temperature=temperature, mask=mask, kept=(ids, offsets), backend=backend)
        logprob, entropy = linear_logprob(hidden, weight, inputs["target"], return_entropy=True, **options)
        score = segment_logprob(hidden, weight, inputs["target"], layout, **options)
        return torch.cat([logprob, entropy, score.value, score.total])

    for step in (loss, torch.compile(loss, fullgraph=True, backend=compiler)):
        leaves = [inputs[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
        out = step(*leaves)
        out.square().sum().backward()
        if step is loss:
            eager = [out.detach(), *(leaf.grad for leaf in leaves)]
    for got, want in zip([out.detach(), *(leaf.grad for leaf in leaves)], eager):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_numbers_and_lengths_compile_at_most_once_more(backend):  # pitfall 7
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_logprob, fullgraph=True, backend=counter)
    for number in (0.5, 0.7, 0.9, 1.3):
        inputs = sample(4, 5, 13, torch.float32)
        options = dict(temperature=number, softcap=2 * number, backend=backend)
        got, want = (f(**inputs, **options).logprob for f in (compiled, linear_logprob))
        torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2

    torch._dynamo.reset()
    counter.clear()
    compiled = torch.compile(linear_logprob, fullgraph=True, backend=counter)
    for rows in (4, 6, 7, 9):
        inputs = sample(rows, 5, 13, torch.float32)
        kept = some_kept(rows, 13)
        inputs["hidden"].requires_grad_()
        got, want = (f(**inputs, kept=kept, backend=backend).logprob for f in (compiled, linear_logprob))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(x.sum(), inputs["hidden"])[0] for x in (got, want)))
    assert counter.frame_count <= 3  # the offsets are longer by one and the ids by another number: dynamic in turn


def test_collectives_are_not_traced():
    def score(hidden):
        return linear_logprob(hidden, ODDS, torch.tensor([0]), vocab_group="any").logprob

    with pytest.raises(Exception, match="vocab_group: torch.compile cannot trace its collectives; call outside"):
        torch.compile(score, fullgraph=True, backend="eager")(ONE)


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_score_gives_zeros_and_zero_gradients(backend, rows):
    inputs = sample(rows, 4, 6, torch.float32)
    leaves = {k: v.requires_grad_() for k, v in inputs.items() if k != "target"}
    out = linear_logprob(
        **inputs,
        mask=torch.zeros(rows, dtype=torch.bool),
        return_entropy=True,
        kept=some_kept(rows, 6),
        backend=backend,
    )
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert torch.equal(out.logprob, torch.zeros(rows)) and torch.equal(out.entropy, torch.zeros(rows))
    for leaf in leaves.values():
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_non_contiguous_inputs(backend):
    inputs = sample(6, 8, 10, torch.float32)
    want = linear_logprob(**inputs, backend=backend).logprob
    spread = {k: v.repeat_interleave(2, dim=-1)[..., ::2] for k, v in inputs.items()}
    spread["weight"] = inputs["weight"].T.contiguous().T
    assert not any(v.is_contiguous() for v in spread.values())
    torch.testing.assert_close(linear_logprob(**spread, backend=backend).logprob, want)


def test_each_error_names_the_argument(backend):
    hidden, weight, target = torch.randn(2, 3), torch.randn(5, 3), torch.tensor([0, 4])

    def call(hidden=hidden, weight=weight, target=target, **options):
        return linear_logprob(hidden, weight, target, backend=backend, **options)

    offsets, three = torch.tensor([0, 1, 2]), torch.arange(3)
    for error, message, options in (
        (ValueError, r"hidden must have shape \[T, H\]", {"hidden": torch.randn(1, 2, 3)}),
        (ValueError, r"weight must have shape \[V, H\] = \[any, 3\], got \[5, 4\]", {"weight": torch.randn(5, 4)}),
        (ValueError, r"target must have shape \[T\] = \[2\]", {"target": torch.tensor([0])}),
        (TypeError, r"target must be an integer tensor, got torch.float32", {"target": torch.ones(2)}),
        (TypeError, r"weight must be floating point", {"weight": torch.ones(5, 3, dtype=torch.int64)}),
        (ValueError, r"bias must have shape \[V\] = \[5\]", {"bias": torch.randn(4)}),
        (ValueError, r"mask must have shape \[T\] = \[2\]", {"mask": torch.ones(3, dtype=torch.bool)}),
        (TypeError, r"mask must be bool or integer", {"mask": torch.ones(2)}),
        (ValueError, r"temperature must be > 0 and finite, got 0.0", {"temperature": 0.0}),
        (ValueError, r"temperature must be > 0 and finite, got nan", {"temperature": math.nan}),
        (ValueError, r"got -1.0 at row 1", {"temperature": torch.tensor([1.0, -1.0])}),
        (ValueError, r"temperature must have shape \[T\] = \[2\]", {"temperature": torch.ones(1)}),
        (TypeError, r"temperature must be a number", {"temperature": "hot"}),
        (ValueError, r"softcap must be > 0 and finite, or None, got -1", {"softcap": -1.0}),
        (IndexError, r"target of row 1 is 5, outside the vocabulary \[0, 5\)", {"target": torch.tensor([0, 5])}),
        (IndexError, r"target of row 0 is -1, outside", {"target": torch.tensor([-1, 0])}),
        (TypeError, r"kept must be a pair", {"kept": torch.tensor([1])}),
        (
            ValueError,
            r"kept offsets must have shape \[T\+1\] = \[3\]",
            {"kept": (three, three[:1])},
        ),
        (TypeError, r"kept ids must be an integer tensor", {"kept": (torch.ones(2), offsets)}),
        (
            ValueError,
            r"kept offsets must rise from 0 to the number of kept ids, 3",
            {"kept": (three, offsets)},
        ),
        (IndexError, r"kept id 7 of row 1 is outside the vocabulary", {"kept": (torch.tensor([1, 7]), offsets)}),
        (ValueError, r"weight must be on hidden's device cpu, got meta", {"weight": weight.to("meta")}),
    ):
        with pytest.raises(error, match=message):
            call(**options)
    with pytest.raises(ValueError, match="backend must be None or one of"):
        linear_logprob(hidden, weight, target, backend="fastest")
    with pytest.raises(TypeError, match="grad_filter must be True or False, got 0.1"):
        call(grad_filter=0.1)
    with pytest.raises(ValueError, match='reduction must be "mean" or "sum", got \'max\''):
        segment_logprob(hidden, weight, target, Layout([0, 2]), reduction="max")
    with pytest.raises(ValueError, match=r"hidden must have shape \[T, H\] = \[3, any\], got \[2, 3\]"):
        segment_logprob(hidden, weight, target, Layout([0, 3]))


def test_segment_scores_worked_by_hand(backend):
    # segments: two scored tokens; none at all; one masked and one without a target; one scored token
    layout = Layout([0, 2, 2, 4, 5])
    target, mask = torch.tensor([0, 1, 2, -100, 2]), torch.tensor([1, 1, 0, 1, 1])
    hidden, weight = torch.ones(5, 1, requires_grad=True), ODDS.clone().requires_grad_()
    mean = segment_logprob(hidden, weight, target, layout, mask=mask, backend=backend)
    total = segment_logprob(hidden, weight, target, layout, mask=mask, reduction="sum", backend=backend)
    assert mean.count.tolist() == [2, 0, 0, 1] and mean.count.dtype == torch.int64
    assert mean.value.tolist() == pytest.approx([math.log(1 / 32) / 2, 0, 0, math.log(5 / 8)])
    assert total.value.tolist() == pytest.approx([math.log(1 / 32), 0, 0, math.log(5 / 8)])
    assert torch.equal(mean.total, total.value) and torch.equal(total.total, total.value)
    assert mean.value.dtype == torch.float32
    (dweight,) = torch.autograd.grad(mean.value[0], weight, retain_graph=True)
    assert dweight.flatten().tolist() == pytest.approx([1 / 2 - 1 / 8, 1 / 2 - 2 / 8, -5 / 8])
    (dhidden,) = torch.autograd.grad(mean.value.sum(), hidden)
    assert dhidden[2:4].abs().sum() == 0


def test_shifted_targets_errors_and_edges():
    assert shifted_targets(torch.tensor([7]), Layout([0, 1])).tolist() == [-100]
    assert shifted_targets(torch.tensor([], dtype=torch.int64), Layout([0])).tolist() == []
    shifted = shifted_targets(torch.tensor([1, 2, 3], dtype=torch.int32), Layout([0, 0, 1, 1, 3]))
    assert shifted.tolist() == [-100, 3, -100] and shifted.dtype == torch.int64
    with pytest.raises(TypeError, match="input_ids must be an integer tensor, got torch.float32"):
        shifted_targets(torch.ones(3), Layout([0, 3]))
    with pytest.raises(ValueError, match=r"input_ids must have shape \[T\] = \[3\], got \[2\]"):
        shifted_targets(torch.tensor([1, 2]), Layout([0, 3]))
