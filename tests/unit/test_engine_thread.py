"""The engine in a thread: streams, failures, aborts, the end."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretoken.config import EngineConfig
from foretoken.engine.engine import Engine
from foretoken.engine.thread import AsyncEngine, OutputStream
from foretoken.engine.wiring import build_engine
from foretoken.errors import EngineLostError, RequestError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.testing import write_tiny_llama
from foretoken.types import FinishReason, Output, SamplingParams


class Faulty(Proposer):
    """Raises when it is asked about one of some requests."""

    name = "faulty"

    def __init__(self, bad: str, times: int) -> None:
        self.bad = bad
        self.left = times

    def propose(self, context: Context) -> Draft:
        names = [span.sequence.request.request_id for span in context.spans]
        if self.left and any(name.startswith(self.bad) for name in names):
            self.left -= 1
            raise ValueError("out of ideas")
        return Draft.empty(len(context.spans))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


class InStep(Proposer):
    """Lets no step begin before the loop has seen those before it, however busy the machine is."""

    name = "in_step"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def propose(self, context: Context) -> Draft:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(60)
        return Draft.empty(len(context.spans))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def engine_of(model: Path, proposer: Proposer | None = None) -> Engine:
    config = EngineConfig.from_kwargs(
        model=str(model), max_num_seqs=4, kv_cache_memory_bytes=8 << 20
    )
    engine = build_engine(config)
    if proposer is not None:  # asked in every step, also where no draft is wanted
        object.__setattr__(engine.parts, "proposer", proposer)
    return engine


def opened(running: AsyncEngine, name: str, max_tokens: int = 8) -> OutputStream:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return running.open(running.engine.make_requests(name, [1, 2, 3], params))


async def read(stream: OutputStream) -> list[Output]:
    return [output async for batch in stream.batches() for output in batch]


def ids(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_outputs_are_the_engines(model: Path) -> None:
    async def main() -> None:
        running = AsyncEngine(engine_of(model))
        running.start()
        first, second = opened(running, "a"), opened(running, "b", 20)
        one, two = await asyncio.gather(read(first), read(second))
        assert ids(one) == ids(two)[:8]
        assert len(ids(two)) == 20
        assert [o.finish_reason for o in one][-1] is FinishReason.LENGTH
        assert running.num_open == 0
        await running.stop()
        assert running.stopped_cleanly

    asyncio.run(main())


def test_an_engine_that_keeps_failing_is_lost_loudly(model: Path) -> None:
    async def main() -> None:
        told: list[bool] = []
        bad = engine_of(model, Faulty("bad", 99))
        running = AsyncEngine(bad, on_lost=lambda: told.append(True))
        running.start()
        for number in range(3):
            outputs = await read(opened(running, f"bad-{number}"))
            assert [o.finish_reason for o in outputs] == [FinishReason.ERROR]
        async with asyncio.timeout(60):
            while not told:
                await asyncio.sleep(0.005)
        assert told == [True] and not running.alive
        with pytest.raises(EngineLostError):
            opened(running, "late")
        assert not running.stopped_cleanly

    asyncio.run(main())


class Waiting(Proposer):
    """Drafts one wrong token, in as many steps as it may: each step stops here for the test."""

    name = "waiting"

    def __init__(self) -> None:
        self.asked, self.may = threading.Semaphore(0), threading.Semaphore(0)

    def propose(self, context: Context) -> Draft:
        self.asked.release()
        assert self.may.acquire(timeout=60)
        return Draft(ids=tuple((0,) * min(1, span.draft_budget) for span in context.spans))

    async def in_step(self) -> None:
        """A step has come to its drafts, and the loop has the outputs of those before it."""
        assert await asyncio.to_thread(self.asked.acquire, timeout=60)

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


def test_who_comes_while_drafts_are_made_is_in_the_step(model: Path) -> None:
    async def go() -> None:
        config = EngineConfig.from_kwargs(
            model=str(model), max_num_seqs=4, kv_cache_memory_bytes=8 << 20,
            adaptive_speculation=False,
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        )  # fmt: skip
        engine, proposer = build_engine(config), Waiting()
        object.__setattr__(engine.parts, "proposer", proposer)
        steps: list[list[str]] = []
        running = AsyncEngine(engine, observers=[lambda outputs: steps.append(names(outputs))])
        running.start()
        first = opened(running, "first")
        await proposer.in_step()
        proposer.may.release()
        await proposer.in_step()
        assert steps == [["first"]]
        # In the middle of the second step: somebody comes, the first goes, one more comes.
        second = opened(running, "second")
        running.close(first)
        third = opened(running, "third")
        proposer.may.release(100)
        found = await asyncio.gather(read(second), read(third))
        assert [ids(outputs) for outputs in found] == [[*ids(found[0])]] * 2
        assert "second" in steps[1], "it waited for another step"
        assert "third" not in steps[1], "it came before the end of another request"
        assert engine.parts.scheduler.num_running == 0
        await running.stop()

    asyncio.run(go())


def names(outputs: Sequence[Output]) -> list[str]:
    return [output.request_id for output in outputs]


def test_nobody_reads_so_the_stream_is_cut_off(model: Path) -> None:
    async def main() -> None:
        in_step = InStep(asyncio.get_running_loop())
        running = AsyncEngine(engine_of(model, in_step), max_buffered=10)
        running.start()
        stream = opened(running, "a", 200)
        while running.num_open:
            await asyncio.sleep(0.005)
        assert stream.overflowed
        assert 10 < len(ids(await read(stream))) < 60
        await running.stop()

    asyncio.run(main())


def test_a_deadline_and_a_call_that_fails(model: Path) -> None:
    async def main() -> None:
        running = AsyncEngine(engine_of(model))
        running.start()
        stream = OutputStream([], 10)
        stream.live.add("never")
        with pytest.raises(TimeoutError):
            async for _ in stream.batches(asyncio.get_running_loop().time() + 0.01):
                pass
        with pytest.raises(ZeroDivisionError):
            await running.call(lambda engine: 1 / 0)
        assert running.alive
        await running.stop()

    asyncio.run(main())


def test_an_id_is_one_requests(model: Path) -> None:
    """Its outputs would go to the stream that was opened last, and the other would never end."""

    async def main() -> None:
        running = AsyncEngine(engine_of(model))
        running.start()
        first = opened(running, "twice", 20)
        with pytest.raises(RequestError, match="'twice'; allowed: an id that is not in use"):
            opened(running, "twice")
        [request] = running.engine.make_requests("same", [1], SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match="'same'"):
            running.open([request, request])
        assert len(ids(await read(first))) == 20
        again = opened(running, "twice", 20)
        running.close(again)
        with pytest.raises(RequestError, match="'twice'"):  # the end of the one before may come
            opened(running, "twice")
        await running.call(lambda engine: None)
        assert len(ids(await read(opened(running, "twice", 20)))) == 20
        assert running.num_open == 0
        await running.stop()

    asyncio.run(main())
