"""One entry for every kind of run: heads, drafts distilled from a target, language models.

Owns that choice. It knows no step of training.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from foretoken.errors import ConfigError
from foretoken.training.distill import build_job
from foretoken.training.heads.build import build_head_job
from foretoken.training.lm import train_language_model
from foretoken.training.loop import Progress
from foretoken.training.own.job import train_own_head
from foretoken.training.pool import train_on_target
from foretoken.training.settings import read_settings


def train(
    config: str | Path,
    out: Path | None,
    target: Path | None,
    report: Callable[[str], None],
    kind: str | None = None,
) -> Progress:
    """Run `config` (a TOML file or the name of a packaged one) to the end of its budget.

    Goes on from the newest checkpoint in the run's folder, `out`. `target` replaces the config's.
    Raises ConfigError for a wrong config, or one that trains something else than `kind`.
    """
    settings = read_settings(config)
    if target is not None:
        settings = replace(settings, target=str(target))
    if kind is not None and settings.kind != kind:
        raise ConfigError("CONFIG", f"{config} trains {settings.kind!r}", f"a config of {kind!r}")
    if settings.head is not None and settings.data is not None:
        return train_own_head(settings, out, report)
    if settings.head is not None:
        return train_on_target(settings, out, report, build_head_job)
    if settings.target is None:
        return train_language_model(settings, out, report)
    return train_on_target(settings, out, report, build_job)
