"""`foretoken demo`: the packaged models on held-out Python, every method against plain decoding.

One interleaved run: each prompt goes through every method, who is first rotates. The prompts are
cut from modules of the standard library that the models were not trained on.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.checkpoint import installed
from foretoken.cli.timed_runs import (
    Arm,
    ComparedArm,
    TimedRun,
    Workload,
    describe_environment,
    interleave,
    summarize,
    warm_up,
    with_bar,
)
from foretoken.config.auto import AUTO
from foretoken.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BASELINE = "none"
METHODS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    AUTO: {"method": AUTO},
    "draft_model": {
        "method": "draft_model",
        "model": "demo-draft",
        "num_speculative_tokens": 4,
        "quantization": "int8",
    },
    "parallel": {"model": "demo-parallel", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 5},
    "mlp": {"method": "mlp", "model": "demo-mlp", "num_speculative_tokens": 3},
    "medusa": {"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 10},
    "dflash": {"model": "demo-dflash", "num_speculative_tokens": 4},
    "dspark": {"model": "demo-dspark", "num_speculative_tokens": 4},
}
"""What is measured, each at the number of drafts that was fastest (benchmarks/methods.py)."""
SHOWN = (BASELINE, AUTO)
"""Whose writing is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to run."""

    num_prompts: int = 6
    max_tokens: int = 96
    num_repeats: int = 3
    seconds: float = 110.0
    """No new repeat after this long."""
    shows_writing: bool = True
    methods: tuple[str, ...] = tuple(METHODS)


QUICK = Plan(
    num_prompts=1,
    max_tokens=24,
    num_repeats=1,
    shows_writing=False,
    methods=(BASELINE, AUTO, "draft_model", "eagle3"),
)


def demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="Tables to stderr, one JSON document to stdout.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Four methods, one prompt, 24 tokens: a first look; noisy."),
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option(help="Identical tokens to the last bit; off may flip near-ties.")
    ] = True,
) -> None:
    """Watch speculation write the same tokens faster, and measure it.

    Exit code 1 if any method wrote another token than plain decoding.
    """
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False)
    plan = QUICK if quick else Plan()
    methods = installed_methods(plan)
    for name in (name for name in plan.methods if name not in methods):
        console.print(f"{name}: left out, its packaged drafter is not installed", style="dim")
    with ExitStack() as stack:
        arms = _open_arms(console, stack, methods, batch_invariant)
        console.print(arms[0].llm.describe(), style="dim")
        if plan.shows_writing:
            _show_writing(console, arms)
        most = len(arms) * 3 * plan.num_prompts * plan.num_repeats
        runs = with_bar(console, _rounds(arms, plan), most)
    summaries = summarize(runs, BASELINE)
    _print_result(console, summaries, plan)
    if as_json:
        document = {
            "command": "foretoken demo",
            "model": "demo",
            "batch_invariant": batch_invariant,
            "max_tokens": plan.max_tokens,
            "methods": methods,
            "environment": describe_environment(),
            "results": [asdict(summary) for summary in summaries],
            "identical": all(summary.identical for summary in summaries),
        }
        print(json.dumps(document))
    if not all(summary.identical for summary in summaries):
        raise typer.Exit(1)


def installed_methods(plan: Plan) -> dict[str, dict[str, Any] | None]:
    """Those of the plan's methods whose drafter this installation has."""
    there = installed()
    return {
        name: config
        for name, config in METHODS.items()
        if name in plan.methods and (config is None or config.get("model", "demo") in there)
    }


def make_workloads(plan: Plan) -> tuple[Workload, ...]:
    """Held-out code to continue, greedily and sampled, and held-out code to edit.

    Every output has the same length, so that a prompt counts as much as the next.
    """
    from foretoken.text.packaged import packaged_texts

    code = tuple(one.text for one in packaged_texts("code", plan.num_prompts))
    edits = tuple(one.text for one in packaged_texts("edit", plan.num_prompts))
    length = plan.max_tokens
    greedy = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, seed=1, max_tokens=length, ignore_eos=True)
    return (
        Workload(name="continue", prompts=code, params=greedy),
        Workload(name="sample", prompts=code, params=sampled),
        Workload(name="edit", prompts=edits, params=greedy),
    )


def _open_arms(
    console: "Console",
    stack: ExitStack,
    methods: Mapping[str, dict[str, Any] | None],
    batch_invariant: bool,
) -> tuple[Arm, ...]:
    """One engine per method, with a bar: each reads and packs the target anew."""
    from rich.progress import Progress

    arms: list[Arm] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Loading PyTorch", total=len(methods))
        from foretoken import LLM

        for name, config in methods.items():
            progress.update(task, description=f"Loading the packaged models, method {name}")
            llm = LLM(
                "demo",
                max_num_seqs=1,
                enable_prefix_caching=False,
                batch_invariant=batch_invariant,
                speculative_config=config,
                # A method alone is shown as it is, also where it is slower than plain decoding.
                adaptive_speculation=AUTO if name == AUTO else False,
            )
            arms.append(Arm(name, stack.enter_context(llm)))
            progress.advance(task)
    return tuple(arms)


def _show_writing(console: "Console", arms: tuple[Arm, ...]) -> None:
    """One prompt, plainly and with everything there is, as it comes."""
    from foretoken.cli.writing import Screen, TimedText

    prompt = (
        "class Queue:\n    def __init__(self):\n        self._items = []\n\n    def __len__(self):"
    )
    params = SamplingParams(temperature=0.6, seed=3, max_tokens=82)
    warm = SamplingParams(temperature=0.0, max_tokens=8)
    for number, arm in enumerate(arm for arm in arms if arm.name in SHOWN):
        arm.llm.generate(prompt, warm, use_tqdm=False)
        screen, answer = Screen(arm.llm, console), TimedText()
        if not number:
            screen.legend()
        console.rule(f"method: {arm.name}", align="left")
        screen.say(prompt, end="")
        screen.show(answer.follow(arm.llm.stream(prompt, params)))
        screen.say(f"\n{answer.num_tokens} tokens in {answer.seconds:.2f} s")
    console.print()


def _rounds(arms: tuple[Arm, ...], plan: Plan) -> Iterator[TimedRun]:
    """All workloads once per repeat, until the repeats or the time are used up."""
    workloads = make_workloads(plan)
    for workload in workloads:
        warm_up(arms, workload)
    began = time.perf_counter()
    for repeat in range(plan.num_repeats):
        if repeat and time.perf_counter() - began > plan.seconds * repeat / (repeat + 1):
            return
        for workload in workloads:
            yield from interleave(arms, workload, repeat)


def _passes(num_repeats: int, num_prompts: int, plan: Plan) -> str:
    """What each figure is a median of."""
    prompts = "One prompt" if num_prompts == 1 else f"Medians over {num_prompts} prompts"
    if num_repeats == 1:
        runs = ", each run once" if num_prompts > 1 else ", run once"
    else:
        runs = f" of medians over {num_repeats} passes"
    if num_repeats < plan.num_repeats:
        runs += f" (no time for {plan.num_repeats} within {plan.seconds:.0f} s)"
    return prompts + runs


def _print_result(console: "Console", summaries: tuple[ComparedArm, ...], plan: Plan) -> None:
    console.print(_comparison_table(summaries))
    repeated = {s.workload: s.repeated_4grams for s in summaries if s.arm == BASELINE}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in repeated.items())
    console.print(
        "continue: held-out code, greedy. sample: the same at temperature 0.8 with a seed. "
        "edit: write held-out code again with a change, greedy.\n"
        f"{_passes(summaries[0].num_repeats, summaries[0].num_prompts, plan)}. "
        f"Repeated 4-grams, which flatter every method: {shares}.",
        style="dim",
    )
    if all(summary.identical for summary in summaries):
        console.print("All methods wrote the same tokens.", style="green")
    else:
        console.print("NOT all methods wrote the same tokens.", style="bold red")


def _comparison_table(summaries: Sequence[ComparedArm]) -> "Table":
    """One row per workload and arm."""
    from rich import box
    from rich.table import Table

    title = "Every method against plain decoding, one request at a time, interleaved"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("workload", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for name in ("tokens/s", "speed-up", "acceptance\nlength"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("accepted by\nposition, %", min_width=14)
    table.add_column("same\ntokens", justify="center", no_wrap=True)
    for summary in summaries:
        is_baseline = summary.arm == BASELINE
        if is_baseline:
            table.add_section()
        table.add_row(
            summary.workload if is_baseline else "",
            summary.arm,
            f"{summary.tokens_per_s:.0f}",
            "1" if is_baseline else f"[bold]{summary.speedup.median:.2f}x[/]",
            "" if is_baseline else f"{summary.acceptance_length:.2f}",
            " ".join(f"{share:.0%}"[:-1] for share in summary.acceptance_by_position),
            "[green]yes[/]" if summary.identical else "[bold red]NO[/]",
        )
    return table
