"""Every exception that Foretoken raises on purpose, as one tree.

    ForetokenError                 exit 1  HTTP 500
    +-- EngineLostError            exit 1  HTTP 503  the engine has ended; nothing more can be run
    |   +-- RankLostError          exit 1  HTTP 503  a process that shared its work is gone or stuck
    +-- TrainingError              exit 1  HTTP 500  a run cannot go on; its checkpoints are intact
    +-- EndpointError              exit 5  HTTP 502  a measured server that is not there, or broke
    +-- MissingPackageError        exit 2  HTTP 501  an extra of the installation that is not there
    +-- ConfigError                exit 2  HTTP 400  a setting of the engine or of a command
    |   +-- NotYetError            exit 2  HTTP 501  a known setting whose part is not built yet
    +-- RequestError               exit 2  HTTP 400  one request is wrong; its neighbours go on
    |   +-- ParameterError         exit 2  HTTP 400  a sampling parameter
    |   +-- PromptError            exit 2  HTTP 400  an empty or invalid prompt
    |   |   +-- ContextError       exit 2  HTTP 400  a prompt that is longer than the context
    |   +-- CapacityError          exit 2  HTTP 413  a request that can never fit the KV cache
    +-- ModelError                 exit 3  HTTP 500  something on disk is not what it should be
        +-- ModelNotFoundError     exit 3  HTTP 404
        +-- CheckpointError        exit 3  HTTP 500  missing, unused, truncated or misshapen tensors
        +-- UnsupportedModelError  exit 3  HTTP 501
        +-- TokenizerError         exit 3  HTTP 500

User mistakes carry three facts: the field, what was given, and what is allowed; where that is a
list of words, the message names the nearest one. Broken invariants are not here: they are `assert`s
with both numbers.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

_WORDS = re.compile(r"[\w./-]+(, [\w./-]+)+")


class ForetokenError(Exception):
    """Base of the tree; `exit_code` and `http_status` say how each face of the package answers."""

    exit_code = 1
    http_status = 500


class EngineLostError(ForetokenError):
    """The engine's thread has ended, by request or by an error; nothing more can be run."""

    http_status = 503


class RankLostError(EngineLostError):
    """A process of a group left, died, or was not there in time; the others cannot go on."""


class TrainingError(ForetokenError):
    """A training run cannot go on: no memory, or a loss that is no number."""


class EndpointError(ForetokenError):
    """A server that the lab measures cannot be started or reached, or is not OpenAI-style."""

    exit_code = 5
    http_status = 502


class MissingPackageError(ForetokenError):
    """A package that only a part of Foretoken needs is not installed; the message says how to."""

    exit_code = 2
    http_status = 501

    def __init__(self, what: str, package: str, extra: str) -> None:
        """Say `what` needs the `package`, and which `extra` of the installation brings it."""
        super().__init__(
            f'{what} needs {package}, which is not installed: pip install "foretoken[{extra}]"'
        )


class _FieldError(ForetokenError):
    """A user mistake about one named field."""

    def __init__(self, field: str, given: object, allowed: str) -> None:
        """Name the `field`, what was `given` (shown by repr) and what is `allowed` (prose)."""
        self.field = field
        self.given = given
        self.allowed = allowed
        if isinstance(given, str) and _WORDS.fullmatch(allowed):
            allowed = one_of(given, allowed.split(", "))
        super().__init__(f"{field}: got {shown(given)}; allowed: {allowed}")


def one_of(given: object, words: Iterable[str]) -> str:
    """The words that are allowed, as a message lists them, and the one nearest to `given`."""
    known = tuple(words)
    near = nearest(given, known)
    return ", ".join(known) + (f"; did you mean {near!r}?" if near else "")


def nearest(given: object, words: Iterable[str]) -> str | None:
    """The word that `given` was probably meant to be, if there is one."""
    close = difflib.get_close_matches(given[:100], words, n=1) if isinstance(given, str) else []
    return close[0] if close else None


def shown(given: object) -> str:
    """What was given, shortened; an integer of thousands of digits, for one, has no repr."""
    try:
        text = repr(given)
    except Exception:  # noqa: BLE001 - a value that cannot be shown must not hide the mistake
        text = f"a value of type {type(given).__name__}"
    return text if len(text) <= 200 else text[:197] + "..."


class ConfigError(_FieldError):
    """A setting of the engine, of a drafter or of a command is wrong."""

    exit_code = 2
    http_status = 400


class NotYetError(ConfigError):
    """A setting that is understood, but whose part of Foretoken is not built yet."""

    http_status = 501


class RequestError(_FieldError):
    """One request is wrong. Other requests of the same batch go on."""

    exit_code = 2
    http_status = 400


class ParameterError(RequestError):
    """A sampling parameter is out of its range."""


class PromptError(RequestError):
    """A prompt is empty, of the wrong type, or has token ids out of range."""


class ContextError(PromptError):
    """A prompt leaves no room in the context of the model, or is longer than the server takes."""


class CapacityError(RequestError):
    """A single request needs more KV cache than there is in total."""

    http_status = 413


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Within, errors about requests name fields as the user has typed them.

    Args:
        names: from our name of a field, with all that it contains, to the user's.
    """
    try:
        yield
    except RequestError as error:
        inner = next((one for one in names if f"{error.field}.".startswith(f"{one}.")), None)
        if inner is None:
            raise
        field = (names[inner] + error.field.removeprefix(inner)).removeprefix(".")
        raise type(error)(field, error.given, error.allowed) from error


class ModelError(_FieldError):
    """Something about a model on disk is not what it should be."""

    exit_code = 3


class ModelNotFoundError(ModelError):
    """No packaged model, folder or hub id of that name."""

    http_status = 404


class CheckpointError(ModelError):
    """Tensors are missing, unused, truncated, or have the wrong shape."""


class UnsupportedModelError(ModelError):
    """An architecture or a feature of one that Foretoken does not run."""

    http_status = 501


class TokenizerError(ModelError):
    """The tokenizer is missing or cannot be read."""


@contextmanager
def about_file(name: str) -> Iterator[None]:
    """Within, errors about models and settings name this file, unless they do so already."""
    try:
        yield
    except (ModelError, ConfigError) as error:
        if name in str(error):
            raise
        raise type(error)(f"{name}: {error.field}", error.given, error.allowed) from error
