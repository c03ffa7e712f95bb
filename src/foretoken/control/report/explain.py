"""What control does and why, in sentences a person understands: numbers in, one sentence out.

Pure: knows neither engine nor models, and changes nothing. A sentence has no full stop and no line
break, so that it can stand in a log line, in a table and in JSON. Times are given in plain steps:
what the same step would have taken without drafts.
"""

from collections import Counter
from typing import NamedTuple

from foretoken.control.adaptive.allocation import MARGIN
from foretoken.types import RequestMetrics


class Outlook(NamedTuple):
    """What a draft length is expected to come to, for one of the sequences on average."""

    drafts: float
    """Draft tokens."""
    tokens: float
    """Expected, the recovered or bonus token included."""
    plain_steps: float
    """Time of the whole step, in plain steps."""


def why_drafting(drafter: str, outlook: Outlook, num_drafting: int, num_decoding: int) -> str:
    """Why a drafter drafts: what it is expected to bring, and what the step takes for it."""
    drafts, tokens, steps = outlook
    many = "" if num_drafting == num_decoding else f" for {num_drafting} of {num_decoding}"
    return (
        f"{drafter} drafts {_count(drafts)}{many}: {tokens:.1f} tokens expected in "
        f"{steps:.2f} plain steps"
    )


def why_resting(num_decoding: int, outlook: Outlook | None, others: str = "") -> str:
    """Why a drafter rests: what its best length would have come to, and why that is not done.

    Args:
        num_decoding: sequences that decode.
        outlook: its best length for all of them; None: it may draft for nobody.
        others: the drafter that serves them instead; empty: none does.
    """
    flight = f"at {num_decoding} in flight"
    if outlook is None:
        return f"resting: {flight} nobody may have its drafts"
    drafts, tokens, steps = outlook
    if tokens <= steps * (1.0 + MARGIN):
        return (
            f"resting: {flight} a draft of {_count(drafts)} would take {steps:.1f} plain steps for "
            f"{tokens:.1f} tokens"
        )
    instead = f"{others} brings more" if others else "it is not awake, or somebody would wait"
    return (
        f"resting: {flight} a draft of {_count(drafts)} is expected to bring {tokens:.1f} tokens "
        f"in {steps:.2f} plain steps; {instead}"
    )


def why_looking_up(drafter: str, free_rows: int, *, drafts: bool) -> str:
    """How far a drafter that finds its drafts in text is used: it costs rows, and no passes."""
    if drafts:
        return f"{drafter} drafts where the text repeats: up to {free_rows} rows are worth checking"
    if free_rows == 0:
        return "resting: one more row to check would take more than it brings"
    return f"resting: up to {free_rows} rows are worth checking, and the text seldom repeats"


def why_below_floor(acceptance: float, least: float) -> str:
    """Why a drafter with a `min_acceptance` rests."""
    return (
        f"resting: {acceptance:.0%} of its recent draft tokens were accepted, "
        f"min_acceptance is {least:.0%}"
    )


def why_passed_over() -> str:
    """Why a drafter rests while drafts are wanted."""
    return "resting: other drafters have more to offer"


def why_fixed(drafts: int) -> str:
    """Why a drafter drafts where nothing decides."""
    return f"drafts up to {drafts} in every step, as configured"


def why_by_load(drafts: int, running: int) -> str:
    """Why a drafter has this length where the settings say it by load."""
    if drafts == 0:
        return f"no drafts at {running} running, as configured by load"
    return f"drafts up to {drafts} at {running} running, as configured by load"


def change(drafter: str, before: int, now: int, why: str) -> str:
    """That the usual length of a drafter changed, 0 for none."""
    if now == 0:
        what = "rests"
    elif before == 0:
        what = f"begins to draft {now}"
    else:
        what = f"drafts {now} instead of {before}"
    # A reason that begins with what was just said is cut to what it adds.
    for said in (f"{drafter} drafts {now}", "resting: "):
        why = why.removeprefix(said).removeprefix(": ")
    return f"{drafter} {what}: {why}"


def of_request(metrics: RequestMetrics, num_tokens: int, plain_because: str) -> str:
    """Which drafter served a request, how far, and why its other steps did not draft.

    Args:
        metrics: of the request, which has ended.
        num_tokens: that it wrote.
        plain_because: why steps are plain, by what control last said; empty: it is not known.
    """
    drafted, accepted = metrics.drafted_per_step, metrics.accepted_per_step
    steps = max(num_tokens - sum(accepted), len(drafted))
    if not drafted:
        return f"no step drafted{_because(plain_because)}"
    served: list[str] = []
    for name, _ in Counter(metrics.drafter_per_step).most_common():
        own = [
            (checked, kept)
            for drafter, checked, kept in zip(
                metrics.drafter_per_step, drafted, accepted, strict=True
            )
            if drafter == name
        ]
        count = len(own)
        of_all = f" of {steps} steps" if not served else ""
        served.append(
            f"{name} served {count}{of_all} with {sum(d for d, _ in own) / count:.1f} drafts each, "
            f"{sum(a for _, a in own) / count:.1f} accepted"
        )
    plain = steps - len(drafted)
    # The first token comes out of the step that reads the prompt, which never drafts.
    rest = f"; {plain} were plain{_because(plain_because)}" if plain > 1 else ""
    return "; ".join(served) + rest


def _because(why: str) -> str:
    return f": {why.removeprefix('resting: ')}" if why else ""


def _count(drafts: float) -> str:
    """A whole number as one, a mean with a digit behind the point."""
    return f"{drafts:.0f}" if abs(drafts - round(drafts)) < 0.05 else f"{drafts:.1f}"
