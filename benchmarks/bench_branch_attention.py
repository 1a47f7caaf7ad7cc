"""Attention over packed segments and branches, against scaled_dot_product_attention (SDPA) a segment."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import (
    Case,
    Check,
    Outputs,
    Problem,
    compiled_sides,
    heavy_tailed_lengths,
    largest_error,
    our_sides,
    ours,
)
from mosaic_kernels import Branches, Layout, branch_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMOLLM2 = {"heads": 9, "kv_heads": 3, "head_size": 64}
SDPA, COPIED = "SDPA a segment", "SDPA, parent copied to each branch"
# What the error may be, relative to the largest output (gradient); outputs are rounded to the inputs' dtype.
TOLERANCE = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 5e-2)}


def attend(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    """SDPA of one segment: [L, Hq, D], [M, Hkv, D] x 2 -> [L, Hq, D]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    return scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)[0].transpose(0, 1)


def a_segment(query: Tensor, key: Tensor, value: Tensor, layout: Layout, branches: Branches | None = None) -> Tensor:
    """SDPA for each segment in turn; a branch gets a copy of its parent's keys and values before its own."""
    lengths = layout.lengths.tolist()
    parents = branches.parent.tolist() if branches else [-1] * len(lengths)
    prefixes = branches.prefix_length.tolist() if branches else [0] * len(lengths)
    # split, not slices: the backward of a slice fills a gradient of all T tokens for each segment
    queries, keys, values = (x.split(lengths) for x in (query, key, value))
    outputs = []
    for query, key, value, parent, prefix in zip(queries, keys, values, parents, prefixes):
        if parent < 0:
            outputs.append(attend(query, key, value, is_causal=True))
            continue
        key, value = torch.cat([keys[parent][:prefix], key]), torch.cat([values[parent][:prefix], value])
        causal = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool).tril(prefix)
        outputs.append(attend(query, key, value, attn_mask=causal))
    return torch.cat(outputs)


def attention(
    layout: Layout,
    branches: Branches | None,
    dtype: str,
    backward: bool,
    heads: int,
    kv_heads: int,
    head_size: int,
    peer: str,
) -> Problem:
    """Outputs, and with `backward` the gradients of a random projection of them."""
    sizes = (heads, kv_heads, kv_heads)
    inputs = [torch.randn(layout.num_tokens, count, head_size).to(DTYPES[dtype]) for count in sizes]
    upstream = torch.randn(layout.num_tokens, heads, head_size).to(DTYPES[dtype])

    def run(call: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> Outputs:
        if not backward:
            with torch.no_grad():
                return (call(*inputs),)
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = call(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    def theirs(*inputs: Tensor) -> Tensor:
        return a_segment(*inputs, layout, branches)

    def mosaic(**backend: str) -> Outputs:
        return run(lambda *inputs: branch_attention(*inputs, layout, branches, **backend), inputs, upstream)

    truth = run(theirs, [x.double() for x in inputs], upstream.double())
    of_output, of_gradient = TOLERANCE[dtype]

    def check(side: str, outputs: Outputs) -> list[Check]:
        names = ("output", "dquery", "dkey", "dvalue")
        return [
            Check(what, largest_error(x, true, relative=True), of_output if what == "output" else of_gradient)
            for what, x, true in zip(names, outputs, truth)
        ]

    lengths = layout.lengths.double()
    prefixes = branches.prefix_length.double() if branches else torch.zeros_like(lengths)
    pairs = int((lengths * prefixes + lengths * (lengths + 1) / 2).sum())
    size = DTYPES[dtype].itemsize
    tensors = size * layout.num_tokens * head_size * (2 * heads + 2 * kv_heads)
    return Problem(
        sides={peer: lambda: run(theirs, inputs, upstream), **ours(branch_attention, mosaic)},
        limit=peer,
        check=check,
        # query, key, value in and the output out; backward reads them and the upstream and writes three gradients
        bytes=tensors * (3 if backward else 1),
        # two products of every visible pair; backward has five
        flops=4 * pairs * heads * head_size * (7 if backward else 2) // 2,
    )


def one_segment(tokens: int, dtype: str, backward: bool, **heads: int) -> Problem:
    return attention(Layout([0, tokens]), None, dtype, backward, **heads, peer=SDPA)


def many_short_segments(tokens: int, segments: int, dtype: str, backward: bool, **heads: int) -> Problem:
    layout = Layout.from_lengths(heavy_tailed_lengths(tokens, segments, sigma=0.7))
    return attention(layout, None, dtype, backward, **heads, peer=SDPA)


def branches_of_one_parent(
    parent: int, branches: int, length: int, dtype: str, backward: bool, **heads: int
) -> Problem:
    """`branches` continuations of evenly spaced prefixes of one parent, as answer probes are."""
    layout = Layout.from_lengths([parent] + branches * [length])
    prefixes = [parent * (branch + 1) // branches for branch in range(branches)]
    tree = Branches([-1] + branches * [0], [0, *prefixes])
    return attention(layout, tree, dtype, backward, **heads, peer=COPIED)


def cases(quick: bool) -> list[Case]:
    mine = our_sides(branch_attention)
    # in quick runs the reference shows itself once a problem: its backward takes seconds
    fast = compiled_sides(branch_attention)
    kinds = (
        (one_segment, {"tokens": 2048}, SDPA),
        (many_short_segments, {"tokens": 8192, "segments": 256}, SDPA),
        (branches_of_one_parent, {"parent": 2000, "branches": 20, "length": 30}, COPIED),
    )
    return [
        Case(
            "branch_attention",
            problem,
            {**sizes, "dtype": dtype, "backward": backward, **SMOLLM2},
            (peer, *(fast if quick and (backward or dtype == "bf16") else mine)),
            5 if quick else 11,
        )
        for problem, sizes, peer in kinds
        for backward in (False, True)
        for dtype in ("fp32", "bf16")
        if not (quick and problem is branches_of_one_parent and (backward or dtype == "bf16"))  # no target of theirs
    ]


def tiny(case: Case) -> Case:
    """The same case at a size that takes milliseconds."""
    small = {"tokens": 40, "segments": 5, "parent": 20, "branches": 3, "length": 4}
    sizes = {name: small.get(name, value) for name, value in case.sizes.items()}
    return Case(case.op, case.problem, sizes, case.sides, 1)


def test_branch_attention(time_side: Callable[[Case, str], None], case: Case, side: str):
    time_side(case, side)
