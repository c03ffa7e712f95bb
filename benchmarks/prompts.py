"""The prompts.json that make_models.py writes beside its models."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclePrompts:
    """Token ids of prompts of one kind, and how the cycle models must continue each."""

    ids: list[list[int]]
    answers: list[list[int]]


def load_prompts(models: Path, kind: str) -> CyclePrompts:
    """Prompts of kind `fresh` or `echo` from the folder of the models."""
    prompts = json.loads((models / "prompts.json").read_text())
    return CyclePrompts(ids=prompts[kind], answers=prompts[f"{kind}_answers"])
