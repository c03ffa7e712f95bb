"""A drafter of the user's own, found by its dotted path. Knows nothing of what it does."""

import importlib

from foretoken.errors import ConfigError
from foretoken.proposers.base import Proposer, ProposerSettings

_WHERE = "speculative_config.model"


def load_custom(path: str, settings: ProposerSettings) -> Proposer:
    """Import `package.module.Class`, a `Proposer`, and call it with `settings`.

    Raises:
        ConfigError: there is no such module or class, or it is no Proposer.
    """
    module_name, _, class_name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(_WHERE, path, f"an importable module, not {error.name!r}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Proposer)):
        raise ConfigError(_WHERE, path, f"a class of {module_name} that is a foretoken Proposer")
    proposer: object = found(settings)  # type: ignore[call-arg]
    assert isinstance(proposer, Proposer), type(proposer)
    return proposer
