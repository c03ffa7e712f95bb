"""`foretoken info --costs`: what steps and drafts take on this machine, as tables or as JSON.

Loads the model: costs are read from the file of an earlier run, or timed.
"""

import json
from typing import Any

from foretoken.config import EngineConfig
from foretoken.control.cost import StepShape
from foretoken.control.learned_cost import DrafterCost
from foretoken.costs import Costs, Timed, find_costs

_SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
_DRAFTS = (0, 1, 2, 3, 5, 7)
_CONTEXT = 256
_FED = 100


def show_costs(config: EngineConfig, *, as_json: bool) -> None:
    """Print what is known of the engine that `config` describes.

    Raises:
        ConfigError, ModelError: as when an engine is built.
    """
    costs = _costs(config)
    document = describe_costs(costs)
    if as_json:
        print(json.dumps({"model": config.model, **document}))
    else:
        _print(config.model, costs, document)


def describe_costs(costs: Costs) -> dict[str, Any]:
    """Where costs are from, what is known, and seconds of some steps and drafts."""
    steps = [
        [costs.target.seconds(StepShape(n * (1 + k), n, _CONTEXT)).seconds for k in _DRAFTS]
        for n in _SEQUENCES
    ]
    return {
        "source": costs.source,
        "file": str(costs.file.path),
        "context": _CONTEXT,
        "drafts": list(_DRAFTS),
        "sequences": list(_SEQUENCES),
        "step_s": steps,
        "target": costs.target.describe(),
        "drafters": {
            name: {
                "drafting_s": [_drafting(cost, n) for n in _SEQUENCES],
                "feeding_s": cost.feeding(_FED, _CONTEXT),
                **cost.describe(),
            }
            for name, cost in costs.drafters.items()
        },
    }


def _drafting(cost: DrafterCost, sequences: int) -> list[float]:
    curve = cost.drafting(sequences, _DRAFTS[-1], _CONTEXT)
    return [float(curve[drafts]) for drafts in _DRAFTS]


def _costs(config: EngineConfig) -> Costs:
    from foretoken.assembly import build_engine

    parts = build_engine(config).parts
    members = getattr(parts.proposer, "members", {})
    return find_costs(
        Timed(
            config=parts.config,
            runner=parts.runner,
            members=members,
            pool=parts.scheduler.pool,
            threads=parts.threads,
        )
    )


def _print(model: str, costs: Costs, document: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(f"{model}: milliseconds of a step", document["step_s"]))
    for name, found in document["drafters"].items():
        console.print(_table(f"{name}: milliseconds of drafting", found["drafting_s"]))
        console.print(f"{name}: feeding {_FED} tokens {1e3 * found['feeding_s']:.2f} ms\n")
    error = document["target"]["error_p50"]
    learnt = "" if error is None else f"; usual error {error:.0%} of {document['target']['steps']}"
    console.print(f"Each sequence has {_CONTEXT} tokens of context. Costs: {costs.source}{learnt}")
    console.print(f"kept in {costs.file.path}", soft_wrap=True)


def _table(title: str, seconds: list[list[float]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("sequences", justify="right")
    for drafts in _DRAFTS:
        table.add_column(f"{drafts} drafts" if drafts != 1 else "1 draft", justify="right")
    for sequences, row in zip(_SEQUENCES, seconds, strict=True):
        cells = ["-" if value == 0.0 else f"{1e3 * value:.3g}" for value in row]
        table.add_row(str(sequences), *cells)
    return table
