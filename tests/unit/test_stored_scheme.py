"""What a quantization_config says. The guarded bugs: a variant that is read as another one, an
error that does not say what to use instead."""

from typing import Any

import pytest

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.memory_formula import Held
from foretoken.shape.stored import FLOATS, StoredScheme, stored_scheme

INSTEAD = "16-bit checkpoint with quantization='int8' or 'int4'"


def compressed(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"format": "mixed-precision", "config_groups": named, **fields}


def read(given: object, field: str = "quantization_config") -> StoredScheme | None:
    return stored_scheme({field: given})


INT4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}
INT8 = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quant_method": "hqq"}, INSTEAD),
        (compressed(INT4, format="marlin-24"), INSTEAD),
        (compressed({**INT4, "format": "nvfp4-pack-quantized"}), INSTEAD),
        (compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed(INT4, transform_config={"config_groups": {}}), "transform_config"),
        (compressed(INT4, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed({"weights": {"num_bits": 2}}), "int2.*int of 4 or 8 bits"),
        (compressed({"weights": {"num_bits": 4, "type": "float"}}), "float4.*float of 8 bits"),
        ({"quant_method": "gptq", "bits": 3}, INSTEAD),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq_v2"),
        ({"quant_method": "awq", "bits": 8}, "bits.*allowed: 4"),
        ({"quant_method": "awq", "version": "gemv"}, "gemm"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e4m3"),
    ],
)
def test_variants_that_are_not_read(given: object, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read(given)


@pytest.mark.parametrize(
    "given",
    [
        "gptq",
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": 128},
    ],
)
def test_values_of_the_wrong_kind(given: object) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        read(given)


def test_an_older_field_and_no_method() -> None:
    """Early compressed-tensors wrote `compression_config`, and named no method."""
    found = read(compressed(INT4), "compression_config")
    assert found is not None and found.describe() == "compressed-tensors: int4, groups of 128"
    assert stored_scheme({}) is None


def test_mixed_groups() -> None:
    """Groups without weights say nothing; memory is counted by the widest of the others."""
    outputs = {"output_activations": {"num_bits": 8}}
    sparse = {"sparsity_config": {"format": "dense"}}
    found = read(compressed(INT4, INT8, outputs, **sparse))
    assert found is not None
    assert found.weights == "int4, groups of 128; int8, per output"
    assert found.held == (Held(1.0, 8),) and found.rounds_activations
    nothing = read(compressed(outputs))
    assert nothing is not None and nothing.weights == "floats" and nothing.held == (FLOATS,)
