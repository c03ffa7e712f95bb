"""Does an answer repeat what the prompt has? The prompt is the truth, so no other server is needed.

A list of opaque identifiers is to be written once more: near-twins, numbers, hashes, paths, words
of several scripts. A draft that was accepted wrongly, or a page of another request, shows in them,
where prose would hide it. A model may be too small to copy: what was altered is asked for again
one token at a time, which no draft stands for, and counts where the same server then writes it
right, beyond rounding.

Drawn answers may alter an identifier by chance. Each place's chance of that is told by the
log-probabilities. At places that are sure, more than they explain is a fault (Chernoff's bound for
independent events of different chances); with plain decoding at hand, all rates are compared too.
"""

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foretoken.lab.audit.asking import Case, Reply
from foretoken.lab.audit.judging import (
    ERROR,
    FINE,
    EndedLook,
    Look,
    Sides,
    answered,
    compare_means,
)
from foretoken.lab.audit.rounding import common, divergence

LINES = 10
"""Identifiers of a list."""
COPY_TOKENS = 180
"""Room for an answer; what does not fit is not judged."""
SURE = 1.0
"""Difference of log-probabilities that no rounding makes: twice the widest near-tie."""
_HEAD = re.compile(r"(\d\d) =")
_LINE_TOKENS = 40
_SURE = 0.02
"""Chance of another token, at places that count by their log-probabilities."""
_LEAST = 1e-6
"""Chance of another token, where log-probabilities come rounded to 0."""
_NAMES = ("kimi-k3", "qwen-3.8", "mixtrel-8x7", "gemna-4", "lama-3.3", "deepsink-v4")
_SCRIPTS = (
    "\u0443\u0437\u0435\u043b",
    "\u043a\u043b\u044e\u0447",
    "\u03ba\u03cc\u03bc\u03b2\u03bf\u03c2",
    "\u7bc0\u70b9",
    "\u9375\u76e4",
    "\ub178\ub4dc",
    "\u0917\u0923\u0915",
    "\u0639\u0642\u062f\u0629",
    "st\u00f8rrelse",
    "ma\u00f1ana",
)
"""Knots and keys in Russian, Greek, Chinese, Japanese, Korean, Hindi, Arabic, Danish, Spanish."""
_FOLDERS = ("src", "core", "cache", "verify", "kernels", "draft", "pages")


@lru_cache(maxsize=4096)
def identifiers(number: int, count: int = LINES) -> tuple[str, ...]:
    """Opaque words of case `number`, which no other case has; one in two is a near-twin of the one
    before."""
    rng = np.random.default_rng([46, number])

    def letters(size: int) -> str:
        return "".join(rng.choice(list("0123456789abcdef"), size))

    def word(kind: int) -> str:
        if kind == 0:
            return f"{rng.choice(_NAMES)}-{letters(6)}"
        if kind == 1:
            return letters(16)
        if kind == 2:
            return f"{'/'.join(rng.choice(_FOLDERS, 2))}/{letters(5)}.py"
        if kind == 3:
            return f"{rng.integers(10**8, 10**9)}.{rng.integers(100, 1000)}"
        return f"{rng.choice(_SCRIPTS)}_{letters(5)}"

    kinds = [(number + line) % 5 for line in range(0, count, 2)]
    pairs = [(one, _twin(one, rng)) for one in map(word, kinds)]
    return tuple(word for pair in pairs for word in pair)[:count]


def _twin(word: str, rng: np.random.Generator) -> str:
    """The word with one of its last characters another."""
    at = len(word) - 1 - int(rng.integers(0, 3))
    others = "0123456789" if word[at].isdigit() else "abcdefghkmnpqrstuwxyz"
    other = str(rng.choice([one for one in others if one != word[at]]))
    return word[:at] + other + word[at + 1 :]


def copy_prompt(words: Sequence[str]) -> str:
    """The prompt that asks for a list once more, as far as its first number."""
    lines = "\n".join(f"{at:02} = {word}" for at, word in enumerate(words, start=1))
    asked = "List B repeats list A line by line, without any change."
    return f"{asked}\n\nList A\n{lines}\n\nList B\n01 ="


@dataclass(frozen=True, slots=True)
class Altered:
    """A line of the list that came otherwise."""

    right: str
    came: str
    begin: int
    """Where the line begins in the answer, and where it leaves what is right."""
    parts: int

    @property
    def start(self) -> int:
        """Where the line is begun again: behind its number. The end of the line before may be one
        token with what follows; the sign is not."""
        head = _HEAD.match(self.right)
        return self.begin + (head.end() if head else 0)

    @property
    def said(self) -> str:
        one, other = (line.rpartition("= ")[2].strip() for line in (self.right, self.came))
        return f"{one!r} came as {other!r}"


def altered(words: Sequence[str], reply: Reply) -> tuple[list[Altered], int]:
    """The lines that came otherwise, and how many could be judged: whole ones, by their numbers,
    up to the first that is no further line of the list."""
    found, begin, judged, last = [], 0, 0, 0
    lines = reply.text.split("\n")
    for line in lines if reply.finish_reason == "stop" else lines[:-1]:
        head = _HEAD.match(line) if begin else None
        number = int(head[1]) if head else 1
        if not last < number <= len(words) or (begin and head is None):
            break
        right = f"{head[0] if head else ''} {words[number - 1]}"
        judged, last = judged + 1, number
        if line.rstrip() != right:
            found.append(Altered(right, line, begin, begin + common(line, right)))
        begin += len(line) + 1
    return found, judged


async def copied(sides: Sides, case: Case) -> Look:
    """A greedy copy: what is altered is decoded again without drafts, the first two of an
    answer."""
    words = identifiers(case.number)
    prompt = case.before + copy_prompt(words)
    body = {"prompt": prompt, "max_tokens": COPY_TOKENS, "temperature": 0.0, "stop": ["\n\n"]}
    given = await sides.arm.ask(body)
    answered(given)
    found, judged = altered(words, given)
    if not judged:
        raise EndedLook(Look("unasked", "the model does not go on with a list"))
    look = Look("fine", counts=(len(found), judged))
    for one in found[:2]:
        seen = await _alone(sides, prompt, given, one)
        if seen.sort != "fine":
            return Look(seen.sort, seen.why, counts=look.counts)
        look = Look("fine", seen.why, counts=look.counts) if seen.why else look
    return look


async def _alone(sides: Sides, prompt: str, given: Reply, one: Altered) -> Look:
    """What an altered line comes to beside the same line without drafts."""
    asker = sides.plain or sides.arm
    alone = await asker.undrafted(prompt + given.text[: one.start], "\n", _LINE_TOKENS)
    kept = one.start - one.begin
    if not alone.ok or alone.text.split("\n")[0].rstrip() != one.right[kept:]:
        return FINE  # the model's own, or nobody can say
    found = divergence(alone, Reply(body={}, text=one.came[kept:] + "\n"))
    gap = None if found is None else found[0]
    if gap is not None and gap <= sides.tie:
        return Look("fine", "near-tie")
    without = f"{one.said}, which the server writes right without drafts"
    if gap is None or gap <= SURE:
        return Look("differs", without)
    return Look("wrong", f"{without}, {gap:.1f} more likely")


@dataclass(frozen=True, slots=True)
class _Drawn:
    look: Look
    expected: float = 0.0
    """How many lines the log-probabilities let expect altered at places that are sure."""
    sure: int = 0
    """How many were."""


async def compare_drawn(sides: Sides, cases: Sequence[Case]) -> list[Look]:
    """Copies at the user's temperature, of both servers where there are two."""

    async def of(one: Sides) -> list[_Drawn]:
        gate = asyncio.Semaphore(one.arm.in_flight)

        async def look(case: Case) -> _Drawn:
            async with gate:
                try:
                    return await _drawn(one, case)
                except EndedLook as end:
                    return _Drawn(end.look)

        return list(await asyncio.gather(*map(look, cases)))

    ours = await of(sides)
    seen = [one for one in ours if one.look.counts[1]]
    if not seen:
        return [one.look for one in ours]
    sure, expected = (
        sum(values) for values in zip(*((one.sure, one.expected) for one in seen), strict=True)
    )
    by_chance = _chernoff(sure, expected)
    why = f"{sure} at places where log-probabilities let expect {expected:.2g}"
    if sides.plain is not None:
        plain = await of(sides.as_plain())
        shares = [
            [one.look.counts[0] / one.look.counts[1] for one in side if one.look.counts[1]]
            for side in (ours, plain)
        ]
        if all(shares) and np.mean(shares[0]) > np.mean(shares[1]):
            by_chance = min(by_chance, compare_means(*shares))
            why = f"plain decoding alters {np.mean(shares[1]):.2%} of them"
    wrong = by_chance < ERROR
    return [
        Look("wrong", f"{one.look.why}; {why}", counts=one.look.counts)
        if wrong and one.look.counts[0]
        else one.look
        for one in ours
    ]


def _chernoff(count: int, expected: float) -> float:
    """A bound of the chance that as many of independent events happen, or more."""
    if count <= expected:
        return 1.0
    return math.exp(count - expected - count * math.log(count / expected)) if expected else 0.0


async def _drawn(sides: Sides, case: Case) -> _Drawn:
    words = identifiers(case.number)
    prompt = case.before + copy_prompt(words)
    body = {"prompt": prompt, "max_tokens": COPY_TOKENS, "temperature": sides.temperature,
            "stop": ["\n\n"], "logprobs": 1}  # fmt: skip
    given = await sides.arm.ask(body)
    answered(given)
    found, judged = altered(words, given)
    if not judged:
        raise EndedLook(Look("unasked", "the model does not go on with a list"))
    look = Look("fine", found[0].said if found else "", counts=(len(found), judged))
    if given.tokens is None or not given.tells_all:
        if sides.plain is None:
            raise EndedLook(Look("unasked", "completions come without log-probabilities"))
        return _Drawn(look, math.inf)
    chances = [max(_LEAST, -math.expm1(min(0.0, value))) for value in _right(given, found)]
    scored = [await _chance_alone(sides, prompt, given, one) for one in found]
    odd = [max(_LEAST, chance) for chance in scored if chance is not None]
    expected = sum(chance for chance in chances + odd if chance < _SURE)
    return _Drawn(look, expected, sum(chance < _SURE for chance in odd))


def _right(given: Reply, found: Sequence[Altered]) -> list[float]:
    """Log-probabilities of the tokens that are as expected; a line counts as far as it is."""
    kept, place = [], 0
    ends = {one.begin: one.parts for one in found}
    for token, value in zip(given.tokens or (), given.logprobs, strict=False):
        begin = given.text.rfind("\n", 0, place) + 1
        if place + len(token) <= ends.get(begin, math.inf) and not math.isnan(value):
            kept.append(value)
        place += len(token)
    return kept


async def _chance_alone(sides: Sides, prompt: str, given: Reply, one: Altered) -> float | None:
    """The chance that the token that altered an identifier would have been another than the right
    one, by the likeliest tokens there, told for the first token of an answer. None: the text up to
    there is cut into other tokens when it is a prompt, which tells nothing."""
    place, before = 0, 0
    for token in given.tokens or ():
        if place + len(token) > one.parts:
            break
        place, before = place + len(token), before + 1
    body = {"prompt": prompt + given.text[:place], "max_tokens": 1, "temperature": 1.0}
    reply = await (sides.plain or sides.arm).ask({**body, "logprobs": 20})
    answered(reply)
    asked, given_asked = reply.prompt_tokens, given.prompt_tokens
    if asked is None or given_asked is None or asked - given_asked != before:
        return None
    rest = f"{given.text[place : one.parts]}{one.right[one.parts - one.begin :]}\n"
    told = reply.tops[0] if reply.tops else {}
    right = sum(math.exp(v) for name, v in told.items() if name and rest.startswith(name))
    return 1.0 - min(1.0, right)
