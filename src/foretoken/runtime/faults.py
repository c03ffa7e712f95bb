"""Verifies a step's spans together and, should that fail, each alone: an error hurts one request.

Knows the shape of a batch, not how it is verified. Relies on the verifier's invariant that what is
found for a span depends on its own rows alone, so that together and apart are the same.
"""

from collections.abc import Iterator
from dataclasses import replace

from foretoken.models.tensors import Draft, ModelOutput
from foretoken.runtime.batch import Batch, Span
from foretoken.runtime.failures import say_failure
from foretoken.runtime.verifier import SpanVerification, Verification, Verifier


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
        own = ModelOutput(logits_RV=output.logits_RV[rows], hidden_RD=output.hidden_RD[rows])
        yield span, replace(batch, spans=(span,), draft=draft), own
