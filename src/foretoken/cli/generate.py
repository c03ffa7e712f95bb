"""`foretoken generate`: one prompt, streamed, every token in the colour of its source."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import (
    DtypeOption,
    IgnoreEosOption,
    InvariantOption,
    KVCacheOption,
    MaxTokensOption,
    SeedOption,
    SpeculativeOption,
    StopOption,
    TemperatureOption,
    parse_invariant,
    parse_speculation,
    read_text,
)
from foretoken.errors import ConfigError, ForetokenError
from foretoken.types import Output, SamplingParams

if TYPE_CHECKING:
    from foretoken import LLM


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; left out or `-`: standard input."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Packaged name, folder, or Hugging Face id.")
    ] = "demo",
    speculative_config: SpeculativeOption = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep this much probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this probable beside the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is none.")] = 1.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    ignore_eos: IgnoreEosOption = False,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVCacheOption = "auto",
    batch_invariant: InvariantOption = "auto",
) -> None:
    """Continue a prompt.

    On a terminal each token has the colour of its source.

    Piped, the continuation alone is written.

    It speculates unless told otherwise, with whatever there is for the model.
    """
    text = _read_prompt(prompt, file)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    settings: dict[str, Any] = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "batch_invariant": parse_invariant(batch_invariant),
        "max_num_seqs": 1,
    }
    from foretoken import LLM

    settings["speculative_config"] = _speculation(speculative_config, model, settings)
    with LLM(model, **settings) as llm:
        outputs = _unless_failed(llm.stream(text, params))
        if sys.stdout.isatty():
            _write_painted(text, outputs, llm)
        else:
            _write_plain(outputs)


def _speculation(text: str | None, model: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What the option says; where it is not given, the default for this model."""
    from foretoken.assembly import default_speculation
    from foretoken.config import EngineConfig

    if text is not None:
        return parse_speculation(text)
    return default_speculation(EngineConfig.from_kwargs(model=model, **settings))


def _unless_failed(outputs: Iterator[Output]) -> Iterator[Output]:
    """The outputs, and an error if the last one ends with one."""
    for output in outputs:
        yield output
        if output.error is not None:
            raise ForetokenError(output.error)


def _write_plain(outputs: Iterator[Output]) -> None:
    for output in outputs:
        print(output.text, end="", flush=True)
    print()


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        if prompt is not None:
            raise ConfigError("PROMPT", prompt, "nothing beside --file")
        return read_text(file, "--file")
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise ConfigError("PROMPT", None, "a prompt, --file, or text on standard input")
    return sys.stdin.read()


def _write_painted(prompt: str, outputs: Iterator[Output], llm: "LLM") -> None:
    from rich.console import Console
    from rich.text import Text

    from foretoken.cli.paint import STYLES, Painter, legend

    console = Console(highlight=False, soft_wrap=True)
    painter = Painter(llm.get_tokenizer(), llm.block_drafters)
    console.print(legend())
    console.print(Text(prompt, style="dim"), end="")
    began, num_tokens, last = time.perf_counter(), 0, None
    for output in outputs:
        num_tokens += len(output.new_token_ids)
        last = output
        for piece, source in painter.paint(output):
            console.print(Text(piece, style=STYLES[source]), end="")
    seconds = time.perf_counter() - began
    line = f"\n{num_tokens} tokens, {num_tokens / seconds:.0f} tokens/s"
    if last is not None and last.metrics is not None:
        line += f", acceptance length {last.metrics.acceptance_length:.2f}"
    console.print(Text(line, style="dim"))
