"""What a shape says about memory and work. The guarded bugs: windows counted wrongly, a scaled
context that is too short or too long, a family's default forgotten."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.config.resolve import check_heads
from foretoken.errors import ConfigError
from foretoken.shape import ModelShape

BASE = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
}


def read(folder: Path, **fields: Any) -> ModelShape:
    (folder / "config.json").write_text(json.dumps({**BASE, **fields}))
    return ModelShape.from_config(folder)


def test_windows_limit_what_is_read_not_what_is_kept(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="gemma3_text", head_dim=8, sliding_window=100)
    assert shape.windows == (100, 100, 100, 100, 100, None)
    assert shape.tokens_seen(60) == 6 * 60
    assert shape.tokens_seen(700) == 5 * 100 + 700
    assert shape.kv_bytes_per_token(2) == 2 * 6 * 2 * 8 * 2
    assert shape.kv_read_bytes(700, 2) == 2 * (5 * 100 + 700) * 2 * 8 * 2
    seen = shape.flops_per_token(700) - shape.flops_per_token(0)
    assert seen == 4 * (5 * 100 + 700) * 4 * 8


def test_without_windows_every_layer_reads_all(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="llama")
    assert shape.kv_read_bytes(700, 2) == 700 * shape.kv_bytes_per_token(2)


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("mistral", {"sliding_window": 7}, (7,) * 6),
        ("mistral", {"sliding_window": None}, (None,) * 6),
        ("phi3", {"sliding_window": 7}, (7,) * 6),
        ("qwen2", {"sliding_window": 7}, (None,) * 6),
        (
            "qwen2",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 4},
            (None, None, None, None, 7, 7),
        ),
        ("gemma2", {"sliding_window": 7}, (7, None, 7, None, 7, None)),
        (
            "gemma3_text",
            {"sliding_window": 7, "sliding_window_pattern": 3},
            (7, 7, None, 7, 7, None),
        ),
    ],
)
def test_windows(
    kind: str, fields: dict[str, Any], expected: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, model_type=kind, **fields).windows == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 1000),
        ({"rope_type": "dynamic", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
    ],
)
def test_scaled_context(rope: dict[str, Any], expected: int, tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="llama", rope_parameters=rope)
    assert shape.max_position_embeddings == expected


def test_gemma_defaults(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="gemma2", sliding_window=7)
    assert (shape.head_dim, shape.tie_word_embeddings) == (256, True)
    assert (shape.embedding_scale, shape.attention_scale) == (8.0, 1 / 16)


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("smollm3", {}, (True, True, True, False, True, True)),
        ("smollm3", {"no_rope_layers": [0, 1, 0, 1, 0, 1]}, (False, True) * 3),
        ("smollm3", {"no_rope_layer_interval": 2}, (True, False) * 3),
        ("llama", {}, ()),
    ],
)
def test_layers_without_positions(
    kind: str, fields: dict[str, Any], expected: tuple[bool, ...], tmp_path: Path
) -> None:
    shape = read(tmp_path, model_type=kind, **fields)
    assert shape.turned == expected
    kinds = [shape.view(layer)[1].rope_type for layer in range(6)]
    assert kinds == ["default" if one else "none" for one in expected or (True,) * 6]


def test_positions_of_olmo3(tmp_path: Path) -> None:
    """Those that are scaled belong to the layers that see all."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 500}
    shape = read(tmp_path, model_type="olmo3", rope_scaling=yarn, rope_theta=7e5)
    views = [shape.view(layer) for layer in range(4)]
    assert [window for window, _ in views] == [4096, 4096, 4096, None]
    assert [rope.rope_type for _, rope in views] == ["default", "default", "default", "yarn"]
    assert {rope.theta for _, rope in views} == {7e5}
    assert (shape.max_position_embeddings, shape.rms_norm_eps) == (4000, 1e-5)


def test_queries_that_grow_count_positions(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="ministral3")
    assert shape.rope is not None and (shape.rope.query_growth, shape.rope.factor) == (0.1, 16.0)
    assert not shape.counts_distances
    assert read(tmp_path, model_type="smollm3").counts_distances


def test_norms_over_all_heads_are_not_shared_out(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="olmo2")
    check_heads("tensor_parallel_size", 1, shape)
    with pytest.raises(ConfigError, match="tensor_parallel_size: got 2; allowed: 1: norms"):
        check_heads("tensor_parallel_size", 2, shape)
