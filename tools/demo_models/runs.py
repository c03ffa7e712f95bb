"""One entry for every packaged model: the language model, its draft, its heads.

Owns that choice. It knows no step of training.
"""

from collections.abc import Callable
from pathlib import Path

from foretoken.training.loop import Progress
from foretoken.training.ranks import joined
from tools.demo_models.distill import build_draft_job
from tools.demo_models.heads import build_head_job
from tools.demo_models.lm import train_language_model
from tools.demo_models.pool import train_on_target
from tools.demo_models.recipe import read_recipe

Report = Callable[[str], None]


def train(config: str | Path, out: Path | None, target: Path | None, report: Report) -> Progress:
    """Run `config`, a TOML file or the name of a packaged model's, to the end of its budget.

    Goes on from the newest checkpoint in the run's folder, `out`. `target` replaces the config's.
    Raises ConfigError for a wrong config.
    """
    recipe = read_recipe(config, target)
    with joined() as ranks:
        told = report if ranks.leads else _nothing
        if recipe.settings.kind == "lm":
            done = train_language_model(recipe, out, told, ranks)
        else:
            build = build_draft_job if recipe.settings.head is None else build_head_job
            done = train_on_target(recipe, out, told, build, ranks)
        told(f"done: {done.step} steps, {done.tokens} tokens, {done.seconds / 60:.1f} minutes")
    return done


def _nothing(_: str) -> None:
    """Ranks but the first say nothing."""
