"""EAGLE-3 folders: the authors' format, `speculators`, P-EAGLE and its anchored variant.

Knows names, sizes and which hidden states of the target a head reads.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.config.method_registry import ANCHORED
from foretoken.errors import CheckpointError, ConfigError
from foretoken.proposers.heads.base import TargetFacts, check_fits
from foretoken.proposers.heads.eagle3.layers import Eagle3Shape
from foretoken.proposers.heads.folder import HeadFolder, fill
from foretoken.proposers.heads.parts import num_layers, read_layer_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Folder:
    """What a published folder says of its network."""

    shape: Eagle3Shape
    points: tuple[int, ...]
    """Where it reads the target's hidden states."""
    mask_token_id: int | None
    """P-EAGLE: the token of mask slots; None: it has none, or repeats the newest (anchored)."""
    tensors: dict[str, Tensor]
    """By the file's names."""

    def fill(self, net: nn.Module) -> None:
        """Give `net`, of this shape, these tensors."""
        fill(net, self.tensors, rename=_our_name, ignored=("t2d", "verifier_lm_head.weight"))


def describe(folder: HeadFolder, target: TargetFacts) -> Eagle3Folder:
    """The EAGLE-3 or P-EAGLE network of `folder`; errors as of `DraftHead.load`."""
    config, names = folder.config, folder.tensors
    renamed = {_our_name(name): tensor for name, tensor in names.items()}
    nested = config.get("transformer_layer_config", config)
    layer = read_layer_shape(
        {**nested, "vocab_size": target.vocab_size}, target, num_layers(renamed)
    )
    for needed in ("fc.weight", "lm_head.weight"):
        if needed not in renamed:
            raise CheckpointError("missing tensors", needed, "an EAGLE-3 head")
    anchored = config.get("speculators_model_type") == ANCHORED
    parallel = config.get("speculators_model_type") == "peagle" or "mask_hidden" in renamed
    target_width = config.get("target_hidden_size") or target.hidden_size
    columns = renamed["fc.weight"].shape[1]
    if columns % target_width:
        allowed = f"a head of this target: fc over a multiple of {target_width} columns"
        raise ConfigError("speculative_config.model", f"fc over {columns}", allowed)
    shape = Eagle3Shape(
        layer=layer,
        draft_vocab_size=renamed["lm_head.weight"].shape[0],
        target_hidden_size=target_width,
        num_features=columns // target_width,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc="input_norm.weight" in renamed,
        fc_norm="fc_norm.0.weight" in renamed,
        norm_output=bool(config.get("norm_output", False)),
        own_embedding="embed_tokens.weight" in renamed,
        parallel=parallel,
        anchored=anchored,
        mask_depths=_mask_depths(renamed) if anchored else 1,
        attention_bias="layers.0.self_attn.q_proj.bias" in renamed,
    )
    check_fits("hidden_size", target_width, target.hidden_size)
    if "d2t" not in renamed:
        check_fits("draft_vocab_size without d2t", shape.draft_vocab_size, target.vocab_size)
        names = {**names, "d2t": torch.zeros(shape.draft_vocab_size, dtype=torch.int64)}
    mask = config.get("mask_token_id")
    if parallel and not anchored and not isinstance(mask, int):
        raise CheckpointError("config.json mask_token_id", mask, "a token id: the head is parallel")
    return Eagle3Folder(
        shape=shape,
        points=_points(config, target, shape.num_features),
        mask_token_id=mask if parallel and not anchored else None,
        tensors=names,
    )


def _our_name(name: str) -> str:
    """The network's name of a tensor."""
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def _mask_depths(renamed: Mapping[str, Tensor]) -> int:
    """How many masks the file holds."""
    if "mask_hidden" not in renamed:
        raise CheckpointError("missing tensors", "mask_hidden", "an anchored P-EAGLE head")
    return renamed["mask_hidden"].shape[-2]


def _points(config: Mapping[str, Any], target: TargetFacts, count: int) -> tuple[int, ...]:
    """The target layers whose inputs are read; the published default where none are named."""
    nested = config.get("eagle_config") or {}
    named = config.get("eagle_aux_hidden_state_layer_ids") or nested.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    layers = target.num_hidden_layers
    points = tuple(named) if named else (2, layers // 2, layers - 3)
    inside = all(isinstance(p, int) and 0 <= p < layers for p in points)
    if len(points) != count or not inside or len(set(points)) != count:
        allowed = f"{count} different layers of the target's {layers}"
        raise ConfigError("eagle_aux_hidden_state_layer_ids", list(points), allowed)
    return points
