"""From a step's logits to its new tokens: which rule checks which span, and what is reported.

Owns the result types; the rules are in `foretoken.runtime.rules`. Knows nothing of stopping,
scheduling or how drafts were made. Invariants: every sampling span gets between 1 and
num_drafts + 1 new tokens; under matching they are the tokens that plain decoding would have
chosen, one by one; under standard and block each has the distribution that plain decoding would
have drawn it from.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from foretoken.models.tensors import ModelOutput
from foretoken.ops.reject import INVALID, RULES, rule_of
from foretoken.ops.sampling import top_logprobs
from foretoken.runtime.batch import Batch, Span
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.rows import Rows
from foretoken.runtime.rules import Check, RuleSettings, create_rules
from foretoken.runtime.sampler import Sampler
from foretoken.types import Logprob, TokenSource


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanVerification:
    """What one span of a step came to."""

    new_ids: tuple[int, ...]
    """Accepted drafts and one token of the target; empty if the span does not sample."""
    num_accepted: int
    num_drafted: int
    sources: tuple[TokenSource, ...]
    """Of each new token."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """Per new token, if asked for; from raw logits."""
    prompt_logprobs: tuple[dict[int, Logprob], ...] | None = None
    """Per prompt row, if asked for: of the token after that row's."""
    valid: bool = True
    """False: the rule keeps drafts whatever they are (`synthetic`)."""


@dataclass(frozen=True, slots=True)
class Verification:
    """One entry per span of the batch; None for spans without rows of logits."""

    spans: tuple[SpanVerification | None, ...]


class Verifier:
    """Chooses the new tokens of every span of a step."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        rule: str = "auto",
        settings: RuleSettings | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Check drafts of `vocab_size` ids on `device` by `rule` (see `rule_of`)."""
        assert rule in RULES, (rule, RULES)
        self.rule = rule
        self.sampler = Sampler(vocab_size, device, grammars)
        self._rules = create_rules(self.sampler, settings or RuleSettings())

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine."""
        self.sampler.release(request_id)

    @torch.inference_mode()
    def verify(self, batch: Batch, output: ModelOutput) -> Verification:
        """Check the batch's drafts against the logits of its rows."""
        logits_RV = output.logits_RV
        probs_KV = None if batch.draft is None else batch.draft.probs_KV
        by_rule: dict[str, list[Check]] = {}
        for check in _checks(batch):
            params = check.rows.sequence.request.params
            name = rule_of(params, self.rule, probs_KV is None) if check.drafts else "matching"
            by_rule.setdefault(name, []).append(check)
        new_ids: dict[int, tuple[int, ...]] = {}
        for name, checks in by_rule.items():
            found = self._rules[name].decide(_take(logits_RV, checks), checks, probs_KV)
            new_ids.update(zip((check.index for check in checks), found, strict=True))
        return Verification(_results(batch, logits_RV, new_ids, self.rule not in INVALID))


def _checks(batch: Batch) -> list[Check]:
    """The spans of the batch that sample."""
    checks, row, drafted_row = [], 0, 0
    for index, span in enumerate(batch.spans):
        if span.samples:
            rows = Rows(sequence=span.sequence, drafts=span.draft_ids)
            first = row + span.prompt_rows
            checks.append(Check(index=index, rows=rows, row=first, drafted_row=drafted_row))
        row += span.prompt_rows + span.sample_rows
        drafted_row += span.num_drafts
    return checks


def _take(logits_RV: Tensor, checks: list[Check]) -> Tensor:
    """The sample rows of the checks, in order."""
    rows = [check.row + i for check in checks for i in range(check.rows.num_rows)]
    if len(rows) == logits_RV.shape[0]:
        return logits_RV
    return logits_RV[torch.tensor(rows, device=logits_RV.device)]


def _sources(num_accepted: int, num_drafted: int) -> tuple[TokenSource, ...]:
    if num_drafted == 0:
        return (TokenSource.TARGET,)
    full = num_accepted == num_drafted
    last = TokenSource.BONUS if full else TokenSource.RECOVERED
    return (*((TokenSource.ACCEPTED,) * num_accepted), last)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Logprobs asked for: rows of the step's logits, the token chosen after each, how many."""

    rows: list[int]
    chosen: list[int]
    counts: list[int]

    def add(self, first: int, tokens: Seq[int], count: int | None) -> None:
        """Ask for consecutive rows; None asks for nothing."""
        if count is not None:
            self.rows.extend(range(first, first + len(tokens)))
            self.chosen.extend(tokens)
            self.counts.extend([count] * len(tokens))


def _logprobs(
    batch: Batch, logits_RV: Tensor, new_ids: dict[int, tuple[int, ...]]
) -> list[dict[int, Logprob]]:
    """Every logprob entry the batch asks for, in order of rows."""
    wanted = _Wanted([], [], [])
    row = 0
    for index, span in enumerate(batch.spans):
        params = span.sequence.request.params
        if span.prompt_rows:
            wanted.add(row, _after_prompt_rows(span), params.prompt_logprobs)
        wanted.add(row + span.prompt_rows, new_ids.get(index, ()), params.logprobs)
        row += span.prompt_rows + span.sample_rows
    if not wanted.rows:
        return []
    rows_R = torch.tensor(wanted.rows, device=logits_RV.device)
    return top_logprobs(logits_RV[rows_R], wanted.chosen, wanted.counts)


def _after_prompt_rows(span: Span) -> list[int]:
    """The token that stands after each prompt row."""
    return span.sequence.token_ids[span.start + 1 : span.start + span.prompt_rows + 1]


def _results(
    batch: Batch, logits_RV: Tensor, new_ids: dict[int, tuple[int, ...]], valid: bool
) -> tuple[SpanVerification | None, ...]:
    entries = iter(_logprobs(batch, logits_RV, new_ids))
    results: list[SpanVerification | None] = []
    for index, span in enumerate(batch.spans):
        if not span.samples and not span.prompt_rows:
            results.append(None)
            continue
        params = span.sequence.request.params
        ids = new_ids.get(index, ())
        accepted = max(len(ids) - 1, 0)
        prompt = own = None
        if span.prompt_rows and params.prompt_logprobs is not None:
            prompt = tuple(islice(entries, span.prompt_rows))
        if span.samples and params.logprobs is not None:
            own = tuple(islice(entries, len(ids)))
        results.append(
            SpanVerification(
                new_ids=ids,
                num_accepted=accepted,
                num_drafted=span.num_drafts,
                sources=_sources(accepted, span.num_drafts) if ids else (),
                logprobs=own,
                prompt_logprobs=prompt,
                valid=valid,
            )
        )
    return tuple(results)
