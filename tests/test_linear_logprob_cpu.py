"""`linear_logprob` on backend "cpu": accuracy, bits, strides, memory, and what its backward pass leaves out."""

from __future__ import annotations

import math

import pytest
import torch

from mosaic_kernels import linear_logprob
from mosaic_kernels._backend import extension
from mosaic_kernels.testing import assert_as_accurate, value_and_grads
from tests.logprob_cases import CPU_VARIANTS, cpu_variant, dense, sample, some_kept

pytestmark = pytest.mark.skipif(extension is None, reason="the compiled extension is not built")
NAMES = ("hidden", "weight", "bias")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=CPU_VARIANTS, autouse=True)
def variant(request):
    with cpu_variant(request.param):
        yield request.param


def run(inputs: dict, wrt=NAMES, **options) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """logprob, entropy, and the gradients of a projection in which every row has its own weights."""
    leaves = {k: v.detach().requires_grad_(k in wrt) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    out = linear_logprob(**leaves, return_entropy=True, backend="cpu", **options)
    steps = torch.linspace(0.5, 1.5, out.logprob.shape[0])
    ((out.logprob * steps).sum() + (out.entropy * steps.flip(0)).sum()).backward()
    return out.logprob.detach(), out.entropy.detach(), {name: leaves[name].grad for name in wrt if name in leaves}


def assert_same_bits(got, want) -> None:
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for name in want[2]:
        assert torch.equal(got[2][name], want[2][name]), name


@pytest.mark.parametrize("hidden_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_every_mixture_of_dtypes_is_as_accurate_as_pytorch(hidden_dtype, weight_dtype):
    # Without a fused multiply-add each product is rounded too, which PyTorch's own GEMM here does not do.
    factor = 3.0 if extension.instruction_set() == extension.InstructionSet.portable else 2.0
    inputs = sample(131, 72, 517)
    inputs["weight"] /= 6
    inputs |= {"hidden": inputs["hidden"].to(hidden_dtype), "weight": inputs["weight"].to(weight_dtype)}
    inputs["bias"] = inputs["bias"].to(weight_dtype)
    upcast = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}

    def pytorch(at, hidden, weight, bias, target):
        # PyTorch multiplies equal dtypes only: of a mixture it takes the float32 copies
        same = hidden_dtype == weight_dtype
        return dense(*((x if same else x.float()) for x in (hidden, weight)), target, bias if same else bias.float())[
            at
        ]

    for at in (0, 1):
        fused = lambda at=at, **kw: linear_logprob(return_entropy=True, backend="cpu", **kw)[at]  # noqa: E731
        got, got_grads = value_and_grads(fused, inputs, NAMES)
        own, own_grads = value_and_grads(lambda at=at, **kw: pytorch(at, **kw), inputs, NAMES)
        truth, true_grads = value_and_grads(lambda at=at, **kw: dense(**kw)[at], upcast, NAMES)
        assert_as_accurate(got, own, truth, factor=factor, what="value")
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)  # float32 logits, whatever goes in
        for name in NAMES:
            assert got_grads[name].dtype == inputs[name].dtype
            assert_as_accurate(got_grads[name], own_grads[name], true_grads[name], factor=factor, what=f"d{name}")


@pytest.mark.parametrize(
    ("rows", "hidden_size", "vocab"),
    [(1, 0, 3), (1, 1, 1), (2, 1, 2), (3, 31, 64), (7, 33, 65), (17, 128, 1100), (33, 5, 2049), (65, 260, 129)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_around_the_tiles(rows, hidden_size, vocab, dtype):
    inputs = sample(rows, hidden_size, vocab, dtype)
    truth = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    got, got_grads = value_and_grads(lambda **kw: linear_logprob(backend="cpu", **kw).logprob, inputs, NAMES)
    want, want_grads = value_and_grads(lambda **kw: dense(**kw)[0], truth, NAMES)
    assert (got <= 0).all()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    for name in NAMES:
        torch.testing.assert_close(got_grads[name], want_grads[name].to(dtype), rtol=2e-2, atol=2e-2)


def test_a_vocabulary_of_a_real_model():
    inputs = sample(3, 16, 49152 + 7, torch.float32)
    inputs["target"] = torch.tensor([0, 49151, 49158])
    logprob, entropy, gradients = run(inputs)
    truth = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    own, want = dense(**inputs), dense(**truth)
    for got, peer, true in zip((logprob, entropy), own, want):
        assert_as_accurate(got, peer, true)
    assert (gradients["weight"].abs().sum(1) > 0).all()  # no id is left out, the last one included


def test_large_logits_are_as_accurate_as_a_float32_gemm():
    inputs = sample(64, 576, 2048)
    inputs["weight"] *= 0.3
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    double, single = (
        {k: v.to(t) if v.is_floating_point() else v for k, v in inputs.items()} for t in (torch.float64, torch.float32)
    )
    logits = double["hidden"] @ double["weight"].T + double["bias"]
    assert 20 < logits.max(1).values.median() < 35
    inputs["target"] = double["target"] = single["target"] = logits.argmax(1)
    truth, own = dense(**double)[0], dense(**single)[0]
    assert_as_accurate(linear_logprob(**inputs, backend="cpu").logprob, own, truth)


def test_same_bits_for_every_thread_count_and_run():
    inputs = sample(140, 96, 1100, torch.bfloat16)
    options = {"temperature": torch.linspace(0.5, 2, 140), "softcap": 20.0, "kept": some_kept(140, 1100)}
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            results.append(run(inputs, **options))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_see_the_others(dtype):
    inputs = sample(75, 40, 203, dtype)
    options = {"temperature": torch.linspace(0.5, 2, 75), "kept": some_kept(75, 203)}
    logprob, entropy, gradients = run(inputs, wrt=("hidden",), **options)
    for row in (0, 31, 47, 74):
        mask = torch.zeros(75, dtype=torch.bool)
        mask[row] = True
        alone = run(inputs, wrt=("hidden",), mask=mask, **options)
        assert torch.equal(alone[0][row], logprob[row]) and torch.equal(alone[1][row], entropy[row])
        assert torch.equal(alone[2]["hidden"][row], gradients["hidden"][row])


def test_unwritten_outputs_would_be_nan():
    inputs = sample(70, 24, 301, torch.float32)
    masks = (None, torch.arange(70) % 3 == 0, torch.zeros(70, dtype=torch.bool))
    want = [run(inputs, mask=mask) for mask in masks]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
        for mask, clean in zip(masks, want):
            assert_same_bits(run(inputs, mask=mask), clean)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_apart_are_read_where_they_lie(dtype, monkeypatch):
    inputs = sample(6, 8, 10, dtype)
    want = run(inputs)
    wide = {k: torch.full((v.shape[0], 20), torch.nan, dtype=v.dtype) for k, v in inputs.items() if v.dim() == 2}
    strided = {k: x[:, 3:11].copy_(inputs[k]) for k, x in wide.items()}
    addresses = []

    def describe(**arguments):
        addresses.append((arguments["hidden"], arguments["weight"]))
        return describe.original(**arguments)

    describe.original = extension.LogprobInputs
    monkeypatch.setattr(extension, "LogprobInputs", describe)
    assert_same_bits(run({**inputs, **strided}), want)
    assert addresses == [(strided["hidden"].data_ptr(), strided["weight"].data_ptr())] * 2
    turned = {k: v.T.contiguous().T for k, v in inputs.items() if v.dim() == 2}
    assert_same_bits(run({**inputs, **turned}), want)
    spread = {k: v.repeat_interleave(2)[::2] for k, v in inputs.items() if v.dim() == 1}
    assert_same_bits(run({**inputs, **spread}), want)


def test_only_the_gradients_asked_for_are_computed(monkeypatch):
    inputs = sample(5, 8, 11, torch.float32)
    want = run(inputs)[2]
    asked = []

    def kernel(call, **addresses):
        asked.append({name for name in NAMES if addresses[f"d{name}"]})
        kernel.original(call, **addresses)

    kernel.original = extension.linear_logprob_backward
    monkeypatch.setattr(extension, "linear_logprob_backward", kernel)
    for wrt in (("hidden",), ("weight",), ("bias",), ("hidden", "bias")):
        for name, gradient in run(inputs, wrt=wrt)[2].items():
            assert torch.equal(gradient, want[name])
        assert asked.pop() == set(wrt)


def test_rows_that_nothing_depends_on_are_skipped_whatever_they_hold():
    inputs = sample(6, 4, 9, torch.float32)
    clean = [x.clone().requires_grad_() for x in (inputs["hidden"], inputs["weight"])]
    linear_logprob(*clean, inputs["target"], backend="cpu").logprob[[1, 4]].sum().backward()
    dirty = [x.clone() for x in (inputs["hidden"], inputs["weight"])]
    dirty[0][0], dirty[0][2] = torch.nan, torch.inf
    out = linear_logprob(*(x.requires_grad_() for x in dirty), inputs["target"], backend="cpu").logprob
    assert out.isfinite().tolist() == [False, True, False, True, True, True] and out[[0, 2]].isnan().all()
    out[[1, 4]].sum().backward()
    assert torch.equal(dirty[0].grad, clean[0].grad) and torch.equal(dirty[1].grad, clean[1].grad)
    out = linear_logprob(*dirty, inputs["target"], backend="cpu").logprob
    dirty[1].grad = None
    out[[0, 1]].sum().backward()  # but what does count is not hidden
    assert dirty[1].grad.isnan().all()


def test_minus_infinity_at_the_target_and_everywhere():
    inputs = sample(5, 4, 9, torch.float32)
    inputs["target"] = torch.tensor([2, 2, 3, 4, 5])
    inputs["bias"][2] = -torch.inf
    kept = (torch.tensor([2]), torch.tensor([0, 1, 1, 1, 1, 1]))  # row 0 has nothing but an id of -inf
    got, want = (linear_logprob(**inputs, kept=kept, return_entropy=True, backend=b) for b in ("cpu", "reference"))
    assert got.logprob[0].isnan() and got.entropy[0].isnan()
    assert got.logprob[1] == -torch.inf and got.entropy[1:].isfinite().all()
    for at in (0, 1):
        torch.testing.assert_close(got[at], want[at], equal_nan=True)
    grads = []
    for name in ("cpu", "reference"):
        leaves = {k: v.clone().requires_grad_(k in NAMES) for k, v in inputs.items()}
        out = linear_logprob(**leaves, return_entropy=True, backend=name)
        (out.logprob[1:].sum() + out.entropy[1:].sum()).backward()
        grads.append([leaves[n].grad for n in NAMES])
    torch.testing.assert_close(*grads)


def test_a_gradient_of_the_entropy_alone_and_of_the_logprob_alone():
    inputs = sample(9, 8, 21, torch.float32)
    truth = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    for at in (0, 1):
        leaves = {k: v.clone().requires_grad_(k in NAMES) for k, v in inputs.items()}
        doubles = {k: v.clone().requires_grad_(k in NAMES) for k, v in truth.items()}
        out = linear_logprob(**leaves, return_entropy=True, backend="cpu")[at]
        (2 * out[3]).backward()
        (2 * dense(**doubles)[at][3]).backward()
        for name in NAMES:
            torch.testing.assert_close(leaves[name].grad.double(), doubles[name].grad, rtol=1e-5, atol=1e-5)


def peaked(dtype: torch.dtype, margin: float) -> dict[str, torch.Tensor]:
    """Ids from 64 on have a log-prob `margin` below the threshold of grad_filter, give or take 0.4."""
    inputs = sample(40, 16, 4096, dtype)
    inputs["weight"] /= 64
    inputs["bias"][64:] = math.log(64 * torch.finfo(dtype).eps / 4096) - margin
    inputs["bias"][:64] = 0
    inputs["target"] %= 64
    return inputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_filter_leaves_out_tiles_below_the_threshold(dtype):
    inputs = peaked(dtype, margin=2.0)
    all_of_it, filtered = run(inputs), run(inputs, grad_filter=True)
    assert torch.equal(filtered[0], all_of_it[0]) and torch.equal(filtered[1], all_of_it[1])
    last = slice(2048, None)  # whatever the width of a tile, these lie in tiles without a target
    for name in ("weight", "bias"):
        assert filtered[2][name][last].abs().sum() == 0 < all_of_it[2][name][last].abs().sum()
        assert torch.equal(filtered[2][name][:64], all_of_it[2][name][:64])

    above = peaked(dtype, margin=-1.0)
    assert_same_bits(run(above, grad_filter=True), run(above))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("margin", [0.5, 3.0])
def test_grad_filter_stays_within_the_bound_it_states(dtype, margin):
    inputs = peaked(dtype, margin)
    vocab, eps = 4096, torch.finfo(dtype).eps
    temperature = torch.linspace(0.9, 1.0, 40)
    steps = torch.linspace(0.5, 1.5, 40)
    c = (steps + steps.flip(0) * math.log(vocab / eps)) / temperature
    exact, filtered = (run(inputs, temperature=temperature, grad_filter=choice)[2] for choice in (False, True))
    rounding = {name: eps * exact[name].abs().float() + 1e-12 for name in NAMES}
    off = {name: (filtered[name].float() - exact[name].float()).abs() for name in NAMES}
    assert all(off[name].max() > 0 for name in ("weight", "bias"))
    assert (off["hidden"] <= eps * c[:, None] * inputs["weight"].abs().max() + rounding["hidden"]).all()
    sums = (c[:, None] * inputs["hidden"].float().abs()).sum(0)
    assert (off["weight"] <= eps / vocab * sums + rounding["weight"]).all()
    assert (off["bias"] <= eps / vocab * c.sum() + rounding["bias"]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_grad_filter_hides_no_row_that_is_not_finite(bad):
    inputs = peaked(torch.float32, margin=2.0)
    inputs["hidden"][0] = bad
    gradients = run(inputs, grad_filter=True)[2]
    assert gradients["hidden"][0].isnan().all() and gradients["hidden"][1:].isfinite().all()
    assert gradients["weight"].isnan().all() and gradients["bias"].isnan().all()
