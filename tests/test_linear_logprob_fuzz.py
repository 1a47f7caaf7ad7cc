"""Random calls of every backend against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mosaic_kernels import linear_logprob
from tests.logprob_cases import every_backend, sample  # noqa: F401

NAMES = ("hidden", "weight", "bias")


@st.composite
def calls(draw) -> dict:
    rows, hidden_size = draw(st.integers(0, 70)), draw(st.integers(0, 40))
    vocab = draw(st.one_of(st.integers(1, 9), st.integers(10, 300)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
    call = sample(rows, hidden_size, vocab, torch.float32, seed=draw(st.integers(0, 99)))
    for name in NAMES:
        call[name] = call[name].to(draw(dtypes))
    if draw(st.booleans()):
        call["hidden"] = call["hidden"].T.contiguous().T
    if draw(st.booleans()):
        call["weight"] = torch.cat([call["weight"], call["weight"] + 1], dim=1)[:, :hidden_size]
    targets = call["target"].clone()
    if draw(st.booleans()):
        del call["bias"]
    elif draw(st.booleans()):
        gone = rand(vocab) < draw(st.sampled_from([0.1, 0.9]))
        gone[targets] = False
        call["bias"] = call["bias"].masked_fill(gone, -torch.inf)
    call["target"] = torch.where(rand(rows) < draw(st.sampled_from([0.0, 0.3, 1.0])), -100, targets)
    call["target"] = call["target"].to(draw(st.sampled_from([torch.int64, torch.int32])))
    if draw(st.booleans()):
        call["mask"] = rand(rows) < draw(st.sampled_from([0.1, 0.7]))
    if draw(st.booleans()):
        call["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    if draw(st.booleans()):
        call["temperature"] = draw(st.sampled_from([0.3, 1.0, 2.0])) if draw(st.booleans()) else rand(rows) + 0.3
    if draw(st.booleans()):
        lengths = torch.floor(rand(rows) * draw(st.integers(1, 9))).to(torch.int64)
        ids = torch.floor(rand(int(lengths.sum())) * vocab).to(torch.int32)
        call["kept"] = ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return call


def results(call: dict, backend: str, gradient_of: tuple[int, ...]):
    leaves = {k: v.detach().requires_grad_(k in NAMES) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    out = linear_logprob(**leaves, return_entropy=True, backend=backend)
    steps = torch.linspace(-1, 1, out.logprob.shape[0], dtype=torch.float64)
    sum((out[at].double() * (steps + at)).sum() for at in gradient_of).backward()
    return [x.detach() for x in out], {name: leaves[name].grad for name in NAMES if name in leaves}


@pytest.mark.parametrize("gradient_of", [(0,), (1,), (0, 1)])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls())
def test_random_calls(backend, gradient_of, call):
    exact = {k: v.double() if k in NAMES else v for k, v in call.items()}
    got, got_gradients = results(call, backend, gradient_of)
    want, want_gradients = results(exact, "reference", gradient_of)
    assert (got[0] <= 0).all() and (got[1] >= 0).all()
    for at in (0, 1):
        torch.testing.assert_close(got[at].double(), want[at], rtol=1e-5, atol=1e-4)
    for name, gradient in got_gradients.items():
        assert gradient.dtype == call[name].dtype and gradient.shape == call[name].shape
        true = want_gradients[name]
        scale = float(true.abs().max()) if true.numel() else 0.0
        coarsest = max(torch.finfo(call[x].dtype).eps for x in ("hidden", "weight", name))
        assert torch.allclose(gradient.double(), true, rtol=0, atol=2 * coarsest * scale + 1e-4)
