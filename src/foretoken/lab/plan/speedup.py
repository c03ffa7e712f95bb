"""What speculation gains, and the next step from a measurement: another k or draft, or off.

Pure functions of a few numbers. k: drafts per verification. V: seconds of a verifying step over a
plain one at the same batch. c: seconds of a draft step over a plain one. alpha: chance that a
draft is accepted given that all before it were. `next_step` decides by cost: what a verification
yields against what it takes, at the load it was measured. The raw acceptance rate is never compared
with a fixed number, for it falls with k by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.control.cost import LineCost, StepShape, speculative_step
from foretoken.lab.verdict import WORTH_IT

MOST_K = 16


def best_k(gain: Callable[[int], float], bound: int = MOST_K) -> int:
    """The k from 1 to `bound` that gains most, of equals within 1 % the smaller; 0: none pays."""
    gains = [gain(k) for k in range(1, bound + 1)]
    most = max(gains)
    if most <= 1.0:
        return 0
    return next(k for k, found in enumerate(gains, start=1) if found > 1.0 and 1.01 * found >= most)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """What `fit` or the server's own counters say about one load."""

    k: int
    acceptance_length: float
    """Tokens per verification, 1 to k + 1."""
    verify_cost: float
    draft_cost: float
    method: str = ""
    draft_share: float = 1.0

    @property
    def acceptance(self) -> ConstantAcceptance:
        return ConstantAcceptance.of_length(self.acceptance_length, self.k)

    def verify(self, rows: int) -> float:
        """V of so many rows per request, on the line through the measured one."""
        return LineCost(row_s=(self.verify_cost - 1.0) / self.k).seconds(StepShape(rows))

    def gain(self, k: int) -> float:
        """Speed-up of k drafts by whole time, steps that draft nothing included."""
        length = 1.0 + self.draft_share * (self.acceptance.length(k) - 1.0)
        verify = 1.0 + self.draft_share * (self.verify(k + 1) - 1.0)
        return length / speculative_step(verify, self.draft_share * self.draft_cost, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """What to try next, and what it should bring."""

    action: str
    """`keep`, `raise_k`, `lower_k`, `cheaper_draft`, `better_draft` or `leave_off`."""
    k: int
    speed_up: float
    expected: float
    """Speed-up at the proposed setting, if acceptance is independent of position: an estimate."""
    reason: str


def next_step(cost: MeasuredCost) -> NextStep:
    now, alpha, drafting = cost.gain(cost.k), cost.acceptance.alpha, cost.k * cost.draft_cost
    k = best_k(cost.gain) or max(range(1, MOST_K + 1), key=cost.gain)
    gain, other = cost.gain(k), cost.k
    if gain < 1.0 and drafting > cost.verify_cost - 1.0 and alpha > 0.5:
        action = "cheaper_draft"
        reason = (
            f"no k pays: drafting costs {drafting:.2f} plain steps per verification although "
            f"{alpha:.0%} of drafts in reach are accepted"
        )
    elif gain < 1.0:
        action = "leave_off"
        reason = (
            f"no k pays at this load: the best, k = {k}, is {gain:.2f}x, and at alpha "
            f"{alpha:.2f} no cost could be below one step"
        )
    elif (gain > now * 1.03 or now <= 1.0 < gain) and k != cost.k:
        action, other = "raise_k" if k > cost.k else "lower_k", k
        reason = f"k = {k} should give {gain:.2f}x instead of {now:.2f}x"
    elif gain < WORTH_IT and drafting > 0.5:
        action = "cheaper_draft"
        reason = f"{now:.2f}x, and {drafting:.2f} plain steps of each verification go into drafting"
    elif gain < WORTH_IT:
        action = "better_draft"
        reason = f"{now:.2f}x, and another k gives no more than {gain:.2f}x"
    else:
        action = "keep"
        reason = f"{now:.2f}x; no other k promises more than {gain:.2f}x"
    return NextStep(action=action, k=other, speed_up=now, expected=gain, reason=reason)
