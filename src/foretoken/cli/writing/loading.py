"""The model that a command writes with, and how it is to write: both from the options.

Every mistake is a ConfigError that names the option. Knows no command.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import parse_invariant, parse_speculation
from foretoken.errors import ConfigError
from foretoken.types import SamplingParams

if TYPE_CHECKING:
    from foretoken import LLM

DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "--spec-model",
        metavar="MODEL",
        help="Draft with this model or head; short for the key `model`.",
        show_default=False,
    ),
]
TopPOption = Annotated[float, typer.Option(help="Keep this much probability.")]
TopKOption = Annotated[int, typer.Option(help="Keep this many tokens; 0: all.")]
MinPOption = Annotated[float, typer.Option(help="Keep tokens this probable beside the best.")]
PenaltyOption = Annotated[float, typer.Option("--repetition-penalty", help="1 is none.")]
_SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop",
    "ignore_eos",
)  # fmt: skip


def sampling_of(options: Mapping[str, Any]) -> SamplingParams:
    """How to choose tokens, from options by their names."""
    return SamplingParams(**{name: options[name] for name in _SAMPLING if name in options})


@contextmanager
def loaded(model: str, options: Mapping[str, Any]) -> Iterator[tuple["LLM", float]]:
    """The model, ready to write for one at a time, and the seconds that this took.

    Raises:
        ConfigError: an option is wrong, or two contradict each other.
        ModelError: a model is not there, not supported, or broken on disk.
    """
    began = time.perf_counter()
    settings: dict[str, Any] = {
        "dtype": options["dtype"],
        "kv_cache_dtype": options["kv_cache_dtype"],
        "batch_invariant": parse_invariant(options["batch_invariant"]),
        "max_num_seqs": 1,
    }
    if options.get("max_model_len") is not None:
        settings["max_model_len"] = options["max_model_len"]
    from foretoken import LLM

    settings["speculative_config"] = _speculation(model, options, settings)
    with LLM(model, **settings) as llm:
        yield llm, time.perf_counter() - began


def _speculation(
    model: str, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What the options say; where they say nothing, the default for this model."""
    from foretoken.assembly import default_speculation
    from foretoken.config import EngineConfig

    text, draft = options["speculative_config"], options["draft"]
    if draft is not None:
        if text is not None:
            allowed = "nothing beside --speculative-config, which has a key `model`"
            raise ConfigError("--draft", draft, allowed)
        return {"model": draft}
    if text is not None:
        return parse_speculation(text)
    return default_speculation(EngineConfig.from_kwargs(model=model, **settings))
