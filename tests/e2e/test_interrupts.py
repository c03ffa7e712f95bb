"""Ctrl-C, wherever it lands in a call, and calls from several threads: the LLM stays as it was."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from tests.drafters import JunkProposer
from tests.e2e.lossless import is_idle
from tests.guards.sources import ROOT

SOURCE = str(ROOT / "src" / "foretoken")
FACES = ("llm.py", "engine/driver.py")
PROMPTS = [{"prompt_token_ids": [7 * i + 1, 3, 5 + i]} for i in range(4)]
Place = tuple[CodeType, int]


def params(max_tokens: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False, ignore_eos=True)


def ids(llm: LLM, prompts: Any = PROMPTS, max_tokens: int = 3) -> list[tuple[int, ...]]:
    found = llm.generate(prompts, params(max_tokens), use_tqdm=False)
    return [one.outputs[0].token_ids for one in found]


def streamed(llm: LLM) -> list[int]:
    outputs = llm.stream(PROMPTS[0], params())
    return [token for output in outputs for token in output.new_token_ids]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "seed": 1}
    with LLM(str(model), proposer=JunkProposer(97), **settings) as made:
        yield made


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a program that runs in a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Watched:
    """Runs a function and says at each instruction of the faces, and at each line of everything
    else of the package, where it is."""

    def __init__(self, reached: Callable[[Place], None]) -> None:
        self._reached = reached

    def run(self, function: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            function()
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE):
            return None
        is_face = name.removeprefix(SOURCE + "/") in FACES
        frame.f_trace_opcodes, frame.f_trace_lines = is_face, not is_face
        return self._at

    def _at(self, frame: FrameType, event: str, argument: object) -> Any:
        if event in ("line", "opcode"):
            self._reached((frame.f_code, frame.f_lasti))
        return self._at


def places(function: Callable[[], object]) -> dict[Place, int]:
    """Where a call comes by, and how often."""
    found: dict[Place, int] = {}

    def count(place: Place) -> None:
        found[place] = found.get(place, 0) + 1

    Watched(count).run(function)
    return found


def interrupted(function: Callable[[], object], place: Place, time: int) -> bool:
    """Run a function with Ctrl-C at a place, when it comes by for this time."""
    left = [time]

    def reach(reached: Place) -> None:
        if reached == place:
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)

    try:
        Watched(reach).run(function)
    except KeyboardInterrupt:
        return True
    return False


def check_interrupts(llm: LLM, call: Callable[[], object], step: int) -> None:
    expected = ids(llm)
    found = places(call)
    assert len(found) > 500
    came = 0
    for place, count in list(found.items())[::step]:
        for time in {1, (count + 1) // 2, count}:
            came += interrupted(call, place, time)
            [first] = ids(llm, PROMPTS[:1], 1)
            assert first == expected[0][:1] and is_idle(llm), place
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert came > 0.9 * len(found) / step
    assert ids(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("step", [101, 1], ids=["some", "every instruction"])
@pytest.mark.parametrize("call", [ids, streamed])
def test_ctrl_c_leaves_the_llm_as_it_was(llm: LLM, ctrl_c: None, call: Any, step: int) -> None:
    check_interrupts(llm, lambda: call(llm), step)


class Entered(Proposer):
    """Calls what it was given in the middle of a step, once."""

    name = "entered"
    call: Callable[[], object] | None = None

    def propose(self, context: Context) -> Draft:
        call, self.call = self.call, None
        if call is not None:
            call()
        return Draft.empty(len(context.spans))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def entered(model: Path) -> Iterator[tuple[LLM, Entered]]:
    proposer = Entered()
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "seed": 1}
    with LLM(str(model), proposer=proposer, **settings) as made:
        yield made, proposer


def in_threads(calls: list[Callable[[], object]]) -> list[Any]:
    """What each call gives in a thread of its own, or how it failed; all begin at once."""
    found: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def run(number: int) -> None:
        barrier.wait()
        try:
            found[number] = calls[number]()
        except BaseException as error:  # noqa: BLE001 - compared by the test
            found[number] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_threads_share_an_llm(llm: LLM) -> None:
    alone = ids(llm, max_tokens=20)
    stream = [token for one in llm.stream(PROMPTS[0], params()) for token in one.new_token_ids]
    calls: list[Callable[[], object]] = [
        *(lambda i=i: ids(llm, PROMPTS[i:], 20) for i in range(4)),
        *(lambda: streamed(llm) for _ in range(2)),
    ]
    assert in_threads(calls) == [alone, alone[1:], alone[2:], alone[3:], stream, stream]
    assert is_idle(llm)


def test_a_thread_that_waits_gets_the_next_turn(entered: tuple[LLM, Entered]) -> None:
    """Another thread's call is queued while a step runs, and both end with their own tokens."""
    llm, proposer = entered
    alone = ids(llm, max_tokens=20)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(ids(llm, PROMPTS[1:2], 20)))
    proposer.call = other.start
    assert ids(llm, max_tokens=20) == alone
    other.join(60)
    assert found == [alone[1:2]] and is_idle(llm)


def test_a_stream_left_while_another_thread_steps(entered: tuple[LLM, Entered]) -> None:
    llm, proposer = entered
    [alone] = ids(llm, PROMPTS[:1], 20)
    left: list[Any] = [llm.stream(PROMPTS[1], params(200))]
    next(left[0])

    def leave() -> None:
        thread = threading.Thread(target=left.clear)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    proposer.call = leave
    assert ids(llm, PROMPTS[:1], 20) == [alone] and is_idle(llm)


@pytest.mark.parametrize("face", ["generate", "stream", "close"])
def test_a_call_inside_a_step_is_refused(entered: tuple[LLM, Entered], face: str) -> None:
    llm, proposer = entered
    alone = ids(llm)
    calls = {"generate": lambda: ids(llm), "stream": lambda: streamed(llm), "close": llm.close}
    proposer.call = calls[face]
    with pytest.raises(ConfigError, match="inside a step"):
        ids(llm)
    assert ids(llm) == alone and is_idle(llm)


def test_a_second_ctrl_c_does_not_wait(entered: tuple[LLM, Entered], ctrl_c: None) -> None:
    llm, proposer = entered
    went_on: list[bool] = []

    def press_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)

    alone = ids(llm)
    proposer.call = press_twice
    with pytest.raises(KeyboardInterrupt):
        ids(llm)
    assert went_on == [True]
    assert ids(llm) == alone and is_idle(llm)
