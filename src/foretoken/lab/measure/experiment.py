"""Settings of a run and of an A/B: one YAML file, and dotted overrides from the command line.

Frozen and checked; a field that does not exist is an error. Knows how settings are written, not
what is done with them.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from foretoken.config.reader import at_least, check_fields, require
from foretoken.errors import ConfigError
from foretoken.lab.measure.workload import Load, WorkloadConfig
from foretoken.lab.plain import from_plain

T = TypeVar("T")
SERVER = "a URL such as http://127.0.0.1:8000, or a command with {port} that starts a server"
"""How errors say what an arm may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmConfig:
    """One server: where it is, or how to start it."""

    name: str = ""
    url: str | None = None
    command: str | None = None
    """Started anew for every block; `{port}` becomes a free port."""
    restart_command: str | None = None
    """Shell command that restarts the server at `url` before every block and then ends; `{arm}` and
    `{url}` are filled in. None: all blocks are one start."""
    env: dict[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 600.0
    model: str | None = None
    """None: the first that the server lists."""
    engine: str | None = None
    """None: found out."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; keys are never written down."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        where, given = f"arm {self.name!r}", f"url={self.url!r}, command={self.command!r}"
        one = (self.url is None) != (self.command is None)
        require(where, given, one, f"exactly one of the two: {SERVER}")
        allowed = "none beside a command with {port}, which is started anew for every block"
        fits = self.restart_command is None or self.url is not None
        require(f"{where}: restart_command", self.restart_command, fits, allowed)
        require("timeout_s", self.timeout_s, self.timeout_s > 0, "seconds > 0")

    @property
    def starts_anew(self) -> bool:
        return self.command is not None or self.restart_command is not None

    @property
    def headers(self) -> dict[str, str]:
        """What the server wants with every request: its key, where it has one. Raises ConfigError:
        the variable of `api_key_env` is not set."""
        if not self.api_key_env:
            return {}
        key = os.environ.get(self.api_key_env)
        if key is None:
            allowed = f"an environment variable that is set: export {self.api_key_env}=KEY"
            raise ConfigError(f"arm {self.name!r}: api_key_env", self.api_key_env, allowed)
        return {"authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """What a request must meet to count as good; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def any(self) -> bool:
        return any(v is not None for v in (self.ttft_s, self.tpot_s, self.e2e_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    blocks: Annotated[int, at_least(1)] = 8
    """Starts of each server, at least 3 for an interval."""
    requests_per_block: Annotated[int, at_least(1)] = 30
    warm_up: Annotated[int, at_least(0)] = 4
    """Requests before each block that do not count."""

    def __post_init__(self) -> None:
        check_fields(self, "sizes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AbConfig:
    """`foretoken lab ab`: two servers, or one that is measured by itself."""

    baseline: ArmConfig | None = None
    candidate: ArmConfig | None = None
    workload: WorkloadConfig
    load: Load = field(default_factory=Load)
    sizes: Sizes = field(default_factory=Sizes)
    slo: ServiceLevels = field(default_factory=ServiceLevels)
    seed: int = 0

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if not names:
            raise ConfigError("--candidate", None, SERVER)
        if len(set(names)) < len(names):
            raise ConfigError("candidate.name", names[1], "another than baseline.name")

    def require_two(self) -> None:
        if not self.compared:
            missing = "--baseline" if self.baseline is None else "--candidate"
            raise ConfigError(missing, None, f"a second server to compare with: {SERVER}")

    @property
    def arms(self) -> tuple[ArmConfig, ...]:
        return tuple(arm for arm in (self.baseline, self.candidate) if arm is not None)

    @property
    def compared(self) -> bool:
        return len(self.arms) == 2


def load_settings(
    kind: type[T],
    file: Path | None,
    overrides: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> T:
    """Settings from a YAML file and `a.b=value` overrides, values in YAML. `defaults` are a
    command's own, below the file's; a mapping in them is merged. Between the file and the overrides
    are a command's `options`, values by dotted name. Raises ConfigError: the file cannot be read,
    or a field is unknown or wrong."""
    value: Any = read_yaml(file) if file is not None else {}
    for name, given in (defaults or {}).items():
        own = value.get(name)
        merged = isinstance(given, Mapping) and isinstance(own, dict)
        value[name] = {**given, **own} if merged else (deepcopy(given) if own is None else own)
    for name, given in (options or {}).items():
        _set(value, name, given)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise ConfigError("--set", override, "KEY=VALUE, such as load.concurrency=8")
        _set(value, name, parse_yaml(text, f"--set {name}"))
    return from_plain(kind, value, "settings")


def _set(value: Any, name: str, given: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        value = value.setdefault(part, {})
        if not isinstance(value, dict):
            allowed = f"no key below {part}, which has a value"
            raise ConfigError(f"--set {name}", given, allowed)
    value[last] = given


def read_yaml(path: Path, field: str = "CONFIG") -> Any:
    """The YAML (or JSON) mapping of a file; errors call it `field`. Raises ConfigError: it cannot
    be read, or is not a mapping."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field, str(path), f"a readable YAML file ({error})") from error
    value = parse_yaml(text, f"{field} {path}")
    if not isinstance(value, dict):
        raise ConfigError(field, str(path), "a YAML file of keys and values")
    return value


def parse_yaml(text: str, field: str) -> Any:
    """The value of a YAML text; `on` and `off` are words, as in YAML 1.2. Raises ConfigError: it is
    not YAML."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        """Knows true and false only."""

    kind = "tag:yaml.org,2002:bool"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != kind]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(kind, re.compile(r"^(?:true|false)$", re.IGNORECASE), [*"tTfF"])
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ConfigError(field, text[:80], f"YAML ({why})") from error


def arm_of(text: str, name: str) -> dict[str, Any]:
    """The mapping of an arm given as one word: a URL, a command line, or JSON."""
    if text.lstrip().startswith("{"):
        try:
            return {"name": name, **json.loads(text)}
        except (ValueError, TypeError) as error:
            raise ConfigError(f"arm {name!r}", text, f"{SERVER}, or a JSON object") from error
    key = "url" if text.startswith(("http://", "https://")) else "command"
    return {"name": name, key: text}
