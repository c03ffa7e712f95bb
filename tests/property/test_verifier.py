"""Verifying K drafts at once gives the tokens that plain decoding gives one by one."""

from hypothesis import given
from hypothesis import strategies as st

from foretoken.runtime.verifier import Verifier
from foretoken.types import Request, SamplingParams
from tests.property.verifying import VOCAB, TableModel, decode, sequence_of, span_of, verify

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
