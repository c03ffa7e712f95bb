"""Drafters beside tensor_parallel_size and pipeline_parallel_size: the same tokens and drafts as
with one process, and what cannot be staged. Short of pages: test_tensor_parallel_long.

The guarded bugs: a head that calls the target's shared output layer alone, which waits for ranks
that know of nothing; hidden states of one rank's share; a whole head that nobody budgeted.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.errors import ConfigError, NotYetError
from foretoken.testing import write_tiny_llama
from tests.e2e.heads import HEADS, write_head
from tests.e2e.lossless import PARAMETERS, PRESSURES, Result, counted, generate, make_prompts
from tests.marks import needs_kernels

LAYERS = 5
CHOICES = [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [1], [1, 0], [2]]
CHAINS = (
    "eagle", "eagle3", "peagle", "anchored", "dflash", "dflash reduced", "dspark", "mlp", "medusa",
)  # fmt: skip
TREES: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle", "choices": CHOICES},
    "eagle3": {"method": "eagle3", "tree_top_k": 3, "tree_depth": 3},
    "medusa": {"method": "medusa", "choices": CHOICES},
}
POINTS = {"eagle3": [4, 1], "peagle": [3, 2], "anchored": [2, 4]}
"""In the upper half, at its beginning, and in the lower one: layers 0 and 1 are on rank 0."""
EXACT: dict[str, Any] = {"dtype": "float32", "batch_invariant": True, **PRESSURES["calm"]}
ROUNDED: dict[str, Any] = {
    "dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8", **PRESSURES["chunks"],
}  # fmt: skip

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("stages") / "m", seed=1, num_hidden_layers=LAYERS
    )


def drafters(root: Path, draft: Path, points: dict[str, list[int]]) -> list[dict[str, Any]]:
    """All heads, chains and trees, and look-up and draft models, each under its name."""
    found: list[dict[str, Any]] = []
    for name in CHAINS:
        folder = write_head(root / name, name, draft)
        if name in points:
            file = folder / "config.json"
            read = {"eagle_aux_hidden_state_layer_ids": points[name]}
            file.write_text(json.dumps({**json.loads(file.read_text()), **read}))
        found.append({"name": name, "model": str(folder), **HEADS[name]})
    for name, keys in TREES.items():
        found.append({"name": f"{name} tree", "model": str(root / name), **keys})
    draft_model = {"method": "draft_model", "model": str(draft)}
    return [
        *found,
        {"name": "draft model", **draft_model, "num_speculative_tokens": 4},
        {"name": "draft tree", **draft_model, "choices": CHOICES},
        {"name": "ngram", "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    ]


def open_llm(model: Path, members: list[dict[str, Any]], **settings: Any) -> LLM:
    return LLM(
        str(model),
        adaptive_speculation=False,
        speculative_config={"drafters": members},
        **{"kv_cache_memory_bytes": 8 << 20, **settings},
    )


def run(llm: LLM, drafter: str | None, parameters: str) -> list[Result]:
    chosen = {"max_tokens": 24, **PARAMETERS[parameters]}
    policy = {"enabled": False} if drafter is None else {"drafter": drafter}
    return generate(llm, make_prompts(5, 3), {**chosen, "speculation": policy})


def drafted(llm: LLM) -> list[float]:
    """Drafts that were checked so far, and those that were accepted."""
    return [counted(llm, f"num_{name}_tokens") for name in ("draft", "accepted")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("tensor_parallel_size", EXACT),
        ("pipeline_parallel_size", EXACT),
        ("pipeline_parallel_size", ROUNDED),
    ],
    ids=["shared", "staged", "staged, rounded, in chunks"],
)
def test_two_processes_draft_and_write_what_one_does(
    kind: str, settings: dict[str, Any], model: Path, deep: Path, draft: Path, tmp_path: Path
) -> None:
    is_staged = kind == "pipeline_parallel_size"
    target = deep if is_staged else model
    members = drafters(tmp_path, draft, POINTS if is_staged else {})
    with (
        open_llm(target, members, **settings) as alone,
        open_llm(target, members, **settings, **{kind: 2}) as both,
    ):
        for parameters in ("greedy", "filters"):
            plain = run(alone, None, parameters)
            assert run(both, None, parameters) == plain
            for member in members:
                assert run(alone, member["name"], parameters) == plain, member["name"]
                assert run(both, member["name"], parameters) == plain, member["name"]
                assert drafted(both) == drafted(alone), member["name"]
        assert drafted(both)[0] > 1000
        one, two = alone._engine.parts.runner, both._engine.parts.runner
        if is_staged:
            assert (len(two.store.layers), two.page_bytes) == (LAYERS // 2, one.page_bytes)


@pytest.mark.slow
def test_a_packaged_head_over_rounded_weights_just_works() -> None:
    """With the head's own vocabulary, in bfloat16 and integers."""
    settings: dict[str, Any] = {"quantization": "int4", "kv_cache_memory_bytes": 32 << 20}
    settings["adaptive_speculation"] = False
    params = {"max_tokens": 20, **PARAMETERS["greedy"]}
    with LLM("demo", **settings) as plain:
        wanted = generate(plain, make_prompts(5, 3), params)
    head = {"model": "demo-eagle3"}
    with LLM("demo", tensor_parallel_size=2, speculative_config=head, **settings) as shared:
        assert generate(shared, make_prompts(5, 3), params) == wanted
        assert drafted(shared)[0] > 0
        assert shared._engine.parts.runner.model.head is None, "this head has a top of its own"


@pytest.mark.parametrize(
    ("settings", "error", "allowed"),
    [
        ({"tensor_parallel_size": 2}, NotYetError, "1 beside tensor_parallel_size > 1"),
        ({"pipeline_parallel_size": 3}, ConfigError, "an integer from 1 to 2"),
    ],
)
def test_what_cannot_be_staged_is_refused(
    model: Path, settings: dict[str, Any], error: type[ConfigError], allowed: str
) -> None:
    with pytest.raises(error, match=allowed) as found:
        LLM(str(model), **{"pipeline_parallel_size": 2, **settings})
    assert found.value.field == "pipeline_parallel_size"


def test_one_layer_has_no_stages(draft: Path) -> None:
    with pytest.raises(ConfigError, match="1 to 1, the layers of the model"):
        LLM(str(draft), pipeline_parallel_size=2)
