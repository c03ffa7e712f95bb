"""A server's command with another setting: vLLM, SGLang, llama.cpp, Foretoken, or a template.

Takes speculation and the port out of the user's words and writes both anew; everything else stays
as it was typed. Knows how each engine is told, not what is worth telling it.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from foretoken.config.methods import known_methods
from foretoken.errors import ConfigError, one_of
from foretoken.lab.launch.engines import tell
from foretoken.lab.launch.drafting import DraftingSetup
from foretoken.lab.tune.schedules import ranges_of
from foretoken.lab.tune.settings import Schedule, Setting

EXAMPLE = "a command such as 'vllm serve MODEL' or 'foretoken serve demo'"
CONTROL = "auto"
"""The setting in which Foretoken decides by itself."""
CONTROL_MOST = 8
"""Most drafts that control may make with the drafter of the user's command."""
TEMPLATE = "k"
"""The one drafter of a command in which `{k}` stands for the draft length."""
_PORT = ("--port", "-p")
_CONTAINERS = ("docker", "podman", "nerdctl")


@final
@dataclass(frozen=True, slots=True)
class OfferedDrafter:
    """A way of drafting that the server may be given: a method, and the model it drafts with."""

    method: str
    model: str | None = None
    more: tuple[tuple[str, Any], ...] = ()
    """Other keys, as vLLM names them."""
    words: tuple[tuple[str, str], ...] = ()
    """Other flags with their values, as the user's engine has them."""

    @property
    def name(self) -> str:
        """The method, with the last part of the model's name where it has one."""
        return (
            f"{self.method}:{self.model.rstrip('/').rsplit('/', 1)[-1]}"
            if (self.model)
            else self.method
        )

    @classmethod
    def parse(cls, text: str) -> "OfferedDrafter":
        """`METHOD`, `METHOD:MODEL`, or a JSON object with vLLM's keys.

        Raises:
            ConfigError: it is none of them, or the method is not known.
        """
        if text.lstrip().startswith("{"):
            try:
                return cls.of(dict(json.loads(text)))
            except (ValueError, TypeError) as error:
                allowed = "METHOD, METHOD:MODEL, or a JSON object with a method"
                raise ConfigError("--drafter", text, allowed) from error
        method, _, model = text.partition(":")
        return cls.of({"method": method, **({"model": model} if model else {})})

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "OfferedDrafter":
        """From a speculative config; what says how far to draft is left out."""
        names = [method.name for method in known_methods()]
        given = dict(config)
        method = given.pop("method", "draft_model" if given.get("model") else None)
        if method not in names:
            raise ConfigError("--drafter", method, one_of(str(method), names))
        model = given.pop("model", None)
        for key in ("num_speculative_tokens", "num_speculative_tokens_per_batch_size"):
            given.pop(key, None)
        return cls(method, model, tuple(sorted(given.items())))

    def at(self, lengths: Sequence[int], loads: Sequence[int]) -> DraftingSetup:
        """It with these lengths, one for each load or one for all."""
        return DraftingSetup(
            method=self.method,
            model=self.model,
            num_drafts=max(lengths),
            ranges=ranges_of(lengths, loads) if len(lengths) > 1 else (),
            keys=dict(self.more),
            flags=self.words,
        )


Words = list[str]
_LLAMA_MODEL = ("--spec-draft-model", "-md", "--model-draft")
_LLAMA_LENGTH = r"--draft(-n|-max)?$|--spec-draft-n-max$|--spec-ngram-[a-z0-9-]+-size-m$"


def _given_to_llama_cpp(taken: Mapping[str, str]) -> OfferedDrafter | None:
    """The drafter of llama.cpp's flags: a type, a model, and how it is run."""
    model = next((value for flag, value in taken.items() if flag in _LLAMA_MODEL), None)
    kind = taken.get("--spec-type") or ("draft-simple" if model else None)
    method = next(
        (one.name for one in known_methods() if one.plan and one.plan.llama_cpp == kind), None
    )
    if kind is None or method is None:
        return None
    apart = ("--spec-type", *_LLAMA_MODEL)
    more = [
        (flag, value)
        for flag, value in taken.items()
        if flag not in apart and not re.match(_LLAMA_LENGTH, flag)
    ]
    return OfferedDrafter(method, model, words=tuple(more))


_SGLANG_MODEL = "--speculative-draft-model-path"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWords:
    """How one engine is told to speculate."""

    program: str
    """Pattern of the words that start it."""
    taken: str
    """Pattern of flags about speculation, which are written anew."""
    off: tuple[str, ...] = ()
    """What turns it off, where saying nothing does not."""
    fixed: tuple[str, ...] = ()
    """What keeps it to the lengths that it is told."""
    schedule: Schedule = "one"
    """What lengths by load it can be told."""
    switches: str = r"(?!)"
    """Pattern of those flags that have no value."""
    read: Callable[[Mapping[str, str]], OfferedDrafter | None] | None = None
    """The drafter that flags with their values name, where they are no JSON."""


def _given_to_sglang(taken: Mapping[str, str]) -> OfferedDrafter | None:
    """The drafter of SGLang's flags: an algorithm, and a model where it needs one."""
    word = taken.get("--speculative-algorithm", "").upper()
    model = taken.get(_SGLANG_MODEL) or taken.get("--speculative-draft-model")
    own = {"STANDALONE": "draft_model", "NEXTN": "mtp"}.get(word, word.lower())
    known = own in [method.name for method in known_methods()]
    return OfferedDrafter(own, model) if known else None


_JSON_FLAGS = r"--?(speculative[-_]|spec[-_]|num[-_]speculative|sc\b)"
ENGINES: dict[str, EngineWords] = {
    "vllm": EngineWords(
        program=r"(^|[\s/])vllm serve\b|vllm\.entrypoints\.",
        taken=_JSON_FLAGS,
        schedule="falling",
    ),
    "sglang": EngineWords(
        program=r"sglang\.launch_server|(^|[\s/])sglang serve\b",
        taken=r"--speculative-",
        read=_given_to_sglang,
    ),
    "llama.cpp": EngineWords(
        program=r"(^|[\s/])llama-server\b",
        taken=r"--(no-)?spec-|--draft|--model-draft$|-md$|--lookup-cache",
        switches=r"--spec-default$|--(no-)?spec-draft-backend-sampling$",
        read=_given_to_llama_cpp,
    ),
    "foretoken": EngineWords(
        program=r"(^|[\s/])foretoken serve\b",
        taken=_JSON_FLAGS + r"|--(no-)?adaptive-speculation",
        switches=r"--(no-)?adaptive-speculation",
        off=("--speculative-config", "none"),
        fixed=("--no-adaptive-speculation",),
        schedule="any",
    ),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """A user's command, apart from speculation and port."""

    engine: str
    """One of ENGINES, or `template`."""
    words: tuple[str, ...]
    port: str | None
    """As the user had it."""
    given: OfferedDrafter | None = None
    """What the user's command drafts with."""

    @classmethod
    def parse(cls, text: str) -> "ServerCommand":
        """Read a command line.

        Raises:
            ConfigError: it is no command of a known engine, and has no `{k}`.
        """
        if text.startswith(("http://", "https://")):
            allowed = f"{EXAMPLE}: tuning starts the server anew with each setting"
            raise ConfigError("SERVER", text, allowed)
        try:
            words = shlex.split(text.replace("\\\n", " "))
        except ValueError as error:
            raise ConfigError("SERVER", text, f"{EXAMPLE} ({error})") from error
        if words and re.match(r"[A-Za-z_]\w*=", words[0]):
            words.insert(0, "env")  # which sets variables without a shell
        left, port = _without(words, "|".join(f"{name}$" for name in _PORT), r"(?!)")
        placed = [word for word in port if word not in _PORT]
        if "{k}" in text:
            return cls(engine="template", words=tuple(words), port=None)
        line = " ".join(words)
        for name, engine in ENGINES.items():
            if re.search(engine.program, line):
                left, taken = _without(left, engine.taken, engine.switches)
                own = placed[0].partition("=")[2] or placed[0] if placed else None
                return cls(
                    engine=name,
                    words=tuple(left),
                    port=None if own == "{port}" else own,
                    given=_given(taken, engine),
                )
        allowed = f"{EXAMPLE}; or any command with {{k}} for the draft length and {{port}}"
        if words and words[0].rsplit("/", 1)[-1] in _CONTAINERS:
            allowed = (
                f"{EXAMPLE}, run inside the container; from outside `foretoken lab ab` compares "
                f"two '{words[0]} run -p {{port}}:8000 ...' commands"
            )
        raise ConfigError("SERVER", text, allowed)

    @property
    def schedule(self) -> Schedule:
        """What lengths by load the engine can be told."""
        return ENGINES[self.engine].schedule if self.engine in ENGINES else "one"

    @property
    def model(self) -> str | None:
        """The model that a `serve` command names."""
        words = [*self.words, ""]
        for flag in ("--model", "--model-path", "-m"):
            if flag in words:
                return words[words.index(flag) + 1]
        follows = words[words.index("serve") + 1] if "serve" in words else ""
        return follows if follows and not follows.startswith("-") else None

    def line(
        self,
        setting: Setting,
        drafters: Mapping[str, OfferedDrafter],
        loads: Sequence[int],
        port: str | None = None,
    ) -> str:
        """The whole command with a setting; `port` in place of the user's."""
        if self.engine == "template":
            length = str(max(setting.lengths, default=0))
            words = [word.replace("{k}", length) for word in self.words]
            return shlex.join(words).replace("'{port}'", "{port}")
        engine, words = ENGINES[self.engine], list(self.words)
        if setting.is_off:
            words += engine.off
        elif setting.decides_itself:
            # Control may go as far as the longest that is tried otherwise.
            most = self.given.at((CONTROL_MOST,), loads) if self.given else None
            words += tell("foretoken", most).words if most else ["--speculative-config", CONTROL]
        else:
            words += tell(self.engine, drafters[setting.drafter].at(setting.lengths, loads)).words
            words += engine.fixed
        own = port or self.port
        words += ["--port", own] if own else []
        return shlex.join(words).replace("'{port}'", "{port}")


@final
@dataclass(frozen=True, slots=True)
class Commands:
    """The command of any setting."""

    command: ServerCommand
    drafters: Mapping[str, OfferedDrafter]
    loads: tuple[int, ...]

    def to_install(self) -> list[str]:
        """Packages that the engine imports for these drafters and does not bring."""
        plans = [one.plan for one in known_methods() if one.name in self._methods and one.plan]
        return [package for one in plans if (package := one.package(self.command.engine))]

    @property
    def _methods(self) -> set[str]:
        return {one.method for one in self.drafters.values()}

    def to_measure(self, setting: Setting) -> str:
        """With `{port}` in place of the user's port."""
        return self.command.line(setting, self.drafters, self.loads, "{port}")

    def to_type(self, setting: Setting) -> str:
        """As the user would type it."""
        return self.command.line(setting, self.drafters, self.loads)


def _without(words: Sequence[str], flags: str, switches: str) -> tuple[Words, Words]:
    """The words without some flags and their values; and those that were taken out."""
    kept: Words = []
    taken: Words = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name = word.partition("=")[0]
        if not (name.startswith("-") and re.match(flags, name)):
            kept.append(word)
            continue
        taken.append(word)
        if "=" not in word and not re.match(switches, name) and at < len(words):
            if not re.match(r"--?[a-zA-Z]", words[at]):
                taken.append(words[at])
                at += 1
    return kept, taken


def _pairs(taken: Sequence[str]) -> dict[str, str]:
    """Flags with their values; the value of a switch is empty."""
    found: dict[str, str] = {}
    flag = ""
    for word in taken:
        if re.match(r"--?[a-zA-Z]", word):
            flag, _, value = word.partition("=")
            found[flag] = value
        else:
            found[flag] = word
    return found


def _given(taken: Sequence[str], engine: EngineWords) -> OfferedDrafter | None:
    """What a speculative config among these words, or the engine's own flags, draft with."""
    if engine.read is not None:
        return engine.read(_pairs(taken))
    for word in taken:
        text = word.partition("=")[2] if word.startswith("-") else word
        if text.startswith("{"):
            try:
                return OfferedDrafter.of(json.loads(text))
            except (ValueError, TypeError, AttributeError, ConfigError):
                return None
    return None
