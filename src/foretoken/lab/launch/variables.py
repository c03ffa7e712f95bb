"""Variables of the environment that servers read as options, and where a text sets them.

Words before a command and behind `-e`, exported lines, files of variables, ENV of Dockerfiles, and
containers of compose files and manifests. Sets none and judges none.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from foretoken.config.other_engines import find_other
from foretoken.lab.launch.launch import ELSEWHERE, Form, Launch, LaunchPart
from foretoken.lab.launch.shell import ASSIGNED, Word

PREFIXES = {"LLAMA_ARG_": "llama.cpp", "VLLM_": "vllm", "SGLANG_": "sglang"}
"""How the variables of an engine begin."""
KEYS = ("environment", "env")
"""Keys of a container that set variables."""
SETTERS = ("-e", "--env")
"""Options of containers that set one, which is the next word or stands in theirs."""
_SET_IN_ONE = re.compile(r"--env=|-e=?(?=[A-Za-z_]\w*=)")
_TRUE = ("1", "true", "on", "enabled")
_EXPORTS = re.compile(r"^[ \t]*(?:export[ \t]+|Environment=)(.*)$", re.MULTILINE)
_EXPORTS_ALL = re.compile(r"^[ \t]*set -(?:a|o allexport)\b", re.MULTILINE)
_DEFAULT = re.compile(r"\$\{\w+:?-([^{}]*)\}")


def owner_of(variable: str) -> str | None:
    """The engine that a variable is for, by its name; None: of none."""
    return next((own for start, own in PREFIXES.items() if variable.startswith(start)), None)


def part_of(variable: str, value: Any, engine: str, place: int = ELSEWHERE) -> LaunchPart:
    """A variable as the option that it stands for; one that is none keeps its name behind a `$`.

    Args:
        variable: its name.
        value: what it is set to; None or a mapping: what stands in a container in its place.
        engine: whose server is started, or `unknown`.
        place: which word sets it.
    """
    owner = owner_of(variable)
    known = owner is not None and engine in (owner, "unknown") and isinstance(value, str)
    row = find_other("variables", variable, owner) if known else None
    name, given = f"${variable}", value
    if row is not None and row.flag:
        given = _DEFAULT.sub(r"\1", value)
        if not row.switch:
            name = row.flag.replace("_", "-")
        elif given.lower() in _TRUE:
            name, given = row.flag.replace("_", "-"), True
    raw = value if isinstance(value, str) else ""
    return LaunchPart(name=name, written=variable, value=given, raw=raw, place=place)


class SetWord(NamedTuple):
    """A word that sets a variable, before a server's name."""

    place: int
    name: str
    value: str
    option: str
    """What the word begins with: `--env=`, `-e`; empty if it begins with the name."""


def words_that_set(words: Sequence[Word]) -> Iterator[SetWord]:
    """`A=1 server`, `docker run -e A=1 --env=B=2 -eC=3 image`."""
    leading = True
    for place, word in enumerate(words):
        option = _SET_IN_ONE.match(word.text)
        start = option.end() if option else 0
        match = ASSIGNED.match(word.text, start)
        behind = place > 0 and words[place - 1].text in SETTERS
        leading = leading and not option and (match is not None or word.text == "env")
        if match is not None and (leading or behind or option):
            yield SetWord(place, match[1], word.text[match.end() :], word.text[:start])


def set_before(words: Sequence[Word], engine: str) -> list[LaunchPart]:
    """The variables that a command sets itself."""
    return [part_of(one.name, one.value, engine, one.place) for one in words_that_set(words)]


def first_word(words: Sequence[Word]) -> Word:
    """The first word of a command that sets no variable."""
    return next((word for word in words if not ASSIGNED.match(word.text)), words[0])


def with_variables(launch: Launch, variables: Mapping[str, Any], key: str) -> Launch:
    """The launch with variables that are set elsewhere, which its own words override.

    Args:
        launch: as its words say.
        variables: name and value of each.
        key: what sets them.
    """
    own = {part.written for part in launch.parts if part.place is not None}
    parts = [
        part_of(name, value, launch.engine) for name, value in variables.items() if name not in own
    ]
    if not parts:
        return launch
    form = replace(launch.form, variables=key)
    return replace(launch, parts=(*parts, *launch.parts), form=form)


def variables_alone(variables: Mapping[str, Any], engine: str, form: Form) -> Launch | None:
    """A launch of which only variables are known; None where none of them is about a server."""
    owners = [owner_of(name) for name in variables]
    known = [own for own, name in zip(owners, variables, strict=True)
             if own and (own == engine or find_other("variables", name, own))]  # fmt: skip
    if not known:
        return None
    own = known[0] if engine in ("auto", "unknown") else engine
    return with_variables(Launch(engine=own, parts=(), form=form), variables, form.variables)


def exported(text: str) -> dict[str, str]:
    """Variables of servers that a shell text exports, or a unit of systemd sets."""
    lines = [match[1] for match in _EXPORTS.finditer(text)]
    if _EXPORTS_ALL.search(text):
        lines += text.splitlines()
    pairs = [pair for line in lines for pair in assigned(line)]
    return {name: value for name, value in pairs if owner_of(name)}


def file_of_variables(text: str) -> dict[str, str]:
    """The variables of a text that only sets some, such as `.env`; empty for any other."""
    text = _EXPORTS.sub(r"\1", text)
    lines = [line.strip() for line in text.splitlines()]
    found = [list(assigned(line)) for line in lines if line and not line.startswith("#")]
    return dict(pair for own in found for pair in own) if all(found) else {}


def assigned(line: str) -> Iterator[tuple[str, str]]:
    """The variables of a line that does nothing but set some; none of any other line."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    matches = [ASSIGNED.match(word) for word in words]
    if all(matches):
        yield from ((m[1], m.string[m.end() :]) for m in matches if m is not None)


def of_instruction(value: str) -> dict[str, str]:
    """The variables of an ENV of a Dockerfile: `A=1 B=2`, or `A 1`."""
    whole = re.sub(r"\\[ \t]*\n", " ", value).strip()
    name, _, rest = whole.partition(" ")
    return dict(assigned(whole)) or ({name: rest.strip()} if rest else {})


def of_container(value: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key of a container that sets variables, and these."""
    for key in KEYS:
        given = value.get(key)
        if isinstance(given, Mapping) and given:
            return key, {str(name): _plain(one) for name, one in given.items()}
        if isinstance(given, list) and given:
            return key, dict(map(_entry, given))
    return "", {}


def _entry(one: Any) -> tuple[str, Any]:
    if isinstance(one, Mapping):  # of a manifest
        rest = {key: part for key, part in one.items() if key != "name"}
        return str(one.get("name", "")), _plain(rest["value"]) if set(rest) == {"value"} else rest
    name, equals, value = str(one).partition("=")
    return name, value if equals else None


def _plain(value: Any) -> Any:
    """A value as the server gets it: YAML reads 8 as a number."""
    if value is None or isinstance(value, Mapping):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)
