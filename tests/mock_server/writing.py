"""What the mock answers to a body: pieces of text with their numbers, stops, grammars, calls.

Knows no HTTP and no time; the seeded faults of answers happen here. A piece is what one token gives
to the text: a word, or a few characters of JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.lab.measure.workload import WORDS
from foretoken.lab.stats.intervals import Floats
from tests.mock_server.faults import MockFaults, hash_of, in_stretch, strikes
from tests.mock_server.generator import MockModel, log_chances

PLACEHOLDER = "<|placeholder|>"
_CHARACTERS = 4
"""Of a piece of JSON."""
_UNLIKELY = -12.0
_LEAKS_FROM = 11
"""Other answers on their way."""
_WRONG_DEPTH = 5
_LIST = re.compile(r"List A\n(.*)\n\nList B\n(.*)$", re.DOTALL)
"""A list, and how much of it is repeated already."""
_PIECES = re.compile(r" ?\w{1,3}|\W")


@dataclass(frozen=True, slots=True, kw_only=True)
class MockToken:
    text: str
    token_id: int
    logs: Floats | None = None
    """Log-probabilities of all words, as they are reported; None for a piece of JSON."""
    told: Mapping[str, float] | None = None
    """Log-probabilities of the pieces that may stand in its place, of a copy."""

    def top(self, count: int) -> dict[str, float]:
        """The `count` likeliest pieces with their log-probabilities."""
        if self.told is not None:
            return dict(sorted(self.told.items(), key=lambda one: -one[1])[:count])
        if self.logs is None:
            return {self.text: 0.0}
        best = np.argsort(-self.logs)[:count]
        return {" " + WORDS[i]: float(self.logs[i]) for i in best}

    @property
    def logprob(self) -> float:
        if self.told is not None:
            return self.told.get(self.text, _UNLIKELY)
        known = self.logs is not None and 0 <= self.token_id < len(WORDS)
        return float(self.logs[self.token_id]) if known else 0.0  # type: ignore[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class MockAnswer:
    pieces: tuple[MockToken, ...]
    finish_reason: str = "length"
    function: str | None = None
    """The pieces are the arguments of a call of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockWriter:
    model: MockModel
    faults: MockFaults

    def write(
        self,
        body: Mapping[str, Any],
        number: int,
        *,
        k: int = 0,
        others: Sequence[str] = (),
    ) -> MockAnswer:
        """The answer of request `number`, with `k` drafts a step, while those to `others` are
        written."""
        right = self._write(body, number)
        if len(right.pieces) < 2:
            return right  # no draft stands for the first token
        middle = len(right.pieces) // 2
        if len(others) >= _LEAKS_FROM and strikes(self.faults.leak_page, "leak", number):
            other = others[hash_of("leak", number) % len(others)]
            return _with_piece(right, middle, other[-64:])
        if len(others) >= _LEAKS_FROM and strikes(self.faults.garble_loaded, "garble", number):
            kept = [replace(one, text="!") if one.text.isalnum() else one for one in right.pieces]
            return replace(right, pieces=(*right.pieces[:middle], *kept[middle:]))
        if k == _WRONG_DEPTH and strikes(self.faults.wrong_depth, "depth", number):
            at = next((i for i, one in enumerate(right.pieces) if i and one.text.isalnum()), 1)
            return _with_piece(right, at, twin(right.pieces[at].text))
        if in_stretch(self.faults.stuck_acceptance, number) and temperature_of(body) >= 1.0:
            begin = len(right.pieces) // 3
            pieces = right.pieces[:begin] + (right.pieces[begin],) * (len(right.pieces) - begin)
            return replace(right, pieces=pieces)
        return right

    def _write(self, body: Mapping[str, Any], number: int) -> MockAnswer:
        forced = called_function(body)
        if forced is not None:
            return self._call(body, forced, number)
        schema = schema_of(body)
        if schema is not None:
            return self._structured(body, schema, number)
        copied = self._copied(body, number)
        if copied is not None:
            return copied
        return self._plain(body, number)

    def _seed(self, body: Mapping[str, Any], number: int) -> int:
        seed = body.get("seed")
        if seed is None or strikes(self.faults.ignore_seed, "seed", number):
            return number
        return int(seed)

    def _plain(self, body: Mapping[str, Any], number: int) -> MockAnswer:
        prompt = prompt_of(body)
        written = self.model.write(
            prompt,
            body.get("max_tokens") or 16,
            temperature_of(body),
            self._seed(body, number),
            request=number,
            unverified=self.faults.skip_verification,
        )
        logs = [log_chances(logits) for logits in written.logits_T32]
        if strikes(self.faults.wrong_logprobs, "logprobs", number):
            context, first = self.model.place(prompt)
            before = [first, *written.words]
            logs = [log_chances(self.model.draft_logits(context, w)) for w in before[:-1]]
        pieces = [
            MockToken(text=" " + WORDS[word], token_id=word, logs=own)
            for word, own in zip(written.words, logs, strict=True)
        ]
        if strikes(self.faults.leak_placeholder, "placeholder", number):
            at = len(pieces) // 2
            pieces[at] = replace(pieces[at], text=PLACEHOLDER, token_id=-1)
        past = strikes(self.faults.miss_stop, "stop", number)
        return stopped(pieces, stops_of(body), past=past)

    def _copied(self, body: Mapping[str, Any], number: int) -> MockAnswer | None:
        """A list that the prompt asks to repeat, if there is one: the next pieces of it."""
        found = _LIST.search(prompt_of(body))
        if found is None:
            return None
        want, done = found[1] + "\n\n", found[2]
        lines = want.split("\n")[done.count("\n") :]
        rest = "\n".join(lines)[len(done.rsplit("\n", 1)[-1]) :]
        luck = np.random.default_rng(hash_of("copy", self._seed(body, number), number))
        at, pieces = len(want) - len(rest), []
        for text in _PIECES.findall(rest)[: body.get("max_tokens") or 16]:
            place = hash_of(self.model.seed, want, at)
            pieces.append(self._repeated(text, place, luck, temperature_of(body)))
            at += len(text)
        if len(pieces) > 1 and strikes(self.faults.alter_copy, "copy", number):
            texts = ["", *(one.text for one in pieces)]
            names = [i for i, one in enumerate(pieces) if one.text.isalnum() and texts[i] != "\n"]
            at = names[hash_of("copy", number) % len(names)] if names else 1
            pieces[at] = replace(pieces[at], text=twin(pieces[at].text))
        return stopped(pieces, stops_of(body), past=False)

    def _repeated(
        self, text: str, place: int, luck: np.random.Generator, temperature: float
    ) -> MockToken:
        """A piece or its near-twin. Of 300 places one is a near-tie, and a `weak` share are
        wrong."""
        if text == "\n":  # lines stay lines: by their number the mock finds where to go on
            return MockToken(text=text, token_id=199, told={text: 0.0})
        gap = 14.0 if place % 300 else 0.03 * (place // 300 % 100) / 100
        gap = -3.0 if place % 10_007 < self.model.weak * 10_007 else gap
        gap += luck.normal(0.0, 1.4 * self.model.rounding)
        drawn = gap / max(temperature, 1e-9) < luck.logistic() if temperature else gap < 0.0
        right = -float(np.logaddexp(0.0, -gap))
        told = {text: right, twin(text): right - gap}
        return MockToken(text=twin(text) if drawn else text, token_id=200 + place % 999, told=told)

    def _structured(
        self, body: Mapping[str, Any], schema: Mapping[str, Any], number: int
    ) -> MockAnswer:
        text = write_json(schema, hash_of(prompt_of(body), self._seed(body, number)))
        if strikes(self.faults.drop_grammar, "grammar", number):
            text = text[: len(text) // 2] + "".join(" " + word for word in WORDS[:4])
        return MockAnswer(pieces=_cut(text), finish_reason="stop")

    def _call(
        self, body: Mapping[str, Any], function: Mapping[str, Any], number: int
    ) -> MockAnswer:
        schema = function.get("parameters") or {"type": "object"}
        text = write_json(schema, hash_of(prompt_of(body)))
        if strikes(self.faults.break_tools, "tools", number):
            text = text[: len(text) * 2 // 3]
        return MockAnswer(
            pieces=_cut(text), finish_reason="tool_calls", function=str(function.get("name"))
        )


def _with_piece(answer: MockAnswer, at: int, text: str) -> MockAnswer:
    pieces = list(answer.pieces)
    pieces[at] = replace(pieces[at], text=text)
    return replace(answer, pieces=tuple(pieces))


def _cut(text: str) -> tuple[MockToken, ...]:
    parts = [text[i : i + _CHARACTERS] for i in range(0, len(text), _CHARACTERS)]
    return tuple(MockToken(text=part, token_id=100 + hash_of(part) % 1000) for part in parts)


def stopped(pieces: Sequence[MockToken], stops: Sequence[str], *, past: bool) -> MockAnswer:
    """The pieces as far as the first stop string, which is not part of the text; `past`: whole."""
    text = "".join(piece.text for piece in pieces)
    places = [(text.find(stop), stop) for stop in stops if stop in text]
    if not places or past:
        return MockAnswer(pieces=tuple(pieces))
    at, stop = min(places)
    kept: list[MockToken] = []
    done = 0
    for piece in pieces:
        if done >= at + len(stop):
            break
        shown = piece.text[: max(0, at - done)]
        done += len(piece.text)
        kept.append(replace(piece, text=shown))
    return MockAnswer(pieces=tuple(kept), finish_reason="stop")


def twin(text: str) -> str:
    """Another piece of the same length; a space in front stays one."""
    last = text[-1]
    return text[:-1] + (chr(ord(last) + 1) if last not in "9zZ\n" else "x")


def write_json(schema: Mapping[str, Any], seed: int) -> str:
    """A value of a schema with enums, booleans, integers, texts and objects of such."""
    return json.dumps(_value(schema, seed))


def _value(schema: Mapping[str, Any], seed: int) -> Any:
    if "enum" in schema:
        return schema["enum"][seed % len(schema["enum"])]
    if schema.get("type") == "object":
        own = schema.get("properties") or {}
        return {name: _value(part, hash_of(seed, name)) for name, part in own.items()}
    if schema.get("type") == "boolean":
        return seed % 2 == 0
    return seed % 10 if schema.get("type") == "integer" else WORDS[seed % len(WORDS)]


def prompt_of(body: Mapping[str, Any]) -> str:
    return str(body.get("prompt") or body.get("messages"))


def length_of(body: Mapping[str, Any], usual: int) -> int:
    """How far to draft."""
    asked = (body.get("speculation") or {}).get("num_speculative_tokens")
    return usual if asked is None else int(asked)


def tokens_of(prompt: str) -> int:
    """How many tokens a prompt has: words, and pieces of what of a list is repeated already."""
    found = _LIST.search(prompt)
    if found is None:
        return len(prompt.split())
    return len(prompt[: found.start(2)].split()) + len(_PIECES.findall(found[2]))


def temperature_of(body: Mapping[str, Any]) -> float:
    value = body.get("temperature")
    return 1.0 if value is None else float(value)


def stops_of(body: Mapping[str, Any]) -> list[str]:
    given = body.get("stop") or []
    return [given] if isinstance(given, str) else list(given)


def schema_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    form = body.get("response_format") or {}
    inner = form.get("json_schema") or {}
    found = inner.get("schema") if form.get("type") == "json_schema" else None
    return found if isinstance(found, Mapping) else None


def called_function(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The function that must be called: the named one, or the first where one is required."""
    tools = [tool.get("function") or {} for tool in body.get("tools") or ()]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        name = (choice.get("function") or {}).get("name")
        return next((tool for tool in tools if tool.get("name") == name), None)
    return tools[0] if tools and choice == "required" else None
