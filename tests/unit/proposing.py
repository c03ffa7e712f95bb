"""What the tests of drafters share: sequences that need no engine, and contexts of them."""

from collections.abc import Sequence as Seq
from typing import Any

from foretoken.proposers.base import Context
from foretoken.proposers.chain import Confidence
from foretoken.proposers.drafting import DraftSampling
from foretoken.proposers.kv_progress import DraftLimits, DraftProgress
from foretoken.proposers.kv_proposer import KVProposer
from foretoken.proposers.models.draft_model import ModelNetwork
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request, SamplingParams


def make_sequence(prompt: Seq[int], output: Seq[int] = (), **changes: Any) -> Sequence:
    """A sequence that decodes; `changes` are fields of its request, `params` those of its
    parameters."""
    params = SamplingParams(**changes.pop("params", {}))
    fields: dict[str, Any] = {"request_id": "r", "seed": 0, "max_tokens": 1000, **changes}
    request = Request(prompt_token_ids=tuple(prompt), params=params, **fields)
    sequence = Sequence.of(request)
    sequence.token_ids.extend(output)
    sequence.num_computed = sequence.num_tokens - 1
    return sequence


def make_span(sequence: Sequence, budget: int) -> Span:
    start = sequence.num_computed
    return Span(sequence=sequence, start=start, length=1, draft_budget=budget, samples=True)


def make_context(*pairs: tuple[Sequence, int]) -> Context:
    return Context(tuple(make_span(sequence, budget) for sequence, budget in pairs))


def draft_model(
    runner: Any,
    sampler: DraftSampler,
    generations: list[int],
    limits: DraftLimits,
    confidence: Confidence | None = None,
) -> KVProposer:
    progress = DraftProgress(generations, runner.page_size, limits)
    network = ModelNetwork(runner)
    return KVProposer("draft_model", network, DraftSampling(sampler, None, confidence), progress)
