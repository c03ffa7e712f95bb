"""Finds rows where a request forbade itself every token, so that what was chosen means nothing.

The best of nothing is some id, and that id is forbidden: this is how such a row is known, without
looking at logits. Only bans that come and go can do it (bad_words, min_tokens); what forbids
everything from the start is refused before. Invariant: the tokens before such a row stand, as in
plain decoding.
"""

from dataclasses import replace

from foretoken.runtime.batch import Batch, Span
from foretoken.runtime.rows import Rows, banned_cells
from foretoken.runtime.verifier import SpanVerification, Verification

NOTHING_LEFT = "bad_words, min_tokens and allowed_token_ids together forbid every next token"


def leave_out_masked(
    batch: Batch, verification: Verification
) -> tuple[Verification, dict[str, str]]:
    """The same without tokens of such rows, and why requests must end that have none before."""
    spans: list[SpanVerification | None] = []
    ended: dict[str, str] = {}
    for span, found in zip(batch.spans, verification.spans, strict=True):
        request = span.sequence.request
        bans = request.bad_words_ids or (
            request.min_tokens_ids and span.sequence.num_output < request.params.min_tokens
        )
        if not bans or found is None or not found.new_ids:
            spans.append(found)
            continue
        count = _num_chosen(span, found.new_ids)
        if count == 0:
            ended[request.request_id] = NOTHING_LEFT
        spans.append(found if count == len(found.new_ids) else _first(found, count))
    return Verification(tuple(spans)), ended


def _num_chosen(span: Span, new_ids: tuple[int, ...]) -> int:
    """How many of the new tokens were allowed where they were chosen."""
    rows = Rows(sequence=span.sequence, drafts=new_ids[:-1])
    banned, allowed = set(banned_cells(rows)), span.sequence.request.params.allowed_token_ids
    for row, token in enumerate(new_ids):
        if (row, token) in banned or (allowed is not None and token not in allowed):
            return row
    return len(new_ids)


def _first(found: SpanVerification, count: int) -> SpanVerification:
    """The span as if the step had ended after `count` new tokens."""
    return replace(
        found,
        new_ids=found.new_ids[:count],
        num_accepted=max(count - 1, 0),
        sources=found.sources[:count],
        logprobs=None if found.logprobs is None else found.logprobs[:count],
        path=None if found.path is None else found.path[: max(count - 1, 0)],
    )
