"""One way to start a server, whatever it was written in, and how a check of it is declared.

Judges nothing. What each engine refuses is data, in `engines.toml` beside this file; the names
that engines have or had are in the configuration's table of other engines.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, Self

from foretoken.config.other_engines import OtherName, find_other
from foretoken.lab.findings import Finding
from foretoken.lab.launch.shell import Word
from foretoken.lab.launch.values import is_unsaid, read_json

ENGINES = ("vllm", "sglang", "llama.cpp", "tensorrt-llm", "foretoken")
JSON_OPTIONS = ("speculative-config", "sc")
SHORT = {
    "spec-method": "method",
    "spec-model": "model",
    "spec-tokens": "num_speculative_tokens",
}
"""vLLM's short options, and the keys of the speculative config that they stand for."""
METHOD_OPTIONS = ("spec-type", "speculative-algorithm")
"""Options of llama.cpp and of SGLang that name methods."""
DRAFT_OPTIONS = (
    "spec-draft-model",
    "model-draft",
    "md",
    "spec-draft-hf",
    "hf-repo-draft",
    "hfd",
    "hfrd",
    "speculative-draft-model-path",
    "speculative-draft-model",
)
"""Their options that name a draft model or a head."""
_RANKS = ("tensor-parallel-size", "tp", "tp-size")
ELSEWHERE = -1
"""The place of a variable that other lines than the command's set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPart:
    """An option with its value, or a word of its own."""

    name: str = ""
    """Without dashes, `-` between words; empty for a word that belongs to no option."""
    written: str = ""
    """The flag, the keyword or the key as it was written; empty for a word."""
    value: Any = True
    """True: an option without a value."""
    raw: str = ""
    """How the value was written; empty for one that was made here."""
    place: int | None = None
    """Of a variable of the environment: which word before the server's name sets it; ELSEWHERE: set
    by other lines. None: no variable."""

    @classmethod
    def keyword(cls, key: object, value: Any, raw: str = "") -> Self:
        """A keyword of a call or a key of a document."""
        return cls(name=str(key).replace("_", "-"), written=str(key), value=value, raw=raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a launch was written in."""

    kind: Literal["shell", "list", "exec", "python", "settings", "variables"] = "shell"
    """`shell`; `list`: words in YAML; `exec`: words in a Dockerfile; `python`; `settings`;
    `variables`: of the environment alone."""
    holder: str = ""
    """The key, the instruction or the function that holds it."""
    elsewhere: int = 0
    """Of words in a list: how many of the leading ones stand under another key."""
    variables: str = ""
    """The key or the instruction that sets variables of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One way to start a server."""

    engine: str
    """One of ENGINES, or `unknown`."""
    parts: tuple[LaunchPart, ...]
    """In the order in which they were written."""
    before: tuple[Word, ...] = ()
    """Words of a command up to the server's name."""
    after: tuple[Word, ...] = ()
    """Where a command's output goes."""
    form: Form = field(default_factory=Form)
    torn: str = ""
    """The first option that a shell would not give it, for want of a backslash before its line."""

    @property
    def arguments(self) -> tuple[LaunchPart, ...]:
        """The parts that are no variables of the environment."""
        return tuple(part for part in self.parts if part.place is None)

    @property
    def options(self) -> dict[str, str | bool]:
        """Option -> its value as text, True where there is none."""
        return {
            part.name: part.value if isinstance(part.value, bool) else _as_text(part.value)
            for part in self.parts
            if part.name
        }

    @property
    def model(self) -> str | None:
        """The name of the target."""
        named = {part.name: part.value for part in self.parts if part.name}
        for name in ("model", "m", "model-path", "hf-repo", "hf"):
            if isinstance(named.get(name), str):
                return str(named[name])
        words = (str(part.value) for part in self.parts if not part.name)
        return next(words, None)

    @property
    def speculation(self) -> dict[str, Any] | None:
        """The speculative config; None: speculation is off, as far as the text says."""
        return self._speculation()[0] or None

    @property
    def broken(self) -> str:
        """Why the speculative config could not be read; empty if it could."""
        return self._speculation()[1]

    def _speculation(self) -> tuple[dict[str, Any], str]:
        found: dict[str, Any] = {}
        broken = ""
        for part in self.parts:
            head, _, key = part.name.partition(".")
            if part.name in JSON_OPTIONS and part.value not in ("None", "null", "none", "auto"):
                if is_unsaid(part.value):
                    continue
                try:
                    value = part.value
                    value = read_json(value, part.raw) if isinstance(value, str) else value
                    found |= {str(k).replace("-", "_"): v for k, v in dict(value or {}).items()}
                except (ValueError, TypeError) as error:
                    broken = str(error)
            elif (
                head.replace("_", "-") in JSON_OPTIONS and key
            ):  # --speculative-config.method ngram
                found[key.replace("-", "_")] = typed(part.value)
            elif part.name in SHORT and self.engine == "vllm":
                found.setdefault(SHORT[part.name], typed(part.value))
        return found, broken

    @property
    def unread(self) -> bool:
        """Whether the speculative config stands elsewhere, in a variable that nothing here sets."""
        return any(part.name in JSON_OPTIONS and is_unsaid(part.value) for part in self.parts)

    @property
    def given_twice(self) -> tuple[str, ...]:
        """vLLM's short options whose key stands in the speculative config's JSON too."""
        if self.engine != "vllm":
            return ()
        whole = next((typed(part.value) for part in self.parts if part.name in JSON_OPTIONS), None)
        keys, given = whole if isinstance(whole, dict) else {}, self.options
        return tuple(name for name, key in SHORT.items() if name in given and key in keys)

    @property
    def ranks(self) -> int:
        """Devices that the target is split over; 1 where the text does not say it."""
        given = (number(self.options[name]) for name in _RANKS if name in self.options)
        return next(given, None) or 1

    @property
    def ranks_are_said(self) -> bool:
        """Whether the text says over how many; it does where it leaves the option out."""
        return not any(part.name in _RANKS and is_unsaid(part.value) for part in self.parts)

    def without(self, *names: str) -> Self:
        """The launch without these options."""
        return replace(self, parts=tuple(p for p in self.parts if p.name not in names))


def in_json(name: str) -> bool:
    """Whether an option holds the speculative config or a key of it."""
    return name.partition(".")[0].replace("_", "-") in JSON_OPTIONS


def typed(value: Any) -> Any:
    """A text of a command line as the JSON value that it is, if it is one."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _as_text(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)


@cache
def engine_table(engine: str) -> dict[str, Any]:
    """What `engine` refuses, its defaults and words; empty for one that nothing is known of."""
    file = resources.files("foretoken.lab.lint").joinpath("engines.toml")
    found: dict[str, Any] = tomllib.loads(file.read_text("utf-8")).get(engine, {})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneValue:
    """What became of a value of an option or key."""

    now: str = ""
    """The value that stands for it; empty: the option goes."""
    remedy: str = ""
    """What to say where `now` is not all."""


def gone_values(engine: str) -> Iterator[tuple[str, str, GoneValue]]:
    """Option or key, its value that `engine` has no more, and what became of it."""
    for option, values in engine_table(engine).get("removed_values", {}).items():
        yield from ((option, value, GoneValue(**record)) for value, record in values.items())


def gone_value(engine: str, option: str, value: object) -> GoneValue | None:
    """What became of one value; None: it is there still, or never was."""
    found = (gone for *given, gone in gone_values(engine) if given == [option, value])
    return next(found, None)


def flag_name(engine: str, option: str) -> OtherName | None:
    """What is known of an option of this engine."""
    return find_other("flags", option.partition(".")[0], engine)


@dataclass(frozen=True, slots=True)
class LaunchCheck:
    """A named check of one launch, and the engines it is for."""

    name: str
    engines: tuple[str, ...]
    run: Callable[[Launch], Iterator[Finding]]


def number(value: object) -> int | None:
    """`value` as an integer, if it is one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return int(str(value))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LintSource:
    """Everything found in a text."""

    launches: tuple[Launch, ...]
    requests: tuple[Mapping[str, Any], ...]
    metrics: tuple[str, ...]
    """Distinct, in order of appearance."""
    num_unread: int = 0
    """Lines of a JSON lines file that are not JSON."""
    findings: tuple[Finding, ...] = ()
    """What is wrong with the text itself, beside its launches."""
    reads_metrics: bool = False
    """Whether metrics are read in Python, where counters have no `_total`."""
