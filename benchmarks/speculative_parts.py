"""What a speculative step is made of, timed: bare passes, and the parts of the engine's own steps.

Owns the clocks on the parts of an engine that drafts with a model. Every time comes with the
limits of the machine in its moment, so that it can be held against its floor. Knows nothing of
tables. Models must run in our own layers, with compiled kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from forwards import Probe, draft_probe, target_probe
from peer_floor import Limits, LimitsProbe, between
from step_shares import Clock, run_steps, start, stop

from foretoken import LLM
from foretoken.models.decoder import Decoder
from foretoken.types import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A bare forward pass, the mean of a few; seconds."""

    whole: float
    layers: float
    """Of it, in the call into C that runs all layers."""
    head: float
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Bare drafts in one call, the mean of a few calls; seconds."""

    whole: float
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the running engine, the mean of some; seconds."""

    whole: float
    drafting: float
    draft_call: float
    """Of it, in the call into C: all passes of the draft with their heads, and the choices."""
    target: float
    layers: float
    head: float
    verify: float
    """From logits to accepted tokens."""
    schedule: float
    commit: float
    fed: float
    """Rows of the draft's first pass."""
    tokens: float
    """Tokens that were kept."""
    limits: Limits

    @property
    def rest(self) -> float:
        """Neither drafting nor the target's pass nor its check."""
        return self.whole - self.drafting - self.target - self.verify


class StepTimer:
    """An engine with a draft model, its bare passes, and the machine's limits."""

    def __init__(self, llm: LLM, context: int, limits: LimitsProbe) -> None:
        """Over an idle LLM, around `context` positions."""
        self._llm, self._context, self._limits = llm, context, limits
        self.target, self.draft = target_probe(llm, context), draft_probe(llm, context)
        self._parts: Any = llm._engine.parts

    def bare(self, probe: Probe, rows: int, times: int) -> Callable[[], Pass]:
        """A pass over `rows` tokens, to be timed later."""

        def measure() -> Pass:
            before = self._limits.now()
            with self._parts.threads, _clocked(probe.runner) as (layers, head):
                whole = probe.seconds(rows, times)
            return Pass(
                whole=whole,
                layers=layers.seconds / times,
                head=head.seconds / times,
                limits=between(before, self._limits.now()),
            )

        return measure

    def drafting(self, fed: int, drafts: int, times: int) -> Callable[[], Drafting]:
        """Drafts after so many tokens that the draft has not seen, to be timed later."""

        def measure() -> Drafting:
            before = self._limits.now()
            with self._parts.threads:
                whole = self.draft.drafting_seconds(fed, drafts, times)
            return Drafting(whole=whole, limits=between(before, self._limits.now()))

        return measure

    def steps(self, drafts: int, steps: int) -> Callable[[], Step]:
        """Steps of one greedy request with so many drafts each, to be timed later."""

        def measure() -> Step:
            self._llm._engine.set_speculation(Speculation(num_speculative_tokens=drafts))
            names = start(self._llm, 1, self._context, steps)
            before = self._limits.now()
            found = self._measure(names[0], steps)
            stop(self._llm, names)
            return replace(found, limits=between(before, self._limits.now()))

        return measure

    def _measure(self, name: str, steps: int) -> Step:
        parts = self._parts
        sequence = parts.scheduler.sequences[name]
        rollout, fed = self.draft.runner.model.rollout, _Fed(self.draft.runner.roll_out)
        kept = sequence.num_tokens
        with (
            _clock(parts.proposer, "propose") as drafting,
            _clock(rollout, "_run") as draft_call,
            _clock(parts.runner, "run") as target,
            _clocked(parts.runner) as (layers, head),
            _clock(parts.verifier, "verify") as verify,
            _clock(parts.scheduler, "schedule") as schedule,
            _clock(parts.scheduler, "commit") as commit,
            _instead(self.draft.runner, "roll_out", fed),
        ):
            whole = run_steps(self._llm, steps)
        assert sequence.finish_reason is None, "the request ended before its steps"
        assert fed.calls == steps, (fed.calls, steps)
        clocks = {
            "drafting": drafting,
            "draft_call": draft_call,
            "target": target,
            "layers": layers,
            "head": head,
            "verify": verify,
            "schedule": schedule,
            "commit": commit,
        }
        return Step(
            whole=whole / steps,
            fed=fed.rows / steps,
            tokens=(sequence.num_tokens - kept) / steps,
            limits=Limits(read_bytes_per_s=0.0, products_per_s={}),
            **{part: clock.seconds / steps for part, clock in clocks.items()},
        )


class _Fed:
    """Counts the rows that rollouts are given."""

    def __init__(self, roll_out: Callable[..., Any]) -> None:
        self._roll_out = roll_out
        self.calls = self.rows = 0

    def __call__(self, layouts: Any, *rest: Any) -> Any:
        self.calls += 1
        self.rows += sum(layout.num_tokens for layout in layouts)
        return self._roll_out(layouts, *rest)


@contextmanager
def _clocked(runner: Any) -> Iterator[tuple[Clock, Clock]]:
    """Clocks on the call that runs a runner's layers, and on its model's head."""
    assert isinstance(runner.model, Decoder), type(runner.model)
    model: Any = runner.model
    assert model.compiled is not None, "no compiled kernels"
    head = Clock()
    runner.model = replace(model, top=head.wrap(model.top))
    try:
        with _clock(model.compiled, "_run") as layers:
            yield layers, head
    finally:
        runner.model = model


@contextmanager
def _clock(owner: Any, name: str) -> Iterator[Clock]:
    """A clock on a method or on a function that is kept as an attribute."""
    clock = Clock()
    with _instead(owner, name, clock.wrap(getattr(owner, name))):
        yield clock


@contextmanager
def _instead(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another function in the place of one."""
    own = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
