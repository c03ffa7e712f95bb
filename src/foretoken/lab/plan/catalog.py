"""From the name of a model to its sizes: the built-in list, a folder or file, or a hub id.

Only config.json (and the tokenizer's files, if they lie beside it) is read; weights are never
downloaded. A hub id that is not in the list costs one small download.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from foretoken.checkpoint import PACKAGED, find_model
from foretoken.errors import CheckpointError, ModelNotFoundError
from foretoken.lab.plan.sizes import PlanModel, read_config


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Hub id -> entry of models.toml with its base filled in."""
    text = resources.files("foretoken.lab.plan").joinpath("models.toml").read_text("utf-8")
    rows = tomllib.loads(text)
    complete = {}
    for name, row in rows.items():
        base = rows.get(row.get("like", ""), {})
        merged = {**base, **row, "config": {**base.get("config", {}), **row["config"]}}
        if "short" in merged:
            complete[name] = merged
    return complete


def load_plan_model(name: str, field: str) -> PlanModel:
    """Sizes of model `name`; `field` is how errors call it.

    Raises:
        ModelNotFoundError: not in the list, no config.json there, and not to be had from the hub.
        CheckpointError: a config.json that lacks a size.
    """
    path = Path(name).expanduser()
    file = path if path.is_file() else path / "config.json"
    if file.is_file():
        return _from_file(name, file)
    for hub_id, row in known_models().items():
        if name.lower() in (hub_id.lower(), row["short"]):
            return _from_row(hub_id, row)
    if name in PACKAGED:
        return _from_file(name, find_model(name) / "config.json")
    return _from_hub(name, field)


def _from_row(name: str, row: Mapping[str, Any]) -> PlanModel:
    return read_config(name, row["config"], family=row["family"], tokenizer=row["tokenizer"])


def _from_file(name: str, file: Path) -> PlanModel:
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("config.json", str(file), f"valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError("config.json", str(file), "a JSON object")
    return read_config(name, config, family="", tokenizer=_fingerprint(file.parent))


def _fingerprint(folder: Path) -> str:
    """Names the vocabulary beside a config.json: equal vocabularies have equal names."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return ""
    try:
        model = json.loads(file.read_text("utf-8")).get("model", {})
    except (OSError, ValueError) as error:
        raise CheckpointError("tokenizer.json", str(file), f"valid JSON ({error})") from error
    vocabulary = json.dumps(model.get("vocab"), sort_keys=True).encode()
    return hashlib.sha256(vocabulary).hexdigest()[:12]


def _from_hub(name: str, field: str) -> PlanModel:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    allowed = "a config.json, its folder, a hub id that can be reached, or one of: " + ", ".join(
        row["short"] for row in known_models().values()
    )
    try:
        file = hf_hub_download(name, "config.json")
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(field, name, allowed) from error
    return _from_file(name, Path(file))
