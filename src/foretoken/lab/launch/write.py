"""A launch as text, in the form in which it was found: ready to paste.

Words that were not changed stand as they were written, variables included.
"""

import json
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from foretoken.lab.launch.launch import ELSEWHERE, Launch, LaunchPart
from foretoken.lab.launch.shell import quoted
from foretoken.lab.launch.variables import SETTERS, words_that_set
from foretoken.lab.launch.values import Expression, json_for_shell, json_text


def written(launch: Launch) -> str:
    """The launch as a command, a list of words, a call or settings."""
    kind = launch.form.kind
    if kind == "python":
        return _call(launch)
    if kind == "settings":
        return _settings(launch)
    if kind in ("list", "exec"):
        return _listed(launch)
    if kind == "variables":
        return "\n".join(map(_setting, _elsewhere(launch)))
    return _command(launch)


def _command(launch: Launch) -> str:
    """A shell command, one option on each line."""
    lines = [" ".join(_before(launch))]
    for part in launch.arguments:
        value = "" if part.value is True and part.name else part.raw or _for_shell(part)
        if part.name:
            lines.append(f"{part.written} {value}".strip())
        elif len(lines) == 1:
            lines[0] += f" {value}"
        else:
            lines.append(value)
    if launch.after:
        lines.append(" ".join(quoted(word) for word in launch.after))
    command = " \\\n  ".join(line for line in lines if line).lstrip()
    return "\n".join([*_instructions(launch), *([command] if command else [])])


def _before(launch: Launch) -> Iterator[str]:
    """The words up to the server's name, with the variables among them as they are now."""
    places = {one.place: one for one in words_that_set(launch.before)}
    kept = {part.place: part for part in launch.parts if part.place is not None}
    gone = [place for place in places if place not in kept]
    for place, word in enumerate(launch.before):
        if place in gone or (place + 1 in gone and word.text in SETTERS):
            continue
        part = kept.get(place)
        own = places.get(place)
        if part is None or own is None or (part.written == own.name and part.raw):
            yield quoted(word)
        else:
            yield own.option + _setting(part)


def _setting(part: LaunchPart) -> str:
    value = part.raw or _text(part)
    return f"{part.written}=" + (f'"{value}"' if "$" in value else shlex.quote(value))


def _elsewhere(launch: Launch) -> list[LaunchPart]:
    """The variables that other lines set."""
    return [part for part in launch.parts if part.place == ELSEWHERE]


def _instructions(launch: Launch) -> list[str]:
    """The lines beside a command that set the variables which servers read."""
    holder = launch.form.variables
    space = "" if holder.endswith("=") else " "
    about = [part for part in _elsewhere(launch) if not part.name.startswith("$")]
    return [f"{holder}{space}{_setting(part)}" for part in about]


def _text(part: LaunchPart) -> str:
    if isinstance(part.value, dict | list):
        return json_text(part.value)
    return str(part.value)


def _for_shell(part: LaunchPart) -> str:
    if isinstance(part.value, dict | list):
        return json_for_shell(part.value)
    return shlex.quote(str(part.value))


def _listed(launch: Launch) -> str:
    """A list of words under its key, as in a manifest or a Dockerfile."""
    words = [word.text for word in launch.before]
    for part in launch.arguments:
        words += [part.written] if part.name else []
        words += [] if part.value is True and part.name else [_text(part)]
    own = words[launch.form.elsewhere :]
    if launch.form.kind == "exec":
        command = [f"{launch.form.holder} {json.dumps(own)}"] if own else []
        return "\n".join([*_instructions(launch), *command])
    found = {launch.form.variables: _styled(launch)} if _elsewhere(launch) else {}
    found |= {launch.form.holder or "args": own} if own else {}
    return str(yaml.safe_dump(found, width=10_000, allow_unicode=True, sort_keys=False)).rstrip()


def _styled(launch: Launch) -> Any:
    """Variables as they stand in a container: a manifest's `env` lists names and values."""
    set_to = {
        p.written: p.raw or (None if p.value is True else p.value) for p in _elsewhere(launch)
    }
    if launch.form.variables != "env":
        return set_to
    return [
        {"name": name, **(value if isinstance(value, dict) else {"value": value})}
        for name, value in set_to.items()
    ]


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
