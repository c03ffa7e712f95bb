"""Requests that are cut at every position and continued by another engine.

Shared by the quick and the full suite: cases, the undisturbed outputs, and the comparison.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foretoken import LLM, SamplingParams
from foretoken.types import Logprob, Output

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
JSON = {"json": SCHEMA, "disable_any_whitespace": True}
LETTERS = {"regex": "[éèü€😀ß]{4,8}"}
"""Characters of several tokens each: most cuts are in the middle of one."""
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "filters": {"temperature": 1.1, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.7,
        "seed": 9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 0.8, "seed": 12, "logprobs": 3, "prompt_logprobs": 2},
    "several": {"temperature": 1.3, "seed": 13, "n": 2, "logprobs": 0},
    "schema": {"temperature": 0.0, "structured_outputs": JSON},
    "seeded schema": {"temperature": 1.2, "seed": 3, "n": 2, "structured_outputs": JSON},
    "characters": {"temperature": 1.0, "seed": 4, "structured_outputs": LETTERS},
    "bad words": {"temperature": 1.0, "seed": 5, "bad_words": ["self", "return x", "("]},
    "own text": {"temperature": 0.0, "prediction": "    return len(text) + self.size\n"},
    "no text": {"temperature": 0.9, "seed": 6, "detokenize": False},
}
"""Beside these, `stopping` makes cases of stop strings and ids out of what an output holds."""
TEXTS = (
    "def parse(text):\n    return ",
    "class Walrus:\n    def dive(self, depth):\n        ",
    "import os\nimport sys\n\n\ndef main() -> None:\n    for name in os.listdir('.'):\n",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = ",
)


class Ask(NamedTuple):
    prompt: dict[str, Any]
    params: SamplingParams


@dataclass(slots=True)
class Written:
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The text that became final with each token."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: Output) -> None:
        assert output.error is None, output.error
        self.ids += output.new_token_ids
        self.pieces += output.text_pieces
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    def after(self, count: int) -> "Written":
        """What is left to come after `count` tokens; prompt logprobs come with the first."""
        return Written(
            self.ids[count:],
            self.pieces[count:],
            self.logprobs[count:],
            None if count else self.prompt_logprobs,
            self.finish_reason,
            self.stop_reason,
        )


def run(llm: LLM, asks: Sequence[Ask]) -> list[dict[int, Written]]:
    """All at once; of each prompt its outputs by number."""
    groups = [llm._requests(ask.prompt, ask.params, 0) for ask in asks]
    found = {request.request_id: Written() for group in groups for request in group}
    with closing(llm._shared.reader()) as outputs:
        outputs.add(request for group in groups for request in group)
        for output in outputs:
            found[output.request_id].add(output)
    return [{r.sample_index: found[r.request_id] for r in group} for group in groups]


def cuts(ask: Ask, whole: dict[int, Written]) -> Iterator[tuple[Ask, dict[int, Written]]]:
    """The request at each place where its streams can break off, and what is then to come."""
    for count in range(max(len(one.ids) for one in whole.values())):
        resume = [
            {"output_ids": one.ids[:count], "ended": count >= len(one.ids)}
            for one in whole.values()
        ]
        rest = {i: one.after(count) for i, one in whole.items() if count < len(one.ids)}
        yield Ask({**ask.prompt, "resume": resume}, ask.params), rest


def stopping(whole: Written, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters that end this output in its middle: at a string over several tokens, at the same
    with an earlier one that min_tokens passes over, and at an id."""
    text, half = "".join(whole.pieces), len(whole.ids) // 2
    at = len("".join(whole.pieces[:half]))
    spanning = text[max(at - 2, 0) : at + 3]
    assert spanning, whole
    yield {**options, "stop": [spanning, "never there"]}
    yield {**options, "stop": spanning, "include_stop_str_in_output": True}
    yield {**options, "stop": [text[1:3], spanning], "min_tokens": min(3, half)}
    yield {**options, "stop_token_ids": [whole.ids[half]], "min_tokens": min(2, half)}


def asked(llm: LLM, count: int, max_tokens: int, seed: int) -> list[Ask]:
    """`count` requests, all cases in turn; from the second turn on with seeds of their own."""
    draw = random.Random(seed)
    found: list[Ask] = []
    for number, name in enumerate(itertools.cycle(CASES)):
        if len(found) >= count:
            return found[:count]
        options: dict[str, Any] = {"max_tokens": max_tokens, **CASES[name]}
        if "seed" in options and number >= len(CASES):
            options["seed"] = draw.randrange(2**32)
        text = draw.choice(TEXTS)
        prompt = {"prompt": text[draw.randrange(4) :] + draw.choice(("", "a", "not ", "if "))}
        found.append(Ask(prompt, SamplingParams(**options)))
        if name in ("greedy", "seeded"):
            [whole] = run(llm, found[-1:])
            found += [Ask(prompt, SamplingParams(**o)) for o in stopping(whole[0], options)]
    raise AssertionError("cycles for ever")
