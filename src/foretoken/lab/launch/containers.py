"""Launches in Dockerfiles, compose files and Kubernetes manifests.

An image has an entry point of its own, so that a container may say options only. Builds nothing.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from foretoken.lab.launch.launch import Form, Launch
from foretoken.lab.launch.shell import Word, read_commands
from foretoken.lab.launch.variables import (
    of_container,
    of_instruction,
    owner_of,
    variables_alone,
    with_variables,
)
from foretoken.lab.launch.read import engine_of_image, launch_of

_INSTRUCTION = re.compile(
    r"^[ \t]*(FROM|CMD|ENTRYPOINT|ENV|ARG|RUN)[ \t]+((?:\\[ \t]*\n|.)*)", re.M | re.I
)
_HOLDERS = ("entrypoint", "command", "cmd", "args")
"""Keys of a container whose words follow each other."""

Reader = Callable[[str, str], Iterator[Launch]]
"""Finds the launches in a shell text, for an engine."""


def is_dockerfile(text: str) -> bool:
    """Whether a text builds an image."""
    named = {match[1].upper() for match in _INSTRUCTION.finditer(text)}
    return "FROM" in named and bool(named & {"CMD", "ENTRYPOINT", "RUN", "ENV"})


def launches_of_dockerfile(text: str, engine: str, read_shell: Reader) -> Iterator[Launch]:
    """The launch of the last stage, from its entry point, its command and its variables."""
    held: dict[str, str] = {}
    stages: dict[str, tuple[str, dict[str, str]]] = {}
    variables: dict[str, str] = {}
    assigned = ""
    for match in _INSTRUCTION.finditer(text):
        name, value = match[1].upper(), match[2].strip()
        if name == "FROM":
            image, *alias = value.split()
            whole, inherited = stages.get(image, (image, {}))
            held, variables = {"FROM": whole}, dict(inherited)
            stages[alias[-1] if alias else image] = whole, variables
        elif name in ("ENV", "ARG"):
            assigned += f"{value}\n"
            variables |= of_instruction(value) if name == "ENV" else {}
        else:
            held[name] = value
    found = [*_of_stage(held, engine, assigned, read_shell)]
    yield from (with_variables(launch, variables, "ENV") for launch in found)
    if not found and variables:
        image = engine_of_image(held.get("FROM", "")) if engine == "auto" else engine
        alone = variables_alone(variables, image, Form(kind="exec", variables="ENV"))
        yield from filter(None, [alone])


def _of_stage(
    held: Mapping[str, str], engine: str, assigned: str, read_shell: Reader
) -> Iterator[Launch]:
    """The launches of a stage's instructions, its variables aside."""
    words: list[str] = []
    elsewhere, holder = 0, ""
    for name in ("ENTRYPOINT", "CMD"):
        value = held.get(name, "")
        try:
            listed = json.loads(re.sub(r"\\[ \t]*\n", " ", value))
        except ValueError:
            yield from read_shell(assigned + value, engine)
            continue
        elsewhere, holder = len(words), name
        words += [str(word) for word in listed]
    if words:
        form = Form(kind="exec", holder=holder, elsewhere=elsewhere)
        yield from _of_words(words, engine, held.get("FROM", ""), form, read_shell)


def is_container(value: Mapping[str, Any]) -> bool:
    """Whether a mapping of a document says how a container starts."""
    return any(isinstance(value.get(key), list | str) and value[key] for key in _HOLDERS)


def is_image_alone(value: Mapping[str, Any]) -> bool:
    """Whether a mapping names an image and variables, whose own command starts then."""
    return isinstance(value.get("image"), str) and bool(of_container(value)[1])


def launches_of_container(
    value: Mapping[str, Any], engine: str, read_shell: Reader
) -> Iterator[Launch]:
    """The launch of a container of a compose file or a manifest, with its variables."""
    key, variables = of_container(value)
    found = [*_of_words_of(value, engine, read_shell)]
    for launch in found:
        shell = launch.form.kind == "shell"
        about = {name: one for name, one in variables.items() if owner_of(name) or not shell}
        yield with_variables(launch, about, "export" if shell else key)
    if not found and variables:
        image = engine_of_image(str(value.get("image", ""))) if engine == "auto" else engine
        alone = variables_alone(variables, image, Form(kind="list", variables=key))
        yield from filter(None, [alone])


def _of_words_of(value: Mapping[str, Any], engine: str, read_shell: Reader) -> Iterator[Launch]:
    """The launches of a container's words."""
    words: list[str] = []
    elsewhere, holder = 0, ""
    image = str(value.get("image", ""))
    for key in _HOLDERS:
        given = value.get(key)
        if isinstance(given, str) and key == "cmd":  # of a proxy, to which lines are spaces
            yield from (replace(launch, torn="") for launch in read_shell(given, engine))
        elif isinstance(given, str):
            given = [word.text for command in read_commands(given) for word in command]
        if isinstance(given, list):
            elsewhere, holder = len(words), key
            words += [str(word) for word in given]
    if words:
        form = Form(kind="list", holder=holder, elsewhere=elsewhere)
        yield from _of_words(words, engine, image, form, read_shell)


def _of_words(
    words: list[str], engine: str, image: str, form: Form, read_shell: Reader
) -> Iterator[Launch]:
    """The launch of words that the image's entry point may stand before."""
    if "-c" in words or "-lc" in words:  # sh -c "the whole command"
        for word in words:
            if " " in word:
                yield from read_shell(word, engine)
        return
    own = engine_of_image(image) if engine == "auto" else engine
    made = [Word(word, "") for word in words]
    found = launch_of(made, engine, form=form)
    if found is None:
        found = launch_of(made, engine if own == "unknown" else own, loose=True, form=form)
    if found is not None:
        yield found
