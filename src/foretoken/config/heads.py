"""Which method a folder on disk is made for, by its config.json: heads name themselves.

Reads no weights and downloads nothing: for a hub id the method is the user's to say.
"""

import json
from importlib import resources
from pathlib import Path

from foretoken.checkpoint import PACKAGED

_BY_SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3"}
_BY_ARCHITECTURE = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3Speculator": "eagle3",
    "PEagleSpeculator": "eagle3",
    "MLPSpeculatorPreTrainedModel": "mlp",
}


def head_method(model: str) -> str | None:
    """The method of a packaged or local head; None for everything else."""
    folder = Path(model)
    if model in PACKAGED:
        folder = Path(str(resources.files("foretoken.packaged").joinpath(model)))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    if config.get("spd_type") == "pard" or "pard_token" in config:
        return "parallel"
    if "medusa_num_heads" in config:
        return "medusa"
    if config.get("speculators_model_type") in _BY_SPECULATORS:
        return _BY_SPECULATORS[config["speculators_model_type"]]
    named = config.get("architectures") or [""]
    return _BY_ARCHITECTURE.get(named[0])
