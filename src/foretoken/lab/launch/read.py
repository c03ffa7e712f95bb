"""The commands of a shell text, and the words of one as a launch: engine, options, variables.

Runs nothing and judges nothing. A word keeps how it was written, so that a command can be given
back with its variables, which stay unknown.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from foretoken.config.other_engines import find_other
from foretoken.lab.launch.engines import ENGINES, READ
from foretoken.lab.launch.launch import Form, Launch, LaunchPart

ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")
_CONTINUED = re.compile(r"\\[ \t]*\r?\n|\\[ \t]+(?=-)")
"""A backslash at the end of a line, or where such lines were joined into one by copying."""
_TORN = re.compile(r"\r?\n[ \t]*(?=--[a-z])")
"""Its lack before a line of options, which are no command of their own; marked as `\\v`."""
_COMMENT = re.compile(r"[^\n\v]*")
_COMMAND = re.compile(r"[ \v]-[-\w]|=|vllm|llama-|sglang|foretoken|trtllm|docker|python")
_WORD = re.compile(
    r"""(?:[^\s'"\\`$;&|()#]|\\.|'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|"""
    r"""\$\{[^}]*\}|\$|(?<=[^\s;&|()])\#|&(?=>)|(?<=>)&)+""",
    re.DOTALL,
)


class Word(NamedTuple):
    """A word of a command."""

    text: str
    raw: str = ""


class Command(NamedTuple):
    """A command, behind what it sets for itself alone (`A=1 command`)."""

    words: list[Word]
    torn: str = ""
    """Its first option at the beginning of a line that the line before does not go on with, where
    a shell would end it."""
    unclosed: str = ""
    """Of a line that was left out since a quotation in it has no end: the line."""


def read_commands(text: str) -> Iterator[Command]:
    """The commands of a text, in order."""
    text = _TORN.sub("\v", _CONTINUED.sub(" ", text))
    words: list[Word] = []
    torn, at = "", 0
    while at <= len(text):
        word, char = _word_at(text, at), text[at : at + 1]
        if word is not None:
            words.append(_word(word[0]))
            if text[at - 1 : at] == "\v" and words[0].text[:1] != "-":
                torn = torn or words[-1].text
            at = word.end()
        elif char == "(" and words and words[-1].raw.endswith("="):  # an array
            words, at = words[:-1], text.find(")", at) + 1 or len(text)
        elif char == "#":
            at = _COMMENT.match(text, at).end()  # type: ignore[union-attr]
        elif char and char in " \t\r\v\\`":
            at += 1
        else:
            ends = char in "\n;&|()"  # or a quotation begins that has no end
            line = text[text.rfind("\n", 0, at) + 1 : _next_line(text, at) - 1]
            if words and ends:
                yield Command(words, torn)
            elif not ends:
                yield Command([], unclosed=line.strip())
            words, torn, at = [], "", at + 1 if ends else _next_line(text, at)


def _word_at(text: str, at: int) -> re.Match[str] | None:
    """The word that begins here; a quotation over several lines only begins in a command."""
    word = _WORD.match(text, at)
    line = text[text.rfind("\n", 0, at) + 1 : _next_line(text, at) - 1]
    return word if word is None or "\n" not in word[0] or _COMMAND.search(line) else None


def _word(raw: str) -> Word:
    try:
        found = shlex.split(raw)
    except ValueError:
        found = []
    return Word(found[0] if len(found) == 1 else raw, raw)


def _next_line(text: str, at: int) -> int:
    return text.find("\n", at) + 1 or len(text) + 1


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
    sets = [match for word in words[:start] if (match := _SETS.match(word.text))]
    owners = [who for one in sets if (who := owner_of(one[2])) and variable(one[2], one[3], who)]
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
    if FLAG.match(text) or not _SWITCH.match(name):
        return not FLAG.match(text)
    return text.lower() in ("true", "false") or text.replace(".", "").isdigit()


def _before(words: Sequence[Word], engine: str) -> Iterator[LaunchPart]:
    """The words up to the server's name, without those that set a variable which is an option
    (`A=1 server`, `docker run -e A=1 --env=A=1 -eA=1 image`), and these options."""
    waiting = list(words)
    while waiting:
        word, setter = waiting.pop(0), None
        if word.text in SETTERS and waiting and ASSIGNED.match(waiting[0].text):
            setter, word = word, waiting.pop(0)
        match = _SETS.match(word.text)
        option = variable(match[2], match[3], engine) if match else None
        if option is not None:
            yield option
        else:
            both = (setter, word) if setter else (word,)
            yield from (LaunchPart(value=one.text, raw=one.raw, role="before") for one in both)


def owner_of(name: str) -> str | None:
    """The engine that a variable is for, by its name; None: of none."""
    known = ((own.variables, engine) for engine, own in ENGINES.items() if own.variables)
    return next((engine for start, engine in known if name.startswith(start)), None)


def variable(name: str, value: str, engine: str) -> LaunchPart | None:
    """A variable of the environment as the option of an engine that it stands for; None: it is not
    known to stand for one, or switches one off."""
    row = find_other("variables", name, engine)
    if row is None or not row.flag:
        return None
    given: str | bool = _DEFAULT.sub(r"\1", value)
    if row.switch and str(given).lower() not in _TRUE:
        return None
    option = row.flag.replace("_", "-")
    given = True if row.switch else given
    return LaunchPart(name=option, written=name, value=given, role="set")


def with_variables(launch: Launch | None, variables: Mapping[str, str]) -> Launch | None:
    """The launch with variables that are set elsewhere, which its own words override; without a
    launch that of the engine that reads them."""
    owners = (launch.engine,) if launch else filter(None, map(owner_of, variables))
    own = next(iter(owners), "")
    given = (variable(name, value, own) for name, value in variables.items())
    found = [one for one in given if one is not None]
    if launch is None:
        return Launch(engine=own, parts=tuple(found)) if found else None
    return launch.having((*found, *launch.parts))
