"""tensor_parallel_size changes no token, and a lost process ends the engine with a named error."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError, EngineLostError, RankLostError
from foretoken.layers.gathered import GatheredMixture
from foretoken.layers.mixture import Mixture
from foretoken.models.decoder import Decoder
from foretoken.testing import write_tiny_llama
from tests.e2e.lossless import PARAMETERS, follower_of
from tests.golden.families import MIXTURES, write_checkpoint
from tests.marks import needs_kernels, slow_but

PROMPTS: list[Any] = [{"prompt_token_ids": [1 + n * i % 90 for i in range(n)]} for n in (8, 13, 38)]
SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "draft model": {"method": "draft_model", "num_speculative_tokens": 4},
}
TREE = {"method": "draft_model", "choices": [[0], [0, 0], [1], [1, 0]]}

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("shared") / "model", num_attention_heads=6, num_key_value_heads=3
    )


def open_llm(folder: Path, ranks: int, **settings: Any) -> LLM:
    speculative = settings.pop("speculative_config", None)
    if speculative is not None and "draft_model" in str(speculative):
        speculative = {**speculative, "model": str(folder)}
    return LLM(
        str(folder), tensor_parallel_size=ranks, kv_cache_memory_bytes=8 << 20,
        speculative_config=speculative, adaptive_speculation=False, **settings,
    )  # fmt: skip


def tokens(llm: LLM) -> dict[str, list[Any]]:
    found = {}
    for name, given in PARAMETERS.items():
        params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **given})
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found[name] = [
            (list(one.token_ids), repr(one.logprobs)) for out in outputs for one in out.outputs
        ]
    return found


@pytest.mark.parametrize("speculation", slow_but(SPECULATION, "draft model"))
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"dtype": "float32", "batch_invariant": True}),
        pytest.param(
            3,
            {"dtype": "bfloat16", "max_num_batched_tokens": 16, "block_size": 8},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["2 of float32", "3 of bfloat16 in chunks"],
)
def test_tokens_are_those_of_one_process(
    folder: Path, speculation: str, ranks: int, settings: dict[str, Any]
) -> None:
    given = {**settings, "speculative_config": SPECULATION[speculation]}
    with open_llm(folder, 1, **given) as alone, open_llm(folder, ranks, **given) as shared:
        assert tokens(shared) == tokens(alone)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_so_are_those_of_rounded_models_with_trees(folder: Path, settings: dict[str, Any]) -> None:
    """Trees move keys and values after a step, on every rank."""
    given = {**settings, "speculative_config": TREE, "batch_invariant": True}
    with open_llm(folder, 1, **given) as alone, open_llm(folder, 2, **given) as shared:
        assert tokens(shared) == tokens(alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("qwen3_moe", "gpt_oss", "qwen2_moe", "afmoe", "glm4_moe", "dots1", "ernie4_5_moe"),
        *("hunyuan_v1_moe", "mixtral", "granitemoeshared", "hy_v3"),
    ],
)
def test_so_are_those_of_mixtures(case: str, tmp_path: Path) -> None:
    """Each process has a share of every expert; a draft changes who shares them."""
    kind, changes = MIXTURES[case]
    write_checkpoint(tmp_path, kind, {**changes, "vocab_size": 128})
    given = {"dtype": "bfloat16", "speculative_config": SPECULATION["draft model"]}
    with open_llm(tmp_path, 1, **given) as alone, open_llm(tmp_path, 2, **given) as it:
        assert tokens(it) == tokens(alone)
        model = it._engine.parts.runner.model
        assert isinstance(model, Decoder)
        mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Mixture)]
        assert mixtures and all(isinstance(one.kernel, GatheredMixture) for one in mixtures)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "key_heads"), [(2, 1), (4, 2)])
def test_fewer_key_heads_than_ranks_change_nothing(
    ranks: int, key_heads: int, tmp_path: Path
) -> None:
    """Each is on two ranks; three or six query heads each."""
    few = write_tiny_llama(tmp_path / "model", num_attention_heads=6, num_key_value_heads=key_heads)
    given = {"dtype": "bfloat16", "speculative_config": SPECULATION["draft model"]}
    with open_llm(few, 1, **given) as alone, open_llm(few, ranks, **given) as it:
        assert tokens(it) == tokens(alone)
        one, shared = alone._engine.parts.runner, it._engine.parts.runner
        assert shared.page_bytes == 2 * one.page_bytes == ranks * shared.store.page_bytes


@pytest.fixture
def shared(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, 2, dtype="float32") as llm:
        yield llm


@pytest.mark.slow
def test_a_killed_process_ends_the_engine_with_its_name(shared: LLM) -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.0)
    reading = shared.stream(PROMPTS[0], params)
    next(reading)
    process = follower_of(shared)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RankLostError, match="rank 1 has died"):
        list(reading)
    with pytest.raises(EngineLostError):
        shared.generate(PROMPTS, params, use_tqdm=False)
    shared.close()
    assert not Path(f"/proc/{process}").exists()


def test_what_cannot_be_shared_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="1 to 3, the key heads") as found:
        LLM(str(folder), kv_cache_memory_bytes=8 << 20, tensor_parallel_size=4)
    assert found.value.field == "tensor_parallel_size"
