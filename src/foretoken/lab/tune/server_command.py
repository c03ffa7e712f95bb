"""A server's command with another setting, and what is worth trying on it: of any engine that is
started so, or a template.

Takes speculation and the port out of the user's words and writes both anew; everything else stays
as it was typed. How each engine is told is the writer's of launches. Where nobody has named a
drafter, these are tried: look-ups, which cost nothing to set up; what the user's command drafts
with; a packaged model's own.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from foretoken.config.auto import auto_drafters
from foretoken.config.method_registry import known_methods
from foretoken.errors import ConfigError
from foretoken.lab.launch.engines import ENGINES, DraftingSetup, Schedule, given, tell
from foretoken.lab.launch.launch import ASSIGNED, LaunchPart
from foretoken.lab.launch.read import Word, engine_of_image, read_source, read_words
from foretoken.lab.launch.write import words_of
from foretoken.lab.lint.fit import Machine, why_not_loaded
from foretoken.lab.plan.method_plans import find_plan
from foretoken.lab.tune.settings import OFF, Setting, ranges_of

EXAMPLE = "a command such as 'vllm serve MODEL' or 'foretoken serve demo'"
CONTROL = "auto"
CONTROL_MOST = 8
"""Most drafts that control may make with the drafter of the user's command."""
TEMPLATE = "k"
"""The one drafter of a command in which `{k}` stands for the draft length."""
_PORTS = ("port", "p")
_CONTAINERS = ("docker", "podman", "nerdctl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """A user's command, apart from speculation and port."""

    engine: str
    words: tuple[str, ...]
    port: str | None = None
    model: str | None = None
    given: DraftingSetup | None = None
    """What the user's command drafts with."""

    @classmethod
    def parse(cls, text: str) -> "ServerCommand":
        """Read a command line. Raises ConfigError: it is no command of a known engine, and has no
        `{k}`."""
        if text.startswith(("http://", "https://")):
            allowed = f"{EXAMPLE}: tuning starts the server anew with each setting"
            raise ConfigError("SERVER", text, allowed)
        try:
            words = shlex.split(text.replace("\\\n", " "))
        except ValueError as error:
            raise ConfigError("SERVER", text, f"{EXAMPLE} ({error})") from error
        if words and ASSIGNED.match(words[0]):
            words.insert(0, "env")  # which sets variables without a shell
        if "{k}" in text:
            return cls(engine="template", words=tuple(words))
        launch = read_words([Word(word) for word in words])
        image = launch is None or engine_of_image(str(launch.of("before")[-1].value))
        if words and words[0].rsplit("/", 1)[-1] in _CONTAINERS and image:
            allowed = (
                f"{EXAMPLE}, run inside the container; from outside `foretoken lab ab` compares "
                f"two '{words[0]} run -p {{port}}:8000 ...' commands"
            )
            raise ConfigError("SERVER", text, allowed)
        if launch is None or not ENGINES[launch.engine].tell:
            allowed = f"{EXAMPLE}; or any command with {{k}} for the draft length and {{port}}"
            raise ConfigError("SERVER", text, allowed)
        engine = ENGINES[launch.engine]
        port = next((part.value for part in launch.arguments if part.name in _PORTS), None)
        kept: list[LaunchPart] = []
        for part in launch.parts:
            taken = part.name in _PORTS or re.match(engine.drafting, part.name)
            kept += [] if taken and part.role == "argument" else [part]
        return cls(
            engine=launch.engine,
            words=tuple(words_of(launch.having(kept))),
            port=None if port in (None, True, "{port}") else str(port),
            model=launch.model,
            given=given(launch),
        )

    @property
    def schedule(self) -> Schedule:
        return ENGINES[self.engine].schedule if self.engine in ENGINES else "one"

    def line(
        self,
        setting: Setting,
        drafters: Mapping[str, DraftingSetup],
        loads: Sequence[int],
        port: str | None = None,
    ) -> str:
        """The whole command with a setting; `port` in place of the user's."""
        if self.engine == "template":
            length = str(max(setting.lengths, default=0))
            return _joined([word.replace("{k}", length) for word in self.words])
        engine, words = ENGINES[self.engine], list(self.words)
        drafting = None
        if setting.is_off:
            words += engine.off
        elif setting.decides_itself and self.given is None:
            words += ["--speculative-config", CONTROL]
        elif setting.decides_itself and self.given is not None:
            # Control may go as far as the longest that is tried otherwise.
            drafting = replace(self.given, num_drafts=CONTROL_MOST)
        else:
            lengths, drafter = setting.lengths, drafters[setting.drafter]
            ranges = ranges_of(lengths, loads) if len(lengths) > 1 else ()
            drafting = replace(drafter, num_drafts=max(lengths), ranges=ranges)
        if drafting is not None:
            told = tell(self.engine, drafting)
            words += [word for part in told if isinstance(part, LaunchPart) for word in part.words]
        if setting.lengths:
            words += engine.fixed
        own = port or self.port
        return _joined([*words, *(["--port", own] if own else [])])


def _joined(words: Sequence[str]) -> str:
    return shlex.join(words).replace("'{port}'", "{port}")


def offered(command: ServerCommand, named: Sequence[str]) -> dict[str, DraftingSetup]:
    """The drafters to try, by name: those that are named, else those that are there. Raises
    ConfigError: a drafter is named that cannot be."""
    if command.engine == "template":
        if named:
            allowed = "none beside a command with {k}, which names its drafter itself"
            raise ConfigError("--drafter", named[0], allowed)
        return {}
    found = [DraftingSetup.parse(text) for text in named]
    if not found:
        found = [command.given] if command.given else []
        found.append(DraftingSetup("ngram"))
        if command.engine == "foretoken":
            with_weights = (one for one in auto_drafters(command.model) if one.model)
            found += [DraftingSetup(one.method, str(one.model)) for one in with_weights][:1]
    by_name: dict[str, DraftingSetup] = {}
    for one in found:
        by_name.setdefault(one.name, one)  # the user's own, with the user's own words
    return by_name


def packages_of(engine: str, drafters: Mapping[str, DraftingSetup]) -> list[str]:
    """Packages that an engine imports for these drafters and does not bring."""
    methods = {one.method for one in drafters.values()}
    plans = (find_plan(one) for one in known_methods() if one.name in methods)
    return [package for one in plans if one and (package := one.package(engine))]


def settings_of(
    command: ServerCommand, drafters: Sequence[str], lengths: Sequence[int]
) -> tuple[Setting, ...]:
    """Every drafter at every length, and Foretoken's own control."""
    own = (Setting(CONTROL),) if command.engine == "foretoken" else ()
    names = (TEMPLATE,) if command.engine == "template" else drafters
    return own + tuple(Setting(name, (length,)) for name in names for length in lengths)


def that_load(
    settings: Sequence[Setting], line: Callable[[Setting], str], server: str
) -> tuple[tuple[Setting, ...], Mapping[str, str]]:
    """The settings whose models fit together, and drafter -> why it is not started; `line` writes
    commands. Raises ConfigError: the server does not load without speculation, or with none of the
    settings."""
    if plain := _refusal(line, OFF):
        raise ConfigError("SERVER", server, f"a command that loads: {plain}")
    one_each = {setting.drafter: setting for setting in settings}  # lengths do not matter here
    found = {name: _refusal(line, setting) for name, setting in one_each.items()}
    refused = {name: why for name, why in found.items() if why}
    kept = tuple(setting for setting in settings if setting.drafter not in refused)
    if refused and not kept:
        name, why = next(iter(refused.items()))
        raise ConfigError("--drafter", name, f"one that loads: {why}")
    return kept, refused


def _refusal(line: Callable[[Setting], str], setting: Setting) -> str:
    """Why the command of a setting does not load, as far as is known without starting it."""
    launch = next(iter(read_source(line(setting)).launches), None)
    found = None if launch is None else why_not_loaded(launch, Machine())
    if found is None:
        return ""
    return f"{found.message} ({found.remedy})" if found.remedy else found.message
