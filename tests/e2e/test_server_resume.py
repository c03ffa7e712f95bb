"""A request goes on in another engine, a stream at another server, exactly where it broke off."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken import LLM, SamplingParams
from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.errors import ParameterError
from foretoken.server.settings import ServerConfig
from tests.e2e import fronting
from tests.e2e.heads import HEADS, write_head
from tests.e2e.lossless import make_prompts
from tests.e2e.resumed import CASES, Ask, Written, asked, cuts, run
from tests.e2e.serving import Serving, post, serving
from tests.marks import slow_but

KEY = {"x-foretoken-internal-key": "inside"}
DRAFT = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 5}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "maxLength": 4}, "far": {"type": "boolean"}},
            "required": ["at", "far"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "look"}}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Where is it?"}],
    "temperature": 0,
    "max_tokens": 100,
}
TEXT: dict[str, Any] = {"prompt": "def parse(text):\n    return ", "max_tokens": 14}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {**TEXT, "temperature": 0},
    "echo": {**TEXT, "temperature": 0, "echo": True, "logprobs": 2},
    "several": {**TEXT, "seed": 5, "temperature": 1.2, "n": 2, "logprobs": 0},
    "prompts": {**TEXT, "prompt": ["a = ", "import "], "seed": 6, "n": 2, "prompt_logprobs": 1},
    "stop": {**TEXT, "temperature": 0, "stop": ["never", "(t", "t)", "xt"], "max_tokens": 40},
}
CHATS: dict[str, dict[str, Any]] = {
    "content": {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 14},
    "several": {**CHAT, "seed": 2, "temperature": 1.3, "n": 2, "max_tokens": 14},
    "calls": {**CHAT, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {**CHAT, "tools": [TOOL], "tool_choice": NAMED},
}  # fmt: skip
ASKED = [
    *(("/v1/completions", body) for body in COMPLETIONS.values()),
    *(("/v1/chat/completions", body) for body in CHATS.values()),
]
NAMES = [*COMPLETIONS, *(f"chat {name}" for name in CHATS)]
Chunk = dict[str, Any]


def server_of(speculation: dict[str, Any] | None, settings: ServerConfig) -> Any:
    config = EngineConfig.from_kwargs(
        model="demo",
        max_num_seqs=8,
        kv_cache_memory_bytes=32 << 20,
        adaptive_speculation=False,
        speculative_config=speculation,
    )
    return serving(build_engine(config), settings)


@pytest.fixture(scope="module")
def first() -> Iterator[Serving]:
    with server_of(None, ServerConfig()) as running:
        yield running


@pytest.fixture(scope="module")
def second() -> Iterator[Serving]:
    with server_of(DRAFT, ServerConfig(internal_key="inside")) as running:
        yield running


def stream(server: Serving, path: str, body: dict[str, Any], **headers: Any) -> list[Chunk]:
    options = {"include_usage": True, "continuous_usage_stats": body.get("n", 1) == 1}
    given = {**body, "return_token_ids": True, "stream_options": options}
    found = fronting.stream(server.url, path, given, **headers)
    assert found.status == 200 and found.ended
    return found.plain


def places(chunks: list[Chunk], count: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Where a router can cut: after how many chunks, and what it then knows of each choice."""
    known: list[dict[str, Any]] = [{"output_ids": [], "ended": False} for _ in range(count)]
    yield 0, json.loads(json.dumps(known))
    for number, chunk in enumerate(chunks, start=1):
        for choice in chunk["choices"]:
            own = known[choice["index"]]
            own["output_ids"] += choice.get("token_ids") or []
            own["ended"] = own["ended"] or choice["finish_reason"] is not None
            whole = "token_ids" in choice
            if whole and not all(one["ended"] for one in known):
                yield number, json.loads(json.dumps(known))


def by_choice(chunks: list[Chunk]) -> list[list[Chunk]]:
    found: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        index = chunk["choices"][0]["index"] if chunk["choices"] else -1
        found.setdefault(index, []).append(chunk)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("name", slow_but(NAMES, NAMES[0], NAMES[-1]))
def test_every_token(name: str, first: Serving, second: Serving) -> None:
    path, body = ASKED[NAMES.index(name)]
    whole = stream(first, path, body)
    prompts = body.get("prompt")
    count = body.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
    made = list(places(whole, count))

    def go_on(known: list[dict[str, Any]]) -> list[Chunk]:
        return stream(second, path, {**body, "resume": known}, **KEY)

    with ThreadPoolExecutor(8) as pool:
        rests = list(pool.map(go_on, [known for _, known in made]))
    assert len(rests) >= 10 or body.get("stop")
    for (number, known), rest in zip(made, rests, strict=True):
        assert by_choice(rest) == by_choice(whole[number:]), known
    second.wait_idle()


def test_calls_and_stops_were_cut(first: Serving) -> None:
    """What the cases above are for does happen in them."""
    [*_, end, _] = stream(first, "/v1/completions", COMPLETIONS["stop"])
    assert end["choices"][0]["stop_reason"] in COMPLETIONS["stop"]["stop"]
    chunks = stream(first, "/v1/chat/completions", CHATS["calls"])
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


RESUME: dict[str, Any] = {**TEXT, "stream": True, "resume": [{"output_ids": [5]}]}


def refused(server: Serving, body: dict[str, Any], **headers: str) -> tuple[int, str, str]:
    answer = post(server, "/v1/completions", body, **headers)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_only_who_has_the_key_may(first: Serving, second: Serving) -> None:
    status, param, message = refused(first, RESUME, **KEY)
    assert (status, param) == (400, "resume") and "--internal-key" in message
    for headers in ({}, {"x-foretoken-internal-key": "outside"}):
        status, param, message = refused(second, RESUME, **headers)
        assert (status, param) == (403, "resume") and "x-foretoken-internal-key" in message


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"stream": False}, "resume", "stream: true"),
        ({"n": 2}, "resume", "one entry per choice: 2"),
        ({"prompt": ["a", "b"]}, "resume", "one entry per choice: 2"),
        ({"resume": [{"ids": [5]}]}, "resume.0.ids", "not a field of resume.0"),
        ({"resume": [{"output_ids": [5], "ended": True}]}, "resume.ended", "goes on"),
        ({"structured_outputs": {"regex": "[0-9]{9}"}}, "resume.output_ids", "as number 1"),
    ],
)
def test_what_cannot_go_on_is_refused(
    changes: dict[str, Any], param: str, said: str, second: Serving
) -> None:
    status, field, message = refused(second, {**RESUME, **changes}, **KEY)
    assert (status, field) == (400, param), message
    assert said in message
    second.wait_idle()


def test_what_is_resumed_is_counted(second: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, and as one prompt with one output, where the other had ended."""

    def prompts() -> float:
        page = httpx.get(second.url + "/metrics").text
        name = r"vllm:request_max_num_generation_tokens_count\{.*\} (\S+)"
        return float(re.findall(name, page)[0])

    second.wait_idle()
    before = prompts()
    resume = [{"output_ids": [5, 6], "ended": True}, {"output_ids": [5]}]
    with caplog.at_level("INFO", logger="foretoken"):
        answer = post(second, "/v1/completions", {**RESUME, "n": 2, "resume": resume}, **KEY)
        second.wait_idle()
    assert answer.status_code == 200
    [accepted] = [r for r in caplog.records if r.getMessage() == "accepted"]
    facts = accepted.__dict__["facts"]
    assert (facts["choices"], facts["resumed_tokens"]) == (1, 1)
    assert prompts() == before + 1


# A request goes on in another engine exactly where its stream broke off. The guarded bug is
# anything that sees the tokens of the other engine as a prompt: penalties, lengths, grammars,
# stop strings over the cut, half characters, positions of the noise. Every request is cut at
# every position, and what comes after the cut must be what plain decoding would have written
# there: ids, text piece by piece, logprobs to the last bit, and the end.
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    "draft model": DRAFT,
    "several": {"drafters": [NGRAM, DRAFT]},
}
COMMON: dict[str, Any] = {"adaptive_speculation": False, "kv_cache_memory_bytes": 32 << 20}
PRESSURES: dict[str, dict[str, Any]] = {
    "calm": {"max_num_seqs": 32},
    "chunks": {"max_num_batched_tokens": 12, "max_num_seqs": 5},
    "shortage": {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 128, "max_num_seqs": 32},
}
QUICK, FULL = len(CASES) + 8, 200

Golden = Callable[[int, int], tuple[list[Ask], list[dict[int, Written]]]]


@pytest.fixture(scope="module")
def golden() -> Iterator[Golden]:
    """Requests and their outputs by plain decoding, one at a time."""
    with LLM("demo", max_num_seqs=1, enable_prefix_caching=False, **COMMON) as llm:

        @cache
        def of(count: int, max_tokens: int) -> tuple[list[Ask], list[dict[int, Written]]]:
            asks = asked(llm, count, max_tokens, seed=1)
            return asks, run(llm, asks)

        yield of


def compare(llm: LLM, asks: list[Ask], wholes: list[dict[int, Written]]) -> int:
    """Cut each request at every position; the number of cuts."""
    made = [cut for ask, whole in zip(asks, wholes, strict=True) for cut in cuts(ask, whole)]
    found = run(llm, [ask for ask, _ in made])
    for (ask, expected), rest in zip(made, found, strict=True):
        assert rest == expected, ask
    return len(made)


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(METHODS, "ngram"))
def test_every_position(method: str, golden: Golden) -> None:
    with LLM("demo", speculative_config=METHODS[method], **COMMON | PRESSURES["calm"]) as llm:
        assert compare(llm, *golden(QUICK, 16)) > 200


@pytest.mark.slow
@pytest.mark.parametrize("pressure", ["chunks", "shortage"])
def test_every_position_under_pressure(pressure: str, golden: Golden) -> None:
    """Prompt and output computed in chunks; preempted again for want of pages."""
    with LLM("demo", speculative_config=DRAFT, **COMMON | PRESSURES[pressure]) as llm:
        assert compare(llm, *golden(QUICK, 16)) > 200
        if pressure == "shortage":
            assert llm._engine.parts.scheduler.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize("method", METHODS)
def test_every_position_of_many(method: str, pressure: str, golden: Golden) -> None:
    with LLM("demo", speculative_config=METHODS[method], **COMMON | PRESSURES[pressure]) as llm:
        assert compare(llm, *golden(FULL, 24)) > 3000


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mlp", "dspark"])
def test_heads_draft_for_what_they_did_not_see(
    name: str, model: Path, draft: Path, tmp_path: Path
) -> None:
    """Heads go by the hidden states of tokens that the other engine chose."""
    settings: dict[str, Any] = {"dtype": "float32", "batch_invariant": True}
    options = SamplingParams(max_tokens=12, detokenize=False, temperature=0.8, seed=3)
    asks = [Ask(prompt, options) for prompt in make_prompts(6, 3)]
    with LLM(str(model), **settings) as llm:
        wholes = run(llm, asks)
    settings |= {"block_size": 8, "adaptive_speculation": False}
    config = {**HEADS[name], "model": str(write_head(tmp_path / name, name, draft))}
    with LLM(str(model), speculative_config=config, **settings) as llm:
        assert compare(llm, asks, wholes) == 6 * 12


@pytest.mark.slow
def test_unseeded_outputs_go_on_in_distribution(model: Path) -> None:
    """The next token of 3,000 unseeded requests, penalised for those that were written, against the
    distribution worked out from raw log-probabilities. Chance of failing in error: 1e-6, but the
    engine's own seed is fixed, so it fails always or never."""
    allowed, written, temperature = [3, 8, 15, 22, 41, 60], [3, 3, 3, 22, 41], 5.0
    params = SamplingParams(
        max_tokens=len(written) + 1, temperature=temperature, allowed_token_ids=allowed,
        frequency_penalty=2.0, presence_penalty=1.5, logprobs=0, detokenize=False,
    )  # fmt: skip
    prompt = {"prompt_token_ids": [3, 1, 4, 8], "resume": [{"output_ids": written}]}
    with LLM(str(model), dtype="float32", max_num_seqs=64) as llm:
        found = run(llm, [Ask(prompt, params)] * 3000)
    drawn = Counter(one[0].ids[0] for one in found)
    raw = {one[0].ids[0]: one[0].logprobs[0][one[0].ids[0]].logprob for one in found}
    assert sorted(raw) == allowed
    penalties = {i: 2.0 * written.count(i) + 1.5 * (i in written) for i in allowed}
    weights = {i: math.exp((raw[i] - penalties[i]) / temperature) for i in allowed}
    expected = {i: 3000 * weights[i] / sum(weights.values()) for i in allowed}
    distance = sum((drawn[i] - expected[i]) ** 2 / expected[i] for i in allowed)
    assert distance < 35.9, "chi-square with 5 degrees of freedom"


@pytest.mark.slow
def test_several_outputs_have_noise_of_their_own(golden: Golden) -> None:
    """The second output of two alone gives the second again, not the first."""
    asks, wholes = golden(QUICK, 16)
    [(ask, whole)] = [(a, w) for a, w in zip(asks, wholes, strict=True) if a.params == several()]
    assert whole[0].ids != whole[1].ids
    prompt = {**ask.prompt, "resume": [{"ended": True}, {}]}
    with LLM("demo", **COMMON) as llm:
        [rest] = run(llm, [Ask(prompt, ask.params)])
        [output] = llm.generate(prompt, ask.params, use_tqdm=False)
    assert list(rest) == [1] and rest[1] == whole[1]
    assert [one.index for one in output.outputs] == [1]
    assert output.outputs[0].token_ids == tuple(whole[1].ids)


def several() -> SamplingParams:
    return SamplingParams(max_tokens=16, **CASES["several"])


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", max_model_len=64, **COMMON) as llm:
        yield llm


@pytest.mark.parametrize(
    ("resume", "options", "said"),
    [
        ([[5]], {}, "resume: got \\[5\\]; allowed: a dictionary"),
        ({"output_ids": [5]}, {}, "resume: got .*list with one entry per output"),
        ([{"ids": [5]}], {}, "resume.ids: .*output_ids"),
        ([{"output_ids": ["5"]}], {}, "resume.output_ids: got '5'"),
        ([{"output_ids": [True]}], {}, "resume.output_ids: got True"),
        ([{"output_ids": [-1]}], {}, "resume.output_ids: got -1"),
        ([{"output_ids": [10**6]}], {}, "resume.output_ids: got 1000000; allowed: 0 to"),
        ([{"ended": 1}], {}, "resume.ended: got 1"),
        ([{"ended": True}], {}, "resume.ended: .*at least one output that goes on"),
        ([], {}, "resume: got '0 outputs'; allowed: one entry per output: n = 1"),
        ([{}], {"n": 2}, "resume: got '1 outputs'; allowed: one entry per output: n = 2"),
        ([{"output_ids": [5] * 8}], {}, "ended by number 8: length"),
        ([{"output_ids": [5] * 60}], {"max_tokens": None}, "ended by number [0-9]+: length"),
        ([{"output_ids": [5, 6, 7]}], {"stop_token_ids": [6]}, "ended by number 2: stop at 6"),
        (
            [{"output_ids": [5, 6, 7]}],
            {"structured_outputs": {"regex": "[0-9]{9}"}},
            "as number 1'; allowed: what structured_outputs allows",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_resuming(
    resume: Any, options: dict[str, Any], said: str, demo: LLM
) -> None:
    prompt = {"prompt": "x = ", "resume": resume}
    with pytest.raises(ParameterError, match=said):
        demo.generate(prompt, SamplingParams(**GREEDY | options))
    assert not demo._engine.has_unfinished


def test_an_output_that_ended_is_refused(demo: LLM) -> None:
    """At the end of the text, and at a stop string that its ids complete."""
    eos = demo.get_tokenizer().eos_token_id
    ids = demo.get_tokenizer().encode("return text", add_special_tokens=False)
    for given, options, said in (
        ([*ids, eos, 5], {}, f"number {len(ids) + 1}: stop'"),
        (ids, {"stop": "urn t"}, "stop at 'urn t'"),
    ):
        prompt = {"prompt": "x = ", "resume": [{"output_ids": given}]}
        with pytest.raises(ParameterError, match=said):
            demo.generate(prompt, SamplingParams(**{**GREEDY, "max_tokens": 30, **options}))
    going_on = {"ignore_eos": True, "max_tokens": 30}
    prompt = {"prompt": "x = ", "resume": [{"output_ids": [*ids, eos, 5]}]}
    [output] = demo.generate(prompt, SamplingParams(**GREEDY | going_on), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 30 - len(ids) - 2
