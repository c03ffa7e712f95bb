"""What the metadata of a GGUF file say. The guarded bugs: a part of a model, or positions of
another kind, run as if they were whole and plain."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.gguf import forget_gguf, gguf_config

Change = Callable[[gguf.GGUFWriter], None]


def write(path: Path, *changes: Change, embeddings: str = "token_embd.weight") -> Path:
    """A file with little more than what `gguf_config` reads."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    for change in changes:
        change(writer)
    writer.add_tensor(embeddings, np.zeros((5, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    forget_gguf()
    return path


def scaled(kind: gguf.RopeScalingType) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)

    return change


def test_plain_and_linear_positions(tmp_path: Path) -> None:
    plain = gguf_config(write(tmp_path / "plain.gguf"))
    assert plain["rope_scaling"] is None and plain["vocab_size"] == 5
    assert plain["tie_word_embeddings"] and not plain["attention_bias"]
    linear = write(tmp_path / "linear.gguf", scaled(gguf.RopeScalingType.LINEAR))
    assert gguf_config(linear)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_window_makes_it_a_mistral(tmp_path: Path) -> None:
    found = gguf_config(write(tmp_path / "m.gguf", lambda writer: writer.add_sliding_window(64)))
    assert (found["model_type"], found["sliding_window"]) == ("mistral", 64)


def test_positions_that_are_not_recognized(tmp_path: Path) -> None:
    yarn = write(tmp_path / "yarn.gguf", scaled(gguf.RopeScalingType.YARN))
    with pytest.raises(UnsupportedModelError, match="yarn"):
        gguf_config(yarn)
    odd = np.array([1.0, 3.0, 5.0, 7.0], np.float32)
    freqs = write(
        tmp_path / "freqs.gguf", lambda writer: writer.add_tensor("rope_freqs.weight", odd)
    )
    with pytest.raises(UnsupportedModelError, match=r"Llama 3's factors"):
        gguf_config(freqs)


def test_files_that_are_no_whole_dense_language_model(tmp_path: Path) -> None:
    part = write(tmp_path / "part.gguf", lambda writer: writer.add_uint16("split.count", 2))
    with pytest.raises(CheckpointError, match="llama-gguf-split --merge"):
        gguf_config(part)
    experts = write(tmp_path / "experts.gguf", lambda writer: writer.add_expert_count(8))
    with pytest.raises(UnsupportedModelError, match="no mixture of experts"):
        gguf_config(experts)
    other = write(tmp_path / "other.gguf", embeddings="v.patch_embd.weight")
    with pytest.raises(CheckpointError, match="a language model's tensors"):
        gguf_config(other)
