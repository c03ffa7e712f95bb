"""`foretoken lab plan`: the command line of planning. Parses and prints; computes nothing."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab.options import OptionHelp, parameters_of
from foretoken.cli.options import with_parameters
from foretoken.errors import ConfigError, ModelNotFoundError
from foretoken.lab.verdict import EXITS

if TYPE_CHECKING:
    from foretoken.lab.plan.speedup import MeasuredCost

EPILOG = (
    f"{EXITS}; 0 too where no speculation was asked for; 2 and 3: wrong settings or an unknown "
    "model."
)
_METHODS = "draft_model, ngram, suffix, eagle3, eagle, dflash, dspark, mtp, mlp, medusa, none"
_WORKLOADS = "chat, code, math, summarize, rag, edit, json, creative, mixed."
_RANKS = "Ranks: one on each device; of Foretoken processes, several on a CPU."
_MEASURED = (
    "Costs and acceptance length as measured, or a file of what `lab decide --fit --json` prints: "
    "the next step."
)
_CHANCE = "Chance that a draft is accepted if all before it were; see --rate."
_RANGE = "LOW:HIGH"
_ROWS = {
    "draft": OptionHelp("The draft model; several times: the best is taken.", list[str]),
    "method": OptionHelp(_METHODS),
    "engine": OptionHelp("vllm, llama.cpp or foretoken."),
    "quantization": OptionHelp("Of the target: bf16, fp8, int8, int4, q4_k_m ..."),
    "draft_quantization": OptionHelp("Of the draft."),
    "kv_cache_dtype": OptionHelp("auto, fp8, q8_0 ..."),
    "device": OptionHelp("A device of the table, or `this`; a wrong one lists them."),
    "count": OptionHelp("How many devices.", int),
    "tensor_parallel_size": OptionHelp(_RANKS, int),
    "draft_tensor_parallel_size": OptionHelp(
        "Ranks of the draft: as the target, with Foretoken 1.", int
    ),
    "utilization": OptionHelp("Share of the memory to be used.", float),
    "overhead_gb": OptionHelp("Per device, for activations.", float),
    "k": OptionHelp("Drafts per verification.", int, flag="-k"),
    "context": OptionHelp("Tokens of a typical request.", int),
    "output_tokens": OptionHelp("Of them written.", int),
    "concurrency": OptionHelp("Requests in flight, usually.", int),
    "peak_concurrency": OptionHelp("The same at the peak.", int),
    "workload": OptionHelp(_WORKLOADS),
    "temperature": OptionHelp("Of production traffic.", float),
    "acceptance": OptionHelp(_CHANCE, metavar=_RANGE),
    "rate": OptionHelp("Or accepted over drafted tokens at -k, as servers count.", metavar=_RANGE),
    "slo": OptionHelp("tpot, ttft or throughput."),
    "bandwidth_gb_s": OptionHelp("Of a device, as measured.", float),
    "measured": OptionHelp(_MEASURED, metavar="V,c,LENGTH|FILE"),
    "details": OptionHelp("Every check, cost and assumption after the page.", bool),
    "config": OptionHelp("YAML; options override it.", Path),
    "as_json": OptionHelp("One JSON document.", bool, flag="--json"),
}


@with_parameters(parameters_of(_ROWS))
def plan(
    target: Annotated[
        str | None, typer.Argument(help="Hub id, short name, config.json or its folder.")
    ] = None,
    **given: Any,
) -> None:
    """Whether to speculate, with what, how far, and what fits, before anything is measured."""
    from rich.console import Console

    from foretoken.lab.measure.experiment import read_yaml
    from foretoken.lab.plan.page import plan_document, print_plan
    from foretoken.lab.plan.planner import build_plan
    from foretoken.lab.plan.setup import PlanSettings, first_drafts
    from foretoken.lab.plan.speedup import next_step

    measured, details, config, as_json = (
        given.pop(name) for name in ("measured", "details", "config", "as_json")
    )
    given |= {"target": target, "num_speculative_tokens": given.pop("k")}
    given["draft"] = ",".join(given["draft"] or ()) or None
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
    raise typer.Exit(found.verdict.exit_code)


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
