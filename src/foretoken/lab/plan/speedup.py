"""The arithmetic of speculation: tokens per step, its cost, break-even, the best k.

Pure functions of four numbers. k: drafts per verification. V: seconds of a verifying step over a
plain one at the same batch. c: seconds of a draft step over a plain one. alpha: chance that a
draft is accepted given that all before it were. Leviathan et al. (2022), section 3, with V added.
"""

from collections.abc import Sequence

MOST_K = 16


def acceptance_length(alpha: float, k: int) -> float:
    """Tokens per verification, the recovered or bonus token included."""
    if alpha >= 1.0:
        return k + 1.0
    return (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


def acceptance_rate(alpha: float, k: int) -> float:
    """Accepted over drafted tokens. It falls with k although the draft is as good as before."""
    return (acceptance_length(alpha, k) - 1.0) / k if k else 0.0


def alpha_of_length(length: float, k: int) -> float:
    """The alpha that gives `length` tokens per verification at `k`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if acceptance_length(middle, k) < length else (low, middle)
    return (low + high) / 2


def speed_up(length: float, verify_cost: float, draft_cost: float, k: int) -> float:
    """`length` tokens for `verify_cost` + k `draft_cost` plain steps."""
    return length / (verify_cost + k * draft_cost)


def break_even_rate(verify_cost: float, draft_cost: float, k: int, wanted: float = 1.0) -> float:
    """Acceptance rate at which the speed-up is `wanted`; may be above 1: out of reach."""
    return (wanted * (verify_cost + k * draft_cost) - 1.0) / k if k else 0.0


def ceiling(alpha: float) -> float:
    """Tokens per verification that no k exceeds; the speed-up stays below it."""
    return 1.0 / (1.0 - alpha) if alpha < 1.0 else float("inf")


def best_k(alpha: float, verify_costs: Sequence[float], draft_cost: float) -> tuple[int, float]:
    """The k with the highest speed-up, and that speed-up; k = 0 and 1 if none pays.

    `verify_costs[k]` is V at k; entry 0 is not used. Of equals within 1 % the smaller k.
    """
    best, gain = 0, 1.0
    for k in range(1, len(verify_costs)):
        found = speed_up(acceptance_length(alpha, k), verify_costs[k], draft_cost, k)
        if found > gain * (1.01 if best else 1.0):
            best, gain = k, found
    return best, gain
