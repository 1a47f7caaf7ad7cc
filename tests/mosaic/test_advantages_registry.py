"""Whole algorithms on small batches whose advantages were worked out by hand."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from mosaic.advantages import ADVANTAGES, register
from mosaic.batch import Batch
from mosaic.trajectory import SessionType
from mosaic_kernels import Layout

NAN = float("nan")
N, C, F = SessionType.NORMAL, SessionType.COMPACTION, SessionType.SUBAGENT


def reals(*values):
    return torch.tensor(values, dtype=torch.float64)


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)


def close(actual, *expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), reals(*expected), rtol=0, atol=tolerance)


def make_batch(sessions, reward, group, **fields):
    """A batch of `sessions`: (trajectory, type, turn of each row or -1)."""
    layout = Layout.from_lengths([len(rows) for *_, rows in sessions], [i for i, *_ in sessions], list(group))
    turn = ids(*[turn for *_, rows in sessions for turn in rows])
    last = {trajectory: at for at, (trajectory, *_) in enumerate(sessions)}
    zeros = torch.zeros(turn.numel())
    return Batch(
        input_ids=torch.zeros_like(turn),
        target=torch.zeros_like(turn),
        layout=layout,
        mask=turn >= 0,
        temperature=zeros + 1,
        turn=turn,
        rollout_logprob=zeros,
        reward=torch.tensor(reward, dtype=torch.float32),
        session_count=torch.bincount(layout.segment_trajectory, minlength=len(reward)),
        overlong=fields.pop("overlong", torch.zeros(len(reward), dtype=torch.bool)),
        session_type=ids(*[int(kind) for _, kind, _ in sessions]),
        terminal=flags(*[last[trajectory] == at for at, (trajectory, *_) in enumerate(sessions)]),
        **fields,
    )


def compaction_batch(**fields):
    """Three trajectories of one prompt (two succeed, one with a compaction) and two failures of another."""
    chain = [(N, [0, 0, -1]), (C, [0, -1]), (N, [0, -1, 1])]
    return make_batch(
        [(0, *s) for s in chain]
        + [(1, N, [-1, 0])]
        + [(2, *s) for s in chain]
        + [(3, *s) for s in chain]
        + [(4, N, [0])],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 4, 4],
        **fields,
    )


def per_session(batch, advantage):
    """[S]: the one advantage of each session's policy tokens, after checking that there is one and 0 elsewhere."""
    assert advantage.dtype == torch.float32
    assert advantage.shape == batch.mask.shape
    assert advantage[~batch.mask].eq(0).all()
    values = [advantage[batch.mask & (batch.layout.token_segment == s)] for s in range(batch.layout.num_segments)]
    assert all(v.unique().numel() == 1 for v in values)
    return torch.stack([v[0] for v in values])


GAIN = reals(0.4, 0.1, NAN, NAN, 0.0, 0.3, NAN, 5.0, 2.0, NAN, NAN)
ELIGIBLE = flags(1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0)
ROOT3 = 3**0.5


def test_broadcast_and_grpo_by_hand():
    # Rewards 1, 1, 0: mean 2/3, sample deviation sqrt(1/3). The other prompt failed throughout: 0.
    batch = compaction_batch()
    for name in ("broadcast", "grpo"):
        advantage = per_session(batch, ADVANTAGES[name](batch))
        close(advantage, *[ROOT3 / 3] * 4, *[-2 * ROOT3 / 3] * 3, *[0] * 4)


def test_mosaic_by_hand():
    # Successes used 3 and 1 sessions: factors 0.8 and 1.2. Gains 0.4, 0 (normal) and 0.1, 0.3 (compaction) become
    # +-sqrt(1/2), times 0.1. In the failed group: beta_fail for the shorter one, and lone gains give nothing.
    batch = compaction_batch(gain=GAIN, eligible=ELIGIBLE)
    d, long, lost = 0.1 * 0.5**0.5, 0.8 * ROOT3 / 3, -2 * ROOT3 / 3
    expected = [long + d, long - d, long, 1.2 * ROOT3 / 3, lost - d, lost + d, lost, 0, 0, 0, -0.1]
    close(per_session(batch, ADVANTAGES["mosaic"](batch)), *expected)


def test_mosaic_gates_shaping_in_a_failed_group():
    batch = make_batch(
        [(0, N, [0]), (0, C, [0]), (0, N, [0]), (1, N, [0]), (1, C, [0]), (1, N, [0])],
        [0, 0],
        [0, 0],
        gain=reals(2, 1, 0, 1, 2, 0),
        eligible=flags(1, 1, 0, 1, 1, 0),
    )
    d = 0.1 * 0.5**0.5
    close(per_session(batch, ADVANTAGES["mosaic"](batch)), 0, -d, 0, -d, 0, 0)
    close(per_session(batch, ADVANTAGES["mosaic"](batch, success_threshold=-1.0)), d, -d, 0, -d, d, 0)


def test_mosaic_options_reach_their_formulas():
    batch = compaction_batch(gain=GAIN, eligible=ELIGIBLE)
    unshaped = ADVANTAGES["mosaic"](compaction_batch(), lambda_r=0, rho=0, beta_fail=0)
    assert torch.equal(unshaped, ADVANTAGES["broadcast"](batch))
    strong = per_session(batch, ADVANTAGES["mosaic"](batch, lambda_r=100, gate="drop"))
    close(strong[[1, 5]], 0.8 * ROOT3 / 3, -2 * ROOT3 / 3)
    mixed = per_session(batch, ADVANTAGES["mosaic"](batch, by_type=False))
    # All four gains 0.4, 0.1, 0, 0.3 of the first prompt: mean 0.2, sample deviation sqrt(0.1 / 3).
    close(mixed[:2], *(0.8 * ROOT3 / 3 + 0.1 * x / math.sqrt(0.1 / 3) for x in (0.2, -0.1)), tolerance=2e-5)


def test_supo_by_hand():
    # The overlong failure keeps its reward in the statistics and gets no advantage itself.
    batch = compaction_batch(overlong=flags(0, 0, 1, 0, 0))
    close(per_session(batch, ADVANTAGES["supo"](batch)), *[ROOT3 / 3] * 4, *[0] * 7)


def test_an_id_without_sessions_does_not_enter_the_statistics():
    batch = make_batch(
        [(0, N, [0]), (2, N, [0]), (2, N, [-1, 0])], [1, 77, 0], [0, 0, 0], gain=reals(0, 0, 0), eligible=flags(0, 0, 0)
    )
    root = 0.5**0.5
    for name in ("broadcast", "supo", "mosaic"):
        close(per_session(batch, ADVANTAGES[name](batch)), root, -root, -root)


def turn_batch(gains, **fields):
    """Trajectory 0: two turns, a summary, an answer. Trajectory 1: a turn and an answer, in one session."""
    batch = make_batch(
        [(0, N, [0, 0, -1, 1]), (0, C, [-1, 0]), (0, N, [0, 0]), (1, N, [0, -1, 1])], [1, 0], [3, 3], **fields
    )
    batch.turn_gain = torch.zeros(batch.mask.shape, dtype=torch.float64)
    batch.turn_gain[batch.mask] = reals(*gains)
    return batch


def test_igpo_separate_by_hand():
    # Gains 0.3, 0.1, 0.5 and 0.3: mean 0.3, population deviation sqrt(0.02). Outcomes 1, 0 become 1, -1. The gains
    # written on the two last turns are not read.
    batch, root = turn_batch([0.3, 0.3, 0.1, 0.5, NAN, NAN, 0.3, NAN]), 2**0.5
    advantage = ADVANTAGES["igpo"](batch, eps=0)
    assert advantage[~batch.mask].eq(0).all()
    close(advantage[batch.mask], 1, 1, 1, 1 + root, 1, 1, -1, -1)
    advantage = ADVANTAGES["igpo"](batch, eps=0, gamma=0.5)[batch.mask]
    close(advantage, *[-0.5 * root + 0.25 * root + 0.125] * 2, -root + 0.5 * root + 0.25, root + 0.5, 1, 1, -0.5, -1)
    close(ADVANTAGES["igpo"](batch, eps=0, gamma=0)[batch.mask], 0, 0, -root, root, 1, 1, 0, -1)


def test_igpo_joint_by_hand():
    # Gains 1, 0, 1 and 0 and outcomes 1, 0 in one pool: mean 1/2, population deviation 1/2.
    batch = turn_batch([1, 1, 0, 1, 9, 9, 0, 9])
    advantage = ADVANTAGES["igpo"](batch, normalization="joint", eps=0)[batch.mask]
    close(advantage, 2, 2, 1, 2, 1, 1, -2, -1)


def test_igpo_versions_want_their_space():
    gains = [0.3, 0.3, 0.1, 0.5, 0, 0, 0.3, 0]
    probabilities = turn_batch(gains, gain_space="prob")
    assert torch.equal(ADVANTAGES["igpo"](probabilities, version="v1"), ADVANTAGES["igpo"](turn_batch(gains)))
    with pytest.raises(ValueError, match=r"'v2' needs 'log' gains, got batch.gain_space = 'prob'"):
        ADVANTAGES["igpo"](probabilities)
    with pytest.raises(ValueError, match=r"'v1' needs 'prob' gains.*space=\"prob\""):
        ADVANTAGES["igpo"](turn_batch(gains), version="v1")


def test_igpo_subagent_turns_are_a_line_of_their_own():
    # Main session: a turn before the fork (gain 0), the fork (1), the answer. Child: two turns, gain 0 and the last.
    sessions = [(0, F, [0, -1, 1]), (0, N, [0, 1, 2]), (1, N, [0])]
    batch = make_batch(sessions, [1, 0], [0, 0])
    batch.turn_gain = reals(0.5, 0, 9, 0, 1, 9, 9)
    root = 1.5**0.5  # gains 0.5, 0, 1: mean 0.5, population deviation sqrt(1/6)
    advantage = ADVANTAGES["igpo"](batch, eps=0)[batch.mask]
    close(advantage, 1, 1, 1 - root + root, 1 + root, 1, -1)


def test_compaction_grpo_by_hand():
    # A chain holds 2, 1 and 2 policy tokens, so later sessions hold 3, 2 and 0.
    batch = compaction_batch()
    won, lost = ROOT3 / 3, -2 * ROOT3 / 3
    advantage = per_session(batch, ADVANTAGES["compaction_grpo"](batch, lam=0.5))
    close(advantage, won / 8, won / 4, won, won, lost / 8, lost / 4, lost, 0, 0, 0, 0)
    advantage = per_session(batch, ADVANTAGES["compaction_grpo"](batch, lam=0.5, gamma=0.5))
    close(advantage[:3], won / 64, won / 16, won)


def test_compaction_grpo_adapts_lambda_to_the_trajectory():
    # Five policy tokens: lam = 1 - 1 / (2 * 5) = 0.9.
    batch = compaction_batch()
    advantage = per_session(batch, ADVANTAGES["compaction_grpo"](batch, alpha=2.0))
    close(advantage[:3], *(ROOT3 / 3 * 0.9**later for later in (3, 2, 0)))


def test_compaction_ppo_discounts_the_outcome_by_position():
    # CompactionRL: with V = 0 the outcome counts (gamma lam)^(later tokens), inside the session and after it.
    batch = compaction_batch(value=torch.zeros(27))
    advantage = ADVANTAGES["compaction_ppo"](batch, gamma=0.5, lam=0.5)
    assert advantage[~batch.mask].eq(0).all()
    first = advantage[:8][batch.mask[:8]]
    close(first, *(0.25**later for later in (4, 3, 2, 1, 0)), tolerance=1e-7)
    close(advantage[9:10], 1)
    assert advantage[10:].eq(0).all()


def test_compaction_ppo_by_hand_with_a_critic():
    # One session, values 0.5 and 0.25, outcome 1, lam 0.5: deltas -0.25 and 0.75.
    batch = make_batch([(0, N, [0, -1, 0])], [1], [0], value=torch.tensor([0.5, 100.0, 0.25]))
    for correction in ("position", "chain", "none"):
        close(ADVANTAGES["compaction_ppo"](batch, lam=0.5, correction=correction), 0.125, 0, 0.75)
    close(ADVANTAGES["compaction_ppo"](batch, lam=0.5, whiten=True), -(0.5**0.5), 0, 0.5**0.5)
    # Adaptive: two policy tokens, alpha 1: lam = 1/2.
    close(ADVANTAGES["compaction_ppo"](batch, alpha=1.0), 0.125, 0, 0.75)


def test_chain_and_none_by_hand():
    batch = make_batch([(0, N, [0]), (0, N, [0])], [1], [0], value=torch.tensor([0.5, 0.25]))
    # chain: deltas 0.25 - 0.5 and 1 - 0.25. none, and sao: 1 - 0.5 and 1 - 0.25. position: the first of these times
    # lam.
    close(ADVANTAGES["compaction_ppo"](batch, lam=0.5, correction="chain"), -0.25 + 0.5 * 0.75, 0.75)
    close(ADVANTAGES["compaction_ppo"](batch, lam=0.5, correction="none"), 0.5, 0.75)
    close(ADVANTAGES["compaction_ppo"](batch, lam=0.5, correction="position"), 0.25, 0.75)
    close(ADVANTAGES["sao"](batch, lam=0.5), 0.5, 0.75)


def test_adaptive_scope_of_sao():
    # Two tokens, one token; alpha 1: a segment's own l gives lam 1/2 and 0, the trajectory's gives 2/3.
    batch = make_batch([(0, N, [0, 0]), (0, N, [0])], [1], [0], value=torch.zeros(3))
    close(ADVANTAGES["sao"](batch, alpha=1.0, scope="segment"), 0.5, 1, 1)
    close(ADVANTAGES["sao"](batch, alpha=1.0), 2 / 3, 1, 1)


def test_discount_without_a_critic_on_random_chains():
    draw = torch.Generator().manual_seed(3)
    sessions, reward = [], []
    for trajectory in range(60):
        reward.append(int(torch.randint(2, (1,), generator=draw)))
        for _ in range(int(torch.randint(1, 7, (1,), generator=draw))):
            rows = torch.randint(-1, 1, (int(torch.randint(1, 9, (1,), generator=draw)),), generator=draw)
            sessions.append((trajectory, N, [0, *rows.tolist()]))
    batch = make_batch(sessions, reward, [0] * 60)
    batch.value = torch.zeros(batch.mask.shape)
    advantage = ADVANTAGES["compaction_ppo"](batch, gamma=0.99, lam=0.95)
    naive, seen = [], {}
    for row in range(batch.mask.numel() - 1, -1, -1):
        trajectory = int(batch.layout.token_trajectory[row])
        if batch.mask[row]:
            naive.append(reward[trajectory] * (0.99 * 0.95) ** seen.get(trajectory, 0))
            seen[trajectory] = seen.get(trajectory, 0) + 1
        else:
            naive.append(0.0)
    torch.testing.assert_close(advantage.double(), reals(*naive[::-1]), rtol=1e-5, atol=1e-7)


def test_every_algorithm_takes_an_empty_and_a_fully_masked_batch():
    batch = make_batch([], [], [], value=torch.zeros(0), gain=reals(), eligible=flags(), turn_gain=reals())
    masked = make_batch(
        [(0, N, [-1, -1])], [1], [0], value=torch.zeros(2), gain=reals(0), eligible=flags(0), turn_gain=reals(NAN, NAN)
    )
    for name, function in ADVANTAGES.items():
        assert function(batch).shape == (0,), name
        assert function(masked).tolist() == [0, 0], name


class TestRegistry:
    def test_names(self):
        assert {"mosaic", "broadcast", "grpo", "igpo", "supo", "compaction_ppo", "compaction_grpo", "sao"} <= set(
            ADVANTAGES
        )

    def test_options_are_keywords_that_a_configuration_can_list(self):
        for name, function in ADVANTAGES.items():
            first, *options = inspect.signature(function).parameters.values()
            assert first.name == "batch", name
            assert all(option.kind is option.KEYWORD_ONLY for option in options), name

    def test_register_refuses_a_taken_name(self):
        with pytest.raises(ValueError, match="name 'mosaic' is taken by mosaic.advantages.outcome: choose another"):
            register("mosaic")(lambda batch: batch.reward)
        with pytest.raises(TypeError, match="name must be a non-empty string"):
            register(None)

    def test_users_register_their_own(self):
        try:

            @register("of_the_test")
            def of_the_test(batch, *, level=2.0):
                return torch.where(batch.mask, level, 0.0)

            assert ADVANTAGES["of_the_test"] is of_the_test
        finally:
            ADVANTAGES.pop("of_the_test", None)

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("mosaic", {}, "mosaic needs batch.gain and batch.eligible.*MarginalGainScorer.*lambda_r=0"),
            ("mosaic", {"gate": "hard"}, "gate must be one of"),
            ("mosaic", {"rho": 2}, "rho must be a number"),
            ("broadcast", {"ddof": 3}, "ddof must be one of"),
            ("igpo", {}, "igpo needs batch.turn_gain.*granularity"),
            ("igpo", {"version": "v3"}, "version must be one of v1, v2, got 'v3'"),
            ("igpo", {"normalization": "both"}, "normalization must be one of separate, joint"),
            ("igpo", {"gamma": 1.5}, r"gamma must be a number in \[0, 1\], got 1.5"),
            ("compaction_ppo", {}, "compaction_ppo needs batch.value.*compaction_grpo"),
            ("sao", {}, "sao needs batch.value"),
            ("sao", {"scope": "token"}, "scope must be one of trajectory, segment"),
            ("compaction_ppo", {"scope": "segment"}, "scope \"segment\" with correction 'position' is refused"),
            ("compaction_ppo", {"correction": "exact"}, "correction must be one of position, chain, none"),
            ("compaction_ppo", {"lam": 1.1}, r"lam must be a number in \[0, 1\]"),
            ("compaction_grpo", {"alpha": 0}, "alpha must be > 0"),
        ],
    )
    def test_errors(self, name, options, message):
        with pytest.raises(ValueError, match=message):
            ADVANTAGES[name](compaction_batch(), **options)

    @pytest.mark.parametrize(
        ("name", "options"),
        [("compaction_ppo", {}), ("compaction_ppo", {"correction": "chain"}), ("compaction_grpo", {})],
    )
    def test_subagents_stand_in_no_linear_order(self, name, options):
        batch = make_batch([(0, F, [0]), (0, N, [0])], [1], [0], value=torch.zeros(2))
        with pytest.raises(ValueError, match=f"{name}.*session 0 is a subagent"):
            ADVANTAGES[name](batch, **options)
