"""Reads a head's folder strictly: config.json, every tensor in its place, and the method it is of.

A GGUF file is read as the folder that it was made of, and its matrices as they lie there, too.
Knows files, names and shapes; what the names mean is the business of each method.
"""

import logging
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from foretoken.config.method_registry import method_names
from foretoken.config.published import method_of_config, method_of_tensors
from foretoken.errors import (
    CheckpointError,
    ModelNotFoundError,
    NotYetError,
    UnsupportedModelError,
)
from foretoken.quant import Weights
from foretoken.quant.finite import check_finite
from foretoken.quant.formats import GgufFile
from foretoken.shape.field_kinds import check_kinds
from foretoken.shape.fields import read_json
from foretoken.shape.gguf import forget_gguf, gguf_head_config

logger = logging.getLogger("foretoken")

WEIGHTS = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
)
"""Where heads keep their tensors, in order of preference; each whole or with an index of shards."""
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """What a folder holds."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    stored: dict[str, Weights] = field(default_factory=dict)
    """Of a GGUF file: matrices as they lie there, by names without `model.`"""


def read_head(folder: Path) -> HeadFolder:
    """The config and the tensors of `folder`; `.bin` and `.pt` by weights-only loading.

    Args:
        folder: of the files, or a GGUF file.

    Raises:
        ModelNotFoundError: no config.json.
        CheckpointError: invalid JSON, no weights, or a file that cannot be read.
        UnsupportedModelError: a GGUF file without a head, or with positions that are not run.
    """
    if folder.suffix == ".gguf":
        return _read_gguf(folder)
    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFoundError("speculative_config.model", str(folder), "a config.json in it")
    config = read_json(file)
    check_kinds(config)
    for name in WEIGHTS:
        if (folder / name).is_file():
            return HeadFolder(folder, config, _read_tensors(folder / name))
        if (folder / f"{name}.index.json").is_file():
            return HeadFolder(folder, config, _read_shards(folder, name))
    raise CheckpointError("weights", str(folder), " or ".join(WEIGHTS))


def _read_gguf(path: Path) -> HeadFolder:
    """The head in a file of llama.cpp, which stores target ids where folders have offsets."""
    config = gguf_head_config(path)
    check_kinds(config, path.name)
    file = GgufFile(path, torch.bfloat16, head=True)
    tensors = {name: file.get_tensor(name) for name in file.keys()}
    ids = tensors.get("d2t")
    if ids is not None:
        tensors["d2t"] = ids.flatten() - torch.arange(ids.numel())
    judge = "confidence_head.proj"
    if f"{judge}.weight" in tensors:
        tensors.setdefault(f"{judge}.bias", torch.zeros(1))
    matrices = {name: file.integers(name) for name in tensors}
    stored = {name.removeprefix("model."): one for name, one in matrices.items() if one is not None}
    others = sorted(file.block_kinds({name for name, one in matrices.items() if one is None}))
    if others:
        logger.info("%s: %s is multiplied out, it has no kernel", path.name, ", ".join(others))
    forget_gguf()
    return HeadFolder(path, config, tensors, stored)


def method_of(folder: HeadFolder) -> str:
    """The method that a folder's head is of. Raises NotYetError: a kind of head that is known and
    not run; UnsupportedModelError: no kind of head that is known."""
    config, heads = folder.config, method_names(lambda method: method.drafts_with == "head")
    # Heads of the EAGLE repository do not say what they are: their tensors do.
    found = method_of_config(config) or method_of_tensors(folder.tensors.__contains__)
    if found is not None and found.drafts_with == "head":
        if found.is_built:
            return found.name
        raise NotYetError("speculative_config.model", f"a {found.name} head", ", ".join(heads))
    listed = config.get("speculators_model_type")
    given = listed or config.get("architectures") or config.get("model_type")
    raise UnsupportedModelError("speculative_config.model", given, ", ".join(heads))


def _read_shards(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of all files that the index of `name` lists."""
    index = read_json(folder / f"{name}.index.json").get("weight_map")
    if not isinstance(index, dict):
        raise CheckpointError(f"{name}.index.json", index, "a weight_map")
    found: dict[str, Tensor] = {}
    for shard in sorted(set(map(str, index.values()))):
        if not (folder / shard).is_file():
            raise CheckpointError("missing shard", shard, f"the files that {name}.index.json names")
        found.update(_read_tensors(folder / shard))
    return found


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(str(file))
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(file.name, str(file), f"a complete file ({error})") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise CheckpointError(file.name, type(found).__name__, "a dictionary of tensors")
    return found


def fill(
    module: nn.Module,
    tensors: dict[str, Tensor],
    *,
    rename: Callable[[str], str] = str,
    ignored: Iterable[str] = (),
) -> None:
    """Give `module` these tensors, each wanted one once and none left over.

    They are not copied: they keep their type, and lie in the file if they were mapped from it.

    Args:
        module: its state dict says what is wanted; it may be on the `meta` device.
        tensors: by the file's names.
        rename: from the file's names to the module's.
        ignored: names (of the file) that may be there and are not used.

    Raises:
        CheckpointError: tensors are missing, unused, double, misshapen or not finite; the message
            names them.
    """
    skipped = set(ignored)
    wanted = module.state_dict()
    given: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in skipped:
            continue
        renamed = rename(name)
        if renamed in given:
            raise CheckpointError("tensor", name, f"only one tensor for {renamed}")
        given[renamed] = tensor
    _refuse("missing tensors", set(wanted) - set(given), "all tensors of this kind of head")
    _refuse("unused tensors", set(given) - set(wanted), "only tensors of this kind of head")
    fitting: dict[str, Tensor] = {}
    for name, place in wanted.items():
        tensor = given[name]
        if tensor.numel() != place.numel() or tensor.squeeze().shape != place.squeeze().shape:
            shown = f"{name} {list(tensor.shape)}"
            raise CheckpointError("tensor shape", shown, f"{list(place.shape)} from config.json")
        check_finite(name, tensor)
        fitting[name] = tensor.reshape(place.shape)
    module.load_state_dict(fitting, assign=True)


def _refuse(what: str, names: set[str], allowed: str) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise CheckpointError(what, shown + more, allowed)
