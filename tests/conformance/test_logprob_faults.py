"""Faults of `linear_logprob` that users of other libraries met, each as its smallest case."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mosaic_kernels import Layout, linear_logprob, shifted_targets
from mosaic_kernels.linear_logprob import _MODULES
from mosaic_kernels.testing import runnable

BACKENDS = runnable(*_MODULES)
backends = pytest.mark.parametrize("backend", BACKENDS)


def sample(rows: int, hidden_size: int, vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(rows, hidden_size, generator=generator),
        "weight": torch.randn(vocab, hidden_size, generator=generator) / hidden_size**0.5,
        "target": torch.randint(vocab, (rows,), generator=generator),
    }


def gradients(inputs: dict[str, torch.Tensor], names: tuple[str, ...], **options) -> dict[str, torch.Tensor]:
    """Gradients of sum(logprob) + sum(entropy) with respect to `names`."""
    leaves = {k: v.clone().requires_grad_(k in names) for k, v in inputs.items()}
    out = linear_logprob(**leaves, return_entropy=True, **options)
    (out.logprob.sum() + out.entropy.sum()).backward()
    return {name: leaves[name].grad for name in names}


@backends
def test_1_columns_past_the_vocabulary_stay_out_of_the_sum(backend):
    inputs = sample(5, 128, 1100)
    inputs["weight"] = -inputs["weight"].abs()  # all logits below 0: a padded logit of 0 would outweigh them
    inputs["hidden"] = inputs["hidden"].abs() * 4
    logprob = linear_logprob(**inputs, backend=backend).logprob
    logits = inputs["hidden"].double() @ inputs["weight"].double().T
    torch.testing.assert_close(
        logprob.double(), logits.log_softmax(1)[torch.arange(5), inputs["target"]], rtol=1e-5, atol=1e-5
    )
    certain = linear_logprob(torch.ones(1, 1), torch.tensor([[100.0], [0.0]]), torch.tensor([0]), backend=backend)
    assert certain.logprob.item() == 0.0  # and never above


@backends
def test_3_minus_infinity_logits(backend):
    inputs = sample(4, 6, 9)
    inputs["bias"] = torch.zeros(9)
    inputs["bias"][:8] = -torch.inf  # the first eight columns, a whole block of them
    inputs["target"][:] = 8
    out = linear_logprob(**inputs, return_entropy=True, backend=backend)
    assert out.logprob.tolist() == [0] * 4 and out.entropy.tolist() == [0] * 4
    inputs["bias"][5] = 0
    out = linear_logprob(**inputs, return_entropy=True, backend=backend)
    two = (inputs["hidden"] @ inputs["weight"][[5, 8]].T).log_softmax(1)
    torch.testing.assert_close(out.logprob, two[:, 1])
    torch.testing.assert_close(out.entropy, -(two.exp() * two).sum(1))
    for gradient in gradients(inputs, ("hidden", "weight", "bias"), backend=backend).values():
        assert gradient.isfinite().all()
    inputs["target"][0] = 0  # a target of probability 0
    out = linear_logprob(**inputs, return_entropy=True, backend=backend)
    assert out.logprob[0].item() == -math.inf and out.entropy.isfinite().all()
    assert out.logprob[1:].isfinite().all()


@backends
def test_5_a_row_alone_has_the_bits_it_has_in_a_batch(backend):
    inputs = sample(300, 576, 1100)
    inputs["temperature"] = torch.linspace(0.5, 1.5, 300)
    full = linear_logprob(**inputs, return_entropy=True, backend=backend)
    again = linear_logprob(**inputs, return_entropy=True, backend=backend)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    shuffled = linear_logprob(
        **{k: v if k == "weight" else v[order] for k, v in inputs.items()}, return_entropy=True, backend=backend
    )
    mask = torch.arange(300) % 3 == 0
    some = linear_logprob(**inputs, mask=mask, return_entropy=True, backend=backend)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    other_threads = linear_logprob(**inputs, return_entropy=True, backend=backend)
    torch.set_num_threads(threads)
    for at in (0, 1):
        assert torch.equal(full[at], again[at])
        assert torch.equal(full[at], other_threads[at])
        assert torch.equal(full[at][order], shuffled[at])
        assert torch.equal(full[at][mask], some[at][mask])
        for row in (0, 131, 255, 256, 299):
            one = {k: v if k == "weight" else v[row : row + 1] for k, v in inputs.items()}
            assert torch.equal(linear_logprob(**one, return_entropy=True, backend=backend)[at][0], full[at][row])


@backends
def test_5_gradients_repeat_bit_by_bit_and_dhidden_does_not_see_the_batch(backend):
    inputs = sample(260, 32, 203)
    first, second = (gradients(inputs, ("hidden", "weight"), backend=backend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    one = {k: v if k == "weight" else v[17:18] for k, v in inputs.items()}
    assert torch.equal(gradients(one, ("hidden",), backend=backend)["hidden"][0], first["hidden"][17])


@backends
def test_8_nothing_of_a_masked_row_leaks(backend):
    inputs = sample(4, 6, 9)
    inputs["bias"] = torch.randn(9, generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([1, 0, 1, 0])
    names = ("hidden", "weight", "bias")
    clean_value = linear_logprob(**inputs, mask=mask, return_entropy=True, backend=backend)
    clean = gradients(inputs, names, mask=mask, backend=backend)
    inputs["hidden"][1], inputs["hidden"][3] = torch.nan, torch.inf
    inputs["target"][1] = 10**6
    options = {"mask": mask, "temperature": torch.tensor([1.0, 0.0, 1.0, torch.nan])}
    options["kept"] = (torch.tensor([-5]), torch.tensor([0, 0, 1, 1, 1]))
    value = linear_logprob(**inputs, **options, return_entropy=True, backend=backend)
    for got, want in zip(value, clean_value):
        assert torch.equal(got, want) and got[1] == 0 and got[3] == 0
    dirty = gradients(inputs, names, **options, backend=backend)
    assert all(torch.equal(dirty[name], clean[name]) for name in names)
    assert dirty["hidden"][1::2].abs().sum() == 0


def test_14_labels_stay_inside_their_segment():
    assert shifted_targets(torch.tensor([1, 2, 3, 4, 5]), Layout([0, 3, 5])).tolist() == [2, 3, -100, 5, -100]


@backends
def test_15_temperature_a_row_reaches_logprob_and_entropy(backend):
    inputs = sample(3, 6, 9)
    temperature = torch.tensor([0.5, 1.0, 2.0])
    out = linear_logprob(**inputs, temperature=temperature, return_entropy=True, backend=backend)
    for row, one in enumerate(temperature.tolist()):
        single = linear_logprob(**inputs, temperature=one, return_entropy=True, backend=backend)
        assert torch.equal(out.logprob[row], single.logprob[row]) and torch.equal(out.entropy[row], single.entropy[row])
        logp = (inputs["hidden"][row] @ inputs["weight"].T / one).log_softmax(0)
        torch.testing.assert_close(out.entropy[row], -(logp.exp() * logp).sum())
    assert out.entropy[0] != linear_logprob(**inputs, return_entropy=True, backend=backend).entropy[0]


@backends
def test_16_truncated_sampling_is_scored_over_its_own_ids(backend):
    inputs = sample(50, 6, 9)
    logits = inputs["hidden"] @ inputs["weight"].T / 0.7
    top = logits.topk(3).indices
    inputs["target"] = top[torch.arange(50), torch.arange(50) % 3]
    kept = (top.flatten(), torch.arange(0, 151, 3))
    got = linear_logprob(**inputs, temperature=0.7, kept=kept, backend=backend).logprob
    engine = logits.gather(1, top).log_softmax(1)[torch.arange(50), torch.arange(50) % 3]
    torch.testing.assert_close(got, engine)
    assert (got > linear_logprob(**inputs, temperature=0.7, backend=backend).logprob).all()


@backends
def test_17_no_entropy_unless_asked_for(backend):
    assert linear_logprob(**sample(3, 6, 9), backend=backend).entropy is None


@backends
def test_18_masked_rows_cost_no_gemm(backend):
    inputs = sample(3000, 8, 50)
    inputs["hidden"].requires_grad_()

    def flops(every: int) -> int:
        with FlopCounterMode(display=False) as counter:
            mask = torch.arange(3000) % every == 0
            linear_logprob(**inputs, mask=mask, backend=backend).logprob.sum().backward()
        return counter.get_total_flops()

    assert flops(1) >= 10 * flops(12) > 0


@backends
def test_18_only_scored_rows_reach_memory(backend):
    """No tensor as large as [T, V] is made, in the forward or the backward pass."""
    inputs = sample(2000, 4, 1000)
    inputs["hidden"].requires_grad_()
    inputs["weight"].requires_grad_()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                largest = max(largest, x.numel() if isinstance(x, torch.Tensor) else 0)
            return out

    with Watch():
        out = linear_logprob(**inputs, return_entropy=True, backend=backend)
        (out.logprob.sum() + out.entropy.sum()).backward()
    assert 0 < largest <= 300 * 1000
