"""`foretoken lab export`: reads how a server is started, prints it in the words of another engine.

A command of Foretoken's is read by the parser that it is for. With costs learnt from runs, how far
it drafts at which load is theirs, and the files that say it to the engine are written.
"""

import json
import re
import shlex
from collections.abc import Collection, Sequence
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
    from foretoken.lab.analysis.cost_model import Measured
    from foretoken.lab.launch.write import LearntCosts, WrittenCommand

_CONFIG_KEYS = ("method", "drafters", "num_speculative_tokens")
EPILOG = (
    "Exit code: 0: written; 2: it cannot be said there, or CONFIG or RUN cannot be read. Examples: "
    "foretoken lab export vllm 'foretoken serve MODEL --spec-method ngram'; "
    "foretoken lab export sglang --costs run --out files"
)
_ALLOWED = (
    "a speculative config, a file of `foretoken serve --config`, or one server's command, such as "
    "'foretoken serve MODEL', as text in quotes or in a file (shell, Dockerfile, compose, "
    "Kubernetes)"
)


def export(
    context: typer.Context,
    engine: Annotated[
        str,
        typer.Argument(
            help="vllm, sglang, llama.cpp or foretoken; with --costs vllm, sglang, llama.cpp or "
            "tensorrt-llm."
        ),
    ],
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="A speculative config, settings of `foretoken serve --config`, or a server's "
            "command: a file, `-` for standard input, or the text itself in quotes. With --costs "
            "the candidate's command is the default.",
        ),
    ] = None,
    *,
    costs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="Draft as far as pays by these runs of `lab ab`, at two loads or more, such as "
            "--grid k=1,3,5 --grid concurrency=1,8; several times.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder of the files that --costs writes.")
    ] = Path("lab-export"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write the command of another engine that serves and drafts the same. What it cannot be told
    stands in comments, or is an error where its outputs would be others.

    With --costs the lengths are those that pay at each load, by what steps cost in the runs: the
    batch schedule of vLLM, the adaptive file or the cost table of SGLang, the schedule or the cost
    table of TensorRT-LLM, the best length and the least chance of llama.cpp. The last line is the
    A/B that proves it.
    """
    from foretoken.lab.launch.cost_files import WRITTEN_WITH_COSTS
    from foretoken.lab.launch.write import EXPORTED
    from foretoken.lab.records.run_files import write_text

    known = WRITTEN_WITH_COSTS if costs else (*EXPORTED, "foretoken")
    if engine not in known:
        beside = "--costs RUN beside it, or " if engine in WRITTEN_WITH_COSTS else ""
        raise ConfigError("ENGINE", engine, f"{beside}{one_of(engine, known)}")
    runs, learnt = _learnt(costs or [], out)
    found = _written(context.find_root().command, engine, config or _of_runs(runs), learnt)
    for name, text in found.files.items():
        write_text(out / name, text)
    left_off = any(one.name == "speculation" for one in found.unsaid)
    proof = _proof_of(found.text, engine, runs) if runs and not left_off else ""
    if as_json:
        costs_told = {"costs": asdict(learnt.costs) if learnt else None, "proof": proof}
        print(json.dumps({"command": "foretoken lab export", "engine": engine, **costs_told,
                          **_plain(found)}))  # fmt: skip
    else:
        print("\n".join(filter(None, (found.commented, proof and f"# to prove it: {proof}"))))


def _plain(found: "WrittenCommand") -> dict[str, Any]:
    unsaid = [asdict(one) for one in found.unsaid]
    return {"text": found.text, "unsaid": unsaid, "files": dict(found.files)}


def _learnt(folders: list[Path], out: Path) -> "tuple[list[Measured], LearntCosts | None]":
    from foretoken.lab.analysis.cost_model import by_length, learn
    from foretoken.lab.decide.overall import read_runs
    from foretoken.lab.decide.ship_policy import load_policy
    from foretoken.lab.launch.write import LearntCosts

    runs: list[Measured] = [
        (run.summary, *run.answers) for run in read_runs(folders, load_policy(None))
    ]
    return runs, LearntCosts(learn(by_length(runs)), out) if runs else None


def _of_runs(runs: "Sequence[Measured]") -> str:
    """The candidate's command. Raises ConfigError: there are no runs, or it was a URL."""
    from foretoken.lab.analysis.cost_model import server_of

    found = server_of(runs[0][0], "candidate") if runs else ""
    if not found or found.startswith(("http://", "https://")):
        allowed = _ALLOWED if not runs else f"{_ALLOWED}; the runs have a URL only"
        raise ConfigError("CONFIG", None, allowed)
    return found


def _proof_of(text: str, engine: str, runs: "Sequence[Measured]") -> str:
    """The A/B of what was written against no speculation, at the loads of the runs."""
    from foretoken.lab.analysis.cost_model import server_of
    from foretoken.lab.launch.read import read_source

    summary, off = runs[0][0], server_of(runs[0][0], "baseline")
    own = [one.engine for one in read_source(off).launches] == [engine]
    workload = (summary.config.get("workload") or {}).get("file") or "prompts.txt"
    settings = [one.config.get("load") or {} for one, *_ in runs]
    loads = {int(one["concurrency"]) for one in settings if one.get("kind") == "closed"}
    return proof_by(str(workload), off if own else "the same without speculation", text, loads)


def proof_by(workload: str, off: str, text: str, loads: Collection[int]) -> str:
    words = ["foretoken", "lab", "ab", "--workload", workload, "--baseline", _with_port(off)]
    words += ["--candidate", _with_port(text)]
    at = ",".join(map(str, sorted(loads)))
    return shlex.join([*words, *(("--grid", f"concurrency={at}") if at else ())])


def _with_port(text: str) -> str:
    """A command on one line, with `{port}` for its port."""
    line = text.replace("\\\n ", "").replace("  ", " ")
    anew = re.sub(r"(--port[ =])\S+", r"\1{port}", line)
    return anew if "{port}" in anew else f"{anew} --port {{port}}"


def _written(
    root: Any, engine: str, given: str, learnt: "LearntCosts | None" = None
) -> "WrittenCommand":
    """The command for an engine that says what a text does."""
    import yaml

    from foretoken.config import SpeculativeConfig
    from foretoken.lab.launch.read import read_source
    from foretoken.lab.launch.write import EXPORTED, export_launch
    from foretoken.lab.launch.write import export as write
    from foretoken.lab.lint.names import todays

    text = text_of(given, "CONFIG")
    launches, document = read_source(text).launches, None
    with suppress(yaml.YAMLError):
        document = yaml.safe_load(text)
    document = document if isinstance(document, dict) else None
    if len(launches) == 1 and launches[0].engine in EXPORTED and launches[0].form == "command":
        found = export_launch(engine, todays(launches[0])[0], learnt)
        if engine == "foretoken":  # whose own parser says what it does not take
            served(settings_of_words(root, read_source(found.text).launches[0].words))
        return found
    if engine == "foretoken":
        raise ConfigError("CONFIG", given, "the command of a server of another engine")
    if document is not None and any(key in document for key in _CONFIG_KEYS):
        return write(engine, {"model": "MODEL"}, SpeculativeConfig.from_dict(document), learnt)
    commands = [
        one.words for one in launches if one.engine == "foretoken" and one.form == "command"
    ]
    if len(commands) == 1:
        return write(engine, *_own(settings_of_words(root, commands[0])), learnt)
    if document is not None and not commands and isinstance(document.get("model"), str):
        return write(engine, *_own(settings_of({"config": Path(given)}, {})), learnt)
    raise ConfigError("CONFIG", given, _ALLOWED)


def _own(settings: dict[str, Any]) -> "tuple[dict[str, Any], SpeculativeConfig | None]":
    """The options of a server of Foretoken's, the model among them, and how it drafts."""
    from foretoken.config import SpeculativeConfig

    config, _ = served(settings)
    speculation = config.speculative_config
    if speculates_by_default(settings, config):
        speculation = SpeculativeConfig.from_dict({"method": "auto"}, target=config.model)
    given = {name: value for name, value in settings.items() if value not in ((), [])}
    return {name: value for name, value in given.items() if name not in SPECULATION}, speculation
