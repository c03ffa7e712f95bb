"""What is worth trying on a server, where nobody has said.

Look-ups cost nothing to set up; what the user's command drafts with is what they came from; a
packaged model has drafters of its own. Everything else has to be named. What a plan expects of
them, and adds, is in `expected`.
"""

from collections.abc import Mapping, Sequence

from foretoken.config.auto import auto_drafters
from foretoken.errors import ConfigError
from foretoken.lab.launch.drafting import DraftingSetup
from foretoken.lab.tune.server_command import CONTROL, TEMPLATE, ServerCommand
from foretoken.lab.tune.settings import Setting

LENGTHS = (1, 2, 3, 5, 8)
_LOOKUP = DraftingSetup("ngram")


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
        found += _packaged(command) if command.engine == "foretoken" else [_LOOKUP]
    by_name: dict[str, DraftingSetup] = {}
    for one in found:
        by_name.setdefault(one.name, one)  # the user's own, with the user's own words
    return by_name


def only_looks_up(drafters: Mapping[str, DraftingSetup]) -> bool:
    """Whether nothing with weights is among them, so that naming one may find more."""
    return bool(drafters) and all(one.model is None for one in drafters.values())


def _packaged(command: ServerCommand) -> list[DraftingSetup]:
    """A look-up, and the drafter with weights that ships for the model and promises most."""
    drafters = auto_drafters(command.model)
    with_weights = [one for one in drafters if one.model]
    return [_LOOKUP] + [DraftingSetup(one.method, str(one.model)) for one in with_weights[:1]]


def settings_of(
    command: ServerCommand,
    drafters: Sequence[str],
    lengths: Sequence[int],
    more: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Setting, ...]:
    """Every drafter at every length, those of `more` for it included, and Foretoken's own
    control."""
    if command.engine == "template":
        return tuple(Setting(TEMPLATE, (length,)) for length in lengths)
    own = (Setting(CONTROL),) if command.engine == "foretoken" else ()
    return own + tuple(
        Setting(drafter, (length,))
        for drafter in drafters
        for length in sorted({*lengths, *(more or {}).get(drafter, ())})
    )
