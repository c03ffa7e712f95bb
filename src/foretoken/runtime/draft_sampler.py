"""Which tokens a drafter proposes, given its logits: those that the verifier agrees with often.

Uses the sampler's path, so that a draft's row sees the edits, temperature and filters that the
target's row will see. Knows nothing of models. Invariant: what is reported as a distribution is
what the token was drawn from.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.rollout import plan_best
from foretoken.models.tensors import RolloutPlan
from foretoken.ops.drawing import BEST, pack_rows
from foretoken.ops.noise import Stream, row_key
from foretoken.ops.reject import wants_distribution
from foretoken.runtime.rows import Rows
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.sequence import Sequence
from foretoken.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoice:
    """One drafted token per sequence."""

    ids: list[int]
    probs_BV: Tensor | None
    """float32 distributions that the tokens were drawn from; None: one-hot."""


class DraftSampler:
    """Chooses draft tokens from a draft model's logits so that the verifier agrees often."""

    def __init__(self, sampler: Sampler, rule: str = "auto", method: str = "auto") -> None:
        """Choose with `sampler`.

        Args:
            sampler: over the target's vocabulary; may be the verifier's own.
            rule: of the verifier (see `rule_of`).
            method: `greedy` (the draft's best token, one-hot), `probabilistic` or `auto`: drawn
                where the rule weighs distributions, the best under `typical`, else with the
                target's own noise.
        """
        self.sampler = sampler
        self._rule = rule
        self._method = method

    @property
    def prefers_best(self) -> bool:
        """Whether drafts are the most probable tokens, whatever the request's temperature."""
        return self._method == "greedy" or (self._method, self._rule) == ("auto", "typical")

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        self.sampler.release(request_id)

    def draws(self, params: SamplingParams) -> bool:
        """Whether drafts of such a request need distributions: drawn, and weighed by the rule."""
        return self._method != "greedy" and wants_distribution(params, self._rule)

    def plan(
        self, sequences: Seq[Sequence], drafted: Seq[Seq[int]], steps: int
    ) -> RolloutPlan | None:
        """`steps` more drafts of each sequence as one rollout.

        None: some logits are edited before a token is chosen, or only some of the sequences need
        distributions.
        """
        profiles = [self.sampler.profile(sequence.request) for sequence in sequences]
        draws = {self.draws(sequence.request.params) for sequence in sequences}
        if len(draws) > 1 or any(profile.edits for profile in profiles):
            return None
        drawn = draws.pop()
        stream = Stream.DRAFT if drawn else Stream.TARGET
        if not drawn and (self.prefers_best or all(profile.greedy for profile in profiles)):
            return plan_best(len(sequences), steps)
        columns = []
        for profile, sequence, tokens in zip(profiles, sequences, drafted, strict=True):
            if profile.greedy or self.prefers_best:
                columns.append([pack_rows((0,), BEST)] * steps)
                continue
            start, anchor = sequence.num_tokens + len(tokens), sequence.num_tokens if drawn else 0
            keys = [row_key(profile.key, start + at, stream, anchor) for at in range(steps)]
            columns.append([pack_rows((key,), profile.drawing) for key in keys])
        return RolloutPlan(
            steps=steps,
            rows=b"".join(column[at] for at in range(steps) for column in columns),
            keeps_logits=drawn,
            best=False,
        )

    @torch.inference_mode()
    def distributions(
        self, logits_KV: Tensor, sequences: Seq[Sequence], drafted: Seq[Seq[int]]
    ) -> Tensor:
        """What the newest drafts of a rollout were drawn from, float32 [K, V].

        Args:
            logits_KV: of the rollout, step by step, one row for each sequence.
            sequences: the committed tokens.
            drafted: all drafts after them, those of the rollout last.
        """
        steps = logits_KV.shape[0] // len(sequences)
        rows = [
            Rows(
                sequence=sequence,
                drafts=tuple(tokens[: len(tokens) - back]),
                first=len(tokens) - back,
            )
            for back in range(steps, 0, -1)
            for sequence, tokens in zip(sequences, drafted, strict=True)
        ]
        return self.sampler.distributions(logits_KV, rows)

    @torch.inference_mode()
    def choose(
        self,
        logits_BV: Tensor,
        sequences: Seq[Sequence],
        drafted: Seq[Seq[int]],
        with_probs: bool | None = None,
    ) -> DraftChoice:
        """The next draft token of each sequence.

        Args:
            logits_BV: raw float32 logits of the draft after each sequence and its drafts.
            sequences: the committed tokens.
            drafted: the tokens already drafted after them.
            with_probs: whether to return distributions even if no row here draws from one (rows
                that do not draw get a one-hot row); default: if some row does.
        """
        rows = [
            Rows(sequence=sequence, drafts=tuple(tokens), first=len(tokens))
            for sequence, tokens in zip(sequences, drafted, strict=True)
        ]
        drawn = [i for i, s in enumerate(sequences) if self.draws(s.request.params)]
        others = sorted(set(range(len(rows))).difference(drawn))
        ids = [0] * len(rows)
        probs_BV = None
        if drawn and not others:
            probs_BV = self.sampler.distributions(logits_BV, rows)
        elif with_probs or (with_probs is None and drawn):
            probs_BV = torch.zeros_like(logits_BV)
        if others:
            part = [rows[i] for i in others]
            for i, token in zip(others, self._settle(logits_BV[others], part), strict=True):
                ids[i] = token
                if probs_BV is not None:
                    probs_BV[i, token] = 1.0
        if drawn:
            assert probs_BV is not None, "drawn drafts need their distributions"
            part, logits_DV = rows, logits_BV
            if others:
                part, logits_DV = [rows[i] for i in drawn], logits_BV[drawn]
                probs_BV[drawn] = self.sampler.distributions(logits_DV, part)
            tokens_D = self.sampler.choose(logits_DV, part, Stream.DRAFT)
            for i, token in zip(drawn, tokens_D.tolist(), strict=True):
                ids[i] = token
        return DraftChoice(ids=ids, probs_BV=probs_BV)

    def _settle(self, logits_PV: Tensor, rows: list[Rows]) -> list[int]:
        """Tokens without a distribution: the best, or what the target's own noise draws."""
        if self.prefers_best:
            tokens_P = self.sampler.best(logits_PV, rows)
        else:
            tokens_P = self.sampler.choose(logits_PV, rows)
        tokens: list[int] = tokens_P.tolist()
        return tokens
