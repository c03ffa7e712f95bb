"""What a head's config.json says it is, and which drafters ship for which target.

The one place that knows how published heads name themselves. Reads no weights, only their names
where a config.json says nothing, and downloads nothing: for a hub id the method is the user's to
say.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.checkpoint import PACKAGED, packaged_model
from foretoken.errors import ModelError
from foretoken.shape.fields import read_json

ANCHORED = "peagle_anchored"
"""The `speculators_model_type` of our own variant of P-EAGLE, which others must not read as it."""

_BY_SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", ANCHORED: "eagle3"}
_BY_ARCHITECTURE = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3Speculator": "eagle3",
    "PEagleSpeculator": "eagle3",
    "MLPSpeculatorPreTrainedModel": "mlp",
}
_MOST_HEADER = 100_000_000
"""As safetensors itself allows."""
_SHIPPED = {
    "demo": {
        "draft_model": "demo-draft",
        "parallel": "demo-parallel",
        "eagle3": "demo-eagle3",
        "mlp": "demo-mlp",
        "medusa": "demo-medusa",
    }
}


def method_of_config(config: Mapping[str, Any]) -> str | None:
    """The method that a config.json is made for; None where it does not say (EAGLE, models)."""
    if config.get("spd_type") == "pard" or "pard_token" in config:
        return "parallel"
    if config.get("model_type") == "mlp_speculator" or "n_predict" in config:
        return "mlp"
    if "medusa_num_heads" in config:
        return "medusa"
    listed = config.get("speculators_model_type")
    if listed is not None:
        return _BY_SPECULATORS.get(listed)
    named = config.get("architectures") or [""]
    return _BY_ARCHITECTURE.get(named[0])


def head_method(model: str) -> str | None:
    """The method of a packaged or local head; None for everything else."""
    try:
        folder = packaged_model(model) if model in PACKAGED else Path(model)
        return method_of_config(read_json(folder / "config.json")) or _method_of_names(folder)
    except ModelError:
        return None


def _method_of_names(folder: Path) -> str | None:
    """Heads of the EAGLE repository are told from models by their tensors alone."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            names = _stored_names(folder / name)
            if not _has(names, "fc.weight"):
                return None
            whole = _has(names, "norm.weight") and _has(names, "lm_head.weight")
            return "eagle3" if whole or _has(names, "d2t") else "eagle"
    return None


def _stored_names(file: Path) -> bytes:
    """Where the names of a file's tensors stand: safetensors' header, or the pickle of a `.bin`,
    which is searched and not run; empty if it is of another kind."""
    try:
        if file.suffix == ".safetensors":
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                return opened.read(min(size, _MOST_HEADER))
        with zipfile.ZipFile(file) as archive:
            listed = [name for name in archive.namelist() if name.endswith("data.pkl")]
            return archive.read(listed[0]) if listed else b""
    except (OSError, zipfile.BadZipFile):
        return b""


def _has(names: bytes, name: str) -> bool:
    """Whether a tensor of exactly this name is listed: quoted in JSON, after its length in a
    pickle."""
    pickled = len(name).to_bytes(4, "little") + name.encode()
    return f'"{name}"'.encode() in names or pickled in names


def shipped_drafter(target: str | None, given: Mapping[str, Any]) -> str | None:
    """The packaged drafter for `target` and this `speculative_config`, if one is made for it.

    One drafter ships that guesses all tokens in one pass; it is of one method, PARD (`parallel`)
    or P-EAGLE (`eagle3` with `parallel_drafting`), and never found under the other.
    """
    shipped, method = _SHIPPED.get(target or "", {}), given["method"]
    if given.get("parallel_drafting") is not True and method != "parallel":
        return shipped.get(method)
    name = shipped.get("parallel")
    return name if name is None or head_method(name) in (method, None) else None
