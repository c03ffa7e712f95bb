"""Foretoken: lossless speculative decoding.

The public face. Importing it costs nothing: torch is loaded when one of the names below is first
touched. Everything else is reached through its own module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.config.method_registry import DraftingMethod, register_method
    from foretoken.llm import LLM
    from foretoken.shape.families import ModelFamily, register_family
    from foretoken.types import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "DraftingMethod",
    "ModelFamily",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "register_family",
    "register_method",
]

_HOMES = {
    "LLM": "foretoken.llm",
    "CompletionOutput": "foretoken.types",
    "DraftingMethod": "foretoken.config.method_registry",
    "ModelFamily": "foretoken.shape.families",
    "RequestOutput": "foretoken.types",
    "SamplingParams": "foretoken.types",
    "register_family": "foretoken.shape.families",
    "register_method": "foretoken.config.method_registry",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module the first time it is asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)
