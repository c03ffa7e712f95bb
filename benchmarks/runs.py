"""One request through one `LLM`, and what can be told from it.

Knows nothing of statistics or of what is compared. Prefix caching is off wherever a benchmark
builds an `LLM`, since repeats would otherwise skip their prefill.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken import LLM, SamplingParams
from foretoken.metrics import Counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished request; durations in seconds."""

    token_ids: tuple[int, ...]
    total_s: float
    """From the call to its return, prefill included."""
    decode_s: float
    """From the first token to the last."""
    drafting_s: float
    """Of the total, in the drafter."""
    drafted: tuple[int, ...]
    """Draft tokens of each verification."""
    accepted: tuple[int, ...]
    """Those of them that were accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Over all verifications of some runs."""

    length: float
    """Tokens per verification with a draft, the recovered or bonus token included."""
    rate: float
    """Accepted tokens per drafted token."""
    by_position: tuple[float, ...]
    """Share of the drafts at each position that were accepted."""
    drafted_share: float
    """Verifications with a draft per output token: how often there was one to check."""


def build(model: str, speculative: dict[str, Any] | None = None, **settings: Any) -> LLM:
    """An LLM for one sequence at a time unless `settings` say otherwise."""
    defaults: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
    defaults["adaptive_speculation"] = False  # a length is measured as it is
    return LLM(model, speculative_config=speculative, **(defaults | settings))


def greedy(tokens: int) -> SamplingParams:
    """Exactly `tokens` greedy tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def run_once(
    llm: LLM, prompt_ids: Sequence[int], params: SamplingParams, salt: str | None = None
) -> Run:
    """Generate once and time it; past outputs are shared within one `salt`."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
    if salt is not None:
        prompt["cache_salt"] = salt
    before, began = drafting_seconds(llm), time.perf_counter()
    [result] = llm.generate([prompt], params, use_tqdm=False)
    total_s = time.perf_counter() - began
    output = result.outputs[0]
    metrics = output.metrics
    assert metrics is not None, "a finished output without metrics"
    return Run(
        token_ids=tuple(output.token_ids),
        total_s=total_s,
        decode_s=metrics.finished_s - metrics.first_token_s,
        drafting_s=drafting_seconds(llm) - before,
        drafted=metrics.drafted_per_step,
        accepted=metrics.accepted_per_step,
    )


def drafting_seconds(llm: LLM) -> float:
    """Seconds that `llm` has spent drafting so far."""
    [found] = [m for m in llm.get_metrics() if m.name == "foretoken:drafting_seconds"]
    assert isinstance(found, Counter), found
    return found.value


def acceptance(runs: Iterable[Run]) -> Acceptance:
    """Acceptance over all verifications of `runs`; length 1 where nothing was drafted."""
    kept = list(runs)
    pairs = [pair for run in kept for pair in zip(run.drafted, run.accepted, strict=True)]
    pairs = [(drafted, accepted) for drafted, accepted in pairs if drafted]
    total = sum(drafted for drafted, _ in pairs)
    good = sum(accepted for _, accepted in pairs)
    by_position = []
    for position in range(max((drafted for drafted, _ in pairs), default=0)):
        reached = [accepted for drafted, accepted in pairs if drafted > position]
        by_position.append(sum(accepted > position for accepted in reached) / len(reached))
    tokens = sum(len(run.token_ids) for run in kept)
    return Acceptance(
        length=1.0 + good / len(pairs) if pairs else 1.0,
        rate=good / total if total else 0.0,
        by_position=tuple(by_position),
        drafted_share=len(pairs) / tokens if tokens else 0.0,
    )
