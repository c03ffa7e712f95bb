"""What is worth trying on a server: which drafters, and which settings of them load at all.

Where nobody has said: look-ups cost nothing to set up; what the user's command drafts with is what
they came from; a packaged model has drafters of its own. Everything else has to be named.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from foretoken.config.auto import auto_drafters
from foretoken.config.methods import known_methods
from foretoken.errors import ConfigError
from foretoken.lab.launch.drafting import DraftingSetup
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.fit import Machine, why_not_loaded
from foretoken.lab.tune.server_command import CONTROL, TEMPLATE, ServerCommand
from foretoken.lab.tune.settings import OFF, Setting


def offered(command: ServerCommand, named: Sequence[str]) -> dict[str, DraftingSetup]:
    """The drafters to try, by name: those that are named, else those that are there.

    Raises:
        ConfigError: a drafter is named that cannot be.
    """
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


def settings_of(
    command: ServerCommand, drafters: Sequence[str], lengths: Sequence[int]
) -> tuple[Setting, ...]:
    """Every drafter at every length, and Foretoken's own control."""
    own = (Setting(CONTROL),) if command.engine == "foretoken" else ()
    names = (TEMPLATE,) if command.engine == "template" else drafters
    return own + tuple(Setting(name, (length,)) for name in names for length in lengths)


def to_install(engine: str, drafters: Iterable[DraftingSetup]) -> list[str]:
    """Packages that the engine imports for these drafters and does not bring."""
    methods = {one.method for one in drafters}
    plans = [one.plan for one in known_methods() if one.name in methods and one.plan]
    return [package for one in plans if (package := one.package(engine))]


def that_load(
    settings: Sequence[Setting], line: Callable[[Setting], str], server: str
) -> tuple[tuple[Setting, ...], Mapping[str, str]]:
    """The settings whose models fit together, and drafter -> why it is not started; `line` writes
    commands.

    Raises:
        ConfigError: the server does not load without speculation, or with none of the settings.
    """
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
