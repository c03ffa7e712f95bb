"""Random heads for the suite's tiny target, in their published formats."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from foretoken.proposers.heads.dflash.network import BlockHead, DFlash
from foretoken.proposers.heads.dflash.shape import BlockShape, BlockView
from foretoken.proposers.heads.dspark import DSpark, MarkovShape
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.layers import Eagle3Shape
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.medusa import Medusa, MedusaShape
from foretoken.proposers.heads.mlp import MLPShape, MLPSpeculator
from foretoken.proposers.heads.parts import HeadShape
from foretoken.shape import RopeShape
from foretoken.testing import TINY

VOCAB, HIDDEN = int(TINY["vocab_size"]), int(TINY["hidden_size"])
LAYER = HeadShape(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    rms_norm_eps=1e-5, rope_theta=10000.0,
)  # fmt: skip
BLOCK = BlockShape(
    layer=replace(LAYER, num_hidden_layers=2),
    rope=RopeShape(theta=10000.0, rotary_dim=16),
    views=(BlockView(24, causal=True), BlockView()),
    block_size=5,
    first_row=1,
    mask_token_id=96,
    target_hidden_size=HIDDEN,
    target_layers=int(TINY["num_hidden_layers"]),
    points=(0, 1),
    draft_vocab_size=VOCAB,
)
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "peagle": {"method": "peagle", "num_speculative_tokens": 3, "parallel_drafting": True},
    "anchored": {"method": "peagle", "num_speculative_tokens": 4},
    "dflash": {"method": "dflash", "num_speculative_tokens": 4},
    "dflash reduced": {"method": "dflash", "num_speculative_tokens": 9},
    "dspark": {"method": "dspark", "num_speculative_tokens": 5},
    "mlp": {"method": "mlp_speculator", "num_speculative_tokens": 5},
    "medusa": {"method": "medusa", "num_speculative_tokens": 3},
    "pard": {"method": "draft_model", "num_speculative_tokens": 4, "parallel_drafting": True},
}


def block_shape(hidden: int = HIDDEN) -> BlockShape:
    layer = replace(BLOCK.layer, hidden_size=hidden)
    return replace(BLOCK, layer=layer, target_hidden_size=hidden)


def _config(shape: HeadShape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in HeadShape.__dataclass_fields__}


def _eagle3(name: str, hidden: int) -> tuple[nn.Module, dict[str, Any]]:
    layer = replace(LAYER, hidden_size=hidden)
    parallel, anchored = name != "eagle3", name == "anchored"
    net = Eagle3(
        Eagle3Shape(
            layer=layer,
            draft_vocab_size=40,
            target_hidden_size=hidden,
            num_features=2,
            parallel=parallel,
            anchored=anchored,
            mask_depths=2 if anchored else 1,
        )
    )
    net.d2t.copy_(torch.arange(40) + 3)
    config: dict[str, Any] = {
        "speculators_model_type": "peagle_anchored" if anchored else name,
        "transformer_layer_config": _config(layer),
        "eagle_aux_hidden_state_layer_ids": [1, 0],
    }
    if name == "peagle":
        config["mask_token_id"] = 96
    if parallel:
        nn.init.normal_(net.mask_hidden)
    return net, config


def _block(name: str, hidden: int) -> tuple[nn.Module, dict[str, Any]]:
    """The authors' layout, `speculators` with a reduced vocabulary, or DeepSpec's with tables."""
    block = block_shape(hidden)
    config: dict[str, Any] = {
        **_config(block.layer),
        "architectures": ["DFlashDraftModel"],
        "block_size": block.block_size,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
    }
    net: BlockHead
    if name == "dflash":
        net = DFlash(block)
        config["dflash_config"] = {"mask_token_id": 96, "target_layer_ids": [-1, 0]}
    elif name == "dflash reduced":
        net = DFlash(replace(block, draft_vocab_size=40, own_head=True, points=(1, 0)))
        net.d2t.copy_(torch.arange(40) + 3)
        config = {
            "speculators_model_type": "dflash",
            "transformer_layer_config": config,
            "aux_hidden_state_layer_ids": [1, 0],
            "block_size": block.block_size,
            "mask_token_id": 96,
            "sliding_window_non_causal": True,
        }
    else:
        shape = replace(block, first_row=0, own_embedding=True, own_head=True)
        markov = MarkovShape(rank=8, judges=True, judges_by_token=True)
        net = DSpark(shape, markov)
        config |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [-1, 0]}
        config |= {"markov_rank": 8, "mask_token_id": 96}
    return net, config


def write_head(folder: Path, name: str, draft: Path, hidden: int = HIDDEN) -> Path:
    """Write the head of one of HEADS; for `pard` a copy of `draft` with a mask token. EAGLE-3 and
    block heads may be for a target of another width."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(5)
    if name == "pard":
        config = json.loads((draft / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "pard_token": 96}))
        (folder / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
        return folder
    net: nn.Module
    if name == "eagle":
        net, config = Eagle(LAYER, fc_bias=True), _config(LAYER)
    elif name in ("eagle3", "peagle", "anchored"):
        net, config = _eagle3(name, hidden)
    elif name in ("dflash", "dflash reduced", "dspark"):
        net, config = _block(name, hidden)
    elif name == "mlp":
        shape = MLPShape(vocab_size=VOCAB, emb_dim=HIDDEN, inner_dim=24, n_predict=3)
        net = MLPSpeculator(shape)
        config = {"n_predict": 3, "emb_dim": HIDDEN, "inner_dim": 24, "vocab_size": VOCAB}
    else:
        medusa = MedusaShape(
            hidden_size=HIDDEN, vocab_size=VOCAB, medusa_num_heads=3, share_head=True
        )
        net = Medusa(medusa)
        config = {"medusa_num_heads": 3, "medusa_share_head": True}
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.1)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.contiguous() for k, v in net.state_dict().items()}, folder / "model.safetensors"
    )
    return folder
