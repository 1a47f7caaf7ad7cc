"""`linear_logprob` on backend "triton": tiles, bits, what a GPU says of bad values, the frozen head, grad_filter."""

from __future__ import annotations

import math

import pytest
import torch

from mosaic_kernels import Layout, linear_logprob, segment_logprob
from mosaic_kernels._backend import TRITON_INTERPRETED
from mosaic_kernels.linear_logprob import autograd, triton
from mosaic_kernels.linear_logprob.collectives import VocabShard
from mosaic_kernels.linear_logprob.cpu import filter_threshold
from mosaic_kernels.testing import assert_as_accurate, runnable, value_and_grads
from tests.logprob_cases import dense, sample, some_kept

RUNS = "triton" in runnable()
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not RUNS, reason="no GPU, and TRITON_INTERPRET is not 1"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # numpy on what tl.where drops
]
DEVICE = "cpu" if TRITON_INTERPRETED else "cuda"
NAMES = ("hidden", "weight", "bias")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_device(inputs: dict) -> dict:
    move = lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x  # noqa: E731
    return {k: tuple(map(move, v)) if isinstance(v, tuple) else move(v) for k, v in inputs.items()}


def run(inputs: dict, wrt=NAMES, **options) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """logprob, entropy, and the gradients of a projection in which every row has its own weights."""
    inputs, options = on_device(inputs), on_device(options)
    leaves = {k: v.detach().requires_grad_(k in wrt) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    out = linear_logprob(**leaves, return_entropy=True, backend="triton", **options)
    steps = torch.linspace(0.5, 1.5, out.logprob.shape[0], device=DEVICE)
    ((out.logprob * steps).sum() + (out.entropy * steps.flip(0)).sum()).backward()
    return out.logprob.detach(), out.entropy.detach(), {name: leaves[name].grad for name in wrt if name in leaves}


def assert_same_bits(got, want) -> None:
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for name in want[2]:
        assert torch.equal(got[2][name], want[2][name]), name


# The interpreter's tiles: 128 rows, 128 ids, 256 a split, 64 hidden elements; chunks of 128 ids.
@pytest.mark.parametrize(
    ("rows", "hidden_size", "vocab"),
    [(1, 0, 3), (1, 1, 1), (2, 1, 2), (127, 63, 128), (128, 64, 129), (129, 65, 257), (3, 36, 1100), (130, 128, 127)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_around_the_tiles(rows, hidden_size, vocab, dtype):
    inputs = sample(rows, hidden_size, vocab, dtype)
    truth = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    fused = lambda **kw: linear_logprob(backend="triton", **kw).logprob.cpu()  # noqa: E731
    got, got_grads = value_and_grads(fused, on_device(inputs), NAMES)
    want, want_grads = value_and_grads(lambda **kw: dense(**kw)[0], truth, NAMES)
    assert (got <= 0).all()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    for name in NAMES:
        torch.testing.assert_close(got_grads[name].cpu(), want_grads[name].to(dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("hidden_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_every_mixture_of_dtypes_is_as_accurate_as_pytorch(hidden_dtype, weight_dtype):
    inputs = sample(70, 40, 140)
    inputs["weight"] /= 6
    inputs |= {"hidden": inputs["hidden"].to(hidden_dtype), "weight": inputs["weight"].to(weight_dtype)}
    inputs["bias"] = inputs["bias"].to(weight_dtype)
    upcast = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    same = hidden_dtype == weight_dtype

    def pytorch(at, hidden, weight, bias, target):
        # PyTorch multiplies equal dtypes only: of a mixture it takes the float32 copies
        tensors = (hidden, weight, bias) if same else (x.float() for x in (hidden, weight, bias))
        return dense(*(x for x in list(tensors)[:2]), target, bias if same else bias.float())[at]

    for at in (0, 1):
        fused = lambda at=at, **kw: linear_logprob(return_entropy=True, backend="triton", **kw)[at]  # noqa: E731
        got, got_grads = value_and_grads(fused, on_device(inputs), NAMES)
        own, own_grads = value_and_grads(lambda at=at, **kw: pytorch(at, **kw), inputs, NAMES)
        truth, true_grads = value_and_grads(lambda at=at, **kw: dense(**kw)[at], upcast, NAMES)
        assert_as_accurate(got.cpu(), own, truth, what="value")
        torch.testing.assert_close(got.cpu().double(), truth, rtol=1e-5, atol=1e-5)  # float32 logits, whatever goes in
        for name in NAMES:
            assert got_grads[name].dtype == inputs[name].dtype
            assert_as_accurate(got_grads[name].cpu(), own_grads[name], true_grads[name], what=f"d{name}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_alone_in_a_batch_and_again(dtype):
    inputs = sample(140, 40, 203, dtype)
    options = {"temperature": torch.linspace(0.5, 2, 140), "softcap": 20.0, "kept": some_kept(140, 203)}
    logprob, entropy, gradients = first = run(inputs, **options)
    assert_same_bits(run(inputs, **options), first)
    for row in (0, 127, 128, 139):
        mask = torch.zeros(140, dtype=torch.bool)
        mask[row] = True
        alone = run(inputs, wrt=("hidden",), mask=mask, **options)
        assert torch.equal(alone[0][row], logprob[row]) and torch.equal(alone[1][row], entropy[row])
        if dtype == torch.float32:  # else dlogits are rounded, in float16 by scales that all listed rows share
            assert torch.equal(alone[2]["hidden"][row], gradients["hidden"][row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, "some"])
def test_frozen_head(dtype, mask, monkeypatch):
    """The expected weight made in the forward pass gives dhidden without any logit of the backward pass."""
    inputs = sample(70, 40, 700, dtype)  # three splits, in chunks of one
    inputs["bias"][:300] = -torch.inf  # nothing in the first
    options = {"temperature": torch.linspace(0.5, 2, 70), "kept": some_kept(70, 700)}
    options |= {} if mask is None else {"mask": torch.arange(70) % 3 != 1}
    inputs["target"] = inputs["target"] % 400 + 300
    taken = []
    original = triton.backward_expected
    monkeypatch.setattr(triton, "backward_expected", lambda *call: taken.append(1) or original(*call))
    monkeypatch.setattr(triton, "backward", None)  # must not be called

    def dhidden(x: dict, **call) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x["hidden"].detach().requires_grad_()
        logprob = linear_logprob(**{**x, "hidden": hidden}, **call).logprob
        steps = torch.linspace(0.5, 1.5, 70, device=logprob.device)
        steps[5] = 0  # a clipped token
        (logprob * steps).sum().backward()
        return logprob.detach(), hidden.grad

    got, gradient = dhidden(on_device(inputs), backend="triton", **on_device(options))
    assert taken and gradient.dtype == dtype and gradient[5].abs().sum() == 0
    without = linear_logprob(**on_device(inputs), backend="triton", **on_device(options)).logprob
    assert torch.equal(got, without)  # old log-probs, without autograd, have the same bits
    widened = lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v  # noqa: E731
    truth = {k: widened(v) for k, v in (inputs | options).items()}
    want, want_gradient = dhidden(truth, backend="reference")
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-4)
    tolerance = 8 * torch.finfo(dtype).eps * want_gradient.abs().max()
    assert (gradient.cpu().double() - want_gradient).abs().max() <= tolerance


def test_frozen_head_compiles_as_one_graph():
    torch._dynamo.reset()
    inputs = on_device(sample(6, 8, 300, torch.float32))
    results = []
    for score in (linear_logprob, torch.compile(linear_logprob, fullgraph=True, backend="aot_eager")):
        hidden = inputs["hidden"].clone().requires_grad_()
        logprob = score(**{**inputs, "hidden": hidden}, temperature=0.7, backend="triton").logprob
        logprob.square().sum().backward()
        results.append((logprob.detach(), hidden.grad))
    for got, want in zip(*results):
        assert torch.equal(got, want) and want.abs().sum() > 0


@pytest.mark.parametrize("wrt", [("hidden",), ("hidden", "weight")])
def test_rows_in_several_launches(wrt, monkeypatch):
    from mosaic_kernels.linear_logprob import triton_gradients, triton_launch

    inputs = sample(300, 20, 140, torch.float32)
    options = {"mask": torch.arange(300) % 7 != 3}

    def both() -> list[torch.Tensor]:
        """The general route, and that of a frozen head, which is not open to the first call."""
        logprob, entropy, gradients = run(inputs, wrt=wrt, **options)
        hidden = inputs["hidden"].to(DEVICE).requires_grad_()
        rest = {k: v for k, v in on_device(inputs | options).items() if k != "hidden"}
        linear_logprob(hidden, **rest, backend="triton").logprob.sum().backward()
        return [logprob, entropy, hidden.grad, *(gradients[name] for name in wrt)]

    want = both()
    for module in (triton_launch, triton_gradients):
        monkeypatch.setattr(module, "ROWS", 128)
    assert all(torch.equal(got, one) for got, one in zip(both(), want))


def test_which_calls_take_the_route_of_a_frozen_head(monkeypatch):
    inputs = on_device(sample(5, 8, 20, torch.float32))
    asked = []
    for name in ("forward", "forward_expected"):
        original = getattr(triton, name)
        monkeypatch.setattr(triton, name, lambda *c, name=name, original=original: asked.append(name) or original(*c))

    def route(wrt: tuple[str, ...], **options) -> str:
        leaves = {k: v.detach().requires_grad_(k in wrt) for k, v in inputs.items()}
        linear_logprob(**leaves, backend="triton", **options)
        return asked.pop()

    assert route(("hidden",)) == route(("hidden",), temperature=0.5) == "forward_expected"
    for wrt in ((), ("weight",), ("hidden", "weight"), ("hidden", "bias")):
        assert route(wrt) == "forward"
    for options in ({"softcap": 3.0}, {"return_entropy": True}, {"grad_filter": True}):
        assert route(("hidden",), **options) == "forward"
    with torch.no_grad():
        assert route(("hidden",)) == "forward"


def unchecked(inputs: dict, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """logprob and entropy as on a GPU, where no value is looked at before a kernel runs."""
    options = {"bias": None, "temperature": 1.0, "softcap": None, "kept": None} | options
    active = torch.ones(inputs["target"].shape, dtype=torch.bool, device=DEVICE)
    shard = VocabShard(0, inputs["weight"].shape[0], None)
    call = on_device(inputs) | on_device(options)
    return autograd.linear_logprob(triton, **call, active=active, return_entropy=True, grad_filter=False, shard=shard)


def test_values_that_mean_nothing_give_nan_and_no_gradient(monkeypatch):
    monkeypatch.setattr(triton, "check_values", lambda *_: None)
    inputs = sample(6, 4, 9, torch.float32)
    inputs["target"][0], inputs["target"][1] = 9, -1
    options = {
        "bias": inputs.pop("bias"),
        "temperature": torch.tensor([1.0, 1, 0, -1, 1, 0.5]),
        "kept": (torch.tensor([9, 2, 3]), torch.tensor([0, 0, 0, 0, 0, 2, 3])),
    }
    hidden = inputs["hidden"].to(DEVICE).requires_grad_()
    logprob, entropy = unchecked({**inputs, "hidden": hidden}, **options)
    assert logprob.isnan().tolist() == entropy.isnan().tolist() == [True] * 5 + [False]
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad[:5].abs().sum() == 0 and hidden.grad[5].abs().sum() > 0  # as the reference's masks have it

    infinite = sample(3, 4, 9, torch.float32)
    infinite["hidden"][1] = torch.nan
    logprob, entropy = unchecked({k: infinite[k] for k in ("hidden", "weight", "target")})
    assert logprob.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]


def test_a_row_that_nothing_depends_on_is_skipped_whatever_it_holds():
    inputs = on_device(sample(6, 4, 9, torch.float32))
    clean = [inputs[name].clone().requires_grad_() for name in ("hidden", "weight")]
    linear_logprob(*clean, inputs["target"], backend="triton").logprob[[1, 4]].sum().backward()
    dirty = [inputs[name].clone() for name in ("hidden", "weight")]
    dirty[0][0], dirty[0][2] = torch.nan, torch.inf
    out = linear_logprob(*(x.requires_grad_() for x in dirty), inputs["target"], backend="triton").logprob
    assert out.isfinite().tolist() == [False, True, False, True, True, True] and out[[0, 2]].isnan().all()
    out[[1, 4]].sum().backward(retain_graph=True)
    assert torch.equal(dirty[0].grad, clean[0].grad) and torch.equal(dirty[1].grad, clean[1].grad)
    dirty[1].grad = None
    out[[0, 1]].sum().backward()  # but what does count is not hidden
    assert dirty[1].grad.isnan().all()


def test_unwritten_memory_is_never_read():
    inputs = sample(70, 24, 301, torch.bfloat16)
    masks = (None, torch.arange(70) % 3 == 0, torch.zeros(70, dtype=torch.bool))
    options = {"temperature": torch.linspace(0.5, 2, 70), "grad_filter": True}
    want = [run(inputs, mask=mask, **options) for mask in masks]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
        for mask, clean in zip(masks, want):
            assert_same_bits(run(inputs, mask=mask, **options), clean)
    finally:
        torch.use_deterministic_algorithms(False)


def test_lists_of_kept_ids_across_tiles_and_splits():
    """Long lists with ids on both sides of every edge, each row's in any order."""
    rows, vocab = 5, 700
    inputs = sample(rows, 12, vocab, torch.float32)
    edges = torch.tensor([0, 31, 32, 63, 64, 127, 128, 129, 255, 256, 511, 512, 639, 640, 699])
    lists = [edges.flip(0), edges[:1], torch.arange(vocab).flip(0), edges[:0], edges[7:].repeat(3)]
    kept = (torch.cat(lists), torch.tensor([0, *map(len, lists)]).cumsum(0))
    got = run(inputs, kept=kept)
    truth = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    for at in (0, 1):
        torch.testing.assert_close(got[at].cpu().double(), dense(**truth, kept=kept)[at], rtol=1e-5, atol=1e-5)


def test_small_gradients_survive_float16():
    """1e-6 a token, as a loss over a million tokens gives them, times p is far below what float16 holds."""
    inputs = sample(40, 16, 300, torch.float16)
    truth = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    steps = torch.logspace(-6, -2, 40, dtype=torch.float64)

    def gradients(x: dict, backend: str) -> dict[str, torch.Tensor]:
        leaves = {k: v.clone().requires_grad_(k in NAMES) for k, v in x.items()}
        out = linear_logprob(**leaves, backend=backend).logprob
        (out * steps.to(out)).sum().backward()
        return {name: leaves[name].grad.cpu().double() for name in NAMES}

    got, want = gradients(on_device(inputs), "triton"), gradients(truth, "reference")
    for name in NAMES:  # one rounding of the result, 2^-24 at the least, and those of its terms
        scale = want[name].abs() if name == "hidden" else want[name].abs().max()
        scale = scale.amax(-1, keepdim=True)
        assert ((got[name] - want[name]).abs() <= 2e-3 * scale + 2**-24).all(), name


def peaked(dtype: torch.dtype, margin: float) -> dict[str, torch.Tensor]:
    """Ids from 64 on are all `margin` less likely than the threshold of grad_filter."""
    inputs = sample(70, 16, 1024, dtype)
    inputs["weight"] /= 16
    inputs["bias"][64:] = math.log(filter_threshold(inputs["hidden"], inputs["weight"], 1024)) - margin
    inputs["bias"][:64] = 0
    inputs["target"] %= 64
    return inputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_filter_leaves_out_tiles_below_the_threshold(dtype):
    inputs = peaked(dtype, margin=2.0)
    all_of_it, filtered = run(inputs), run(inputs, grad_filter=True)
    assert torch.equal(filtered[0], all_of_it[0]) and torch.equal(filtered[1], all_of_it[1])
    last = slice(512, None)  # whatever the width of a tile, these lie in tiles without a target
    for name in ("weight", "bias"):
        assert filtered[2][name][last].abs().sum() == 0 < all_of_it[2][name][last].abs().sum()
        assert torch.equal(filtered[2][name][:64], all_of_it[2][name][:64])

    above = sample(40, 16, 600, dtype)  # p near 1 / 600: far above eps / 600
    above["weight"] /= 16
    assert_same_bits(run(above, grad_filter=True), run(above))
    del above["bias"]  # other tiles
    assert_same_bits(run(above, grad_filter=True), run(above))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_filter_stays_within_the_bound_it_states(dtype):
    inputs = peaked(dtype, 0.5)
    vocab, eps = 1024, torch.finfo(dtype).eps
    temperature, steps = torch.linspace(0.9, 1.0, 70), torch.linspace(0.5, 1.5, 70)
    c = (steps + steps.flip(0) * math.log(vocab / eps)) / temperature
    exact, filtered = (run(inputs, temperature=temperature, grad_filter=choice)[2] for choice in (False, True))
    exact, filtered = ({k: v.cpu() for k, v in x.items()} for x in (exact, filtered))
    rounding = {name: eps * exact[name].abs().float() + 1e-12 for name in NAMES}
    off = {name: (filtered[name].float() - exact[name].float()).abs() for name in NAMES}
    assert all(off[name].max() > 0 for name in ("weight", "bias"))
    assert (off["hidden"] <= eps * c[:, None] * inputs["weight"].abs().max() + rounding["hidden"]).all()
    sums = (c[:, None] * inputs["hidden"].float().abs()).sum(0)
    assert (off["weight"] <= eps / vocab * sums + rounding["weight"]).all()
    assert (off["bias"] <= eps / vocab * c.sum() + rounding["bias"]).all()


def test_only_the_gradients_asked_for_are_computed():
    inputs = sample(5, 8, 11, torch.float32)
    want = run(inputs)[2]
    for wrt in (("hidden",), ("weight",), ("bias",), ("hidden", "bias")):
        for name, gradient in run(inputs, wrt=wrt)[2].items():
            assert torch.equal(gradient, want[name])


def test_what_it_cannot_serve():
    inputs = on_device(sample(2, 3, 5))
    with pytest.raises(NotImplementedError, match="hidden asks for float64: use backend='reference'"):
        linear_logprob(**inputs, backend="triton")
    small = inputs["weight"].to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="takes float32, bfloat16 and float16, and weight is torch.float8"):
        linear_logprob(inputs["hidden"].float(), small, inputs["target"], backend="triton")
    with pytest.raises(NotImplementedError, match="the tensors are on meta"):
        meta = {k: v.float().to("meta") if v.is_floating_point() else v.to("meta") for k, v in inputs.items()}
        linear_logprob(**meta, backend="triton")


def test_segments():
    inputs = on_device(sample(5, 8, 11, torch.float32))
    layout = Layout([0, 2, 2, 5])
    got = segment_logprob(inputs["hidden"], inputs["weight"], inputs["target"], layout, backend="triton")
    want = linear_logprob(inputs["hidden"], inputs["weight"], inputs["target"], backend="reference").logprob
    expected = torch.stack([want[:2].mean(), want.new_zeros(()), want[2:].mean()])
    torch.testing.assert_close(got.value, expected)


def test_opcheck():
    rows, vocab = 9, 13
    inputs = on_device(sample(rows, 5, vocab, torch.bfloat16))
    active = torch.arange(rows, device=DEVICE) % 4 != 1
    place, ops = (0, vocab), torch.ops.mosaic_kernels
    ids, offsets = (x.to(DEVICE) for x in some_kept(rows, vocab))
    kept_call = (ids, offsets, inputs["target"], active, 0, vocab, vocab)
    torch.library.opcheck(ops.linear_logprob_triton_kept.default, kept_call)
    softcap, temperature = torch.tensor(3.0, device=DEVICE), torch.linspace(0.5, 1, rows, device=DEVICE)
    none, ones = (None,) * 3, torch.ones(rows, device=DEVICE)
    for bias, extra, lists, entropy in (
        (None, (None, None), none, False),
        (inputs["bias"], (temperature, softcap), ops.linear_logprob_triton_kept(*kept_call), True),
    ):
        call = (inputs["hidden"], inputs["weight"], bias, inputs["target"], active, *extra, *lists, *place)
        torch.library.opcheck(ops.linear_logprob_triton_forward.default, (*call, entropy, False))
        largest, normaliser, _, _, _ = ops.linear_logprob_triton_forward(*call, entropy, False)
        above = (ones, ones, ones) if entropy else (None, ones, None)
        for wanted in ((torch.bfloat16, True, bias is not None), (torch.float32, False, False), (None, True, False)):
            arguments = (*call, largest, normaliser.log().float(), *above, True, *wanted)
            torch.library.opcheck(ops.linear_logprob_triton_backward.default, arguments)
    every = torch.ones(rows, dtype=torch.bool, device=DEVICE)  # else nobody writes the last rows of expected
    call = (inputs["hidden"], inputs["weight"], None, inputs["target"], every, None, None, *none, *place)
    torch.library.opcheck(ops.linear_logprob_triton_forward.default, (*call, False, True))
    expected = ops.linear_logprob_triton_forward(*call, False, True)[-1]
    row = (inputs["weight"], inputs["target"], active, temperature, None, *place, expected, ones, ones, torch.bfloat16)
    torch.library.opcheck(ops.linear_logprob_triton_backward_expected.default, row)
