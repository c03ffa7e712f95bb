"""`foretoken compare`: does speculation pay for this model on these prompts?

Answers with a table, a sentence and an exit code.
"""

import json
import shlex
from contextlib import ExitStack
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import (
    SPECULATION_EXAMPLE,
    DtypeOption,
    InvariantOption,
    KVCacheOption,
    MaxTokensOption,
    SeedOption,
    TemperatureOption,
    parse_invariant,
    parse_speculation,
    read_prompts,
)
from foretoken.cli.timed_runs import (
    Arm,
    ComparedArm,
    TimedRun,
    Workload,
    describe_environment,
    interleave,
    show_milliseconds,
    show_ratio,
    summarize,
    warm_up,
    with_bar,
)
from foretoken.errors import ConfigError
from foretoken.lab.verdict import EXITS, MEASURE_MORE, USE_IT, WORTH_IT, Verdict, judge_gain
from foretoken.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

FEWEST_PROMPTS = 6
"""Prompts for a 95 % interval: of fewer, all lie on one side of their median too often."""
MOST_PROMPTS = 500

EPILOG = (
    f"{EXITS}: these prompts do not tell, or tokens of a deterministic run (greedy, or with "
    "--seed) differ; 2 and 3: wrong settings, or a model that cannot be loaded. The limit is "
    f"{WORTH_IT}x."
)


def compare(
    model: Annotated[str, typer.Argument(help="Packaged name, folder, or Hugging Face id.")],
    speculative_config: Annotated[
        str,
        typer.Option(
            "--speculative-config",
            metavar="JSON",
            help="How to draft, as JSON with vLLM's keys, or `auto`.",
        ),
    ],
    prompts: Annotated[
        Path, typer.Option(help='One prompt per line, or JSON lines with a "prompt" each.')
    ],
    repeats: Annotated[int, typer.Option(help="Passes over the prompts.", min=1)] = 5,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVCacheOption = "auto",
    batch_invariant: InvariantOption = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Tables to stderr, one JSON document to stdout.")
    ] = False,
) -> None:
    """Measure speculation on your own prompts, off and on interleaved.

    One request at a time, prefix caching off; the model is in memory twice.
    """
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False)
    config = parse_speculation(speculative_config)
    if config is None:
        raise ConfigError("--speculative-config", speculative_config, SPECULATION_EXAMPLE)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    workload = Workload(name=prompts.name, prompts=read_prompts(prompts), params=params)
    settings: dict[str, Any] = {
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "batch_invariant": parse_invariant(batch_invariant),
    }
    runs = _measure(console, model, settings, config, workload, repeats)
    off, on = summarize(runs, "off")
    verdict = judge(on, deterministic=params.deterministic)
    if verdict.word == USE_IT:
        told = shlex.quote(speculative_config)
        verdict = replace(verdict, command=f"foretoken serve {model} --speculative-config {told}")
    _print_result(console, (off, on), verdict, promised=params.deterministic)
    if as_json:
        print(json.dumps(_document(model, config, (off, on), verdict)))
    raise typer.Exit(verdict.exit_code)


def _measure(
    console: "Console",
    model: str,
    settings: dict[str, Any],
    config: dict[str, Any],
    workload: Workload,
    repeats: int,
) -> list[TimedRun]:
    with ExitStack() as stack:
        with console.status("Loading the model, once without and once with drafts"):
            from foretoken import LLM

            off = stack.enter_context(LLM(model, **settings))
            on = stack.enter_context(LLM(model, speculative_config=config, **settings))
        arms = Arm("off", off), Arm("on", on)
        warm_up(arms, workload)
        runs = (run for repeat in range(repeats) for run in interleave(arms, workload, repeat))
        return with_bar(console, runs, repeats * len(workload.prompts) * len(arms))


def judge(on: ComparedArm, *, deterministic: bool) -> Verdict:
    """The verdict on the arm that speculates."""
    if deterministic and not on.identical:
        near = "if that happens at near-ties, --batch-invariant on makes them identical"
        return Verdict(word=MEASURE_MORE, reason=f"tokens differ between off and on; {near}")
    speed = on.speedup
    prompts = f"{on.num_prompts} prompt{'s' if on.num_prompts > 1 else ''}"
    seen = f"{speed.median:.2f}x [{speed.low:.2f}, {speed.high:.2f}] over {prompts}"
    if on.num_prompts < FEWEST_PROMPTS:
        few = f"{FEWEST_PROMPTS} prompts or more say something about others"
        return Verdict(word=MEASURE_MORE, reason=f"{seen}; {few}")
    word = judge_gain(speed.low, speed.high)
    more = f", which holds the limit; {_more_prompts(on)}" if word == MEASURE_MORE else ""
    return Verdict(word=word, reason=f"{seen} against {WORTH_IT}x{more}")


def _more_prompts(on: ComparedArm) -> str:
    """How many prompts would put the interval on one side of the limit, if the median stays."""
    speed = on.speedup
    distance = abs(speed.median - WORTH_IT)
    half = (speed.high - speed.low) / 2
    if on.num_prompts * half**2 > MOST_PROMPTS * distance**2:
        return f"the median is so near {WORTH_IT}x that another limit tells more than more prompts"
    return f"about {ceil(on.num_prompts * (half / distance) ** 2) + 1} prompts would tell"


def _print_result(
    console: "Console", arms: tuple[ComparedArm, ComparedArm], verdict: Verdict, *, promised: bool
) -> None:
    from rich.table import Table

    on = arms[1]
    title = f"{on.workload}: {on.num_prompts} prompts x {on.num_repeats} repeats"
    table = Table(title=title, title_justify="left")
    for name in ("", "off", "on"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    times = show_milliseconds
    table.add_row("latency per request", *(times(arm.latency_s) for arm in arms))
    table.add_row("time to first token", *(times(arm.first_token_s) for arm in arms))
    table.add_row("tokens/s", *(f"{arm.tokens_per_s:.1f}" for arm in arms))
    table.add_row("output tokens", *(f"{arm.num_tokens}" for arm in arms))
    table.add_row("repeated 4-grams", *(f"{arm.repeated_4grams:.0%}" for arm in arms))
    table.add_row("speed-up by prompt", "1", show_ratio(on.speedup))
    table.add_row("acceptance length", "", f"{on.acceptance_length:.2f}")
    by_position = " ".join(f"{share:.0%}" for share in on.acceptance_by_position)
    table.add_row("accepted by position", "", by_position)
    same = "yes" if on.identical else "NO" if promised else "not promised"
    table.add_row("identical tokens", "", same)
    console.print(table)
    console.print(
        "Medians over prompts with 95 % bootstrap intervals. Latency and time to first token: the "
        "median prompt of each column, which need not be the same prompt. Speed-up: the median of "
        "what each prompt gained, seconds per token off / on. tokens/s: all tokens / all seconds, "
        "in which long answers count more. The three can differ where prompts do.",
        style="dim",
    )
    if not promised:
        told = "Sampling without --seed draws anew, so tokens may differ; --seed makes them equal."
        console.print(told, style="dim")
    console.print(verdict.sentence, style=verdict.style, soft_wrap=True, markup=False)


def _document(
    model: str, config: dict[str, Any], summaries: tuple[ComparedArm, ...], verdict: Verdict
) -> dict[str, Any]:
    return {
        "command": "foretoken compare",
        "model": model,
        "speculative_config": config,
        "environment": describe_environment(),
        "results": [asdict(summary) for summary in summaries],
        "threshold": WORTH_IT,
        "exit_code": verdict.exit_code,
        "verdict": verdict.word,
        "sentence": verdict.sentence,
    }
