"""What a drafter is worth: acceptance in the engine, cost of its steps, and what follows.

Owns the measurements of `foretoken train eval`. Any drafter with weights is measured, heads and
models alike, through the engine that serves it. The speed-up that k drafts come to is
(1 + S_1 + ... + S_k) * cost(0) / cost(k): S_j is the share of verifications that accept j drafts or
more, cost(k) the median time of a decoding step of one sequence with k drafts, drafting included.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from foretoken.config import EngineConfig
from foretoken.engine.engine import Engine
from foretoken.engine.wiring import build_engine
from foretoken.errors import ConfigError
from foretoken.runtime.batch import Batch, Verification
from foretoken.training.data.answers import answer_all
from foretoken.types import CompletionOutput, SamplingParams, Speculation, StepStats
from foretoken.types.accepted import accepted_by_position, histogram_of

MOST_DRAFTS = 8
COST_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """What is run. Raises ConfigError: nothing would be run."""

    temperatures: tuple[float, ...] = (0.0, 0.4, 0.8, 1.0)
    max_tokens: int = 128
    cost_repeats: int = 3
    max_num_seqs: int = 8

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError("--temperature", self.temperatures, "one or more numbers >= 0")
        if self.max_tokens < 2:
            raise ConfigError("--max-tokens", self.max_tokens, "an integer >= 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What verifications accepted, over all that had a draft."""

    by_position: tuple[float, ...]
    """Share of the drafts at each position that were accepted, all before them included."""
    lengths: tuple[float, ...]
    """Tokens a verification with 1, 2, ... drafts, the recovered or bonus token included."""
    num_verifications: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingStep:
    """One decoding step of one sequence; medians in seconds."""

    drafts: int
    total_s: float
    drafting_s: float
    verifying_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """All that was measured."""

    acceptance: dict[str, Accepted]
    """What was accepted, by temperature."""
    costs: tuple[DecodingStep, ...]
    """What steps cost, with 0, 1, 2, ... drafts."""
    speedups: dict[str, tuple[float, ...]]
    """Speed-ups of 1, 2, ... drafts over the same engine with none, by temperature, as follows from
    acceptance and cost."""


def open_pair(target: str, drafter: str, method: str | None, plan: EvalPlan) -> Engine:
    """The target with the drafter, asked for as many drafts as are measured.

    Raises:
        ConfigError, ModelError: as the engine does.
    """
    speculative = {"model": drafter, "num_speculative_tokens": MOST_DRAFTS}
    if method is not None:
        speculative["method"] = method
    return open_engine(target, speculative, plan.max_num_seqs)


def open_engine(target: str, speculative: object, max_num_seqs: int) -> Engine:
    """An engine to be measured: it keeps no prompts, and no control lowers what it drafts."""
    return build_engine(
        EngineConfig.from_kwargs(
            model=target,
            speculative_config=speculative,
            adaptive_speculation=False,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=False,
        )
    )


def measure_worth(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    plan: EvalPlan,
    report: Callable[[str], None] = lambda line: None,
) -> Worth:
    """Accepted at every temperature, then the cost of steps, on prompts of token ids."""
    if not prompts:
        raise ConfigError("--prompts or --count", 0, "at least one prompt")
    found = {}
    for temperature in plan.temperatures:
        params = SamplingParams(
            temperature=temperature, max_tokens=plan.max_tokens, ignore_eos=True, detokenize=False
        )
        found[f"{temperature:g}"] = kept = accepted(answer_all(engine, prompts, params))
        report(f"temperature {temperature:g}: {kept.lengths[-1]:.2f} tokens a verification")
    most = max(len(kept.by_position) for kept in found.values())
    costs = step_costs(engine, prompts[0], most, plan.cost_repeats)
    speedups = {
        name: tuple(expected_speedups(kept, costs).values()) for name, kept in found.items()
    }
    return Worth(acceptance=found, costs=costs, speedups=speedups)


def accepted(outputs: Iterable[CompletionOutput]) -> Accepted:
    """Accepted over all verifications of finished outputs; at its longest drafts' positions."""
    drafted: list[int] = []
    kept: list[int] = []
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None, "a finished output without metrics"
        drafted += metrics.drafted_per_step
        kept += metrics.accepted_per_step
    shares = accepted_by_position(histogram_of(kept), histogram_of(drafted))
    return Accepted(
        by_position=shares,
        lengths=tuple(accumulate(shares, initial=1.0))[1:] or (1.0,),
        num_verifications=sum(map(bool, drafted)),
    )


def step_costs(
    engine: Engine, prompt: Sequence[int], most: int, repeats: int, drafter: str | None = None
) -> tuple[DecodingStep, ...]:
    """Medians over the decoding steps of one sequence with 0..most drafts, in turns.

    `drafter` names one of several; None: as the engine is configured.
    """
    kept: dict[int, list[tuple[float, float, float]]] = {k: [] for k in range(most + 1)}
    steps = watch_steps(engine)
    for _ in range(repeats):
        for k in range(most + 1):
            steps.clear()
            params = SamplingParams(
                temperature=0.0,
                max_tokens=COST_TOKENS,
                ignore_eos=True,
                detokenize=False,
                speculation=Speculation(enabled=k > 0, drafter=drafter, num_speculative_tokens=k),
            )
            answer_all(engine, [prompt], params)
            kept[k] += [
                (s.total_s, s.drafting_s, s.verifying_s)
                for s in steps[2:]
                if s.num_draft_tokens == k and s.num_prefilled == 0
            ]
    rows = ((k, [statistics.median(column) for column in zip(*v, strict=True)])
            for k, v in kept.items() if v)  # fmt: skip
    return tuple(
        DecodingStep(drafts=k, total_s=row[0], drafting_s=row[1], verifying_s=row[2])
        for k, row in rows
    )


def watch_steps(engine: Engine) -> list[StepStats]:
    """A list that grows by the statistics of every later step of `engine`."""
    seen: list[StepStats] = []

    def note(_: Batch, __: Verification, stats: StepStats) -> None:
        seen.append(stats)

    engine.parts = replace(engine.parts, observers=(*engine.parts.observers, note))
    return seen


def expected_speedups(found: Accepted, costs: Sequence[DecodingStep]) -> dict[int, float]:
    """Speed-up over none, by the number of drafts, of those numbers whose steps were timed."""
    by_count = {cost.drafts: cost.total_s for cost in costs}
    assert 0 in by_count, "plain steps were not measured"
    lengths = enumerate(found.lengths, start=1)
    return {k: length * by_count[0] / by_count[k] for k, length in lengths if k in by_count}
