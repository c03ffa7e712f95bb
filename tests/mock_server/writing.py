"""What the mock answers to a body: pieces of text with their numbers, stops, grammars, calls.

Knows no HTTP and no time; the seeded faults of answers happen here. A piece is what one token gives
to the text: a word, or a few characters of JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretoken.lab.measure.workload import WORDS
from foretoken.lab.stats.intervals import Floats
from tests.mock_server.faults import MockFaults, hash_of, strikes
from tests.mock_server.generator import MockModel, log_chances

PLACEHOLDER = "<|placeholder|>"
_CHARACTERS = 4
"""Of a piece of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockToken:
    text: str
    token_id: int
    logs: Floats | None = None
    """Log-probabilities of all words, as they are reported; None for a piece of JSON."""

    def top(self, count: int) -> dict[str, float]:
        """The `count` likeliest pieces with their log-probabilities."""
        if self.logs is None:
            return {self.text: 0.0}
        best = np.argsort(-self.logs)[:count]
        return {" " + WORDS[i]: float(self.logs[i]) for i in best}

    @property
    def logprob(self) -> float:
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

    def write(self, body: Mapping[str, Any], number: int) -> MockAnswer:
        forced = called_function(body)
        if forced is not None:
            return self._call(body, forced, number)
        schema = schema_of(body)
        if schema is not None:
            return self._structured(body, schema, number)
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
