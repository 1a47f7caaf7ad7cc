"""Session-level shaping: marginal gains compared inside their type, gated, and added to the trajectory's advantage."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mosaic.advantages.arguments import as_flags, as_labels, as_reals, check_choice, check_range, like_input
from mosaic.advantages.grouped import compact, standard_score

GATES = ("clip", "drop", "cap", "agree")


def normalize_gain(
    gain: Tensor,
    session_type: Tensor,
    group: Tensor,
    eligible: Tensor,
    *,
    by_type: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Each session's gain against those of the same type in its prompt group.

        r_s = (gain_s - mean_{g,c}) / (std_{g,c} + eps)

    over the eligible sessions of type c in all trajectories of group g.

    Args:
        gain: [S] marginal gains; read only where eligible.
        session_type: [S] integers, values of SessionType.
        group: [S] integer ids of the sessions' prompt groups, gaps allowed.
        eligible: [S] bool, the non-terminal sessions.
        by_type: False compares with all eligible sessions of the group, whatever their type.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: added to the standard deviation.

    Returns:
        [S], 0 where not eligible; exactly 0 where the cell has one member or equal members. float64 for float64 gains,
        else float32; detached.

    Raises:
        ValueError, TypeError: an argument has the wrong length, kind or range; an eligible gain is not finite.

    Source: Mosaic section 3.2.

    >>> gain, kind, same = torch.tensor([1.0, 3.0, -5.0]), torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0])
    >>> normalize_gain(gain, kind, same, torch.tensor([True, True, True]))
    tensor([-0.7071,  0.7071,  0.0000])
    """
    check_choice("ddof", ddof, (0, 1))
    check_range("eps", eps, 0)
    used = as_flags("eligible", eligible, None, "S")
    size = used.numel()
    x = as_reals("gain", gain, size, "S", used)
    kind = as_labels("session_type", session_type, size, "S")
    cell = compact(as_labels("group", group, size, "S"))[0]
    if by_type:
        kind, kinds = compact(kind)
        cell = cell * kinds + kind
    signal = torch.zeros_like(x)
    signal[used] = standard_score(x[used], cell[used], ddof, eps)
    return like_input(signal, gain)


def shape_session_advantage(
    base: Tensor,
    signal: Tensor,
    eligible: Tensor,
    all_failed: Tensor,
    *,
    lambda_r: float = 0.1,
    gate: str = "clip",
) -> Tensor:
    """Adds the gated signal of a session to the advantage of its trajectory.

        r <- min(r, 0) where the whole prompt group failed;  d = lambda_r r;  A = B + gate(d)

    The gate keeps the direction that a base B other than 0 gives (B = 0 takes d as it is):
        "clip":  B > 0: d <- max(d, -B);  B < 0: d <- min(d, -B): at most down to 0, never across
        "drop":  d <- 0 where B and B + d have opposite signs
        "cap":   d <- d clamped to [-|B|, |B|]
        "agree": d <- 0 unless d and B have the same sign

    Args:
        base: [S] B, the trajectory's advantage at each of its sessions.
        signal: [S] r, normalised gains; read only where eligible.
        eligible: [S] bool; elsewhere the result is B.
        all_failed: [S] bool, the session's prompt group has no success.
        lambda_r: weight of the signal, >= 0.
        gate: one of "clip", "drop", "cap", "agree".

    Returns:
        [S], float64 for a float64 base, else float32; detached.

    Raises:
        ValueError, TypeError: an argument has the wrong length, kind or range; an eligible signal is not finite.

    Source: Mosaic section 3.2 and appendix B.2.

    >>> base, signal = torch.tensor([0.05, 0.05, 0.0]), torch.tensor([-1.0, 1.0, 1.0])
    >>> yes = torch.ones(3, dtype=torch.bool)
    >>> shape_session_advantage(base, signal, yes, torch.tensor([False, False, True]))
    tensor([0.0000, 0.1500, 0.0000])
    """
    check_shaping_options(lambda_r, gate)
    b = as_reals("base", base, None, "S")
    used = as_flags("eligible", eligible, b.numel(), "S")
    r = as_reals("signal", signal, b.numel(), "S", used)
    failed = as_flags("all_failed", all_failed, b.numel(), "S")
    r = torch.where(failed, r.clamp(max=0), r)
    shaped = b + _gated(b, lambda_r * r, gate)
    return like_input(torch.where(used, shaped, b), base)


def check_shaping_options(lambda_r: float, gate: str) -> None:
    """Raises ValueError unless the options of shape_session_advantage are in range."""
    check_range("lambda_r", lambda_r, 0)
    check_choice("gate", gate, GATES)


def _gated(base: Tensor, delta: Tensor, gate: str) -> Tensor:
    if gate == "clip":
        gated = torch.where(base > 0, torch.maximum(delta, -base), torch.minimum(delta, -base))
    elif gate == "drop":
        gated = torch.where(base.sign() * (base + delta).sign() < 0, 0.0, delta)
    elif gate == "cap":
        gated = torch.minimum(torch.maximum(delta, -base.abs()), base.abs())
    else:
        gated = torch.where(delta.sign() == base.sign(), delta, 0.0)
    return torch.where(base == 0, delta, gated)


class SessionUtility(NamedTuple):
    """What the eligible sessions of a batch were worth, from raw gains."""

    positive_ig_rate: float
    ig_per_session: float


def session_utility(gain: Tensor, eligible: Tensor) -> SessionUtility:
    """How often a session helped, and by how much on average.

        positive_ig_rate = #{gain > 0} / n,  ig_per_session = sum max(gain, 0) / n,  n = eligible sessions

    Args:
        gain: [S] raw marginal gains, before normalisation; read only where eligible.
        eligible: [S] bool.

    Returns:
        Two floats; 0 without eligible sessions.

    Raises:
        ValueError, TypeError: an argument has the wrong length or kind; an eligible gain is not finite.

    Source: Mosaic section 4.5 and appendix D.3.

    >>> session_utility(torch.tensor([2.0, -1.0, 0.0, 9.0]), torch.tensor([True, True, True, False]))
    SessionUtility(positive_ig_rate=0.3333333333333333, ig_per_session=0.6666666666666666)
    """
    used = as_flags("eligible", eligible, None, "S")
    x = as_reals("gain", gain, used.numel(), "S", used)[used]
    size = max(x.numel(), 1)
    return SessionUtility(float((x > 0).sum()) / size, float(x.clamp(min=0).sum()) / size)
