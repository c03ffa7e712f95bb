"""pipeline_parallel_size changes no token: hidden states that drafters read, trees, windows, lost
processes, and what it is refused beside. Short of pages: test_tensor_parallel_long.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.errors import ConfigError, NotYetError
from foretoken.testing import write_tiny_llama
from tests.e2e.heads import HEADS, write_head
from tests.e2e.lossless import PARAMETERS, PRESSURES, Result, generate, make_prompts
from tests.marks import needs_kernels

LAYERS = 5
CHOICES = [[0], [0, 0], [0, 0, 1], [1], [1, 0], [2]]
CHUNKS = PRESSURES["chunks"]
POINTS = {"eagle3": [4, 1], "peagle": [3, 2], "anchored": [2, 4]}
"""In the upper half, at its beginning, and in the lower one: layers 0 and 1 are on rank 0."""

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("stages") / "m", seed=1, num_hidden_layers=LAYERS
    )


def drafters(root: Path, draft: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in ("eagle", "eagle3", "peagle", "anchored", "mlp", "medusa", "dflash", "dspark"):
        folder = write_head(root / name, name, draft)
        if name in POINTS:
            file = folder / "config.json"
            read = {"eagle_aux_hidden_state_layer_ids": POINTS[name]}
            file.write_text(json.dumps({**json.loads(file.read_text()), **read}))
        found.append({"name": name, "model": str(folder), **HEADS[name]})
    tree = {"method": "eagle3", "model": str(root / "eagle3"), "choices": CHOICES}
    draft_model = {"method": "draft_model", "model": str(draft)}
    return [
        *found,
        {"name": "eagle3 tree", **tree},
        {"name": "draft model", **draft_model, "num_speculative_tokens": 4},
        {"name": "draft tree", **draft_model, "choices": CHOICES},
        {"name": "ngram", "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    ]


def open_llm(folder: Path, stages: int, members: list[dict[str, Any]], **settings: Any) -> LLM:
    return LLM(
        str(folder),
        pipeline_parallel_size=stages,
        adaptive_speculation=False,
        speculative_config={"drafters": members},
        **{"kv_cache_memory_bytes": 8 << 20, **settings},
    )


def run(llm: LLM, drafter: str | None, parameters: str) -> list[Result]:
    chosen = {"max_tokens": 24, **PARAMETERS[parameters]}
    policy = {"enabled": False} if drafter is None else {"drafter": drafter}
    return generate(llm, make_prompts(5, 3), {**chosen, "speculation": policy})


def drafted(llm: LLM) -> list[Any]:
    names = ("draft", "accepted")
    found = {one.name: one for one in llm.get_metrics()}
    return [found[f"vllm:spec_decode_num_{name}_tokens"] for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32", "batch_invariant": True},
        {
            "dtype": "bfloat16",
            "quantization": "int4",
            "kv_cache_dtype": "int8",
            **PRESSURES["chunks"],
        },
    ],
    ids=["float32", "rounded, in chunks"],
)
def test_two_stages_draft_and_write_what_one_process_does(
    deep: Path, draft: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    members = drafters(tmp_path, draft)
    with (
        open_llm(deep, 1, members, **settings) as alone,
        open_llm(deep, 2, members, **settings) as staged,
    ):
        for parameters in ("greedy", "filters"):
            plain = run(alone, None, parameters)
            assert run(staged, None, parameters) == plain
            for member in members:
                assert run(alone, member["name"], parameters) == plain, member["name"]
                assert run(staged, member["name"], parameters) == plain, member["name"]
                assert drafted(staged) == drafted(alone), member["name"]
        one, two = alone._engine.parts.runner, staged._engine.parts.runner
        assert (len(two.store.layers), two.page_bytes) == (LAYERS // 2, one.page_bytes)


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
