"""A request that forbids itself every token ends with an error; tokens before that stand."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.types import FinishReason, Output
from tests.drafters import ReplayProposer, TreeProposer

VOCAB = 97
PROMPT = [1, 2, 3]
GREEDY: dict[str, Any] = {"max_tokens": 16, "detokenize": False, "temperature": 0.0}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.9, "seed": 4}
WAYS = ("plain", "chain", "tree", "draft")


def llm_of(model: Path, way: str, known: dict[str, list[int]]) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
    if way == "chain":
        settings["proposer"] = ReplayProposer(known, VOCAB)
    elif way == "tree":
        settings["proposer"] = TreeProposer(VOCAB, outputs=known)
    elif way == "draft":
        settings["speculative_config"] = {"model": str(model), "num_speculative_tokens": 4}
        settings["adaptive_speculation"] = False
    return LLM(str(model), **settings)


@pytest.fixture(scope="module", params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def chosen(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


@pytest.fixture(scope="module")
def output(model: Path, chosen: dict[str, Any]) -> list[int]:
    with llm_of(model, "plain", {}) as llm:
        prompt = {"prompt_token_ids": PROMPT}
        [found] = llm.generate(prompt, SamplingParams(**chosen), use_tqdm=False)
    return list(found.outputs[0].token_ids)


@pytest.fixture(params=WAYS)
def engine(request: pytest.FixtureRequest, model: Path, output: list[int]) -> Iterator[Engine]:
    with llm_of(model, request.param, {"bad": output, "good": output}) as llm:
        yield llm._engine


def run(engine: Engine) -> dict[str, list[Output]]:
    found: dict[str, list[Output]] = {"bad": [], "good": []}
    while engine.has_unfinished:
        for one in engine.step():
            found[one.request_id].append(one)
    return found


@pytest.mark.parametrize("allowed", [None, (5, 6, 7)])
def test_it_ends_where_nothing_is_left(
    engine: Engine, output: list[int], chosen: dict[str, Any], allowed: tuple[int, ...] | None
) -> None:
    """No token may follow the fourth one; its neighbour goes on."""
    params = SamplingParams(**chosen, allowed_token_ids=allowed)
    [good] = engine.make_requests("good", PROMPT, SamplingParams(**chosen))
    [bad] = engine.make_requests("bad", PROMPT, params)
    if allowed is None:
        words = tuple((*output[:4], token) for token in range(VOCAB))
    else:
        words = tuple((first, token) for first in allowed for token in allowed)
    engine.add_request(replace(bad, bad_words_ids=words))
    engine.add_request(good)
    found = run(engine)
    tokens = [token for one in found["bad"] for token in one.new_token_ids]
    if allowed is None:
        assert tokens == output[:4]
    else:
        assert len(tokens) == 1 and tokens[0] in allowed
    end = found["bad"][-1]
    assert end.finish_reason is FinishReason.ERROR and end.refused == "bad_words"
    assert end.error is not None and "forbid every next token" in end.error
    assert [token for one in found["good"] for token in one.new_token_ids] == output
    engine.parts.scheduler.check_integrity()


def test_what_forbids_everything_from_the_start_is_refused(model: Path) -> None:
    with llm_of(model, "plain", {}) as llm:
        params = SamplingParams(
            **GREEDY, allowed_token_ids=[5, 6], stop_token_ids=[5, 6], min_tokens=3
        )
        with pytest.raises(ParameterError, match="leaves a token") as caught:
            llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        assert caught.value.field == "allowed_token_ids"
