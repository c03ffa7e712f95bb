"""Typical and synthetic acceptance do exactly what their settings say, and say that they do it."""

from collections import Counter

import pytest
import torch

from foretoken.config.speculative import RuleConfig
from foretoken.ops.noise import KeyedNoise, Stream, pack_keys, request_key, row_key
from foretoken.ops.sampling import draw
from foretoken.runtime.rules import RuleSettings
from foretoken.runtime.verifier import SpanVerification, Verifier
from foretoken.types import Request, SamplingParams
from tests.marks import slow_but
from tests.property.exact import assert_fits
from tests.property.verifying import TableModel, sequence_of, span_of, verify

VOCAB, K = 6, 3


def results(
    rule: str, settings: RuleSettings, params: SamplingParams, drafts: tuple[int, ...], count: int
) -> list[SpanVerification]:
    verifier = Verifier(VOCAB, rule=rule, settings=settings)
    spans = [
        span_of(
            sequence_of(
                Request(
                    request_id=str(i), prompt_token_ids=(0, 1), params=params, seed=i, max_tokens=9
                )
            ),
            drafts,
        )
        for i in range(count)
    ]
    return verify(verifier, TableModel(1, VOCAB), spans)


@pytest.mark.parametrize(
    ("rates", "length"), [((0.9, 0.5, 0.2), None), (None, 2.4), (None, 1.0), (None, 4.0)]
)
@pytest.mark.parametrize("temperature", slow_but([0.0, 1.0], 1.0))
def test_synthetic_rates(
    rates: tuple[float, ...] | None, length: float | None, temperature: float
) -> None:
    rule = RuleConfig(
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=rates,
        synthetic_acceptance_length=length,
    )
    expected_rates = rule.synthetic_rates(K)
    settings = RuleSettings(synthetic_rates=expected_rates)
    params = SamplingParams(temperature=temperature)
    found = results("synthetic", settings, params, (5, 5, 5), 3000)
    assert not any(result.valid for result in found)
    counts: Counter[tuple[int, ...]] = Counter((result.num_accepted,) for result in found)
    survival = (1.0, *expected_rates, 0.0)
    expected: dict[tuple[int, ...], float] = {
        (i,): survival[i] - survival[i + 1] for i in range(K + 1)
    }
    if max(expected.values()) == 1:
        assert counts == {max(expected, key=lambda key: expected[key]): 3000}
    else:
        assert_fits(counts, expected)
    if length is not None:
        mean = sum(result.num_accepted for result in found) / 3000 + 1
        assert mean == pytest.approx(length, abs=0.06)
        kept = {result.num_accepted for result in found}
        assert len(kept) <= 2, "least variance: the two whole numbers around the length"
    assert found == results("synthetic", settings, params, (5, 5, 5), 3000), "not reproducible"


def test_synthetic_keeps_no_placeholder() -> None:
    settings = RuleSettings(synthetic_rates=(1.0, 1.0, 1.0))
    (result,) = results("synthetic", settings, SamplingParams(), (5, -1, 5), 1)
    assert result.num_accepted == 1


@pytest.mark.parametrize("drafts", [(0, 1, 2), (3, 3, 3), (5, 4, 3), (-1, 1, 1)])
def test_typical_keeps_what_is_probable_and_then_draws(drafts: tuple[int, ...]) -> None:
    """The number kept is a function of the rows; the token after it is the target's own draw."""
    settings = RuleSettings(posterior_threshold=0.2, posterior_alpha=0.5)
    rows = TableModel(1, VOCAB).rows([0, 1], drafts)
    probs = (rows.double() / 1.5).softmax(dim=-1)
    kept = 0
    for i, token in enumerate(drafts):
        entropy = -(probs[i] * (probs[i] + 1e-5).log()).sum()
        if token < 0 or probs[i, token] <= min(0.2, 0.5 * float((-entropy).exp())):
            break
        kept += 1
    noise = KeyedNoise(VOCAB, torch.device("cpu"))
    found = results("typical", settings, SamplingParams(temperature=1.5), drafts, 50)
    for seed, result in enumerate(found):
        assert result.valid and result.new_ids[:-1] == drafts[:kept]
        keys = pack_keys(
            [row_key(request_key(seed, 0), 2 + kept, Stream.TARGET)], torch.device("cpu")
        )
        own = draw((rows[kept] / 1.5).unsqueeze(0), keys, noise)
        assert result.new_ids[-1] == int(own)


def test_typical_is_exact_for_greedy_requests() -> None:
    rows = TableModel(1, VOCAB).rows([0, 1], ())
    best = int(rows[0].argmax())
    second = int(rows[0].topk(2).indices[1])
    settings = RuleSettings(posterior_threshold=0.01, posterior_alpha=0.01)
    (result,) = results("typical", settings, SamplingParams(temperature=0), (second,), 1)
    assert result.new_ids == (best,)
