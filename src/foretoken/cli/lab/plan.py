"""`foretoken lab plan`: the command line of planning. Parses and prints; computes nothing."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.errors import ConfigError, ModelNotFoundError
from foretoken.lab.verdict import EXITS

if TYPE_CHECKING:
    from foretoken.lab.plan.speedup import MeasuredCost

EPILOG = (
    f"{EXITS}; 0 too where no speculation was asked for; 2 and 3: wrong settings or an unknown "
    "model."
)
Name = str | None
Whole = int | None
Number = float | None
Ranks = Annotated[
    Whole, typer.Option(help="Ranks: one on each device; of Foretoken processes, several on a CPU.")
]
DraftRanks = Annotated[
    Whole, typer.Option(help="Ranks of the draft: as the target, with Foretoken 1.")
]
Workload = Annotated[
    Name, typer.Option(help="chat, code, math, summarize, rag, edit, json, creative, mixed.")
]
Measured = Annotated[
    Name,
    typer.Option(
        metavar="V,c,LENGTH|FILE",
        help="Costs and acceptance length as measured, or a file of what `lab decide --fit "
        "--json` prints: the next step.",
    ),
]


def _range(meaning: str) -> Any:
    return typer.Option(metavar="LOW:HIGH", help=meaning)


def plan(
    target: Annotated[
        Name, typer.Argument(help="Hub id, short name, config.json or its folder.")
    ] = None,
    draft: Annotated[
        list[str] | None, typer.Option(help="The draft model; several times: the best is taken.")
    ] = None,
    method: Annotated[
        Name,
        typer.Option(
            help="draft_model, ngram, suffix, eagle3, eagle, dflash, dspark, mtp, mlp, medusa, none"
        ),
    ] = None,
    engine: Annotated[Name, typer.Option(help="vllm, llama.cpp or foretoken.")] = None,
    quantization: Annotated[
        Name, typer.Option(help="Of the target: bf16, fp8, int8, int4, q4_k_m ...")
    ] = None,
    draft_quantization: Annotated[Name, typer.Option(help="Of the draft.")] = None,
    kv_cache_dtype: Annotated[Name, typer.Option(help="auto, fp8, q8_0 ...")] = None,
    device: Annotated[
        Name, typer.Option(help="A device of the table, or `this`; a wrong one lists them.")
    ] = None,
    count: Annotated[Whole, typer.Option(help="How many devices.")] = None,
    tensor_parallel_size: Ranks = None,
    draft_tensor_parallel_size: DraftRanks = None,
    utilization: Annotated[Number, typer.Option(help="Share of the memory to be used.")] = None,
    overhead_gb: Annotated[Number, typer.Option(help="Per device, for activations.")] = None,
    k: Annotated[Whole, typer.Option("-k", help="Drafts per verification.")] = None,
    context: Annotated[Whole, typer.Option(help="Tokens of a typical request.")] = None,
    output_tokens: Annotated[Whole, typer.Option(help="Of them written.")] = None,
    concurrency: Annotated[Whole, typer.Option(help="Requests in flight, usually.")] = None,
    peak_concurrency: Annotated[Whole, typer.Option(help="The same at the peak.")] = None,
    workload: Workload = None,
    temperature: Annotated[Number, typer.Option(help="Of production traffic.")] = None,
    acceptance: Annotated[
        Name, _range("Chance that a draft is accepted if all before it were; see --rate.")
    ] = None,
    rate: Annotated[
        Name, _range("Or accepted over drafted tokens at -k, as servers count.")
    ] = None,
    slo: Annotated[Name, typer.Option(help="tpot, ttft or throughput.")] = None,
    bandwidth_gb_s: Annotated[Number, typer.Option(help="Of a device, as measured.")] = None,
    measured: Measured = None,
    details: Annotated[
        bool, typer.Option("--details", help="Every check, cost and assumption after the page.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="YAML; options override it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Whether to speculate, with what, how far, and what fits, before anything is measured."""
    given = {name: value for name, value in locals().items() if name not in _OWN}
    given["num_speculative_tokens"] = given.pop("k")
    given["draft"] = ",".join(draft) if draft else None
    raise typer.Exit(_run(given, measured, config, as_json=as_json, details=details))


_OWN = ("measured", "config", "as_json", "details")


def _run(
    given: dict[str, Any],
    measured: str | None,
    config: Path | None,
    *,
    as_json: bool,
    details: bool,
) -> int:
    from rich.console import Console

    from foretoken.lab.measure.experiment import read_yaml
    from foretoken.lab.plan.page import plan_document, print_plan
    from foretoken.lab.plan.planner import build_plan
    from foretoken.lab.plan.setup import PlanSettings, first_drafts
    from foretoken.lab.plan.speedup import next_step

    written = read_yaml(config, "--config") if config is not None else {}
    options = {key: value for key, value in given.items() if value is not None}
    try:
        settings = PlanSettings.from_mapping({**written, **options})
        cost = parse_measured(measured, first_drafts(settings)) if measured else None
        found = build_plan(settings, cost)
    except (ConfigError, ModelNotFoundError) as error:
        name = error.field.removeprefix("plan.")
        if name in given and name not in written:
            typed = {"target": "TARGET", "num_speculative_tokens": "-k"}
            flag = typed.get(name, f"--{name.replace('_', '-')}")
            raise type(error)(flag, error.given, error.allowed) from error
        raise
    step = next_step(cost) if cost is not None else None
    if as_json:
        print(json.dumps(plan_document(found, step)))
    else:
        print_plan(Console(highlight=False), found, step, everything=details)
    return found.verdict.exit_code


def parse_measured(text: str, k: int) -> "MeasuredCost":
    """The cost that `--measured` means: `V,c,LENGTH` at `k`, or what `lab decide --fit` found; of a
    fit that does not tell them apart, all steps draft. Raises ConfigError if it is neither three
    numbers nor such a file, or out of range."""
    from foretoken.lab.plan.speedup import MeasuredCost

    path, share = Path(text), 1.0
    is_file = path.suffix == ".json" or path.is_file()
    try:
        if is_file:
            document = json.loads(path.read_text("utf-8"))
            fit = document.get("fit") or document
            verify, draft = (float(fit[name]["estimate"]) for name in ("verify_cost", "draft_cost"))
            verify, draft = max(1.0, verify), max(0.0, draft)
            length = 1.0 + float(fit["k"]) * float(fit["acceptance_rate"])
            k, share = max(1, math.ceil(float(fit["k"]))), float(fit.get("draft_share", 1.0))
        else:
            verify, draft, length = (float(part) for part in text.split(","))
        finite = all(map(math.isfinite, (verify, draft, length)))
        if not finite or verify < 1 or draft < 0 or not 1 <= length <= k + 1 or not 0 < share <= 1:
            raise ValueError("out of range")
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = (
            f"verify cost >= 1, draft cost >= 0, acceptance length of 1 to {k + 1}, such as "
            "1.1,0.15,2.8, or a file of what `foretoken lab decide RUN --fit --json` prints"
            + (f" ({error!r})" if is_file else "")
        )
        raise ConfigError("--measured", text, allowed) from error
    return MeasuredCost(
        k=k, acceptance_length=length, verify_cost=verify, draft_cost=draft, draft_share=share
    )
