"""`foretoken lab export`: reads how a server is started, prints it in the words of another engine.

A command of Foretoken's is read by the parser that it is for.
"""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab.lint import settings_of_words, text_of
from foretoken.cli.serve import SPECULATION, served, settings_of, speculates_by_default
from foretoken.errors import ConfigError, one_of

if TYPE_CHECKING:
    from foretoken.config import SpeculativeConfig
    from foretoken.lab.launch.write import WrittenCommand

_CONFIG_KEYS = ("method", "drafters", "num_speculative_tokens")
EPILOG = (
    "Exit code: 0: written; 2: it cannot be said there, or CONFIG cannot be read. Example: "
    "foretoken lab export vllm 'foretoken serve MODEL --spec-method ngram'"
)
_ALLOWED = (
    "a speculative config, a file of `foretoken serve --config`, or one server's command, such as "
    "'foretoken serve MODEL', as text in quotes or in a file (shell, Dockerfile, compose, "
    "Kubernetes)"
)


def export(
    context: typer.Context,
    engine: Annotated[str, typer.Argument(help="vllm, sglang, llama.cpp, openvino or foretoken.")],
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A speculative config, settings of `foretoken serve --config`, or a server's "
            "command: a file, `-` for standard input, or the text itself in quotes.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write the command of another engine that serves and drafts the same. What it cannot be told
    stands in comments, or is an error where its outputs would be others. For OpenVINO GenAI it is
    a script."""
    from foretoken.lab.launch.write import EXPORTED_TO

    known = (*EXPORTED_TO, "foretoken")
    if engine not in known:
        raise ConfigError("ENGINE", engine, one_of(engine, known))
    found = _written(context.find_root().command, engine, config)
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


def _written(root: Any, engine: str, given: str) -> "WrittenCommand":
    """The command for an engine that says what a text does."""
    import yaml

    from foretoken.config import SpeculativeConfig
    from foretoken.lab.launch.read import read_source
    from foretoken.lab.launch.write import EXPORTED_FROM, export_launch
    from foretoken.lab.launch.write import export as write
    from foretoken.lab.lint.names import todays

    text = text_of(given, "CONFIG")
    launches, document = read_source(text).launches, None
    with suppress(yaml.YAMLError):
        document = yaml.safe_load(text)
    document = document if isinstance(document, dict) else None
    if len(launches) == 1 and launches[0].engine in EXPORTED_FROM and launches[0].form == "command":
        found = export_launch(engine, todays(launches[0])[0])
        if engine == "foretoken":  # whose own parser says what it does not take
            served(settings_of_words(root, read_source(found.text).launches[0].words))
        return found
    if engine == "foretoken":
        raise ConfigError("CONFIG", given, "the command of a server of another engine")
    if document is not None and any(key in document for key in _CONFIG_KEYS):
        return write(engine, {"model": "MODEL"}, SpeculativeConfig.from_dict(document))
    commands = [
        one.words for one in launches if one.engine == "foretoken" and one.form == "command"
    ]
    if len(commands) == 1:
        return write(engine, *_own(settings_of_words(root, commands[0])))
    if document is not None and not commands and isinstance(document.get("model"), str):
        return write(engine, *_own(settings_of({"config": Path(given)}, {})))
    raise ConfigError("CONFIG", given, _ALLOWED)


def _own(settings: dict[str, Any]) -> "tuple[dict[str, Any], SpeculativeConfig | None]":
    """The options of a server of Foretoken's, the model among them, and how it drafts."""
    from foretoken.config import SpeculativeConfig
    from foretoken.config.aliases import accepted_flags

    config, _ = served(settings)
    speculation = config.speculative_config
    if speculates_by_default(settings, config):
        speculation = SpeculativeConfig.from_dict({"method": "auto"}, target=config.model)
    about_drafts = (*SPECULATION, *accepted_flags())
    given = {name: value for name, value in settings.items() if value not in ((), [])}
    kept = {name: value for name, value in given.items() if name not in about_drafts}
    return kept, speculation
