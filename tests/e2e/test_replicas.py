"""Several replicas behind one address, without Ray: two servers in processes of their own.

The guarded bugs: a request that is lost or a token that comes twice when a replica dies, an answer
whose parts have two ids, a key that is asked for twice or not at all, replicas whose unseeded
requests write the same, a front that goes on sending to the dead.
"""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from foretoken.replicas.members import ReplicaPlace
from foretoken.server.settings import Limits, ServerConfig
from tests.e2e.fronting import KEY, Streamed, fronting, stream
from tests.e2e.serving import start_server

pytestmark = pytest.mark.slow

SMALL = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "64000000")
TEXT: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "return_token_ids": True}
GREEDY = {**TEXT, "temperature": 0}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Where is it?"}],
    "max_tokens": 150,
    "ignore_eos": True,
    "temperature": 0.9,
}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {**GREEDY, "prompt": "def parse(text):\n    return "}),
    (COMPLETIONS, {**TEXT, "prompt": "class Stack:\n", "seed": 1, "temperature": 0.8}),
    (COMPLETIONS, {**TEXT, "prompt": "import os\n", "seed": 2, "n": 2, "logprobs": 1}),
    (COMPLETIONS, {**GREEDY, "prompt": ["a = ", "b = "], "echo": True}),
    (COMPLETIONS, {**TEXT, "prompt": "for i in ", "seed": 3, "frequency_penalty": 0.5}),
    (CHATS, {**CHAT, "seed": 4}),
    (CHATS, {**CHAT, "seed": 5, "n": 2, "logprobs": True}),
    (CHATS, {**CHAT, "temperature": 0}),
]


class Replica:
    def __init__(self, name: str) -> None:
        self.process, url = start_server(*SMALL, "--internal-key", KEY, "--api-key", KEY)
        self.place = ReplicaPlace(name, url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(Replica, ("one", "two")))
    yield found
    for one in found:
        one.kill()


@pytest.fixture(scope="module")
def places(replicas: list[Replica]) -> list[ReplicaPlace]:
    return [one.place for one in replicas]


def test_it_answers_as_one_server(places: list[ReplicaPlace]) -> None:
    """Errors, names, keys and tenants are those of a server; only the front knows the keys."""
    config = ServerConfig(api_keys=("mine", "yours"), served_model_names=())
    body = {**GREEDY, "prompt": "x = ", "max_tokens": 4}
    mine = {"authorization": "Bearer mine"}
    with fronting(places, config) as front:

        def post(body: dict[str, Any], **headers: str) -> httpx.Response:
            url = front.url + COMPLETIONS
            return httpx.post(url, json=body, headers=headers, timeout=60)

        assert post(body).status_code == 401
        answer = post(body, **mine, **{"x-request-id": "here"})
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "here"
        assert answer.json()["usage"]["completion_tokens"] == 4
        for wrong, param in (
            ({**body, "temperature": -1}, "temperature"),
            ({**body, "model": "another"}, "model"),
            ({**body, "n": 10**9}, "n"),
            ({**body, "nonsense": 1}, "nonsense"),
            ({**body, "resume": [{"output_ids": [5]}]}, "resume"),
            ({**body, "priority": -1}, "priority"),
        ):
            error = post({**wrong, "stream": True}, **mine).json()["error"]
            assert error["param"] == param or error["message"].startswith(param), error
        assert httpx.get(front.url + "/v1/models", headers=mine).json()["data"][0]["id"] == "demo"
        tokens = httpx.post(front.url + "/tokenize", json={"prompt": "x"}, headers=mine).json()
        assert tokens["count"] >= 1
        for path in ("/health", "/health/live", "/version", "/control", "/", "/page/app.js"):
            assert httpx.get(front.url + path).status_code == 200, path
        assert httpx.get(front.url + "/internal/replica", headers=mine).status_code == 404
        assert httpx.get(places[0].url + "/internal/replica").status_code == 404
        assert post(body, authorization="Bearer " + KEY).status_code == 401


def test_unseeded_requests_have_noise_of_their_own(places: list[ReplicaPlace]) -> None:
    """Whoever serves them: on two replicas they would otherwise begin with the same key."""
    body = {**TEXT, "temperature": 1.0, "max_tokens": 24, "prompt": "x = "}
    body["speculation"] = {"enabled": False}  # without a seed drafts have a say
    texts = []
    for salts in ("abcdefgh", "stuvwxyz"):
        with fronting(places) as front:
            asked = [{**body, "cache_salt": salt, "n": 2} for salt in salts]
            found = [stream(front.url, COMPLETIONS, one).ids for one in asked]
            page = httpx.get(front.url + "/metrics").text
        assert len({tuple(one) for one in found}) == len(found)
        assert len(set(re.findall(r'routed_requests_total\{.*replica="(\w+)"', page))) == 2
        texts.append(found)
    assert texts[0] == texts[1], "the same noise in the order of arrival, on other replicas"


def test_a_conversation_stays_where_its_beginning_is(places: list[ReplicaPlace]) -> None:
    turns: list[dict[str, str]] = []
    with fronting(places) as front:
        for number in range(4):
            turns.append({"role": "user", "content": f"{number}: " + "tell me of it. " * 20})
            body = {"messages": turns, "max_tokens": 8, "temperature": 0}
            answer = httpx.post(front.url + CHATS, json=body, timeout=60).json()
            turns.append(answer["choices"][0]["message"])
        page = httpx.get(front.url + "/metrics").text
    reasons = re.findall(r'routed_requests_total\{reason="(\w+)",.*\} (\S+)', page)
    assert sorted(reasons) == [("hash", "1.0"), ("prefix", "3.0")], reasons
    assert page.count("# TYPE vllm:num_requests_running gauge") == 1
    assert len(re.findall(r'vllm:num_requests_running\{.*replica="\w+"\}', page)) == 2


def test_a_client_that_leaves_ends_its_request(places: list[ReplicaPlace]) -> None:
    body = {**GREEDY, "prompt": "x = ", "max_tokens": 1900, "stream": True}
    with fronting(places) as front:
        with httpx.stream("POST", front.url + COMPLETIONS, json=body, timeout=60) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
        until = time.monotonic() + 20
        while 'finished_reason="abort"' not in httpx.get(front.url + "/metrics").text:
            assert time.monotonic() < until, "it runs for nobody"
            time.sleep(0.05)
        assert front.state.parts.requests.num_open == 0


def test_the_front_drains(places: list[ReplicaPlace]) -> None:
    """What it accepted may finish for so long, then it is told; new requests go elsewhere."""
    body = {**GREEDY, "prompt": "x = ", "max_tokens": 1900, "stream": True}
    config = ServerConfig(limits=Limits(drain_s=0.5))
    with fronting(places, config) as front:
        with httpx.stream("POST", front.url + COMPLETIONS, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            front.drain.begin()
            refused = httpx.post(front.url + COMPLETIONS, json={**body, "stream": False})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert httpx.get(front.url + "/health").status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"code":"draining"' in rest[-2] or '"finish_reason":"length"' in rest[-2], rest[-2]


def test_a_replica_is_killed_under_load(
    replicas: list[Replica], places: list[ReplicaPlace]
) -> None:
    """Nothing is lost, nothing comes twice, and what is repeatable is what it would have been."""
    unseeded = (COMPLETIONS, {**TEXT, "prompt": "x = ", "temperature": 1.0})
    whole = {**ASKED[0][1], "stream": False}

    def all_at_once(asked: list[tuple[str, dict[str, Any]]]) -> list[Streamed]:
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(lambda one: stream(url, *one), asked))

    def written() -> float:
        """Tokens of the replica that is to be killed."""
        page = httpx.get(url + "/metrics").text
        found = re.search(r'vllm:generation_tokens_total\{.*replica="one"\} (\S+)', page)
        assert found, page
        return float(found[1])

    def kill_in_the_middle(enough: float) -> None:
        until = time.monotonic() + 60
        while written() < enough:
            assert time.monotonic() < until, (written(), enough)
        replicas[0].kill()

    with fronting(places) as front, ThreadPoolExecutor(2) as beside:
        url = front.url
        undisturbed = all_at_once(ASKED)
        text = httpx.post(url + COMPLETIONS, json=whole, timeout=60).json()["choices"]
        killed = beside.submit(kill_in_the_middle, written() + 60)
        answer = beside.submit(httpx.post, url + COMPLETIONS, json=whole, timeout=60)
        found = all_at_once([*ASKED, unseeded, unseeded])
        killed.result()
        assert answer.result().json()["choices"] == text
        for (_, body), before, after in zip(ASKED, undisturbed, found, strict=False):
            assert after.status == 200 and after.ended, body
            assert after.by_choice == before.by_choice, body
            assert len({(chunk["id"], chunk["created"]) for chunk in after.chunks}) == 1
        for one in found[len(ASKED) :]:
            assert one.ended and len(one.ids) == TEXT["max_tokens"]
        page = httpx.get(url + "/metrics").text
        assert 'foretoken:request_restarts_total{how="exact"}' in page, "it was killed too late"
        # The one that is left serves, and the page has its metrics alone.
        assert set(re.findall(r'vllm:num_requests_running\{.*replica="(\w+)"\}', page)) == {"two"}
        assert stream(url, *ASKED[0]).by_choice == undisturbed[0].by_choice
        replicas[1].kill()
        until = time.monotonic() + 20
        while front.state.parts.members.views:
            assert time.monotonic() < until, "it is dead"
            time.sleep(0.05)
        refused = httpx.post(url + COMPLETIONS, json=whole, timeout=90)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_replica"
        assert httpx.get(url + "/health").status_code == 503
