"""Flags of other engines on the command line of `foretoken serve`: taken, or answered.

Picks out of the arguments what the command itself has no option for. What each name means is in
the table of other engines; whether its value is allowed is judged where `LLM` judges it.
"""

import json
from collections.abc import Mapping
from typing import Any, final

import typer
from typer.core import TyperCommand

from foretoken.cli.help import write_panels
from foretoken.config.aliases import ENGINE_KEYS
from foretoken.config.other_engines import find_other
from foretoken.errors import ConfigError, nearest

_OTHER = "foretoken.other_settings"
_SAME = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "sc": "speculative_config",
    "m": "model",
    "model": "model",
}
"""Names whose counterpart is an option or the argument, not a key of speculative_config."""
_DRAFT = "draft"
"""A number of drafts to llama.cpp; a model, as to `foretoken generate` and `chat`."""
_NESTED = ("speculative_config.", "sc.")


def other_settings(context: typer.Context) -> dict[str, Any]:
    """The settings that were given under names of other engines, under the names of `LLM`."""
    found: dict[str, Any] = context.meta.get(_OTHER, {})
    return found


@final
class ServeCommand(TyperCommand):
    """`foretoken serve`: options under headings; flags of other engines are taken or answered."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put aside the flags of other engines, then parse as usual."""
        own = {
            name: getattr(parameter, "is_flag", False)
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }
        args, ctx.meta[_OTHER] = _put_aside(args, own)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options in order of its first one."""
        write_panels(self, ctx, formatter)


def _put_aside(args: list[str], own: Mapping[str, bool]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without other engines' flags, and those as settings.

    Args:
        args: as typed.
        own: the command's own options, and whether each is a switch.
    """
    rest: list[str] = []
    found: dict[str, Any] = {}
    waiting = list(args)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if word == "--":
            return [*rest, word, *waiting], found
        if not flag.startswith("-") or len(flag) < 2 or flag[1].isdigit():
            rest.append(word)
        elif flag in own:
            rest.append(word)
            if not own[flag] and not equals and waiting:
                rest.append(waiting.pop(0))
        else:
            name = flag.lstrip("-").replace("-", "_")
            given: object = True
            if equals:
                given = _typed(value)
            elif not _is_switch(name) and waiting and not waiting[0].startswith("--"):
                given = _typed(waiting.pop(0))
            _add(found, name, flag, given, own)
    return rest, found


def _add(
    found: dict[str, Any], name: str, flag: str, given: object, own: Mapping[str, bool]
) -> None:
    """Add one setting under the name that `LLM` knows it by, or refuse a name nobody has."""
    nested = next((name.removeprefix(head) for head in _NESTED if name.startswith(head)), None)
    if nested is not None:
        found.setdefault("speculative_config", {})[nested] = given
    elif name == _DRAFT and isinstance(given, str):
        found.setdefault("speculative_config", {})["model"] = given
    elif name in _SAME:
        found[_SAME[name]] = given
    elif find_other("flags", name) or find_other("keys", name) or _is_known(name):
        found[name] = given
    elif flag not in ("-h", "--help"):
        near = nearest(flag.lstrip("-"), [option.lstrip("-") for option in own])
        allowed = (
            f"--{near}, or another" if near else "an"
        ) + " option of `foretoken serve --help`"
        allowed += "; `foretoken lab lint 'COMMAND'` reads whole commands of other engines"
        raise ConfigError(flag, given, allowed)


def _is_known(name: str) -> bool:
    return name in ENGINE_KEYS.neutral or name in ENGINE_KEYS.removed


def _is_switch(name: str) -> bool:
    """Whether vLLM has it as a flag without a value."""
    return any(isinstance(value, bool) for value in ENGINE_KEYS.neutral.get(name, ()))


def _typed(text: str) -> object:
    """A number, a truth value or JSON, where the text is one."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
