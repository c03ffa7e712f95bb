"""Matching, standard and block all emit the target's own distribution.

Once by enumeration (acceptance probabilities and residuals of the real functions, summed over all
drafts and outcomes), once by simulation with keyed noise through sampler, draft sampler and
verifier. Simulations have fixed seeds; each test would fail a correct program with probability
below 1e-6 if seeds were drawn anew (Laurent and Massart's bound on the tail of chi-square).
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.models.tensors import Draft, ModelOutput
from foretoken.ops.rejection import acceptable, residual
from foretoken.runtime.batch import Batch
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.verifier import Verifier
from foretoken.types import Request, SamplingParams
from tests.marks import slow
from tests.property.exact import Rows, assert_fits, chain_probs, plain_probs, rows_of, simulate
from tests.property.verifying import sequence_of, span_of


def acceptance(p_V: Tensor, q_V: Tensor | None, token: int) -> float:
    """Measure of the uniforms for which the rule keeps the draft, by bisection."""

    def keeps(uniform: float) -> bool:
        drafted = None if q_V is None else q_V.unsqueeze(0)
        return acceptable(p_V.unsqueeze(0), drafted, [token], [uniform])[0]

    low, high = 0.0, 1.0
    if not keeps(2.0**-53):
        return 0.0
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def after_rejection(p_V: Tensor, q_V: Tensor | None, token: int) -> Tensor:
    drafted = None if q_V is None else q_V.unsqueeze(0)
    logits = residual(p_V.log().unsqueeze(0), p_V.unsqueeze(0), drafted, [token])
    return logits.double().softmax(dim=-1)[0]


def emitted(
    target: Rows, drafter: Rows, prefix: tuple[int, ...], num_drafts: int, one_hot: bool
) -> dict[tuple[int, ...], float]:
    """Exact probabilities of the next num_drafts + 1 tokens, the rest decoded plainly."""
    result: Counter[tuple[int, ...]] = Counter()
    vocab = range(target(prefix).shape[0])

    def plain(history: tuple[int, ...], left: int, weight: float) -> None:
        if left == 0:
            result[history[len(prefix) :]] += weight  # type: ignore[assignment]
            return
        probs = target(history).double()
        for token in vocab:
            if probs[token] > 0:
                plain((*history, token), left - 1, weight * float(probs[token]))

    def checked(history: tuple[int, ...], left: int, weight: float) -> None:
        if left == 0:
            plain(history, 1, weight)
            return
        p_V, drawn_V = target(history), drafter(history)
        q_V = None if one_hot else drawn_V
        for token in vocab:
            drafted = weight * float(drawn_V[token])
            if drafted == 0:
                continue
            keep = acceptance(p_V, q_V, token)
            if keep > 0:
                checked((*history, token), left - 1, drafted * keep)
            if keep < 1 - 1e-12:
                rest_V = after_rejection(p_V, q_V, token)
                for other in vocab:
                    if rest_V[other] > 0:
                        weight_other = drafted * (1 - keep) * float(rest_V[other])
                        plain((*history, other), left, weight_other)

    checked(prefix, num_drafts, 1.0)
    return dict(result)


@pytest.mark.parametrize("kind", ["always", "sometimes", "never", "one_hot"])
@pytest.mark.parametrize(("vocab", "num_drafts"), [(3, 3), (4, 2), (5, 1)])
def test_rejection_is_exact_by_enumeration(kind: str, vocab: int, num_drafts: int) -> None:
    target, drafter = rows_of(kind, vocab, seed=vocab)
    prefix = (0, 1)
    found = emitted(target, drafter, prefix, num_drafts, kind == "one_hot")
    for outcome, expected in plain_probs(target, prefix, num_drafts + 1).items():
        assert found.get(outcome, 0.0) == pytest.approx(expected, abs=2e-6)


CASES = pytest.mark.parametrize(
    ("rule", "method", "k", "seeded"),
    [
        slow("auto", "auto", 0, False),
        ("auto", "auto", 2, False),
        slow("standard", "probabilistic", 2, True),
        slow("standard", "greedy", 2, False),
        slow("auto", "greedy", 2, False),
        ("matching", "auto", 2, False),
        ("block", "probabilistic", 2, True),
        slow("block", "auto", 3, False),
        slow("block", "greedy", 2, False),
        slow("auto", "auto", 2, True),
    ],
)


@CASES
@pytest.mark.parametrize(
    ("given", "samples"),
    [
        ({}, 8000),
        ({"top_k": 3, "presence_penalty": 0.8}, 1500),
        pytest.param({}, 100_000, marks=pytest.mark.slow),
    ],
    ids=["plain", "filters and penalties", "at length"],
)
def test_simulated_tokens_have_the_targets_distribution(
    given: dict[str, Any], samples: int, rule: str, method: str, k: int, seeded: bool
) -> None:
    params = SamplingParams(temperature=1.3, seed=0 if seeded else None, **given)
    counts, model, accepted = simulate(params, rule, method, k, samples)
    assert_fits(counts, chain_probs(model, params))
    assert (accepted > 0) == (k > 0)


def test_one_step_with_a_peaked_drafter() -> None:
    """Most drafts fail and what follows has several candidates: noise may not be shared."""
    samples, vocab = 8000, 6
    q_V = torch.tensor([0.58, 0.20, 0.12, 0.06, 0.03, 0.01])
    verifier, sampler = Verifier(vocab), DraftSampler(Sampler(vocab))
    sequences = [
        sequence_of(
            Request(
                request_id=str(i),
                prompt_token_ids=(0, 1),
                params=SamplingParams(),
                seed=i,
                max_tokens=9,
            )
        )
        for i in range(samples)
    ]
    choice = sampler.choose(q_V.log().expand(samples, vocab), sequences, [[]] * samples)
    spans = [span_of(s, (token,)) for s, token in zip(sequences, choice.ids, strict=True)]
    logits_RV = torch.zeros(2 * samples, vocab)
    draft = Draft(ids=tuple((token,) for token in choice.ids), probs_KV=choice.probs_BV)
    output = ModelOutput(logits_RV=logits_RV, hidden_RD=logits_RV)
    found = verifier.verify(Batch(spans=tuple(spans), draft=draft), output).spans
    counts = Counter(v.new_ids[:1] for v in found if v is not None)
    assert_fits(counts, {(token,): 1 / vocab for token in range(vocab)})
    pairs = Counter(v.new_ids for v in found if v is not None and v.num_accepted)
    kept = {k: min(1 / vocab, float(q_V[k])) for k in range(vocab)}
    both: dict[tuple[int, ...], float] = {
        (a, b): kept[a] / sum(kept.values()) / vocab for a in kept for b in kept
    }
    assert_fits(pairs, both)
