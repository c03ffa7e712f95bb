"""A launch as text, a shell command unless it was Python or settings, and whole commands of what
is wanted.

Words that were not changed stand as they were written, variables included.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import yaml

from foretoken.lab.launch import openvino
from foretoken.lab.launch.drafting import DraftingSetup, Unsaid, told_option
from foretoken.lab.launch.engines import ENGINES, tell
from foretoken.lab.launch.launch import Expression, Launch, LaunchPart, json_for_shell

_GGUF_KINDS = {
    "int8": "q8_0",
    "fp8": "q8_0",
    "int4": "q4_k_m",
    "nvfp4": "q4_k_m",
    "none": "bf16",
}
_CONVERTED = ("-bf16.gguf", "-fp16.gguf", "-fp32.gguf", "-q8_0.gguf")
"""How files end that llama.cpp's converter writes by itself."""


def written(launch: Launch) -> str:
    """The launch as a command, a call or settings."""
    if launch.form == "python":
        lines = [f"{launch.holder}("]
        for part in launch.parts:
            value = part.raw or _literal(part.value, "    ")
            lines.append(f"    {part.written}{'' if part.written == '**' else '='}{value},")
        return "\n".join([*lines, ")"])
    if launch.holder == "config":  # a speculative config by itself
        return json.dumps(launch.parts[0].value, indent=2)
    if launch.form == "settings":
        found = {part.written: part.value for part in launch.parts}
        text = yaml.safe_dump(found, width=10_000, sort_keys=False, allow_unicode=True)
        return str(text).rstrip()
    return _command(launch)


def _command(launch: Launch) -> str:
    """A shell command, one option on each line; variables as the options that they stand for."""
    lines = [" ".join(map(_quoted, launch.of("before")))]
    for part in launch.of("argument", "set"):
        value = "" if part.value is True and part.name else _quoted(part)
        if part.name or len(lines) > 1:
            lines.append(f"{part.words[0] if part.name else ''} {value}".strip())
        else:
            lines[0] += f" {value}"
    lines.append(" ".join(map(_quoted, launch.of("after"))))
    return " \\\n  ".join(line for line in lines if line).lstrip()


def _quoted(part: LaunchPart) -> str:
    if part.raw:
        return part.raw
    if isinstance(part.value, dict | list):
        return json_for_shell(part.value)
    return shlex.quote(str(part.value))


def words_of(launch: Launch) -> list[str]:
    """All words of a command, without quotes."""
    return [word for part in launch.of("before", "argument", "set", "after") for word in part.words]


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
        names: dict[str, list[str]] = {}
        for one in self.unsaid:
            names.setdefault(one.why, []).append(one.name)
        said = [f"# {', '.join(dict.fromkeys(group))}: {why}" for why, group in names.items()]
        return "\n".join([*said, self.text])


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
        told += openvino.converted(drafting.model or "") if engine == "openvino" else ()
    elif own.off:
        told.append(LaunchPart.flag(*own.off))  # it speculates unless told otherwise
    told += [LaunchPart.flag("--metrics")] if engine == "llama.cpp" else []
    parts = [part for part in told if isinstance(part, LaunchPart)]
    unsaid = tuple(one for one in told if isinstance(one, Unsaid))
    if engine == "openvino":
        given = {part.written: part.value for part in parts}
        return WrittenCommand(openvino.script(model, drafting, given), unsaid)
    first = LaunchPart.flag(own.model_flag, model) if own.model_flag else LaunchPart(value=model)
    program = (LaunchPart(value=word, role="before") for word in own.program)
    variables = (part for part in parts if part.role == "before")
    options = (part for part in parts if part.role == "argument")
    launch = Launch(engine=engine, parts=(*variables, *program, first, *options))
    return WrittenCommand(written(launch), unsaid)


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
