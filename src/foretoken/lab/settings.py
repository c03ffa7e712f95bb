"""A command's settings from a YAML file with the command line's options over it.

Knows no command; what a key means is checked by the dataclass it goes to.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from foretoken.errors import ConfigError


def read_yaml(path: Path, option: str) -> Any:
    """The content of a YAML (or JSON) file.

    Raises:
        ConfigError: it cannot be read or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(path), f"a readable file ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(option, str(path), f"valid YAML ({error})") from error


def merge_settings(path: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The file's mapping with every option that is not None over it.

    Raises:
        ConfigError: the file cannot be read or holds no mapping.
    """
    content: Any = {} if path is None else (read_yaml(path, "--config") or {})
    if not isinstance(content, dict):
        raise ConfigError("--config", str(path), "a file of `key: value` lines")
    return {**content, **{key: value for key, value in options.items() if value is not None}}
