"""One way to start a server, whatever it was written in: its words, options and variables.

Made by `read` and the writers of engines, given back as text by `write`. Expressions of a script
and variables of a shell are unknown values here: how they stand in the JSON of a command, and come
back in it. Judges nothing.
"""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

JSON_OPTIONS = ("speculative-config", "sc")
SHORT = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
"""vLLM's short options, and the keys of the speculative config that they stand for."""
METHOD_OPTIONS = ("spec-type", "speculative-algorithm")
"""Options of llama.cpp and of SGLang that name methods."""
DRAFT_OPTIONS = (
    *("spec-draft-model", "model-draft", "md", "spec-draft-hf", "hf-repo-draft", "hfd", "hfrd"),
    *("speculative-draft-model-path", "speculative-draft-model"),
)
"""Their options that name a draft model or a head."""
RANKS = ("tensor-parallel-size", "tp", "tp-size")
MODELS = ("model", "m", "model-path", "hf-repo", "hf")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")
"""How a word of a shell begins that sets a variable."""

Role = Literal["argument", "before", "set", "after"]
"""`before`: up to the server's name; `set`: an option that a variable of the environment stands
for; `after`: where the output goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPart:
    """An option or a variable with its value, or a word."""

    name: str = ""
    """Without dashes, `-` between words; empty for a word."""
    written: str = ""
    """The flag, the keyword, the key or the variable as it was written; empty for a word."""
    value: Any = True
    """True: an option without a value."""
    raw: str = ""
    role: Role = "argument"

    @classmethod
    def keyword(cls, key: object, value: Any, raw: str = "") -> Self:
        """A keyword of a call or a key of a document."""
        return cls(name=str(key).replace("_", "-"), written=str(key), value=value, raw=raw)

    @classmethod
    def flag(cls, written: str, value: Any = True) -> Self:
        return cls(name=written.lstrip("-"), written=written, value=value)

    @property
    def words(self) -> list[str]:
        """As words of a command: a variable as the option that it stands for."""
        written = f"--{self.name}" if self.role == "set" else self.written
        found = [written] if written else []
        return found if self.value is True and self.name else [*found, as_text(self.value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One way to start a server."""

    engine: str
    parts: tuple[LaunchPart, ...]
    form: Literal["command", "python", "settings"] = "command"
    """What it was written in; `command`: words, in a shell text, a document or a Dockerfile."""
    holder: str = ""
    """In Python what is called, and what its result is assigned to; `config`: a speculative config
    by itself."""

    def of(self, *roles: Role) -> tuple[LaunchPart, ...]:
        return tuple(part for part in self.parts if part.role in roles)

    @property
    def arguments(self) -> tuple[LaunchPart, ...]:
        return self.of("argument")

    @property
    def words(self) -> tuple[str, ...]:
        """The words of a command from the subcommand's name on."""
        return tuple(word for part in (*self.of("before")[-1:], *self.arguments)
                     for word in part.words)  # fmt: skip

    @property
    def options(self) -> dict[str, str | bool]:
        """Option -> its value as text, True where there is none; variables included."""
        return {
            part.name: part.value if isinstance(part.value, bool) else as_text(part.value)
            for part in self.parts
            if part.name
        }

    @property
    def model(self) -> str | None:
        named = {part.name: part.value for part in self.parts if part.name}
        words = (str(part.value) for part in self.arguments if not part.name)
        found = (named[name] for name in MODELS if isinstance(named.get(name), str))
        return next(found, None) or next(words, None)

    @property
    def speculation(self) -> dict[str, Any]:
        """The speculative config; empty: speculation is off, as far as the text says."""
        return self._speculation()[0]

    @property
    def speculates(self) -> bool:
        options = self.options
        if self.engine == "sglang":
            return "speculative-algorithm" in options
        if self.engine != "llama.cpp":
            return bool(self.speculation) or self.unread
        named = str(options.get("spec-type", "none")) != "none"
        return named or any(name in options for name in (*DRAFT_OPTIONS, "spec-default"))

    @property
    def broken(self) -> str:
        """Why the speculative config could not be read; empty if it could."""
        return self._speculation()[1]

    def _speculation(self) -> tuple[dict[str, Any], str]:
        found: dict[str, Any] = {}
        broken = ""
        for part in self.parts:
            key = part.name.partition(".")[2]
            if part.name in JSON_OPTIONS and part.value not in ("None", "null", "none", "auto"):
                if is_unsaid(part.value):
                    continue
                try:
                    value = part.value
                    value = read_json(value, part.raw) if isinstance(value, str) else value
                    found |= {str(k).replace("-", "_"): v for k, v in dict(value or {}).items()}
                except (ValueError, TypeError) as error:
                    broken = str(error)
            elif in_json(part.name) and key:  # --speculative-config.method ngram
                found[key.replace("-", "_")] = typed(part.value)
            elif part.name in SHORT and self.engine == "vllm":
                found.setdefault(SHORT[part.name], typed(part.value))
        return found, broken

    @property
    def unread(self) -> bool:
        """Whether the speculative config stands elsewhere, in a variable."""
        return any(part.name in JSON_OPTIONS and is_unsaid(part.value) for part in self.parts)

    @property
    def ranks(self) -> int:
        """Devices that the target is split over; 1 where the text does not say it."""
        options = self.options
        return next((number(options[name]) for name in RANKS if name in options), None) or 1

    @property
    def ranks_are_said(self) -> bool:
        """Whether the text says over how many; it does where it leaves the option out."""
        return not any(part.name in RANKS and is_unsaid(part.value) for part in self.parts)

    def without(self, *names: str) -> Self:
        return self.having(part for part in self.parts if part.name not in names)

    def with_value(self, name: str, value: str) -> Self:
        return self.having(
            replace(part, value=value, raw="") if part.name == name else part for part in self.parts
        )

    def having(self, parts: Iterable[LaunchPart]) -> Self:
        return replace(self, parts=tuple(parts))


def in_json(name: str) -> bool:
    """Whether an option holds the speculative config or a key of it."""
    return name.partition(".")[0].replace("_", "-") in JSON_OPTIONS


_REFERENCE = re.compile(r"\$(?:\(\([^()]*\)\)|\([^()]*\)|\{[^{}]*\}|\w+)")
_IN_JSON = re.compile(rf'("(?:[^"\\]|\\.)*")|({_REFERENCE.pattern})')
_MARKED = re.compile(r'"\\u0000((?:[^"\\]|\\.)*)"')
_NUMBERS = (
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "max_model_len",
)
"""Keys whose value is a number, so that a variable in its place has no quotes."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A value that only running the script would tell."""

    source: str

    def __str__(self) -> str:
        return self.source


def is_unsaid(value: object) -> bool:
    """Whether only running tells what a value is."""
    whole = isinstance(value, str) and _REFERENCE.fullmatch(value.strip()) is not None
    return whole or isinstance(value, Expression)


def one_more(value: object) -> object:
    """The number after one that is unsaid, as its language writes it."""
    if isinstance(value, Expression):
        return Expression(f"{value.source} + 1")
    return f"$(({str(value).strip('${}()')} + 1))"


def read_json(text: str, raw: str = "") -> Any:
    """JSON in which variables may stand for numbers; each becomes its name as text. `text` is what
    the program gets, `raw` how it was written: in single quotes a shell fills in nothing. Raises
    ValueError if it is no JSON, whatever the variables are."""
    written = raw or text
    filled = written if written.startswith('"') else re.sub("'[^']*'", "", written)
    if "$" not in filled:
        return json.loads(text)
    return json.loads(_IN_JSON.sub(lambda match: match[1] or json.dumps(match[2]), text))


def json_text(value: Any) -> str:
    """JSON of a value, with variables as they have to stand: numbers without quotes."""
    text = json.dumps(_marked(value), default=lambda one: f"\0{one}")
    return _MARKED.sub(lambda match: match[1], text)


def json_for_shell(value: Any) -> str:
    """The same, quoted for a shell that fills the variables in."""
    return _REFERENCE.sub(lambda match: f"'\"{match[0]}\"'", shlex.quote(json_text(value)))


def _marked(value: Any, *, number: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: _marked(one, number=key in _NUMBERS) for key, one in value.items()}
    if isinstance(value, list):
        return [_marked(one, number=True) for one in value]
    return Expression(value) if number and is_unsaid(value) and isinstance(value, str) else value


def number(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else int(str(value))
    except ValueError:
        return None


def typed(value: Any) -> Any:
    """A text of a command line as the JSON value that it is, if it is one."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def as_text(value: Any) -> str:
    """A value as a word of a command."""
    return json_text(value) if isinstance(value, dict | list) else str(value)
