"""A launch as text, in the form in which it was found, and whole commands of what is wanted.

Words that were not changed stand as they were written, variables included.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import yaml

from foretoken.lab.launch import openvino
from foretoken.lab.launch.drafting import DraftingSetup, Unsaid, in_groups
from foretoken.lab.launch.engines import ENGINES, tell
from foretoken.lab.launch.launch import Launch, LaunchPart
from foretoken.lab.launch.options import told_option
from foretoken.lab.launch.values import Expression, as_text, json_for_shell

_GGUF_KINDS = {
    "int8": "q8_0",
    "fp8": "q8_0",
    "int4": "q4_k_m",
    "nvfp4": "q4_k_m",
    "none": "bf16",
}
"""How a GGUF file of such weights is usually named."""
_CONVERTED = ("-bf16.gguf", "-fp16.gguf", "-fp32.gguf", "-q8_0.gguf")
"""How files end that llama.cpp's converter writes by itself."""


def written(launch: Launch) -> str:
    """The launch as a command, a list of words, a call or settings."""
    writer = {"python": _call, "settings": _settings, "list": _listed, "exec": _exec}
    return writer.get(launch.form.kind, _command)(launch)


def _command(launch: Launch) -> str:
    """A shell command, one option on each line, below the lines that set variables."""
    first = [_setting(part) if part.role == "set" else _quoted(part)
             for part in launch.of("before", "set")]  # fmt: skip
    lines = [" ".join(first)]
    for part in launch.arguments:
        value = "" if part.value is True and part.name else _quoted(part)
        if part.name or len(lines) > 1:
            lines.append(f"{part.written} {value}".strip())
        else:
            lines[0] += f" {value}"
    lines.append(" ".join(map(_quoted, launch.of("after"))))
    command = " \\\n  ".join(line for line in lines if line).lstrip()
    if launch.form.kind == "variables":
        return "\n".join(map(_setting, launch.of("elsewhere")))
    return "\n".join([*_set_before(launch), *([command] if command else [])])


def _set_before(launch: Launch) -> list[str]:
    """The lines that set the variables which servers read."""
    about = [part for part in launch.of("elsewhere") if not part.name.startswith("$")]
    return [f"{launch.form.variables} {_setting(part)}" for part in about]


def _quoted(part: LaunchPart) -> str:
    if part.raw:
        return part.raw
    if isinstance(part.value, dict | list):
        return json_for_shell(part.value)
    return shlex.quote(str(part.value))


def _setting(part: LaunchPart) -> str:
    value = part.raw or as_text(part.value)
    quoted = f'"{value}"' if "$" in value else shlex.quote(value)
    return f"{part.prefix}{part.written}={quoted}"


def words_of(launch: Launch) -> list[str]:
    """All words of a command, without quotes; what other lines set is left out."""
    found = []
    for part in launch.of("before", "set", "argument", "after"):
        if part.role == "set":
            whole = f"{part.prefix}{part.written}={part.raw}"
            found += whole.split(" ", int(part.prefix.endswith(" ")))  # `-e A=1` is two words
        else:
            found += part.words
    return found


def _exec(launch: Launch) -> str:
    """Words in a Dockerfile, below its variables."""
    own = words_of(launch)[launch.form.elsewhere :]
    command = [f"{launch.form.holder} {json.dumps(own)}"] if own else []
    return "\n".join([*_set_before(launch), *command])


def _listed(launch: Launch) -> str:
    """Words under their key in YAML, and variables as they stand in a container: a manifest's `env`
    lists names and values."""
    own, form = words_of(launch)[launch.form.elsewhere :], launch.form
    values = {one.written: one.raw or (None if one.value is True else one.value)
              for one in launch.of("elsewhere")}  # fmt: skip
    listed = [
        {"name": name, **(value if isinstance(value, dict) else {"value": value})}
        for name, value in values.items()
    ]
    found = {form.variables: listed if form.variables == "env" else values} if values else {}
    return _yaml({**found, **({form.holder: own} if own else {})})


def _settings(launch: Launch) -> str:
    if launch.form.holder == "config":  # a speculative config by itself
        return json.dumps(launch.parts[0].value, indent=2)
    return _yaml({part.written: part.value for part in launch.parts})


def _yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, width=10_000, sort_keys=False, allow_unicode=True)).rstrip()


def _call(launch: Launch) -> str:
    """A Python call, one keyword on each line."""
    lines = [f"{launch.form.holder}("]
    for part in launch.parts:
        value = part.raw or _literal(part.value, "    ")
        lines.append(f"    {part.written}{'' if part.written == '**' else '='}{value},")
    return "\n".join([*lines, ")"])


def _literal(value: Any, indent: str) -> str:
    """A Python literal; dictionaries with one key on each line."""
    deeper = indent + "    "
    if isinstance(value, Expression):
        return value.source
    if isinstance(value, dict) and "decoding_type" in value:  # a class of TensorRT-LLM
        given = [f"{deeper}{key}={_literal(one, deeper)},\n" for key, one in value.items()
                 if key != "decoding_type"]  # fmt: skip
        return f"{value['decoding_type']}DecodingConfig(\n{''.join(given)}{indent})"
    if isinstance(value, dict):
        lines = [f"{deeper}{_literal(key, '')}: {_literal(one, deeper)},\n"
                 for key, one in value.items()]  # fmt: skip
        return "{\n" + "".join(lines) + indent + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(one, indent) for one in value) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


@final
@dataclass(frozen=True, slots=True)
class WrittenCommand:
    """A command or a script, ready to paste, and what it does not say."""

    text: str
    unsaid: tuple[Unsaid, ...] = ()

    @property
    def commented(self) -> str:
        """The text behind a comment for everything that it does not say."""
        return "\n".join([*(f"# {line}" for line in in_groups(self.unsaid)), self.text])


def write_command(
    engine: str, settings: Mapping[str, Any], drafting: DraftingSetup | None
) -> WrittenCommand:
    """The command that starts a server, or the script that does for OpenVINO GenAI.

    Args:
        engine: one that commands are written for.
        settings: the model, and options under the names of `foretoken serve`.
        drafting: how it drafts; None: it does not.

    Raises:
        ConfigError: the engine has nothing like it, and would write something else.
    """
    own, told = ENGINES[engine], list[LaunchPart | Unsaid]()
    if engine == "llama.cpp":
        settings, drafting, told = _in_gguf(settings, drafting)
    model = str(settings["model"])
    if engine == "openvino":
        told += openvino.converted(model)
    for name, value in settings.items():
        told += told_option(engine, name, value) if name != "model" else ()
    if drafting is not None:
        told += tell(engine, drafting)
    elif own.off:
        told.append(LaunchPart.flag(*own.off))  # it speculates unless told otherwise
    told += [LaunchPart.flag("--metrics")] if engine == "llama.cpp" else []
    parts = [part for part in told if isinstance(part, LaunchPart)]
    unsaid = tuple(one for one in told if isinstance(one, Unsaid))
    if engine == "openvino":
        given = {part.written: part.value for part in parts}
        return WrittenCommand(openvino.script(model, drafting, given), unsaid)
    first = LaunchPart.flag(own.model_flag, model) if own.model_flag else LaunchPart(value=model)
    before = (LaunchPart(value=word, role="before") for word in own.program)
    return WrittenCommand(written(Launch(engine=engine, parts=(*before, first, *parts))), unsaid)


def _in_gguf(
    settings: Mapping[str, Any], drafting: DraftingSetup | None
) -> tuple[dict[str, Any], DraftingSetup | None, list[LaunchPart | Unsaid]]:
    """The same with GGUF files in place of models; a context holds all requests together."""
    kept, told = dict(settings), list[LaunchPart | Unsaid]()
    kept["model"] = _gguf(str(kept["model"]), kept.pop("quantization", "none"), told)
    if "max_model_len" in kept:
        kept["max_model_len"] *= max(1, int(kept.get("max_num_seqs", 1)))
    if drafting is not None and drafting.model:
        keys = dict(drafting.keys)
        file = _gguf(drafting.model, keys.pop("quantization", "none"), told)
        drafting = replace(drafting, model=file, keys=keys)
    return kept, drafting, told


def _gguf(model: str, quantization: object, told: list[LaunchPart | Unsaid]) -> str:
    """The GGUF file of a model with such weights, as such files are usually named; that it has to
    be made is told."""
    if model.endswith(".gguf"):
        return model
    kind = _GGUF_KINDS.get(str(quantization), quantization)
    file = f"{model.rstrip('/').rsplit('/', 1)[-1]}-{kind}.gguf"
    by = "writes it" if file.endswith(_CONVERTED) else "and then llama-quantize write it"
    why = f"{file} is {model} as llama.cpp's convert_hf_to_gguf.py {by}"
    told.append(Unsaid("model", why))
    return file
