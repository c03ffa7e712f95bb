"""`foretoken lab export`: reads what Foretoken serves, prints it in the words of another engine.

A command is read by the parser that it is for.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab.lint import settings_of_words, text_of
from foretoken.cli.serve import SPECULATION, served, settings_of, speculates_by_default
from foretoken.errors import ConfigError, one_of

if TYPE_CHECKING:
    from foretoken.config import SpeculativeConfig

_CONFIG_KEYS = ("method", "drafters", "num_speculative_tokens")
_UNNAMED = "MODEL"
EPILOG = (
    "Exit code: 0: written; 2: it cannot be said there, or CONFIG cannot be read. Example: "
    "foretoken lab export vllm 'foretoken serve MODEL --spec-method ngram'"
)
_ALLOWED = (
    "a speculative config, a file of `foretoken serve --config`, or one `foretoken serve` command, "
    "as text in quotes or in a file (shell, Dockerfile, compose, Kubernetes)"
)


def export(
    context: typer.Context,
    engine: Annotated[str, typer.Argument(help="vllm, sglang, llama.cpp or openvino.")],
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A speculative config, settings of `foretoken serve --config`, or a `foretoken "
            "serve` command: a file, `-` for standard input, or the text itself in quotes.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write the command of another engine that serves and drafts the same, for those who serve
    elsewhere. What it cannot be told stands in comments, or is an error where its outputs would be
    others. For OpenVINO GenAI it is a script."""
    from foretoken.lab.launch.export import EXPORTED_TO
    from foretoken.lab.launch.export import export as write

    if engine not in EXPORTED_TO:
        raise ConfigError("ENGINE", engine, one_of(engine, EXPORTED_TO))
    settings, speculation = _read(context.find_root().command, config)
    found = write(engine, settings, speculation)
    if as_json:
        document = {
            "command": "foretoken lab export",
            "engine": engine,
            "text": found.text,
            "unsaid": [asdict(one) for one in found.unsaid],
        }
        print(json.dumps(document))
    else:
        print(found.commented)


def _read(root: Any, words: str) -> "tuple[dict[str, Any], SpeculativeConfig | None]":
    """The options that a text gives a server, the model among them, and how it drafts."""
    from foretoken.config import SpeculativeConfig
    from foretoken.config.aliases import accepted_flags

    text = text_of(words, "CONFIG")
    document = _mapping(text)
    if document is not None and any(key in document for key in _CONFIG_KEYS):
        return {"model": _UNNAMED}, SpeculativeConfig.from_dict(document)
    settings = _settings(root, words, text, document)
    config, _ = served(settings)
    speculation = config.speculative_config
    if speculates_by_default(settings, config):
        speculation = SpeculativeConfig.from_dict({"method": "auto"}, target=config.model)
    about_drafts = (*SPECULATION, *accepted_flags())
    given = {name: value for name, value in settings.items() if value not in ((), [])}
    kept = {name: value for name, value in given.items() if name not in about_drafts}
    return kept, speculation


def _settings(
    root: Any, given: str, text: str, document: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The settings of a file of `--config`, or of the one command in a text.

    Raises:
        ConfigError: there is none, or more than one.
    """
    from foretoken.lab.launch.sources import read_source

    launches = [one for one in read_source(text).launches if one.engine == "foretoken"]
    commands = [one.words for one in launches if one.form.is_command]
    if len(commands) == 1:
        return settings_of_words(root, commands[0])
    if document is not None and not commands and isinstance(document.get("model"), str):
        return settings_of({"config": Path(given)}, {})
    raise ConfigError("CONFIG", given, _ALLOWED)


def _mapping(text: str) -> Mapping[str, Any] | None:
    """The mapping that a JSON or YAML text is; None if it is something else."""
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return found if isinstance(found, dict) else None
