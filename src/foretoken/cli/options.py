"""Options that several subcommands share, and how their text becomes settings.

Knows no subcommand. Every mistake is a ConfigError that names the option.
"""

import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from foretoken.config.auto import AUTO
from foretoken.errors import ConfigError

SPECULATION_EXAMPLE = """a JSON object such as '{"method": "ngram", "num_speculative_tokens": 5}'"""
"""How errors say what `--speculative-config` may be."""

SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help="How to draft, as JSON with vLLM's keys, `auto` or `none`.",
        show_default="auto, where it never changes a token",
    ),
]
DtypeOption = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32.", metavar="TYPE")
]
KVCacheOption = Annotated[
    str, typer.Option("--kv-cache-dtype", help="Keys and values: auto or int8.", metavar="TYPE")
]
InvariantOption = Annotated[
    str,
    typer.Option(
        "--batch-invariant",
        metavar="auto|on|off",
        help="Bitwise the same tokens whatever the batch and the drafts.",
    ),
]
MaxTokensOption = Annotated[int, typer.Option(help="Most tokens to write.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
SeedOption = Annotated[
    int | None, typer.Option(help="Makes sampling repeatable.", show_default=False)
]


def with_parameters(
    given: Iterable[inspect.Parameter],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What makes these parameters of a command out of its `**keywords`, before those of its own
    that are keywords only."""

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)
        kept = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        last = [one for one in kept if one.kind is one.KEYWORD_ONLY]
        first = [one for one in kept if one not in last]
        command.__signature__ = own.replace(parameters=[*first, *given, *last])  # type: ignore[attr-defined]
        return command

    return extend


def parse_speculation(text: str) -> dict[str, Any] | None:
    """The dictionary of `--speculative-config`; None for `none`. Raises ConfigError: it is not a
    JSON object."""
    word = text.strip().lower()
    if word in (AUTO, "none"):
        return {"method": AUTO} if word == AUTO else None
    allowed = f"{SPECULATION_EXAMPLE}, auto or none"
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError("--speculative-config", text, allowed) from error
    if not isinstance(config, dict):
        raise ConfigError("--speculative-config", text, allowed)
    return config


def parse_invariant(text: str) -> bool | str:
    """The value of `--batch-invariant`. Raises ConfigError: it is none of the three."""
    choices: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}
    if text not in choices:
        raise ConfigError("--batch-invariant", text, ", ".join(choices))
    return choices[text]


def read_text(path: Path, option: str) -> str:
    """The text of a file named on the command line. Raises ConfigError: it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(path), f"a readable UTF-8 file ({error})") from error


def read_prompts(path: Path, option: str = "--prompts") -> tuple[str, ...]:
    """Prompts of a file: one per line, or JSON lines with a `prompt` each. Raises ConfigError: the
    file cannot be read, is empty, or has a line without a prompt."""
    lines = [line for line in read_text(path, option).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(option, str(path), "a file with at least one prompt")
    if not (path.suffix == ".jsonl" or lines[0].startswith('{"')):
        return tuple(lines)
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{option} line {number}", line, 'JSON such as {"prompt": "..."}')
        prompts.append(prompt)
    return tuple(prompts)


def write_commands(group: TyperGroup, formatter: Any) -> None:
    """The commands of a group in its help, each with the first paragraph of its own.

    No name is cut, as Typer's tables of rich do in a narrow terminal.
    """
    rows = [
        (name, " ".join((command.help or "").split("\n\n")[0].split()))
        for name, command in group.commands.items()
        if not command.hidden
    ]
    with formatter.section("Commands"):
        formatter.write_dl(rows)
