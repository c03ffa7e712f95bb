"""What the losslessness suite runs: parameter sets, methods, engine pressures, and the comparison.

Shared by the quick and the full suite; `README`'s `make test-full` runs ten times the tokens.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context
from foretoken.proposers.kv_proposer import KVProposer
from foretoken.v1.metrics import reader as metrics
from tests.drafters import JunkProposer, ReplayProposer

VOCAB = 97
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "filters": {"temperature": 1.1, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "top_p": {"temperature": 0.9, "seed": 3, "top_p": 0.6},
    "penalties": {
        "temperature": 0.7,
        "seed": 9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "bias": {
        "temperature": 0.9,
        "seed": 10,
        "logit_bias": {3: 4.0, 5: -100.0},
        "allowed_token_ids": list(range(1, 60)),
    },
    "stops": {"temperature": 1.0, "seed": 11, "stop_token_ids": [4, 9, 17], "min_tokens": 12},
    "logprobs": {"temperature": 0.8, "seed": 12, "logprobs": 3, "prompt_logprobs": 2},
    "several": {"temperature": 0.9, "seed": 13, "n": 3},
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft auto": {"method": "draft_model", "num_speculative_tokens": 5},
    "draft greedy": {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "draft_sample_method": "greedy",
    },
    "draft probabilistic": {
        "method": "draft_model",
        "num_speculative_tokens": 1,
        "draft_sample_method": "probabilistic",
    },
}
SOME_PARAMETERS = ("greedy penalties", "filters", "stops", "several")
"""For methods that are made of others, in the quick suite."""
SHORT_MODEL = {"method": "draft_model", "num_speculative_tokens": 4}
COMPOSED: dict[str, dict[str, Any]] = {
    "draft confident": {
        **SHORT_MODEL,
        "draft_confidence_threshold": 0.3,
        "min_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": [[1, 6, 4], [7, 12, 1], [13, 15, 0], [16, 99, 3]],
    },
    "first": {
        "drafters": [
            {"method": "ngram", "num_speculative_tokens": 6, "min_speculative_tokens": 2},
            SHORT_MODEL,
        ]
    },
}
METHODS |= COMPOSED
PRESSURES: dict[str, dict[str, Any]] = {
    "calm": {"max_num_seqs": 16},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 5},
    "shortage": {
        "kv_cache_memory_bytes": 180_000,
        "max_model_len": 136,
        "block_size": 8,
        "max_num_seqs": 16,
    },
    "one at a time": {"max_num_seqs": 1, "enable_prefix_caching": False},
}
EXACT: dict[str, Any] = {"dtype": "float32", "batch_invariant": True, "adaptive_speculation": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What must be equal: ids, why it ended, and the logprobs to the last bit."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Any
    prompt_logprobs: Any
    num_preemptions: int = field(default=0, compare=False)
    num_cached_tokens: int = field(default=0, compare=False)


def make_prompts(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of 1 to 90 tokens; every third one shares its beginning with the one before."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for i in range(count):
        fresh = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 50))]
        shared = prompts[-1][:40] if i % 3 == 1 else []
        prompts.append(shared + fresh)
    return [{"prompt_token_ids": p} for p in prompts]


def generate(llm: LLM, prompts: list[Any], parameters: dict[str, Any]) -> list[Result]:
    params = SamplingParams(detokenize=False, **parameters)
    requests = llm.generate(prompts, params, use_tqdm=False)
    return [
        Result(
            token_ids=out.token_ids,
            finish_reason=out.finish_reason,
            stop_reason=out.stop_reason,
            logprobs=out.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            num_preemptions=0 if out.metrics is None else out.metrics.num_preemptions,
            num_cached_tokens=0 if out.metrics is None else out.metrics.num_cached_tokens,
        )
        for request in requests
        for out in request.outputs
    ]


def asking(count: int, tokens: int) -> tuple[Callable[[LLM, str], list[Result]], Any]:
    """What asks for so many requests of so many tokens, by the name of PARAMETERS, and a fixture:
    what the target without drafts answers to each, one request at a time."""

    def run(llm: LLM, name: str) -> list[Result]:
        return generate(llm, make_prompts(count, 3), {"max_tokens": tokens, **PARAMETERS[name]})

    @pytest.fixture(scope="module")
    def plain(alone: LLM) -> Callable[[str], list[Result]]:
        return cache(partial(run, alone))

    return run, plain


def counted(llm: LLM, name: str) -> float:
    """The engine's number whose name ends so."""
    [found] = [one for one in llm.get_metrics() if one.name.endswith(name)]
    assert isinstance(found, metrics.Counter | metrics.Gauge)
    return found.value


def is_idle(llm: LLM) -> bool:
    llm._engine.parts.scheduler.check_integrity()
    return not llm._engine.has_unfinished and not llm._shared._readers


def follower_of(llm: LLM) -> int:
    """The process beside this one."""
    followers = llm._engine.parts.followers
    assert followers is not None
    [found] = followers.process_ids
    return found


def drawn(llm: LLM, tokens: int, samples: int = 1200) -> Counter[tuple[int, ...]]:
    """What comes of one prompt without a seed, where two tokens may follow each."""
    params = SamplingParams(
        max_tokens=tokens, temperature=1.0, top_k=2, n=samples, detokenize=False, ignore_eos=True
    )
    [output] = llm.generate([{"prompt_token_ids": [5, 17, 3]}], params, use_tqdm=False)
    return Counter(one.token_ids for one in output.outputs)


def with_model(config: dict[str, Any], draft: Path | None) -> dict[str, Any]:
    """The config with the folder of its draft model, that of each of several drafters too."""
    if "drafters" in config:
        return {**config, "drafters": [with_model(one, draft) for one in config["drafters"]]}
    return {**config, "model": str(draft)} if config["method"] == "draft_model" else config


def open_exact(model: Path, config: dict[str, Any] | None, **settings: Any) -> LLM:
    """Bits are promised, and every budget is drafted, whether it pays or not."""
    return LLM(str(model), speculative_config=config, **{**EXACT, **settings})


def open_llm(model: Path, draft: Path | None, method: str, **pressure: Any) -> LLM:
    config = pressure.pop("speculative_config", None)
    if method in METHODS:
        config = with_model(METHODS[method], draft)
    if method == "junk":
        pressure["proposer"] = JunkProposer(VOCAB, seed=1)
    return open_exact(model, config, **pressure)


def replay(model: Path, known: dict[str, list[int]], wrong: float) -> LLM:
    """An LLM whose drafter knows the right outputs and spoils some tokens."""
    proposer = ReplayProposer(known, VOCAB, wrong=wrong, seed=5)
    return LLM(str(model), dtype="float32", batch_invariant=True, proposer=proposer)


def audit(proposer: KVProposer) -> list[int]:
    """From now on each draft is made a second time by one that remembers nothing, and must be the
    same; what that one computes is not kept. Returns how many drafts were compared, step by step.
    """
    propose, compared = proposer.propose, list[int]()
    layers = proposer.make_steps([]).runner.store.layers  # type: ignore[attr-defined]

    @torch.inference_mode()
    def both(context: Context) -> Draft:
        found, kept = propose(context), [layer.clone() for layer in layers]
        for span in context.spans:
            proposer.progress.rewind(span.sequence, 0)
        again = propose(context)
        assert (again.ids, again.parents) == (found.ids, found.parents)
        for layer, before in zip(layers, kept, strict=True):
            layer.copy_(before)
        compared.append(sum(map(len, found.ids)))
        return found

    proposer.propose = both  # type: ignore[method-assign]
    return compared
