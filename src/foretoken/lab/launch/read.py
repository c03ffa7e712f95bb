"""The words of a command as a launch: which engine it starts, its options, its variables.

Knows nothing of files. Starts nothing and judges nothing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretoken.config.other_engines import find_other
from foretoken.lab.launch.engines import ENGINES, READ
from foretoken.lab.launch.launch import Form, Launch, LaunchPart, Role
from foretoken.lab.launch.shell import ASSIGNED, Word

FLAG = re.compile(r"--?[a-zA-Z]")
SETTERS = ("-e", "--env")
"""Options of containers that set a variable, which is the next word or stands in theirs."""
_SETS = re.compile(r"(--env=|-e=?|)([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SWITCH = re.compile(
    r"(enable|disable|no|use|skip)-|(trust-remote-code|enforce-eager|metrics|adaptive-speculation|"
    r"spec-default)$"
)
_DOCKER_SWITCHES = ("--rm", "-d", "--detach", "-i", "--interactive", "-t", "--tty", "--init",
             "--privileged")  # fmt: skip
"""Options of `docker run` that have no value."""
_MOST_LOOSE_WORDS = 2
"""Words without an option that may stand beside options alone; more make a sentence."""
_REDIRECTS = re.compile(r"\d*[<>]|&>")
_TRUE = ("1", "true", "on", "enabled")
_DEFAULT = re.compile(r"\$\{\w+:?-([^{}]*)\}")


def read_words(
    words: Sequence[Word], engine: str = "auto", *, loose: bool = False, form: Form | None = None
) -> Launch | None:
    """The launch that a command is; None if it starts no server.

    Args:
        words: the command.
        engine: whose rules count; `auto`: by what the command says.
        loose: whether options alone are enough, without the name of a server.
        form: what the words were written in.
    """
    own, start = _server(words)
    if own == "unknown" and not loose:
        return None
    if own == "unknown":  # what it sets for an unknown program says whose options these are
        start = next((i for i, one in enumerate(words) if not ASSIGNED.match(one.text)), 0)
    end = next((i for i, word in enumerate(words) if _REDIRECTS.match(word.raw)), len(words))
    parts = list(_options(words[start:end]))
    options = {part.name: part.value for part in parts if part.name}
    names = [match[2] for word in words[:start] if (match := _SETS.match(word.text))]
    owners = [owner_of(name) or "" for name in names if known_variable(name)]
    if own == "unknown":
        own = guess_engine(options) if engine == "auto" else engine
        own = owners[0] if own == "unknown" and owners else own
        is_prose = FLAG.match(words[0].text) and len(parts) - len(options) > _MOST_LOOSE_WORDS
        if own == "unknown" or not (options or owners) or is_prose:
            return None
    elif engine != "auto":
        own = engine
    completed = ENGINES[own].completed
    arguments = (replace(one, name=completed.get(one.name, one.name)) for one in parts)
    after = (LaunchPart(value=one.text, raw=one.raw, role="after") for one in words[end:])
    before = _before(words[:start], own)
    return Launch(engine=own, parts=(*before, *arguments, *after), form=form or Form())


def engine_of_image(image: str) -> str:
    """The engine whose server an image starts, `unknown` if that is not known."""
    found = (name for name, own in ENGINES.items() for part in own.images if part in image)
    return next(found, "unknown")


def guess_engine(options: Iterable[str]) -> str:
    """Whose options these are, by those about speculation."""
    heads = [name.partition(".")[0] for name in options]
    for head in heads:
        for engine in READ[:-1]:
            if len(head) > 4 and find_other("flags", head, engine) is not None:
                return engine
    if {"md", "ngl", "hfd"} & set(heads):
        return "llama.cpp"
    about = ("spec", "tensor-parallel", "ngram-prompt")
    return "vllm" if any(head.startswith(about) for head in heads) else "unknown"


def _server(words: Sequence[Word]) -> tuple[str, int]:
    """The engine that a command starts, and how many words there are up to its name.

    The last name counts: an image comes before the command that runs in it.
    """
    found = ("unknown", 0)
    for index, word in enumerate(words):
        if ASSIGNED.match(word.text):
            continue
        name = word.text.rsplit("/", 1)[-1]
        following = words[index + 1].text if index + 1 < len(words) else ""
        for engine, own in ENGINES.items():
            if f"{name} {following}" in own.programs:
                found = engine, index + 2
            elif name in own.programs or (own.module and word.text.startswith(own.module)):
                found = engine, index + 1
            else:
                continue
            break
        else:
            image = engine_of_image(word.text) if found[0] == "unknown" else "unknown"
            if image != "unknown" and not (index and _waits_for_value(words[index - 1].text)):
                found = image, index + 1
    return found


def _waits_for_value(word: str) -> bool:
    """Whether the word behind one of `docker run` may be its value and no image."""
    has_its_own = "=" in word or re.match(r"-\w\w", word)  # `-p80:80`; or two switches, `-it`
    return bool(FLAG.match(word)) and not has_its_own and word not in _DOCKER_SWITCHES


def _options(words: Sequence[Word]) -> Iterator[LaunchPart]:
    """Options with their values, and the words that belong to none."""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.text.partition("=")
        name = flag.lstrip("-")
        name = name.replace("_", "-") if "." not in name else name
        if not FLAG.match(word.text):
            yield LaunchPart(value=word.text, raw=word.raw)
        elif equals:
            raw = word.raw.partition("=")[2] if word.raw.startswith(flag + "=") else ""
            yield LaunchPart(name=name, written=flag, value=value, raw=raw)
        elif waiting and _is_value(name, waiting[0].text):
            given = waiting.pop(0)
            yield LaunchPart(name=name, written=flag, value=given.text, raw=given.raw)
        else:
            yield LaunchPart(name=name, written=flag)


def _is_value(name: str, text: str) -> bool:
    """Whether a word behind an option is its value."""
    if FLAG.match(text) or not _SWITCH.match(name):
        return not FLAG.match(text)
    return text.lower() in ("true", "false") or text.replace(".", "").isdigit()


def _before(words: Sequence[Word], engine: str) -> Iterator[LaunchPart]:
    """The words up to the server's name; of those that set a variable (`A=1 server`,
    `docker run -e A=1 --env=B=2 -eC=3 image`) the variable."""
    waiting, leading = list(words), True
    while waiting:
        word, prefix = waiting.pop(0), ""
        if word.text in SETTERS and waiting and ASSIGNED.match(waiting[0].text):
            prefix, word = f"{word.text} ", waiting.pop(0)
        match = _SETS.match(word.text)
        leading = leading and not prefix and (match is not None or word.text == "env")
        if match and (prefix or match[1] or leading):
            yield variable(match[2], match[3], engine, role="set", prefix=prefix + match[1])
        else:
            yield LaunchPart(value=word.text, raw=word.raw, role="before")


def owner_of(name: str) -> str | None:
    """The engine that a variable is for, by its name; None: of none."""
    known = ((own.variables, engine) for engine, own in ENGINES.items() if own.variables)
    return next((engine for start, engine in known if name.startswith(start)), None)


def known_variable(name: str) -> bool:
    """Whether the table of other engines has a variable."""
    owner = owner_of(name)
    return owner is not None and find_other("variables", name, owner) is not None


def variable(
    name: str, value: Any, engine: str, *, role: Role = "elsewhere", prefix: str = ""
) -> LaunchPart:
    """A variable as the option that it stands for, by another name where it stands for none.

    Args:
        name: its own.
        value: what it is set to; None or a mapping: what stands in a container in its place.
        engine: whose server is started, or `unknown`.
        role: where it is set.
        prefix: of one among a command's words, the option that sets it.
    """
    owner, option, given = owner_of(name), f"${name}", value
    known = owner is not None and engine in (owner, "unknown") and isinstance(value, str)
    row = find_other("variables", name, owner) if known else None
    if row is not None and row.flag:
        given = _DEFAULT.sub(r"\1", value)
        is_on = given.lower() in _TRUE
        if is_on or not row.switch:
            option, given = row.flag.replace("_", "-"), True if row.switch else given
    raw = value if isinstance(value, str) else ""
    return LaunchPart(name=option, written=name, value=given, raw=raw, role=role, prefix=prefix)


def with_variables(launch: Launch, variables: Mapping[str, Any], key: str) -> Launch:
    """The launch with variables that are set elsewhere, by `key`; its own words override them."""
    own = {part.written for part in launch.parts if part.is_variable}
    more = [variable(name, value, launch.engine) for name, value in variables.items()
            if name not in own]  # fmt: skip
    form = replace(launch.form, variables=key)
    return replace(launch, parts=(*more, *launch.parts), form=form) if more else launch


def variables_alone(variables: Mapping[str, Any], engine: str, form: Form) -> Launch | None:
    """A launch of which only variables are known; None where none of them is about a server."""
    owned = [(owner_of(name) or "", name) for name in variables]
    owners = [own for own, name in owned if own and (own == engine or known_variable(name))]
    if not owners:
        return None
    own = owners[0] if engine in ("auto", "unknown") else engine
    return with_variables(Launch(engine=own, parts=(), form=form), variables, form.variables)
