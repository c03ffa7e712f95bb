"""The checks, in the order in which they are made: each is one sentence and one look.

`greedy` and `sampling` ask what speculation promises: the tokens of plain decoding. The others ask
for what engines have broken on the way to it. A look raises `EndedLook` where an answer is missing.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.lab.audit.asking import Case, Reply
from foretoken.lab.audit.copies import compare_drawn, copied
from foretoken.lab.audit.judging import (
    FINE,
    AuditCheck,
    EndedLook,
    Look,
    Sides,
    answered,
    plain_of,
)
from foretoken.lab.audit.rounding import NEAR_TIE, common, same, same_or_near
from foretoken.lab.stats.permutation import compare_samples, holm_rejects

NO_LOGPROBS = "completions come without log-probabilities"


async def _greedy(sides: Sides, case: Case) -> Look:
    """Verification at temperature 0 lets only the likeliest token through, so the texts are the
    same, or part where the two likeliest tokens are nearly tied."""
    expected = await plain_of(sides).greedy(case)
    # Plain decoding is asked anew where it is held against itself: its own reply would always fit.
    given = await sides.arm.greedy(case, again=sides.control)
    answered(expected, given)
    return same(expected, given, sides.tie)


SCORED_TOKENS = 12
"""Tokens of an answer that are scored; each is a request of one token."""
_SCORED_TOPS = 20
_BEYOND = 1.0
"""How much less likely than the last of the likeliest a token counts that is none of them."""


async def _verification(sides: Sides, case: Case) -> Look:
    """Drafts that were accepted unverified: drawn tokens that plain decoding finds too likely or
    too unlikely.

    One draw cannot be compared with another, but its log-probability under plain decoding can:
    token by token it is, on average, what plain decoding expects of its own draws. The server
    without speculation scores the answers of both servers, and the scores are compared.
    """
    plain = plain_of(sides)
    tokens = min(SCORED_TOKENS, case.max_tokens)
    body = {"prompt": case.prompt, "max_tokens": tokens, "temperature": 1.0, "logprobs": 1}
    drawn = await sides.arm.ask(body)
    answered(drawn)
    if drawn.tokens is None:
        return Look("unasked", NO_LOGPROBS)
    told = []
    # The first token is the prompt's, which no draft stands for.
    for number in range(1, len(drawn.tokens)):
        prompt: str | list[int] = case.prompt + "".join(drawn.tokens[:number])
        if drawn.prompt_ids is not None and drawn.token_ids is not None:
            prompt = [*drawn.prompt_ids, *drawn.token_ids[:number]]
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 1.0, "logprobs": _SCORED_TOPS}
        reply = await plain.ask(body)
        answered(reply)
        if not reply.tops:
            return Look("unasked", "the likeliest tokens are not told")
        # Its log-probability less what is expected of a draw from the likeliest tokens.
        token, top = drawn.tokens[number], reply.tops[0]
        chances = {name: math.exp(value) for name, value in top.items()}
        expected = sum(chances[name] * top[name] for name in top) / sum(chances.values())
        told.append((top.get(token, min(top.values()) - _BEYOND) - expected, token))
    value, token = min(told, default=(0.0, ""))
    why = f"{token!r} has a log-probability {-value:.1f} below that of a usual draw"
    return Look("fine", score=sum(one for one, _ in told), why=why if told else "")


SAMPLED_TOKENS, SAMPLED_PROMPTS = 3, 2
_SAMPLING_ERROR = 0.01
"""Chance of a false alarm over all sets of parameters, which another look has to confirm."""


async def _sampling(sides: Sides, cases: Sequence[Case]) -> list[Look]:
    """Many short draws of a prompt from both servers, for each set of sampling parameters: their
    counts differ by no more than chance (a permutation test). What differs is drawn again."""
    tested = [await _draw(sides, cases, given) for given in sides.parameters]
    p_values = [look.score for look in tested if look.score is not None]
    rejected = iter(holm_rejects(p_values, _SAMPLING_ERROR))
    found = []
    for given, look in zip(sides.parameters, tested, strict=True):
        if look.score is not None and next(rejected):
            again = await _draw(sides, cases, given)
            by_chance = again.score is None or again.score >= _SAMPLING_ERROR
            look = FINE if by_chance else Look("wrong", again.why)
        found.append(Look(look.sort, look.why))
    return found


async def _draw(sides: Sides, cases: Sequence[Case], given: Mapping[str, Any]) -> Look:
    """One set of parameters; the score is the chance of such a difference among equal servers."""
    name = ", ".join(f"{key} {value}" for key, value in given.items())
    body = {"temperature": 1.0, **given, "max_tokens": SAMPLED_TOKENS}
    prompts = [case.prompt for case in cases[:SAMPLED_PROMPTS]]
    texts = []
    for prompt in prompts:
        pair = []
        for asker in (plain_of(sides), sides.arm):
            asked = [asker.ask({**body, "prompt": prompt}) for _ in range(sides.samples)]
            replies = await asyncio.gather(*asked)
            missing = next((r for r in replies if r.refused), None)
            if missing is not None or not any(reply.ok for reply in replies):
                try:
                    answered(missing or replies[0])
                except EndedLook as end:
                    return Look(end.look.sort, f"{name}: {end.look.why}")
            pair.append([reply.text for reply in replies if reply.ok])
        texts.append(pair)
    distance, expected, p_value = compare_samples(texts)
    why = f"{name}: distance {distance:.3f} (chance {expected:.3f}), p {p_value:.4f}"
    return Look("fine", score=p_value, why=why)


_MOST_APART = 0.3
"""Difference that no rounding makes for a token as likely as those of greedy answers."""


async def _logprobs(sides: Sides, case: Case) -> Look:
    """They are the target's and no draft's: up to where the texts part they are those of plain
    decoding, none is above 0, and no token comes without, whole or streamed. Tokens that a server
    verified as drafts and did not score are told by the likeliest tokens, of which such a row has
    none."""
    given = await sides.arm.greedy(case, again=sides.control)
    answered(given)
    if given.tokens is None:
        return Look("unasked", NO_LOGPROBS)
    if any(value > 1e-3 for value in given.logprobs):
        return Look("wrong", f"a log-probability of {max(given.logprobs):.3f}")
    untold = unscored(given, await sides.arm.greedy(case, stream=True))
    if untold is not None:
        return untold
    expected = await plain_of(sides).greedy(case)
    answered(expected)
    if expected.tokens is None:
        return Look("unasked", "the baseline tells no log-probabilities")
    for at in range(common(expected.tokens, given.tokens)):
        ours, theirs = expected.logprobs[at], given.logprobs[at]
        if not abs(ours - theirs) <= _MOST_APART and not (math.isnan(ours) and math.isnan(theirs)):
            why = f"token {at + 1} has {theirs:.3f}, plain decoding says {ours:.3f}"
            return Look("differs", why)
    return FINE


def unscored(whole: Reply, streamed: Reply) -> Look | None:
    """What is said of tokens without log-probabilities; None: all have theirs. Where no row has
    likeliest tokens, the server does not tell them to anybody."""
    rows = len(whole.tokens or ())
    empty = [at for at, top in enumerate(whole.tops) if not top]
    if empty and len(empty) < rows:
        why = (
            f"{len(empty)} of {rows} tokens come without the likeliest tokens: "
            f"{whole.logprobs[empty[0]]:.3f} stands at token {empty[0] + 1}"
        )
        return Look("wrong", why)
    if not streamed.ok or not whole.tells_all or whole.text != streamed.text:
        return None
    came = len(streamed.tokens or ())
    if came < rows and streamed.tokens is not None and not streamed.tells_all:
        return Look("wrong", f"a stream has log-probabilities for {came} of {rows} tokens")
    return None


_SEEDED_TOKENS = 10
"""Few, since rounding turns one draw or another in long texts."""


async def _seeds(sides: Sides, case: Case) -> Look:
    """Whatever a server makes of a seed, it makes the same of it again. Where seeded answers are
    promised to be those of plain decoding, they are compared with those too."""
    tokens, seed = min(_SEEDED_TOKENS, case.max_tokens), 1000 + case.number
    body = {"prompt": case.prompt, "max_tokens": tokens, "temperature": 0.8, "seed": seed}
    first, second = await sides.arm.ask(body), await sides.arm.ask(body)
    answered(first, second)
    if first.text != second.text:
        return Look("differs", f"seed {seed} gave two texts")
    if sides.same_seeds and sides.plain is not None:
        expected = await sides.plain.ask(body)
        answered(expected)
        if expected.text != first.text:
            return Look("differs", f"seed {seed} gives another text without speculation")
    return FINE


async def _streams(sides: Sides, case: Case) -> Look:
    """A step with several tokens is several tokens of the stream: nothing is lost, nothing comes
    twice, and nothing comes after the end."""
    whole = await sides.arm.greedy(case)
    streamed = await sides.arm.greedy(case, stream=True)
    answered(whole, streamed)
    if len(streamed.finish_reasons) != 1:
        return Look("wrong", f"{len(streamed.finish_reasons)} finish reasons in a stream")
    if streamed.text_after_end:
        return Look("wrong", "text after the finish reason")
    found = misses(whole, streamed)
    if found is not None:
        return found
    plain = None if sides.plain is None else await sides.plain.greedy(case)
    return same_or_near(whole, streamed, plain, sides.tie)


def misses(whole: Reply, streamed: Reply) -> Look | None:
    """What of a stream did not come, if both answers are as long as was asked for: rounding may
    change their tokens and not their number. None: nothing is missing."""
    long, came = whole.num_tokens, streamed.num_tokens
    ended = whole.finish_reason == streamed.finish_reason == "length"
    if not ended or long is None or came is None or long == came:
        return None
    why = f"{came} tokens in the stream, {long} in the whole answer"
    if whole.text == streamed.text:
        why = f"the text is whole, but the stream tells {came} of {long} tokens"
    return Look("wrong", why)


async def _stops(sides: Sides, case: Case) -> Look:
    """The stop string is cut out of the greedy answer, from the end of one token and the beginning
    of the next, where it first occurs. Asked again with it, the answer ends just before."""
    whole = await sides.arm.greedy(case)
    answered(whole)
    stop = stop_within(whole)
    if stop is None:
        return Look("unasked", "the answers only repeat themselves")
    given = await sides.arm.ask({**whole.body, "stop": [stop]})
    answered(given)
    if stop in given.text:
        return Look("wrong", f"the text goes on past the stop string {stop!r}")
    if given.text == whole.text[: whole.text.find(stop)]:
        said = f"finish_reason {given.finish_reason!r} after a stop string"
        return FINE if given.finish_reason == "stop" else Look("wrong", said)
    plain = None if sides.plain is None else await sides.plain.greedy(case)
    found = same_or_near(whole, given, plain, sides.tie)
    if found.sort == "fine":
        return NEAR_TIE
    return Look("differs", f"another text than before with the stop string {stop!r}")


def stop_within(whole: Reply) -> str | None:
    """The last string of two tokens' ends that the answer does not have before."""
    if whole.tokens is None or not whole.tells_all:
        middle = len(whole.text) // 2
        found = whole.text[middle : middle + 5]
        return found if len(found) == 5 and whole.text.find(found) == middle else None
    place = len(whole.text)
    for before, after in zip(whole.tokens[-2::-1], whole.tokens[:0:-1], strict=True):
        place -= len(after)
        end = before[-2:]
        stop = end + after[:3]
        if len(stop) >= 3 and stop.strip() and whole.text.find(stop) == place - len(end):
            return stop
    return None


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit", "kelvin"]},
        "city": {"type": "string", "enum": ["Berlin", "Lagos", "Lima", "Osaka", "Pune"]},
        "forecast": {"type": "boolean"},
    },
    "required": ["unit", "city", "forecast"],
    "additionalProperties": False,
}
"""Without free text: an answer cannot become long."""
_FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}


async def _grammars(sides: Sides, case: Case) -> Look:
    """Every draft is held to the grammar as every other token is, so what comes is JSON of the
    schema."""
    form = {"name": "weather", "schema": SCHEMA, "strict": True}
    body = {
        "max_tokens": 160,
        "temperature": 0.8,
        "response_format": {"type": "json_schema", "json_schema": form},
    }
    asked = f"Answer in JSON: what is this?\n{case.prompt}"
    messages = [{"role": "user", "content": asked}]
    reply = await sides.arm.ask({**body, "messages": messages}, chat=True)
    if reply.refused is not None:  # no chat template, perhaps
        reply = await sides.arm.ask({**body, "prompt": case.prompt})
    answered(reply)
    return _judge_json(reply, reply.text.strip(), "the answer") or FINE


def _judge_json(reply: Reply, text: str, name: str) -> Look | None:
    """What of a JSON text is not of the schema; None: nothing. One cut short by its length cannot
    be told."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if reply.finish_reason == "length":
            return Look("fine", "cut short")
        return Look("wrong", f"no JSON: {text[:30]!r} ... {text[-30:]!r}")
    if not isinstance(value, dict):
        return Look("wrong", f"{name}: no object")
    odd = set(value) ^ set(SCHEMA["properties"])
    if odd:
        return Look("wrong", f"{name} has or lacks {', '.join(sorted(odd))[:60]}")
    for key, given in value.items():
        allowed = SCHEMA["properties"][key].get("enum")
        if given not in allowed if allowed else not isinstance(given, bool):
            return Look("wrong", f"{name}, {key}: {str(given)[:30]!r}")
    return None


async def _tools(sides: Sides, case: Case) -> Look:
    """A function call that must be made: its arguments are JSON of the function's parameters, and a
    stream brings the same call."""
    name = str(_FUNCTION["name"])
    body = {
        "messages": [{"role": "user", "content": f"How warm is it? {case.prompt}"}],
        "max_tokens": 120,
        "temperature": 0.0,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": name}},
    }
    calls = []
    for stream in (False, True):
        reply = await sides.arm.ask(body, chat=True, stream=stream)
        answered(reply)
        if [called for called, _ in reply.calls] != [name]:
            names = ", ".join(called for called, _ in reply.calls) or "no function"
            return Look("wrong", f"{names} called instead of {name}")
        found = _judge_json(reply, reply.calls[0][1], "the arguments")
        if found is not None:
            return found
        calls.append(reply.calls)
    other = Look("differs", "another call in the stream than in the whole answer")
    return FINE if calls[0] == calls[1] else other


_SHARED_CHARACTERS = 1600
"""Of the shared beginning: many blocks of any server."""
_UNTOLD = (
    "usage has no prompt_tokens_details.cached_tokens; vLLM tells it with "
    "--enable-prompt-tokens-details"
)


async def _prefixes(sides: Sides, case: Case) -> Look:
    """Drafts that were refused must not cost the pages that were computed: with speculation as much
    of a prompt that goes on is found in the cache as without."""
    # Of its own for each case and side: no other request may have it in the cache already. Both
    # numbers have as many digits, so that both sides ask for as much.
    head = f"# {2 * case.number + sides.control}\n"
    prompt = head + (case.prompt + "\n") * (1 + _SHARED_CHARACTERS // (1 + len(case.prompt)))
    prompt = prompt[:_SHARED_CHARACTERS]
    body = {"max_tokens": 16, "temperature": 0.0}
    first = await sides.arm.ask({**body, "prompt": prompt})
    answered(first)
    second = await sides.arm.ask({**body, "prompt": prompt + first.text + "\n#"})
    answered(second)
    asked = (second.usage or {}).get("prompt_tokens")
    if second.cached_tokens is None or not asked:
        return Look("unasked", _UNTOLD)
    share = second.cached_tokens / asked
    found = f"{second.cached_tokens} of {asked} tokens of a prompt came from the cache"
    return Look(sort="fine" if share >= 0.5 else "differs", why=found, score=share)


def _usage(reply: Reply) -> Look:
    """Drafts are not output: completion_tokens are the tokens that came."""
    if reply.usage is None:
        return Look("unasked", "answers have no usage")
    counted, asked = reply.usage.get("completion_tokens"), reply.body.get("max_tokens")
    if counted is None:
        return Look("unasked", "usage has no completion_tokens")
    if asked is not None and counted > asked:
        return Look("wrong", f"{counted} completion_tokens with max_tokens {asked}")
    # The token that ended the answer may be left out of either.
    allowed = 1 if reply.finish_reason == "stop" else 0
    if reply.num_tokens is None or abs(counted - reply.num_tokens) <= allowed:
        return FINE
    return Look("wrong", f"{counted} completion_tokens, and {reply.num_tokens} came")


_MARKS = re.compile(r"<\|?(?:placeholder|draft|mask|pad|unk)[\w ]*\|?>", re.IGNORECASE)


def _placeholders(reply: Reply) -> Look:
    """Engines give drafts that are not there yet a number that no token has, or a token of their
    own."""
    odd = [number for number in reply.token_ids or () if number < 0]
    if odd:
        return Look("wrong", f"token id {odd[0]} in an answer")
    found = _MARKS.search(reply.text)
    if found is not None and found[0] not in str(reply.body.get("prompt")):
        return Look("wrong", f"{found[0]} in the text")
    return FINE


OF_TEXTS = ("greedy", "verification", "sampling", "logprobs")
"""Checks of what is written, whatever is asked for."""
CHECKS: tuple[AuditCheck, ...] = (
    AuditCheck("greedy", "at temperature 0 the text is that of plain decoding",
               look=_greedy, answers=1, reads_greedy=True),
    AuditCheck("verification",
               "drawn tokens are as likely as plain decoding's own, so every draft was verified",
               look=_verification, answers=SCORED_TOKENS, each=0.1),
    AuditCheck("sampling",
               "drawn texts are as often there as plain decoding's, for every set of parameters",
               compare=_sampling, each=0.1, comparisons=2),
    AuditCheck("logprobs", "log-probabilities are those of plain decoding, not a draft's",
               look=_logprobs, reads_greedy=True),
    AuditCheck("seeds", "the same seed gives the same text again",
               look=_seeds, answers=2, each=0.25),
    AuditCheck("streams", "a stream's text is the whole answer's, with one end",
               look=_streams, answers=1, reads_greedy=True),
    AuditCheck("stops", "an answer ends just before its stop string",
               look=_stops, answers=1, each=0.6, reads_greedy=True),
    AuditCheck("grammars", "an answer with a JSON schema is JSON of that schema",
               look=_grammars, answers=1),
    AuditCheck("tools", "a function call has whole arguments, streamed or not",
               look=_tools, answers=2, each=0.6),
    AuditCheck("prefixes", "prompts that go on from an earlier one find it in the cache",
               look=_prefixes, answers=2, each=1.1),
    AuditCheck("copies", "a greedy copy repeats the identifiers of the prompt",
               look=copied, answers=1, each=3.0),
    AuditCheck("drawn-copies", "a copy at the user's temperature alters no more than chance does",
               compare=compare_drawn, answers=1, each=3.0, comparisons=2),
    AuditCheck("usage",
               "usage counts the tokens that came, no draft, and no more than max_tokens",
               read=_usage),
    AuditCheck("placeholders", "no answer has a placeholder where a draft was to be",
               read=_placeholders),
)  # fmt: skip
