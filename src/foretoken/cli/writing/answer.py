"""One text as it is written: where it goes, and what it took.

Owns what a terminal shows of it, each token in the colour of its source. Knows neither prompts nor
conversations.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, final

from foretoken.errors import ForetokenError
from foretoken.types import FinishReason, Output, RequestMetrics

if TYPE_CHECKING:
    from foretoken import LLM


@final
class TimedText:
    """A text that grows, and its times: seconds since it was asked for."""

    def __init__(self) -> None:
        """Asked for now."""
        self._began = time.perf_counter()
        self.text = ""
        self.num_tokens = 0
        self.first_s = 0.0
        """Until the first tokens came."""
        self.finish_reason: FinishReason | None = None
        """None: it was not written to its end."""
        self.metrics: RequestMetrics | None = None
        self._seconds = 0.0
        self._num_first = 0

    def follow(self, outputs: Iterator[Output]) -> Generator[Output, None, None]:
        """The outputs, taken note of as they pass.

        Raises:
            ForetokenError: the last one ends with an error.
        """
        with closing(outputs):  # type: ignore[type-var]  # a generator, which ends its request
            for output in outputs:
                self._add(output)
                yield output
                if output.error is not None:
                    raise ForetokenError(output.error)

    def _add(self, output: Output) -> None:
        self._seconds = time.perf_counter() - self._began
        if not self.num_tokens:
            self.first_s, self._num_first = self._seconds, len(output.new_token_ids)
        self.text += output.text
        self.num_tokens += len(output.new_token_ids)
        self.finish_reason, self.metrics = output.finish_reason, output.metrics

    @property
    def writing_s(self) -> float:
        """Seconds of writing, which begins when the prompt has been read."""
        return self._seconds - self.first_s

    @property
    def num_written(self) -> int:
        """Tokens that came in this time."""
        return self.num_tokens - self._num_first


def describe_speed(answers: Sequence[TimedText]) -> str:
    """How much was written, how fast, and after what time on average."""
    words = [f"{sum(one.num_tokens for one in answers)} tokens"]
    seconds = sum(one.writing_s for one in answers)
    if seconds > 0:
        words.append(f"{sum(one.num_written for one in answers) / seconds:.1f} tokens/s")
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
    length = 1 + sum(accepted) / len(accepted)
    return f"acceptance length {length:.2f}, {sum(accepted)} of {drafted} drafts accepted"


@final
class Screen:
    """A terminal that shows texts in colours."""

    def __init__(self, llm: "LLM") -> None:
        """Show what `llm` writes."""
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._llm = llm

    def legend(self) -> None:
        """Say what the colours mean."""
        from foretoken.cli.writing.paint import legend

        self._console.print(legend())

    def say(self, text: str, end: str = "\n") -> None:
        """Show words that are not the model's."""
        from rich.text import Text

        self._console.print(Text(text, style="dim"), end=end)

    def show(self, outputs: Iterator[Output]) -> None:
        """Show a text as it comes."""
        from rich.text import Text

        from foretoken.cli.writing.paint import STYLES, Painter

        painter = Painter(self._llm.get_tokenizer(), self._llm.block_drafters)
        for output in outputs:
            for piece, source in painter.paint(output):
                self._console.print(Text(piece, style=STYLES[source]), end="")


def write_plain(outputs: Iterator[Output]) -> None:
    """Write a text and the end of its line, and nothing else."""
    for output in outputs:
        print(output.text, end="", flush=True)
    print()
