"""A request goes on in another engine exactly where its stream broke off.

The guarded bug is anything that sees the tokens of the other engine as a prompt: penalties,
lengths, grammars, stop strings over the cut, half characters, positions of the noise. Every request
is cut at every position, and what comes after the cut must be what plain decoding would have
written there: ids, text piece by piece, logprobs to the last bit, and the end.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ParameterError
from tests.e2e.heads import HEADS, write_head
from tests.e2e.lossless import make_prompts
from tests.e2e.resumed import CASES, Ask, Written, asked, cuts, run
from tests.marks import slow_but

DRAFT = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 5}
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
def test_what_cannot_go_on_is_refused(
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
