"""An error while one request's output is made ends that request, with a reason, and no other."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken import LLM, SamplingParams
from foretoken.config import EngineConfig
from foretoken.engine.engine import Engine
from foretoken.engine.outputs import GrowingOutput
from foretoken.engine.thread import AsyncEngine
from foretoken.engine.wiring import build_engine
from foretoken.models.tensors import ModelOutput
from foretoken.runtime.batch import Batch, Verification
from foretoken.runtime.scheduling import commit as commits
from foretoken.text.streams import TextStreams
from foretoken.text.tokenizer import Detokenizer
from foretoken.types import FinishReason, Output, RequestOutput
from tests.e2e.serving import Serving, post, serving

PROMPTS = ["def a(", "class B", "import c"]
BAD = 1
"""Of PROMPTS, the one whose output fails."""
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 256,
    "adaptive_speculation": False,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}


class Broken(Exception):
    """What no code of ours expects."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def good(llm: LLM) -> list[RequestOutput]:
    """What they are without any failure."""
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def breaks(patch: pytest.MonkeyPatch, owner: Any, name: str, is_bad: Any) -> None:
    """From now on `owner.name` raises where `is_bad` says so of its arguments."""
    right = getattr(owner, name)

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if is_bad(*args):
            raise Broken("out of order")
        return right(*args, **kwargs)

    patch.setattr(owner, name, sometimes)


def bad_id(engine: Engine) -> str:
    """Of the request that fails, found by its prompt."""
    tokenizer = engine.parts.tokenizer
    assert tokenizer is not None
    ids = tuple(tokenizer.encode(PROMPTS[BAD]))
    live = engine.parts.scheduler.sequences.values()
    return next((s.request.request_id for s in live if s.request.prompt_token_ids == ids), "none")


def in_detokenizer(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    scheduler = engine.parts.scheduler
    breaks(patch, scheduler, "_find_stop_string", lambda name, _: name == bad_id(engine))


def in_output(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    breaks(
        patch,
        commits,
        "output_of",
        lambda span, *_: span.sequence.request.request_id == bad_id(engine),
    )


def in_text(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    breaks(patch, TextStreams, "advance", lambda _, output: output.request_id == bad_id(engine))


def in_last_text(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Only where the last piece is made: the request has left the scheduler by then."""
    names: set[str] = set()

    def is_bad(texts: TextStreams, output: Output) -> bool:
        names.add(bad_id(engine))
        return output.finish_reason is not None and output.request_id in names

    breaks(patch, TextStreams, "advance", is_bad)


def in_logprobs(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Rules, filters and logprobs are worked out for all rows at once."""

    def is_bad(batch: Batch, output: ModelOutput) -> bool:
        return any(s.sequence.request.request_id == bad_id(engine) for s in batch.spans)

    breaks(patch, engine.parts.verifier, "verify", is_bad)


PLACES = (in_detokenizer, in_output, in_text, in_last_text, in_logprobs)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_the_others_keep_their_answers(
    llm: LLM, good: list[RequestOutput], place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        place(patch, llm._engine)
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for index, (one, expected) in enumerate(zip(found, good, strict=True)):
        output = one.outputs[0]
        if index == BAD:
            assert output.finish_reason is FinishReason.ERROR
            assert one.error is not None and "out of order" in one.error
            assert expected.outputs[0].text.startswith(output.text)
        else:
            assert one.error is None
            assert output.token_ids == expected.outputs[0].token_ids
            assert output.text == expected.outputs[0].text
    engine = llm._engine
    assert not engine.has_unfinished
    engine.parts.scheduler.check_integrity()
    assert llm.generate(PROMPTS, PARAMS, use_tqdm=False)[BAD].error is None


def test_an_output_that_cannot_be_put_together(
    llm: LLM, good: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = good[BAD].prompt_token_ids
    with monkeypatch.context() as patch:
        breaks(patch, GrowingOutput, "_frozen", lambda one: one.request.prompt_token_ids == ids)
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [one.error is None for one in found] == [i != BAD for i in range(len(PROMPTS))]
    assert found[BAD].outputs[0].finish_reason is FinishReason.ERROR
    assert found[BAD].outputs[0].token_ids == good[BAD].outputs[0].token_ids
    assert found[0].outputs[0].text == good[0].outputs[0].text


def test_a_stream_ends_with_the_reason(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        in_text(patch, llm._engine)
        *_, last = llm.stream(PROMPTS[BAD], PARAMS)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None and "out of order" in last.error


def test_a_queue_takes_all_or_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure while the requests of one call are queued leaves none of them behind."""
    with monkeypatch.context() as patch:
        breaks(patch, TextStreams, "open", lambda _, request: request.sample_index == 2)
        with pytest.raises(Broken):
            llm.generate(PROMPTS[0], SamplingParams(n=3, max_tokens=4), use_tqdm=False)
    assert not llm._engine.has_unfinished
    llm._engine.parts.scheduler.check_integrity()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(EngineConfig.from_kwargs(model="demo", **SETTINGS))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Serving]:
    with serving(engine) as running:
        yield running


def asked(server: Serving, index: int, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[index],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        **changes,
    }


async def all_at_once(server: Serving, **changes: Any) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        bodies = [asked(server, index, **changes) for index in range(len(PROMPTS))]
        return await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_server_answers_the_others(
    server: Serving, engine: Engine, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [post(server, "/v1/completions", asked(server, i)) for i in range(len(PROMPTS))]
    with monkeypatch.context() as patch:
        place(patch, engine)
        whole = asyncio.run(all_at_once(server))
        streams = asyncio.run(all_at_once(server, stream=True))
    for index, (answer, stream) in enumerate(zip(whole, streams, strict=True)):
        if index == BAD:
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "internal_server_error"
            assert '"error"' in stream.text and stream.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == expected[index].json()["choices"]
            assert '"error"' not in stream.text
    server.wait_idle()
    assert server.state.engine.alive
    again = post(server, "/v1/completions", asked(server, BAD))
    assert again.json()["choices"] == expected[BAD].json()["choices"]


def opened(running: AsyncEngine, name: str, prompt: list[int]) -> Any:
    return running.open(running.engine.make_requests(name, prompt, PARAMS))


def test_delivery_and_queueing_fail_for_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(EngineConfig.from_kwargs(model="demo", **SETTINGS))

    def fails(outputs: Sequence[Output]) -> None:
        raise Broken("an observer")

    async def read(stream: Any) -> list[Output]:
        return [output async for batch in stream.batches() for output in batch]

    async def main() -> None:
        running = AsyncEngine(engine)
        seen: list[str] = []
        running.observers.append(fails)
        running.observers.append(lambda outputs: seen.extend(o.request_id for o in outputs))
        running.start()
        good, bad, unqueued = (opened(running, name, [5, 6]) for name in ("a", "b", "c"))
        breaks(monkeypatch, bad, "put", lambda output: len(seen) > 4)
        breaks(monkeypatch, TextStreams, "open", lambda _, request: request.request_id == "c")
        one, two, three = await asyncio.gather(read(good), read(bad), read(unqueued))
        assert one[-1].finish_reason is FinishReason.LENGTH
        for failed in (two, three):
            assert failed[-1].finish_reason is FinishReason.ERROR
            assert "out of order" in (failed[-1].error or "")
        assert {"a", "b"} <= set(seen)
        assert running.alive and running.num_open == 0
        await running.stop()
        assert not engine.has_unfinished

    asyncio.run(main())


def test_many_bad_requests_in_a_row_do_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone in a step, a request that fails is no sign that the engine has."""
    engine = build_engine(EngineConfig.from_kwargs(model="demo", **SETTINGS))

    def broken(batch: Batch, output: ModelOutput) -> Verification:
        raise Broken("out of order")

    monkeypatch.setattr(engine.parts.verifier, "verify", broken)
    for number in range(5):
        [request] = engine.make_requests(str(number), [1, 2, 3], PARAMS)
        engine.add_request(request)
        [output] = engine.step()
        assert output.finish_reason is FinishReason.ERROR
    assert not engine.has_unfinished


def test_a_detokenizer_that_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", **SETTINGS) as one:
        breaks(monkeypatch, Detokenizer, "feed", lambda *_: True)
        [found] = one.generate("x", PARAMS, use_tqdm=False)
        assert found.error is not None
