"""What a head's config.json says it is, and which drafters ship for which target.

The one place that knows how published heads name themselves. Reads no weights and downloads
nothing: for a hub id the method is the user's to say.
"""

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
        return method_of_config(read_json(folder / "config.json"))
    except ModelError:
        return None


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
