"""A launch as text, in the form in which it was found: ready to paste.

Words that were not changed stand as they were written, variables included.
"""

import json
import shlex
from typing import Any

import yaml

from foretoken.lab.lint.launches import Launch, LaunchPart
from foretoken.lab.lint.read.python import Expression
from foretoken.lab.lint.read.shell import quoted


def written(launch: Launch) -> str:
    """The launch as a command, a list of words, a call or settings."""
    kind = launch.form.kind
    if kind == "python":
        return _call(launch)
    if kind == "settings":
        return _settings(launch)
    if kind in ("list", "exec"):
        return _listed(launch)
    return _command(launch)


def _command(launch: Launch) -> str:
    """A shell command, one option on each line."""
    lines = [" ".join(quoted(word) for word in launch.before)]
    for part in launch.parts:
        value = "" if part.value is True and part.name else part.raw or shlex.quote(_text(part))
        if part.name:
            lines.append(f"{part.written} {value}".strip())
        elif len(lines) == 1:
            lines[0] += f" {value}"
        else:
            lines.append(value)
    if launch.after:
        lines.append(" ".join(quoted(word) for word in launch.after))
    return " \\\n  ".join(line for line in lines if line).lstrip()


def _text(part: LaunchPart) -> str:
    if isinstance(part.value, dict | list):
        return json.dumps(part.value, default=str)
    return str(part.value)


def _listed(launch: Launch) -> str:
    """A list of words under its key, as in a manifest or a Dockerfile."""
    words = [word.text for word in launch.before]
    for part in launch.parts:
        words += [part.written] if part.name else []
        words += [] if part.value is True and part.name else [_text(part)]
    own = words[launch.form.elsewhere :]
    if launch.form.kind == "exec":
        return f"{launch.form.holder} {json.dumps(own)}"
    holder = launch.form.holder or "args"
    return str(yaml.safe_dump({holder: own}, width=10_000, allow_unicode=True)).rstrip()


def _settings(launch: Launch) -> str:
    if launch.form.holder == "config":  # a speculative config by itself
        return json.dumps(launch.parts[0].value, indent=2)
    values = {part.written: part.value for part in launch.parts}
    return str(yaml.safe_dump(values, width=10_000, sort_keys=False, allow_unicode=True)).rstrip()


def _call(launch: Launch) -> str:
    """A Python call, one keyword on each line."""
    lines = [f"{launch.form.holder}("]
    for part in launch.parts:
        value = part.raw or _literal(part.value, "    ")
        sign = "" if part.written == "**" else "="
        lines.append(f"    {part.written}{sign}{value},")
    return "\n".join([*lines, ")"])


def _literal(value: Any, indent: str) -> str:
    """A Python literal; dictionaries with one key on each line."""
    if isinstance(value, Expression):
        return value.source
    if isinstance(value, dict) and "decoding_type" in value:  # a class of TensorRT-LLM
        given = "".join(
            f"{indent}    {key}={_literal(one, indent + '    ')},\n"
            for key, one in value.items()
            if key != "decoding_type"
        )
        return f"{value['decoding_type']}DecodingConfig(\n{given}{indent})"
    if isinstance(value, dict):
        inner = "".join(
            f"{indent}    {_literal(key, '')}: {_literal(one, indent + '    ')},\n"
            for key, one in value.items()
        )
        return "{\n" + inner + indent + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(one, indent) for one in value) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
