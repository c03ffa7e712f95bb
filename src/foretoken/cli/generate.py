"""`foretoken generate`: one prompt, streamed, every token in the colour of its source."""

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from foretoken.cli.options import MaxTokensOption, read_text, with_parameters
from foretoken.cli.writing import (
    WRITING,
    Screen,
    TimedText,
    describe_acceptance,
    describe_speed,
    loaded,
    sampling_of,
    write_plain,
)
from foretoken.errors import ConfigError


@with_parameters(WRITING)
def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A GGUF file, folder, packaged name or hub id, before PROMPT."
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The text to continue; left out or `-`: standard input."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")
    ] = None,
    named_model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="The same as MODEL, beside a prompt.", show_default="demo"
        ),
    ] = None,
    max_tokens: MaxTokensOption = 128,
    **others: Any,
) -> None:
    """Continue a prompt.

    MODEL may stand before the prompt. One word alone is the prompt, unless it is a GGUF file or a
    folder with a model: then the prompt comes from standard input or --file.

    On a terminal each token has the colour of its source, and two lines say what speculation
    brought. Piped, the continuation alone is written.

    It speculates unless told otherwise, with whatever there is for the model.
    """
    words = _words(model, prompt, named_model)
    text = _read_prompt(words, file)
    params = sampling_of({"max_tokens": max_tokens, **others})
    with loaded(words.model or "demo", others) as (llm, seconds):
        if not sys.stdout.isatty():
            write_plain(TimedText().follow(llm.stream(text, params)))
            return
        screen = Screen(llm)
        screen.legend()
        screen.say(text, end="")
        answer = TimedText()
        screen.show(answer.follow(llm.stream(text, params)))
        screen.say(f"\n{describe_speed([answer])}, model loaded in {seconds:.1f} s")
        screen.say(describe_acceptance([answer]) or "no drafts")


class _Words(NamedTuple):
    """What stands on the command line beside options."""

    model: str | None
    prompt: str | None


def _words(first: str | None, second: str | None, option: str | None) -> _Words:
    if second is None and (first is None or option is not None or not _is_model(first)):
        return _Words(option, first)
    if option is not None:
        raise ConfigError("MODEL", first, f"nothing beside --model {option}")
    return _Words(first, second)


def _is_model(word: str) -> bool:
    """Whether a word alone is a model: one that is here, or a file that is meant to be."""
    if word.endswith(".gguf") and len(word.split()) == 1:
        return True
    try:
        path = Path(word).expanduser()
        if word.endswith(".gguf"):
            return path.is_file()
        return bool(word) and ((path / "config.json").is_file() or any(path.glob("*.gguf")))
    except (OSError, ValueError, RuntimeError):  # most prompts are no paths
        return False


def _read_prompt(words: _Words, file: Path | None) -> str:
    if file is not None:
        if words.prompt is not None:
            allowed = "nothing beside --file but a model here; others are named by --model"
            raise ConfigError("PROMPT", words.prompt, allowed)
        return read_text(file, "--file")
    if words.prompt is not None and words.prompt != "-":
        return words.prompt
    if words.prompt is None and sys.stdin.isatty():
        allowed = "a prompt, --file, or text on standard input"
        if words.model is not None:
            allowed += f"; `foretoken chat {words.model}` talks to it"
        raise ConfigError("PROMPT", None, allowed)
    return sys.stdin.read()
