"""From a published head's folder to its network: EAGLE, EAGLE-3, speculators, MLP, Medusa.

Says which kind of head a folder holds, whether it fits the target, and which hidden states of the
target it reads. File formats as published by the EAGLE, Medusa and IBM accelerator repositories
and by the `speculators` library.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from foretoken.config.methods import method_of_config
from foretoken.errors import CheckpointError, NotYetError, UnsupportedModelError
from foretoken.kv.features import FINAL
from foretoken.proposers.heads.base import LoadedHead, TargetFacts, check_fits
from foretoken.proposers.heads.eagle3.files import read_eagle, read_eagle3
from foretoken.proposers.heads.files import HeadFolder, fill
from foretoken.proposers.heads.medusa import Medusa, MedusaShape
from foretoken.proposers.heads.mlp import MLPShape, MLPSpeculator
from foretoken.shape.fields import size

KINDS = ("eagle", "eagle3", "mlp", "medusa")
_LATER = ("dflash", "dflash2", "dspark", "xpress", "mtp")


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
    if method is not None and method.name in KINDS:
        return method.name
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
    loaders = {"mlp": _mlp, "medusa": _medusa, "eagle": read_eagle, "eagle3": read_eagle3}
    return loaders[kind_of(folder)](folder, target)


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
    check_fits("hidden_size", width, target.hidden_size)
    check_fits("vocab_size", shape.vocab_size, target.vocab_size)
    with torch.device("meta"):
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
    vllms = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")

    def rename(name: str) -> str:
        """`K.L.linear.weight` and `K.L.weight` of the published files; vLLM's names."""
        name = vllms.sub(r"blocks.\1.\2.linear.\3", name)
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
    check_fits("hidden_size", hidden, target.hidden_size)
    check_fits("vocab_size", shape.vocab_size, target.vocab_size)
    with torch.device("meta"):
        net = Medusa(shape)
    fill(net, names, rename=rename)
    return LoadedHead(kind="medusa", net=net, points=(FINAL,))
