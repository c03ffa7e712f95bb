"""The values that pass between deciding how far to draft, drafting, and learning what became of it.

A step's plan is made once, before the step runs, and its batch carries it. Whoever learns is given
the plan back together with the outcome and the times, so nothing has to be remembered in between.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from foretoken.types import FinishReason, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What else the step does; one object per step, the same for all of its sequences."""

    num_decoding: int
    """Sequences that decode in the step."""
    num_prefilling: int
    """Running sequences with prompt tokens left to compute."""
    num_prompt_tokens: int = 0
    """Prompt tokens that the step is about to compute."""

    @property
    def num_running(self) -> int:
        """Sequences that hold pages, decoding or not."""
        return self.num_decoding + self.num_prefilling


class DecodingSequence(Protocol):
    """What a planner may know of a sequence that decodes."""

    @property
    def request(self) -> Request:
        """What was asked for."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""

    @property
    def num_output(self) -> int:
        """Output tokens so far."""

    @property
    def num_preemptions(self) -> int:
        """How often its keys and values were thrown away."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""


class Feed(NamedTuple):
    """A drafter is to catch up with a sequence, without drafting."""

    place: int
    """Of the sequence among those that decode."""
    drafter: str
    rows: int
    """Most tokens to read now."""
    window: int | None = None
    """So many of the latest tokens are taken for the whole sequence; None: all of it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """What a plan by models of time and acceptance expects of its step."""

    seconds: float
    plain_s: float
    """Of the same step without drafts."""
    prompt_s: float = 0.0
    """Of that, what prompts add: it is not for the tokens that are decoded."""
    tokens: float
    """Of all decoding sequences."""
    row_s: float
    """That one more row adds."""
    free_rows: int
    """Rows of drafts that cost no pass which the step may carry beside those that were planned."""

    @property
    def price(self) -> float:
        """Tokens per second that the step gives: what a second has to bring to be worth it."""
        return self.tokens / (self.seconds - self.prompt_s)

    @property
    def token_s(self) -> float:
        """Seconds that plain steps without prompts take for a token of each sequence."""
        return self.plain_s - self.prompt_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """How far the sequences of one step may draft."""

    load: StepLoad
    budgets: tuple[int, ...]
    """Most drafts of each decoding sequence, in the order in which they were asked for."""
    wanted: bool = True
    """Whether any sequence may have drafts, by what settings, operator and requests say."""
    limit: int | None = None
    """What the load leaves to any sequence that it limits; None: it limited none of them."""
    lengths: tuple[int, ...] = ()
    """Of these, drafts by the drafter in `drafters`, whose passes are part of the plan."""
    drafters: tuple[str, ...] = ()
    """Whose passes serve each sequence; empty string: nobody's. Left empty: as drafters please."""
    surplus: tuple[float, ...] = ()
    """Tokens that the lengths are expected to bring beyond what they cost, for each sequence."""
    feeds: tuple[Feed, ...] = ()
    """Catching up that is part of the step."""
    resting: frozenset[str] = frozenset()
    """Drafters of which nobody wants anything: no pass, no features, no memory."""
    forecast: StepForecast | None = None
    """None: nothing was predicted."""

    @property
    def rests(self) -> bool:
        """Whether drafters are left alone, so that only tokens that are certain are drafted."""
        return self.limit == 0


NO_DRAFTS = DraftPlan(load=StepLoad(num_decoding=0, num_prefilling=0), budgets=())
"""The plan of a step in which nothing decodes."""

DraftPlanner: TypeAlias = Callable[[Seq[DecodingSequence], StepLoad], DraftPlan]
"""Decides for the decoding sequences of a step, in order of service. It is asked once per step; if
all answers are 0, no drafter runs."""


def plan_no_drafts(
    sequences: Seq[DecodingSequence],
    load: StepLoad,
    resting: frozenset[str] = frozenset(),
    *,
    wanted: bool = True,
) -> DraftPlan:
    """Plain decoding for every sequence, while these drafters rest."""
    none = (0,) * len(sequences)
    return DraftPlan(
        load=load,
        budgets=none,
        lengths=none,
        drafters=("",) * len(none),
        resting=resting,
        wanted=wanted,
    )


class DraftOutcome(NamedTuple):
    """What became of one sequence's drafts in a step, for those that learn from it."""

    request_id: str
    drafter: str
    num_drafted: int
    num_accepted: int
    promise: float | None = None
    """How many the drafter expected to be accepted, before it drew any; None: no opinion."""
