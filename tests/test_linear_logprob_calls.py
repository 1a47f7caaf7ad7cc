"""How `linear_logprob` is called on backend "cpu": what it refuses, its ops, torch.compile, memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mosaic_kernels import Layout, linear_logprob, segment_logprob
from mosaic_kernels._backend import extension
from tests.logprob_cases import CPU_VARIANTS, cpu_variant, sample, some_kept

pytestmark = pytest.mark.skipif(extension is None, reason="the compiled extension is not built")
ROOT = Path(__file__).resolve().parents[1]


def test_grad_filter_where_nothing_can_filter():
    inputs = sample(2, 3, 5)
    with pytest.raises(NotImplementedError, match="the reference leaves nothing out .*hidden is torch.float64 on cpu"):
        linear_logprob(**inputs, grad_filter=True)
    single = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    with pytest.raises(NotImplementedError, match="the reference leaves nothing out"):
        linear_logprob(**single, grad_filter=True, backend="reference")
    score = segment_logprob(
        single["hidden"], single["weight"], single["target"], Layout([0, 2]), grad_filter=True, backend="cpu"
    )
    assert score.value.isfinite().all()


def test_what_it_cannot_serve():
    inputs = sample(2, 3, 5)
    with pytest.raises(NotImplementedError, match="hidden asks for float64: use backend='reference'"):
        linear_logprob(**inputs, backend="cpu")
    assert linear_logprob(**inputs).logprob.dtype == torch.float64  # None goes to the reference
    small = inputs["weight"].to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="weight is torch.float8_e4m3fn: convert it to float32"):
        linear_logprob(inputs["hidden"].float(), small, inputs["target"], backend="cpu")


@pytest.mark.skipif("avx512_bf16+dot" not in CPU_VARIANTS, reason="this processor has no dot products of bfloat16")
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_products_take_over_where_both_are_bfloat16(other):
    inputs = sample(40, 200, 300, torch.bfloat16)
    inputs["weight"] = inputs["weight"].to(other)
    results = []
    for variant in ("avx512_bf16", "avx512_bf16+dot"):
        leaves = {k: v.clone().requires_grad_(k in ("hidden", "weight")) for k, v in inputs.items()}
        with cpu_variant(variant):
            out = linear_logprob(**leaves, backend="cpu").logprob
            out.sum().backward()
        results.append((out, leaves["hidden"].grad, leaves["weight"].grad))
    # Sums of other pairs: their roundings show which were in use.
    assert [torch.equal(*both) for both in zip(*results)] == [other != torch.bfloat16] * 3


def test_no_second_derivative():
    inputs = sample(2, 3, 5, torch.float32)
    hidden = inputs["hidden"].requires_grad_()
    out = linear_logprob(hidden, inputs["weight"], inputs["target"], backend="cpu").logprob
    (first,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice a function that was marked with @once_diff"):
        first.sum().backward()


def test_opcheck():
    rows, vocab = 9, 13
    inputs = sample(rows, 5, vocab, torch.bfloat16)
    active = torch.arange(rows) % 4 != 1
    place = (0, vocab)
    ops = torch.ops.mosaic_kernels
    ids, offsets = some_kept(rows, vocab)
    kept_call = (ids, offsets, inputs["target"], active, 0, vocab, vocab)
    torch.library.opcheck(ops.linear_logprob_kept.default, kept_call)
    softcap, temperature = torch.tensor(3.0), torch.linspace(0.5, 1, rows)
    none = (None,) * 3
    for bias, extra, lists, entropy in (
        (None, (None, None), none, False),
        (inputs["bias"], (temperature, softcap), ops.linear_logprob_kept(*kept_call), True),
    ):
        call = (inputs["hidden"], inputs["weight"], bias, inputs["target"], active, *extra, *lists, *place)
        torch.library.opcheck(ops.linear_logprob_forward.default, (*call, entropy))
        largest, normaliser, _, _ = ops.linear_logprob_forward(*call, entropy)
        ones = torch.ones(rows)
        above = (ones, ones, ones) if entropy else (None, ones, None)
        for wanted in ((torch.bfloat16, True, bias is not None), (torch.float32, False, False), (None, True, False)):
            arguments = (*call, largest, normaliser.log().float(), *above, True, *wanted)
            torch.library.opcheck(ops.linear_logprob_backward.default, arguments)


def test_a_compiled_call_checks_its_values():
    torch._dynamo.reset()
    inputs = sample(3, 4, 5, torch.float32)
    compiled = torch.compile(linear_logprob, fullgraph=True, backend="eager")
    inputs["target"][1] = 5
    with pytest.raises(IndexError, match=r"target of row 1 is 5, outside the vocabulary \[0, 5\)"):
        compiled(**inputs, backend="cpu")


def test_a_weight_that_is_also_the_hidden_compiles_and_gets_both_gradients():
    torch._dynamo.reset()
    both, target = sample(7, 5, 7, torch.float32)["hidden"].requires_grad_(), torch.arange(7).flip(0)
    copies = [both.detach().double().requires_grad_() for _ in range(2)]
    linear_logprob(*copies, target).logprob.sum().backward()
    for score in (linear_logprob, torch.compile(linear_logprob, fullgraph=True, backend="aot_eager")):
        (gradient,) = torch.autograd.grad(score(both, both, target, backend="cpu").logprob.sum(), both)
        torch.testing.assert_close(gradient.double(), copies[0].grad + copies[1].grad, rtol=1e-5, atol=1e-5)


MEMORY = """
import resource, sys
import torch
from mosaic_kernels import linear_logprob

rows, hidden_size, vocab, dtype = 2048, 8, 49152, torch.bfloat16
if sys.argv[1] == "weight":
    rows, hidden_size = 3, 1024
generator = torch.Generator().manual_seed(0)
hidden = torch.randn(rows, hidden_size, generator=generator).to(dtype).requires_grad_()
weight = torch.empty(vocab, hidden_size, dtype=dtype).fill_(0.01).requires_grad_()
target = torch.arange(rows)

def step(hidden, weight, target):
    out = linear_logprob(hidden, weight, target, return_entropy=True, backend="cpu")
    (out.logprob.sum() + out.entropy.sum()).backward()

step(hidden[:2, :4], weight[:5, :4], target[:2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(hidden, weight, target)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("what", ["logits", "weight"])
def test_peak_memory(what):
    """No [T, V] (384 MiB here), and no float32 copy of the weight (192 MiB, beside 96 of its gradient)."""
    done = subprocess.run([sys.executable, "-c", MEMORY, what], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    gradients = {"logits": 1, "weight": 96}[what]
    assert float(done.stdout) < gradients + 64
