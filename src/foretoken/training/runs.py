"""One entry for every kind of run: heads, drafts distilled from a target, language models.

Owns that choice. It knows no step of training.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from foretoken.errors import ConfigError
from foretoken.training.distill import build_job
from foretoken.training.heads.build import build_head_job
from foretoken.training.heads.export import export_run
from foretoken.training.heads.layouts import require_form
from foretoken.training.lm import train_language_model
from foretoken.training.loop import Progress, run_folder
from foretoken.training.own.job import store_own_states, train_own_head
from foretoken.training.pool import train_on_target
from foretoken.training.ranks import Ranks, joined
from foretoken.training.settings import Settings, read_settings


def train(
    config: str | Path,
    out: Path | None,
    target: Path | None,
    report: Callable[[str], None],
    kind: str | None = None,
    export: str | None = None,
) -> Progress:
    """Run `config` (a TOML file or the name of a packaged one) to the end of its budget.

    Goes on from the newest checkpoint in the run's folder, `out`. `target` replaces the config's.
    `export` names a format in which the model is written to the folder `export` of the run's.
    Raises ConfigError for a wrong config, or one that trains something else than `kind`.

    Under torchrun all its processes train one model: rank 0 reports and writes the files.
    """
    settings = _settings(config, target)
    if kind is not None and settings.kind != kind:
        raise ConfigError("CONFIG", f"{config} trains {settings.kind!r}", f"a config of {kind!r}")
    require_form(settings.kind, export)
    with joined() as ranks:
        told = report if ranks.leads else _nothing
        done = _run(settings, out, told, ranks)
        if export is not None and ranks.leads:
            folder = run_folder(settings, out)
            verifier = settings.target or settings.name
            export_run(folder, folder / "export", verifier=verifier, form=export)
            told(f"wrote {folder / 'export'}")
        told(f"done: {done.step} steps, {done.tokens} tokens, {done.seconds / 60:.1f} minutes")
    return done


def _nothing(_: str) -> None:
    """Ranks but the first say nothing."""


def _run(
    settings: Settings, out: Path | None, report: Callable[[str], None], ranks: Ranks
) -> Progress:
    if settings.head is not None and settings.data is not None:
        return train_own_head(settings, out, report, ranks)
    if settings.head is not None:
        return train_on_target(settings, out, report, build_head_job, ranks)
    if settings.target is None:
        return train_language_model(settings, out, report, ranks)
    return train_on_target(settings, out, report, build_job, ranks)


def store_states(
    config: str | Path,
    out: Path | None,
    target: Path | None,
    report: Callable[[str], None],
    *,
    only_estimate: bool = False,
) -> None:
    """Write the hidden states that a head's run on data of one's own will read, and no step.

    `only_estimate`: report how many bytes they take, and write nothing. Raises ConfigError for a
    config without a head and data, or where the disk is too small.
    """
    settings = _settings(config, target)
    if settings.head is None or settings.data is None:
        raise ConfigError("CONFIG", str(config), "a config with [head] and [data]")
    store_own_states(settings, out, report, only_estimate=only_estimate)


def _settings(config: str | Path, target: Path | None) -> Settings:
    settings = read_settings(config)
    return settings if target is None else replace(settings, target=str(target))
