"""The server on the packaged models, through the official client and bare HTTP."""

import json
import re
from typing import Any

import httpx
import openai
import pytest

from foretoken import LLM, SamplingParams
from foretoken.hardware import trim_heap
from foretoken.server.observing.process_memory import device_bytes
from tests.e2e.serving import Serving, post

PROMPT = "class Stack:\n    def __init__(self"


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    with LLM("demo", max_num_seqs=4, kv_cache_memory_bytes=64 << 20) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=40)
        seeded = SamplingParams(temperature=0.9, seed=7, max_tokens=40)
        outputs = llm.generate([PROMPT] * 2, [greedy, seeded], use_tqdm=False)
    return dict(zip(("greedy", "seeded"), (o.outputs[0].text for o in outputs), strict=True))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completion_is_what_plain_decoding_writes(
    client: openai.OpenAI, plain: dict[str, str]
) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0)
    assert answer.choices[0].text == plain["greedy"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 40
    seeded = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=40, temperature=0.9, seed=7
    )
    assert seeded.choices[0].text == plain["seeded"]


def test_stream_is_one_event_per_token(client: openai.OpenAI, plain: dict[str, str]) -> None:
    chunks = list(
        client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=40, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *tokens, last = chunks
    assert "".join(chunk.choices[0].text for chunk in tokens) == plain["greedy"]
    assert len(tokens) == 40
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None] * 39 + ["length"]
    assert last.usage is not None and last.usage.total_tokens == last.usage.prompt_tokens + 40


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Write a stack."}]
    whole = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=24, temperature=0
    )
    stream = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=24, temperature=0, stream=True
    )
    deltas = [choice for chunk in stream for choice in chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert whole.choices[0].message.content == "".join(d.delta.content or "" for d in deltas)
    assert deltas[-1].finish_reason == whole.choices[0].finish_reason == "length"


def test_content_may_come_in_parts(client: openai.OpenAI) -> None:
    def ask(content: Any) -> str | None:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": content}],
            max_tokens=8,
            temperature=0,
        )
        return answer.choices[0].message.content

    parts = [{"type": "text", "text": "Write"}, {"type": "text", "text": "a stack."}]
    assert ask(parts) == ask("Write\na stack.")


def test_n_prompts_and_samples(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=[PROMPT, "import "], n=3, max_tokens=6, temperature=1, seed=3
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len({choice.text for choice in answer.choices[:3]}) > 1
    alone = client.completions.create(
        model="demo", prompt="import ", n=3, max_tokens=6, temperature=1, seed=3
    )
    assert [c.text for c in alone.choices] == [c.text for c in answer.choices[3:]]


def test_logprobs_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2, echo=True
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith(PROMPT)
    assert logprobs is not None and logprobs.tokens is not None
    assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None and logprobs.text_offset[0] == 0
    assert "".join(logprobs.tokens).removeprefix("<s>") == choice.text
    first, *others = list[float | None](logprobs.token_logprobs)
    assert first is None
    assert all(value is not None and value <= 0 for value in others)
    assert all(len(top) in (2, 3) for top in logprobs.top_logprobs[1:])
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 5
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy takes the best


def test_stop_strings_and_extras(server: Serving, plain: dict[str, str]) -> None:
    stop = plain["greedy"][10:14]
    body = {
        "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": [stop],
        "include_stop_str_in_output": True, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0,
        "token_sources": True, "return_token_ids": True,
    }  # fmt: skip
    answer = post(server, "/v1/completions", body).json()
    choice = answer["choices"][0]
    end = plain["greedy"].index(stop) + len(stop)
    assert choice["text"] == plain["greedy"][:end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
    assert {token["source"] for token in choice["tokens"]} <= {
        "target", "accepted", "recovered", "bonus",
    }  # fmt: skip
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert_in_order(choice["times"])


def assert_in_order(times: dict[str, float]) -> None:
    assert list(times) == ["queued_s", "first_token_s", "finished_s"]
    assert 0 < times["queued_s"] <= times["first_token_s"] <= times["finished_s"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x = 1"}]}),
    ],
)
def test_the_servers_times_come_once_with_the_end(
    server: Serving, path: str, asked: dict[str, Any]
) -> None:
    body = {**asked, "max_tokens": 12, "token_sources": True}
    [choice] = post(server, path, body).json()["choices"]
    assert_in_order(choice["times"])
    lines = post(server, path, {**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    ends = [c for chunk in chunks for c in chunk["choices"] if "times" in c]
    assert len(ends) == 1 and ends[0]["finish_reason"] is not None
    assert_in_order(ends[0]["times"])
    assert "times" not in post(server, path, {**body, "token_sources": False}).text


def test_what_speculation_did(server: Serving) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    found = post(server, "/v1/completions", body).json()["metrics"]["speculative_decoding"]
    accepted = sum(int(k) * v for k, v in found["acceptance_histogram"].items())
    assert accepted == found["num_accepted_draft_tokens"]
    assert found["num_spec_steps"] == sum(found["acceptance_histogram"].values())
    assert found["mean_acceptance_length"] == 1 + accepted / found["num_spec_steps"]
    assert found["num_spec_tokens"] == 5
    assert sum(found["per_step_drafted"]) == found["num_draft_tokens"]
    two = post(server, "/v1/completions", {**body, "n": 2}).json()
    assert two["metrics"] == {"speculative_decoding": None}


def test_a_stream_ends_with_what_speculation_did(server: Serving) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    whole = post(server, "/v1/completions", body).json()["metrics"]
    lines = post(server, "/v1/completions", {**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    assert not any("metrics" in chunk for chunk in chunks[:-1])
    assert chunks[-1]["metrics"] == whole
    assert whole["speculative_decoding"]["per_step_accepted"]


def test_a_request_chooses_its_speculation(server: Serving, plain: dict[str, str]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "token_sources": True}
    for policy, most in (({"enabled": False}, 0), ({"num_speculative_tokens": 2}, 2)):
        answer = post(server, "/v1/completions", {**body, "speculation": policy}).json()
        assert answer["choices"][0]["text"] == plain["greedy"]
        drafted = answer["metrics"]["speculative_decoding"]["per_step_drafted"]
        assert max(drafted, default=0) == most
    for wrong in ({"drafter": "oracle"}, {"num_speculative_tokens": 99}, {"on": True}):
        refused = post(server, "/v1/completions", {**body, "speculation": wrong})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"].startswith("speculation.")


def test_predictions(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "x = 1"}]
    options: Any = {"model": "demo", "messages": messages, "max_tokens": 40, "temperature": 0}
    plain = client.chat.completions.create(**options)
    text = plain.choices[0].message.content
    predicted = client.chat.completions.create(
        **options, prediction={"type": "content", "content": text}
    )
    assert predicted.choices[0].message.content == text
    details = predicted.usage and predicted.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > 20
    assert text is not None
    half = text[: len(text) // 2] + " Lorem ipsum dolor sit amet" * 4
    wrong = client.chat.completions.create(
        **options, prediction={"type": "content", "content": half}
    )
    assert wrong.choices[0].message.content == text
    details = wrong.usage and wrong.usage.completion_tokens_details
    assert details is not None and details.rejected_prediction_tokens


def test_streams_do_not_show_speculation(server: Serving) -> None:
    """Event by event the same, whoever drafted."""

    def deltas(**options: Any) -> list[Any]:
        body = {
            "messages": [{"role": "user", "content": "y"}],
            "max_tokens": 30,
            "temperature": 0.8,
            "seed": 5,
            "stop": ["zzzzzz"],
            "stream": True,
            **options,
        }
        lines = post(server, "/v1/chat/completions", body).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
        return [choice for chunk in chunks for choice in chunk["choices"]]

    assert deltas() == deltas(speculation={"enabled": False})


def test_tokenize_there_and_back(server: Serving) -> None:
    answer = post(server, "/tokenize", {"prompt": PROMPT}).json()
    assert answer["count"] == len(answer["tokens"])
    back = post(server, "/detokenize", {"tokens": answer["tokens"], "skip_special_tokens": True})
    assert back.json() == {"prompt": PROMPT}
    chat = post(server, "/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["count"] > 3


BAD_BODIES: list[tuple[Any, int, str | None]] = [
    ({"prompt": ""}, 200, None),
    ({"prompt": [[]]}, 400, "prompt"),
    ({}, 400, "prompt"),
    ({"prompt": "x", "temperature": -1}, 400, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "x", "temprature": 1}, 400, "temprature"),
    ({"prompt": "x", "n": 10**30}, 400, "n"),
    ({"prompt": "x", "model": "gpt-4"}, 404, "model"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [1] * 5000}, 400, "prompt"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"prompt": "x", "best_of": 3}, 400, "best_of"),
    ({"prompt": "x", "stop": [""]}, 400, "stop"),
    ([1, 2], 400, None),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD_BODIES)
def test_bad_bodies_have_clear_errors(
    server: Serving, body: Any, status: int, param: str | None
) -> None:
    answer = post(server, "/v1/completions", body)
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"] and "/" not in error["message"].replace("JSON/", "")
        assert error["request_id"]


RAW_BODIES = [
    b"", b"{", b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": "x", "top_p": NaN}',
    b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "seed": 1.5}', b"null", b"nul",
    b'{"prompt": "\\ud800", "max_tokens": 1}',
]  # fmt: skip


@pytest.mark.parametrize("raw", RAW_BODIES, ids=lambda raw: repr(raw[:20]))
def test_no_bytes_are_a_server_error(server: Serving, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + "/v1/completions", content=raw, headers=headers, timeout=60)
    assert answer.status_code in (200, 400), answer.text


def test_other_paths_and_methods(server: Serving) -> None:
    assert httpx.get(server.url + "/nothing").status_code == 404
    assert httpx.get(server.url + "/v1/completions").status_code == 405
    form = httpx.post(server.url + "/v1/completions", data={"prompt": "x"})
    assert form.status_code == 415


def test_status_endpoints(server: Serving) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/version", "/openapi.json"):
        assert httpx.get(server.url + path).status_code == 200, path
    assert httpx.get(server.url + "/version").json()["block_drafters"] == []
    schema = httpx.get(server.url + "/openapi.json").json()
    assert "prompt" in schema["components"]["schemas"]["CompletionBody"]["properties"]


def test_request_ids(server: Serving) -> None:
    mine = httpx.get(server.url + "/version", headers={"x-request-id": "abc-1"})
    assert mine.headers["x-request-id"] == "abc-1"
    evil = httpx.get(server.url + "/version", headers={"x-request-id": "a b"})
    assert len(evil.headers["x-request-id"]) == 32


def test_metrics_have_vllms_names(server: Serving) -> None:
    post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    server.wait_idle()
    text = httpx.get(server.url + "/metrics").text
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:time_per_output_token_seconds_count", "vllm:iteration_tokens_total_count",
        "vllm:request_max_num_generation_tokens_count",
        "vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_count",
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "foretoken:drafting_seconds_total", "foretoken:verifying_seconds_total",
        "foretoken:drafter_prefix_cache_queries_total", "foretoken:drafter_prefix_cache_hits_total",
    ):  # fmt: skip
        assert f"\n{name}{{" in text, name
    assert (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"}' in text
    )


def test_memory_is_told_and_given_back(server: Serving) -> None:
    text = server.state.metrics.render().decode()
    found = re.search(r"foretoken:device_memory_bytes\{.*\} (\S+)", text)
    assert found is not None and float(found[1]) > 64 << 20  # the KV cache at least
    held = [bytes(1 << 16) for _ in range(600)]
    most = device_bytes("cpu")
    del held
    trim_heap()
    assert device_bytes("cpu") < most - (16 << 20)


def test_a_client_that_leaves_frees_its_pages(server: Serving) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "temperature": 0, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"]
    server.wait_idle()


def test_a_whole_answer_is_dropped_too(server: Serving) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=body, timeout=0.3)
    server.wait_idle()


def test_bytes_of_logprobs_are_the_answers(client: openai.OpenAI) -> None:
    """Characters that take several tokens are spread over them."""
    text = "\u4f60\u597d \U0001f468\u200d\U0001f469 e\u0301"
    for stream in (False, True):
        asked: Any = {
            "model": "demo",
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "top_logprobs": 2,
            "extra_body": {"structured_outputs": {"choice": [text]}},
        }
        if stream:
            chunks = list(client.chat.completions.create(**asked, stream=True))
            parts = [one.choices[0].logprobs for one in chunks if one.choices]
            entries = [entry for part in parts if part for entry in part.content or ()]
        else:
            [choice] = client.chat.completions.create(**asked).choices
            assert choice.message.content == text and choice.logprobs is not None
            entries = choice.logprobs.content or []
        written = b"".join(bytes(entry.bytes or ()) for entry in entries)
        assert written.removesuffix(b"</s>").removesuffix(b"<eos>") == text.encode()
        assert len(entries) > len(text) and all(len(one.top_logprobs) == 2 for one in entries)
