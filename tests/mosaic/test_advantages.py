"""The advantage functions: numbers worked by hand, and every refusal."""

from __future__ import annotations

import math

import pytest
import torch

from mosaic.advantages import (
    group_relative_advantage,
    normalize_gain,
    session_aware_advantage,
    session_rank_signal,
    session_utility,
    shape_session_advantage,
)

INF, NAN = float("inf"), float("nan")


def reals(*values):
    return torch.tensor(values, dtype=torch.float64)


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)


def close(actual, *expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), reals(*expected), rtol=0, atol=tolerance)


class TestGroupRelative:
    def test_by_hand(self):
        # Mean 1/4, sample deviation 1/2; mean 1/2, sample deviation sqrt(1/2).
        reward, group = reals(1, 0, 0, 0, 1, 0), ids(3, 3, 3, 3, 8, 8)
        root = math.sqrt(0.5)
        close(group_relative_advantage(reward, group, eps=0), 1.5, -0.5, -0.5, -0.5, root, -root, tolerance=1e-15)

    def test_population_deviation_gives_the_ratio_of_the_counts(self):
        # Mosaic appendix A.2: sqrt(n0 / n1) for a success, -sqrt(n1 / n0) for a failure.
        reward = reals(1, 0, 0, 0)
        close(group_relative_advantage(reward, ids(0, 0, 0, 0), ddof=0, eps=0), 3**0.5, *[-(3**-0.5)] * 3)

    def test_eps_is_added_to_the_deviation(self):
        close(group_relative_advantage(reals(1, 0), ids(0, 0), ddof=0, eps=0.5), 0.5, -0.5)

    @pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 0.1])
    def test_equal_rewards_give_exactly_zero(self, value):
        assert group_relative_advantage(torch.full((7,), value, dtype=torch.float64), torch.zeros(7).long()).eq(0).all()

    def test_dtypes_and_empty(self):
        for dtype, result in ((torch.bfloat16, torch.float32), (torch.int64, torch.float32), (torch.float64,) * 2):
            assert group_relative_advantage(torch.ones(2, dtype=dtype), ids(0, 1)).dtype == result
        assert group_relative_advantage(torch.ones(0), ids()).shape == (0,)

    def test_inputs_that_are_strided_or_require_grad(self):
        reward = torch.tensor([1.0, 9.0, 0.0, 9.0], requires_grad=True)[::2]
        advantage = group_relative_advantage(reward, ids(0, 0, 0, 0)[::2], eps=0)
        close(advantage, 0.5**0.5, -(0.5**0.5))
        assert not advantage.requires_grad

    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"reward": reals(1, NAN)}, ValueError, r"reward\[1\] must be finite, got nan"),
            ({"group": ids(0)}, ValueError, r"group must have shape \[R\] = \[2\], got \[1\]"),
            ({"group": ids(0, -4)}, ValueError, "group must hold ids >= 0, got -4"),
            ({"group": reals(0, 1)}, TypeError, r"group must hold integers.*pass group.long\(\)"),
            ({"reward": [1.0, 0.0]}, TypeError, r"reward must be a tensor of shape \[R\], got list"),
            ({"ddof": 2}, ValueError, "ddof must be one of 0, 1, got 2"),
            ({"eps": -1.0}, ValueError, r"eps must be a number in \[0, inf\], got -1"),
        ],
    )
    def test_errors(self, kwargs, error, message):
        with pytest.raises(error, match=message):
            group_relative_advantage(**{"reward": reals(1, 0), "group": ids(0, 0), **kwargs})


class TestRankSignal:
    def test_by_hand(self):
        # Successes of group 5: counts 1, 3, 3, 7 -> average ranks 1, 2.5, 2.5, 4. Its failures: 5, 1.
        count, success = ids(3, 1, 7, 3, 5, 1), flags(1, 1, 1, 1, 0, 0)
        close(session_rank_signal(count, success, ids(*[5] * 6)), 0, -1, 1, 0, 1, -1)
        close(session_rank_signal(ids(1, 1, 2), flags(1, 1, 1), ids(0, 0, 0)), -0.5, -0.5, 1)

    def test_subgroup_of_one_or_of_equal_counts_is_exactly_zero(self):
        count, success, group = ids(9, 4, 4, 4, 2), flags(1, 0, 0, 0, 1), ids(0, 0, 0, 0, 6)
        assert session_rank_signal(count, success, group).eq(0).all()

    def test_group_ids_of_any_size(self):
        assert session_rank_signal(ids(1, 2), flags(1, 1), ids(2**62, 2**62)).tolist() == [-1.0, 1.0]

    def test_errors(self):
        with pytest.raises(TypeError, match=r"success must be bool or integer.*pass success.bool\(\)"):
            session_rank_signal(ids(1, 2), reals(1, 0), ids(0, 0))
        with pytest.raises(ValueError, match=r"success must have shape \[R\] = \[2\], got \[3\]"):
            session_rank_signal(ids(1, 2), flags(1, 0, 0), ids(0, 0))


class TestSessionAware:
    def test_mixed_group_by_hand(self):
        # A = +-sqrt(3)/2 for two successes and two failures; u = -1, 1 in both.
        a = math.sqrt(3) / 2
        advantage = session_aware_advantage(reals(1, 1, 0, 0), ids(1, 3, 3, 5), ids(0, 0, 0, 0), eps=0)
        close(advantage, 1.2 * a, 0.8 * a, -1.2 * a, -0.8 * a, tolerance=1e-15)

    def test_homogeneous_groups_by_hand(self):
        count, group = ids(1, 3, 5, 1, 3, 5), ids(0, 0, 0, 2, 2, 2)
        advantage = session_aware_advantage(reals(1, 1, 1, 0, 0, 0), count, group)
        close(advantage, 0.2, 0, -0.2, -0.1, 0, 0, tolerance=1e-15)
        advantage = session_aware_advantage(reals(1, 1, 1, 0, 0, 0), count, group, beta_success=0.5, beta_fail=0.3)
        close(advantage, 0.5, 0, -0.5, -0.3, 0, 0, tolerance=1e-15)

    def test_threshold_says_what_a_success_is(self):
        reward, count, group = reals(0.6, 0.6), ids(1, 3), ids(0, 0)
        close(session_aware_advantage(reward, count, group), 0.2, -0.2)
        close(session_aware_advantage(reward, count, group, success_threshold=0.7), -0.1, 0)

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("rho", 1.0, r"rho must be a number in \[0, 1\), got 1.0"),
            ("rho", -0.1, r"rho must be a number in \[0, 1\), got -0.1"),
            ("beta_fail", -1, "beta_fail must be a number"),
            ("beta_success", NAN, "beta_success must be a number"),
            ("success_threshold", "half", "success_threshold must be a number.*got 'half'"),
            ("ddof", True, "ddof must be one of 0, 1, got True"),
        ],
    )
    def test_errors(self, option, value, message):
        with pytest.raises(ValueError, match=message):
            session_aware_advantage(reals(1, 0), ids(1, 1), ids(0, 0), **{option: value})


class TestNormalizeGain:
    def test_by_hand_by_type(self):
        # Normal: 1, 3 (deviation sqrt 2). Compaction: -5 alone. The terminal session's gain is not read.
        gain, kind = reals(1, -5, 3, NAN), ids(0, 1, 0, 0)
        signal = normalize_gain(gain, kind, ids(4, 4, 4, 4), flags(1, 1, 1, 0), eps=0)
        close(signal, -(0.5**0.5), 0, 0.5**0.5, 0, tolerance=1e-15)

    def test_by_hand_over_all_types(self):
        gain, kind = reals(1, -5, 3, 9), ids(0, 1, 0, 0)
        signal = normalize_gain(gain, kind, ids(4, 4, 4, 9), flags(1, 1, 1, 1), by_type=False, ddof=0, eps=0)
        deviation = math.sqrt((16 / 9 + 196 / 9 + 100 / 9) / 3)
        close(signal, 4 / 3 / deviation, -14 / 3 / deviation, 10 / 3 / deviation, 0, tolerance=1e-14)

    def test_nothing_eligible_or_nothing_at_all(self):
        assert normalize_gain(reals(INF, NAN), ids(0, 1), ids(0, 0), flags(0, 0)).eq(0).all()
        assert normalize_gain(reals(), ids(), ids(), flags()).shape == (0,)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"gain": reals(1, INF)}, r"gain\[1\] must be finite, got inf"),
            ({"session_type": ids(0, -1)}, "session_type must hold ids >= 0, got -1"),
            ({"gain": reals(1)}, r"gain must have shape \[S\] = \[2\], got \[1\]"),
        ],
    )
    def test_errors(self, kwargs, message):
        given = {"gain": reals(1, 2), "session_type": ids(0, 0), "group": ids(0, 0), "eligible": flags(1, 1)}
        with pytest.raises(ValueError, match=message):
            normalize_gain(**{**given, **kwargs})


class TestShaping:
    @pytest.mark.parametrize(
        ("gate", "expected"),
        [
            # B =        0.5  0.5  0.5  0.5  -0.5  -0.5  0.0;  d = 0.2 -0.2 -0.8  0.8  0.8  -0.8 -0.3
            ("clip", (0.7, 0.3, 0.0, 1.3, 0.0, -1.3, -0.3)),
            ("drop", (0.7, 0.3, 0.5, 1.3, -0.5, -1.3, -0.3)),
            ("cap", (0.7, 0.3, 0.0, 1.0, 0.0, -1.0, -0.3)),
            ("agree", (0.7, 0.5, 0.5, 1.3, -0.5, -1.3, -0.3)),
        ],
    )
    def test_gates_by_hand(self, gate, expected):
        base, signal = reals(0.5, 0.5, 0.5, 0.5, -0.5, -0.5, 0), reals(2, -2, -8, 8, 8, -8, -3)
        shaped = shape_session_advantage(base, signal, flags(*[1] * 7), flags(*[0] * 7), gate=gate)
        close(shaped, *expected, tolerance=1e-15)

    def test_all_failure_gate_and_terminal_sessions(self):
        base, signal = reals(0, 0, -0.1, -0.1), reals(2, -2, 2, NAN)
        shaped = shape_session_advantage(base, signal, flags(1, 1, 1, 0), flags(1, 1, 1, 1), lambda_r=0.5)
        close(shaped, 0, -1, -0.1, -0.1, tolerance=1e-15)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"gate": "soft"}, "gate must be one of clip, drop, cap, agree, got 'soft'"),
            ({"lambda_r": -0.1}, "lambda_r must be a number"),
            ({"signal": reals(NAN)}, r"signal\[0\] must be finite"),
            ({"all_failed": flags(1, 1)}, r"all_failed must have shape \[S\] = \[1\], got \[2\]"),
        ],
    )
    def test_errors(self, kwargs, message):
        given = {"base": reals(1), "signal": reals(1), "eligible": flags(1), "all_failed": flags(0)}
        with pytest.raises(ValueError, match=message):
            shape_session_advantage(**{**given, **kwargs})


def test_session_utility_by_hand():
    utility = session_utility(reals(0.4, -0.2, 0.0, 0.2, NAN), flags(1, 1, 1, 1, 0))
    assert utility.positive_ig_rate == 0.5
    assert utility.ig_per_session == pytest.approx(0.15)
    assert session_utility(reals(3), flags(0)) == (0.0, 0.0)
