"""EAGLE and EAGLE-3 folders: published formats, `speculators`, P-EAGLE and its anchored variant.

Knows names, shapes and which hidden states of the target a head reads; other kinds of heads and
the choice between kinds are the business of `formats`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretoken.config.methods import ANCHORED
from foretoken.errors import CheckpointError, ConfigError, NotYetError
from foretoken.kv.features import FINAL
from foretoken.proposers.heads.base import LoadedHead, TargetFacts, check_fits
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.network import Eagle3, Eagle3Shape
from foretoken.proposers.heads.files import HeadFolder, fill
from foretoken.proposers.heads.parts import HeadShape
from foretoken.shape.fields import size


def _layer_shape(config: Mapping[str, Any], target: TargetFacts, layers: int) -> HeadShape:
    """The decoder layers of an EAGLE head, from its (nested) Llama config."""

    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    positions = size(config, "max_position_embeddings", target.max_position_embeddings)
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise NotYetError("config.json rope_scaling", scaling, "default")
    return HeadShape(
        vocab_size=size(config, "vocab_size", target.vocab_size),
        hidden_size=hidden,
        intermediate_size=size(config, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=size(config, "num_key_value_heads", heads),
        head_dim=size(config, "head_dim", hidden // heads),
        max_position_embeddings=positions,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
    )


def _num_layers(names: Mapping[str, Any]) -> int:
    """How many decoder layers the file holds, whatever its config says."""
    found = {int(m.group(1)) for m in (re.match(r"layers\.(\d+)\.", n) for n in names) if m}
    return len(found) or 1


def read_eagle(folder: HeadFolder, target: TargetFacts) -> LoadedHead:
    """The EAGLE network of `folder`; errors as `formats.load_head`."""
    names = folder.tensors
    shape = _layer_shape(folder.config, target, _num_layers(names))
    check_fits("hidden_size", shape.hidden_size, target.hidden_size)
    check_fits("vocab_size", shape.vocab_size, target.vocab_size)
    with torch.device("meta"):
        net = Eagle(
            shape,
            fc_bias="fc.bias" in names,
            attention_bias="layers.0.self_attn.q_proj.bias" in names,
        )
    fill(net, names, ignored=("embed_tokens.weight",))
    return LoadedHead(kind="eagle", net=net, points=(FINAL,))


def read_eagle3(folder: HeadFolder, target: TargetFacts) -> LoadedHead:
    """The EAGLE-3 or P-EAGLE network of `folder`; errors as `formats.load_head`."""
    config, names = folder.config, folder.tensors
    rename, layers = _eagle3_names(folder)
    nested = config.get("transformer_layer_config", config)
    layer = replace(
        _layer_shape({**nested, "vocab_size": target.vocab_size}, target, layers),
        vocab_size=target.vocab_size,
    )
    renamed = {rename(name): tensor for name, tensor in names.items()}
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
    with torch.device("meta"):
        net = Eagle3(shape)
    if "d2t" not in renamed:
        check_fits("draft_vocab_size without d2t", shape.draft_vocab_size, target.vocab_size)
        names = {**names, "d2t": torch.zeros(shape.draft_vocab_size, dtype=torch.int64)}
    fill(net, names, rename=rename, ignored=("t2d", "verifier_lm_head.weight"))
    _check_ids(net, target)
    mask = config.get("mask_token_id")
    if parallel and not anchored and not isinstance(mask, int):
        raise CheckpointError("config.json mask_token_id", mask, "a token id: the head is parallel")
    points = _points(config, target, shape.num_features)
    return LoadedHead(
        kind="eagle3",
        net=net,
        points=points,
        mask_token_id=mask if parallel and not anchored else None,
    )


def _mask_depths(renamed: Mapping[str, Tensor]) -> int:
    """How many masks the file holds."""
    if "mask_hidden" not in renamed:
        raise CheckpointError("missing tensors", "mask_hidden", "an anchored P-EAGLE head")
    return renamed["mask_hidden"].shape[-2]


def _eagle3_names(folder: HeadFolder) -> tuple[Any, int]:
    """How this file's names become the network's, and its number of layers."""

    def rename(name: str) -> str:
        name = name.removeprefix("model.")
        return re.sub(r"^midlayer\.", "layers.0.", name)

    return rename, _num_layers({rename(name): None for name in folder.tensors})


def _check_ids(net: Eagle3, target: TargetFacts) -> None:
    """`d2t` must hold offsets to ascending target ids."""
    ids = net.target_ids
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= target.vocab_size:
        allowed = f"offsets that give ascending ids below {target.vocab_size}"
        raise CheckpointError("d2t", f"ids {int(ids.min())} to {int(ids.max())}", allowed)


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
