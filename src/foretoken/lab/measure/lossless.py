"""Is a server's speculation lossless, seen from outside? Equal texts, and equal distributions.

A `VerifyPlan` says how many prompts and samples are asked for, and with which sampling parameters.
Greedy and seeded requests must give the same text with speculation on and off; where they first
differ, a near-tie of the two likeliest tokens is an excuse that is counted by itself, never added
to the equal ones. Sampling is compared as a whole, per set of sampling parameters: many short
unseeded samples of each prompt from both arms. Knows two running servers, no files.
"""

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from foretoken.config.reader import Allowed, at_least, check_fields
from foretoken.lab.http.client import Client
from foretoken.lab.http.read_answer import ReadingOptions
from foretoken.lab.http.timed import TransportError, now
from foretoken.lab.measure.rounding import LEAST, near_tie
from foretoken.lab.measure.workload import Item
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.permutation import compare_samples, holm_rejects

KINDS = ("greedy", "seeded")
_TIE_PROMPTS, _TOPS = 8, 5
"""Prompts, and likeliest tokens of each, that tell how a server's numbers are rounded."""
_MOST_PARTINGS = 8
"""Times that a server is asked to go on as it went before."""
_SAME_SEEDS = ("foretoken", "mock")
"""Engines that promise the same seeded answers with and without speculation."""


def _is_chance(value: float) -> bool:
    return 0.0 < value < 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPlan:
    """How much is asked."""

    prompts: Annotated[int, at_least(1)] = 20
    """Whose texts are compared."""
    max_tokens: Annotated[int, at_least(1)] = 48
    samples: Annotated[int, at_least(1)] = 200
    """Per prompt, arm and set of parameters."""
    sample_tokens: Annotated[int, at_least(1)] = 3
    sample_prompts: Annotated[int, at_least(1)] = 2
    concurrency: Annotated[int, at_least(1)] = 8
    error: Annotated[float, Allowed("a chance between 0 and 1", _is_chance)] = 0.01
    """Chance of a false alarm over all distribution tests together."""
    parameters: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    )

    def __post_init__(self) -> None:
        """Raise a ConfigError for what is out of range."""
        check_fields(self, "plan.")

    def checks(self) -> list[tuple[str, int]]:
        """Every check in its order, and how many answers it asks for."""
        texts = [(kind, 2 * self.prompts) for kind in KINDS]
        each = 2 * self.samples * min(self.sample_prompts, self.prompts)
        return texts + [(describe(parameters), each) for parameters in self.parameters]


def describe(parameters: Mapping[str, Any]) -> str:
    """A set of parameters in words."""
    return ", ".join(f"{name} {value}" for name, value in parameters.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCheck:
    """Texts of requests that must be the same."""

    kind: str
    """One of KINDS."""
    compared: int
    equal: int
    excused: int
    """Different, first at a near-tie."""
    different: int
    failed: int
    """Without an answer from one of the arms."""
    promised: bool = True
    """Whether the servers say that these texts are the same."""
    examples: tuple[str, ...] = ()
    near_tie: float = LEAST
    """Difference of log-probabilities up to which the order of two tokens may be rounding's."""


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
    failed: int = 0
    """Answers that did not come."""
    refused: str | None = None
    """What an arm said, if it takes no such parameters, or answers nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What the checks found."""

    texts: tuple[TextCheck, ...] = ()
    distributions: tuple[DistributionCheck, ...] = ()

    @property
    def compared(self) -> int:
        """Pairs of texts that there were."""
        return sum(check.compared for check in self.texts)

    @property
    def lossless(self) -> bool:
        """Nothing that was promised differs without an excuse, and something was compared."""
        texts = all(check.different == 0 for check in self.texts if check.promised)
        done = all(check.passed for check in self.distributions if check.refused is None)
        return self.compared > 0 and texts and done


def promises_seeds(off: Client | None, on: Client | None) -> bool:
    """Whether two servers are of one engine whose seeded answers speculation does not change."""
    if off is None or on is None:
        return False
    return off.info.engine == on.info.engine and on.info.engine in _SAME_SEEDS


def _ignore(*_: object) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFollower:
    """Who is told how far it is."""

    began: Callable[[str, int], None] = _ignore
    """A check begins: its name, and how many answers it asks for."""
    answered: Callable[[], None] = _ignore
    checked: Callable[[Verified], None] = _ignore
    """A check has ended: all that there are so far."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    off: Client
    on: Client
    prompts: Sequence[str]
    plan: VerifyPlan
    follow: VerifyFollower


async def verify(
    arms: tuple[Client, Client],
    prompts: Sequence[str],
    plan: VerifyPlan,
    *,
    done: Verified | None = None,
    follow: VerifyFollower | None = None,
) -> Verified:
    """Both kinds of checks of two running servers, off and on; those in `done` are not repeated."""
    both = _Comparison(*arms, list(prompts[: plan.prompts]), plan, follow or VerifyFollower())
    found = done or Verified()
    sizes = plan.checks()
    for kind in KINDS[len(found.texts) :]:
        both.follow.began(*sizes[len(found.texts)])
        found = replace(found, texts=(*found.texts, await _check_texts(both, kind)))
        both.follow.checked(found)
    if len(found.distributions) < len(plan.parameters):
        await _part(both)
    for given in plan.parameters[len(found.distributions) :]:
        both.follow.began(*sizes[len(KINDS) + len(found.distributions)])
        checks = (*found.distributions, await _check_distribution(both, given))
        found = replace(found, distributions=_corrected(checks, plan.error))
        both.follow.checked(found)
    return found


async def _ask(both: _Comparison, client: Client, items: Sequence[Item]) -> list[RequestRecord]:
    options = ReadingOptions(start_s=now(), keep_text=True)
    gate = asyncio.Semaphore(both.plan.concurrency)

    async def one(item: Item) -> RequestRecord:
        async with gate:
            record = await client.complete(item, RequestRecord(index=item.index), options)
        both.follow.answered()
        return record

    return list(await asyncio.gather(*(one(item) for item in items)))


async def _check_texts(both: _Comparison, kind: str) -> TextCheck:
    settings: dict[str, Any] = (
        {"temperature": 0.0} if kind == "greedy" else {"temperature": 0.8, "seed": 1234}
    )
    items = [
        Item(index=i, prompt=prompt, max_tokens=both.plan.max_tokens, **settings)
        for i, prompt in enumerate(both.prompts)
    ]
    pairs = list(zip(*[await _ask(both, arm, items) for arm in (both.off, both.on)], strict=True))
    whole = [(a, b) for a, b in pairs if a.ok and b.ok]
    unequal = [(a, b) for a, b in whole if a.text != b.text]
    tie = await _near_tie(both) if unequal else LEAST
    excuses = [await _excuse(both.off, items[a.index], (a, b), tie) for a, b in unequal]
    examples = [
        f"prompt {a.index}: {text}" for (a, _), (text, _) in zip(unequal, excuses, strict=True)
    ]
    broken = [r.error or "no text" for pair in pairs for r in pair if not r.ok]
    excused = sum(kind == "greedy" and near for _, near in excuses)
    return TextCheck(
        kind=kind,
        compared=len(whole),
        equal=len(whole) - len(unequal),
        excused=excused,
        different=len(unequal) - excused,
        failed=len(pairs) - len(whole),
        promised=kind != "seeded" or promises_seeds(both.off, both.on),
        examples=(*examples[:5], *broken[:1]),
        near_tie=tie,
    )


async def _near_tie(both: _Comparison) -> float:
    """How near two tokens are that rounding may exchange, as the first arm's numbers tell."""
    chosen = both.prompts[:_TIE_PROMPTS]
    alone = [await _told(both.off, prompt, 1) for prompt in chosen]
    together = await asyncio.gather(*(_told(both.off, prompt, 1) for prompt in chosen))
    once, again = (
        [list(tops.values()) for answer in told for _, tops in answer] for told in (alone, together)
    )
    return near_tie(once, again)


async def _excuse(
    off: Client, item: Item, pair: tuple[RequestRecord, RequestRecord], tie: float
) -> tuple[str, bool]:
    """Where two texts part, and whether the tokens that they go on with were nearly tied there."""
    mine, other = pair[0].text or "", pair[1].text or ""
    at = next(
        (i for i, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y),
        min(len(mine), len(other)),
    )
    where = f"differs after {at} characters"
    found = await _parting(off, item, mine, at)
    if found is None:
        return f"{where}; the server gives no log-probabilities of what it wrote", False
    begin, token, tops = found
    others = [name for name in tops if name != token]
    instead = _fitting(others, other, begin)
    gap = tops[token] - (min(tops.values()) if instead is None else tops[instead])
    near = instead is not None and gap <= tie
    said = f"{'' if instead else 'more than '}{gap:.4f} apart, rounding explains {tie:.4f}"
    return f"{where}; {'near-tie' if near else 'no near-tie'}: the two are {said}", near


async def _parting(
    off: Client, item: Item, text: str, at: int
) -> tuple[int, str, dict[str, float]] | None:
    """The token of `text` that holds the character `at`: where it begins, itself, and the
    likeliest ones there; None if the server does not tell.

    A server that goes another way when it is asked again is asked to go on from there.
    """
    begin = 0
    for _ in range(_MOST_PARTINGS):
        told = await _told(off, item.prompt + text[:begin], item.max_tokens)
        for written, tops in told:
            token = written if text.startswith(written, begin) else _fitting(tops, text, begin)
            if token is None or token not in tops:
                return None
            if begin + len(token) > at:
                return begin, token, tops
            begin += len(token)
            if token != written:
                break
    return None


def _fitting(tokens: Iterable[str], text: str, begin: int) -> str | None:
    """The longest of `tokens` that `text` goes on with."""
    found = [token for token in tokens if token and text.startswith(token, begin)]
    return max(found, key=len, default=None)


async def _told(client: Client, prompt: str, count: int) -> list[tuple[str, dict[str, float]]]:
    """The likeliest continuation: tokens, each with the log-probabilities of the likeliest; none if
    they are not told."""
    body = {"model": client.info.model, "prompt": prompt, "max_tokens": count, "temperature": 0.0,
            "logprobs": _TOPS}  # fmt: skip
    payload = json.dumps(body).encode()
    try:
        answer = await client.pool.send("POST", "/v1/completions", payload, timeout_s=60.0)
        told = json.loads(answer.body)["choices"][0]["logprobs"]
        pairs = zip(told["tokens"], told["top_logprobs"], strict=True)
        return [(str(t), {n: float(v) for n, v in tops.items()}) for t, tops in pairs]
    except (TransportError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return []


async def _part(both: _Comparison) -> None:
    """Ask the first arm alone for as many answers as a check takes.

    A server that draws by the number of a request would else draw the same in both arms, and what
    is alike by that would hide a difference.
    """
    chosen = both.prompts[: both.plan.sample_prompts]
    items = [
        Item(index=i, prompt=prompt, max_tokens=1, temperature=1.0)
        for i, prompt in enumerate([*chosen] * both.plan.samples)
    ]
    await _ask(replace(both, follow=VerifyFollower()), both.off, items)


async def _check_distribution(both: _Comparison, given: Mapping[str, Any]) -> DistributionCheck:
    rest = {name: value for name, value in given.items() if name != "temperature"}
    chosen = both.prompts[: both.plan.sample_prompts]
    items = [
        Item(
            index=i,
            prompt=prompt,
            max_tokens=both.plan.sample_tokens,
            temperature=given.get("temperature", 1.0),
            parameters=rest,
        )
        for i, prompt in enumerate([*chosen] * both.plan.samples)
    ]
    arms = [await _ask(both, arm, items) for arm in (both.off, both.on)]
    errors = [r.error or "no text" for records in arms for r in records if not r.ok]
    refused = next((error for error in errors if error.startswith("refused")), None)
    counts = [
        [[r.text or "" for r in records[i :: len(chosen)] if r.ok] for records in arms]
        for i in range(len(chosen))
    ]
    if refused is not None or not all(texts for pair in counts for texts in pair):
        return _untested(given, refused or errors[0], len(errors))
    distance, expected, p_value = compare_samples(counts)
    return DistributionCheck(
        parameters=dict(given),
        samples=len(items),
        distance=distance,
        expected=expected,
        p_value=p_value,
        passed=True,
        failed=len(errors),
    )


def _untested(given: Mapping[str, Any], error: str, failed: int) -> DistributionCheck:
    return DistributionCheck(
        parameters=dict(given), samples=0, distance=math.nan, expected=math.nan, p_value=math.nan,
        passed=False, failed=failed, refused=error,
    )  # fmt: skip


def _corrected(found: Sequence[DistributionCheck], error: float) -> tuple[DistributionCheck, ...]:
    """Passed or not, over all tests that were made."""
    rejected = iter(holm_rejects([c.p_value for c in found if c.refused is None], error))
    return tuple(
        check if check.refused is not None else replace(check, passed=not next(rejected))
        for check in found
    )
