"""How a server is to draft, and how each engine is started and told so.

A `DraftingSetup` is what is wanted, whoever drafts. A `LaunchEngine` is what is known of one: how
it is started, and its writer, which gives parts of a launch, and an `Unsaid` for everything that
has no place in them. How engines are started is in `engines.toml`, what they call options and keys
in `options.toml`; one without a row has nothing that stands for it, which is said, never passed
over.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Self

from foretoken.config.drafter import drafter_keys
from foretoken.config.method_registry import DraftingMethod, NgramSettings, known_methods
from foretoken.config.other_engines import find_other, other_names
from foretoken.config.reader import defaults_of
from foretoken.config.speculative import GENERAL_KEYS
from foretoken.errors import ConfigError, one_of
from foretoken.lab.launch.launch import (
    DRAFT_OPTIONS,
    METHOD_OPTIONS,
    SHORT,
    Launch,
    LaunchPart,
    in_json,
    number,
    typed,
)
from foretoken.lab.plain import read_table

MOST_RUNNING = 4096
"""Where the last range of a schedule ends."""
Ranges = tuple[tuple[int, int, int], ...]
"""(first, last, drafts) of running requests, from 1 on."""
Schedule = Literal["any", "falling", "one"]
"""What lengths by load an engine can be told: any, none longer than at a lower load, or one."""
BY_LOAD = "num_speculative_tokens_per_batch_size"
LENGTHS = ("num_speculative_tokens", BY_LOAD)


@dataclass(frozen=True, slots=True)
class DraftingSetup:
    """One drafter, and how far it drafts."""

    method: str
    model: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[tuple[str, str], ...] = ()
    """Flags of the engine itself with their values (empty: a switch), as somebody gave them."""
    num_drafts: int = 0
    """Draft tokens per verification; the most, where `ranges` says more; 0: not decided."""
    ranges: Ranges = ()
    ranges_key: str = BY_LOAD
    """The key that said so."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """`METHOD`, `METHOD:MODEL`, or a JSON object with vLLM's keys; what they say of how far to
        draft is left out. Raises ConfigError if it is none of them, or the method is not known."""
        method, _, model = text.partition(":")
        config: dict[str, Any] = {"method": method, **({"model": model} if model else {})}
        if text.lstrip().startswith("{"):
            try:
                config = dict(json.loads(text))
            except (ValueError, TypeError) as error:
                allowed = "METHOD, METHOD:MODEL, or a JSON object with a method"
                raise ConfigError("--drafter", text, allowed) from error
        names = [one.name for one in known_methods()]
        keys = {name: value for name, value in config.items() if name not in LENGTHS}
        method = keys.pop("method", "draft_model" if keys.get("model") else None)
        if method not in names:
            raise ConfigError("--drafter", method, one_of(str(method), names))
        return cls(method, keys.pop("model", None), keys)

    @property
    def name(self) -> str:
        """The method, with the last part of the model's name where it has one."""
        last = (self.model or "").rstrip("/").rsplit("/", 1)[-1]
        return f"{self.method}:{last}" if last else self.method

    @property
    def known(self) -> DraftingMethod:
        return next(method for method in known_methods() if method.name == self.method)

    def as_keys(self) -> dict[str, Any]:
        found: dict[str, Any] = {"method": self.method}
        found |= {"model": self.model} if self.model else {}
        found |= {"num_speculative_tokens": self.num_drafts, **self.keys}
        if self.ranges:
            found[BY_LOAD] = [list(one) for one in self.ranges]
        return found


@dataclass(frozen=True, slots=True)
class Unsaid:
    """Something that an engine is not told."""

    name: str
    why: str


Told = Iterator[LaunchPart | Unsaid]
"""Parts of a launch, and what has no place in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEngine:
    """How one engine is started, and how it is told to draft."""

    name: str
    title: str = ""
    """As people write it."""
    program: tuple[str, ...] = ()
    model_flag: str = ""
    """What its model stands behind; empty: it is a word by itself."""
    programs: tuple[str, ...] = ()
    """Programs that start it; one with a space is followed by that word."""
    module: str = ""
    """How the Python module begins that starts it."""
    images: tuple[str, ...] = ()
    variables: str = ""
    """How the variables of the environment begin that it reads."""
    completed: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of options that people type, which argparse completes."""
    drafting: str = r"(?!)"
    """Pattern of the names of options about drafting."""
    off: tuple[str, ...] = ()
    """What turns drafting off, where saying nothing does not."""
    fixed: tuple[str, ...] = ()
    """What keeps it to the lengths that it is told."""
    schedule: Schedule = "one"
    word: Callable[[DraftingMethod], str] = lambda _: ""
    """Its word for a method; empty: it has none."""
    tell: Callable[[DraftingSetup], Told] | None = None
    """None: no commands are written for it."""


@cache
def _facts() -> dict[str, dict[str, Any]]:
    return {
        engine: {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        for engine, row in read_table("foretoken.lab.launch", "engines.toml").items()
    }


NAMES = {engine: row["title"] for engine, row in _facts().items() if "title" in row}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRow:
    """What an engine calls an option or a key, and its values: a row of the table."""

    to: Sequence[str] = ()
    """Its flags or its key, which all get the value."""
    values: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    variable: Mapping[str, str] = field(default_factory=dict)
    by_itself: Sequence[str] = ()
    many: str = ""
    why: str = ""
    also: str = ""
    refused: Sequence[str] = ()


@cache
def _rows(kind: str, engine: str) -> dict[str, OptionRow]:
    table = read_table("foretoken.lab.launch", "options.toml")[kind]
    rows = {name: own.get(engine, own.get("others")) for name, own in table.items()}
    found: dict[str, OptionRow] = {}
    for name, row in rows.items():
        given = {"to": row} if isinstance(row, str) else dict(row or {})
        if isinstance(given.get("to"), str):
            given["to"] = (given["to"],)
        found |= {name: OptionRow(**given)} if row is not None else {}
    return found


def option_for(engine: str, part: LaunchPart, kind: str) -> tuple[str, Any] | None:
    """What we call an option of an engine, and its value; None: we have none. `kind` is `options`
    of a server, or `keys` of a drafter."""
    for name, row in _rows(kind, engine).items():
        if f"--{part.name}" in row.to:
            ours = (own for own, theirs in row.values.items() if theirs == part.value)
            return name, next(ours, typed(part.value))
        for value, switches in row.switches.items():
            if [f"--{part.name}"] == list(switches):
                return name, typed(value)
    return None


def told_option(engine: str, name: str, value: Any) -> Told:
    """An option of `foretoken serve` in the words of an engine. Raises ConfigError if it has
    nothing like this value, and would write something else."""
    flag = name.replace("_", "-")
    if engine != "foretoken":
        yield from _told(engine, _rows("options", engine).get(name), name, value)
    elif isinstance(value, bool):
        yield LaunchPart.flag(f"--{flag}" if value else f"--no-{flag}")
    else:
        values = value if isinstance(value, list | tuple) else [value]
        yield from (LaunchPart.flag(f"--{flag}", one) for one in values)


def told_keys(engine: str, keys: Mapping[str, Any]) -> Told:
    """Keys of a speculative config in the words of another engine. Raises ConfigError if it has
    nothing like a value, and would write something else."""
    for name, value in keys.items():
        row = _rows("keys", engine).get(name)
        if row is None and engine == "vllm":
            known = find_other("keys", name, engine)
            ours = name in GENERAL_KEYS | drafter_keys().keys()
            # A key that neither table has is newer than both, and its giver's to know.
            row = OptionRow(to=(name,)) if (not known.gone if known else not ours) else None
        yield from _told(engine, row, name, value)


def _told(engine: str, row: OptionRow | None, name: str, value: Any) -> Told:
    text, whose = str(value).lower() if isinstance(value, bool) else str(value), NAMES[engine]
    row = row or OptionRow()
    told = row.values.get(text, value)
    if text in row.refused:
        allowed = f"another value: {whose} has nothing like it, and its outputs would be others"
        raise ConfigError(name, value, allowed)
    if text in row.by_itself:
        return
    if text in row.switches:
        yield from map(LaunchPart.flag, row.switches[text])
    elif text in row.variable:
        yield LaunchPart(value=row.variable[text], role="before")
    elif not row.to or told == "":
        yield Unsaid(name, row.why or f"{whose} has nothing that stands for it")
        return
    else:
        several = isinstance(told, list | tuple) and row.to[0].startswith("-")
        for flag in row.to:
            if several and row.many == " ":
                yield LaunchPart.flag(flag, told[0])
                yield from (LaunchPart(value=one) for one in told[1:])
            elif several:
                yield LaunchPart.flag(flag, row.many.join(map(str, told)) if row.many else told[0])
            else:
                yield LaunchPart.flag(flag, told)
        if several and told[1:] and not row.many:
            yield Unsaid(name, f"{whose} has one, the first")
    if row.also:
        yield Unsaid(name, row.also)


def todays_word(engine: str, method: DraftingMethod) -> str:
    """An engine's word for a method, by the table of other engines; empty: it has none."""
    words = (
        row.name
        for row in other_names()
        if (row.engine, row.kind, row.method) == (engine, "methods", method.name) and not row.gone
    )
    return next(words, "")


def told_word(engine: str, flag: str, word: str, method: DraftingMethod) -> Told:
    """An engine's word for a method, and that it means another, where there is none for this."""
    yield LaunchPart.flag(flag, word)
    if todays_word(engine, method) != word:
        why = f"{NAMES[engine]} has no {method.name}; {word} is the closest that it has"
        yield Unsaid("method", why)


def _vllm_word(method: DraftingMethod) -> str:
    name = "draft_model" if method.name == "parallel" else method.name
    row = find_other("methods", name, "vllm")
    return name if row is not None and not row.gone else ""


def _tell_vllm(drafting: DraftingSetup) -> Told:
    found: dict[str, Any] = {"method": _vllm_word(drafting.known)}
    found |= {"model": drafting.model} if drafting.model else {}
    found["num_speculative_tokens"] = drafting.num_drafts
    keys = dict(drafting.keys)
    if drafting.method == "parallel":
        keys["parallel_drafting"] = True
    if drafting.known.settings is NgramSettings:
        keys = defaults_of(NgramSettings) | keys  # vLLM's own look for five tokens in a row
    told = list(told_keys("vllm", keys))
    found |= {part.name: part.value for part in told if isinstance(part, LaunchPart)}
    drafts = [count for _, _, count in drafting.ranges]
    falls = drafts == sorted(drafts, reverse=True)
    if drafts and falls:
        found[BY_LOAD] = [list(one) for one in drafting.ranges]
    yield LaunchPart.flag("--speculative-config", found)
    yield from (one for one in told if isinstance(one, Unsaid))
    if not falls:
        why = "vLLM's lengths may only fall as the load rises; its longest is written"
        yield Unsaid(drafting.ranges_key, why)


def _sglang_word(method: DraftingMethod) -> str:
    looks_up = method.drafts_with == "text" and method.is_built
    return todays_word("sglang", method) or ("NGRAM" if looks_up else "")  # its one look-up


def _tell_sglang(drafting: DraftingSetup) -> Told:
    method, count, keys = drafting.known, drafting.num_drafts, dict(drafting.keys)
    word = _sglang_word(method)
    yield from told_word("sglang", "--speculative-algorithm", word, method)
    if drafting.model:
        yield LaunchPart.flag("--speculative-draft-model-path", drafting.model)
    if method.drafts_with != "text" and not method.in_one_pass:
        yield LaunchPart.flag("--speculative-num-steps", keys.pop("tree_depth", count))
        yield LaunchPart.flag("--speculative-eagle-topk", keys.pop("tree_top_k", 1))
    if word == "DSPARK":
        yield LaunchPart.flag("--speculative-dspark-block-size", count)
    else:  # it counts the root
        yield LaunchPart.flag("--speculative-num-draft-tokens", count + 1)
    yield from (LaunchPart.flag(flag, value or True) for flag, value in drafting.flags)
    yield from told_keys("sglang", keys)


def _llama_word(method: DraftingMethod) -> str:
    closest = "ngram-map-k" if method.name == "suffix" else ""  # which it has not
    return todays_word("llama.cpp", method) or closest


def _tell_llama(drafting: DraftingSetup) -> Told:
    word, given, keys = _llama_word(drafting.known), dict(drafting.flags), dict(drafting.keys)
    yield from told_word("llama.cpp", "--spec-type", word, drafting.known)
    # Each look-up has a flag for its length, and drafts 48 tokens at a time without it.
    flag = "--spec-draft-n-max" if word.startswith("draft-") else f"--spec-{word}-size-m"
    yield LaunchPart.flag(flag, str(drafting.num_drafts))
    if drafting.model:
        yield LaunchPart.flag("--spec-draft-model", drafting.model)
    if drafting.known.drafts_with == "text":
        # Its own default looks for twelve tokens in a row, which text hardly ever repeats.
        shortest = keys.pop("prompt_lookup_min", NgramSettings().prompt_lookup_min)
        given = {f"--spec-{word}-size-n": str(shortest)} | given
    yield from (LaunchPart.flag(flag, value or True) for flag, value in given.items())
    yield from told_keys("llama.cpp", keys)


_WRITERS: dict[str, dict[str, Any]] = {
    "vllm": {"word": _vllm_word, "tell": _tell_vllm},
    "sglang": {"word": _sglang_word, "tell": _tell_sglang},
    "llama.cpp": {"word": _llama_word, "tell": _tell_llama},
    "foretoken": {
        "word": lambda method: method.name if method.is_built else "",
        "tell": lambda it: iter([LaunchPart.flag("--speculative-config", it.as_keys())]),
    },
    "tensorrt-llm": {"word": lambda method: todays_word("tensorrt-llm", method)},
}
ENGINES = {
    name: LaunchEngine(name=name, **row, **_WRITERS.get(name, {})) for name, row in _facts().items()
}
READ = tuple(name for name, one in ENGINES.items() if one.programs)
_LENGTHS = re.compile(
    r"(draft(-n|-max)?|spec-draft-n-max|spec-ngram-[a-z0-9-]+-size-m)$|"
    r"speculative-(num-steps|num-draft-tokens|(dspark|dflash)-block-size)$"
)


def refusal(engine: str, method: DraftingMethod) -> str:
    """Why an engine does not draft so; empty if it does."""
    if ENGINES[engine].word(method):
        return ""
    row = find_other("methods", method.name, engine)
    if engine == "vllm" and row is not None and row.gone:
        return f"not with vllm: {row.why}"
    return f"{engine} does not draft with {method.name}"


def tell(engine: str, drafting: DraftingSetup) -> Told:
    """How an engine is told to draft. Raises ConfigError if it has no such method."""
    if refused := refusal(engine, drafting.known):
        raise ConfigError("speculative_config.method", drafting.method, f"another: {refused}")
    own = ENGINES[engine]
    assert own.tell is not None, "only for engines that commands are written for"
    told = [*own.tell(drafting)]
    if own.schedule == "one" and drafting.ranges:
        why = f"{NAMES[engine]} drafts equally far at every load; its longest is written"
        told.append(Unsaid(drafting.ranges_key, why))
    return iter(told)


def given(launch: Launch) -> DraftingSetup | None:
    """What a launch drafts with, as far as it says, 0 drafts where it does not say how many; None
    where nothing drafts, or with a method that is not known here."""
    engine, config, options = ENGINES[launch.engine], dict(launch.speculation), launch.options
    model = next((options[name] for name in DRAFT_OPTIONS if name in options), None)
    model = config.pop("model", None) or config.pop("speculative_model", None) or model
    word = config.pop("method", None) or config.pop("decoding_type", None)
    word = word or next((options[name] for name in METHOD_OPTIONS if name in options), None)
    row = find_other("methods", word, launch.engine)
    method = (row.method or row.name) if row else word or ("draft_model" if model else None)
    named = [one for one in known_methods() if method in (one.name, engine.word(one))]
    if not named:
        return None
    flags = [
        (part.written, "" if part.value is True else str(part.value))
        for part in launch.arguments
        if launch.engine == "llama.cpp" and re.match(engine.drafting, part.name)
        if not is_told(launch, part)
    ]
    keys = {name: value for name, value in config.items() if name not in LENGTHS}
    # The last token is among what is verified, and in a block of DFlash.
    verified = number(options.get("speculative-num-draft-tokens"))
    verified = verified or number(options.get("speculative-dflash-block-size"))
    said = [
        number(launch.speculation.get("num_speculative_tokens")),
        number(config.get("max_draft_len")),
        verified - 1 if verified else None,
        number(options.get("speculative-dspark-block-size")),
        None if named[0].in_one_pass else number(options.get("speculative-num-steps")),
    ]
    if launch.engine == "llama.cpp":
        said = [number(value) for name, value in options.items() if _LENGTHS.match(name)]
    count = min(max(next((one for one in said if one), 0), 0), 128)
    return DraftingSetup(named[0].name, str(model) if model else None, keys, tuple(flags), count)


def is_told(launch: Launch, part: LaunchPart) -> bool:
    """Whether an option says the method, the model or the length of drafts, or holds all keys."""
    apart = (*METHOD_OPTIONS, *DRAFT_OPTIONS)
    is_key = in_json(part.name) or (launch.engine == "vllm" and part.name in SHORT)
    return is_key or part.name in apart or bool(_LENGTHS.match(part.name))
