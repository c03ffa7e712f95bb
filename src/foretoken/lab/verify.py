"""Is a server's speculation lossless, seen from outside? Equal texts, and equal distributions.

Greedy and seeded requests must give the same text with speculation on and off; where they first
differ, a near-tie of the two likeliest tokens is an excuse that is counted by itself, never added
to the equal ones. Sampling is compared as a whole: many short unseeded samples of each prompt from
both arms, and a permutation test on their counts, per set of sampling parameters, Holm-corrected.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.lab.answers import ReadingOptions
from foretoken.lab.client import Client
from foretoken.lab.http1 import now
from foretoken.lab.results import RequestRecord
from foretoken.lab.statistics_ratio import Ints
from foretoken.lab.workload import Item

PERMUTATIONS = 2000
NEAR_TIE = 0.02
"""Difference of log-probabilities below which the order of two tokens may turn with the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """How much is asked."""

    max_tokens: int = 48
    samples: int = 200
    """Per prompt, arm and set of parameters."""
    sample_tokens: int = 3
    sample_prompts: int = 2
    concurrency: int = 8
    error: float = 0.01
    """Chance of a false alarm over all distribution tests together."""
    parameters: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCheck:
    """Texts of requests that must be the same."""

    kind: str
    """greedy or seeded."""
    compared: int
    equal: int
    excused: int
    """Different, first at a near-tie."""
    different: int
    failed: int
    """Without an answer from one of the arms."""
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionCheck:
    """One set of sampling parameters."""

    parameters: dict[str, Any]
    samples: int
    """Per arm, over prompts."""
    distance: float
    """Total variation between the arms' samples; chance alone gives `expected`."""
    expected: float
    p_value: float
    passed: bool
    refused: str | None = None
    """What an arm said, if it takes no such parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The verdict of the kit."""

    texts: tuple[TextCheck, ...]
    distributions: tuple[DistributionCheck, ...]

    @property
    def lossless(self) -> bool:
        """Nothing differs that is not excused, and something was compared."""
        compared = sum(check.compared for check in self.texts)
        texts = all(check.different == 0 for check in self.texts)
        done = all(check.passed for check in self.distributions if check.refused is None)
        return compared > 0 and texts and done


async def verify(off: Client, on: Client, prompts: Sequence[str], plan: VerifyPlan) -> Verified:
    """Both kinds of checks of two running servers."""
    texts = [await _check_texts(off, on, prompts, plan, kind) for kind in ("greedy", "seeded")]
    found = [await _check_distribution(off, on, prompts, plan, p) for p in plan.parameters]
    return Verified(texts=tuple(texts), distributions=_holm(found, plan.error))


async def _ask(client: Client, items: Sequence[Item], plan: VerifyPlan) -> list[RequestRecord]:
    options = ReadingOptions(start_s=now(), keep_text=True)
    gate = asyncio.Semaphore(plan.concurrency)

    async def one(item: Item) -> RequestRecord:
        async with gate:
            return await client.complete(item, RequestRecord(index=item.index), options)

    return list(await asyncio.gather(*(one(item) for item in items)))


async def _check_texts(
    off: Client, on: Client, prompts: Sequence[str], plan: VerifyPlan, kind: str
) -> TextCheck:
    settings: dict[str, Any] = (
        {"temperature": 0.0} if kind == "greedy" else {"temperature": 0.8, "seed": 1234}
    )
    items = [
        Item(index=i, prompt=prompt, max_tokens=plan.max_tokens, **settings)
        for i, prompt in enumerate(prompts)
    ]
    pairs = list(zip(*[await _ask(arm, items, plan) for arm in (off, on)], strict=True))
    whole = [(a, b) for a, b in pairs if a.ok and b.ok]
    unequal = [(a, b) for a, b in whole if a.text != b.text]
    excuses = [await _excuse(off, items[a.index], a, b) for a, b in unequal]
    examples = [
        f"prompt {a.index}: {text}" for (a, _), (text, _) in zip(unequal, excuses, strict=True)
    ]
    excused = sum(kind == "greedy" and near for _, near in excuses)
    return TextCheck(
        kind=kind,
        compared=len(whole),
        equal=len(whole) - len(unequal),
        excused=excused,
        different=len(unequal) - excused,
        failed=len(pairs) - len(whole),
        examples=tuple(examples[:5]),
    )


async def _excuse(off: Client, item: Item, a: RequestRecord, b: RequestRecord) -> tuple[str, bool]:
    """Where two texts part, and whether the two likeliest tokens were nearly tied there."""
    texts = a.text or "", b.text or ""
    at = next(
        (i for i, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), min(map(len, texts))
    )
    gap = await top_gap(off, item.prompt + texts[0][:at])
    where = f"differs after {at} characters"
    if gap is None:
        return f"{where}; the server gives no log-probabilities", False
    near = gap < NEAR_TIE
    word = "near-tie" if near else "no near-tie"
    return f"{where}; {word}: the likeliest two are {gap:.4f} apart", near


async def top_gap(client: Client, prompt: str) -> float | None:
    """Difference of the log-probabilities of the two likeliest next tokens; None if not told."""
    body = {"model": client.info.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0,
            "logprobs": 2}  # fmt: skip
    payload = json.dumps(body).encode()
    answer = await client.pool.send("POST", "/v1/completions", payload, timeout_s=60.0)
    if answer.status != 200 or answer.broken is not None:
        return None
    try:
        top = json.loads(answer.body)["choices"][0]["logprobs"]["top_logprobs"][0]
        values = sorted((float(v) for v in top.values()), reverse=True)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    return values[0] - values[1] if len(values) > 1 else None


async def _check_distribution(
    off: Client, on: Client, prompts: Sequence[str], plan: VerifyPlan, given: Mapping[str, Any]
) -> DistributionCheck:
    rest = {name: value for name, value in given.items() if name != "temperature"}
    chosen = list(prompts[: plan.sample_prompts])
    items = [
        Item(
            index=i,
            prompt=prompt,
            max_tokens=plan.sample_tokens,
            temperature=given.get("temperature", 1.0),
            parameters=rest,
        )
        for i, prompt in enumerate(chosen * plan.samples)
    ]
    arms = [await _ask(arm, items, plan) for arm in (off, on)]
    errors = [r.error for records in arms for r in records if not r.ok]
    if errors:
        return _refused(given, str(errors[0]))
    counts = [
        [[r.text or "" for r in records[i :: len(chosen)]] for records in arms]
        for i in range(len(chosen))
    ]
    distance, expected, p_value = compare_samples(counts)
    return DistributionCheck(
        parameters=dict(given),
        samples=len(items),
        distance=distance,
        expected=expected,
        p_value=p_value,
        passed=True,
    )


def _refused(given: Mapping[str, Any], error: str) -> DistributionCheck:
    return DistributionCheck(
        parameters=dict(given), samples=0, distance=math.nan, expected=math.nan, p_value=math.nan,
        passed=False, refused=error,
    )  # fmt: skip


def compare_samples(
    samples: Sequence[Sequence[Sequence[str]]], *, seed: int = 0
) -> tuple[float, float, float]:
    """Total variation between two arms' texts, what chance gives, and the permutation p-value.

    `samples[prompt][arm]` are texts. Labels are shuffled within prompts, so that the p-value holds
    whatever the distribution is (Good 2005).
    """
    rng = np.random.default_rng(seed)
    tables = [_codes(pair) for pair in samples]
    real = float(np.mean([_distance(codes, arms, size) for codes, arms, size in tables]))
    shuffled = np.array(
        [
            np.mean([_distance(codes, rng.permutation(arms), size) for codes, arms, size in tables])
            for _ in range(PERMUTATIONS)
        ]
    )
    p_value = (1 + int((shuffled >= real - 1e-12).sum())) / (1 + PERMUTATIONS)
    return real, float(shuffled.mean()), p_value


def _codes(pair: Sequence[Sequence[str]]) -> tuple[Ints, Ints, int]:
    """Texts as numbers, the arm of each, and how many different texts there are."""
    names = {text: i for i, text in enumerate(Counter(pair[0]) | Counter(pair[1]))}
    codes = np.array([names[text] for arm in pair for text in arm])
    arms = np.repeat([0, 1], [len(pair[0]), len(pair[1])])
    return codes, arms, len(names)


def _distance(codes: Ints, arms: Ints, size: int) -> float:
    one = np.bincount(codes[arms == 0], minlength=size)
    other = np.bincount(codes[arms == 1], minlength=size)
    return float(np.abs(one / max(one.sum(), 1) - other / max(other.sum(), 1)).sum() / 2)


def _holm(found: Sequence[DistributionCheck], error: float) -> tuple[DistributionCheck, ...]:
    """Holm's step-down procedure (1979) over the tests that were made."""
    tested = sorted((c for c in found if c.refused is None), key=lambda c: c.p_value)
    failed: list[int] = []
    for place, check in enumerate(tested):
        if check.p_value > error / (len(tested) - place):
            break
        failed.append(id(check))
    return tuple(
        check if check.refused is not None else replace(check, passed=id(check) not in failed)
        for check in found
    )
