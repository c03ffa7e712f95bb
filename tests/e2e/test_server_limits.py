"""What the server refuses, cuts off and survives."""

import re
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.server.settings import Limits, ServerConfig
from tests.e2e.serving import Serving, post, serving

IDS = [1, 2, 3, 4]
LONG = {"prompt": IDS, "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": IDS, "max_tokens": 3, "temperature": 0}
GATE = threading.Event()
GATE.set()


class Slow(Proposer):
    """Makes every step take a while, or wait at the gate, and one request fail."""

    name = "slow"

    def propose(self, context: Context) -> Draft:
        assert GATE.wait(60)
        time.sleep(0.005)
        spans = context.spans
        assert all(s.sequence.request.prompt_token_ids[0] != 66 for s in spans), "66"
        return Draft.empty(len(spans))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One sequence at a time, one that waits, slow steps."""
    from foretoken.testing import write_tiny_llama

    folder = write_tiny_llama(
        tmp_path_factory.mktemp("model"), max_position_embeddings=2048, vocab_size=97
    )
    config = EngineConfig.from_kwargs(
        model=str(folder), max_num_seqs=1, kv_cache_memory_bytes=8 << 20
    )
    limits = Limits(
        max_queue=1, max_body_bytes=20_000, max_n=2, max_prompt_tokens=100, timeout_s=2.0,
        max_tokens=1500, max_unread_tokens=40,
    )  # fmt: skip
    settings = ServerConfig(
        served_model_names=("tiny",), api_keys=("one", "two"), limits=limits, admin_key="boss"
    )
    with serving(build_engine(config, Slow()), settings) as running:
        yield running


def ask(server: Serving, body: object, key: str = "one") -> httpx.Response:
    return post(server, "/v1/completions", body, authorization=f"Bearer {key}")


def test_keys(server: Serving) -> None:
    assert ask(server, SHORT).status_code == 200
    assert ask(server, SHORT, "two").status_code == 200
    wrong = ask(server, SHORT, "three")
    assert wrong.status_code == 401
    assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert "one" not in wrong.text.replace("none", "")
    assert httpx.get(server.url + "/v1/models").status_code == 401
    for path in ("/health", "/metrics", "/version"):
        assert httpx.get(server.url + path).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({**SHORT, "n": 3}, 400, "n"),
        ({**SHORT, "prompt": [[1], [2], [3]]}, 400, "n"),
        ({**SHORT, "max_tokens": 1501}, 400, "max_tokens"),
        ({**SHORT, "prompt": [1] * 101}, 400, "prompt"),
        ({**SHORT, "user": "x" * 30_000}, 413, None),
        ({**SHORT, "prompt": "text"}, 400, "prompt"),
    ],
)
def test_limits(server: Serving, body: object, status: int, named: str | None) -> None:
    answer = ask(server, body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == named


def test_a_full_queue_is_429(server: Serving) -> None:
    found: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: found.append(ask(server, {**LONG, "max_tokens": 8})))
        for _ in range(5)
    ]
    GATE.clear()  # so that nothing ends before all have come, however late
    try:
        for thread in threads:
            thread.start()
        while len(found) < 3:
            time.sleep(0.001)
    finally:
        GATE.set()
    for thread in threads:
        thread.join()
    statuses = sorted(answer.status_code for answer in found)
    assert statuses == [200, 200, 429, 429, 429]
    refused = next(answer for answer in found if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    server.wait_idle()


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_504(server: Serving) -> None:
    answer = ask(server, LONG)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    server.wait_idle()


def test_a_failing_step_is_500_for_those_it_hit(server: Serving) -> None:
    answer = ask(server, {**SHORT, "prompt": [66, 1]})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["request_id"] == answer.headers["x-request-id"]
    assert "66" not in error["message"] and "Traceback" not in answer.text
    assert ask(server, SHORT).status_code == 200
    stream = ask(server, {**SHORT, "prompt": [66, 1], "stream": True})
    assert stream.status_code == 200  # sent before anything failed
    *texts, failure, last, _ = stream.text.split("\n\n")
    assert '"error"' in failure and last == "data: [DONE]"
    assert all('"error"' not in text for text in texts)
    assert ask(server, SHORT).status_code == 200


def test_a_reader_that_does_not_read_is_cut_off(server: Serving) -> None:
    """Logprobs make the chunks large, so that sockets fill up."""
    body = b'{"prompt":[1,2],"max_tokens":1500,"logprobs":20,"stream":true,"ignore_eos":true}'
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect((host, int(port)))
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        server.wait_idle(10)
    server.wait_idle()


def test_salts_and_keys_keep_prefixes_apart(server: Serving) -> None:
    body = {**SHORT, "prompt": list(range(1, 91))}

    def cached(key: str, salt: str | None = None) -> int:
        answer = ask(server, {**body, "cache_salt": salt}, key).json()
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0
    assert cached("two", "a") == 0
    assert cached("two", "a") > 0
    assert cached("one", "a") == 0


def test_every_accepted_request_ended_once(server: Serving) -> None:
    """Whatever the tests before this one did."""
    server.wait_idle()
    text = httpx.get(server.url + "/metrics").text
    prompts = re.search(r"vllm:request_prompt_tokens_count\{.*\} (\S+)", text)
    ends = re.findall(r"vllm:request_success_total\{.*\} (\S+)", text)
    assert prompts is not None
    assert sum(map(float, ends)) == float(prompts[1]) > 10
