"""Attention while a model is sampled from: how it is computed, and which models can be served."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

_NAME = "mosaic_grouped"


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """PyTorch's attention, where query heads that share a key-value head become queries of that head: while one
    token a row is decoded, repeating keys and values for each query head would cost more than the attention itself.

    Args and returns: as transformers' attention functions; query [B, Hq, q, D], key and value [B, Hkv, n, D].

    Raises:
        NotImplementedError: the model soft-caps its attention scores or adds sinks, which this attention leaves out.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError(
            "attention with a soft cap or sinks needs a model loaded with attn_implementation='eager'"
        )
    batch, query_heads, length, size = query.shape
    key_heads = key.shape[1]
    folded = query.reshape(batch, key_heads, query_heads // key_heads * length, size)
    mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, query_heads // key_heads, 1)
    out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, query_heads, length, value.shape[3]).transpose(1, 2), None


AttentionInterface.register(_NAME, grouped_attention)


def attention_window(model: Any) -> int | None:
    """The smallest sliding window of the model's layers, None without one; raises for layers with another state."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    kinds = layer_types - {"full_attention", "sliding_attention"}
    if kinds or getattr(model, "_is_stateful", False):
        raise NotImplementedError(
            f"{type(model).__name__} has layers ({', '.join(sorted(kinds)) or 'recurrent'}) whose state cannot be "
            "cut to a prefix: use the vLLM engine"
        )
    return getattr(config, "sliding_window", None) if not layer_types or "sliding_attention" in layer_types else None


@contextlib.contextmanager
def sampling_mode(model: Any) -> Iterator[None]:
    """Evaluation mode and the attention for decoding, both put back afterwards: the trainer may own the model."""
    training = [module for module in model.modules() if module.training]
    config = model.config.get_text_config()
    attention = config._attn_implementation
    model.eval()
    if attention == "sdpa":
        config._attn_implementation = _NAME
    try:
        yield
    finally:
        for module in training:
            module.training = True
        config._attn_implementation = attention
