"""From a step's logits to its new tokens: which drafts are kept and what follows them.

Owns the rules of acceptance and the result types. Knows nothing of stopping, scheduling or how
drafts were made. Invariants: every sampling span gets between 1 and num_drafts + 1 new tokens;
under matching they are the tokens that plain decoding would have chosen, one by one; under
rejection each has the distribution that plain decoding would have drawn it from.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from foretoken.models.tensors import ModelOutput
from foretoken.ops.noise import Stream, pack_keys, row_key, uniform
from foretoken.ops.reject import RULES, acceptable, agreeing, leading, residual, uses_matching
from foretoken.ops.sampling import draw, top_logprobs
from foretoken.runtime.batch import Batch, Span
from foretoken.runtime.rows import Rows
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


@dataclass(frozen=True, slots=True)
class Verification:
    """One entry per span of the batch; None for spans without rows of logits."""

    spans: tuple[SpanVerification | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """One sampling span: its rows, and where its logits and draft distributions start."""

    index: int
    rows: Rows
    row: int
    drafted_row: int

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.rows.drafts


class Verifier:
    """Chooses the new tokens of every span of a step."""

    def __init__(
        self, vocab_size: int, device: torch.device | str = "cpu", rule: str = "auto"
    ) -> None:
        """Check drafts of `vocab_size` ids on `device` by `rule` (see `uses_matching`)."""
        assert rule in RULES, (rule, RULES)
        self.rule = rule
        self.sampler = Sampler(vocab_size, device)

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine."""
        self.sampler.release(request_id)

    @torch.inference_mode()
    def verify(self, batch: Batch, output: ModelOutput) -> Verification:
        """Check the batch's drafts against the logits of its rows."""
        logits_RV = output.logits_RV
        checks = _checks(batch)
        probs_KV = None if batch.draft is None else batch.draft.probs_KV
        matching: list[_Check] = []
        rejecting: list[_Check] = []
        for check in checks:
            params = check.rows.sequence.request.params
            matches = not check.drafts or uses_matching(params, self.rule, probs_KV is None)
            (matching if matches else rejecting).append(check)
        new_ids: dict[int, tuple[int, ...]] = {}
        if matching:
            new_ids.update(self._match(logits_RV, matching))
        if rejecting:
            new_ids.update(self._reject(logits_RV, rejecting, probs_KV))
        return Verification(_results(batch, logits_RV, new_ids))

    def _match(self, logits_RV: Tensor, checks: list[_Check]) -> dict[int, tuple[int, ...]]:
        """New tokens by span: the target's own, as far as the drafts agree and one further."""
        rows = [check.rows for check in checks]
        targets: list[int] = self.sampler.choose(_take(logits_RV, checks), rows).tolist()
        new_ids, start = {}, 0
        for check in checks:
            end = start + check.rows.num_rows
            own = targets[start:end]
            new_ids[check.index] = tuple(own[: agreeing(check.drafts, own) + 1])
            start = end
        return new_ids

    def _reject(
        self, logits_RV: Tensor, checks: list[_Check], probs_KV: Tensor | None
    ) -> dict[int, tuple[int, ...]]:
        """New tokens by span: drafts that pass the rejection rule, and one more."""
        rows = [check.rows for check in checks]
        logits_PV = self.sampler.process(_take(logits_RV, checks), rows)
        keys = [self.sampler.profile(r.sequence.request).key for r in rows]
        tests = _Tests.of(checks, keys)
        target_KV = logits_PV[tests.rows_K].softmax(dim=-1)
        drafted_KV = None if probs_KV is None else probs_KV[tests.drafted_rows_K]
        passed = acceptable(target_KV, drafted_KV, tests.ids_K, tests.uniforms_K)
        kept, ends, failed = [], [], []
        row = first = 0
        for check in checks:
            count = len(check.drafts)
            kept.append(leading(passed[first : first + count]))
            ends.append(row + kept[-1])
            failed.append(first + kept[-1] if kept[-1] < count else None)
            row, first = row + count + 1, first + count
        last_SV = logits_PV[ends]
        spans = [s for s, at in enumerate(failed) if at is not None]
        if spans:
            at = [at for at in failed if at is not None]
            drafted_SV = None if drafted_KV is None else drafted_KV[at]
            ids = [tests.ids_K[k] for k in at]
            last_SV[spans] = residual(last_SV[spans], target_KV[at], drafted_SV, ids)
        last_keys = [
            row_key(
                key,
                r.position + count,
                Stream.TARGET if at is None else Stream.RECOVER,
            )
            for key, r, count, at in zip(keys, rows, kept, failed, strict=True)
        ]
        packed = pack_keys(last_keys, self.sampler.device)
        last: list[int] = draw(last_SV, packed, self.sampler.noise).tolist()
        return {
            check.index: (*check.drafts[:count], token)
            for check, count, token in zip(checks, kept, last, strict=True)
        }


@dataclass(frozen=True, slots=True)
class _Tests:
    """The acceptance tests of all drafts, span after span."""

    ids_K: list[int]
    uniforms_K: list[float]
    rows_K: list[int]
    """Where the checked spans' own rows have the logits before each draft."""
    drafted_rows_K: list[int]
    """Where the batch's draft distributions have each draft's."""

    @classmethod
    def of(cls, checks: list[_Check], keys: list[int]) -> "_Tests":
        tests = cls([], [], [], [])
        row = 0
        for check, key in zip(checks, keys, strict=True):
            start = check.rows.position
            for i, token in enumerate(check.drafts):
                tests.ids_K.append(token)
                tests.uniforms_K.append(uniform(row_key(key, start + i, Stream.ACCEPT)))
                tests.rows_K.append(row + i)
                tests.drafted_rows_K.append(check.drafted_row + i)
            row += check.rows.num_rows
        return tests


def _checks(batch: Batch) -> list[_Check]:
    """The spans of the batch that sample."""
    checks, row, drafted_row = [], 0, 0
    for index, span in enumerate(batch.spans):
        if span.samples:
            rows = Rows(sequence=span.sequence, drafts=span.draft_ids)
            first = row + span.prompt_rows
            checks.append(_Check(index=index, rows=rows, row=first, drafted_row=drafted_row))
        row += span.prompt_rows + span.sample_rows
        drafted_row += span.num_drafts
    return checks


def _take(logits_RV: Tensor, checks: list[_Check]) -> Tensor:
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
    batch: Batch, logits_RV: Tensor, new_ids: dict[int, tuple[int, ...]]
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
            )
        )
    return tuple(results)
