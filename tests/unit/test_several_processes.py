"""What is decided for several processes: where they may run, and the memory of each.

No GPU is needed: what PyTorch would say of the devices is given.
"""

from dataclasses import replace
from typing import Any

import pytest

from foretoken.checkpoint import packaged_model
from foretoken.config import EngineConfig, resolve
from foretoken.config.memory import Drafting, HeadMemory, ModelMemory
from foretoken.config.resolve import ResolvedConfig
from foretoken.errors import ConfigError, NotYetError
from foretoken.hardware import Gpus, Hardware
from foretoken.shape import ModelShape
from foretoken.shape.memory_formula import RANK_BYTES, WeightCounts

DEMO = ModelShape.from_config(packaged_model("demo"))
EVEN = replace(DEMO, num_attention_heads=8, num_key_value_heads=2, vocab_size=4096)
"""By 2 and 4, in everything that NCCL gathers; at 4 ranks two have each key head."""
FOUR = Gpus(count=4, free_memory=4 << 30, has_nccl=True)
CPU = Hardware(cpu_name="any", num_cores=2, free_memory=2**34, cpu_flags=frozenset({"avx512_bf16"}))


def resolved(
    shape: ModelShape = EVEN,
    *,
    gpus: Gpus | None = FOUR,
    packs: tuple[str, ...] = ("cpu",),
    drafting: Drafting | None = None,
    **settings: Any,
) -> ResolvedConfig:
    config = EngineConfig(model="demo", **settings)
    return resolve(config, CPU, shape, drafting=drafting, packs=packs, gpus=gpus)


@pytest.mark.parametrize("ranks", [2, 4])
def test_devices_that_are_there_take_a_rank_each(ranks: int) -> None:
    found = resolved(tensor_parallel_size=ranks)
    assert found.device == "cuda" and not found.batch_invariant
    assert f"on cuda in {ranks} processes (same tokens as one up to rounding)" in found.describe()


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"tensor_parallel_size": 8}, "tensor_parallel_size", "1 to 4, the CUDA devices"),
        (
            {"tensor_parallel_size": 2, "gpus": replace(FOUR, has_nccl=False)},
            "tensor_parallel_size",
            "built without NCCL",
        ),
        ({"tensor_parallel_size": 2, "packs": ()}, "tensor_parallel_size", "one is lost"),
        (
            {"tensor_parallel_size": 2, "shape": replace(EVEN, vocab_size=4095)},
            "tensor_parallel_size",
            "divides the model's vocabulary 4095",
        ),
        (
            {
                "tensor_parallel_size": 4,
                "shape": replace(EVEN, num_attention_heads=6, intermediate_size=510),
            },
            "tensor_parallel_size",
            "query heads 6 and intermediate size 510",
        ),
        (
            {"tensor_parallel_size": 2, "shape": replace(EVEN, num_key_value_heads=3)},
            "tensor_parallel_size",
            "key heads 3",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "1 on cuda"),
    ],
)
def test_what_devices_cannot_share_is_refused_by_name(
    given: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        resolved(**given)
    assert found.value.field == field
    resolved(**{**given, "device": "cpu", "tensor_parallel_size": 2, "pipeline_parallel_size": 1})


def test_a_draft_model_that_is_shared_is_checked_too() -> None:
    odd = ModelMemory(shape=replace(EVEN, hidden_size=191), ranks=2)
    with pytest.raises(ConfigError, match="hidden size 191") as found:
        resolved(tensor_parallel_size=2, drafting=Drafting(models=(odd,)))
    assert found.value.field == "speculative_config.draft_tensor_parallel_size"


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_on_a_cpu_kernels_are_not_needed_but_bits_are_not_promised(setting: str) -> None:
    given: dict[str, Any] = {"gpus": None, setting: 2}
    without = resolved(**given, packs=())
    assert "in 2 processes (same tokens as one up to rounding)" in without.describe()
    assert "in 2 processes, " in resolved(**given).describe()
    assert not resolved(**given, dtype="float16").has_bits_of_one


def test_models_of_transformers_are_not_shared() -> None:
    foreign = replace(EVEN, rope=None)
    assert not foreign.is_own
    with pytest.raises(NotYetError, match="runs through transformers"):
        resolved(foreign, tensor_parallel_size=2)


DRAFT = ModelMemory(shape=EVEN)
HEAD = HeadMemory(counts=WeightCounts(0, 0, 1000, 10), borrows_head=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_device_has_memory_of_its_own(ranks: int) -> None:
    """All is counted for the first, which has all of a draft beside its share of the target."""
    drafting = Drafting(models=(DRAFT,), heads=(HEAD,), features_per_token=384, lookahead=3)
    settings: dict[str, Any] = {"drafting": drafting, "max_num_seqs": 4}
    one = resolved(**settings).budget.need
    found = resolved(tensor_parallel_size=ranks, **settings).budget
    need, counts = found.need, EVEN.weight_counts()
    copies = ranks // min(ranks, 2)
    assert found.free == int(0.9 * FOUR.free_memory)
    assert need.kv_per_token == one.kv_per_token * copies // ranks
    assert need.draft_kv_per_token == one.draft_kv_per_token
    assert need.draft_weights == one.draft_weights
    assert (need.activations, need.workspace) == (one.activations, one.workspace)
    key_rows = (copies - 1) * EVEN.num_hidden_layers * 2 * EVEN.kv_size * EVEN.hidden_size
    shared = counts.head * (not EVEN.tie_word_embeddings) + counts.matrices + key_rows
    whole = counts.table + counts.rest
    assert need.weights == pytest.approx(2 * (whole + shared / ranks), abs=2)


def test_a_draft_that_is_shared_has_a_share_there() -> None:
    for ranks, part in ((1, 1), (2, 2)):
        drafting = Drafting(models=(ModelMemory(shape=EVEN, ranks=ranks),), lookahead=3)
        need = resolved(tensor_parallel_size=2, drafting=drafting).budget.need
        assert need.draft_kv_per_token * part == 2 * need.kv_per_token


def test_processes_on_a_cpu_share_its_memory() -> None:
    one = resolved(gpus=None).budget.need
    both = resolved(gpus=None, tensor_parallel_size=2)
    need = both.budget.need
    assert need.kv_per_token == one.kv_per_token
    assert need.activations == 2 * one.activations
    assert need.workspace - one.workspace >= RANK_BYTES
    assert need.weights > one.weights
    assert "of 2 processes together" in both.describe_memory()[0]
    on_cuda = resolved(tensor_parallel_size=2).describe_memory()[0]
    assert "of the first of 2 devices" in on_cuda
