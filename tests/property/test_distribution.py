"""Rejection and matching both emit the target's own distribution.

Once by enumeration (acceptance probabilities and residuals of the real functions, summed over all
drafts and outcomes), once by simulation with keyed noise through sampler, draft sampler and
verifier. Simulations have fixed seeds; each test would fail a correct program with probability
below 1e-6 if seeds were drawn anew (Laurent and Massart's bound on the tail of chi-square).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretoken.models.tensors import Draft, ModelOutput
from foretoken.ops.reject import acceptable, residual
from foretoken.runtime.batch import Batch
from foretoken.runtime.sampler import DraftSampler, Sampler
from foretoken.runtime.verifier import Verifier
from foretoken.types import Request, SamplingParams
from tests.property.verifying import TableModel, sequence_of, span_of, verify

FALSE_ALARM = 1e-6
Rows = Callable[[tuple[int, ...]], Tensor]


def assert_fits(counts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> None:
    """Chi-square of counts against probabilities; rare outcomes are taken together."""
    total = sum(counts.values())
    assert not [key for key in counts if probs.get(key, 0.0) == 0.0], "an impossible outcome"
    rare = [key for key, p in probs.items() if p * total < 10]
    cells = [(counts[key], p * total) for key, p in probs.items() if p * total >= 10]
    if sum(probs[key] for key in rare) * total >= 10:
        cells.append((sum(counts[k] for k in rare), sum(probs[k] for k in rare) * total))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom, x = len(cells) - 1, -math.log(FALSE_ALARM)
    assert freedom > 0
    assert statistic < freedom + 2 * math.sqrt(freedom * x) + 2 * x


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


def rows_of(kind: str, vocab: int, seed: int) -> tuple[Rows, Rows]:
    """A target chain and a drafter that agrees always, sometimes or never with it."""
    model, other = TableModel(seed, vocab), TableModel(seed + 100, vocab)

    def target(history: tuple[int, ...]) -> Tensor:
        probs = model.row(list(history)).softmax(dim=-1)
        if kind == "never":
            probs[: vocab // 2] = 0
        return probs / probs.sum()

    def drafter(history: tuple[int, ...]) -> Tensor:
        if kind == "always":
            return target(history)
        probs = other.row(list(history)).softmax(dim=-1)
        if kind == "never":
            probs[vocab // 2 :] = 0
        if kind == "one_hot":
            probs = torch.nn.functional.one_hot(probs.argmax(), vocab).float()
        return probs / probs.sum()

    return target, drafter


@pytest.mark.parametrize("kind", ["always", "sometimes", "never", "one_hot"])
@pytest.mark.parametrize(("vocab", "num_drafts"), [(3, 3), (4, 2), (5, 1)])
def test_rejection_is_exact_by_enumeration(kind: str, vocab: int, num_drafts: int) -> None:
    target, drafter = rows_of(kind, vocab, seed=vocab)
    prefix = (0, 1)
    found = emitted(target, drafter, prefix, num_drafts, kind == "one_hot")
    for outcome in itertools.product(range(vocab), repeat=num_drafts + 1):
        expected = 1.0
        history: tuple[int, ...] = prefix
        for token in outcome:
            expected *= float(target(history).double()[token])
            history = (*history, token)
        assert found.get(outcome, 0.0) == pytest.approx(expected, abs=2e-6)


VOCAB, LENGTH = 4, 2


def chain_probs(model: TableModel, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probabilities of LENGTH tokens under temperature, presence penalty and top_k, in floats."""
    result = {}
    for outcome in itertools.product(range(VOCAB), repeat=LENGTH):
        weight, history = 1.0, [0, 1]
        for step, token in enumerate(outcome):
            logits = model.row(history).tolist()
            for seen in set(outcome[:step]):
                logits[seen] -= params.presence_penalty
            if params.top_k > 0:
                kth = sorted(logits)[-params.top_k]
                logits = [value if value >= kth else -math.inf for value in logits]
            weights = [math.exp(value / params.temperature) for value in logits]
            weight *= weights[token] / sum(weights)
            history.append(token)
        result[outcome] = weight
    return result


def simulate(
    params: SamplingParams, rule: str, method: str, k: int, samples: int
) -> tuple[Counter[tuple[int, ...]], TableModel, int]:
    """LENGTH tokens of many requests, all at once, speculating with a different model."""
    model, drafter = TableModel(1, VOCAB), TableModel(2, VOCAB)
    verifier = Verifier(VOCAB, rule=rule)
    sampler = DraftSampler(Sampler(VOCAB), rule, method)
    sequences = [
        sequence_of(
            Request(request_id=str(i), prompt_token_ids=(0, 1), params=params, seed=i, max_tokens=9)
        )
        for i in range(samples)
    ]
    accepted = 0
    while active := [s for s in sequences if s.num_output < LENGTH]:
        drafted: list[list[int]] = [[] for _ in active]
        probs = []
        for _ in range(k):
            histories = [[*s.token_ids, *d] for s, d in zip(active, drafted, strict=True)]
            logits_BV = torch.stack([drafter.row(history) for history in histories])
            choice = sampler.choose(logits_BV, active, drafted)
            for tokens, token in zip(drafted, choice.ids, strict=True):
                tokens.append(token)
            if choice.probs_BV is not None:
                probs.append(choice.probs_BV)
        probs_KV = torch.stack(probs, dim=1).flatten(0, 1) if probs else None
        spans = [span_of(s, tuple(d)) for s, d in zip(active, drafted, strict=True)]
        for span, result in zip(spans, verify(verifier, model, spans, probs_KV), strict=True):
            span.sequence.token_ids.extend(result.new_ids)
            accepted += result.num_accepted
    return Counter(tuple(s.output_ids[:LENGTH]) for s in sequences), model, accepted


CASES = pytest.mark.parametrize(
    ("rule", "method", "k", "seeded"),
    [
        ("auto", "auto", 0, False),
        ("auto", "auto", 2, False),
        ("standard", "probabilistic", 2, True),
        ("standard", "greedy", 2, False),
        ("auto", "greedy", 2, False),
        ("matching", "auto", 2, False),
        ("auto", "auto", 2, True),
    ],
)


def check_simulated(params: SamplingParams, case: tuple[str, str, int], samples: int) -> None:
    rule, method, k = case
    counts, model, accepted = simulate(params, rule, method, k, samples)
    assert_fits(counts, chain_probs(model, params))
    assert (accepted > 0) == (k > 0)


@CASES
def test_simulated_tokens_have_the_targets_distribution(
    rule: str, method: str, k: int, seeded: bool
) -> None:
    params = SamplingParams(temperature=1.3, seed=0 if seeded else None)
    check_simulated(params, (rule, method, k), 8000)


@CASES
def test_simulated_tokens_with_filters_and_penalties(
    rule: str, method: str, k: int, seeded: bool
) -> None:
    seed = 0 if seeded else None
    params = SamplingParams(temperature=1.3, top_k=3, presence_penalty=0.8, seed=seed)
    check_simulated(params, (rule, method, k), 1500)


@CASES
@pytest.mark.full
def test_simulated_tokens_at_length(rule: str, method: str, k: int, seeded: bool) -> None:
    params = SamplingParams(temperature=1.3, seed=0 if seeded else None)
    check_simulated(params, (rule, method, k), 100_000)


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
