"""Heads in the formats that others read, asked for by name."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foretoken.config.methods import trained_kinds
from foretoken.errors import ConfigError
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.layers import Eagle3Shape
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.folder import method_of, read_head
from foretoken.proposers.heads.parts import HeadShape
from foretoken.testing import write_tiny_llama
from foretoken.training.heads.kind import Layout, find_kind, require_form
from foretoken.training.runs import train
from tests.unit.training.own_runs import silent, write_config

LAYER = HeadShape(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
SHAPE = Eagle3Shape(layer=LAYER, draft_vocab_size=20, target_hidden_size=24)


def layout_of(state: dict[str, Any], form: str | None = None) -> Layout:
    layout = find_kind(state["kind"]).layout
    assert layout is not None
    return layout(state, "t", form)


@pytest.mark.parametrize("form", ["speculators", "vllm", "eagle"])
def test_an_eagle3_run_is_exported_as_asked(form: str, tmp_path: Path) -> None:
    """Trained, written and read back: the same network whatever the format."""
    target = write_tiny_llama(tmp_path / "target", seed=2, num_hidden_layers=8)
    config = write_config(tmp_path, "eagle3", steps=2)
    config.write_text(config.read_text().replace("depth = 3", "depth = 3\ndraft_vocab_size = 40"))
    train(config, tmp_path / "run", target, silent, export=form)
    folder = tmp_path / "run" / "export"
    head = read_head(folder)
    assert method_of(head) == "eagle3"
    known = json.loads((folder / "config.json").read_text())
    names = set(load_file(folder / "model.safetensors"))
    assert {"d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight"} <= names
    assert ("embed_tokens.weight" in names) == (form == "speculators")
    assert ("midlayer.self_attn.q_proj.weight" in names) == (form == "eagle")
    if form == "eagle":
        assert (
            known["architectures"] == ["LlamaForCausalLMEagle3"] and known["draft_vocab_size"] == 40
        )
    else:
        assert known["speculators_config"]["verifier"]["name_or_path"] == str(target)
    shape = json.loads((target / "config.json").read_text())
    facts = replace(
        LAYER, vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], num_hidden_layers=8
    )
    loaded = Eagle3.load(head, facts)
    assert loaded.points == (2, 4, 5)
    ids = loaded.target_ids
    stored = load_file(folder / "model.safetensors")["t2d"]
    assert stored.nonzero().flatten().tolist() == ids.tolist() and len(ids) == 40


@pytest.mark.parametrize("kind", trained_kinds())
def test_a_format_that_a_kind_has_not_is_refused(kind: str) -> None:
    for form in ("own", "speculators", "vllm", "sglang", "eagle", "gguf"):
        if form in ("own", *trained_kinds()[kind].formats):
            require_form(kind, form)
        else:
            with pytest.raises(ConfigError, match=f"--format: .*for {kind}"):
                require_form(kind, form)


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_every_kind_can_be_exported_at_the_end_of_its_run(kind: str, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target", seed=2)
    train(write_config(tmp_path, kind, steps=2), tmp_path / "run", target, silent, export="own")
    assert method_of(read_head(tmp_path / "run" / "export")) == kind


def test_a_format_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="export"):
        train(write_config(tmp_path, "mlp"), tmp_path / "run", tmp_path, silent, export="eagle")
    assert not (tmp_path / "run").exists()


def test_variants_that_a_format_cannot_hold_are_refused() -> None:
    """EAGLE-3's own has one plain layer; vLLM's EAGLE no bias; anchored masks are ours alone."""
    for changes in ({"fc_norm": True}, {"layer": replace(LAYER, num_hidden_layers=2)}):
        shape = replace(SHAPE, **changes)
        state = {"kind": "eagle3", "model": Eagle3(shape).state_dict(), "shape": asdict(shape)}
        with pytest.raises(ConfigError, match=r"fc_norm|2 layers"):
            layout_of(state, "eagle")
    shape = replace(SHAPE, parallel=True, anchored=True, mask_depths=2)
    state = {"kind": "peagle", "model": Eagle3(shape).state_dict(), "shape": asdict(shape)}
    with pytest.raises(ConfigError, match="anchored"):
        layout_of({**state, "head": {}}, "vllm")
    assert layout_of({**state, "head": {}}, "own").tensors
    for bias in (True, False):
        net = Eagle(LAYER, fc_bias=bias)
        state = {"kind": "eagle", "model": net.state_dict(), "shape": asdict(LAYER)}
        assert layout_of(state).config["bias"] is bias
        if bias:
            with pytest.raises(ConfigError, match="bias"):
                layout_of(state, "vllm")
        else:
            assert "fc.bias" not in layout_of(state, "vllm").tensors
    whole = replace(SHAPE, draft_vocab_size=50)
    state = {"kind": "eagle3", "model": Eagle3(whole).state_dict(), "shape": asdict(whole)}
    assert torch.all(layout_of(state, "eagle").tensors["t2d"])
