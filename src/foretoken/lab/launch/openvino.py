"""OpenVINO GenAI is told in Python: a script that drafts as a speculative config says.

Knows the names of GenAI's own classes; what its options are called is in the table.
"""

import json
from collections.abc import Mapping
from typing import Any

from foretoken.config.method_registry import DraftingMethod, NgramSettings
from foretoken.lab.launch.drafting import (
    DraftingSetup,
    LaunchEngine,
    Told,
    Unsaid,
    told_keys,
)
from foretoken.lab.launch.launch import LaunchPart

_METHODS = ("draft_model", "eagle3", "ngram")
_THRESHOLD = "draft_confidence_threshold"
"""The key that GenAI takes in place of a number of drafts."""


def _word(method: DraftingMethod) -> str:
    return method.name if method.name in _METHODS else ""


def _tell(drafting: DraftingSetup) -> Told:
    keys = dict(drafting.keys)
    if _THRESHOLD not in keys:
        yield LaunchPart.flag("config.num_assistant_tokens", drafting.num_drafts)
    if drafting.known.drafts_with == "text":
        keys.setdefault("prompt_lookup_max", NgramSettings().prompt_lookup_max)
    yield from told_keys("openvino", keys)


def folder_of(model: str) -> str:
    """Where a converted model lies."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return model if last.endswith(("openvino", "-ov")) else f"{last}-openvino"


def converted(model: str) -> Told:
    """That a model, if there is one, has to be converted once."""
    folder = folder_of(model)
    if model and folder != model:
        command = f"optimum-cli export openvino --model {model} {folder}"
        yield Unsaid("model", f"converted once by `{command}`")


def script(model: str, drafting: DraftingSetup | None, given: Mapping[str, Any]) -> str:
    """A script that loads the models and writes one answer.

    Args:
        model: the target.
        drafting: how it drafts; None: it does not.
        given: what is told, by the name of its object and its field.
    """
    device = str(given.get("device", "CPU"))
    scheduler = _settings("scheduler", given)
    keywords = [f'    "{folder_of(model)}",', f'    "{device}",']
    if scheduler:
        keywords.append("    scheduler_config=scheduler,")
    if drafting is not None and drafting.model:
        draft = f'openvino_genai.draft_model("{folder_of(drafting.model)}", "{device}")'
        keywords.append(f"    draft_model={draft},")
    elif drafting is not None:
        keywords.append("    prompt_lookup=True,")
    names = (name for name in given if name.startswith("property."))
    keywords += [f"    {name.removeprefix('property.')}={_python(given[name])}," for name in names]
    lines = ["import openvino_genai", ""]
    if scheduler:
        lines += ["scheduler = openvino_genai.SchedulerConfig()", *scheduler]
    lines += ["pipeline = openvino_genai.LLMPipeline(", *keywords, ")"]
    lines += ["config = pipeline.get_generation_config()", *_settings("config", given)]
    return "\n".join([*lines, 'print(pipeline.generate("def fibonacci(n):", config))'])


def _python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _settings(whose: str, given: Mapping[str, Any]) -> list[str]:
    named = ((name, value) for name, value in given.items() if name.startswith(f"{whose}."))
    return [f"{name} = {_python(value)}" for name, value in named]


OPENVINO = LaunchEngine(name="openvino", word=_word, tell=_tell)
