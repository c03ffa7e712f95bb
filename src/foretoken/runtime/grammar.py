"""Which tokens the grammar of a request allows at each row, and which it leaves no choice about.

Owns compiled grammars and one matcher per live request, brought up to date from the committed
tokens whenever it is asked, so that preemption and rejected drafts need nothing. The automaton is
llguidance's. Invariants: what is allowed at a row depends on the output before it alone; where the
text to come is forced, so is its spelling in tokens, with or without speculation, and no added
token spells text: only a grammar that names one has it; a grammar that fails (too complex, or a
token that it cannot read) is reported, never silently dropped; compiling never makes the thread
wait that runs the steps.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ParameterError
from foretoken.extras import OptionalPackages
from foretoken.ops.logits import NEVER
from foretoken.runtime.compile_grammar import (
    GrammarTokenizer,
    TrialCompiler,
    compile_grammar,
    reason_of,
    refused,
)
from foretoken.runtime.rows import Rows
from foretoken.runtime.sequence import Sequence
from foretoken.text.spelling import spelling_json
from foretoken.types import Request, SamplingParams
from foretoken.types.structure import StructuredOutputs

_MOST_KNOWN = 64
_CLASHES = ("min_tokens", "ignore_eos", "bad_words", "allowed_token_ids")
"""Parameters that could forbid everything that a grammar allows."""


@dataclass(slots=True)
class _RequestMatcher:
    """A matcher and how many output tokens it has read."""

    request: Request
    matcher: Any
    num_read: int = 0
    forbidden: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)
    """Masks after drafts that were asked about since the last committed token."""


class Grammars:
    """The grammars of one engine.

    `compiled`, `knows`, `check` and `stop` may be called from any thread, the rest from one.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str] | None,
        vocab_size: int,
        eos_ids: Seq[int],
        device: torch.device | str = "cpu",
    ) -> None:
        """Grammars over `vocab_size` ids; without a tokenizer there can be none, and what its
        tokenizer.json would say is asked for with the first of them."""
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._device = torch.device(device)
        self._tokenizer_json = tokenizer_json
        self._trial: TrialCompiler | None = None
        self._tokenizer: Any = None
        self._executor: Any = None
        self._known: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self._reading, self._building = threading.Lock(), threading.Lock()
        self._matchers: dict[str, _RequestMatcher] = {}
        self._failures: dict[str, str] = {}

    def knows(self, params: SamplingParams) -> bool:
        """Whether `compiled` answers at once."""
        return params.structured is None or params.structured in self._known

    def compiled(self, params: SamplingParams) -> Any:
        """The grammar that a request with these parameters must carry; None: it needs none.

        Takes seconds at most, without holding up other threads.

        Raises:
            ParameterError: it does not compile, is too large, has no text that could match it, or
                clashes with other parameters.
        """
        given = params.structured
        if given is None:
            return None
        for name in _CLASHES:
            value = getattr(params, name)
            if value:
                raise ParameterError(name, value, "nothing beside structured_outputs")
        if self._tokenizer_json is None or not self._eos_ids:
            raise ParameterError("structured_outputs", given.kind, "a model with a tokenizer")
        found = self._remembered(given)
        if found is None:
            with self._building:
                found = self._remembered(given) or self._remember(given, self._build(given))
        if isinstance(found, ParameterError):
            raise ParameterError(found.field, found.given, found.allowed)
        return found

    def check(self, request: Request) -> None:
        """Check that the grammar of a request could have written what it resumes. Raises
        ParameterError: one of the ids is forbidden at its place."""
        if request.grammar is None or not request.resumed_ids:
            return
        ids = list(request.resumed_ids)
        num_read: int = request.grammar.deep_copy().try_consume_tokens(ids)
        if num_read < len(ids):
            given = f"{ids[num_read]} as number {num_read + 1}"
            raise ParameterError("resume.output_ids", given, "what structured_outputs allows")

    def forbid(self, logits_RV: Tensor, rows: Rows) -> None:
        """Set the logits of what the grammar forbids to -inf, in place; one row per row of `rows`.

        Rows after a draft that the grammar forbids are left alone: they are never reached.
        """
        state = self._matcher_of(rows.sequence)
        if state is None:
            return
        for row in range(rows.num_rows):
            drafts = rows.drafts[: rows.first + row]
            if drafts not in state.forbidden:
                state.forbidden[drafts] = self._mask(state, drafts)
            forbidden_V = state.forbidden[drafts]
            if forbidden_V is not None:
                logits_RV[row].masked_fill_(forbidden_V, NEVER)

    def forced(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Up to `most` next tokens about which the grammar leaves no choice."""
        state = self._matcher_of(sequence)
        return () if state is None else tuple(self._forced(state.matcher, most))

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine."""
        self._matchers.pop(request_id, None)
        self._failures.pop(request_id, None)

    def stop(self) -> None:
        """End what is being compiled, from any thread."""
        if self._trial is not None:
            self._trial.stop()

    def take_failures(self) -> dict[str, str]:
        """What failed since the last call, by request; those requests must be ended."""
        failures, self._failures = self._failures, {}
        return failures

    def _matcher_of(self, sequence: Sequence) -> _RequestMatcher | None:
        """The matcher after the committed tokens; None without a grammar, or after a failure."""
        request = sequence.request
        given = request.params.structured
        if given is None:
            return None
        state = self._matchers.get(request.request_id)
        if state is None or state.request is not request:
            assert request.grammar is not None, f"{request.request_id} came without its grammar"
            state = _RequestMatcher(request, request.grammar.deep_copy())
            self._matchers[request.request_id] = state
        new_ids = sequence.token_ids[sequence.num_prompt + state.num_read :]
        if new_ids:
            state.num_read += len(new_ids)
            state.forbidden.clear()
            state.matcher.consume_tokens(new_ids)
        if state.matcher.is_error():
            self._failures[request.request_id] = reason_of(state.matcher)
            return None
        return state

    def _mask(self, state: _RequestMatcher, drafts: tuple[int, ...]) -> Tensor | None:
        """What is forbidden after `drafts`, bool [V]; None if one of them was forbidden."""
        matcher = state.matcher
        if self._eos_ids and not set(self._eos_ids).isdisjoint(drafts):
            return None
        num_read = matcher.try_consume_tokens(list(drafts)) if drafts else 0
        try:
            return self._forbidden(state) if num_read == len(drafts) else None
        finally:
            if num_read:
                matcher.rollback(num_read)

    def _forbidden(self, state: _RequestMatcher) -> Tensor | None:
        forced = self._forced(state.matcher, 1)
        if forced:
            forbidden_V = torch.ones(self._vocab_size, dtype=torch.bool)
            forbidden_V[forced[0]] = False
            return forbidden_V.to(self._device)
        allowed = bytearray(state.matcher.compute_logit_bias())
        if state.matcher.is_error():
            self._failures[state.request.request_id] = reason_of(state.matcher)
            return None
        return (torch.frombuffer(allowed, dtype=torch.uint8) == 0).to(self._device)

    def _forced(self, matcher: Any, most: int) -> list[int]:
        """The spelling of the text to come, as far as it is forced, up to `most` tokens; the end,
        if only that is."""
        forced: list[int] = matcher.compute_ff_tokens()[:most]
        if not forced:
            return self._eos_ids[:1] if matcher.is_stopped() and not matcher.is_error() else []
        # llguidance finds added tokens in the text, and normalises it: its spelling need not be
        # of the text.
        num_right: int = matcher.validate_tokens(forced)
        return forced[:num_right] or [self._spelt(matcher.compute_ff_bytes(), forced[0])]

    def _spelt(self, text: bytes, named: int) -> int:
        """The first token of a text in ordinary ones, the longest; `named` if the grammar names it
        here, which no text does."""
        try:
            beginning = text.decode()
        except UnicodeDecodeError as error:
            beginning = text[: error.start].decode()
        found: list[int] = self._tokenizer.greedy_tokenize(beginning)
        return found[0] if found else named

    def _remembered(self, given: StructuredOutputs) -> Any:
        """What became of a structure before: its grammar, or why there is none."""
        with self._reading:
            if given in self._known:
                self._known.move_to_end(given)
            return self._known.get(given)

    def _remember(self, given: StructuredOutputs, found: Any) -> Any:
        with self._reading:
            self._known[given] = found
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return found

    def _build(self, given: StructuredOutputs) -> Any:
        """The grammar, its first mask computed; or the error that says why there is none."""
        with OptionalPackages("structured_outputs"):
            import llguidance

        order = (given.kind, given.source, given.disable_any_whitespace)
        try:
            if self._trial is None:
                self._executor = llguidance.LLExecutor(num_threads=1)
                self._trial = self._load()
            self._trial.check(*order)
            matcher = compile_grammar(*order, self._tokenizer)
        except ParameterError as error:
            return error
        if not self._begins(matcher):
            return refused(given.kind, given.source, "what some text can match")
        return matcher

    def _load(self) -> TrialCompiler:
        """Read the tokenizer; the compiler that tries grammars over it first."""
        assert self._tokenizer_json is not None, "checked by `compiled`"
        source = GrammarTokenizer(
            tokenizer_json=spelling_json(self._tokenizer_json(), self._eos_ids),
            vocab_size=self._vocab_size,
            eos_ids=tuple(self._eos_ids),
        )
        self._tokenizer = source.load()
        return TrialCompiler(source)

    def _begins(self, matcher: Any) -> bool:
        """Whether anything is allowed at the start. The first mask can take long; this computes it
        without holding the interpreter, and the copies of `matcher` find its work done."""
        from llguidance import numpy as masks

        mask = masks.allocate_token_bitmask(1, self._vocab_size)
        masks.fill_next_token_bitmask_par(self._executor, [(matcher, 0)], mask)
        return bool(mask.any()) and not matcher.is_error()
