"""Branch attention: numbers worked by hand, PyTorch's own attention, and an independent brute force."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_kernels import Branches, Layout, branch_attention
from mosaic_kernels.branch_attention import reference
from mosaic_kernels.testing import assert_as_accurate, instruction_set, instruction_sets, runnable, value_and_grads

BACKENDS = runnable("reference", "cpu")
# What a backend computes in at best: the dtype to test it in, and how close to the truth it must then come.
DTYPE = {"reference": torch.float64, "cpu": torch.float32}
CLOSE = {"reference": {"rtol": 1e-12, "atol": 1e-12}, "cpu": {"rtol": 2e-5, "atol": 5e-6}}
NAN = float("nan")


@pytest.fixture(params=["reference", *(f"cpu-{name}" for name in instruction_sets())])
def backend(request):
    """Each backend that runs here, the "cpu" one on each instruction set."""
    name, _, instructions = request.param.partition("-")
    with instruction_set(instructions) if instructions else nullcontext():
        yield name


def draw(layout, heads=2, kv_heads=None, size=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(layout.num_tokens, h, size) for h in (heads, kv_heads or heads, kv_heads or heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def brute_force(query, key, value, lengths, parent, prefix, scale=None, softcap=None, window=None):
    """One query, head and key at a time, in Python floats; shares nothing with the package."""
    starts = [sum(lengths[:s]) for s in range(len(lengths))]
    per_group = query.shape[1] // key.shape[1]
    scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
    out = torch.zeros_like(query)
    for s, length in enumerate(lengths):
        inherited = [(starts[parent[s]] + i, i) for i in range(prefix[s])]
        for j in range(length):
            here = prefix[s] + j
            seen = inherited + [(starts[s] + i, prefix[s] + i) for i in range(j + 1)]
            seen = [token for token, position in seen if window is None or here - position < window]
            for head in range(query.shape[1]):
                kv = head // per_group
                scores = [scale * float(query[starts[s] + j, head] @ key[token, kv]) for token in seen]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                exps = [math.exp(score - max(scores)) for score in scores]
                for token, weight in zip(seen, exps):
                    out[starts[s] + j, head] += weight / sum(exps) * value[token, kv]
    return out


class TestByHand:
    def test_two_tokens(self, backend):
        # Scores of the second token: 2 * 0 and 2 * ln(3) / 2 = ln 3, so weights 1/4 and 3/4.
        query = torch.tensor([5.0, 1.0]).reshape(2, 1, 1)
        key = torch.tensor([0.0, math.log(3) / 2]).reshape(2, 1, 1)
        value = torch.tensor([4.0, 8.0]).reshape(2, 1, 1)
        out = branch_attention(query, key, value, Layout([0, 2]), scale=2.0, backend=backend)
        torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 7.0]))
        # A cap c turns ln 3 into c * tanh(ln 3 / c); for c = ln(3) / atanh(1/2) that is half of c.
        cap = math.log(3) / math.atanh(0.5)
        out = branch_attention(query, key, value, Layout([0, 2]), scale=2.0, softcap=cap, backend=backend)
        weight = math.exp(cap / 2) / (1 + math.exp(cap / 2))
        torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 4 + 4 * weight]))

    def test_equal_scores_average_what_is_seen(self, backend):
        # Segment 0 holds 1, 2, 6; segment 1 continues its first two tokens with 9 and 0; segment 2 stands alone.
        value = torch.tensor([1.0, 2.0, 6.0, 9.0, 0.0, 5.0]).reshape(6, 1, 1)
        layout, branches = Layout([0, 3, 5, 6]), Branches([-1, 0, -1], [0, 2, 0])
        zeros = torch.zeros_like(value)

        def attend(*given, **options):
            return branch_attention(zeros, zeros, value, layout, *given, backend=backend, **options).flatten().tolist()

        assert attend() == [1, 1.5, 3, 9, 4.5, 5]
        assert attend(branches) == [1, 1.5, 3, 4, 3, 5]
        assert attend(branches, window=2) == [1, 1.5, 4, 5.5, 4.5, 5]
        assert attend(branches, window=3) == [1, 1.5, 3, 4, pytest.approx(11 / 3), 5]
        assert attend(branches, window=1) == value.flatten().tolist()

    def test_first_token_of_a_branch_with_prefix_zero_sees_only_itself(self, backend):
        layout = Layout([0, 2, 4])
        query, key, value = draw(layout, dtype=DTYPE[backend])
        out = branch_attention(query, key, value, layout, Branches([-1, 0], [0, 0]), backend=backend)
        assert torch.equal(out, branch_attention(query, key, value, layout, backend=backend))
        assert torch.equal(out[2], value[2])

    def test_query_heads_share_key_value_heads_in_runs(self, backend):
        # Four query heads over two key-value heads: heads 0, 1 read the first, heads 2, 3 the second.
        query, key = torch.zeros(1, 4, 1), torch.zeros(1, 2, 1)
        out = branch_attention(query, key, torch.tensor([[[3.0], [7.0]]]), Layout([0, 1]), backend=backend)
        assert out.flatten().tolist() == [3, 3, 7, 7]


def dense(query, key, value, **options):
    """PyTorch's own causal attention over [L, H, D]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, **options
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (4, 1)])
def test_segments_equal_scaled_dot_product_attention(backend, heads, kv_heads):
    layout = Layout.from_lengths([1, 0, 7, 64, 3, 0])
    given = draw(layout, heads, kv_heads, size=8, dtype=DTYPE[backend])
    for scale in (None, 0.3):
        out = branch_attention(*given, layout, scale=scale, backend=backend)
        parts = [dense(*(x[a:b] for x in given), scale=scale) for a, b in [(0, 1), (1, 8), (8, 72), (72, 75)]]
        torch.testing.assert_close(out, torch.cat(parts), **CLOSE[backend])


@pytest.mark.parametrize("prefix", [0, 1, 5, 9])
def test_branch_equals_the_dense_run_over_prefix_and_branch(backend, prefix):
    layout = Layout.from_lengths([2, 9, 4])
    given = draw(layout, 4, 2, dtype=DTYPE[backend])
    out = branch_attention(*given, layout, Branches([-1, -1, 1], [0, 0, prefix]), backend=backend)
    joined = [torch.cat([x[2 : 2 + prefix], x[11:]]) for x in given]
    torch.testing.assert_close(out[11:], dense(*joined)[prefix:], **CLOSE[backend])
    torch.testing.assert_close(out[2:11], dense(*(x[2:11] for x in given)), **CLOSE[backend])


def test_gradients_equal_those_of_the_joined_runs(backend):
    # Each branch written out as a segment of its own, from copies of its parent's tokens: autograd adds the copies up.
    layout = Layout.from_lengths([5, 2, 3])
    names, given = ("query", "key", "value"), draw(layout, 4, 2, dtype=DTYPE[backend])
    branches = Branches([-1, 0, 0], [0, 4, 1])
    rows = torch.tensor([*range(5), *range(4), 5, 6, 0, 7, 8, 9])
    back = torch.tensor([0, 1, 2, 3, 4, 9, 10, 12, 13, 14])

    def packed(query, key, value):
        return branch_attention(query, key, value, layout, branches, window=4, backend=backend)

    def written_out(query, key, value):
        copies = (x[rows] for x in (query, key, value))
        return branch_attention(*copies, Layout.from_lengths([5, 6, 4]), window=4, backend="reference")[back]

    value, grads = value_and_grads(packed, dict(zip(names, given)), names)
    expected, expected_grads = value_and_grads(written_out, dict(zip(names, given)), names)
    torch.testing.assert_close(value, expected, **CLOSE[backend])
    for name in names:
        torch.testing.assert_close(grads[name], expected_grads[name], **CLOSE[backend])


def test_a_parent_is_moved_by_its_branches_up_to_the_prefix(backend):
    layout = Layout.from_lengths([3, 2])
    query, key, value = (x.requires_grad_() for x in draw(layout, dtype=DTYPE[backend]))
    out = branch_attention(query, key, value, layout, Branches([-1, 0], [0, 2]), backend=backend)
    out[3:].square().sum().backward()
    assert query.grad[:3].eq(0).all()
    for x in (key, value):
        assert x.grad[:2].ne(0).all()
        assert x.grad[2].eq(0).all()


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"window": 2}, {"softcap": 0.7, "window": 3, "scale": 0.9}])
def test_gradcheck(options):
    layout = Layout.from_lengths([3, 0, 2])
    given = [x.requires_grad_() for x in draw(layout, 2, 1, size=2)]
    branches = Branches([-1, -1, 0], [0, 0, 2])
    assert torch.autograd.gradcheck(
        lambda *qkv: branch_attention(*qkv, layout, branches, backend="reference", **options), given
    )


@st.composite
def packings(draw):
    """Lengths of up to six segments, each a root or a branch of one."""
    lengths = draw(st.lists(st.integers(0, 6), max_size=6))
    parent, prefix = [-1] * len(lengths), [0] * len(lengths)
    root = [draw(st.booleans()) for _ in lengths]
    for s in range(len(lengths)):
        candidates = [r for r in range(len(lengths)) if root[r] and r != s]
        if not root[s] and candidates:
            parent[s] = draw(st.sampled_from(candidates))
            prefix[s] = draw(st.integers(0, lengths[parent[s]]))
    return lengths, parent, prefix


@settings(max_examples=60, deadline=None)
@given(
    packing=packings(),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    softcap=st.sampled_from([None, 0.5, 5.0]),
    window=st.sampled_from([None, 1, 2, 5, 100]),
    scale=st.sampled_from([None, 0.0, 2.0]),
    seed=st.integers(0, 1000),
)
def test_random_packings_equal_the_brute_force(packing, heads, softcap, window, scale, seed):
    lengths, parent, prefix = packing
    layout = Layout.from_lengths(lengths)
    given = draw(layout, *heads, size=3, seed=seed)
    options = {"scale": scale, "softcap": softcap, "window": window}
    expected = brute_force(*given, lengths, parent, prefix, **options)
    for name in BACKENDS:
        out = branch_attention(
            *(x.to(DTYPE[name]) for x in given), layout, Branches(parent, prefix), backend=name, **options
        )
        torch.testing.assert_close(out.double(), expected, **CLOSE[name])


@pytest.mark.parametrize("block", [1, 2, 3])
def test_the_block_size_changes_nothing(monkeypatch, block):
    layout, branches = Layout.from_lengths([7, 5, 0]), Branches([-1, 0, -1], [0, 6, 0])
    given = draw(layout, 4, 2)
    whole = branch_attention(*given, layout, branches, window=5, backend="reference")
    monkeypatch.setattr(reference, "_ROWS", block)
    out = branch_attention(*given, layout, branches, window=5, backend="reference")
    torch.testing.assert_close(out, whole, rtol=1e-13, atol=1e-13)


def test_a_segment_longer_than_one_block(backend):
    layout = Layout.from_lengths([2 * reference._ROWS + 1, 3])
    given = draw(layout, 2, 1, dtype=torch.float32)
    branches = Branches([-1, 0], [0, reference._ROWS + 1])
    out = branch_attention(*given, layout, branches, backend=backend)
    torch.testing.assert_close(out[:-3], dense(*(x[:-3] for x in given)), rtol=1e-5, atol=1e-5)
    joined = [torch.cat([x[: reference._ROWS + 1], x[-3:]]) for x in given]
    torch.testing.assert_close(out[-3:], dense(*joined)[-3:], rtol=1e-5, atol=1e-5)


class TestNumbers:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_as_accurate_as_pytorch(self, backend, dtype):
        layout = Layout.from_lengths([70])
        given = draw(layout, 4, 2, size=16, dtype=dtype)
        out = branch_attention(*given, layout, backend=backend)
        assert out.dtype == dtype
        truth = branch_attention(*(x.double() for x in given), layout, backend="reference")
        assert_as_accurate(out, dense(*given), truth)

    def test_softmax_is_float32_for_low_precision_also_under_autocast(self, backend):
        # One rounding of the result and no other: bfloat16 scores near 100 would be off by a half.
        layout = Layout.from_lengths([40])
        given = [10 * x for x in draw(layout, size=8, dtype=torch.bfloat16)]
        truth = branch_attention(*(x.double() for x in given), layout, backend="reference")
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = branch_attention(*given, layout, backend=backend)
            torch.testing.assert_close(out, truth.bfloat16(), rtol=2**-7, atol=1e-4)

    def test_dtypes_may_differ_and_the_query_decides(self, backend):
        layout = Layout.from_lengths([3])
        query, key, value = draw(layout)
        mixed = query.bfloat16(), key.float(), value.half()
        out = branch_attention(*mixed, layout, backend=backend)
        assert out.dtype == torch.bfloat16
        # Nothing is rounded to another input's dtype on the way.
        expected = branch_attention(*(x.float() for x in mixed), layout, backend=backend)
        assert torch.equal(out, expected.bfloat16())
        out = branch_attention(query, key.float(), value.float(), layout)
        assert out.dtype == torch.float64
        assert torch.equal(out, branch_attention(query, key.float(), value.float(), layout, backend="reference"))

    def test_scores_far_from_zero(self, backend):
        layout = Layout.from_lengths([2])
        query = torch.tensor([1.0, 1.0]).reshape(2, 1, 1)
        key, value = torch.tensor([1e4, -1e4]).reshape(2, 1, 1), torch.tensor([2.0, 3.0]).reshape(2, 1, 1)
        assert branch_attention(query, key, value, layout, backend=backend).flatten().tolist() == [2, 2]
        assert branch_attention(query, -key, value, layout, backend=backend).flatten().tolist() == [2, 3]

    def test_non_contiguous(self, backend):
        layout = Layout.from_lengths([3, 4])
        given = draw(layout, 4, 2, dtype=DTYPE[backend])
        strided = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in given]
        out = branch_attention(*given, layout, backend=backend)
        torch.testing.assert_close(branch_attention(*strided, layout, backend=backend), out, **CLOSE[backend])

    @pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
    def test_nothing(self, backend, lengths):
        layout = Layout.from_lengths(lengths)
        given = [torch.zeros(0, heads, 4, requires_grad=True) for heads in (4, 2, 2)]
        branches = Branches([-1, 0], [0, 0]) if len(lengths) == 2 else None
        out = branch_attention(*given, layout, branches, backend=backend)
        assert out.shape == (0, 4, 4)
        out.sum().backward()
        assert all(x.grad.shape == x.shape for x in given)

    def test_same_bits_again(self, backend):
        layout, branches = Layout.from_lengths([30, 10]), Branches([-1, 0], [0, 20])
        given = draw(layout, dtype=torch.float32)
        first, second = (branch_attention(*given, layout, branches, backend=backend) for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_nan_in_one_segment_stays_there(backend, poisoned):
    # Segments: a root, two branches of its first two tokens, another root.
    layout, branches = Layout.from_lengths([3, 2, 2, 2]), Branches([-1, 0, 0, -1], [0, 2, 2, 0])
    names, clean = ("query", "key", "value"), draw(layout, dtype=DTYPE[backend])
    segment = layout.token_segment

    def run(given, rows):
        leaves = [x.clone().requires_grad_() for x in given]
        out = branch_attention(*leaves, layout, branches, backend=backend)
        return out.detach(), torch.autograd.grad(out[rows].square().sum(), leaves)

    for token, reached in ((3, [1]), (7, [3]), (2, [0]), (0, [0, 1, 2] if poisoned != "query" else [0])):
        given = [x.clone() for x in clean]
        given[names.index(poisoned)][token] = NAN
        untouched = ~torch.isin(segment, torch.tensor(reached))
        out, grads = run(given, untouched)
        expected, expected_grads = run(clean, untouched)
        assert torch.equal(out[untouched], expected[untouched])
        assert out[token].isnan().all()
        # The root's keys and values have a gradient from the poisoned branch as well, so nothing is said of them.
        sharing = untouched if token != 3 else untouched & (segment != 0)
        for grad, wanted in zip(grads, expected_grads):
            assert torch.equal(grad[sharing], wanted[sharing])


class TestCompiled:
    def test_fullgraph_gives_the_same_bits_without_recompiling_for_new_layouts(self, backend):
        torch._dynamo.reset()
        compilations = []

        def count(graph, inputs):
            compilations.append(graph)
            return graph.forward

        def attend(query, key, value, layout, branches):
            return branch_attention(query * 2, key, value, layout, branches, softcap=3.0, window=4, backend=backend)

        compiled = torch.compile(attend, fullgraph=True, backend=count)
        for lengths, parent, prefix in (
            ([5, 3, 0], [-1, 0, -1], [0, 4, 0]),
            ([2, 7, 1], [-1, -1, 1], [0, 0, 6]),
            ([1, 1, 9], [2, 2, -1], [9, 0, 0]),
            ([30, 1, 1], [-1, 0, 0], [0, 9, 11]),
        ):
            layout, branches = Layout.from_lengths(lengths), Branches(parent, prefix)
            given = draw(layout, 4, 2, dtype=torch.float32)
            assert torch.equal(compiled(*given, layout, branches), attend(*given, layout, branches))
        # One for the first length, one for all others.
        assert len(compilations) == 2

    def test_fullgraph_gradients(self, backend):
        layout, branches = Layout.from_lengths([5, 3]), Branches([-1, 0], [0, 4])
        names, given = ("query", "key", "value"), draw(layout, 4, 2, dtype=DTYPE[backend])

        def attend(query, key, value):
            return branch_attention(query, key, value, layout, branches, softcap=3.0, backend=backend)

        value, grads = value_and_grads(torch.compile(attend, fullgraph=True), dict(zip(names, given)), names)
        expected, expected_grads = value_and_grads(attend, dict(zip(names, given)), names)
        assert torch.equal(value, expected)
        for name in names:
            torch.testing.assert_close(grads[name], expected_grads[name], rtol=1e-13, atol=1e-13)

    def test_branches_are_checked_there_too(self, backend):
        layout = Layout([0, 2, 4])
        compiled = torch.compile(
            lambda query, branches: branch_attention(query, query, query, layout, branches, backend=backend),
            fullgraph=True,
            backend="aot_eager",
        )
        with pytest.raises(ValueError, match="prefix_length of segment 1: 3 exceeds the parent's length"):
            compiled(torch.zeros(4, 1, 2), Branches([-1, 0], [0, 3]))


def test_opcheck():
    layout, branches = Layout.from_lengths([3, 0, 2]), Branches([-1, -1, 0], [0, 0, 2])
    given = [x.requires_grad_() for x in draw(layout, 2, 1, dtype=torch.float32)]
    for tail in (
        (layout.cu_seqlens, branches.parent, branches.prefix_length, 0.5, 2.0, 3),
        (layout.cu_seqlens, None, None, 0.5, None, None),
    ):
        torch.library.opcheck(torch.ops.mosaic_kernels.branch_attention_reference.default, (*given, *tail))


class TestErrors:
    @pytest.mark.parametrize(
        ("parent", "prefix", "message"),
        [
            ([-1, 0, 1], [0, 1, 1], "parent of segment 2: 1 is itself a branch: give the root instead"),
            ([0, -1, -1], [1, 0, 0], "parent of segment 0: 0 is the segment itself"),
            ([-1, 0, -1], [0, 3, 0], "prefix_length of segment 1: 3 exceeds the parent's length"),
            ([-1, 0, -1], [0, -1, 0], "prefix_length of segment 1: -1 must be >= 0"),
            ([-1, -1, -1], [0, 1, 0], "prefix_length of segment 1: 1 must be 0 where parent is -1"),
            ([-1, 3, -1], [0, 0, 0], r"parent of segment 1: 3 is no segment index in \[0, 3\) and not -1"),
            ([-2, -1, -1], [0, 0, 0], r"parent of segment 0: -2 is no segment index"),
            ([-1, 0], [0, 0], "parent must have one entry for each of the 3 segments, got length 2"),
        ],
    )
    def test_branches(self, parent, prefix, message):
        layout = Layout([0, 2, 4, 6])
        with pytest.raises(ValueError, match=message):
            branch_attention(*draw(layout), layout, Branches(parent, prefix))

    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            (
                {"query": torch.zeros(3, 2, 4)},
                ValueError,
                r"query must have shape \[T, Hq, D\] = \[4, any, any\], got \[3, 2, 4\]",
            ),
            ({"query": torch.zeros(4, 8)}, ValueError, r"query must have shape \[T, Hq, D\]"),
            ({"query": torch.zeros(4, 2, 4).long()}, TypeError, "query must be floating point, got torch.int64"),
            (
                {"query": torch.zeros(4, 3, 4)},
                ValueError,
                "query heads must be a multiple of the key-value heads, got 3 and 2",
            ),
            (
                {"key": torch.zeros(4, 2, 3)},
                ValueError,
                r"key must have shape \[T, Hkv, D\] = \[4, any, 4\], got \[4, 2, 3\]",
            ),
            (
                {"value": torch.zeros(4, 1, 4)},
                ValueError,
                r"value must have shape \[T, Hkv, D\] = \[4, 2, 4\], got \[4, 1, 4\]",
            ),
            ({"value": None}, TypeError, "value must be a tensor"),
            ({"layout": [0, 4]}, TypeError, "layout must be a Layout, got list"),
            ({"branches": ([-1], [0])}, TypeError, "branches must be None or Branches, got tuple"),
            ({"softcap": 0.0}, ValueError, "softcap must be None or > 0 and finite, got 0.0"),
            ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
            ({"window": 0}, ValueError, "window must be None or an integer >= 1, got 0"),
            ({"window": 2.0}, ValueError, "window must be None or an integer >= 1, got 2.0"),
            ({"backend": "magic"}, ValueError, "backend must be None or one of .*got 'magic'"),
            ({"backend": "cuda"}, NotImplementedError, "branch_attention: backend='cuda' cannot serve this call"),
        ],
    )
    def test_arguments(self, changed, error, message):
        names = ("query", "key", "value")
        given = {"layout": Layout([0, 1, 4]), **{name: torch.zeros(4, 2, 4) for name in names}, **changed}
        with pytest.raises(error, match=message):
            branch_attention(**given)
