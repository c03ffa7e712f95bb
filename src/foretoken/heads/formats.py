"""From a published head's folder to its network: EAGLE, EAGLE-3, speculators, MLP, Medusa.

Says which kind of head a folder holds, whether it fits the target, and which hidden states of the
target it reads. File formats as published by the EAGLE, Medusa and IBM accelerator repositories
and by the `speculators` library.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foretoken.config.heads import ANCHORED, method_of_config
from foretoken.errors import CheckpointError, ConfigError, NotYetError, UnsupportedModelError
from foretoken.heads.checkpoint import HeadFolder, fill
from foretoken.heads.eagle import Eagle
from foretoken.heads.eagle3 import Eagle3, Eagle3Shape
from foretoken.heads.medusa import Medusa, MedusaShape
from foretoken.heads.mlp import MLPShape, MLPSpeculator
from foretoken.heads.parts import HeadShape
from foretoken.kv.features import FINAL
from foretoken.shape.fields import size

KINDS = ("eagle", "eagle3", "mlp", "medusa")
_LATER = ("dflash", "dflash2", "dspark", "xpress", "mtp")


class TargetFacts(Protocol):
    """What a head must fit; `ModelShape` has it."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the target knows."""

    @property
    def num_hidden_layers(self) -> int:
        """Layers whose inputs can be read."""

    @property
    def max_position_embeddings(self) -> int:
        """Positions that the target reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """A network and what it needs from the target."""

    kind: str
    net: nn.Module
    points: tuple[int, ...]
    """Where hidden states are taken (see `foretoken.kv.features`), in the order it wants them."""
    mask_token_id: int | None = None
    """P-EAGLE: the token of slots that are not drafted yet; None for anchored ones."""

    @property
    def parallel(self) -> bool:
        """Whether it drafts all tokens in one pass."""
        return isinstance(self.net, Eagle3) and self.net.shape.parallel


def kind_of(folder: HeadFolder) -> str:
    """Which of KINDS a folder holds.

    Raises:
        NotYetError: a kind that is known and not run.
        UnsupportedModelError: none of them.
    """
    config, names = folder.config, folder.tensors
    listed = config.get("speculators_model_type")
    if listed in _LATER:
        raise NotYetError("speculators_model_type", listed, "eagle3, peagle")
    method = method_of_config(config)
    if method in KINDS:
        return method
    if "fc.weight" in names:
        own_head = "lm_head.weight" in names and "norm.weight" in names
        return "eagle3" if own_head or "d2t" in names else "eagle"
    given = config.get("architectures") or config.get("model_type")
    raise UnsupportedModelError("speculative_config.model", given, ", ".join(KINDS))


@torch.no_grad()
def load_head(folder: HeadFolder, target: TargetFacts) -> LoadedHead:
    """The network of `folder`, in the type of its file.

    Raises:
        CheckpointError: tensors are missing, unused or misshapen.
        ConfigError: the head belongs to another target.
        NotYetError, UnsupportedModelError: as `kind_of`.
    """
    loaders = {"mlp": _mlp, "medusa": _medusa, "eagle": _eagle, "eagle3": _eagle3}
    return loaders[kind_of(folder)](folder, target)


def _fits(name: str, given: int, wanted: int) -> None:
    """The head's size must be the target's."""
    if given != wanted:
        allowed = f"a head of this target, whose {name} is {wanted}"
        raise ConfigError("speculative_config.model", f"{name} {given}", allowed)


def _mlp(folder: HeadFolder, target: TargetFacts) -> LoadedHead:
    width = size(folder.config, "emb_dim")
    inner = folder.config.get("inner_dim") or width
    shape = MLPShape(
        vocab_size=size(folder.config, "vocab_size"),
        emb_dim=width,
        inner_dim=inner,
        n_predict=size(folder.config, "n_predict"),
        tie_weights=bool(folder.config.get("tie_weights", False)),
        scale_input=bool(folder.config.get("scale_input", False)),
    )
    _fits("hidden_size", width, target.hidden_size)
    _fits("vocab_size", shape.vocab_size, target.vocab_size)
    net = MLPSpeculator(shape)
    wanted = net.state_dict()
    doubles = _tied_doubles(folder, wanted) if shape.tie_weights else ()
    fill(net, folder.tensors, rename=lambda name: name.removeprefix("speculator."), ignored=doubles)
    return LoadedHead(kind="mlp", net=net, points=(FINAL,))


def _tied_doubles(folder: HeadFolder, wanted: Mapping[str, Any]) -> list[str]:
    """Copies of tied tensors under the names of later stages; they must be equal."""
    doubles = []
    for name, tensor in folder.tensors.items():
        plain = name.removeprefix("speculator.")
        match = re.fullmatch(r"(emb|proj|head|ln)\.(\d+)\.(weight|bias)", plain)
        if plain in wanted or match is None:
            continue
        part, _, field = match.groups()
        source = f"{part}.{1 if part == 'proj' else 0}.{field}"
        first = folder.tensors.get(name.replace(plain, source))
        if first is None or not torch.equal(first, tensor):
            raise CheckpointError("tie_weights", name, f"a copy of {source}")
        doubles.append(name)
    return doubles


def _medusa(folder: HeadFolder, target: TargetFacts) -> LoadedHead:
    names = folder.tensors
    published = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")

    def rename(name: str) -> str:
        """`K.L.linear.weight` and `K.L.weight` of the published files."""
        match = published.fullmatch(name)
        if match is None:
            return name
        head, layer, linear, field = match.groups()
        return f"blocks.{head}.{layer}.linear.{field}" if linear else f"lm_heads.{head}.{field}"

    renamed = {rename(name): tensor for name, tensor in names.items()}
    heads = 1 + max((int(n.split(".")[1]) for n in renamed if n.startswith("blocks.")), default=-1)
    if heads < 1:
        raise CheckpointError("missing tensors", "0.0.linear.weight", "Medusa heads")
    layers = 1 + max(int(n.split(".")[2]) for n in renamed if n.startswith("blocks.0."))
    own = renamed.get("lm_heads.0.weight")
    down = renamed.get("blocks.0.0.down.weight")
    hidden = renamed["blocks.0.0.linear.bias"].shape[0]
    shape = MedusaShape(
        hidden_size=hidden,
        vocab_size=target.vocab_size if own is None else own.shape[0],
        medusa_num_heads=heads,
        medusa_num_layers=layers,
        rank=None if down is None else down.shape[0],
        share_head=own is None,
    )
    if own is None and not folder.config.get("medusa_share_head", False):
        raise CheckpointError("missing tensors", "lm_heads.0.weight", "or medusa_share_head: true")
    _fits("hidden_size", hidden, target.hidden_size)
    _fits("vocab_size", shape.vocab_size, target.vocab_size)
    net = Medusa(shape)
    fill(net, names, rename=rename)
    return LoadedHead(kind="medusa", net=net, points=(FINAL,))


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


def _eagle(folder: HeadFolder, target: TargetFacts) -> LoadedHead:
    names = folder.tensors
    shape = _layer_shape(folder.config, target, _num_layers(names))
    _fits("hidden_size", shape.hidden_size, target.hidden_size)
    _fits("vocab_size", shape.vocab_size, target.vocab_size)
    net = Eagle(
        shape,
        fc_bias="fc.bias" in names,
        attention_bias="layers.0.self_attn.q_proj.bias" in names,
    )
    fill(net, names, ignored=("embed_tokens.weight",))
    return LoadedHead(kind="eagle", net=net, points=(FINAL,))


def _eagle3(folder: HeadFolder, target: TargetFacts) -> LoadedHead:
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
    _fits("hidden_size", target_width, target.hidden_size)
    net = Eagle3(shape)
    if "d2t" not in renamed:
        _fits("draft_vocab_size without d2t", shape.draft_vocab_size, target.vocab_size)
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
