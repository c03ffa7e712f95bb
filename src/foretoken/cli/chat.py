"""`foretoken chat`: a conversation in the terminal, or a file of turns and their answers.

Owns the conversation. Every turn is rendered whole by the model's chat template: what was computed
of its beginning is found again by prefix caching. Nothing is ever dropped from it silently.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, final

import typer

from foretoken.cli.options import with_parameters
from foretoken.cli.writing import (
    WRITING,
    Screen,
    TimedText,
    describe_acceptance,
    describe_speed,
    loaded,
    sampling_of,
    write_plain,
)
from foretoken.errors import (
    CapacityError,
    ConfigError,
    ContextError,
    EngineLostError,
    ForetokenError,
)
from foretoken.types import FinishReason, Output, SamplingParams

if TYPE_CHECKING:
    from foretoken import LLM

COMMANDS: Final = {
    "/help": "show this",
    "/clear": "begin a new conversation",
    "/system TEXT": "give other instructions; none without TEXT",
    "/stats": "say what speculation and caching brought so far",
    "/quit": "end; so does Ctrl-D. Ctrl-C ends the answer being written",
}

_COMMAND = re.compile(r"/\w+")
_FULL = "/clear begins a new conversation"


@with_parameters(WRITING)
def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A GGUF file, folder, packaged name or hub id.")
    ],
    system: Annotated[
        str | None, typer.Option(help="Instructions before the conversation.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer.", show_default="what fits")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Most tokens of the conversation.", show_default="the model's context"),
    ] = None,
    **others: Any,
) -> None:
    """Talk to a model, through its own chat template.

    On a terminal each token has the colour of its source, and a line after each answer says what
    speculation brought. /help lists commands. Ctrl-C ends the answer being written.

    Piped, each line is a turn, and the answers alone are written.

    It speculates unless told otherwise, with whatever there is for the model.
    """
    params = sampling_of({"max_tokens": max_tokens, **others})
    with loaded(model, {"max_model_len": max_model_len, **others}) as (llm, seconds):
        if not llm.get_tokenizer().has_chat_template:
            allowed = "a model with a chat template; `foretoken generate` continues texts without"
            raise ConfigError("MODEL", model, allowed)
        talk = Conversation(llm, params, system)
        if sys.stdin.isatty() and sys.stdout.isatty():
            screen = Screen(llm)
            screen.legend()
            screen.say(f"{model}, loaded in {seconds:.1f} s; /help lists commands")
            Terminal(talk, screen).run()
            return
        for line in sys.stdin:
            if line.strip():
                talk.ask(line.strip("\r\n"), write_plain)


@final
class Conversation:
    """What was said, and what its answers took."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self._llm, self._params = llm, params
        self._turns: list[dict[str, str]] = []
        self.system = system
        """Instructions, if any."""
        self.answers: list[TimedText] = []
        """All that were written to their ends, those of earlier conversations too."""
        self.num_prompt_tokens = 0
        """Of all turns, each with what was said before it."""

    def clear(self) -> None:
        """Begin another, with the same instructions."""
        self._turns = []

    def ask(self, text: str, show: Callable[[Iterator[Output]], None]) -> TimedText:
        """Say something, and have the answer shown. If `show` leaves off early, it stands as far
        as it came; what got no answer counts as not said.

        Raises:
            ForetokenError: it cannot be answered.
        """
        turns = [*self._turns, {"role": "user", "content": text}]
        answer = TimedText()
        with closing(answer.follow(self._outputs(turns))) as outputs:
            show(outputs)
        if answer.text:
            self._turns = [*turns, {"role": "assistant", "content": answer.text}]
        if answer.finish_reason is not None:
            self.answers.append(answer)
        return answer

    def _outputs(self, turns: list[dict[str, str]]) -> Iterator[Output]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        ids = self._llm.get_tokenizer().apply_chat_template([*system, *turns])
        self.num_prompt_tokens += len(ids)
        try:
            yield from self._llm.stream({"prompt_token_ids": ids}, self._params)
        except (ContextError, CapacityError) as error:
            allowed = f"{error.allowed}; {_FULL}"
            raise type(error)("the conversation", error.given, allowed) from error

    def describe(self, answer: TimedText) -> str:
        """What an answer took, and why it has no end of its own, if so."""
        words = [describe_speed([answer]), describe_acceptance([answer])]
        if answer.finish_reason is None:
            words.append("broken off")
        elif answer.finish_reason is FinishReason.LENGTH:
            is_cut = answer.num_tokens == self._params.max_tokens
            words.append("cut by --max-tokens" if is_cut else f"the context is full: {_FULL}")
        return ", ".join(word for word in words if word)

    def describe_all(self) -> str:
        """What all answers took."""
        cached = sum(one.metrics.num_cached_tokens for one in self.answers if one.metrics)
        lines = [
            f"{len(self.answers)} answers, {describe_speed(self.answers)}",
            describe_acceptance(self.answers) or "no drafts",
            f"{self.num_prompt_tokens} tokens read, {cached} of them computed before",
        ]
        return "\n".join(lines)


@final
class Terminal:
    """Somebody who types, and sees the answers come."""

    def __init__(self, talk: Conversation, screen: Screen) -> None:
        self._talk, self._screen = talk, screen

    def run(self) -> None:
        """Until somebody has had enough."""
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() arrows and a history
        for line in self._typed():
            word, _, rest = line.strip().partition(" ")
            if word == "/quit":
                return
            if _COMMAND.fullmatch(word):
                self._obey(word, rest.strip())
            else:
                self._answer(line)

    def _typed(self) -> Iterator[str]:
        """Lines, until Ctrl-D, or Ctrl-C twice."""
        is_warned = False
        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if is_warned:
                    return
                is_warned = True
                self._screen.say("Ctrl-C once more ends; so do Ctrl-D and /quit")
                continue
            is_warned = False
            if line.strip():
                yield line

    def _obey(self, word: str, rest: str) -> None:
        if word == "/clear":
            self._talk.clear()
            self._screen.say("a new conversation")
        elif word == "/system":
            self._talk.system = rest or None
            self._screen.say("new instructions" if rest else "no instructions")
        elif word == "/stats":
            self._screen.say(self._talk.describe_all())
        else:
            if word != "/help":
                self._screen.say(f"there is no {word}")
            wide = max(map(len, COMMANDS))
            lines = [f"{name:{wide}}  {meaning}" for name, meaning in COMMANDS.items()]
            self._screen.say("\n".join(lines))

    def _answer(self, text: str) -> None:
        def show(outputs: Iterator[Output]) -> None:
            with suppress(KeyboardInterrupt):
                self._screen.show(outputs)

        try:
            answer = self._talk.ask(text, show)
        except EngineLostError:
            raise
        except ForetokenError as error:
            self._screen.say(f"foretoken: {error}\n")
        else:
            self._screen.say(f"\n{self._talk.describe(answer)}\n")
