"""`foretoken train`: the commands that make models.

Owns argument parsing only; the runs are in `foretoken.training`.
"""

from pathlib import Path
from typing import Annotated

import typer

train_app = typer.Typer(help="Train language models and drafts.", no_args_is_help=True)


@train_app.callback()
def main() -> None:
    """Train language models and drafts."""


@train_app.command()
def lm(
    config: Annotated[str, typer.Argument(help="A TOML file, or demo, or demo-draft.")],
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    target: Annotated[
        Path | None, typer.Option(help="For a draft: the target's folder, in place of CONFIG's.")
    ] = None,
) -> None:
    """Train a language model, or a draft of one; goes on from the folder's newest checkpoint."""
    from foretoken.training.runs import train

    done = train(config, out, target, typer.echo)
    typer.echo(f"done: {done.step} steps, {done.tokens} tokens, {done.seconds / 60:.1f} minutes")


@train_app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, which holds step-*.pt files.")],
    to: Annotated[Path, typer.Argument(help="The folder of the model to write.")],
) -> None:
    """Write the newest checkpoint as a Hugging Face Llama folder in bfloat16."""
    from foretoken.training.export import export as write
    from foretoken.training.export import read_checkpoint

    write(read_checkpoint(run), run, to)
    typer.echo(f"wrote {to}")


@train_app.command()
def evaluate(
    target: Annotated[Path, typer.Argument(help="The target's exported folder.")],
    draft: Annotated[Path | None, typer.Argument(help="A draft's exported folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the numbers there as JSON.")] = None,
) -> None:
    """Measure bits per byte, repetition and acceptance on held-out modules."""
    import json

    from foretoken.training.evaluate import evaluate_pair

    text = json.dumps(evaluate_pair(target, draft), indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n")


@train_app.command()
def card(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    numbers: Annotated[Path, typer.Argument(help="What `evaluate --out` wrote.")],
    to: Annotated[Path, typer.Argument(help="The Markdown file to write.")],
    note: Annotated[list[str] | None, typer.Option(help="A line on how the run was done.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="The card of a draft.")] = False,
) -> None:
    """Write the model card of `demo` or `demo-draft` from a run and its measurements."""
    import json

    from foretoken.training.card import CardInput, draft_card, target_card

    given = CardInput(run=run, measured=json.loads(numbers.read_text()), notes=tuple(note or ()))
    to.write_text(draft_card(given) if draft else target_card(given))
    typer.echo(f"wrote {to}")
