"""Attention over packed segments, some of which continue a prefix of another."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mosaic_kernels._backend import pick
from mosaic_kernels._checks import check_layout, check_number, check_tensor
from mosaic_kernels.branch_attention import cpu, reference
from mosaic_kernels.layout import Branches, Layout

_ALL = 2**31 - 1  # a window that no position reaches
_MODULES = {"cpu": cpu, "reference": reference}


def branch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    branches: Branches | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal attention inside each packed segment; a branch also sees the prefix of its parent.

        out[t] = sum_u softmax_u(cap(scale * <query[t], key[u]>)) value[u]      cap(x) = softcap * tanh(x / softcap)

    Token j of segment s has position p = prefix_length[s] + j (j where s is no branch). It sees the tokens of its own
    segment and the first prefix_length[s] tokens of segment parent[s], as far as their positions q satisfy q <= p, and
    p - window < q with a window.

    A branch's first token is predicted by the parent's row prefix_length - 1: score it there, since `shifted_targets`
    gives it no row of its own.

    Args:
        query: [T, Hq, D] floating point; rotary embedding, by position as above, is the caller's.
        key, value: [T, Hkv, D]; Hq is a multiple of Hkv, and query head h reads key-value head h // (Hq / Hkv).
        layout: T tokens in S segments; empty segments are legal.
        branches: what the segments of `layout` continue; None: nothing.
        scale: multiplies the scores; default 1 / sqrt(D).
        softcap: bound of the scores, > 0; None: unbounded.
        window: how many positions a token sees, its own included, >= 1; None: all.
        backend: None, or a backend's name.

    Returns:
        [T, Hq, D] in the dtype of `query`; differentiable in query, key and value. Computed in float32, or in float64
        where an input is float64, also under autocast. What one segment holds never reaches another that does not see
        it, not even a NaN. "cpu" gives a token the same bits for any number of threads and whatever else is packed;
        "reference" may not, since the BLAS library rounds as it likes.

    Raises:
        ValueError: a shape does not fit, an option is out of range, or the branches do not fit the layout: a parent
            that is no segment, is the segment itself or is itself a branch, a prefix longer than the parent, a prefix
            without a parent.
        TypeError: an argument is of the wrong kind.
        NotImplementedError: the backend asked for cannot serve the call.

    Source: packed answer probes of Mosaic's marginal gain (appendix B.1); softcap as in Gemma 2.

    >>> query = key = torch.zeros(3, 1, 1)
    >>> value = torch.tensor([1.0, 3.0, 8.0]).reshape(3, 1, 1)
    >>> branch_attention(query, key, value, Layout([0, 2, 3])).flatten().tolist()
    [1.0, 2.0, 8.0]
    >>> branch_attention(query, key, value, Layout([0, 2, 3]), Branches([-1, 0], [0, 2])).flatten().tolist()
    [1.0, 2.0, 4.0]
    """
    _check(query, key, value, layout, branches)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[2])
    check_number("scale", scale, "finite", lambda x: -math.inf < x < math.inf)
    if softcap is not None:
        check_number("softcap", softcap, "None or > 0 and finite", lambda x: 0 < x < math.inf)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"window must be None or an integer >= 1, got {window!r}")
    module = pick("branch_attention", backend, _MODULES, query=query, key=key, value=value)
    if module is reference:
        return reference.forward(query, key, value, layout, branches, scale=scale, softcap=softcap, window=window)
    return _compiled(module, query, key, value, layout, branches, scale, softcap, window)


def _compiled(
    module: ModuleType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    branches: Branches | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    dtype = query.dtype
    if not dtype == key.dtype == value.dtype:
        query, key, value = query.float(), key.float(), value.float()
    # torch.compile refuses a Function that is given one tensor twice, as where keys are values too.
    key = key.view_as(key) if key is query else key
    value = value.view_as(value) if value is query or value is key else value
    parent, prefix_length = (None, None) if branches is None else (branches.parent, branches.prefix_length)
    # By products: torch.compile would compile torch.tensor anew for each value.
    one = torch.ones((), dtype=torch.float64, device=query.device)
    options = torch.stack([one * scale, one * (0.0 if softcap is None else softcap)])
    window = _ALL if window is None else window
    call = (query, key, value, layout.cu_seqlens, parent, prefix_length, options, window)
    return _Attention.apply(module, *call).to(dtype)


class _Attention(torch.autograd.Function):
    """The derivative, for all compiled backends: `module` has forward() and backward()."""

    @staticmethod
    def forward(ctx: Any, module: ModuleType, *call: Any) -> Tensor:
        *tensors, ctx.window = call
        ctx.module = module
        output, statistics = module.forward(*call)
        ctx.save_for_backward(*tensors, output, statistics)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, doutput: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, output, statistics = ctx.saved_tensors
        return None, *ctx.module.backward(*tensors, ctx.window, output, statistics, doutput), *[None] * 5


def _check(query: Tensor, key: Tensor, value: Tensor, layout: Layout, branches: Branches | None) -> None:
    check_layout(layout)
    # The layout's count is a Python number, on which a compiled caller would specialise: there the op compares it.
    tokens = None if torch.compiler.is_compiling() else layout.num_tokens
    check_tensor("query", query, (tokens, None, None), "[T, Hq, D]")
    check_tensor("key", key, (query.shape[0], None, query.shape[2]), "[T, Hkv, D]")
    check_tensor("value", value, tuple(key.shape), "[T, Hkv, D]")
    if query.shape[2] == 0:
        raise ValueError("query must have a head size D >= 1, got 0")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query heads must be a multiple of the key-value heads, got {query.shape[1]} and {key.shape[1]}"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.device != layout.device:
            raise ValueError(f"{name} must be on the layout's device {layout.device}, got {x.device}: move one of them")
    if branches is None:
        return
    if not isinstance(branches, Branches):
        raise TypeError(f"branches must be None or Branches, got {type(branches).__name__}")
    if not torch.compiler.is_compiling():
        branches.check(layout)
