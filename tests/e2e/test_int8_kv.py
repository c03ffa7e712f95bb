"""The promises hold with int8 keys and values and with 8-bit activations, of the target, of the
drafter, of both.

The guarded bugs: stored bits or roundings that depend on the chunk, the batch or the branch they
were made in, a rolled-back or moved slot without its scale, a setting that changes nothing, or one
that is taken where nothing is multiplied so.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from foretoken import SamplingParams
from foretoken.errors import ConfigError
from tests.drafters import JunkProposer
from tests.e2e.heads import HEADS
from tests.e2e.lossless import (
    METHODS,
    PARAMETERS,
    PRESSURES,
    VOCAB,
    Result,
    asking,
    make_prompts,
    open_exact,
    with_model,
)
from tests.marks import needs_kernels, slow, slow_but

TOKENS, COUNT = 24, 8
run, _ = asking(COUNT, TOKENS)
TREE = {"method": "draft_model", "choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}
KV = {"kv_cache_dtype": "int8"}
EIGHT = {"quantization": "int8", "activations": "int8"}
FOUR = {"quantization": "int4", "activations": "int8"}
TARGETS: dict[str, dict[str, Any]] = {"kv": KV, "int4": FOUR, "int8": EIGHT}
DRAFTERS: dict[str, dict[str, dict[str, Any]]] = {
    "kv": {
        "draft": {**METHODS["draft auto"], **KV},
        "tree": {**TREE, **KV},
        **{name: {**HEADS[name], **KV} for name in ("eagle3", "dflash", "dspark")},
    },
    "activations": {
        "draft": {**METHODS["draft auto"], **EIGHT},
        "tree": {**TREE, "quantization": "int4"},
        **{name: {**HEADS[name], **EIGHT} for name in ("eagle3", "dflash")},
        "dspark": {**HEADS["dspark"], "quantization": "int4"},
    },
}
NAMES = ("ngram", "wide draft", *DRAFTERS["kv"])
FEW = ("draft", "tree", "eagle3", "dflash")
Plain = Callable[[str], list[Result]]


@pytest.fixture(
    scope="module", params=["kv", *(pytest.param(n, marks=needs_kernels) for n in ("int4", "int8"))]
)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(model: Path, target: str) -> Iterator[Plain]:
    with open_exact(model, None, **TARGETS[target], **PRESSURES["one at a time"]) as llm:
        yield cache(partial(run, llm))


@pytest.fixture(scope="module")
def drafter(folders: dict[str, Path], draft: Path) -> Callable[[str, str], dict[str, Any]]:
    """The config of a drafter, by the target's kind and its own name."""
    usual = {"ngram": METHODS["ngram"], "wide draft": METHODS["draft auto"]}

    def config(target: str, name: str) -> dict[str, Any]:
        one = {**usual, **DRAFTERS["kv" if target == "kv" else "activations"]}[name]
        return {**one, "model": str(folders[name])} if name in HEADS else with_model(one, draft)

    return config


@pytest.mark.parametrize("pressure", ["calm", slow("chunks")])
@pytest.mark.parametrize("name", slow_but(NAMES, "draft", "tree", "eagle3", "dspark"))
def test_drafters_change_no_token(
    name: str, pressure: str, target: str, model: Path, drafter: Any, plain: Plain
) -> None:
    """Greedy, seeded with filters, with penalties, with logprobs, whose prompts come again."""
    with open_exact(model, drafter(target, name), **TARGETS[target], **PRESSURES[pressure]) as llm:
        for parameters in ("greedy", "filters", "greedy penalties", "logprobs"):
            assert run(llm, parameters) == plain(parameters)


@pytest.mark.slow
@pytest.mark.parametrize("pressure", ["calm", "chunks"])
def test_batches_and_junk_change_no_token(
    pressure: str, target: str, model: Path, plain: Plain
) -> None:
    settings = {**TARGETS[target], **PRESSURES[pressure]}
    for proposer in (None, JunkProposer(VOCAB, seed=1)):
        with open_exact(model, None, proposer=proposer, **settings) as llm:
            for parameters in ("logprobs", "several"):
                assert run(llm, parameters) == plain(parameters)


def test_it_is_another_model(target: str, model: Path, plain: Plain) -> None:
    """Than with what `auto` comes to, which 16 bits of activations are beside integers."""
    weights = TARGETS[target].get("quantization")
    found = []
    for wide in ({}, {"activations": "int16"} if weights else {"kv_cache_dtype": "auto"}):
        with open_exact(model, None, quantization=weights, max_num_seqs=16, **wide) as llm:
            found.append(run(llm, "logprobs"))
    assert found[0] == found[1] != plain("logprobs")


LEFT_ALONE: list[Any] = [
    *(("kv", name, {}) for name in ("draft", "tree", "eagle3", "dspark")),
    *(pytest.param("int4", "draft", {"activations": kind}, marks=needs_kernels)
      for kind in ("auto", "int16", "int8")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "more"), LEFT_ALONE)
def test_a_drafter_leaves_a_wide_target_alone(
    kind: str, name: str, more: dict[str, Any], model: Path, drafter: Any
) -> None:
    weights = TARGETS[kind].get("quantization")
    found = []
    for speculative in (None, {**drafter(kind, name), **more}):
        with open_exact(model, speculative, quantization=weights, max_num_seqs=16) as llm:
            found.append([run(llm, parameters) for parameters in ("greedy", "logprobs")])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", FEW)
def test_preemption_changes_no_token(name: str, model: Path, drafter: Any) -> None:
    """Where keys and values are about twenty pages of 8 tokens."""
    params = SamplingParams(**PARAMETERS["seeded"], max_tokens=TOKENS, detokenize=False)
    few = {"kv_cache_memory_bytes": 28_000, "block_size": 8, "max_model_len": 128}
    with open_exact(model, None, **KV, **PRESSURES["one at a time"]) as alone:
        expected = [result.token_ids for result in run(alone, "seeded")]
    with open_exact(model, drafter("kv", name), **KV, **few) as llm:
        assert llm._engine.parts.config.num_pages < 24
        outputs = llm.generate(make_prompts(COUNT, 3), params, use_tqdm=False)
    metrics = [output.outputs[0].metrics for output in outputs]
    assert sum(one.num_preemptions for one in metrics if one is not None) > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_more_tokens_fit(model: Path) -> None:
    pages = []
    for kept in ("auto", "int8"):
        settings = {"dtype": "bfloat16", "kv_cache_memory_bytes": 180_000, "block_size": 8}
        with open_exact(model, None, kv_cache_dtype=kept, **settings) as llm:
            pages.append(llm._engine.parts.config.num_pages)
    assert pages[1] > 1.5 * pages[0]


@needs_kernels
@pytest.mark.parametrize(
    ("field", "draft_too", "settings"),
    [
        ("activations", False, {"quantization": None}),
        ("activations", False, {"dtype": "float16", "batch_invariant": False}),
        ("speculative_config.activations", True, {}),
    ],
)
def test_floats_are_not_multiplied_so(
    field: str, draft_too: bool, settings: dict[str, Any], model: Path, draft: Path
) -> None:
    speculative = {"model": str(draft), "activations": "int8"} if draft_too else None
    with pytest.raises(ConfigError, match=f"^{field}: got 'int8'; allowed: auto"):
        open_exact(model, speculative, **{**FOUR, **settings})
