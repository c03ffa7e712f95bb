"""From a TOML file to the settings of a run.

Owns what a mistake is called: the table and key, what was given, what is allowed. It knows no key.
"""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from foretoken.config.reader import read, require
from foretoken.errors import ConfigError
from foretoken.training.schedule import Stage
from foretoken.training.settings import (
    DataSettings,
    HeadSettings,
    LlamaShape,
    Settings,
    StateSettings,
)

Table = TypeVar("Table")
CONFIG = (
    "a TOML file, as docs/training.md shows one (the packaged models are made in the root of the "
    "sources: python -m tools.demo_models train NAME)"
)


def read_settings(path: str | Path) -> Settings:
    """The settings that the TOML file at `path` gives.

    Raises ConfigError for a missing file, an unknown key or a value that cannot be.
    """
    return build_settings(read_table(path))


def read_table(path: str | Path) -> dict[str, Any]:
    """The keys and tables of a TOML file; `name` is the file's own where it gives none.

    Raises ConfigError for a missing file, or one that is no TOML.
    """
    file = Path(path)
    require("CONFIG", str(path), file.is_file(), CONFIG)
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("CONFIG", str(file), f"a valid TOML file ({error})") from error
    table.setdefault("name", file.stem)
    return table


def build_settings(table: dict[str, Any]) -> Settings:
    """The settings of a config's keys and tables.

    Raises ConfigError for an unknown key or a value that cannot be.
    """
    table["shape"] = _table(LlamaShape, table.get("shape", {}), "shape")
    if "head" in table:
        table["head"] = _table(HeadSettings, table["head"], "head")
    if "data" in table:
        require("data", table["data"], "head" in table, "a table beside [head] only")
        table["data"] = _table(DataSettings, table["data"], "data")
    if "states" in table:
        require("states", table["states"], "data" in table, "a table beside [data] only")
        table["states"] = _table(StateSettings, table["states"], "states")
    stages = table.get("stages", [{"until": 1.0, "length": 512}])
    require("stages", stages, isinstance(stages, list), "tables, each under [[stages]]")
    table["stages"] = tuple(_table(Stage, stage, "stages") for stage in stages)
    given = table.get("decay_share")
    fine = given is None or table.get("schedule", "wsd") == "wsd"
    require("decay_share", given, fine, "no key: only schedule wsd decays over a share")
    settings = _table(Settings, table, "config")
    _check_text(settings)
    return settings


def _table(kind: type[Table], table: Any, where: str) -> Table:
    """A table of TOML as its class of settings."""
    require(where, table, isinstance(table, dict), f"a table, [{where}]")
    found: Table = read(kind, table, where)
    return found


def _check_text(settings: Settings) -> None:
    """Text that no stage reads is a mistake."""
    if settings.data is not None and settings.data.text is not None:
        used = any(stage.rows == "text" for stage in settings.stages)
        require("data.text", settings.data.text, used, 'no key without a stage of rows = "text"')
