"""Folders of block heads: the authors' layout, DeepSpec's flat one, and `speculators`.

Knows names, sizes and which hidden states of the target a head reads. What would be run wrongly is
refused by its name. Layers are counted differently: `target_layer_ids` are those whose outputs are
read, `aux_hidden_state_layer_ids` those whose inputs are.

Sources: z-lab/dflash, deepseek-ai/DeepSpec, sgl-project/SpecForge and vllm-project/speculators, and
how vLLM reads them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.proposers.heads.base import TargetFacts, check_fits, check_ids
from foretoken.proposers.heads.dflash.shape import BlockShape, BlockView
from foretoken.proposers.heads.folder import HeadFolder, fill
from foretoken.proposers.heads.parts import HeadShape
from foretoken.shape import RopeShape
from foretoken.shape.fields import positive, positive_or_none, refuse_unless, size

_QWEN3 = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
"""What transformers takes for a Qwen3 config's numbers where they are left out, which `speculators`
may do."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FROM_TARGET = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
_STRETCHED = ("default", "linear", "llama3")
"""Positions that go on beyond a context as they do inside."""
_OTHER_NETWORKS = {
    "Gemma4DSparkModel": "a head with Qwen3's layers",
    "MuseGlimmerAssistantModel": "a head with Qwen3's layers",
}
_NEUTRAL: dict[str, tuple[object, str]] = {
    "attention_sink_bias": (False, "no attention sinks"),
    "add_swa_attention_sink_bias": (False, "no attention sinks"),
    "attention_value_scale": (1.0, "values as they are"),
    "is_neox_style": (True, "positions that turn halves of heads"),
    "attention_mode": ("gqa", "gqa"),
    "selector_rank": (None, "a head without a candidate selector (DFlash2)"),
    "conv_kernel_size": (None, "a head without convolutions (DFlash2)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFolder:
    """What a published folder says of its network."""

    shape: BlockShape
    fields: Mapping[str, Any]
    """All keys about blocks, whichever part of config.json has them."""
    tensors: dict[str, Tensor]
    """By the network's names."""

    def fill(self, net: nn.Module) -> None:
        """Give `net`, of this shape, these tensors."""
        unused = _FROM_TARGET if "d2t" in net.state_dict() else (*_FROM_TARGET, "d2t")
        fill(net, self.tensors, ignored=unused)


def describe(folder: HeadFolder, target: TargetFacts, *, first_row: int = 1) -> BlockFolder:
    """The block head of `folder`; errors as of `DraftHead.load`.

    Args:
        folder: as it was read.
        target: what it must fit.
        first_row: the row that predicts the first draft, where the folder does not say.
    """
    config = folder.config
    fields: dict[str, Any] = {**config, **(config.get("dflash_config") or {})}
    nested = config.get("transformer_layer_config")
    layer_config: Mapping[str, Any] = {**_QWEN3, **nested} if nested else config
    tensors = {name.removeprefix("model."): tensor for name, tensor in folder.tensors.items()}
    _refuse_others(folder, fields, layer_config)
    if "fc.weight" not in tensors:
        raise CheckpointError("missing tensors", "fc.weight", "a block head (DFlash, DSpark)")
    layer, rope = _layer(layer_config, target)
    wide = size(fields, "target_hidden_size", target.hidden_size)
    layers = size(fields, "num_target_layers", target.num_hidden_layers)
    columns = tensors["fc.weight"].shape[1]
    if columns % wide:
        allowed = f"a head of this target: fc over a multiple of {wide} columns"
        raise ConfigError("speculative_config.model", f"fc over {columns}", allowed)
    check_fits("hidden_size", wide, target.hidden_size)
    check_fits("num_target_layers", layers, target.num_hidden_layers)
    points = _points(fields, layers, columns // wide)
    own_head, own_embedding = "lm_head.weight" in tensors, "embed_tokens.weight" in tensors
    shape = BlockShape(
        layer=layer,
        rope=rope,
        views=_views(fields, layer_config, layer.num_hidden_layers),
        block_size=size(fields, "block_size"),
        first_row=_first_row(fields, first_row),
        mask_token_id=_mask_token(fields, target),
        target_hidden_size=wide,
        target_layers=layers,
        points=points,
        draft_vocab_size=tensors["lm_head.weight"].shape[0] if own_head else target.vocab_size,
        own_embedding=own_embedding,
        own_head=own_head,
        attention_bias=bool(layer_config.get("attention_bias", False)),
        embedding_scale=positive(fields, "input_embedding_scale", 1.0),
        output_multiplier=positive(fields, "output_multiplier", 1.0),
        logit_softcap=positive_or_none(fields, "final_logit_softcapping"),
    )
    _check(shape, fields, tensors, target)
    return BlockFolder(shape=shape, fields=fields, tensors=tensors)


def _refuse_others(
    folder: HeadFolder, fields: Mapping[str, Any], layer_config: Mapping[str, Any]
) -> None:
    """Raise UnsupportedModelError for what would be run wrongly."""
    named = (folder.config.get("architectures") or [""])[0]
    if named in _OTHER_NETWORKS:
        raise UnsupportedModelError("architectures", named, _OTHER_NETWORKS[named])
    refuse_unless(fields, _NEUTRAL)
    refuse_unless(layer_config, {"hidden_act": ("silu", "silu"), "mlp_bias": (False, "False")})
    if (folder.path / "mask_embedding.pt").is_file():
        allowed = "a mask that is a row of the embedding table"
        raise UnsupportedModelError("mask_embedding.pt", str(folder.path), allowed)


def _check(
    shape: BlockShape,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetFacts,
) -> None:
    """Raise unless the head belongs to this target."""
    if not (shape.own_embedding and shape.own_head):
        check_fits("hidden_size without tables", shape.layer.hidden_size, target.hidden_size)
    if shape.own_embedding:
        check_fits("vocab_size", tensors["embed_tokens.weight"].shape[0], target.vocab_size)
    drafts = shape.draft_vocab_size
    named = fields.get("draft_vocab_size")
    if named not in (None, drafts):
        allowed = f"{drafts}, which its output head has"
        raise CheckpointError("config.json draft_vocab_size", named, allowed)
    if drafts > target.vocab_size:
        check_fits("draft_vocab_size", drafts, target.vocab_size)
    if drafts < target.vocab_size:
        if "d2t" not in tensors:
            raise CheckpointError("missing tensors", "d2t", f"the target's ids of {drafts} outputs")
        check_ids(tensors["d2t"] + torch.arange(drafts), target)
    if shape.max_drafts < 1:
        allowed = f"more than {shape.first_row}"
        raise CheckpointError("config.json block_size", shape.block_size, allowed)


def _layer(config: Mapping[str, Any], target: TargetFacts) -> tuple[HeadShape, RopeShape]:
    """The decoder layers of a Qwen3 config, and their positions."""
    heads, hidden = size(config, "num_attention_heads"), size(config, "hidden_size")
    head_dim = size(config, "head_dim", hidden // heads)
    scaling = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    nested = [name for name, value in scaling.items() if isinstance(value, dict)]
    if nested or "mrope_section" in scaling:
        given = nested or "mrope_section"
        raise UnsupportedModelError("rope_parameters", given, "one kind of positions for all")
    theta = positive(config, "rope_theta", 10000.0)
    rope = RopeShape.read(config, scaling, head_dim=head_dim, theta=theta)
    own = size(config, "max_position_embeddings", target.max_position_embeddings)
    positions = rope.context(own)
    if rope.rope_type in _STRETCHED:
        positions = max(positions, target.max_position_embeddings)
    shape = HeadShape(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=size(config, "intermediate_size"),
        num_hidden_layers=size(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=size(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=positive(config, "rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
    )
    return shape, rope


def _views(
    fields: Mapping[str, Any], layer_config: Mapping[str, Any], layers: int
) -> tuple[BlockView, ...]:
    """What the rows of a block see in each layer.

    Layers with a window are causal inside the block and others are not, unless the folder says
    something else: `is_causal` and `causal` for all layers, `sliding_window_non_causal`
    (`speculators`) for those with a window.
    """
    kinds = layer_config.get("layer_types") or _layer_types(layer_config, layers)
    known = len(kinds) == layers and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not known:
        allowed = f"{layers} of {_FULL}, {_SLIDING}"
        raise CheckpointError("config.json layer_types", kinds, allowed)
    all_slide = bool(fields.get("use_swa", False)) and _SLIDING not in kinds
    window = fields.get("swa_window_size") or layer_config.get("sliding_window")
    if all_slide or _SLIDING in kinds:
        window = size({"sliding_window": window}, "sliding_window")
    said = (fields.get(key) for key in ("is_causal", "causal"))
    causal = next((one for one in said if one is not None), None)
    slides_causally = not fields.get("sliding_window_non_causal", False)
    return tuple(
        BlockView(
            window=window if all_slide or kind == _SLIDING else None,
            causal=(kind == _SLIDING and slides_causally) if causal is None else bool(causal),
        )
        for kind in kinds
    )


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Where a Qwen3 config does not list them."""
    first = config.get("max_window_layers", layers) if config.get("use_sliding_window") else layers
    return [_SLIDING if i >= first else _FULL for i in range(layers)]


def _first_row(fields: Mapping[str, Any], usual: int) -> int:
    """The row that predicts the first draft: as the folder says, or as it follows from the number
    of drafts that it says (`speculators`)."""
    said = fields.get("sample_from_anchor")
    if said is not None:
        return 0 if said else 1
    found = fields.get("speculators_config") or {}
    methods = found.get("proposal_methods") or [{}]
    drafts, rows = methods[0].get("speculative_tokens"), fields.get("block_size")
    if isinstance(drafts, int) and isinstance(rows, int) and rows - drafts in (0, 1):
        return rows - drafts
    return usual


def _mask_token(fields: Mapping[str, Any], target: TargetFacts) -> int:
    mask = fields.get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < target.vocab_size:
        allowed = f"a token id below {target.vocab_size}"
        raise CheckpointError("config.json mask_token_id", mask, allowed)
    return mask


def _points(fields: Mapping[str, Any], layers: int, count: int) -> tuple[int, ...]:
    """The layers, of so many, whose inputs are read; the published default where none are named."""
    inputs, outputs = fields.get("aux_hidden_state_layer_ids"), fields.get("target_layer_ids")
    if inputs is not None:
        # A last one may stand there for what training needs of the target.
        name, found = "aux_hidden_state_layer_ids", list(inputs)
        found = found[:-1] if len(found) == count + 1 and found[-1] == layers else found
    elif outputs is not None:
        name, found = "target_layer_ids", [one + 1 for one in outputs]
    else:
        name, found = "target_layer_ids", list(usual_points(layers, count))
    inside = all(isinstance(one, int) and 0 <= one < layers for one in found)
    if len(found) != count or not inside or len(set(found)) != count:
        allowed = f"{count} different layers of the target's {layers}, the last one not among them"
        raise ConfigError(name, inputs if inputs is not None else outputs, allowed)
    return tuple(found)


def usual_points(layers: int, count: int) -> tuple[int, ...]:
    """The layers, `count` of so many, whose inputs are read where a file does not say which."""
    if count == 1:
        return (layers // 2 + 1,)
    return tuple(1 + round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
