"""OpenVINO GenAI is told in Python: a script that drafts as a speculative config says.

Knows the names of GenAI's own classes; what its options are called is in the table.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from foretoken.config.methods import NgramSettings
from foretoken.errors import ConfigError
from foretoken.lab.launch.engines import refusal
from foretoken.lab.launch.options import told_key, told_option
from foretoken.lab.launch.drafting import DraftingSetup, Told, Unsaid
from foretoken.lab.launch.command import WrittenCommand
from foretoken.lab.launch.launch import LaunchPart

_ENGINE = "openvino"
_THRESHOLD = "config.assistant_confidence_threshold"
_LONGEST = ("prompt_lookup_max", NgramSettings().prompt_lookup_max)


def write_script(settings: Mapping[str, Any], speculation: DraftingSetup | None) -> WrittenCommand:
    """A script that loads the models and writes one answer.

    Args:
        settings: the model, and options under the names of `foretoken serve`.
        speculation: how it drafts; None: it does not.

    Raises:
        ConfigError: OpenVINO has nothing like it, and would write something else.
    """
    model = str(settings["model"])
    folder = _folder(model)
    told = _to_convert(model, folder)
    for name, value in settings.items():
        if name != "model":
            told += told_option(_ENGINE, name, value)
    if speculation is not None:
        told += _tell(speculation)
    given = {part.written: part.value for part in told.parts}
    device = str(given.pop("device", "CPU"))
    text = _script(folder, device, speculation, given)
    return WrittenCommand(text, told.unsaid)


def _tell(speculation: DraftingSetup) -> Told:
    """What a generation is told, and what has no place there."""
    if refused := refusal(_ENGINE, speculation.drafting):
        raise ConfigError("speculative_config.method", speculation.method, f"another: {refused}")
    keys = dict(speculation.keys)
    told = sum((told_key(_ENGINE, key, value) for key, value in keys.items()), Told())
    if all(part.written != _THRESHOLD for part in told.parts):
        told += _set("config.num_assistant_tokens", speculation.num_drafts)
    if speculation.drafting.drafts_with == "text" and "prompt_lookup_max" not in keys:
        told += told_key(_ENGINE, *_LONGEST)
    if speculation.ranges:
        why = "OpenVINO drafts equally far at every load; its longest is written"
        told += Told.not_said(speculation.ranges_key, why)
    if speculation.model:
        told += _to_convert(speculation.model, _folder(speculation.model))
    return told


def _set(name: str, value: Any) -> Told:
    return Told((LaunchPart(name=name, written=name, value=value),))


def _folder(model: str) -> str:
    """Where a converted model lies."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return model if last.endswith(("openvino", "-ov")) else f"{last}-openvino"


def _to_convert(model: str, folder: str) -> Told:
    if model == folder:
        return Told()
    command = f"optimum-cli export openvino --model {model} {folder}"
    return Told(unsaid=(Unsaid("model", f"converted once by `{command}`"),))


def _script(
    folder: str, device: str, speculation: DraftingSetup | None, given: Mapping[str, Any]
) -> str:
    scheduler = list(_settings("scheduler", given))
    keywords = [f'    "{folder}",', f'    "{device}",']
    if scheduler:
        keywords.append("    scheduler_config=scheduler,")
    if speculation is not None and speculation.model:
        draft = f'openvino_genai.draft_model("{_folder(speculation.model)}", "{device}")'
        keywords.append(f"    draft_model={draft},")
    elif speculation is not None:
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


def _settings(whose: str, given: Mapping[str, Any]) -> Iterable[str]:
    return (
        f"{name} = {_python(value)}"
        for name, value in given.items()
        if name.startswith(f"{whose}.")
    )
