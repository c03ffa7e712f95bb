"""Which settings of a search load at all, as far as a plan knows: the others are not started.

Asks what `plan` and `lint` ask of a launch; knows no server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from foretoken.errors import ConfigError
from foretoken.lab.findings import Finding
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.fit import Machine, refusal
from foretoken.lab.tune.expected import Expectation
from foretoken.lab.tune.server_command import Commands
from foretoken.lab.tune.settings import OFF, Setting


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The settings that may be started."""

    settings: tuple[Setting, ...]
    said: tuple[str, ...] = ()
    """One sentence for each drafter of which a setting is left out."""


def that_load(
    settings: Sequence[Setting], commands: Commands, machine: Machine, server: str
) -> Loading:
    """The settings whose command loads on a machine; without a device only the models and their
    ranks are looked at.

    Raises:
        ConfigError: the server does not load without speculation, or with none of the settings.
    """
    where = f" on {machine.count} x {machine.device}" if machine.device else ""
    if (plain := _refusal(commands, OFF, machine)) is not None:
        raise ConfigError("SERVER", server, f"a command that loads{where}: {_words(plain)}")
    refused: dict[str, Finding] = {}
    kept = []
    for name in dict.fromkeys(setting.drafter for setting in settings):
        own = [setting for setting in settings if setting.drafter == name]
        # More drafts need more of everything, so where the most load the others do.
        most = max(own, key=lambda setting: max(setting.lengths, default=0))
        if (found := _refusal(commands, most, machine)) is not None:
            refused[name] = found
            own = [one for one in own if one != most and not _refusal(commands, one, machine)]
        kept += own
    if refused and not kept:
        name, found = next(iter(refused.items()))
        raise ConfigError("--drafter", name, f"one that loads{where}: {_words(found)}")
    said = (f"not started with {name}{where}: {_words(found)}" for name, found in refused.items())
    return Loading(settings=tuple(kept), said=tuple(said))


def only_those(hoped: Expectation, loading: Loading) -> Expectation:
    """What is expected of the drafters that may be started, and why others are not."""
    there = {setting.drafter for setting in loading.settings}
    return replace(
        hoped,
        drafters={name: one for name, one in hoped.drafters.items() if name in there},
        gains=tuple(own for own in hoped.gains if own[0] in there),
        said=(*loading.said, *hoped.said),
    )


def _refusal(commands: Commands, setting: Setting, machine: Machine) -> Finding | None:
    launch = next(iter(read_source(commands.to_type(setting)).launches), None)
    return None if launch is None else refusal(launch, machine)


def _words(finding: Finding) -> str:
    return f"{finding.message} ({finding.remedy})" if finding.remedy else finding.message
