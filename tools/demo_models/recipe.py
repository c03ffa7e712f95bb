"""How a packaged model is made: a training config with the keys that only these models have.

Owns those keys, their defaults and checks, and the configs that ship beside this file. All other
keys are those of `foretoken.training.settings`. Invariant: a recipe that exists is usable as it is.
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from foretoken.config.reader import require
from foretoken.training.settings import Settings, build_settings, read_table
from tools.demo_models.batches import Mix

CONFIGS = Path(__file__).parent / "configs"
OWN = ("on_policy_share", "pool_tokens", "pool_rows", "loaders")
"""Keys of a recipe that are no others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One run: its settings, the mix of its text, and the part of it that the target wrote.

    Raises:
        ConfigError: a share that is none, or a number out of range.
    """

    settings: Settings
    mix: Mix = Mix()
    on_policy_share: float = 0.5
    """Rows of the target's own samples, of all rows."""
    pool_tokens: int = 0
    """How many tokens the target samples before the first step,"""
    pool_rows: int = 96
    """in so many rows at once."""
    loaders: int = 0
    """Processes that make rows before they are needed, at most one a core; 0: made when needed."""

    def __post_init__(self) -> None:
        """Check the shares and the numbers."""
        shares = {
            "edit_share": self.mix.edit_share,
            "repeat_share": self.mix.repeat_share,
            "test_share": self.mix.test_share,
            "package_share": self.mix.package_share,
            "test_share + package_share": self.mix.test_share + self.mix.package_share,
            "on_policy_share": self.on_policy_share,
        }
        for name, share in shares.items():
            require(name, share, 0 <= share <= 1, "0..1")
        counts = (("pool_tokens", 0), ("pool_rows", 1), ("loaders", 0))
        for name, least in counts:
            require(name, getattr(self, name), getattr(self, name) >= least, f">= {least}")

    def as_record(self) -> dict[str, Any]:
        """All keys of the config with their values, for JSON."""
        given = {name: getattr(self, name) for name in OWN}
        return {**asdict(self.settings), **asdict(self.mix), **given}


def read_recipe(config: str | Path, target: Path | None = None) -> Recipe:
    """The recipe in a TOML file, or one of CONFIGS by its bare name (`demo`, `demo-draft`).

    `target` replaces the config's. Raises ConfigError for a missing file, an unknown key or a
    number out of range.
    """
    known = CONFIGS / f"{config}.toml"
    table = read_table(known if known.is_file() and not Path(config).is_file() else config)
    mixed = {field.name for field in fields(Mix)}
    mix = Mix(**{key: table.pop(key) for key in mixed & table.keys()})
    own = {key: table.pop(key) for key in OWN if key in table}
    settings = build_settings(table)
    if target is not None:
        settings = replace(settings, target=str(target))
    return Recipe(settings=settings, mix=mix, **own)
