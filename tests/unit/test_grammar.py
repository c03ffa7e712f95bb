"""Grammars: masks of rows, forced tokens, what is refused, what fails on the way."""

from typing import Any

import pytest
import torch

from foretoken.checkpoint import packaged_model
from foretoken.errors import ParameterError
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.rows import Rows
from foretoken.runtime.sequence import Sequence
from foretoken.tokenizer import Tokenizer
from foretoken.types import Request, SamplingParams

VOCAB, EOS = 8000, 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(packaged_model("demo"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_json(), VOCAB, [EOS])


def request_of(structured: dict[str, Any] | None, **others: Any) -> Request:
    params = SamplingParams(structured_outputs=structured, **others)
    return Request(request_id="r", prompt_token_ids=(5, 6), params=params, seed=1, max_tokens=50)


def sequence_of(structured: dict[str, Any] | None, output: list[int]) -> Sequence:
    sequence = Sequence.of(request_of(structured))
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
    rows = allowed(grammars, sequence_of(choice, []), drafts)
    for count, row in enumerate(rows):
        assert row == allowed(grammars, sequence_of(choice, list(drafts[:count])))[0]
    assert rows[-1] == {EOS}


def test_rows_after_a_forbidden_draft_are_left_alone(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    sequence = sequence_of({"choice": ["yes", "no"]}, [])
    first, second = allowed(grammars, sequence, (EOS,))
    assert EOS not in first and len(second) == VOCAB
    bad = tokenizer.encode("maybe", add_special_tokens=False)[0]
    first, second = allowed(grammars, sequence, (bad,))
    assert bad not in first and len(second) == VOCAB


def test_forced_text_has_one_spelling(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sequence = sequence_of({"regex": "def __init__\\(self\\): (pass|return)"}, [])
    forced = grammars.forced(sequence, 50)
    assert tokenizer.decode(forced).startswith("def __init__(self")
    assert grammars.forced(sequence, 2) == forced[:2]
    for row, token in zip(allowed(grammars, sequence, forced), forced, strict=False):
        assert row == {token}


def test_the_end_is_forced_when_nothing_else_can_follow(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("yes", add_special_tokens=False)
    sequence = sequence_of({"choice": ["yes", "no"]}, ids)
    assert grammars.forced(sequence, 5) == (EOS,)
    assert allowed(grammars, sequence) == [{EOS}]


def test_without_a_grammar_nothing_happens(grammars: Grammars) -> None:
    assert len(allowed(grammars, sequence_of(None, []))[0]) == VOCAB
    assert grammars.forced(sequence_of(None, []), 5) == ()


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
    "wrong",
    [
        {"regex": "("},
        {"grammar": "start: missing"},
        {"json": {"type": "nonsense"}},
    ],
)
def test_what_does_not_compile_is_refused(grammars: Grammars, wrong: Any) -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        grammars.check(request_of(wrong))


def test_clashes_are_refused(grammars: Grammars) -> None:
    for others in ({"min_tokens": 2, "max_tokens": 9}, {"ignore_eos": True}, {"bad_words": ["x"]}):
        with pytest.raises(ParameterError, match="nothing beside structured_outputs"):
            grammars.check(request_of({"json_object": True}, **others))
    with pytest.raises(ParameterError, match="tokenizer"):
        Grammars(None, VOCAB, [EOS]).check(request_of({"json_object": True}))


def test_tokens_that_it_cannot_read_are_a_failure(grammars: Grammars) -> None:
    sequence = sequence_of({"choice": ["yes", "no"]}, [17, 18, 19])
    logits_RV = torch.zeros(1, VOCAB)
    grammars.forbid(logits_RV, Rows(sequence=sequence))
    assert (logits_RV == 0).all()
    assert list(grammars.take_failures()) == ["r"]
    assert grammars.take_failures() == {}
    grammars.release("r")
