"""Which token each row of hidden states predicts."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic_kernels._checks import check_layout, check_tensor
from mosaic_kernels.layout import Layout

IGNORED_TARGET = -100


def shifted_targets(input_ids: Tensor, layout: Layout) -> Tensor:
    """The next token inside each segment: what `hidden[t]` of a causal language model predicts.

    target[t] = input_ids[t+1] if token t+1 lies in the same segment, else -100.

    Args:
        input_ids: [T] packed token ids, any integer dtype.
        layout: where the segments start.

    Returns:
        [T] int64, on the device of `input_ids`. The last token of every segment gets -100, which `linear_logprob`
        skips, so that no target ever crosses a segment boundary.

    Raises:
        TypeError: `input_ids` is no integer tensor, or the layout no Layout.
        ValueError: `input_ids` has not one entry for each token of the layout.

    >>> shifted_targets(torch.tensor([10, 11, 12, 20, 21]), Layout([0, 3, 5])).tolist()
    [11, 12, -100, 21, -100]
    """
    check_layout(layout)
    check_tensor("input_ids", input_ids, (layout.num_tokens,), "[T]", floating=False)
    if input_ids.is_floating_point() or input_ids.is_complex():
        raise TypeError(f"input_ids must be an integer tensor, got {input_ids.dtype}")
    segment = layout.token_segment.to(input_ids.device)
    following = input_ids.to(torch.int64).roll(-1)
    last = segment != segment.roll(-1)
    last[-1:] = True
    return following.masked_fill(last, IGNORED_TARGET)
