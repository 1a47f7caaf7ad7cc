"""What surrounds a call does not matter: PyTorch's defaults, other Python threads at work, a forked process."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mosaic_kernels import (
    Branches,
    Clip,
    Layout,
    branch_attention,
    linear_logprob,
    normalization_weights,
    policy_loss,
    rollout_correction,
    segment_gae,
    value_loss,
)
from mosaic_kernels._backend import extension

pytestmark = pytest.mark.skipif(extension is None, reason="the compiled extension is not built")


def with_gradients(outputs: Callable[..., list[Tensor]], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = outputs(*leaves)
    return [*(x.detach() for x in out), *torch.autograd.grad(sum(x.sum() for x in out), leaves)]


def calls() -> dict[str, Callable[[], list[Tensor]]]:
    """A call of each op on backend "cpu", large enough for several threads; it gives all results and gradients."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    layout, branches = Layout.from_lengths([700, 0, 300, 5], [0, 1, 0, 1]), Branches([-1, -1, 0, 0], [0, 0, 600, 7])
    size = layout.num_tokens
    mask = torch.rand(size, generator=generator) > 0.3
    reward = torch.where(mask, randn(size), 0)
    x, y, z = randn(3, size)
    query, key, value = randn(size, 4, 16), randn(size, 2, 16), randn(size, 2, 16)
    hidden, strided, weight, bias = randn(200, 24), randn(24, 200).T, randn(300, 24), randn(300)
    target = torch.randint(300, (200,), generator=generator)
    options = {"bias": bias, "temperature": 0.7, "softcap": 9.0, "return_entropy": True, "backend": "cpu"}
    return {
        "linear_logprob": lambda: with_gradients(
            lambda h, s, w: [*linear_logprob(h, w, target, **options), *linear_logprob(s, w, target, **options)],
            hidden,
            strided,
            weight,
        ),
        "branch_attention": lambda: with_gradients(
            lambda *qkv: [branch_attention(*qkv, layout, branches, softcap=3.0, backend="cpu")], query, key, value
        ),
        "policy_loss": lambda: with_gradients(
            lambda x: [policy_loss(x, y, z, layout, mask=mask, objective=Clip(level="segment"), backend="cpu").loss], x
        ),
        "value_loss": lambda: with_gradients(
            lambda x: [value_loss(x, y, z, layout, mask=mask, clip=0.5, backend="cpu").loss], x
        ),
        "segment_gae": lambda: list(segment_gae(reward, x, layout, mask=mask, lam_critic=1.0, backend="cpu")),
        "rollout_correction": lambda: list(
            rollout_correction(x, y, layout, mask=mask, level="trajectory", floor=0.1, backend="cpu")[:2]
        ),
        "normalization_weights": lambda: [normalization_weights(layout, mask, "trajectory")],
    }


CALLS = calls() if extension is not None else {}


def assert_same(op: str, got: list[Tensor], want: list[Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.device == y.device and torch.equal(x, y), op


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype(op, dtype):
    want, before = CALLS[op](), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert_same(op, CALLS[op](), want)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("op", CALLS)
def test_the_default_device(op):
    want = CALLS[op]()
    with torch.device("meta"):
        assert_same(op, CALLS[op](), want)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_several_python_threads_at_once(two_threads):
    want = {op: call() for op, call in CALLS.items()}
    ops, faults = list(CALLS), []

    def work(first):
        for at in range(3 * len(ops)):
            op = ops[(first + at) % len(ops)]
            try:
                assert_same(op, CALLS[op](), want[op])
            except Exception as error:  # in a thread nobody sees it
                faults.append(error)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("op", CALLS)
def test_a_forked_process(op, two_threads):
    want = CALLS[op]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, of which PyTorch has some
        child = os.fork()
    if not child:
        signal.alarm(60)
        torch.set_num_threads(1)  # as in a DataLoader's workers: PyTorch's own functions wait for threads of the parent
        try:
            assert_same(op, CALLS[op](), want)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
