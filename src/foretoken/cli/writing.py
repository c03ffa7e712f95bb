"""What commands that write with a model share: their options, its loading, what a terminal shows.

Each token has the colour of its source: accepted drafts, and three kinds of the target's tokens.
What came out of a block is also underlined. Without a terminal the same text comes out plain. Every
mistake in an option is a ConfigError that names it. Knows no command.
"""

import inspect
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

from foretoken.cli.options import (
    DtypeOption,
    InvariantOption,
    KVCacheOption,
    SeedOption,
    SpeculativeOption,
    TemperatureOption,
    parse_invariant,
    parse_speculation,
)
from foretoken.errors import ConfigError, ForetokenError
from foretoken.types import FinishReason, Output, RequestMetrics, SamplingParams, TokenSource
from foretoken.types.accepted import acceptance_length

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from foretoken import LLM
    from foretoken.text.tokenizer import Tokenizer

_SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop",
    "ignore_eos",
)  # fmt: skip


def _options(
    speculative_config: SpeculativeOption = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "--spec-model",
            metavar="MODEL",
            help="Draft with this model or head; short for the key `model`.",
            show_default=False,
        ),
    ] = None,
    temperature: TemperatureOption = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep this much probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this probable beside the best.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="1 is none.")
    ] = 1.0,
    seed: SeedOption = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End at this text; may be given several times.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of text.")
    ] = False,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVCacheOption = "auto",
    batch_invariant: InvariantOption = "auto",
) -> None:
    """The options of every command that writes, beside its own."""


WRITING = tuple(inspect.signature(_options).parameters.values())


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
    from foretoken.config import EngineConfig
    from foretoken.engine.wiring import default_speculation

    text, draft = options["speculative_config"], options["draft"]
    if draft is not None:
        if text is not None:
            allowed = "nothing beside --speculative-config, which has a key `model`"
            raise ConfigError("--draft", draft, allowed)
        return {"model": draft}
    if text is not None:
        return parse_speculation(text)
    return default_speculation(EngineConfig.from_kwargs(model=model, **settings))


@final
class TimedText:
    """A text that grows, and its times: seconds since it was asked for."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.text = ""
        self.num_tokens = 0
        self.seconds = self.first_s = 0.0
        """Until the last tokens came, and until the first, when the prompt has been read."""
        self.num_first = 0
        """Tokens that came first, all at once."""
        self.finish_reason: FinishReason | None = None
        """None: it was not written to its end."""
        self.metrics: RequestMetrics | None = None

    def follow(self, outputs: Iterator[Output]) -> Generator[Output, None, None]:
        """The outputs, taken note of as they pass. Raises ForetokenError: the last one ends with an
        error."""
        with closing(outputs):  # type: ignore[type-var]  # a generator, which ends its request
            for output in outputs:
                self.seconds = time.perf_counter() - self._began
                if not self.num_tokens:
                    self.first_s, self.num_first = self.seconds, len(output.new_token_ids)
                self.text += output.text
                self.num_tokens += len(output.new_token_ids)
                self.finish_reason, self.metrics = output.finish_reason, output.metrics
                yield output
                if output.error is not None:
                    raise ForetokenError(output.error)


def describe_speed(answers: Sequence[TimedText]) -> str:
    """How much was written, how fast, and after what time on average."""
    words = [f"{sum(one.num_tokens for one in answers)} tokens"]
    seconds = sum(one.seconds - one.first_s for one in answers)
    if seconds > 0:
        written = sum(one.num_tokens - one.num_first for one in answers)
        words.append(f"{written / seconds:.1f} tokens/s")
    began = [one.first_s for one in answers if one.num_tokens]
    if began:
        words.append(f"first token {sum(began) / len(began):.2f} s")
    return ", ".join(words)


def describe_acceptance(answers: Sequence[TimedText]) -> str | None:
    """What drafts brought; None: none was checked."""
    done = [one.metrics for one in answers if one.metrics is not None]
    accepted = [count for metrics in done for count in metrics.accepted_per_step]
    if not accepted:
        return None
    drafted = sum(sum(metrics.drafted_per_step) for metrics in done)
    length = acceptance_length(sum(accepted), len(accepted))
    return f"acceptance length {length:.2f}, {sum(accepted)} of {drafted} drafts accepted"


@final
class Screen:
    """A terminal that shows texts in colours."""

    def __init__(self, llm: "LLM", console: "Console | None" = None) -> None:
        """Show what `llm` writes, on a console of its own if none is given."""
        from rich.console import Console

        self._console = console or Console(highlight=False)
        self._llm = llm

    def legend(self) -> None:
        """Say what the colours mean."""
        self._console.print(legend(), soft_wrap=True)

    def say(self, text: str, end: str = "\n") -> None:
        """Show words that are not the model's."""
        from rich.text import Text

        self._console.print(Text(text, style="dim"), end=end, soft_wrap=True)

    def show(self, outputs: Iterator[Output]) -> None:
        """Show a text as it comes."""
        from rich.text import Text

        painter = Painter(self._llm.get_tokenizer(), self._llm.block_drafters)
        for output in outputs:
            for piece, source in painter.paint(output):
                self._console.print(Text(piece, style=STYLES[source]), end="", soft_wrap=True)


def write_plain(outputs: Iterator[Output]) -> None:
    """Write a text and the end of its line, and nothing else."""
    for output in outputs:
        print(output.text, end="", flush=True)
    print()


BLOCK = "block"
"""Beside the sources: an accepted draft of a drafter that fills in whole blocks."""
STYLES: dict[str, str] = {
    TokenSource.TARGET: "default",
    TokenSource.ACCEPTED: "green",
    BLOCK: "underline magenta",
    TokenSource.RECOVERED: "yellow",
    TokenSource.BONUS: "cyan",
}
MEANINGS: dict[str, str] = {
    TokenSource.TARGET: "target alone",
    TokenSource.ACCEPTED: "draft accepted",
    BLOCK: "block accepted",
    TokenSource.RECOVERED: "recovered (draft rejected)",
    TokenSource.BONUS: "bonus (all accepted)",
}


def legend() -> "Text":
    """What each colour means, on one line."""
    from rich.text import Text

    found = Text.assemble(("tokens: ", "dim"))
    for source, meaning in MEANINGS.items():
        found.append(meaning, STYLES[source]).append("  ")
    return found


class Painter:
    """Splits the text of a stream of outputs into pieces by token source.

    The pieces of one output together are exactly its text, which may lag behind its tokens while
    a character is incomplete or a stop string may be starting.
    """

    def __init__(
        self, tokenizer: "Tokenizer", block_drafters: frozenset[str] = frozenset()
    ) -> None:
        """Start with nothing written; drafts of `block_drafters` come as `BLOCK`."""
        from foretoken.text.tokenizer import TextOptions

        self._stream = tokenizer.stream(TextOptions())
        self._block_drafters = block_drafters
        self._num_seen = 0
        self._waiting: list[tuple[str, str]] = []

    def paint(self, output: Output) -> Iterator[tuple[str, str]]:
        """The new text of `output`, piece by piece, each with a key of `STYLES`."""
        each = zip(output.new_token_ids, output.sources, output.drafters, strict=True)
        for token, source, drafter in each:
            self._stream.feed([token])
            piece = self._stream.text[self._num_seen :]
            self._num_seen = len(self._stream.text)
            if piece:
                block = drafter in self._block_drafters
                self._waiting.append((piece, BLOCK if block else source))
        text = output.text
        while text:
            piece, mark = self._waiting.pop(0) if self._waiting else (text, TokenSource.TARGET)
            part, rest = piece[: len(text)], piece[len(text) :]
            if rest:
                self._waiting.insert(0, (rest, mark))
            text = text[len(part) :]
            yield part, mark
