"""The audit: one finished request beside plain decoding, and the running test of drawn tokens."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretoken.server.auditor import (
    Compared,
    Comparison,
    FairTokens,
    FinishedRequest,
    Promise,
    Samples,
    score,
)
from foretoken.types import (
    FinishReason,
    Logprob,
    Output,
    Request,
    RequestMetrics,
    SamplingParams,
    Speculation,
)

ROW = {7: Logprob(-0.5, 1), 8: Logprob(-0.6, 2), 9: Logprob(-4.0, 3)}


def request(name: str = "r", **params: Any) -> Request:
    wanted = SamplingParams(max_tokens=8, **params)
    return Request(
        request_id=name, prompt_token_ids=(1, 2), params=wanted, seed=5, max_tokens=8, priority=1
    )


class Plain:
    """Plain decoding that answers what it was told to."""

    def __init__(self, *answers: Sequence[int]) -> None:
        self.answers = list(answers)
        self.asked: list[Request] = []

    async def __call__(self, asked: Request) -> list[Output]:
        self.asked.append(asked)
        ids = self.answers[min(len(self.asked), len(self.answers)) - 1]
        return [Output(request_id="a", new_token_ids=tuple(ids), logprobs=(ROW,) * len(ids))]


def compare(plain: Plain, sample: FinishedRequest, *, exact: bool = True) -> Compared:
    return asyncio.run(Comparison(plain, Promise(exact)).compare(sample))


def test_greedy_tokens_are_compared_one_by_one() -> None:
    sample = FinishedRequest(request(temperature=0), (7, 7, 8))
    plain = Plain([7, 7, 8])
    assert compare(plain, sample).outcome == "same"
    [asked] = plain.asked
    assert asked.params.own_policy == Speculation(enabled=False)
    assert (asked.prompt_token_ids, asked.seed, asked.priority) == ((1, 2), 5, 1)
    found = compare(Plain([7, 7, 7]), sample)
    assert found.outcome == "differs"
    assert "token 3 of 3 of request r is 8, plain decoding gives 7" in found.said
    assert compare(Plain([7, 7, 8, 9]), sample).outcome == "differs"


def test_a_difference_must_be_there_twice() -> None:
    plain = Plain([7, 7, 7], [7, 8, 7])
    assert compare(plain, FinishedRequest(request(temperature=0), (7, 7, 8))).outcome == "unsteady"
    assert len(plain.asked) == 2


def test_rounding_excuses_near_ties_only() -> None:
    near, far = (7, 8), (7, 9)
    greedy = request(temperature=0)
    assert compare(Plain([7, 7]), FinishedRequest(greedy, near), exact=False).outcome == "near_tie"
    assert compare(Plain([7, 7]), FinishedRequest(greedy, far), exact=False).outcome == "differs"
    assert compare(Plain([7, 7]), FinishedRequest(greedy, near)).outcome == "differs"


@pytest.mark.parametrize("exact", [True, False])
def test_seeded_tokens_are_promised_where_bits_are(exact: bool) -> None:
    plain = Plain([7])
    found = compare(plain, FinishedRequest(request(temperature=1, seed=3), (7,) * 8), exact=exact)
    assert found.outcome == ("differs" if exact else "drawn")


def test_seeded_tokens_are_not_promised_by_every_rule() -> None:
    promise = Promise(exact=True, rule="block")
    assert not promise.has_one_answer(SamplingParams(seed=3))
    assert promise.has_one_answer(SamplingParams(temperature=0))


def test_other_tokens_are_drawn_again_at_their_place() -> None:
    given = (9, 9, 9, 9, 9, 9, 9, 9)
    plain = Plain([7])
    found = compare(plain, FinishedRequest(request(temperature=1, stop=["x"]), given))
    assert found.outcome == "drawn"
    assert found.differences == (-3.5,) * len(plain.asked) and 2 <= len(plain.asked) <= 3
    for asked in plain.asked:
        assert asked.max_tokens == len(asked.resumed_ids) + 1 and not asked.params.stop
        assert asked.prompt_token_ids == (1, 2)
        assert asked.resumed_ids == given[: len(asked.resumed_ids)]
        assert asked.seed != 5
    lengths = [len(asked.resumed_ids) for asked in plain.asked]
    assert lengths == list(range(lengths[0], 8, 3)) and lengths[0] >= 1


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.1}, {"repetition_penalty": 1.1}, {"min_tokens": 2},
        {"bad_words": ["x"]}, {"structured_outputs": {"regex": "a+"}},
    ],
)  # fmt: skip
def test_what_looks_back_finds_its_output(params: dict[str, Any]) -> None:
    """Also where another engine wrote the beginning of it."""
    begun = replace(request("r", temperature=1, **params), resumed_ids=(8, 8))
    plain = Plain([7])
    found = compare(plain, FinishedRequest(begun, (9,) * 4))
    assert found.outcome == "drawn" and plain.asked
    for asked in plain.asked:
        assert asked.resumed_ids == (8, 8, 9, 9, 9)[: len(asked.resumed_ids)]
        assert asked.max_tokens == len(asked.resumed_ids) + 1 > 3
        assert asked.params.min_tokens == begun.params.min_tokens


def test_tokens_beyond_the_likeliest_count_alike() -> None:
    row = ROW | {30: Logprob(-9.0, 21)}
    assert score(30, row) == score(31, row) == -5.0
    assert math.isclose(score(8, row), -0.6)


def ended(name: str, reason: FinishReason, drafted: tuple[int, ...] = (3,)) -> Output:
    metrics = RequestMetrics(
        queued_s=0, first_token_s=0, finished_s=0, num_preemptions=0, num_cached_tokens=0,
        drafted_per_step=drafted, accepted_per_step=tuple(0 for _ in drafted),
    )  # fmt: skip
    return Output(request_id=name, new_token_ids=(4,), finish_reason=reason, metrics=metrics)


def test_whole_answers_that_were_drafted_for_are_kept() -> None:
    samples = Samples(1.0)
    samples.opened([request(name) for name in "abcd"])
    samples.opened([request("e", speculation={"enabled": False})])
    assert not samples.observe([Output(request_id="a", new_token_ids=(3,))])
    assert samples.observe([ended("a", FinishReason.STOP), ended("b", FinishReason.ABORT)])
    assert not samples.observe([ended("c", FinishReason.LENGTH, ()), ended("e", FinishReason.STOP)])
    assert [(s.request.request_id, s.token_ids) for s in samples.waiting] == [("a", (3, 4))]
    for i in range(100):
        samples.opened([request(f"x{i}")])
        samples.observe([ended(f"x{i}", FinishReason.LENGTH)])
    assert len(samples.waiting) == 64 and samples.num_left_out == 37


def test_a_share_is_chosen() -> None:
    samples = Samples(0.1)
    for i in range(2000):
        samples.opened([request(f"x{i}")])
        samples.observe([ended(f"x{i}", FinishReason.LENGTH)])
    assert 130 <= len(samples.waiting) + samples.num_left_out <= 275, "5 standard deviations"


def run(given: np.ndarray, drawn: np.ndarray, logs: np.ndarray, error: float) -> FairTokens:
    test = FairTokens(error)
    for x, y in zip(given, drawn, strict=True):
        test.add(float(logs[x] - logs[y]))
        if test.failed:
            break
    return test


@pytest.mark.slow
def test_alike_tokens_are_seldom_accused() -> None:
    """400 tests of 2,000 tokens at 5%, asked after each token: 20 are allowed, and 33 happen to a
    test of exactly 5% once in 400 times."""
    rng = np.random.default_rng(0)
    accused = 0
    for _ in range(400):
        chances = rng.dirichlet(np.full(30, 0.2)) + 1e-9
        chances /= chances.sum()
        given, drawn = rng.choice(30, (2, 2000), p=chances)
        accused += run(given, drawn, np.log(chances), 0.05).failed
    assert accused <= 33


def test_a_share_of_unverified_drafts_is_found() -> None:
    """One token in five is a draft that nobody checked, in fifty contexts in turn."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        test = FairTokens()
        logits_C30 = rng.normal(0, 2, (50, 30))
        other_C30 = 0.6 * logits_C30 + 0.8 * rng.normal(0, 2, (50, 30))
        for i in range(20_000):
            logits, other = logits_C30[i % 50], other_C30[i % 50]
            drafted = other if rng.random() < 0.2 else logits
            given = np.argmax(drafted + rng.gumbel(size=30))
            drawn = np.argmax(logits + rng.gumbel(size=30))
            test.add(float(logits[given] - logits[drawn]))
            if test.failed:
                break
        assert test.failed, test.evidence
        assert test.mean < 0


def test_one_token_proves_nothing() -> None:
    test = FairTokens()
    test.add(-50.0)
    assert not test.failed and 0.5 < test.evidence < 2.0
