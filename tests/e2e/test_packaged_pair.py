"""The models as they ship, in bfloat16, with text: what a user sees on the first day."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.types import FinishReason, TokenSource
from foretoken.v1.metrics.reader import Counter
from tests.marks import slow_but

DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"model": "demo-draft", "num_speculative_tokens": 5},
    "auto": {"method": "auto"},
}
PROMPTS = [
    "def read_lines(path):\n    ",
    "import os\nimport sys\n\n\nclass Stack:",
    "for index in range(10):\n    print(index)\nfor index in range(",
    "def area(width, height):\n    return width * height\n\n\ndef",
]
ARITHMETIC: Any = {"dtype": "bfloat16", "batch_invariant": True}
"""By name: a GPU has neither unless asked for."""
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 3},
    "stop strings": {"temperature": 0.8, "seed": 4, "stop": ["\n\n", "self"], "min_tokens": 4},
    "bad words": {"temperature": 0.0, "bad_words": ["self", "return"]},
}


class Drafting(NamedTuple):
    """An engine with drafts; `controlled`: it may rest where drafts cost more than they bring."""

    llm: LLM
    controlled: bool

    def accepted_so_far(self) -> float:
        name = "vllm:spec_decode_num_accepted_tokens"
        found = self.llm.get_metrics()
        return sum(m.value for m in found if isinstance(m, Counter) and m.name == name)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", max_num_seqs=1, enable_prefix_caching=False, **ARITHMETIC) as llm:
        assert "batch_invariant on" in llm.describe()
        yield llm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> Callable[[str], list[RequestOutput]]:
    """One request at a time without drafts, by the name of PARAMETERS."""
    return cache(lambda name: plain.generate(PROMPTS, params_of(name), use_tqdm=False))


def params_of(name: str) -> SamplingParams:
    return SamplingParams(max_tokens=40, **PARAMETERS[name])


@pytest.fixture(scope="module", params=[*DRAFTERS, "auto, controlled"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Drafting]:
    name, _, controlled = request.param.partition(", ")
    config = DRAFTERS[name]
    settings: Any = {**ARITHMETIC, "adaptive_speculation": bool(controlled)}
    with LLM("demo", speculative_config=config, **settings) as llm:
        yield Drafting(llm, bool(controlled))


@pytest.mark.parametrize("name", slow_but(PARAMETERS, *list(PARAMETERS)[::2]))
def test_same_text_and_tokens(name: str, expected: Any, drafting: Drafting) -> None:
    """One at a time without drafts, and all together with them: bitwise the same tokens."""
    found = drafting.llm.generate(PROMPTS, params_of(name), use_tqdm=False)
    for one, other in zip(found, expected(name), strict=True):
        ours, theirs = one.outputs[0], other.outputs[0]
        assert ours.token_ids == theirs.token_ids
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        assert ours.stop_reason == theirs.stop_reason
        for word in PARAMETERS[name].get("bad_words", ()):
            assert word not in ours.text.split()
    metrics = [request.outputs[0].metrics for request in found]
    accepted = sum(sum(m.accepted_per_step) for m in metrics if m is not None)
    assert (drafting.accepted_so_far() if drafting.controlled else accepted) > 0


def test_a_stop_string_ends_the_text(plain: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, stop="\n")
    [request] = plain.generate("x = [1, 2, 3]  # a list", params, use_tqdm=False)
    output = request.outputs[0]
    if output.finish_reason is FinishReason.STOP and output.stop_reason == "\n":
        assert "\n" not in output.text
    kept = SamplingParams(
        max_tokens=60, temperature=0.0, stop="\n", include_stop_str_in_output=True
    )
    [request] = plain.generate("x = [1, 2, 3]  # a list", kept, use_tqdm=False)
    assert request.outputs[0].text == output.text + "\n"


def test_streamed_text_is_the_whole_text(drafting: Drafting) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    [request] = drafting.llm.generate(PROMPTS[0], params, use_tqdm=False)
    outputs = list(drafting.llm.stream(PROMPTS[0], params))
    assert "".join(output.text for output in outputs) == request.outputs[0].text
    sources = [source for output in outputs for source in output.sources]
    assert len(sources) == len(request.outputs[0].token_ids)
    assert sources[0] is TokenSource.TARGET
    if drafting.controlled:
        assert drafting.accepted_so_far() > 0
    else:
        assert TokenSource.ACCEPTED in sources


def test_chat_goes_through_the_template(plain: LLM) -> None:
    messages = [{"role": "user", "content": "Write a loop."}]
    params = SamplingParams(max_tokens=8, temperature=0.0)
    [request] = plain.chat(messages, params, use_tqdm=False)
    assert len(request.outputs[0].token_ids) > 0
    assert "Write a loop." in plain.get_tokenizer().decode(request.prompt_token_ids)
    both = plain.chat([messages, messages], params, use_tqdm=False)
    assert [r.outputs[0].token_ids for r in both] == [request.outputs[0].token_ids] * 2


def test_logprobs_and_cumulative(plain: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=1)
    [request] = plain.generate(PROMPTS[0], params, use_tqdm=False)
    output = request.outputs[0]
    assert output.logprobs is not None
    assert request.prompt_logprobs is not None
    assert request.prompt_logprobs[0] is None
    assert len(request.prompt_logprobs) == len(request.prompt_token_ids)
    chosen = [row[t].logprob for t, row in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))
    assert all(row[t].rank == 1 for t, row in zip(output.token_ids, output.logprobs, strict=True))


def test_n_outputs_differ_and_repeat(plain: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3)
    [first] = plain.generate(PROMPTS[0], params, use_tqdm=False)
    [again] = plain.generate(PROMPTS[0], params, use_tqdm=False)
    texts = [output.text for output in first.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [output.text for output in again.outputs]
