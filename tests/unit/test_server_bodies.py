"""Requests as they come: odd clients, hosts, bodies, their sizes, and what is wrong with them."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from foretoken.errors import ParameterError
from foretoken.server.access import host_name, is_own
from foretoken.server.problems import Problem
from foretoken.server.requests.answering import MOST_LOGPROBS, within_bounds
from foretoken.server.requests.prompt_ids import PromptIds
from foretoken.server.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    CorpusBody,
    DetokenizeBody,
    SpeculationBody,
    TokenizeBody,
)
from foretoken.server.settings import Limits
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.draining_server import DrainingServer
from foretoken.server.transport.events import LateList, to_json
from foretoken.server.transport.reading import (
    LARGEST_BODIES,
    MOST,
    SMALL,
    BodyRoom,
    JsonSize,
    as_body,
    check_json_size,
    json_size,
)
from foretoken.server.transport.slices import SLICE_BYTES, gathered, in_slices, pieces
from foretoken.types import SamplingParams
from tests.mock_server.server import mock_running

BODY = b'{"prompt": "x"}'
CHUNKED = b"5\r\n" + BODY[:5] + b"\r\na\r\n" + BODY[5:] + b"\r\n0\r\n\r\n"
PLAIN = "content-length: 15"
JAVA = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB"
OFFERS = {
    "java": JAVA,
    "websocket": "connection: keep-alive, upgrade\r\nUpgrade: websocket\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13",
    "tls": "Upgrade: TLS/1.0\r\nConnection: Upgrade",
    "several": "upgrade: h2c\r\nupgrade: websocket, x/1\r\nconnection: upgrade\r\nconnection: x",
}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Says what came: whole, or below /stream piece by piece."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    request = Request(scope, receive)
    body = (await request.body()).decode()
    said = {"method": scope["method"], "path": scope["path"], "body": body}
    if scope["path"] == "/stream":

        async def pieces() -> Any:
            for letter in body:
                yield letter

        await StreamingResponse(pieces())(scope, receive, send)
    else:
        trailed = request.headers.get("x-trailed", "")
        await JSONResponse({**said, "trailed": trailed})(scope, receive, send)


class Nothing:
    """What a server without requests has accepted."""

    num_open = 0

    def end_all(self) -> None:
        """End none."""


@contextmanager
def draining() -> Iterator[str]:
    drain = Drain(0.0)
    runner = DrainingServer(echo, Limits(client_timeout_s=30), Nothing(), drain)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        listening.listen()
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{port}"
        drain.begin()
        thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module", params=["server", "lab"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with draining() if request.param == "server" else mock_running(echo) as found:
        yield found


def asked(*lines: str, path: str = "/", version: str = "1.1", host: str = "host: x\r\n") -> bytes:
    head = [f"POST {path} HTTP/{version}\r\n{host}content-type: application/json", *lines]
    return "\r\n".join([*head, "", ""]).encode()


LAST = asked(PLAIN, "connection: close", path="/last") + BODY


def exchange(url: str, *pieces: bytes) -> bytes:
    """All that is answered until the server ends the connection; each piece is sent alone."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        return b"".join(iter(lambda: client.recv(65536), b""))


def answers(raw: bytes) -> list[Any]:
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        [length] = [int(line[16:]) for line in head.lower().split(b"\r\n") if b"-length" in line]
        found.append(json.loads(raw[:length]))
        raw = raw[length:]
    return found


@pytest.mark.parametrize("cut", [None, 1, 7])
@pytest.mark.parametrize("body", ["plain", "chunked"])
@pytest.mark.parametrize("offer", OFFERS)
def test_an_upgrade_is_not_taken_and_the_body_is_read(
    url: str, offer: str, body: str, cut: int | None
) -> None:
    """In one piece or cut anywhere, twice on a connection, with another request right behind."""
    framing, content = (PLAIN, BODY) if body == "plain" else ("transfer-encoding: chunked", CHUNKED)
    whole = 2 * (asked(OFFERS[offer], framing) + content) + LAST
    pieces = [whole] if cut is None else [whole[i : i + cut] for i in range(0, len(whole), cut)]
    first, second, last = answers(exchange(url, *pieces))
    assert first["body"] == second["body"] == last["body"] == BODY.decode()
    assert (first["path"], first["method"], last["path"]) == ("/", "POST", "/last")


def test_who_offers_an_upgrade_may_wait_to_be_told_to_go_on(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(asked(JAVA, PLAIN, "expect: 100-continue", "connection: close"))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        [answer] = answers(b"".join(iter(lambda: client.recv(65536), b"")))
    assert answer["body"] == BODY.decode()


def test_an_upgrade_of_a_request_without_a_body(url: str) -> None:
    get = f"GET /a?b=%2f HTTP/1.1\r\nhost: x\r\n{JAVA}\r\n\r\n".encode()
    assert len(answers(exchange(url, get.replace(b"Upgrade, ", b"Upgrade, close, ") + LAST))) == 1
    one, two, last = answers(exchange(url, get + get + LAST))
    assert one == two and one["path"] == "/a" and not one["body"] and last["path"] == "/last"


def test_many_offers_in_one_piece_are_answered_each(url: str) -> None:
    get = b"GET / HTTP/1.1\r\nhost:x\r\nconnection:upgrade\r\nupgrade:h2c\r\n\r\n"
    assert len(answers(exchange(url, 40 * get + LAST))) == 41


@pytest.mark.parametrize("more", ["", "connection: keep-alive\r\n", JAVA + "\r\n"])
def test_http_1_0_gets_no_chunks(url: str, more: str) -> None:
    raw = exchange(url, asked(PLAIN, path="/stream", version="1.0", host=more) + BODY)
    head, _, body = raw.partition(b"\r\n\r\n")
    assert body == BODY
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    whole = exchange(url, asked(PLAIN, "expect: 100-continue", version="1.0", host=more) + BODY)
    [answer] = answers(whole)
    assert answer["body"] == BODY.decode()


def test_http_1_1_still_gets_them(url: str) -> None:
    raw = exchange(url, asked(PLAIN, "connection: close", path="/stream") + BODY)
    assert b"transfer-encoding: chunked" in raw and raw.endswith(b"\r\n0\r\n\r\n")


WRONG = {
    "two hosts": (asked(PLAIN, "host: localhost"), "host: got 2"),
    "the same host twice": (asked(PLAIN, "Host: x"), "host: got 2"),
    "another host in the URL": (asked(PLAIN, path="http://y/"), "host: got 'x'; allowed: .*'y'"),
    "a host in the URL alone": (asked(PLAIN, path="http://y/", host=""), "host: got ''"),
    "a user in the URL": (asked(PLAIN, path="http://x@y/"), "host: got 'x'"),
    "gzip": (asked("transfer-encoding: gzip, chunked"), "transfer-encoding: got 'gzip, chunked'"),
    "gzip apart": (asked("transfer-encoding: gzip\r\ntransfer-encoding: chunked"), "'gzip, chunk"),
    "identity": (asked("transfer-encoding: identity"), "allowed: chunked"),
    "chunked twice": (asked("transfer-encoding: chunked, chunked"), "Transfer-Encoding"),
    "nothing": (asked("transfer-encoding: "), ""),
    "length and chunks": (asked(PLAIN, "transfer-encoding: chunked"), ""),
    "two lengths": (asked(PLAIN, "content-length: 14"), ""),
    "0.9": (asked(PLAIN, version="0.9"), "version: got HTTP/0.9"),
    "2.0": (asked(PLAIN, version="2.0"), "version: got HTTP/2.0"),
    "h2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ""),
    "connect": (b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", ""),
    "connect with an offer": (b"CONNECT x:80 HTTP/1.1\r\n" + JAVA.encode() + b"\r\n\r\n", ""),
    "gzip with an offer": (asked(JAVA, "transfer-encoding: gzip, chunked"), "transfer-encoding"),
    "two hosts with an offer": (asked(JAVA, PLAIN, "host: y"), "host: got 2"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_read_as_it_was_meant_is_refused(url: str, wrong: str) -> None:
    head, why = WRONG[wrong]
    raw = exchange(url, asked(JAVA, PLAIN) + BODY, head + CHUNKED + LAST)
    # Pipelined behind another request it may end the connection without an answer of its own.
    assert raw.count(b"HTTP/1.1 200 ") <= 1
    raw = exchange(url, head + CHUNKED + LAST)
    assert raw.startswith(b"HTTP/1.1 400 ") and raw.count(b"HTTP/1.1 400") == 1, raw
    assert re.search(why, raw.decode()), raw


def test_the_url_may_name_the_host_too(url: str) -> None:
    one, _ = answers(exchange(url, asked(PLAIN, path="http://X/a?b") + BODY + LAST))
    assert one["path"] == "/a"


def test_trailers_are_no_headers(url: str) -> None:
    trailed = CHUNKED.removesuffix(b"\r\n") + b"x-trailed: yes\r\nhost: evil.example\r\n\r\n"
    one, _ = answers(exchange(url, asked("transfer-encoding: chunked") + trailed + LAST))
    assert one["body"] == BODY.decode() and one["trailed"] == ""


# Host headers that pass for ours and are not. The guarded bugs: an address at the beginning of a
# foreign name, and what a lenient reader cuts off or takes for a name without a dot.
OWN = {
    "localhost": "localhost", "LocalHost:8000": "localhost", "localhost.": "localhost",
    "localhost:": "localhost", "app.localhost:80": "app.localhost", "foretoken": "foretoken",
    "my_server-1:8000": "my_server-1", "127.0.0.1:8000": "127.0.0.1", "10.0.0.7": "10.0.0.7",
    "[::1]": "::1", "[::1]:8000": "::1", "[FE80::1]": "fe80::1", "[::ffff:10.0.0.1]:1":
    "::ffff:10.0.0.1", "127.0.0.1.": "127.0.0.1", "2130706433": "2130706433",
}  # fmt: skip
FOREIGN = (
    "evil.example", "evil.example:8000", "evil.example.", "localhost.evil.example",
    "127.0.0.1.evil.example", "127.1.evil", "1.2.3", "127.0.0.01", "0x7f.0.0.1",
    "notlocalhost.example", "evil.localhost.example", "foretoken.local",
)  # fmt: skip
MALFORMED = (
    "[::1].evil.example", "[::1]evil.example", "[::1]:80.evil.example", "[::1", "::1", "::1]",
    "[evil.example]", "[127.0.0.1]", "[]", "[:]", "[::1]]", "[[::1]]", "[::1%.evil.example]",
    "[fe80::1%25eth0]", "[::1]:80:80", "localhost:80:80", "localhost:80.evil.example",
    "localhost:evil.example", "localhost:123456", "localhost:-1", "localhost: 80",
    "localhost evil.example", "localhost,evil.example", "localhost, evil.example",
    "localhost/evil.example", "localhost\\evil.example", "localhost?.evil.example",
    "localhost#.evil.example", "localhost@evil.example", "user@localhost", "evil%2eexample",
    "evil\u3002example", "evil\xa1\xa3example", "\uff4cocalhost", "\u212aelvin", "lo\xadcalhost",
    "localhost\x00.evil.example", "localhost\n", "localhost\t", " localhost", "localhost ",
    ".", "..", ".evil.example", "evil..example", "localhost..", ":", ":80", "*.example",
    "http://localhost", "a" * 64, "::1:evil.example", "localhost;evil.example", '"localhost"',
)  # fmt: skip


@pytest.mark.parametrize("host", OWN)
def test_own(host: str) -> None:
    assert host_name(host) == OWN[host] and is_own(host, ())


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign(host: str) -> None:
    assert not is_own(host, ("127.0.0.1", "llm.example", "*.llm.example"))


@pytest.mark.parametrize("host", MALFORMED)
def test_malformed(host: str) -> None:
    """Nothing allows it but the word for all: not the same text, nor what it seems to be below."""
    assert host_name(host) is None
    assert not is_own(host, (host, "*.evil.example", "*.example", "::1", "localhost"))
    assert is_own(host, ("*",))


def test_allowed_names_are_read_as_those_of_requests_are() -> None:
    for allowed in ("LLM.example", "llm.example:443", "llm.example."):
        assert is_own("llm.example:8000", (allowed,)) and not is_own("xllm.example", (allowed,))
    for host in ("a.llm.example", "A.b.LLM.example.:1"):
        assert is_own(host, ("*.llm.example",)) and not is_own(host, ("llm.example",))
    assert not is_own("llm.example", ("*.llm.example",))
    assert not is_own("allm.example", ("*.llm.example", "*.")) and is_own("", ())


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(alphabet='ab"\\,:[]{}é\n')),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(alphabet='a"\\:,'), inner, max_size=5)
    ),
    max_leaves=20,
)


def counted(value: Any) -> JsonSize:
    """The same, from the value that was read."""
    if isinstance(value, list | dict):
        inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
        members = len(value) if isinstance(value, dict) else 0
        own = JsonSize(max(0, len(value) - 1), members, 1)
        return JsonSize(*(sum(each) for each in zip(own, *inner, strict=True)))
    return JsonSize(0, 0, 0)


@given(VALUES, st.booleans())
def test_only_what_is_outside_of_strings_counts(value: Any, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert json_size(raw) == counted(value)


@given(st.binary(max_size=200))
def test_anything_can_be_counted(raw: bytes) -> None:
    assert min(json_size(raw)) >= 0


@pytest.mark.parametrize(
    ("item", "count", "named"),
    [("1", MOST.values + 2, "values"), ("[]", MOST.nests + 2, "lists"),
     ('{"a":1}', MOST.nests + 2, "objects")],
)  # fmt: skip
def test_a_body_of_too_many_values_is_refused(item: str, count: int, named: str) -> None:
    raw = ("[" + ",".join([item] * count) + "]").encode()
    with pytest.raises(Problem, match=named):
        check_json_size(raw)
    check_json_size(json.dumps({"prompt": ("[" + item + "],") * count}).encode())


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


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"prompt": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}

SAID: list[tuple[type[Body], dict[str, Any], str, str]] = [
    (ChatBody, {"stop": ["x"] * 65}, "stop", "got a list of 65; allowed: at most 64"),
    (CompletionBody, {"bad_words": ["x"] * 1025}, "bad_words", "a list of 1025; allowed: at most"),
    (ChatBody, {"tools": [TOOL] * 129}, "tools", "got a list of 129; allowed: at most 128"),
    (ChatBody, {"stop": 5}, "stop", "got 5; allowed: a text or a list"),
    (ChatBody, {"stop": ["x", 5]}, "stop.1", "got 5; allowed: a text"),
    (ChatBody, {"stop": ["x", None]}, "stop.1", "got None; allowed: a text"),
    (ChatBody, {"messages": []}, "messages", "got a list of 0; allowed: at least 1"),
    (ChatBody, {"messages": None}, "messages", "missing, and required"),
    (ChatBody, {"messages": [5]}, "messages.0", "got 5; allowed: an object"),
    (ChatBody, {"messages": [{"content": "x"}]}, "messages.0.role", "missing, and required"),
    (ChatBody, {"n": "2"}, "n", "got '2'; allowed: an integer"),
    (ChatBody, {"n": 1.5}, "n", "got 1.5; allowed: an integer"),
    (ChatBody, {"n": True}, "n", "got True; allowed: an integer"),
    (ChatBody, {"stream": "yes"}, "stream", "got 'yes'; allowed: true or false"),
    (ChatBody, {"temperature": "hot"}, "temperature", "got 'hot'; allowed: a number"),
    (ChatBody, {"echo": True}, "echo", "got True; allowed: false"),
    (CompletionBody, {"best_of": 2}, "best_of", "got 2; allowed: 1"),
    (CompletionBody, {"suffix": "x"}, "suffix", "got 'x'; allowed: null"),
    (CompletionBody, {"prompt": {"a": 1}}, "prompt", "got an object; allowed: a text, texts,"),
    (CompletionBody, {"prompt": [[1], "x"]}, "prompt", "got a list of 2; allowed: a text, texts,"),
    (CompletionBody, {"prompt": None}, "prompt", "missing, and required"),
    (ChatBody, {"logit_bias": {"5": "a"}}, "logit_bias.5", "got 'a'; allowed: a number"),
    (ChatBody, {"logit_bias": {"5": None}}, "logit_bias.5", "got None; allowed: a number"),
    (ChatBody, {"metadata": [1]}, "metadata", "got a list of 1; allowed: an object"),
    (ChatBody, {"stop_token_ids": [1, "2"]}, "stop_token_ids.1", "got '2'; allowed: an integer"),
    (ChatBody, {"modalities": ["audio"]}, "modalities.0", "got 'audio'; allowed: 'text'"),
    (ChatBody, {"tool_choice": "x"}, "tool_choice", "'none', 'auto' or 'required'"),
    (ChatBody, {"tool_choice": {"type": "function", "function": {}}},
     "tool_choice.function.name", "missing, and required"),
    (ChatBody, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
     "tools.0.function.name", "got 'a b'; allowed: pattern '^["),
    (ChatBody, {"tools": [{"type": "function", "function": {"name": "f", "foo": 1}}]},
     "tools.0.function.foo", "not a field of tools.0.function; allowed: name, description"),
    (ChatBody, {"tools": [{"type": "custom", "function": {"name": "f"}}]},
     "tools.0.type", "got 'custom'; allowed: 'function'"),
    (ChatBody, {"stream_options": {"include_use": True}},
     "stream_options.include_use", "did you mean 'include_usage'?"),
    (ChatBody, {"response_format": {"type": "xml"}},
     "response_format.type", "got 'xml'; allowed: 'text', 'json_object' or 'json_schema'"),
    (ChatBody, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "missing, and required"),
    (ChatBody,
     {"response_format": {"type": "json_schema", "json_schema": {"nam": "x", "schema": {}}}},
     "response_format.json_schema.nam", "did you mean 'name'?"),
    (ChatBody, {"prediction": {"type": "content", "content": 5}},
     "prediction.content", "got 5; allowed: a text or a list"),
    (ChatBody, {"prediction": {"type": "content", "content": [{"type": "text"}]}},
     "prediction.content.0.text", "missing, and required"),
    (ChatBody, {"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    (ChatBody, {"functions": [1]}, "functions", "not a field of this request; allowed: "),
    (TokenizeBody, {"prompt": ["x"]}, "prompt", "got a list of 1; allowed: a text"),
    (DetokenizeBody, {"tokens": "x"}, "tokens", "got 'x'; allowed: a list"),
    (SpeculationBody, {"guard": "x"}, "guard", "got 'x'; allowed: a number"),
    (CorpusBody, {"text": ""}, "text", "got ''; allowed: at least 1 character"),
]  # fmt: skip
NEEDED: dict[type[Body], dict[str, Any]] = {ChatBody: CHAT, CompletionBody: TEXT}


def problem(kind: type[Body], body: dict[str, Any]) -> Problem:
    with pytest.raises(Problem) as caught:
        as_body(json.dumps({**NEEDED.get(kind, {}), **body}).encode(), kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("kind", "body", "param", "said"), SAID)
def test_a_mistake_names_field_given_and_allowed(
    kind: type[Body], body: dict[str, Any], param: str, said: str
) -> None:
    found = problem(kind, body)
    assert found.param == param
    assert found.message.startswith(f"{param}: ") and said in found.message, found.message
    assert "more)" not in found.message  # one mistake, however many forms the value could have had


def test_several_mistakes_are_counted_once_each() -> None:
    assert problem(ChatBody, {"stop": 5, "n": "x", "stream": 1}).message.endswith("(and 2 more)")


def test_what_was_given_is_shortened() -> None:
    for value in ("x" * 10**6, 10**4000, [0] * 10**5, {"x" * 10**5: 1}):
        assert len(problem(ChatBody, {"temperature": value, "n": value}).message) <= 1020
    assert problem(ChatBody, {"y" * 10**5: 1}).message.startswith("y" * 200 + ": not a field")


def test_names_of_forms_that_a_client_types_are_fields() -> None:
    """A key that is called like one of pydantic's forms stays in the path."""
    assert problem(ChatBody, {"logit_bias": {"str": "x"}}).param == "logit_bias.str"
    assert problem(ChatBody, {"metadata": {"list[str]": 5}}).param == "metadata.list[str]"
