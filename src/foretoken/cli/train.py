"""`foretoken train`: the commands that make drafters.

Owns argument parsing, the tables of what was measured and the verdict of `auto`; the runs are in
`foretoken.training`.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, final

import typer
from typer.core import TyperGroup

from foretoken.cli.options import read_prompts, write_commands
from foretoken.cli.timed_runs import estimate, show_ratio
from foretoken.config.method_registry import DraftingMethod, known_methods
from foretoken.errors import ConfigError
from foretoken.lab.verdict import EXITS, FASTER, LEAVE_IT_OFF, MEASURE_MORE, Verdict, judge_gain
from foretoken.training.trained_kinds import kinds_of, shipped_kinds, trained_kinds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from foretoken.training.auto.judging import Judgement
    from foretoken.training.auto.run import AutoOutcome
    from foretoken.training.evaluation import Worth


@final
class TrainGroup(TyperGroup):
    """The commands of our own methods, and of those that installed packages bring.

    Packages are imported only where help is wanted or a word is none of ours.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that word. Raises ConfigError: it is the word of a method, which has
        another command or none."""
        if cmd_name not in self.commands:
            self._add_packages()
        found = super().get_command(ctx, cmd_name)
        for method in () if found is not None else known_methods():
            if cmd_name in (method.name, *method.aliases):
                raise ConfigError("foretoken train", cmd_name, _training_of(method))
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one row per command."""
        self._add_packages()
        write_commands(self, formatter)

    def _add_packages(self) -> None:
        for kind in trained_kinds().values():
            if kind.command not in self.commands:
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command(kind.command, help=f"Train {kind.summary}.")(_trains(kind.kind))
                self.commands[kind.command] = typer.main.get_command(alone)


def _training_of(method: DraftingMethod) -> str:
    """What to type instead of `foretoken train` with the word of this method."""
    if kinds := kinds_of(method):
        return f"{', '.join(kind.command for kind in kinds)}, which train {method.name}"
    if not method.has_weights:
        return f"a method that is trained; {method.name} has no weights"
    known = ", ".join(kind.command for kind in trained_kinds().values())
    return f"{known}; the record of {method.name} names no training (`extras`)"


train_app = typer.Typer(
    help="Train drafters for a target of your own.",
    no_args_is_help=True,
    cls=TrainGroup,
    rich_markup_mode=None,
)


@train_app.callback()
def main() -> None:
    """Train drafters for a target of your own."""


Config = Annotated[str, typer.Argument(help="A TOML file.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder.")]
Target = Annotated[Path | None, typer.Option(help="The target's folder, in place of CONFIG's.")]
Form = Annotated[
    str | None,
    typer.Option(
        "--export",
        metavar="FORMAT",
        help="At the end write the model to the folder `export` of the run's, too: `own`, which "
        "every kind has, or speculators, vllm, sglang or eagle, as far as its kind has the format.",
    ),
]


def _trains(kind: str) -> Callable[..., None]:
    def command(config: Config, out: Out = None, target: Target = None, form: Form = None) -> None:
        from foretoken.training.runs import train

        train(config, out, target, typer.echo, kind=kind, export=form)

    return command


for _kind in shipped_kinds():
    train_app.command(_kind.command, help=f"Train {_kind.summary}.")(_trains(_kind.kind))


EPILOG = (
    f"{EXITS}: these prompts do not tell; 2 and 3: wrong settings, or a model that cannot be "
    "loaded. It has to be faster than plain decoding and every look-up."
)


@train_app.command(epilog=EPILOG)
def auto(
    model: Annotated[str, typer.Argument(help="The target: folder, packaged name or hub id.")],
    prompts: Annotated[
        str, typer.Argument(help="A .jsonl or text file, or hf:NAME:SPLIT, like your traffic.")
    ],
    hours: Annotated[float, typer.Option(help="When all is to be done, pauses included.")],
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; default: runs/auto-MODEL.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Progress to stderr, one JSON document to stdout.")
    ] = False,
) -> None:
    """Choose, train and measure a drafter in the time given.

    The same command goes on with a run that was interrupted. The model is in memory twice while
    drafters are measured.
    """
    from rich.console import Console

    from foretoken.training.auto.run import REPORT, Assignment, AutoRun

    folder = out or Path("runs") / f"auto-{Path(model).name}"
    asked = Assignment(target=model, prompts=prompts, hours=hours, out=folder.expanduser())
    console = Console(stderr=as_json, highlight=False)
    outcome = AutoRun(asked, lambda line: typer.echo(line, err=as_json)).run()
    config = json.dumps(outcome.config)
    use = f"foretoken serve {model} --speculative-config '{config}'"
    verdict = verdict_on(outcome.judgement, use)
    if as_json:
        report = json.loads((asked.out / REPORT).read_text())
        typer.echo(json.dumps({**report, "verdict": verdict.word, "sentence": verdict.sentence}))
    _print_worth(console, outcome)
    for line in (f"The drafter is in {outcome.folder}:", config):
        console.print(line, soft_wrap=True, markup=False)
    console.print(verdict.sentence, style=verdict.style, soft_wrap=True, markup=False)
    raise typer.Exit(verdict.exit_code)


def verdict_on(found: "Judgement", use: str = "") -> Verdict:
    """Beside the best of what needs no training: plain decoding and look-ups.

    `use` is the command that serves with the drafter.
    """
    from foretoken.training.auto.judging import OFF
    from foretoken.training.auto.run import TRAINED

    rival = found.best([OFF, *found.look_ups])[0]
    over = estimate(found.speedups(TRAINED, rival))
    name = "plain decoding" if rival == OFF else rival
    seen = f"{show_ratio(over)} the speed of {name}, the best that needs no training"
    word = judge_gain(over.low, over.high, FASTER)
    if word == MEASURE_MORE and over.median > FASTER:
        return Verdict(word=word, reason=f"{seen}; more prompts would tell")
    word = LEAVE_IT_OFF if word == MEASURE_MORE else word
    return Verdict(word=word, reason=seen, command="" if word == LEAVE_IT_OFF else use)


def _print_worth(console: "Console", outcome: "AutoOutcome") -> None:
    from rich import box
    from rich.table import Table

    from foretoken.training.auto.judging import OFF
    from foretoken.training.auto.run import TRAINED

    found = outcome.judgement
    prompts = len(next(iter(found.paces[OFF].values())))
    title = (
        f"{outcome.kind} after {outcome.steps:,} steps ({outcome.trained_s / 60:.1f} minutes), "
        f"one client, {prompts} held-out prompts in turns, passes: {found.passes}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("drafter", no_wrap=True)
    for column in ("drafts", "tokens a\nverification", "speed-up\n[95 %]"):
        table.add_column(column, justify="right", no_wrap=True)
    for temperature in found.paces[OFF]:
        table.add_column(f"T = {temperature}", justify="right", no_wrap=True)
    for name in found.best([name for name in found.paces if name != OFF]):
        table.add_row(
            f"[bold]{name} ({outcome.kind})[/]" if name == TRAINED else name,
            str(found.lengths[name]),
            f"{found.tokens[name]:.2f}",
            show_ratio(estimate(found.speedups(name))),
            *(f"{median(found.speedups_at(name, t)):.2f}x" for t in found.paces[OFF]),
        )
    console.print(table)


@train_app.command()
def states(
    config: Config,
    out: Out = None,
    target: Target = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Only say how many bytes; write nothing.")
    ] = False,
) -> None:
    """Write the hidden states that a head of your own target learns from to disk, and no step."""
    from foretoken.training.runs import store_states

    store_states(config, out, target, typer.echo, only_estimate=estimate)


@train_app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, which holds step-*.pt files.")],
    to: Annotated[Path, typer.Argument(help="The folder of the model to write.")],
    verifier: Annotated[str, typer.Option(help="For a head: its target's name.")] = "demo",
    embedding: Annotated[
        bool,
        typer.Option(
            "--embedding",
            help="Of EAGLE-3 and P-EAGLE: put the target's embedding into the file, which the "
            "speculators package needs to read it back.",
        ),
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="`own`, speculators, vllm, sglang or eagle, if the kind has it; default: own.",
        ),
    ] = None,
) -> None:
    """Write the newest checkpoint in bfloat16: a Llama folder, or a head in its own format."""
    from foretoken.training.heads.export import export_run

    export_run(run, to, verifier=verifier, embedding=embedding, form=form)
    typer.echo(f"wrote {to}")


@train_app.command("eval")
def eval_drafter(
    target: Annotated[str, typer.Argument(help="The target: folder, packaged name or hub id.")],
    drafter: Annotated[str, typer.Argument(help="A head or draft model for it.")],
    method: Annotated[
        str | None, typer.Option(help="Its method, where its files do not say (eagle).")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="One a line, or JSON lines; default: held-out Python functions."),
    ] = None,
    count: Annotated[int, typer.Option(help="Of the held-out functions.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Written after each prompt.")] = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="May be given several times; default 0, 0.4, 0.8, 1.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the numbers there as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Measure a drafter in the engine: acceptance by position and temperature, cost of steps."""
    from rich.console import Console

    from foretoken.text.packaged import packaged_texts
    from foretoken.training.evaluation import EvalPlan, measure_worth, open_pair

    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError("--out", str(out), "a file to write, in a folder that is there")
    if prompts is not None:
        texts = read_prompts(prompts)
    else:
        texts = tuple(one.text for one in packaged_texts("code", count))
    plan = EvalPlan(max_tokens=max_tokens)
    if temperature:
        plan = replace(plan, temperatures=tuple(temperature))
    engine = open_pair(target, drafter, method, plan)
    tokenizer = engine.parts.tokenizer
    if tokenizer is None:
        raise ConfigError("TARGET", target, "a model with a tokenizer.json")
    told = partial(typer.echo, err=as_json)
    found = measure_worth(engine, [tokenizer.encode(t) for t in texts], plan, told)
    text = json.dumps(asdict(found), indent=2)
    if as_json:
        typer.echo(text)
    else:
        Console().print(worth_table(found, f"{drafter} for {target}"))
    if out is not None:
        out.write_text(text + "\n")


def worth_table(found: "Worth", title: str) -> "Table":
    """Rows by temperature: accepted share, tokens a verification, speed-up of 1, 2, ... drafts."""
    from rich import box
    from rich.table import Table

    most = max(len(kept.lengths) for kept in found.acceptance.values())
    by_count = {cost.drafts: cost for cost in found.costs}
    plain = f"{1e3 * by_count[0].total_s:.1f} ms"
    title = (
        f"{title}\nspeed-up: what tokens a step and the times of steps come to, "
        f"over steps of {plain} without drafts"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("temp.", no_wrap=True)
    table.add_column("drafts", no_wrap=True)
    for k in range(1, most + 1):
        table.add_column(str(k), justify="right", no_wrap=True)
    for temperature, kept in found.acceptance.items():
        shares = [f"{share:.0%}" for share in kept.by_position]
        table.add_row(temperature, "accepted", *shares)
        table.add_row("", "tokens a step", *[f"{length:.2f}" for length in kept.lengths])
        speedups = found.speedups[temperature]
        best = max(speedups, default=0.0)
        shown = [f"[bold]{s:.2f}[/]" if s == best else f"{s:.2f}" for s in speedups]
        table.add_row("", "speed-up", *shown)
        table.add_section()
    steps = [
        f"{1e3 * by_count[k].total_s:.1f}" if k in by_count else "" for k in range(1, most + 1)
    ]
    table.add_row("any", "step, ms", *steps)
    return table


def _moved(context: typer.Context) -> None:
    """Commands of earlier versions, which made the packaged models."""
    tool = "python -m tools.demo_models, in the root of the sources (docs/training.md)"
    raise ConfigError("foretoken train", str(context.info_name), tool)


for _name in ("lm", "measure", "card"):
    _anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    train_app.command(_name, hidden=True, context_settings=_anything)(_moved)
