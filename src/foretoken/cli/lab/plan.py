"""`foretoken lab plan`: the command line of planning. Parses and prints; computes nothing."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.lab.options import OptionHelp, parameters_of
from foretoken.cli.options import with_parameters
from foretoken.errors import ConfigError, ModelNotFoundError
from foretoken.lab.verdict import EXITS

EPILOG = (
    f"{EXITS}; 0 too where no speculation was asked for; 2 and 3: wrong settings or an unknown "
    "model."
)
_METHODS = "draft_model, ngram, suffix, eagle3, eagle, dflash, dspark, mtp, mlp, medusa, none"
_WORKLOADS = "chat, code, math, summarize, rag, edit, json, creative, mixed."
_RANKS = "Ranks: one on each device; of Foretoken processes, several on a CPU."
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
    from foretoken.lab.plan.setup import PlanSettings

    details, config, as_json = (given.pop(name) for name in ("details", "config", "as_json"))
    given |= {"target": target, "num_speculative_tokens": given.pop("k")}
    given["draft"] = ",".join(given["draft"] or ()) or None
    written = read_yaml(config, "--config") if config is not None else {}
    options = {key: value for key, value in given.items() if value is not None}
    try:
        found = build_plan(PlanSettings.from_mapping({**written, **options}))
    except (ConfigError, ModelNotFoundError) as error:
        name = error.field.removeprefix("plan.")
        if name in given and name not in written:
            typed = {"target": "TARGET", "num_speculative_tokens": "-k"}
            flag = typed.get(name, f"--{name.replace('_', '-')}")
            raise type(error)(flag, error.given, error.allowed) from error
        raise
    if as_json:
        print(json.dumps(plan_document(found)))
    else:
        print_plan(Console(highlight=False), found, everything=details)
    raise typer.Exit(found.verdict.exit_code)
