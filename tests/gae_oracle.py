"""`segment_gae` spelt out as loops, and random cases for its tests."""

from __future__ import annotations

import random

import torch

from mosaic_kernels import Layout


def spelt_out(reward, value, mask, layout, gamma, lam, lam_critic, correction, bootstrap, returns_from, number=float):
    """The definition as loops over Python lists; `number` makes the numbers, so it also serves as PyTorch float32."""
    zero = number(0)
    cu, trajectory_of = layout.cu_seqlens.tolist(), layout.segment_trajectory.tolist()
    reward, value = [number(x) for x in reward.tolist()], [number(x) for x in value.tolist()]
    size, count = layout.num_tokens, layout.num_segments
    active = [[t for t in range(cu[s], cu[s + 1]) if mask[t]] for s in range(count)]
    siblings = [[s for s in range(count) if trajectory_of[s] == r] for r in range(layout.num_trajectories)]

    paid = [zero] * size
    for t, s in enumerate(layout.token_segment.tolist()):
        takers = active[s]
        at = [u for u in takers if u <= t][-1:] or takers[:1]
        if not takers and correction == "chain":
            same = siblings[trajectory_of[s]]
            at = [u for v in same if v < s for u in active[v]][-1:] or [u for v in same if v > s for u in active[v]][:1]
        for u in at:
            paid[u] = paid[u] + reward[t]

    if correction == "chain":
        units = [[(s, t) for s in same for t in active[s]] for same in siblings]
    else:
        units = [[(s, t) for t in active[s]] for s in range(count)]

    def advantages(lam):
        out = [zero] * size
        for unit in units:
            next_value = number(bootstrap[unit[-1][0]]) if unit and bootstrap is not None else zero
            running = zero
            for s, t in reversed(unit):
                delta = paid[t] + number(gamma) * next_value - value[t]
                running = delta + number(gamma) * number(lam[s]) * running
                out[t], next_value = running, value[t]
        return out

    def corrected(local, lam):
        out = list(local)
        for s in range(count) if correction == "position" else ():
            after = sum(len(active[v]) for v in siblings[trajectory_of[s]] if v > s)
            for t in active[s]:
                out[t] = out[t] * (number(gamma) * number(lam[s])) ** after
        return out

    lam_critic = lam if lam_critic is None else lam_critic
    advantage, critic = corrected(advantages(lam), lam), advantages(lam_critic)
    critic = corrected(critic, lam_critic) if returns_from == "corrected" else critic
    returns = [critic[t] + value[t] if mask[t] else zero for t in range(size)]
    return [torch.tensor([float(x) for x in column], dtype=torch.float64) for column in (advantage, returns)]


def random_case(seed, lengths, num_trajectories, active=0.6):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layout = Layout.from_lengths(lengths, [rng.randrange(num_trajectories) for _ in lengths])
    mask = torch.rand(layout.num_tokens, generator=generator) < active
    reward, value = torch.randn(2, layout.num_tokens, generator=generator)
    some = torch.zeros(layout.num_segments, dtype=torch.int64).index_add(0, layout.token_segment, mask.long()) > 0
    return layout, mask, reward, value, some
