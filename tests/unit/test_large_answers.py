"""Large answers and large bodies: reckoned before they are made, written between other work."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken.errors import ParameterError
from foretoken.server.problems import Problem
from foretoken.server.requests.answer_size import MOST_LOGPROBS, within_bounds
from foretoken.server.requests.prompt_ids import PromptIds
from foretoken.server.schemas import ChatBody, CompletionBody
from foretoken.server.transport.body_room import LARGEST_BODIES, BodyRoom
from foretoken.server.transport.events import LateList, to_json
from foretoken.server.transport.json_size import SMALL
from foretoken.server.transport.slices import SLICE_BYTES, gathered, in_slices, pieces
from foretoken.types import SamplingParams

LENGTH = 32_768
MESSAGES = [{"role": "user", "content": "x"}]


def rows(count: int) -> Iterator[dict[str, Any]]:
    return ({str(i): {"logprob": -i / 7, "decoded_token": "\u00e9\ud800"}} for i in range(count))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 1500])
def test_pieces_are_the_same_json(count: int) -> None:
    def answer() -> dict[str, Any]:
        inner = {
            "logprobs": {"top": LateList(rows(count)), "ids": LateList(range(count))},
            "n": None,
        }
        return {
            "id": "x",
            "choices": LateList([inner, {"text": "a", "of": LateList([])}]),
            "usage": {},
        }

    def listed(value: Any) -> Any:
        if isinstance(value, LateList):
            return [listed(one) for one in value]
        if isinstance(value, dict):
            return {name: listed(one) for name, one in value.items()}
        return value

    expected = to_json(listed(answer()))
    assert b"".join(pieces(answer())) == to_json(answer()) == expected
    assert b"".join(gathered(pieces(answer()))) == expected
    json.loads(expected)


def test_the_loop_goes_round_between_slices() -> None:
    """However many answers are written at once, and whatever a list holds."""

    async def main() -> None:
        written, rounds, largest, turn = 0, 0, 0, asyncio.Lock()

        def counted(made: Iterator[bytes]) -> Iterator[bytes]:
            nonlocal written
            for piece in made:
                written += len(piece)
                yield piece

        async def watch() -> None:
            nonlocal rounds, largest, written
            while True:
                rounds, largest, written = rounds + 1, max(largest, written), 0
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        answers = [{"rows": LateList(rows(4000))}, {"ids": LateList(range(100_000))}] * 3
        made = await asyncio.gather(*(in_slices(counted(pieces(one)), turn) for one in answers))
        watching.cancel()
        size = sum(len(piece) for answer in made for piece in answer)
        assert size > 2_000_000
        assert rounds >= size / (2 * SLICE_BYTES)
        assert largest <= 2 * SLICE_BYTES, "more than a slice between two rounds"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "prompts", "params", "field"),
    [
        ({"prompt_logprobs": 20}, [2000], {"n": 128, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, [2000], {"n": 128, "logprobs": 20}, "logprobs"),
        ({"prompt_logprobs": 1}, [1900] * 128, {"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 20, "max_tokens": 4000}, [1], {"n": 4, "logprobs": 20}, "logprobs"),
        ({"token_sources": True, "max_tokens": 5000}, [1] * 64, {}, "token_sources"),
        ({"echo": True}, [30_000] * 256, {}, "echo"),
        ({"return_token_ids": True}, [30_000], {"n": 140}, "return_token_ids"),
    ],
)
def test_what_multiplies_is_refused_with_the_arithmetic(
    body: dict[str, Any], prompts: list[int], params: dict[str, Any], field: str
) -> None:
    given = CompletionBody.model_validate({"prompt": "x", **body})
    asked = [PromptIds([5] * length) for length in prompts]
    sampling = SamplingParams(max_tokens=given.max_tokens or 16, **params)
    with pytest.raises(ParameterError, match=r"outputs .*allowed: at most [\d,]+") as error:
        within_bounds(given, asked, sampling, LENGTH)
    assert error.value.field == field
    few = [PromptIds([5])]
    assert within_bounds(given, few, SamplingParams(max_tokens=1), LENGTH).max_tokens == 1


def test_without_max_tokens_an_answer_has_what_there_is_room_for() -> None:
    prompt = [PromptIds([5] * 10)]
    params = SamplingParams(max_tokens=None, n=2, logprobs=20)
    whole = ChatBody.model_validate({"messages": MESSAGES, "logprobs": True, "top_logprobs": 20})
    most = within_bounds(whole, prompt, params, LENGTH).max_tokens
    assert most is not None and 2 * 21 * most <= MOST_LOGPROBS < 2 * 21 * (most + 1)
    streamed = whole.model_copy(update={"stream": True})
    assert within_bounds(streamed, prompt, params, LENGTH) is params, "a stream holds nothing"


def test_bodies_that_come_share_a_room() -> None:
    """Whoever has been silent longest makes room; small bodies always get in."""

    async def main() -> None:
        room = BodyRoom(max_body_bytes=4 * SMALL)
        dropped: list[int] = []

        async def send(number: int, stalls: asyncio.Event) -> None:
            with room.body() as body:
                try:
                    async with body.unless_dropped():
                        for _ in range(4):
                            body.add(bytes(SMALL))
                        await stalls.wait()
                except Problem as problem:
                    assert problem.status == 503 and problem.headers["retry-after"] == "1"
                    dropped.append(number)

        stalls = asyncio.Event()
        count = 3 * LARGEST_BODIES
        senders = [asyncio.ensure_future(send(number, stalls)) for number in range(count)]
        while len(dropped) < count - LARGEST_BODIES:
            await asyncio.sleep(0)
            assert room.held_bytes <= room.most_bytes
        with room.body() as small:
            small.add(b"x" * SMALL)
            assert len(small.raw) == SMALL
        stalls.set()
        await asyncio.gather(*senders)
        assert sorted(dropped) == list(range(count - LARGEST_BODIES)), "the latest stay"
        assert room.held_bytes == 0

    asyncio.run(main())
