"""What goes wrong with one request ends that request, and the others of its step go on.

Three ways: making its output fails (`say_failure`), verifying its part of the step fails
(`verify_apart`), or it forbade itself every token (`leave_out_masked`). An error here is a bug of
ours or of a library, and is logged once with its traceback. Relies on the verifier's invariant that
what is found for a span depends on its own rows alone, so that together and apart are the same.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

from foretoken.models.tensors import Draft, ModelOutput
from foretoken.runtime.batch import Batch, Span, SpanVerification, Verification
from foretoken.runtime.rows import Rows, banned_cells
from foretoken.runtime.verifier import Verifier

logger = logging.getLogger("foretoken")

NOTHING_LEFT = "bad_words, min_tokens and allowed_token_ids together forbid every next token"


def say_failure(request_id: str, error: Exception) -> str:
    """Log `error` and put it into words for the output of the request."""
    text = f"its output could not be made ({type(error).__name__}: {error})"
    logger.error("request %s ends: %s", request_id, text, exc_info=error)
    return text


def verify_apart(
    verifier: Verifier, batch: Batch, output: ModelOutput
) -> tuple[Verification, dict[str, str]]:
    """What was found for the batch, and why requests must end whose part of it failed.

    Raises:
        Exception: every one of several spans failed: it is not a request that is at fault.
    """
    try:
        return verifier.verify(batch, output), {}
    except Exception as error:  # noqa: BLE001 - looked into below
        whole = error
    # One bad request must not end its neighbours: the same step again, span by span.
    found: list[SpanVerification | None] = []
    broken: dict[str, str] = {}
    for span, one, rows in _each(batch, output):
        try:
            [result] = verifier.verify(one, rows).spans
        except Exception as error:  # noqa: BLE001 - said in the output
            request_id = span.sequence.request.request_id
            broken[request_id] = say_failure(request_id, error)
            result = None
        found.append(result)
    if len(broken) == len(batch.spans) > 1:
        raise whole
    return Verification(tuple(found)), broken


def draws_of(verifier: Verifier, batch: Batch) -> bytes | None:
    """`Verifier.draws`; None also where a request is at fault, which `verify_apart` finds."""
    try:
        return verifier.draws(batch)
    except Exception:  # noqa: BLE001 - it is met again, and looked into, at the verification
        return None


def _each(batch: Batch, output: ModelOutput) -> Iterator[tuple[Span, Batch, ModelOutput]]:
    """Every span as a batch of its own, with its rows."""
    probs_KV = None if batch.draft is None else batch.draft.probs_KV
    row = drafted = 0
    for index, span in enumerate(batch.spans):
        rows = slice(row, row + span.prompt_rows + span.sample_rows)
        drafts = slice(drafted, drafted + span.num_drafts)
        row, drafted = rows.stop, drafts.stop
        draft = None
        if batch.draft is not None:
            draft = Draft(
                ids=(span.draft_ids,),
                probs_KV=None if probs_KV is None else probs_KV[drafts],
                parents=(span.draft_parents,),
                drafter=span.drafter,
                one_hot=(batch.draft.is_one_hot(index),),
            )
        chosen = None if output.chosen_R is None else output.chosen_R[rows]
        own = ModelOutput(
            logits_RV=output.logits_RV[rows], hidden_RD=output.hidden_RD[rows], chosen_R=chosen
        )
        yield span, replace(batch, spans=(span,), draft=draft), own


def leave_out_masked(
    batch: Batch, verification: Verification
) -> tuple[Verification, dict[str, str]]:
    """Leave out tokens of rows where a request forbade itself everything; why requests must end.

    The best of nothing is some id, and that id is forbidden: this is how such a row is known,
    without looking at logits. Only bans that come and go can do it (bad_words, min_tokens); what
    forbids everything from the start is refused before. Tokens before such a row stand, as in plain
    decoding; a request ends if it has none.
    """
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
