"""Structured outputs: valid, and the same tokens for every method of drafting. Text that a grammar
forces is spelt in ordinary tokens, also where it spells an added one."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ParameterError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from tests.e2e.added_tokens import ENDS, IDS, NEVER_TEXT, SIZE, write_model_with_added_tokens
from tests.marks import slow

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


HOWS: list[dict[str, Any]] = [{}, {"enabled": False}, {"drafter": "added"}]
"""Forced tokens drafted; no drafts; drafts of the tokens that must not be taken."""


class AddedTokens(Proposer):
    """Drafts added tokens, and now and then any other."""

    name = "added"

    def __init__(self) -> None:
        self._random = random.Random(3)

    def propose(self, context: Context) -> Draft:
        ids = tuple(
            tuple(self._random.choice([*IDS.values(), 66]) for _ in range(span.draft_budget))
            for span in context.spans
        )
        return Draft(ids=ids, drafter=self.name)

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def added_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_model_with_added_tokens(tmp_path_factory.mktemp("added"))
    settings: Any = {"max_num_seqs": 64, "kv_cache_memory_bytes": 16 << 20}
    with LLM(str(folder), proposer=AddedTokens(), **settings) as made:
        yield made


def structures(text: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every kind of structure that forces `text` somewhere, and a pattern of the whole output."""
    written, lark, plain = json.dumps(text), json.dumps(f"a{text}"), re.escape(text)
    quoted = re.escape(written)
    yield {"choice": [f"say {text} now"]}, f"say {plain} now"
    yield {"choice": [text]}, plain
    yield {"choice": [f"{text}{text}", f"{text}{text}!"]}, f"{plain}{plain}!?"
    yield {"regex": f"a{plain}b"}, f"a{plain}b"
    yield {"regex": f"[0-9]{{2}}{plain}[0-9]?"}, f"[0-9]{{2}}{plain}[0-9]?"
    yield {"json": {"const": f"x{text}y"}}, f'"x{quoted[1:-1]}y"'
    yield {"json": {"enum": [f"{text}1", f"{text}2"]}}, f'"{quoted[1:-1]}[12]"'
    schema: dict[str, Any] = {"type": "object", "properties": {text: {"const": 1}}}
    schema |= {"required": [text], "additionalProperties": False}
    yield {"json": schema, "disable_any_whitespace": True}, f"{{{quoted}: 1}}"
    yield {"grammar": f'start: {lark} "b"'}, f"a{plain}b"
    yield {"grammar": f'start: b b\nb: "b" | {lark}\n'}, f"(b|a{plain}){{2}}"
    yield {"grammar": f"root ::= {lark} [0-9]"}, f"a{plain}[0-9]"


@pytest.mark.parametrize("temperature", [slow(0.0), 1.0])
def test_forced_text_is_spelt_in_ordinary_tokens(added_llm: LLM, temperature: float) -> None:
    asked = [one for text in IDS for one in structures(text)]
    for how in HOWS:
        params = [
            SamplingParams(
                max_tokens=64,
                temperature=temperature,
                structured_outputs=given,
                speculation=how,
                skip_special_tokens=temperature > 0,
            )
            for given, _ in asked
        ]
        outputs = added_llm.generate(["x = "] * len(params), params, use_tqdm=False)
        for (given, pattern), output in zip(asked, outputs, strict=True):
            done = output.outputs[0]
            text = json.dumps(json.loads(done.text)) if "json" in given else done.text
            assert re.fullmatch(pattern, text), (given, done.text)
            assert done.finish_reason == "stop", (given, done.text)
            assert set(done.token_ids[:-1]).isdisjoint(NEVER_TEXT), (given, done.token_ids)


@pytest.mark.slow
def test_drafts_change_nothing(added_llm: LLM) -> None:
    """Neither those that are forced nor those that must not be taken; the first all stay."""
    asked = [given for text in IDS for given, _ in structures(text)]
    found = []
    for how in HOWS:
        params = [
            SamplingParams(
                max_tokens=64, temperature=0.0, structured_outputs=given, speculation=how
            )
            for given in asked
        ]
        outputs = added_llm.generate(["x = "] * len(params), params, use_tqdm=False)
        found.append([output.outputs[0] for output in outputs])
    assert any("added" in one.metrics.drafter_per_step for one in found[2] if one.metrics)
    for given, forced, plain, junk in zip(asked, *found, strict=True):
        assert forced.token_ids == plain.token_ids == junk.token_ids, given
        metrics = [one.metrics for one in (forced, plain, junk)]
        assert metrics[0] and metrics[1] and metrics[2]
        assert metrics[1].drafted_per_step == ()
        kept = zip(
            metrics[0].drafter_per_step,
            metrics[0].drafted_per_step,
            metrics[0].accepted_per_step,
            strict=True,
        )
        assert all(drafted == stayed for name, drafted, stayed in kept if name == "grammar")


@pytest.mark.parametrize(
    ("grammar", "ids", "text"),
    [
        ("start: <[300]>", (300,), None),
        ('start: <s> "a"', (0, 66), "<s>a"),
        ('start: "a" </s>', (66,), "a"),
        ('start: "a" <|im_end|>', (66,), "a"),
        ('start: <think> "a" <[8002]>', (IDS["<think>"], 66, 8002), "<think>a<tool_call>"),
        (f'start: <[{SIZE - 1}]> "a"', (SIZE - 1, 66), "a"),
        ('start: "</s>" <s> "</s>"', None, "</s><s></s>"),
        ('start: <[8002-8003]> "x"', None, None),
    ],
)
def test_a_token_that_the_grammar_names_is_that_token(
    added_llm: LLM, grammar: str, ids: tuple[int, ...] | None, text: str | None
) -> None:
    params = [
        SamplingParams(
            max_tokens=20,
            temperature=0.0,
            structured_outputs={"grammar": grammar},
            skip_special_tokens=False,
            speculation=how,
        )
        for how in HOWS
    ]
    outputs = added_llm.generate(["x = "] * len(params), params, use_tqdm=False)
    for done in (output.outputs[0] for output in outputs):
        assert done.finish_reason == "stop", done
        assert done.token_ids == outputs[0].outputs[0].token_ids
        assert done.token_ids[-1] in {IDS[end] for end in ENDS}
        assert ids is None or done.token_ids[:-1] == ids
        assert text is None or done.text == text


@pytest.mark.parametrize("wrong", [f"<[{SIZE}]>", "<nope>", "<[7-5]>"])
def test_a_token_that_there_is_not_is_refused(added_llm: LLM, wrong: str) -> None:
    params = SamplingParams(structured_outputs={"grammar": f'start: "a" {wrong}'})
    with pytest.raises(ParameterError, match=r"structured_outputs\.grammar.*[Tt]oken"):
        added_llm.generate(["x"], params, use_tqdm=False)
