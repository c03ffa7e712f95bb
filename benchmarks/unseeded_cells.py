"""What `unseeded.py` asks: methods, filters, other paths, and the cells that they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLAIN = "plain"
TEMPERATURE = 0.8
TREE = [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [1], [1, 0], [2]]
DRAFT = {"method": "draft_model", "model": "demo-draft", "quantization": "int8"}
METHODS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5},
    "suffix": {"method": "suffix"},
    "draft_model k=4": {**DRAFT, "num_speculative_tokens": 4},
    "eagle3 k=3": {"model": "demo-eagle3", "num_speculative_tokens": 3},
    "mlp k=3": {"model": "demo-mlp", "num_speculative_tokens": 3},
    "medusa k=4": {"model": "demo-medusa", "num_speculative_tokens": 4},
    "parallel k=5": {"model": "demo-parallel", "num_speculative_tokens": 5},
    "eagle3 tree": {"model": "demo-eagle3", "choices": TREE},
    "draft_model tree": {**DRAFT, "choices": TREE},
}
FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "penalties": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.2,
    },
}
JSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in METHODS},
    "logprobs": (PLAIN, {"logprobs": 5}),
    "logprobs, draft_model": ("draft_model k=4", {"logprobs": 5}),
    "JSON schema": (PLAIN, {"structured_outputs": {"json": JSON}, "ignore_eos": False}),
    "JSON schema, draft_model": (
        "draft_model k=4",
        {"structured_outputs": {"json": JSON}, "ignore_eos": False},
    ),
    "regex": (PLAIN, {"structured_outputs": {"regex": "[a-z ]{64,80}"}, "ignore_eos": False}),
    "prefill": (PLAIN, {"max_tokens": 1}),
    "prefill, draft_model": ("draft_model k=4", {"max_tokens": 1}),
    "prefill, eagle3": ("eagle3 k=3", {"max_tokens": 1}),
}
"""Method and further parameters of each path; `prefill` has prompts of PREFILL tokens."""
PREFILL = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one request is asked like."""

    name: str
    method: str
    parameters: dict[str, Any]
    seeded: bool = False
    long: bool = False


def pairs(methods: Sequence[str], filters: Sequence[str]) -> dict[str, Cell]:
    """The cells of seeding."""
    return {
        (name := f"{method}, {kind}, {'seeded' if seeded else 'unseeded'}"): Cell(
            name=name,
            method=method,
            parameters={"temperature": TEMPERATURE, **FILTERS[kind]},
            seeded=seeded,
        )
        for method in methods
        for kind in filters
        for seeded in (True, False)
    }


def paths(methods: Sequence[str]) -> dict[str, Cell]:
    """The cells of --paths."""
    return {
        name: Cell(
            name=name,
            method=method,
            parameters={"temperature": 0.0, **more},
            long=name.startswith("prefill"),
        )
        for name, (method, more) in PATHS.items()
        if method in methods
    }
