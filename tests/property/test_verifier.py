"""Verifying K drafts at once gives the tokens that plain decoding gives one by one."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foretoken.models.tensors import Draft, ModelOutput
from foretoken.runtime.batch import Batch, Span
from foretoken.runtime.sequence import Sequence
from foretoken.runtime.verifier import SpanVerification, Verifier
from foretoken.types import Request, SamplingParams

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
        sequence=sequence,
        start=sequence.num_tokens - 1,
        length=1,
        draft_budget=len(drafts),
        draft_ids=drafts,
        samples=True,
    )


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
    """Plain decoding: one token, one verification."""
    sequence = sequence_of(request)
    for _ in range(count):
        (result,) = verify(verifier, model, [span_of(sequence)])
        sequence.token_ids.extend(result.new_ids)
    return sequence.output_ids


token = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw: st.DrawFn, name: str = "r") -> Request:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.05])),
        top_k=draw(st.sampled_from([0, 0, -1, 1, 3, 10, 100])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 0.6])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        logit_bias=draw(
            st.one_of(st.none(), st.dictionaries(token, st.floats(-5, 5, width=16), max_size=3))
        ),
        allowed_token_ids=draw(
            st.one_of(st.none(), st.none(), st.lists(token, min_size=3, max_size=15))
        ),
        min_tokens=draw(st.sampled_from([0, 0, 2, 5])),
        max_tokens=16,
        seed=draw(st.integers(0, 2**63)),
    )
    word = st.lists(token, min_size=1, max_size=3).map(tuple)
    return Request(
        request_id=name,
        prompt_token_ids=tuple(draw(st.lists(token, min_size=2, max_size=6))),
        params=params,
        seed=params.seed or 0,
        max_tokens=16,
        sample_index=draw(st.integers(0, 3)),
        min_tokens_ids=frozenset(draw(st.lists(token, max_size=3))),
        bad_words_ids=tuple(draw(st.lists(word, max_size=3))),
    )


@given(data=st.data(), model_seed=st.integers(0, 5))
def test_verification_is_plain_decoding(data: st.DataObject, model_seed: int) -> None:
    model = TableModel(model_seed)
    verifier = Verifier(VOCAB)
    names = [f"r{i}" for i in range(data.draw(st.integers(1, 4)))]
    asked = [data.draw(requests(name)) for name in names]
    count = 8
    plain = [decode(Verifier(VOCAB), model, request, count) for request in asked]
    sequences = [sequence_of(request) for request in asked]
    while any(s.num_output < count for s in sequences):
        spans = []
        for sequence, expected in zip(sequences, plain, strict=True):
            ahead = expected[sequence.num_output :]
            length = data.draw(st.integers(0, 4))
            good = ahead[: data.draw(st.integers(0, length))]
            junk = data.draw(st.lists(st.integers(-1, VOCAB - 1), max_size=length - len(good)))
            spans.append(span_of(sequence, tuple(good + junk)))
        for span, result in zip(spans, verify(verifier, model, spans), strict=True):
            assert result.new_ids[:-1] == span.draft_ids[: result.num_accepted]
            span.sequence.token_ids.extend(result.new_ids)
    for sequence, expected in zip(sequences, plain, strict=True):
        assert sequence.output_ids[:count] == expected
