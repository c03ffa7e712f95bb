"""A tiny target and the loop around the verifier that its tests share."""

import torch
from torch import Tensor

from foretoken.models.tensors import Draft, ModelOutput
from foretoken.runtime.batch import Batch, Span, SpanVerification
from foretoken.runtime.sequence import Sequence
from foretoken.runtime.verifier import Verifier
from foretoken.types import Request

VOCAB = 24


class TableModel:
    """Logits as a fixed function of the last two tokens, with exact ties among them."""

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(vocab, vocab, vocab, generator=generator) * 2
        self.table = (table * 4).round() / 4

    def row(self, history: list[int]) -> Tensor:
        return self.table[history[-2], history[-1]]

    def rows(self, history: list[int], drafts: tuple[int, ...]) -> Tensor:
        known = [*history, *(max(d, 0) for d in drafts)]
        start = len(history)
        return torch.stack([self.row(known[: start + j]) for j in range(len(drafts) + 1)])


def sequence_of(request: Request, output: list[int] | None = None) -> Sequence:
    tokens = [*request.prompt_token_ids, *(output or [])]
    return Sequence(
        request=request,
        token_ids=tokens,
        num_prompt=len(request.prompt_token_ids),
        num_computed=len(tokens) - 1,
    )


def span_of(sequence: Sequence, drafts: tuple[int, ...] = ()) -> Span:
    return Span(
        sequence=sequence, start=sequence.num_tokens - 1, length=1, draft_budget=len(drafts),
        draft_ids=drafts, samples=True,
    )  # fmt: skip


def verify(
    verifier: Verifier, model: TableModel, spans: list[Span], probs_KV: Tensor | None = None
) -> list[SpanVerification]:
    logits = [model.rows(span.sequence.token_ids, span.draft_ids) for span in spans]
    logits_RV = torch.cat(logits)
    before = logits_RV.clone()
    draft = Draft(ids=tuple(span.draft_ids for span in spans), probs_KV=probs_KV)
    batch = Batch(spans=tuple(spans), draft=draft)
    output = ModelOutput(logits_RV=logits_RV, hidden_RD=logits_RV[:, :1])
    found = [v for v in verifier.verify(batch, output).spans if v is not None]
    assert torch.equal(logits_RV, before), "raw logits were changed"
    return found


def decode(verifier: Verifier, model: TableModel, request: Request, count: int) -> list[int]:
    sequence = sequence_of(request)
    for _ in range(count):
        (result,) = verify(verifier, model, [span_of(sequence)])
        sequence.token_ids.extend(result.new_ids)
    return sequence.output_ids
