"""Structured outputs: valid, and the same tokens for every method of drafting."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretoken import LLM, SamplingParams

METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "draft_model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 5},
    "ngram": {"method": "ngram", "num_speculative_tokens": 8},
    "standard": {
        "method": "draft_model",
        "model": "demo-draft",
        "num_speculative_tokens": 4,
        "rejection_sample_method": "standard",
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 12},
        "number_of_arguments": {"type": "integer", "minimum": 0, "maximum": 255},
        "is_generator": {"type": "boolean"},
    },
    "required": ["function_name", "number_of_arguments", "is_generator"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": "[a-z]{3,8}\\(self, [a-z]{2}\\): (pass|return None)"},
    "choice": {"choice": ["import os", "import sys", "import re"]},
    "grammar": {"grammar": 'start: "[" item ("," item)* "]"\nitem: /[0-9]{1,3}/'},
}
PROMPT = "def parse(text):\n    return "


@pytest.fixture(scope="module", params=METHODS)
def llm(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    settings: Any = {"max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20}
    settings["adaptive_speculation"] = False
    spec = METHODS[request.param]
    with LLM("demo", speculative_config=spec, **settings) as made:
        yield request.param, made


def asked() -> list[SamplingParams]:
    hows: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.9},
    ]
    return [
        SamplingParams(max_tokens=80, structured_outputs=given, **how)
        for given in GRAMMARS.values()
        for how in hows
    ]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    with LLM("demo", max_num_seqs=3, kv_cache_memory_bytes=32 << 20) as plain:
        outputs = plain.generate([PROMPT] * len(asked()), asked(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def check(kind: str, text: str) -> None:
    if kind == "schema":
        value = json.loads(text)
        assert set(value) == set(SCHEMA["required"]), value
        assert isinstance(value["is_generator"], bool)
        assert 0 <= value["number_of_arguments"] <= 255
    elif kind == "regex":
        assert re.fullmatch(GRAMMARS["regex"]["regex"], text), text
    elif kind == "choice":
        assert text in GRAMMARS["choice"]["choice"]
    else:
        assert all(0 <= number < 1000 for number in json.loads(re.sub(r"\b0+(?=\d)", "", text)))


def test_outputs_are_valid_and_the_same(
    llm: tuple[str, LLM], expected: list[tuple[int, ...]]
) -> None:
    name, engine = llm
    params = asked()
    outputs = engine.generate([PROMPT] * len(params), params, use_tqdm=False)
    kinds = [kind for kind in GRAMMARS for _ in range(3)]
    for kind, output, ids, how in zip(kinds, outputs, expected, params, strict=True):
        done = output.outputs[0]
        if done.finish_reason == "stop":
            check(kind, done.text)
        else:
            assert kind == "grammar", (kind, done.text)  # a list may go on for ever
        if how.deterministic and name != "standard":
            assert done.token_ids == ids, (name, kind, done.text)


def test_forced_tokens_are_free_drafts() -> None:
    """Also without any drafter: they are all accepted, and most of the text needs no choice."""
    params = SamplingParams(temperature=0.0, max_tokens=120, structured_outputs=GRAMMARS["schema"])
    plain = replace(params, speculation={"enabled": False})
    with LLM("demo", max_num_seqs=2, kv_cache_memory_bytes=32 << 20) as llm:
        drafted, own = llm.generate([PROMPT] * 2, [params, plain], use_tqdm=False)
    metrics, none = drafted.outputs[0].metrics, own.outputs[0].metrics
    assert drafted.outputs[0].token_ids == own.outputs[0].token_ids
    assert metrics is not None and none is not None and none.drafted_per_step == ()
    assert metrics.drafted_per_step == metrics.accepted_per_step
    assert set(metrics.drafter_per_step) == {"grammar"}
    assert sum(metrics.accepted_per_step) > 0.4 * len(drafted.outputs[0].token_ids)
