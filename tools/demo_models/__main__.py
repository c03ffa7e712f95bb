"""`python -m tools.demo_models`, run in the root of the sources: makes `demo` and its drafters.

Owns argument parsing only. Runs are exported by `foretoken train export`, and drafters measured in
the engine by `foretoken train eval`, as all others are.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.app import ForetokenGroup
from foretoken.cli.options import read_text

app = typer.Typer(
    name="python -m tools.demo_models",
    cls=ForetokenGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="The name of a packaged model, or a TOML file.")],
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    target: Annotated[Path | None, typer.Option(help="Of a drafter: the target's folder.")] = None,
) -> None:
    """Train `demo` or one of its drafters; goes on from the folder's newest checkpoint."""
    from tools.demo_models.runs import train

    train(config, out, target, typer.echo)


@app.command()
def measure(
    target: Annotated[Path, typer.Argument(help="The target's exported folder.")],
    draft: Annotated[Path | None, typer.Argument(help="A draft's exported folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the numbers there as JSON.")] = None,
) -> None:
    """Measure `demo` and `demo-draft` for their cards: bits per byte, repetition, agreement."""
    from tools.demo_models.acceptance import evaluate_pair

    text = json.dumps(evaluate_pair(target, draft), indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n")


@app.command()
def card(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    numbers: Annotated[Path, typer.Argument(help="What `measure` (heads: `train eval`) wrote.")],
    to: Annotated[Path, typer.Argument(help="The Markdown file to write.")],
    note: Annotated[list[str] | None, typer.Option(help="A line on how the run was done.")] = None,
    name: Annotated[str | None, typer.Option(help="A head's name; default: the run's.")] = None,
) -> None:
    """Write a model card from a run and its measurements."""
    from foretoken.training.run_folder import newest_state
    from tools.demo_models.card import CardInput, draft_card, head_card, target_card

    measured = json.loads(read_text(numbers, "NUMBERS"))
    given, state = CardInput(run=run, measured=measured, notes=tuple(note or ())), newest_state(run)
    if state.get("head") is not None:
        to.write_text(head_card(given, name or run.name))
    else:
        to.write_text(draft_card(given) if state.get("kind") == "draft" else target_card(given))
    typer.echo(f"wrote {to}")


@app.command()
def pin() -> None:
    """Write the digests of the standard library's files, and of the packages'."""
    from tools.demo_models.manifest import write_manifest, write_packages
    from tools.demo_models.packages import load_packages
    from tools.python_text.stdlib import load_corpus

    typer.echo(f"wrote {write_manifest(load_corpus())}")
    typer.echo(f"wrote {write_packages(load_packages())}")


@app.command()
def requirements() -> None:
    """Print the pinned packages for pip, which needs --no-deps: their text is read, not run."""
    from tools.demo_models.manifest import packages_path

    pinned = json.loads(packages_path().read_text())
    typer.echo("\n".join(f"{name}=={one['version']}" for name, one in pinned.items()))


if __name__ == "__main__":
    app()
