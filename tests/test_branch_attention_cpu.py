"""The compiled kernels of branch attention: tile edges, bits, threads, dtypes, strides and the ops themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_kernels import Branches, Layout, branch_attention
from mosaic_kernels.testing import assert_as_accurate, instruction_set, instruction_sets
from tests.test_branch_attention import draw, packings

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the compiled extension is not built")
NAMES = ("output", "dquery", "dkey", "dvalue")


@pytest.fixture(params=instruction_sets())
def instructions(request):
    with instruction_set(request.param):
        yield request.param


def differentiate(qkv, doutput, layout, branches=None, **options):
    """Output and gradients, each output weighted with `doutput`."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = branch_attention(*leaves, layout, branches, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, doutput)]


def assert_accurate(
    lengths, branches=None, heads=2, kv_heads=1, size=16, dtype=torch.float32, seed=0, factor=4.0, **options
):
    """Values and gradients of the "cpu" backend against float64, PyTorch's products in `dtype` being the peer.

    The factor is 4 because the largest of a few hundred errors varies by 2 from draw to draw, and because the portable
    instruction set rounds every product.
    """
    layout = Layout.from_lengths(lengths)
    inputs = draw(layout, heads, kv_heads, size, dtype, seed)
    doutput = draw(layout, heads, kv_heads, size, dtype, seed + 1)[0]
    actual = differentiate(inputs, doutput, layout, branches, backend="cpu", **options)
    peer = differentiate(inputs, doutput, layout, branches, backend="reference", **options)
    wide = [x.double() for x in inputs]
    truth = differentiate(wide, doutput.double(), layout, branches, backend="reference", **options)
    for name, ours, theirs, exact in zip(NAMES, actual, peer, truth):
        assert ours.dtype == dtype
        assert_as_accurate(ours, theirs, exact, factor=factor, what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_accurate_as_pytorch_on_many_numbers(instructions, dtype):
    assert_accurate([700, 40], Branches([-1, 0], [0, 650]), heads=9, kv_heads=3, size=64, dtype=dtype, factor=2.0)


# Around a vector (4, 8, 16), a panel (8, 24, 48), a block of keys (64, 128) and a task (192 rows).
@pytest.mark.parametrize("length", [1, 2, 7, 16, 17, 24, 25, 47, 48, 49, 63, 64, 65, 127, 128, 129, 193, 400])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (4, 2)])
def test_lengths_around_the_tiles(instructions, length, heads, kv_heads):
    # Short ones several times over: PyTorch's largest error needs some numbers to be typical.
    assert_accurate([length] * (1 + 40 // length), heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 15, 16, 17, 31, 33, 48, 64, 65, 80, 100, 128, 256, 300])
def test_head_sizes(instructions, size):
    assert_accurate([70, 3], heads=4, kv_heads=2, size=size)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 2), (9, 3), (7, 1), (50, 1), (16, 8)])
def test_head_counts(instructions, heads, kv_heads):
    assert_accurate([40, 0, 9], heads=heads, kv_heads=kv_heads, size=8)


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 127, 128, 129, 200])
def test_prefixes_around_the_tiles(instructions, prefix):
    assert_accurate([200, 37, 5], Branches([-1, 0, 0], [0, prefix, 200]), heads=3)


def test_many_branches_of_one_parent_some_of_them_before_it(instructions):
    lengths = [3, 5, 150, *range(60), 0, 20]
    parent = [2, 2, -1, *[2] * 60, -1, -1]
    prefix = [150, 0, 0, *range(60, 120), 0, 0]
    assert_accurate(lengths, Branches(parent, prefix), heads=6, kv_heads=2)


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 100, 128, 300, 2**31, 2**40])
def test_windows(instructions, window):
    # Long enough that whole blocks of keys lie out of sight, of the parent's and of the segment's own.
    assert_accurate([300, 170, 10], Branches([-1, 0, 0], [0, 250, 130]), heads=3, size=8, window=window)


@pytest.mark.parametrize("softcap", [0.3, 2.0, 50.0])
def test_softcap(instructions, softcap):
    assert_accurate([80, 30], Branches([-1, 0], [0, 70]), softcap=softcap, scale=0.8)
    assert_accurate([80, 30], Branches([-1, 0], [0, 70]), softcap=softcap, window=20)


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_scale(instructions, scale):
    assert_accurate([80, 30], Branches([-1, 0], [0, 70]), scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(instructions, dtype):
    assert_accurate([150, 7, 66], Branches([-1, -1, 0], [0, 0, 140]), heads=6, kv_heads=2, size=20, dtype=dtype)
    assert_accurate([150, 7], heads=2, kv_heads=2, size=33, dtype=dtype, window=40, softcap=5.0)


@settings(max_examples=40, deadline=None)
@given(
    packing=packings(),
    stretch=st.sampled_from([1, 7, 40]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (8, 1)]),
    size=st.sampled_from([1, 3, 16, 20]),
    softcap=st.sampled_from([None, 0.7]),
    window=st.sampled_from([None, 1, 30, 100]),
    seed=st.integers(0, 1000),
)
def test_random_packings(packing, stretch, heads, size, softcap, window, seed):
    lengths, parent, prefix = packing
    layout = Layout.from_lengths([stretch * x for x in lengths])
    branches = Branches(parent, [stretch * x for x in prefix])
    inputs, doutput = draw(layout, *heads, size, seed=seed), draw(layout, *heads, size, seed=seed + 1)[0]
    options = {"softcap": softcap, "window": window}
    truth = differentiate(inputs, doutput, layout, branches, backend="reference", **options)
    for instructions in instruction_sets():
        with instruction_set(instructions):
            rounded = [x.float() for x in inputs]
            actual = differentiate(rounded, doutput.float(), layout, branches, backend="cpu", **options)
        torch.testing.assert_close([x.double() for x in actual], truth, rtol=2e-5, atol=1e-5)


def test_thousands_of_empty_segments(instructions):
    lengths = [0] * 5000
    lengths[1], lengths[2500], lengths[4999] = 3, 70, 2
    parent, prefix = [-1] * 5000, [0] * 5000
    parent[0], parent[4999], parent[4998] = 2500, 2500, 7
    prefix[0], prefix[4999] = 70, 65
    assert_accurate(lengths, Branches(parent, prefix))


def test_same_bits_for_any_thread_count_and_run(instructions):
    # One long segment, so that threads take turns at the same rows of dquery, and branches that all add to its keys.
    layout = Layout.from_lengths([700, 30, 90, 1, 400])
    branches = Branches([-1, 0, 0, 0, -1], [0, 700, 500, 1, 0])
    inputs, doutput = draw(layout, 6, 2, 32, torch.float32), draw(layout, 6, 2, 32, torch.float32, seed=1)[0]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 2, 5):
            torch.set_num_threads(threads)
            results.append(differentiate(inputs, doutput, layout, branches, backend="cpu"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, x, y in zip(NAMES, results[0], other):
            assert torch.equal(x, y), name


@pytest.mark.parametrize("options", [{}, {"window": 50, "softcap": 3.0}])
def test_bits_do_not_depend_on_the_rest_of_the_batch(instructions, options):
    def packed(lengths, parent, prefix, rows):
        layout, branches = Layout.from_lengths(lengths), Branches(parent, prefix)
        inputs, doutput = draw(layout, 6, 2, 20, torch.float32), draw(layout, 6, 2, 20, torch.float32, seed=1)[0]
        for x, y in zip((*inputs, doutput), family):
            x[rows] = y
        return [x[rows] for x in differentiate(inputs, doutput, layout, branches, backend="cpu", **options)]

    alone = Layout.from_lengths([150, 70])
    family = (*draw(alone, 6, 2, 20, torch.float32, 7), draw(alone, 6, 2, 20, torch.float32, 8)[0])
    expected = packed([150, 70], [-1, 0], [0, 130], slice(0, 220))
    surrounded = packed([5, 90, 150, 70, 33], [-1, 0, -1, 2, -1], [0, 5, 0, 130, 0], slice(95, 315))
    for name, x, y in zip(NAMES, expected, surrounded):
        assert torch.equal(x, y), name


def test_nan_stays_in_its_family_backward_too(instructions):
    layout, branches = Layout.from_lengths([60, 70, 20, 30]), Branches([-1, -1, 0, 1], [0, 0, 60, 70])
    inputs, doutput = draw(layout, 4, 2, 16, torch.float32), draw(layout, 4, 2, 16, torch.float32, seed=1)[0]
    clean = differentiate(inputs, doutput, layout, branches, backend="cpu")
    spared = (layout.token_segment == 1) | (layout.token_segment == 3)
    for poisoned in range(4):
        dirty = [x.clone() for x in (*inputs, doutput)]
        dirty[poisoned][~spared] = float("nan")
        for name, x, y in zip(NAMES, clean, differentiate(dirty[:3], dirty[3], layout, branches, backend="cpu")):
            assert torch.equal(x[spared], y[spared]), name


def test_nothing_unwritten_is_read_or_returned(instructions):
    """Memory that torch hands out is filled with NaN; so is what the kernels do not write."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        layout, branches = Layout.from_lengths([130, 0, 50, 1]), Branches([-1, -1, 0, 0], [0, 0, 129, 0])
        for window in (None, 1, 20):
            inputs = draw(layout, 6, 2, 17, torch.float32)
            for x in differentiate(inputs, inputs[0], layout, branches, window=window, backend="cpu"):
                assert x.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_strided_inputs_give_the_same_bits(instructions):
    layout, branches = Layout.from_lengths([50, 9]), Branches([-1, 0], [0, 45])
    fused = torch.randn(59, 3, 4, 12)
    views = fused.unbind(1)
    expected = differentiate([x.contiguous() for x in views], torch.ones(59, 4, 12), layout, branches, backend="cpu")
    for strided in (
        views,  # tokens and heads apart
        [x.transpose(0, 1).contiguous().transpose(0, 1) for x in views],  # heads before tokens
        [x.transpose(0, 2).contiguous().transpose(0, 2) for x in views],  # a head's elements apart
    ):
        # The gradient of a sum is one number, spread over the shape without a copy.
        doutput = torch.ones(()).expand(59, 4, 12)
        for name, x, y in zip(NAMES, expected, differentiate(strided, doutput, layout, branches, backend="cpu")):
            assert torch.equal(x, y), name


def test_offsets_beyond_32_bits(instructions):
    # Address space only: nothing but a few pages of it is touched.
    tokens, apart = 3, 2**30 + 8
    layout = Layout.from_lengths([tokens])
    wide = [torch.empty(tokens * apart, dtype=torch.bfloat16).as_strided((tokens, 1, 8), (apart, 8, 1)) for _ in "qkv"]
    narrow = draw(layout, 1, 1, 8, torch.bfloat16)
    for x, y in zip(wide, narrow):
        x.copy_(y)
    expected = differentiate(narrow, narrow[0], layout, backend="cpu")
    for name, x, y in zip(NAMES, expected, differentiate(wide, wide[0], layout, backend="cpu")):
        assert torch.equal(x, y), name


def test_gradients_have_the_dtype_of_their_inputs():
    layout = Layout.from_lengths([5])
    query, key, value = (x.requires_grad_() for x in draw(layout, dtype=torch.float32))
    leaves = [
        x.detach().to(d).requires_grad_() for x, d in zip((query, key, value), (torch.bfloat16, None, torch.half))
    ]
    branch_attention(*leaves, layout, backend="cpu").sum().backward()
    assert [x.grad.dtype for x in leaves] == [torch.bfloat16, torch.float32, torch.float16]


def test_it_is_chosen_on_cpu_tensors_unless_one_is_float64():
    layout = Layout.from_lengths([3])
    query, key, value = (x.requires_grad_() for x in draw(layout, dtype=torch.float32))
    assert "_Attention" in branch_attention(query, key, value, layout).grad_fn.name()
    assert "_Attention" not in branch_attention(query, key.double(), value, layout).grad_fn.name()
    with pytest.raises(NotImplementedError, match="the float64 key asks for float64: use backend='reference'"):
        branch_attention(query, key.double(), value, layout, backend="cpu")


def test_opcheck():
    layout, branches = Layout.from_lengths([30, 0, 20]), Branches([-1, -1, 0], [0, 0, 25])
    inputs = draw(layout, 4, 2, dtype=torch.float32)
    ops = torch.ops.mosaic_kernels
    options = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for tail in (
        (layout.cu_seqlens, branches.parent, branches.prefix_length, options, 3),
        (layout.cu_seqlens, None, None, options * 0, 2**31 - 1),
    ):
        torch.library.opcheck(ops.branch_attention.default, (*inputs, *tail))
        saved = ops.branch_attention(*inputs, *tail)
        torch.library.opcheck(ops.branch_attention_backward.default, (*inputs, *tail, *saved, inputs[0]))


def test_the_op_refuses_what_its_kernels_could_not_follow():
    inputs, options = draw(Layout.from_lengths([4]), dtype=torch.float32), torch.ones(2, dtype=torch.float64)
    attend = torch.ops.mosaic_kernels.branch_attention

    def ids(*x):
        return torch.tensor(x)

    with pytest.raises(ValueError, match="layout must have as many tokens as query, 4, got 5"):
        attend(*inputs, ids(0, 2, 5).int(), None, None, options, 9)
    for offsets in ((0, 3, 2, 4), (1, 4)):
        with pytest.raises(ValueError, match="cu_seqlens must"):
            attend(*inputs, ids(*offsets).int(), None, None, options, 9)
    for parent, prefix in (((-1, 0), (0, 3)), ((-1, 2), (0, 0)), ((-1, 1), (0, 0)), ((-1,), (0,)), ((-1, -1), (0, 1))):
        with pytest.raises(ValueError, match="^(parent|prefix_length)"):
            attend(*inputs, ids(0, 2, 4).int(), ids(*parent), ids(*prefix), options, 9)


def test_other_numbers_compile_at_most_once_more():  # pitfall 7
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layout = Layout.from_lengths([9])
    inputs = [x.requires_grad_() for x in draw(layout, dtype=torch.float32)]

    def run(scale, softcap, window):
        return branch_attention(*inputs, layout, scale=scale, softcap=softcap, window=window, backend="cpu")

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for scale, softcap, window in ((0.5, 2.0, 3), (0.25, 3.0, 4), (0.75, 1.5, 5), (0.3, 0.9, 7)):
        got, expected = compiled(scale, softcap, window), run(scale, softcap, window)
        assert torch.equal(got, expected)
        for x, y in zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
            assert torch.equal(x, y)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("same", ["qk", "qv", "kv", "qkv"])
def test_one_tensor_given_twice_compiles_and_gets_both_gradients(same):
    torch._dynamo.reset()
    layout = Layout.from_lengths([7, 4])
    given = dict(zip("qkv", (x.requires_grad_() for x in draw(layout, dtype=torch.float32))))
    given |= {name: given[same[0]] for name in same}
    compiled = torch.compile(branch_attention, fullgraph=True, backend="aot_eager")
    truth = [x.detach().double().requires_grad_() for x in given.values()]
    branch_attention(*truth, layout, backend="reference").sum().backward()
    for attend in (branch_attention, compiled):
        out = attend(*given.values(), layout, backend="cpu")
        for leaf, gradient in zip("qkv", torch.autograd.grad(out.sum(), list(given.values()))):
            parts = [x.grad for name, x in zip("qkv", truth) if given[name] is given[leaf]]
            torch.testing.assert_close(gradient.double(), sum(parts), rtol=1e-5, atol=1e-5)
