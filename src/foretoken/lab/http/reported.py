"""A request's acceptance out of what each kind of server says about it.

One function per source, from the JSON of an answer to a `RequestAcceptance`, or None where it is
not there. vLLM and Foretoken answer `metrics.speculative_decoding`; llama.cpp's `timings` have
totals, and per chunk when asked; SGLang has `spec_tokens_details`; with token ids per chunk the
steps of any server show, unless chunks were merged on their way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.lab.records.results import RequestAcceptance


def from_body(metrics: Any) -> RequestAcceptance | None:
    """vLLM's `metrics` object (--per-request-spec-decode-metrics summary or detailed)."""
    found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(found, dict) or _count(found, "num_draft_tokens") is None:
        return None
    return RequestAcceptance(
        source="body",
        num_drafted=_count(found, "num_draft_tokens") or 0,
        num_accepted=_count(found, "num_accepted_draft_tokens") or 0,
        num_steps=_count(found, "num_spec_steps"),
        histogram=_histogram(found.get("acceptance_histogram")),
        per_step_accepted=_steps(found, "accepted"),
        per_step_drafted=_steps(found, "drafted"),
    )


def _steps(found: Mapping[str, Any], what: str) -> tuple[int, ...]:
    words = {"accepted": "accepted", "drafted": "draft"}
    names = (f"per_step_{what}", f"per_step_num_{words[what]}_tokens")
    given = next((found[name] for name in names if name in found), None)
    return tuple(int(value) for value in given) if isinstance(given, list) else ()


def _histogram(given: Any) -> tuple[int, ...]:
    """A list of counts, or a mapping from accepted drafts to counts."""
    if isinstance(given, list):
        return tuple(int(count) for count in given)
    if not isinstance(given, dict) or not given:
        return ()
    counts = {int(length): int(count) for length, count in given.items()}
    return tuple(counts.get(j, 0) for j in range(max(counts) + 1))


def _count(found: Mapping[str, Any], name: str) -> int | None:
    value = found.get(name)
    return int(value) if isinstance(value, int | float) else None


def from_timings(timings: Sequence[Mapping[str, Any]]) -> RequestAcceptance | None:
    """llama.cpp's `timings`, of every chunk that had them, the last being the totals.

    With timings_per_token they are cumulative, so differences are steps: a chunk that brings
    drafts is one verification. Without them the number of steps is not known.
    """
    with_drafts = [t for t in timings if _count(t, "draft_n") is not None]
    if not with_drafts:
        return None
    total = with_drafts[-1]
    drafted, accepted = _count(total, "draft_n") or 0, _count(total, "draft_n_accepted") or 0
    if drafted == 0:
        return None
    counts = [(_count(t, "draft_n") or 0, _count(t, "draft_n_accepted") or 0) for t in with_drafts]
    steps = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in zip([(0, 0), *counts], counts, strict=False)
        if after[0] > before[0]
    ]
    per_chunk = len(with_drafts) > 1 and len(steps) > 1
    if not per_chunk:
        return RequestAcceptance(source="timings", num_drafted=drafted, num_accepted=accepted)
    return RequestAcceptance(
        source="timing_chunks",
        num_drafted=drafted,
        num_accepted=accepted,
        num_steps=len(steps),
        exact=False,
        histogram=count_histogram([a for _, a in steps]),
        per_step_accepted=tuple(a for _, a in steps),
        per_step_drafted=tuple(d for d, _ in steps),
    )


def from_spec_details(details: Any) -> RequestAcceptance | None:
    """SGLang's `spec_tokens_details` (return_spec_tokens_details)."""
    if not isinstance(details, dict):
        return None
    names = ("spec_verify_ct", "verify_count", "num_verify")
    steps = next((_count(details, n) for n in names if _count(details, n) is not None), None)
    names = ("proposed_drafts", "spec_draft_token_num", "num_draft_tokens")
    drafted = next((_count(details, n) for n in names if _count(details, n) is not None), None)
    names = ("correct_drafts", "spec_accept_token_num", "num_accepted_tokens")
    accepted = next((_count(details, n) for n in names if _count(details, n) is not None), None)
    if drafted is None or accepted is None:
        return None
    histogram = next((details[n] for n in details if "histogram" in n), None)
    return RequestAcceptance(
        source="spec_details",
        num_drafted=drafted,
        num_accepted=accepted,
        num_steps=steps,
        histogram=_histogram(histogram),
    )


def from_chunks(chunk_tokens: Sequence[int], k: int) -> RequestAcceptance | None:
    """From tokens per chunk: a chunk after the first is a step, of one token and what it accepted.

    A guess: chunks merge when the server or the network lags, and drafts may be shorter than `k`.
    None if a chunk is larger than a step can be.
    """
    accepted = [tokens - 1 for tokens in chunk_tokens[1:] if tokens > 0]
    if not accepted or k < 1 or max(accepted) > k:
        return None
    return RequestAcceptance(
        source="chunks",
        num_drafted=k * len(accepted),
        num_accepted=sum(accepted),
        num_steps=len(accepted),
        exact=False,
        histogram=count_histogram(accepted),
        per_step_accepted=tuple(accepted),
    )


def count_histogram(accepted: Sequence[int]) -> tuple[int, ...]:
    """Entry j: how often j stands in `accepted`."""
    return tuple(list(accepted).count(j) for j in range(max(accepted, default=-1) + 1))
