"""Targets and drafters on tiny vocabularies, and their outputs, exact and simulated.

Simulations have fixed seeds; each test would fail a correct program with probability below
FALSE_ALARM if seeds were drawn anew (Laurent and Massart's bound on the tail of chi-square).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.sampler import Sampler
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
    freedom = len(cells) - 1
    assert freedom > 0
    assert statistic < chi_square_limit(freedom)


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


def plain_probs(target: Rows, prefix: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    vocab, result = range(target(prefix).shape[0]), {}
    for outcome in itertools.product(vocab, repeat=length):
        weight, history = 1.0, prefix
        for token in outcome:
            weight *= float(target(history).double()[token])
            history = (*history, token)
        result[outcome] = weight
    return result


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
    params: SamplingParams,
    rule: str,
    method: str,
    k: int,
    samples: int,
    grammars: Grammars | None = None,
) -> tuple[Counter[tuple[int, ...]], TableModel, int]:
    """LENGTH tokens of many requests, all at once, speculating with a different model."""
    model, drafter = TableModel(1, VOCAB), TableModel(2, VOCAB)
    verifier = Verifier(VOCAB, rule=rule, grammars=grammars)
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


def chi_square_limit(freedom: int) -> float:
    """Exceeded with less probability than FALSE_ALARM (Laurent and Massart 2000)."""
    x = -math.log(FALSE_ALARM)
    return freedom + 2 * math.sqrt(freedom * x) + 2 * x


def assert_alike(
    one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]], *, least_freedom: int
) -> None:
    """Whether two equally large samples can be of one distribution; rare outcomes do not count."""
    statistic, freedom = 0.0, -1
    for outcome in one.keys() | other.keys():
        seen, again = one[outcome], other[outcome]
        if seen + again >= 20:
            statistic += (seen - again) ** 2 / (seen + again)
            freedom += 1
    assert freedom >= least_freedom and statistic < chi_square_limit(freedom)
