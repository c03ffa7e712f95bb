"""Grammars: masks of rows, forced tokens, what is refused, what fails on the way."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.checkpoint import packaged_model
from foretoken.errors import ForetokenError, ParameterError
from foretoken.runtime import compile_grammar
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.rows import Rows
from foretoken.runtime.sequence import Sequence
from foretoken.text.tokenizer import Tokenizer
from foretoken.types import Request, SamplingParams

VOCAB, EOS = 8000, 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(packaged_model("demo"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_json, VOCAB, [EOS])


def request_of(structured: dict[str, Any] | None, **others: Any) -> Request:
    params = SamplingParams(structured_outputs=structured, **others)
    return Request(request_id="r", prompt_token_ids=(5, 6), params=params, seed=1, max_tokens=50)


def sequence_of(
    grammars: Grammars, structured: dict[str, Any] | None, output: list[int]
) -> Sequence:
    request = request_of(structured)
    request = replace(request, grammar=grammars.compiled(request.params))
    sequence = Sequence.of(request)
    sequence.token_ids.extend(output)
    return sequence


def allowed(grammars: Grammars, sequence: Sequence, drafts: tuple[int, ...] = ()) -> list[set[int]]:
    rows = Rows(sequence=sequence, drafts=drafts)
    logits_RV = torch.zeros(rows.num_rows, VOCAB)
    grammars.forbid(logits_RV, rows)
    grammars.release("r")
    return [set((row == 0).nonzero().flatten().tolist()) for row in logits_RV]


def test_rows_after_drafts_are_the_rows_after_those_tokens(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    choice = {"choice": ["import os", "import sys", "import re"]}
    drafts = tuple(tokenizer.encode("import os", add_special_tokens=False))
    rows = allowed(grammars, sequence_of(grammars, choice, []), drafts)
    for count, row in enumerate(rows):
        assert row == allowed(grammars, sequence_of(grammars, choice, list(drafts[:count])))[0]
    assert rows[-1] == {EOS}


def test_rows_after_a_forbidden_draft_are_left_alone(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    sequence = sequence_of(grammars, {"choice": ["yes", "no"]}, [])
    first, second = allowed(grammars, sequence, (EOS,))
    assert EOS not in first and len(second) == VOCAB
    bad = tokenizer.encode("maybe", add_special_tokens=False)[0]
    first, second = allowed(grammars, sequence, (bad,))
    assert bad not in first and len(second) == VOCAB


def test_forced_text_has_one_spelling(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sequence = sequence_of(grammars, {"regex": "def __init__\\(self\\): (pass|return)"}, [])
    forced = grammars.forced(sequence, 50)
    assert tokenizer.decode(forced).startswith("def __init__(self")
    assert grammars.forced(sequence, 2) == forced[:2]
    for row, token in zip(allowed(grammars, sequence, forced), forced, strict=False):
        assert row == {token}


def test_the_end_is_forced_when_nothing_else_can_follow(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("yes", add_special_tokens=False)
    sequence = sequence_of(grammars, {"choice": ["yes", "no"]}, ids)
    assert grammars.forced(sequence, 5) == (EOS,)
    assert allowed(grammars, sequence) == [{EOS}]


def test_without_a_grammar_nothing_happens(grammars: Grammars) -> None:
    assert len(allowed(grammars, sequence_of(grammars, None, []))[0]) == VOCAB
    assert grammars.forced(sequence_of(grammars, None, []), 5) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"json": {}, "regex": "x"},
        {"json": "[1]"},
        {"json": "{"},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [""]},
        {"regex": 3},
        {"json_object": False},
        {"xml": "x"},
        {"grammar": "x" * 200_000},
        "json",
    ],
)
def test_wrong_values(wrong: Any) -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        SamplingParams(structured_outputs=wrong)


@pytest.mark.parametrize(
    "wrong", [{"regex": "("}, {"grammar": "start: missing"}, {"json": {"type": "nonsense"}}]
)
def test_what_does_not_compile_is_refused(grammars: Grammars, wrong: Any) -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        grammars.compiled(SamplingParams(structured_outputs=wrong))


def test_clashes_are_refused(grammars: Grammars) -> None:
    for others in ({"min_tokens": 2, "max_tokens": 9}, {"ignore_eos": True}, {"bad_words": ["x"]}):
        with pytest.raises(ParameterError, match="nothing beside structured_outputs"):
            grammars.compiled(request_of({"json_object": True}, **others).params)
    with pytest.raises(ParameterError, match="tokenizer"):
        Grammars(None, VOCAB, [EOS]).compiled(request_of({"json_object": True}).params)


def test_tokens_that_it_cannot_read_are_a_failure(grammars: Grammars) -> None:
    sequence = sequence_of(grammars, {"choice": ["yes", "no"]}, [17, 18, 19])
    logits_RV = torch.zeros(1, VOCAB)
    grammars.forbid(logits_RV, Rows(sequence=sequence))
    assert (logits_RV == 0).all()
    assert list(grammars.take_failures()) == ["r"]
    assert grammars.take_failures() == {}
    grammars.release("r")


def exploding(count: int) -> dict[str, Any]:
    """A schema that llguidance needs time for that doubles with every pattern."""
    patterns = [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(count)]
    return {"json": {"allOf": patterns}}


def ladder(count: int) -> dict[str, Any]:
    """A schema of 70 kB whose nesting is deeper than a thread's stack."""
    steps = {
        f"d{i}": {"properties": {side: {"$ref": f"#/$defs/d{i + 1}"} for side in "lr"}}
        for i in range(count)
    }
    return {"json": {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{count}": {}}}}


@pytest.mark.parametrize(
    "endless",
    [
        {"grammar": "start: start"},
        {"grammar": "start: a\na: b\nb: a"},
        {"grammar": 'start: start "a"'},
        {"grammar": "root ::= root"},
        {"grammar": 'start: %json {"$ref": "#"}'},
        {"json": {"$ref": "#"}},
        {"json": {"anyOf": [{"$ref": "#"}]}},
        {"regex": "[^\\s\\S]"},
    ],
)
def test_what_no_text_can_match_is_refused(grammars: Grammars, endless: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="what some text can match"):
        grammars.compiled(SamplingParams(structured_outputs=endless))


@pytest.mark.slow
def test_compiling_ends_though_the_compiler_would_not(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer.to_json, VOCAB, [EOS])
    assert grammars.compiled(SamplingParams(structured_outputs={"regex": "b+"})) is not None
    monkeypatch.setattr(compile_grammar, "_MOST_WAITED_S", 1.0)
    given = SamplingParams(structured_outputs=exploding(60))
    for _ in range(2):  # the second time from memory
        with pytest.raises(ParameterError, match="what compiles within"):
            grammars.compiled(given)
    monkeypatch.undo()
    assert grammars.compiled(SamplingParams(structured_outputs={"regex": "a+"})) is not None


def test_a_grammar_that_would_end_the_process_is_refused(grammars: Grammars) -> None:
    with pytest.raises(ParameterError, match="what compiles within"):
        grammars.compiled(SamplingParams(structured_outputs=ladder(1000)))
    assert grammars.compiled(SamplingParams(structured_outputs=ladder(10))) is not None


def test_a_compiler_that_does_not_start_is_not_the_clients_fault(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer.to_json, VOCAB, [EOS])
    monkeypatch.setattr("sys.executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(ForetokenError, match="compiler of grammars"):
            grammars.compiled(SamplingParams(structured_outputs={"regex": "a+"}))


def test_a_thousand_properties_are_followed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    opened = tokenizer.encode('{"', add_special_tokens=False)
    sequence = sequence_of(grammars, {"json": json.dumps(schema)}, opened)
    assert allowed(grammars, sequence)[0] and not grammars.take_failures()
