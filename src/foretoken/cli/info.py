"""`foretoken info`: shape, memory and KV bytes of a model, without loading it. Torch-free.

What this machine would run it with (the kernels) stands below what is the model's own. With
`--costs` the model is loaded after all, to say what steps and drafts take: as an earlier run learnt
it, else timed now.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.checkpoint import find_model
from foretoken.cli.options import SpeculativeOption, parse_speculation
from foretoken.config import EngineConfig
from foretoken.config.auto import AUTO
from foretoken.config.memory import ModelMemory
from foretoken.config.quantization import (
    AUTO_X_BITS,
    DRAFT_MODEL_X_BITS,
    QUANTIZATIONS,
    KVCacheDtype,
)
from foretoken.config.reader import read, require
from foretoken.config.resolve import DTYPE_BYTES, check_heads
from foretoken.control.cost import StepShape
from foretoken.control.usual_machine import FLOPS_PER_BYTE, usual_machine
from foretoken.errors import ConfigError
from foretoken.hardware import Gpus
from foretoken.kernels.library import describe_kernels
from foretoken.shape import ModelShape
from foretoken.shape.gguf import gguf_parts, open_gguf
from foretoken.shape.gguf_ends import ends_of_text
from foretoken.shape.multimodal import DRAFT_HEADS
from foretoken.shape.safetensors_header import stored_names

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.control.learned.drafter_cost import DrafterCost
    from foretoken.engine.timing import EngineCosts

_SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
_ROWS = (1, 2, 4, 6, 8, 16)
_DRAFTS = (0, 1, 2, 3, 5, 7)
_CONTEXT = 256
"""Tokens of each sequence for which costs are shown."""
_X_BITS = f"{AUTO_X_BITS} bits beside integer weights, {DRAFT_MODEL_X_BITS} as a draft model"
_FED = 100
"""Tokens of the feeding that is shown."""


def info(
    model: Annotated[str, typer.Argument(help="Packaged name, folder, or Hugging Face id.")],
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.")
    ] = "auto",
    quantization: Annotated[
        str, typer.Option(help="Of the weights in memory: none, int8 or int4.")
    ] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="Keys and values: auto or int8.")] = "auto",
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Processes that share it, on a CPU: memory for each.")
    ] = 1,
    tokenizer: Annotated[
        str | None, typer.Option(help="Another one than the model's, as an engine would be given.")
    ] = None,
    costs: Annotated[
        bool, typer.Option(help="Load it, and show what steps and drafts take on this machine.")
    ] = False,
    speculative_config: SpeculativeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show a model's shape, its memory, and what a token of context costs.

    With --costs: seconds of steps and of drafting (of --speculative-config), as earlier runs learnt
    them, else timed now.
    """
    path = find_model(model)
    shape = ModelShape.from_config(path)
    used = shape.dtype if dtype == "auto" else dtype
    if used not in DTYPE_BYTES:
        raise ConfigError("--dtype", dtype, "auto, " + ", ".join(DTYPE_BYTES))
    rounded = None if quantization == "none" else quantization
    allowed = ("none", *QUANTIZATIONS)
    require("--quantization", quantization, quantization in allowed, ", ".join(allowed))
    read(KVCacheDtype, kv_cache_dtype, "--kv-cache-dtype")
    where, ranks = "--tensor-parallel-size", tensor_parallel_size
    require(where, ranks, ranks == 1 or not costs, "1 beside --costs")
    through = "1 for a model that runs through transformers"
    require(where, ranks, ranks == 1 or shape.is_own, through)
    check_heads(where, ranks, shape)
    if costs:
        config = EngineConfig.from_kwargs(
            model=model,
            tokenizer=tokenizer,
            dtype=dtype,
            quantization=rounded,
            kv_cache_dtype=kv_cache_dtype,
            speculative_config=parse_speculation(speculative_config or AUTO),
        )
        _show_costs(config, as_json=as_json)
        return
    kept = ModelMemory(
        shape=shape, quantization=rounded, kv_cache_dtype=kv_cache_dtype, ranks=ranks
    )
    facts = _facts(kept, used) | _facts_of_files(path, shape, own_tokenizer=tokenizer is None)
    facts |= {"kernels": describe_kernels(), "gpus": ", ".join(Gpus.names()) or None}
    if as_json:
        print(json.dumps({"model": model, **facts}))
    else:
        _print(model, facts)


def _facts_of_files(path: Path, shape: ModelShape, *, own_tokenizer: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"ends_of_text": None, "drafting_tensors": None}
    if path.is_dir():
        skipped = sum(name.startswith(DRAFT_HEADS) for name in stored_names(path))
        facts["drafting_tensors"] = f"{skipped}, not read" if skipped else None
    if path.suffix == ".gguf":
        from foretoken.text.gguf_tokenizer import check_gguf_tokenizer

        if own_tokenizer:
            check_gguf_tokenizer(path)
        ends = ends_of_text(open_gguf(path)).items()
        facts["ends_of_text"] = ", ".join(f"{text} ({token})" for token, text in ends) or "none"
    if shape.stored is not None:
        files = [*path.glob("model*.safetensors"), *path.glob("pytorch_model*.bin")]
        files = list(gguf_parts(path)) if path.is_file() else files
        facts["quantized"] = shape.stored.describe()
        facts["weight_bytes"] = sum(file.stat().st_size for file in files)
    return facts


def _facts(kept: ModelMemory, dtype: str) -> dict[str, Any]:
    shape, size = kept.shape, DTYPE_BYTES[dtype]
    kv_per_token, ranks = kept.kv_per_token(size), kept.ranks
    weights = kept.weight_bytes(size) + kept.copied_bytes(size)
    context, window = shape.max_position_embeddings, shape.widest_window
    lets_go = shape.is_own and window is not None
    in_windows = kept.window_kv_per_token(size) if lets_go else 0
    seen = min(context, window or context)
    return {
        "architecture": shape.model_type,
        "text_part_of": shape.inside,
        "parameters": shape.parameter_count(),
        "layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "attention_heads": shape.num_attention_heads,
        "key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocabulary": shape.vocab_size,
        "context": shape.max_position_embeddings,
        "dtype": dtype,
        **_experts(kept, size),
        "draft_layers": f"{shape.draft_layers}, not read" if shape.draft_layers else None,
        "weight_bytes": shape.weight_bytes(size),
        "weights_in_memory_bytes": weights,
        "processes": ranks if ranks > 1 else None,
        "weights_of_a_process_bytes": weights // ranks if ranks > 1 else None,
        "activations": _X_BITS if kept.quantization or shape.stored else None,
        "run_by": "Foretoken's own layers" if shape.is_own else "layers of transformers",
        "windows": sorted({window for window in shape.windows if window}) or None,
        "kv_bytes_per_token": kv_per_token,
        "kv_bytes_per_token_before_windows": kv_per_token - in_windows if in_windows else None,
        "kv_bytes_full_context": (kv_per_token - in_windows) * context + in_windows * seen,
    }


def _experts(kept: ModelMemory, size: int) -> dict[str, Any]:
    """Of a mixture: what a token passes through, and what steps of more rows read and have to give.

    A step of n rows takes V(n) times as long as one of one row, of reading and multiplying on a
    usual processor, and has to give more than V(n) tokens for drafts to gain anything. Integer
    weights have a V of activations of 8 bits beside that of 16.
    """
    shape, experts = kept.shape, kept.shape.experts
    if experts is None:
        return {}
    breaks = {"break_even_tokens": _break_even(kept, size, 16)}
    if kept.quantization or shape.stored:
        breaks["break_even_tokens_int8"] = _break_even(kept, size, 8)
    return {
        "experts": experts.count,
        "experts_a_token": experts.used,
        "layers_with_experts": experts.num_layers,
        "active_parameters": shape.step_bytes(1, rows=1),
        "steps": [
            {
                "rows": rows,
                "experts_read": round(experts.touched(rows), 1),
                "bytes": kept.step_bytes(size, rows),
                **{name: found[at] for name, found in breaks.items()},
            }
            for at, rows in enumerate(_ROWS)
        ],
    }


def _break_even(kept: ModelMemory, size: int, x_bits: int) -> list[float]:
    """V of each of _ROWS, with activations of so many bits."""
    cost = usual_machine(kept, size, x_bits=x_bits)
    seconds = [cost.seconds(StepShape(rows, context=_CONTEXT)) for rows in _ROWS]
    return [round(took / seconds[0], 2) for took in seconds]


def _print(model: str, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=model, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in facts.items():
        if value is None or name == "steps":
            continue
        if "bytes" in name:
            shown = show_bytes(value)
            label = name.replace("_bytes", "").replace("bytes_", "").replace("_", " ")
        else:
            shown = f"{value:,}" if isinstance(value, int) else str(value)
            label = name.replace("_", " ")
        table.add_row("weights" if label == "weight" else label, shown)
    console = Console(highlight=False)
    console.print(table)
    if "steps" in facts:
        _print_steps(console, facts["steps"])


def _print_steps(console: "Console", steps: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    title = "Experts that a step reads, if its rows choose evenly and apart from each other"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    columns = ["rows", "experts of a layer", "weights read", "tokens to break even"]
    eight = "break_even_tokens_int8"
    if eight in steps[0]:
        columns.append("int8 activations")
    for column in columns:
        table.add_column(column, justify="right")
    for step in steps:
        cells = [step["experts_read"], show_bytes(step["bytes"]), step["break_even_tokens"]]
        cells += [step[eight]] if eight in step else []
        table.add_row(str(step["rows"]), *map(str, cells))
    console.print(table)
    console.print(
        "Drafts gain nothing in a step of so many rows that gives fewer tokens, on a processor "
        f"that does {FLOPS_PER_BYTE[16]} operations per byte read, {FLOPS_PER_BYTE[8]} with int8 "
        "activations. Rows of one text share experts, "
        "rows of many requests share the step: measure with --costs."
    )


def show_bytes(count: int) -> str:
    """`22.0 MB`, in powers of 1000."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _show_costs(config: EngineConfig, *, as_json: bool) -> None:
    """What is known of the engine that `config` describes, on this machine."""
    costs = _find_costs(config)
    document = _describe(costs)
    if as_json:
        print(json.dumps({"model": config.model, **document}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_costs_table(f"{config.model}: milliseconds of a step", document["step_s"]))
    for name, found in document["drafters"].items():
        console.print(_costs_table(f"{name}: milliseconds of drafting", found["drafting_s"]))
        console.print(f"{name}: feeding {_FED} tokens {1e3 * found['feeding_s']:.2f} ms\n")
    error, steps = document["target"]["error_p50"], document["target"]["steps"]
    learnt = "" if error is None else f"; usual error {error:.0%} in {steps} steps"
    console.print(f"Each sequence has {_CONTEXT} tokens of context. Costs: {costs.source}{learnt}")
    console.print(f"kept in {costs.file.path}", soft_wrap=True)


def _find_costs(config: EngineConfig) -> "EngineCosts":
    from foretoken.engine.timing import Timed, find_costs, seconds_for_timing
    from foretoken.engine.wiring import build_engine

    parts = build_engine(config).parts
    timed = Timed(
        config=parts.config,
        runner=parts.runner,
        members=getattr(parts.proposer, "members", {}),
        pool=parts.scheduler.pool,
        threads=parts.threads,
    )
    return parts.controller.costs or find_costs(timed, most_seconds=seconds_for_timing())


def _describe(costs: "EngineCosts") -> dict[str, Any]:
    """Where costs are from, what is known, and seconds of some steps and drafts."""

    def drafting(cost: "DrafterCost", sequences: int) -> list[float]:
        curve = cost.drafting(sequences, _DRAFTS[-1], _CONTEXT)
        return [float(curve[drafts]) for drafts in _DRAFTS]

    return {
        "source": costs.source,
        "file": str(costs.file.path),
        "context": _CONTEXT,
        "drafts": list(_DRAFTS),
        "sequences": list(_SEQUENCES),
        "step_s": [
            [costs.target.seconds(StepShape(n * (1 + k), n, _CONTEXT)) for k in _DRAFTS]
            for n in _SEQUENCES
        ],
        "target": costs.target.describe(),
        "drafters": {
            name: {
                "drafting_s": [drafting(cost, n) for n in _SEQUENCES],
                "feeding_s": cost.feeding(_FED, _CONTEXT),
                **cost.describe(),
            }
            for name, cost in costs.drafters.items()
        },
    }


def _costs_table(title: str, seconds: list[list[float]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("sequences", justify="right")
    for drafts in _DRAFTS:
        table.add_column("1 draft" if drafts == 1 else f"{drafts} drafts", justify="right")
    for sequences, row in zip(_SEQUENCES, seconds, strict=True):
        cells = ["-" if value == 0.0 else f"{1e3 * value:.3g}" for value in row]
        table.add_row(str(sequences), *cells)
    return table
