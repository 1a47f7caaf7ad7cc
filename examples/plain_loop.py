"""The kernels in a training loop of one's own: torch alone, no model library.

Two trajectories, one of them with a compaction (three sessions), are packed and trained on with clipped updates. The
loss does not depend on how a trajectory is split: the last lines show it.

Run with: python examples/plain_loop.py
"""

from __future__ import annotations

import torch
from torch import nn

from mosaic_kernels import Branches, Clip, Layout, branch_attention, linear_logprob, policy_loss, shifted_targets

VOCABULARY, HIDDEN, HEADS = 97, 32, 4


class Model(nn.Module):
    """One attention block over packed segments; each segment sees only itself."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.projection = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, layout: Layout, branches: Branches | None = None) -> torch.Tensor:
        x = self.embedding(input_ids)
        query, key, value = self.projection(x).unflatten(-1, (3, HEADS, HIDDEN // HEADS)).unbind(1)
        return x + branch_attention(query, key, value, layout, branches).flatten(1)


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    lengths, trajectory = [40, 15, 25, 60], [0, 0, 0, 1]  # normal, summary, normal; and a single session
    layout = Layout.from_lengths(lengths, segment_trajectory=trajectory)
    input_ids = torch.randint(VOCABULARY, (layout.num_tokens,))
    target = shifted_targets(input_ids, layout)
    sampled = torch.rand(layout.num_tokens) < 0.5  # which rows predict a token that the policy sampled
    rows = sampled & (target != -100)
    advantage = layout.trajectory_to_token(torch.tensor([1.0, -1.0]))

    def logprob() -> torch.Tensor:
        return linear_logprob(model(input_ids, layout), model.head.weight, target, mask=rows, temperature=0.7).logprob

    with torch.no_grad():
        old_logprob = logprob()
    for update in range(4):
        loss, metrics = policy_loss(logprob(), old_logprob, advantage, layout, mask=rows, objective=Clip(0.2, 0.28))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clipped, ratio = metrics["clip_fraction"], metrics["ratio_max"]
        print(f"update {update}: loss {loss:.4f}  clipped {clipped:.1%}  largest ratio {ratio:.2f}")

    new_logprob = logprob().detach()
    one = policy_loss(new_logprob, old_logprob, advantage, layout, mask=rows).loss
    finer = Layout.from_lengths([20, 20, 15, 25, 60], segment_trajectory=[0, 0, 0, 0, 1])
    two = policy_loss(new_logprob, old_logprob, advantage, finer, mask=rows).loss
    print(f"loss in 4 segments {one:.6f}, in 5 segments {two:.6f}")


if __name__ == "__main__":
    main()
