"""The packaged models are whole, small, loadable anywhere, and fit each other."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import foretoken
from foretoken.errors import ConfigError
from foretoken.text.packaged import PATH, Kind, packaged_texts
from foretoken.training.llama_folder import read_exported
from tools.python_text.stdlib import HELD_OUT

PACKAGED = Path(foretoken.__file__).parent / "packaged"
LIMITS = {"demo": 22_000_000, "demo-draft": 4_000_000}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_packaged_model_is_a_plain_llama(name: str) -> None:
    folder = PACKAGED / name
    assert (folder / "model.safetensors").stat().st_size <= LIMITS[name]
    assert "Held out" in (folder / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mine = read_exported(folder)
    (prompt,) = packaged_texts("code", 1)
    tokens = tokenizer(prompt.text, return_tensors="pt")["input_ids"][:, :48]
    assert tokens[0, 0] == tokenizer.bos_token_id == 0
    with torch.inference_mode():
        logits = mine.logits(mine(tokens).hidden)
        assert (theirs(tokens).logits - logits).abs().max() < 1e-3
        nats = mine.loss(tokens[:, :-1], tokens[:, 1:]).item()
    assert nats < 5.5, "no better than a table of word counts"


def test_draft_and_target_fit() -> None:
    target, draft = (json.loads((PACKAGED / n / "config.json").read_text()) for n in LIMITS)
    assert (PACKAGED / "demo" / "tokenizer.json").read_bytes() == (
        PACKAGED / "demo-draft" / "tokenizer.json"
    ).read_bytes()
    assert target["vocab_size"] == draft["vocab_size"] == 8000
    assert target["max_position_embeddings"] == draft["max_position_embeddings"] >= 2048
    assert target["num_hidden_layers"] >= 8 * draft["num_hidden_layers"]


def test_packaged_prompts_are_of_held_out_modules_and_texts_of_none() -> None:
    modules = {
        kind: {name.removeprefix("edit ").split(" ")[-1].split(":")[0] for name, _ in found}
        for kind, found in ((kind, packaged_texts(kind)) for kind in get_args(Kind))
    }
    assert modules["code"] | modules["edit"] <= set(HELD_OUT)
    assert modules["text"] and not modules["text"] & set(HELD_OUT)
    assert [len(packaged_texts(kind)) for kind in get_args(Kind)] == [200, 48, 128]
    assert [one.text for one in packaged_texts("code", 2)] == [
        one.text for one in packaged_texts("code")[:2]
    ]
    with pytest.raises(ConfigError, match="count: got 201; allowed: at most 200"):
        packaged_texts("code", 201)
    assert "Python Software Foundation" in PATH.with_suffix(".LICENSE").read_text("utf-8")
