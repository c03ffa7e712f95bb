"""A drafter of the user's own that is wrong is refused by name, before it can change an output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer

VOCAB = 97
PROMPT = {"prompt_token_ids": [1, 2, 3]}
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, detokenize=False)
Answer = Callable[[Context], Any]


class Given(Proposer):
    name = "mine"

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def propose(self, context: Context) -> Draft:
        found: Draft = self.answer(context)
        return found

    def release(self, request_id: str) -> None:
        raise RuntimeError("I never forget")


def probs(*rows: dict[int, float]) -> torch.Tensor:
    """Distributions with these probabilities, the rest of each on the last id."""
    made = torch.zeros(len(rows), VOCAB)
    for row, entries in enumerate(rows):
        for token, value in entries.items():
            made[row, token] = value
        made[row, -1] += 1 - sum(entries.values())
    return made


def drawn(probs_KV: Any, ids: Any = ((5, 6),)) -> Answer:
    return lambda context: Draft(ids=ids, probs_KV=probs_KV)


def plain(ids: Any, **others: Any) -> Answer:
    return lambda context: Draft(ids=ids, **others)


NAN = probs({5: 0.5}, {6: 0.5})
NAN[1, 9] = float("nan")
INFINITE = probs({5: 0.5}, {6: 0.5})
INFINITE[0, 5] = float("inf")
HALF = probs({5: 0.5}, {6: 0.5}) * 0.5
WRONG: dict[str, tuple[Answer, str]] = {
    "nothing": (lambda context: None, "Draft"),
    "a list": (lambda context: [[1, 2]], "Draft"),
    "no ids": (plain(None), "ids"),
    "too few spans": (plain(()), "1 spans"),
    "ids that are no lists": (plain((5,)), "ids"),
    "ids too high": (plain(((5, VOCAB),)), "0 to 96"),
    "negative ids": (plain(((-1,),)), "0 to 96"),
    "numbers that are no ids": (plain(((1.5,),)), "0 to 96"),
    "ids that are True": (plain(((True,),)), "0 to 96"),
    "None among ids": (plain(((None,),)), "0 to 96"),
    "too many": (plain(((1,) * 50,)), "at most"),
    "parents of another length": (plain(((5, 6),), parents=((-1,),)), "parents"),
    "a parent after its child": (plain(((5, 6),), parents=((1, -1),)), "parents"),
    "drafters of another length": (plain(((5,),), drafters=()), "drafters"),
    "promises of another length": (plain(((5,),), promises=(1.0, 2.0)), "promises"),
    "NaN": (drawn(NAN), "sum nan in row 1"),
    "infinite": (drawn(INFINITE), "sum inf in row 0"),
    "negative": (drawn(probs({5: 0.5}, {6: 0.7, 7: -0.2})), "-0.2 in row 1"),
    "sum": (drawn(HALF), "sum 0.5"),
    "its own token at zero": (drawn(probs({5: 0.5}, {7: 0.5})), "token 6"),
    "shape": (drawn(probs({5: 0.5})), r"\[2, 97\]"),
    "vocabulary": (drawn(torch.ones(2, 50) / 50), r"\[2, 97\]"),
    "type": (drawn(probs({5: 0.5}, {6: 0.5}).double()), "float32"),
    "no tensor": (drawn([[1.0]]), "a tensor"),
}


@pytest.fixture(scope="module")
def drafter() -> Given:
    return Given(lambda context: Draft.empty(len(context.spans)))


@pytest.fixture(scope="module")
def llm(model: Path, drafter: Given) -> LLM:
    return LLM(str(model), proposer=drafter, dtype="float32", kv_cache_memory_bytes=8 << 20)


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_said_with_the_drafters_name(llm: LLM, drafter: Given, mistake: str) -> None:
    answer, said = WRONG[mistake]
    drafter.answer = answer
    with pytest.raises(ConfigError, match=said) as caught:
        llm.generate(PROMPT, PARAMS, use_tqdm=False)
    assert caught.value.field.startswith("proposer 'mine', ")
    assert not llm._engine.has_unfinished


def test_right_drafts_are_taken(llm: LLM, drafter: Given) -> None:
    """Lists are as good as tuples, NumPy's integers as Python's, and a failing `release` hurts
    nobody."""

    def some(context: Context) -> Draft:
        ids = [[np.int64(5), 6][: span.draft_budget] for span in context.spans]
        rows = probs({5: 0.5}, {6: 0.5})[: sum(map(len, ids))]
        return Draft(ids=ids, probs_KV=rows)  # type: ignore[arg-type]

    drafter.answer = some
    [found] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    assert len(found.outputs[0].token_ids) == 6
    metrics = found.outputs[0].metrics
    assert metrics is not None and sum(metrics.drafted_per_step) > 0


def write_token(sequence: Any) -> None:
    sequence.token_ids[-1] = 5


def forget_tokens(sequence: Any) -> None:
    del sequence.token_ids[2:]


def swap_tokens(sequence: Any) -> None:
    sequence.token_ids = [5, 6, 7]


def step_back(sequence: Any) -> None:
    sequence.num_computed -= 1


WRITES: dict[str, Callable[[Any], object]] = {
    "append": lambda sequence: sequence.token_ids.append(5),
    "clear": lambda sequence: sequence.token_ids.clear(),
    "pages": lambda sequence: sequence.page_table.pop(),
    "hashes": lambda sequence: sequence.page_hashes.append(b""),
    "assign": swap_tokens,
    "item": write_token,
    "delete": forget_tokens,
    "number": step_back,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_drafter_cannot_write_what_it_is_shown(llm: LLM, drafter: Given, write: str) -> None:
    def quiet(context: Context) -> Draft:
        return Draft.empty(len(context.spans))

    def writes(context: Context) -> Draft:
        for span in context.spans:
            with pytest.raises((AttributeError, TypeError)):
                WRITES[write](span.sequence)
        return quiet(context)

    greedy = SamplingParams(max_tokens=6, temperature=0.0, detokenize=False)
    drafter.answer = quiet
    [plain] = llm.generate(PROMPT, greedy, use_tqdm=False)
    drafter.answer = writes
    [found] = llm.generate(PROMPT, greedy, use_tqdm=False)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids


def test_what_a_drafter_is_shown_reads_like_the_sequence(llm: LLM, drafter: Given) -> None:
    seen: list[Any] = []

    def read(context: Context) -> Draft:
        [span] = context.spans
        sequence, tokens = span.sequence, span.sequence.token_ids
        seen.append(sequence)
        assert sequence == seen[0] and hash(sequence) == hash(seen[0])
        assert tokens == [*tokens] == tokens[:] and len(tokens) == sequence.num_tokens
        assert [*tokens[:3], 4] == tokens[:3] + [4] and (tokens + [4])[-1] == 4
        assert torch.tensor(tokens).tolist() == sequence.token_ids
        assert sequence.output_ids == tokens[sequence.num_prompt :]
        assert sequence.request.prompt_token_ids == (1, 2, 3)
        sequence.output_ids.append(7)  # a copy, as ever
        return Draft.empty(1)

    drafter.answer = read
    llm.generate(PROMPT, PARAMS, use_tqdm=False)
    assert seen


def test_what_is_no_drafter_is_refused(model: Path) -> None:
    for wrong in ("ngram", Given, object()):
        with pytest.raises(ConfigError, match="proposer"):
            LLM(str(model), proposer=wrong)  # type: ignore[arg-type]
