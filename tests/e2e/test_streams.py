"""Several streams of one LLM in one thread: each gets its own outputs, whoever steps."""

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError, EngineLostError, PromptError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.types import FinishReason, Output
from tests.drafters import JunkProposer
from tests.e2e.lossless import is_idle

PROMPTS = [{"prompt_token_ids": [7 * i + 1, 3, 5 + i]} for i in range(4)]


def params(max_tokens: int = 30) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False, ignore_eos=True)


class Moody(Proposer):
    name = "moody"
    error: BaseException | None = None

    def propose(self, context: Context) -> Draft:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return Draft.empty(len(context.spans))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


def llm_of(model: Path, proposer: Proposer) -> LLM:
    return LLM(
        str(model), proposer=proposer, dtype="float32", kv_cache_memory_bytes=8 << 20, seed=1
    )


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """With several tokens a step, sometimes."""
    with llm_of(model, JunkProposer(97)) as made:
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[int, ...]]:
    found = [llm.generate(prompt, params(), use_tqdm=False)[0] for prompt in PROMPTS]
    return [one.outputs[0].token_ids for one in found]


def ids(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.new_token_ids)


def test_streams_in_turns(llm: LLM, alone: list[tuple[int, ...]]) -> None:
    found: list[list[Output]] = [[] for _ in PROMPTS]
    for row in zip_longest(*(llm.stream(prompt, params()) for prompt in PROMPTS)):
        for outputs, output in zip(found, row, strict=True):
            if output is not None:
                outputs.append(output)
    assert [ids(outputs) for outputs in found] == alone
    assert all(outputs[-1].finish_reason is FinishReason.LENGTH for outputs in found)
    assert is_idle(llm)


def test_one_stream_read_to_its_end_while_another_is_open(
    llm: LLM, alone: list[tuple[int, ...]]
) -> None:
    first, second = llm.stream(PROMPTS[0], params()), llm.stream(PROMPTS[1], params())
    begun = [next(first), next(second), next(first)]
    rest_of_second = list(second)
    rest_of_first = list(first)
    assert ids([begun[0], begun[2], *rest_of_first]) == alone[0]
    assert ids([begun[1], *rest_of_second]) == alone[1]
    assert is_idle(llm)


def test_generate_while_streams_are_open(llm: LLM, alone: list[tuple[int, ...]]) -> None:
    """Inside the loop over one, with another one begun and not read."""
    waiting = llm.stream(PROMPTS[3], params())
    begun = next(waiting)
    outputs = []
    for number, output in enumerate(llm.stream(PROMPTS[0], params())):
        outputs.append(output)
        if number in (0, 5):
            inner = llm.generate(PROMPTS[1:3], params(), use_tqdm=False)
            assert [one.outputs[0].token_ids for one in inner] == alone[1:3]
    assert ids(outputs) == alone[0]
    assert ids([begun, *waiting]) == alone[3]
    assert is_idle(llm)


def test_streams_inside_streams(llm: LLM, alone: list[tuple[int, ...]]) -> None:
    outer = []
    for output in llm.stream(PROMPTS[0], params()):
        outer.append(output)
        assert ids(list(llm.stream(PROMPTS[1], params(5)))) == alone[1][:5]
    assert ids(outer) == alone[0]
    assert is_idle(llm)


@pytest.mark.parametrize("how", ["close", "drop", "raise", "break"])
def test_a_stream_that_is_left_ends_alone(llm: LLM, alone: list[tuple[int, ...]], how: str) -> None:
    kept = llm.stream(PROMPTS[0], params())
    begun = next(kept)
    left: Any = llm.stream(PROMPTS[1], params(200))
    next(left)
    if how == "close":
        left.close()
    elif how == "raise":
        with pytest.raises(KeyError):
            left.throw(KeyError("mine"))
    elif how == "break":
        for _ in left:
            break
    del left
    assert llm._engine.parts.scheduler.num_running == 1
    assert ids([begun, *kept]) == alone[0]
    assert is_idle(llm)


def test_a_stream_that_was_never_read_starts_nothing(llm: LLM) -> None:
    unread = llm.stream(PROMPTS[0], params())
    assert is_idle(llm)
    del unread
    assert is_idle(llm)


def test_a_wrong_prompt_disturbs_no_open_stream(llm: LLM, alone: list[tuple[int, ...]]) -> None:
    stream = llm.stream(PROMPTS[0], params())
    begun = next(stream)
    with pytest.raises(PromptError):
        next(llm.stream({"prompt_token_ids": []}, params()))
    with pytest.raises(PromptError):
        llm.generate([PROMPTS[1], {"prompt_token_ids": [-1]}], params(), use_tqdm=False)
    assert ids([begun, *stream]) == alone[0]
    assert is_idle(llm)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_step_that_fails_ends_only_its_readers_request(
    model: Path, alone: list[tuple[int, ...]], error: BaseException
) -> None:
    """Whoever steps is told; nothing was committed, so that the others lose no token."""
    proposer = Moody()
    with llm_of(model, proposer) as llm:
        first, second = llm.stream(PROMPTS[0], params()), llm.stream(PROMPTS[1], params())
        begun = [next(first), next(second)]
        proposer.error = error
        with pytest.raises(type(error)):
            list(second)
        assert llm._engine.parts.scheduler.num_running == 1
        assert ids([begun[0], *first]) == alone[0]
        [after] = llm.generate(PROMPTS[2], params(), use_tqdm=False)
        assert after.outputs[0].token_ids == alone[2]
        assert is_idle(llm)


def test_a_step_that_breaks_off_after_committing_is_said_to_all(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are lost then: a stream that went on without them would be wrong, or wait forever."""

    def broken(stats: object) -> None:
        raise RuntimeError("out of ink")

    with llm_of(model, Moody()) as llm:
        first, second = llm.stream(PROMPTS[0], params()), llm.stream(PROMPTS[1], params())
        next(first), next(second)
        monkeypatch.setattr(llm._engine.metrics, "record", broken)
        with pytest.raises(RuntimeError, match="out of ink"):
            list(first)
        with pytest.raises(EngineLostError):
            list(second)
        with pytest.raises(EngineLostError):
            llm.generate(PROMPTS[2], params(), use_tqdm=False)


def test_an_llm_that_is_closed_under_a_stream(model: Path) -> None:
    llm = llm_of(model, Moody())
    stream = llm.stream(PROMPTS[0], params())
    next(stream)
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        list(stream)


def test_a_stream_collected_in_the_middle_of_a_step(model: Path) -> None:
    """The garbage collector may close a stream at any moment; its request ends after the step."""
    left: list[Any] = []

    class Collects(Moody):
        def propose(self, context: Context) -> Draft:
            left.clear()
            return super().propose(context)

    with llm_of(model, Collects()) as llm:
        stream, other = llm.stream(PROMPTS[0], params()), llm.stream(PROMPTS[1], params(200))
        next(other)
        left.append(other)
        del other
        assert ids(list(stream))
        assert not left
        assert is_idle(llm)
