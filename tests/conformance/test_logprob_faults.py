"""Faults of `linear_logprob` that users of other libraries met, each as its smallest case."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mosaic_kernels import Layout, linear_logprob, shifted_targets
from mosaic_kernels._backend import extension
from tests.logprob_cases import every_backend  # noqa: F401


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


@pytest.mark.skipif(extension is None, reason="the compiled extension is not built")
def test_2_offsets_beyond_32_bits():
    """Rows 2^30 and more elements apart, in memory that is never touched between them."""
    far = 2**30
    memory = torch.empty(2 * far + 8, dtype=torch.bfloat16)
    near = sample(3, 8, 3)
    want = {name: near[name].bfloat16() for name in ("hidden", "weight")} | {"target": near["target"]}
    spread = dict(want)
    expected = linear_logprob(**want, backend="cpu").logprob
    expected_gradients = gradients(want, ("hidden", "weight"), backend="cpu")
    for name in ("hidden", "weight"):
        view = memory.as_strided((3, 8), (far, 1)).copy_(want[name])
        spread = {**want, name: view}
        assert torch.equal(linear_logprob(**spread, backend="cpu").logprob, expected)
        leaves = {k: v.detach().requires_grad_(k != "target") for k, v in spread.items()}
        out = linear_logprob(**leaves, return_entropy=True, backend="cpu")
        (out.logprob.sum() + out.entropy.sum()).backward()
        for leaf, gradient in expected_gradients.items():
            assert torch.equal(leaves[leaf].grad, gradient)


@pytest.mark.skipif(extension is None, reason="the compiled extension is not built")
def test_2_more_elements_than_32_bits_count():
    """T V, T H and V H each beyond 2^31, without the memory: one row of hidden and of weight, repeated."""
    rows, vocab, hidden_size = 2**21, 2**20, 2**11 + 1
    hidden = torch.full((1, hidden_size), 0.5).expand(rows, hidden_size)
    weight = torch.zeros(1, hidden_size).expand(vocab, hidden_size)
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[-1] = True
    target = torch.full((rows,), vocab - 1)
    out = linear_logprob(hidden, weight, target, mask=mask, return_entropy=True, backend="cpu")
    for x, want in ((out.logprob, -math.log(vocab)), (out.entropy, math.log(vocab))):
        assert x[-1].item() == pytest.approx(want) and x[:-1].abs().sum() == 0


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


def test_4_more_rows_than_a_grid_dimension_holds(backend):
    inputs = sample(70_000, 2, 3)
    logprob = linear_logprob(**inputs, backend=backend).logprob
    want = (inputs["hidden"] @ inputs["weight"].T).log_softmax(1).gather(1, inputs["target"][:, None])[:, 0]
    torch.testing.assert_close(logprob, want)


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


def test_5_gradients_repeat_bit_by_bit_and_dhidden_does_not_see_the_batch(backend):
    inputs = sample(260, 32, 203)
    first, second = (gradients(inputs, ("hidden", "weight"), backend=backend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    one = {k: v if k == "weight" else v[17:18] for k, v in inputs.items()}
    assert torch.equal(gradients(one, ("hidden",), backend=backend)["hidden"][0], first["hidden"][17])


def test_6_small_weight_gradients_add_up(backend):
    # 4096 rows give 1/2 each: a bf16 sum would stop growing at 256
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    target = torch.zeros(4096, dtype=torch.int64)
    linear_logprob(hidden, weight, target, bias=bias, backend=backend).logprob.sum().backward()
    assert weight.grad.flatten().tolist() == [2048.0, -2048.0] and bias.grad.tolist() == [2048.0, -2048.0]


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


def test_17_no_entropy_unless_asked_for(backend):
    assert linear_logprob(**sample(3, 6, 9), backend=backend).entropy is None


def test_18_masked_rows_cost_no_gemm(backend, monkeypatch):
    inputs = sample(3000, 8, 50)
    inputs["hidden"].requires_grad_()
    rows = 0
    for name in ("linear_logprob_forward", "linear_logprob_backward"):

        def counting(call, run, **addresses):
            nonlocal rows
            rows += call.num_rows
            run(call, **addresses)

        if backend == "cpu":
            monkeypatch.setattr(extension, name, partial(counting, run=getattr(extension, name)))
    if backend == "triton":
        from mosaic_kernels.linear_logprob import triton_launch

        def listing(*call, run=triton_launch.rows_of):
            nonlocal rows
            listed = run(*call)
            rows += int(listed.count)
            return listed

        monkeypatch.setattr(triton_launch, "rows_of", listing)

    def work(every: int) -> int:
        """Operations of PyTorch's GEMMs, or the rows that the kernels were given."""
        nonlocal rows
        rows = 0
        with FlopCounterMode(display=False) as counter:
            mask = torch.arange(3000) % every == 0
            linear_logprob(**inputs, mask=mask, backend=backend).logprob.sum().backward()
        return rows or counter.get_total_flops()

    assert work(1) >= 10 * work(12) > 0


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
