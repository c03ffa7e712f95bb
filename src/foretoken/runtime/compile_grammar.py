"""From a schema, expression, list or grammar to llguidance's automaton; first in a child process.

llguidance bounds the size of a grammar, and the work of most; but some small schemas keep it busy
for hours, and some exhaust the stack, which ends the process. So whatever is new is compiled in a
child first, with the same tokenizer, and refused unless that ends within seconds, in bounded memory
and with less stack than our own threads have. Owns those bounds and the child: started at the first
need, ended with its owner. Run as a module, this file is the child; it imports no torch.
"""

import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict, dataclass
from typing import IO, Any, final

from foretoken.errors import ForetokenError, ParameterError

logger = logging.getLogger("foretoken")

_MOST_ITEMS_IN_ROW = 10_000
"""Ways to go on at one place, about four per property of an object: a thousand properties are fine,
three thousand are refused."""
_MOST_SECONDS = 5
"""Seconds of processor time that one grammar may take."""
_MOST_WAITED_S = 4 * _MOST_SECONDS
"""Seconds by the clock that one grammar may take, on a machine busy with other things."""
_MOST_BYTES = 4 << 30
"""Address space of the child."""
_STACK_BYTES = 1 << 20
"""Threads have 8 MiB as a rule, 2 MiB where the limit of the stack was taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarTokenizer:
    """The tokens that a grammar is compiled over."""

    tokenizer_json: str
    """The text of a tokenizer.json."""
    vocab_size: int
    """Ids of the model; those without a token can be named by a grammar, as `<[300]>`."""
    eos_ids: tuple[int, ...]

    def load(self) -> Any:
        """An `llguidance.LLTokenizer`; takes a second for 150,000 tokens. Raises ParameterError:
        llguidance cannot read it."""
        import llguidance

        size, eos_ids = self.vocab_size, list(self.eos_ids)
        try:
            return llguidance.LLTokenizer(self.tokenizer_json, n_vocab=size, eos_token=eos_ids)
        except ValueError as error:
            allowed = f"a model whose tokenizer llguidance can read: {error}"
            raise ParameterError("structured_outputs", "a structure", allowed) from None


def compile_grammar(kind: str, source: str, compact: bool, tokenizer: Any) -> Any:
    """An llguidance matcher at the start of what `source` describes.

    Args:
        kind: one of `foretoken.types.structure.KINDS`.
        source: its schema, expression, choices (as JSON) or grammar.
        compact: JSON without whitespace between its parts.
        tokenizer: an `llguidance.LLTokenizer`.

    Raises:
        ParameterError: it does not compile, or is too large.
    """
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=_MOST_ITEMS_IN_ROW)
    try:
        text = _grammar_text(kind, source, compact)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    except (ValueError, RecursionError) as error:
        raise refused(kind, source, str(error)) from None
    if matcher.is_error():
        raise refused(kind, source, reason_of(matcher))
    return matcher


def refused(kind: str, source: str, reason: str) -> ParameterError:
    """What to raise about a structure that cannot be had."""
    allowed = reason if len(reason) <= 300 else reason[:297] + "..."
    return ParameterError(f"structured_outputs.{kind}", source, allowed)


def reason_of(matcher: Any) -> str:
    """Why a matcher is in error, in llguidance's words."""
    said = matcher.get_error().removesuffix("\n<non-verbose/>")
    return f"what llguidance can follow: {said}"


def _grammar_text(kind: Any, source: str, compact: bool) -> str:
    """The grammar in llguidance's own form."""
    import llguidance

    if kind in ("json", "json_object"):
        options: Any = {"whitespace_flexible": not compact}
        return llguidance.LLMatcher.grammar_from_json_schema(source, overrides=options)
    return llguidance.grammar_from(kind, source)


@final
class TrialCompiler:
    """A child process that compiles what it is given. Used by one thread, `stop` by any."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., TrialCompiler] | None = None

    def check(self, kind: str, source: str, compact: bool) -> None:
        """Compile, as `compile_grammar` would. Raises ParameterError: it does not compile, or not
        within the bounds; ForetokenError: no process can be started."""
        order = {"kind": kind, "source": source, "compact": compact}
        try:
            line = _ask(self._running(), _line(order), _MOST_WAITED_S)
        except BaseException:  # its answer would be taken for that to the next order
            if self._child is not None:
                self._ended()
            raise
        if not line:
            logger.warning("a grammar was refused: its compiler ended with %d", self._ended())
            most = f"{_MOST_SECONDS} s, {_MOST_BYTES >> 30} GiB and {_STACK_BYTES >> 20} MiB"
            raise refused(kind, source, f"what compiles within {most} of stack")
        reason: str | None = json.loads(line)
        if reason is not None:
            raise refused(kind, source, reason)

    def stop(self) -> None:
        """End the child, and with it a `check` that waits for it."""
        if self._child is not None:
            self._child.kill()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is not None and self._child.poll() is None:
            return self._child
        if self._child is not None:
            self._ended()
        command = [sys.executable, "-P", "-m", __name__]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            child = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment
            )
        except OSError as error:
            raise ForetokenError(f"no process to compile grammars in: {error}") from error
        self._child, self._end = child, weakref.finalize(self, _end, child)
        if not _ask(child, _line(asdict(self._tokenizer))):
            raise ForetokenError(f"the compiler of grammars ended with {self._ended()}")
        return child

    def _ended(self) -> int:
        """End the child; its exit code."""
        assert self._child is not None and self._end is not None, "it was running"
        child, self._child = self._child, None
        self._end()
        return child.returncode


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _ask(
    child: "subprocess.Popen[bytes]", order: bytes, most_seconds: float | None = None
) -> bytes:
    """The line that answers an order; empty if the child ended, or took too long."""
    assert child.stdin is not None and child.stdout is not None, "made with pipes"
    try:
        child.stdin.write(order)
        child.stdin.flush()
    except BrokenPipeError:
        return b""
    answered = select.select([child.stdout], [], [], most_seconds)[0]
    return child.stdout.readline() if answered else b""


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.communicate()


def main(orders: IO[bytes], answers: IO[bytes]) -> None:
    """Read a tokenizer and say `null`, then compile order after order with a line for each: `null`,
    or why not."""
    tokenizer = GrammarTokenizer(**json.loads(orders.readline())).load()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    answers.write(_line(None))
    answers.flush()
    for line in orders:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = int(used.ru_utime + used.ru_stime) + _MOST_SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
        reason = None
        try:
            compile_grammar(**json.loads(line), tokenizer=tokenizer)
        except ParameterError as error:
            reason = error.allowed
        answers.write(_line(reason))
        answers.flush()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's are for the owner, who ends us
        signal.signal(number, signal.SIG_IGN)
    threading.stack_size(_STACK_BYTES)
    compiling = threading.Thread(target=main, args=(sys.stdin.buffer, sys.stdout.buffer))
    compiling.start()
    compiling.join()
