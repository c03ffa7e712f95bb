"""Logits agree with Hugging Face's own model classes, however the sequence is cut and paged.

The guarded bugs: a wrong head order, rotation, norm, scale or mask; keys of somebody else's
tokens; a weight read under the wrong name.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden.scenario import cut, forward, in_pieces, open_runner, tables

VOCAB, LENGTH, TOLERANCE = 67, 75, 1e-4

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama grouped tied": ("llama", {"tie_word_embeddings": True}),
    "llama plain heads untied": ("llama", {"num_key_value_heads": 4}),
    "llama one key head, odd sizes": (
        "llama",
        {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 14, "hidden_size": 45},
    ),
    "llama other theta": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "qwen3 wide heads": ("qwen3", {"head_dim": 24, "num_attention_heads": 6}),
    "qwen3 tied": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
}


def write_checkpoint(folder: Path, kind: str, changes: dict[str, Any], **save: Any) -> Any:
    """Save a random Hugging Face model, norms included, and return it."""
    import transformers

    torch.manual_seed(3)
    names = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    }
    config_class, model_class = (getattr(transformers, name) for name in names[kind])
    model = model_class(config_class(**{**BASE, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder, **save)
    return model


def expected_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert expected.std() > 0.3, "logits too small to tell right from wrong"
    assert (found - expected).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_logits_agree(case: str, batch_invariant: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *CASES[case])
    runner = open_runner(tmp_path, batch_invariant=batch_invariant)
    draw = random.Random(case)
    sequences = [[draw.randrange(VOCAB) for _ in range(n)] for n in (LENGTH, 9, 40, 23)]
    wanted = [expected_logits(model, ids) for ids in sequences]
    for together in (True, False):
        ids, want = sequences[0], wanted[0]
        pages = tables(draw, [LENGTH], together=together)[0]
        assert_close(forward(runner, [(ids, 0, LENGTH, pages)]), want)
        lengths = cut(draw, LENGTH, [1, 1, 2, 5, 9, 30])
        assert_close(in_pieces(runner, ids, pages, lengths), want)
        all_pages = tables(draw, [len(s) for s in sequences], together=together)
        whole = [(s, 0, len(s), p) for s, p in zip(sequences, all_pages, strict=True)]
        assert_close(forward(runner, whole), torch.cat(wanted))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    kind, changes = CASES["llama plain heads untied"]
    model = write_checkpoint(tmp_path, kind, changes, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = list(range(30))
    runner = open_runner(tmp_path)
    pages = tables(random.Random(0), [30], together=True)[0]
    assert_close(forward(runner, [(ids, 0, 30, pages)]), expected_logits(model, ids))


def test_parameter_count(tmp_path: Path) -> None:
    from foretoken.shape import ModelShape

    for name, (kind, changes) in CASES.items():
        folder = tmp_path / name.replace(" ", "-")
        model = write_checkpoint(folder, kind, changes)
        shape = ModelShape.from_config(folder)
        count = sum(p.numel() for p in model.parameters())
        assert shape.parameter_count() == count, name
        assert shape.weight_bytes(2) == 2 * count
        heads = json.loads((folder / "config.json").read_text())["num_key_value_heads"]
        per_token = shape.kv_bytes_per_token(4)
        assert per_token == shape.num_hidden_layers * 2 * heads * shape.head_dim * 4
