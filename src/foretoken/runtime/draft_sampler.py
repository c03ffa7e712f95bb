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
from foretoken.runtime.rows import Rows
from foretoken.runtime.rules.base import wants_distribution
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

    def draws(self, params: SamplingParams, *, fixed: bool = False) -> bool:
        """Whether the rule weighs what drafts of such a request were drawn from; of drafts that are
        `fixed`, whether it tests them as such instead of matching them."""
        return self._method != "greedy" and wants_distribution(params, self._rule, fixed)

    def plan(
        self, sequences: Seq[Sequence], drafted: Seq[Seq[int]], steps: int, *, with_probs: bool
    ) -> RolloutPlan | None:
        """`steps` more drafts of each sequence as one rollout, which keeps the logits if
        distributions are wanted; None: some logits are edited before a token is chosen."""
        requests = [sequence.request for sequence in sequences]
        profiles = [self.sampler.profile(request) for request in requests]
        # What edits logits depends on the tokens before a row, and those are drafted only inside
        # the call.
        if any(profile.edits for profile in profiles):
            return None
        if not with_probs and (self.prefers_best or all(p.greedy for p in profiles)):
            return plan_best(len(sequences), steps)
        columns = []
        for profile, sequence, tokens in zip(profiles, sequences, drafted, strict=True):
            # Drafts that the rule weighs are drawn with noise of their own. Others are drawn with
            # the target's noise of their position: the target then draws the same more often.
            drawn = self.draws(sequence.request.params)
            if profile.greedy or (self.prefers_best and not drawn):
                columns.append([pack_rows((0,), BEST)] * steps)
                continue
            stream = Stream.DRAFT if drawn else Stream.TARGET
            start, anchor = sequence.num_tokens + len(tokens), sequence.num_tokens if drawn else 0
            keys = [row_key(profile.key, start + at, stream, anchor) for at in range(steps)]
            columns.append([pack_rows((key,), profile.drawing) for key in keys])
        return RolloutPlan(
            steps=steps,
            rows=b"".join(column[at] for at in range(steps) for column in columns),
            keeps_logits=with_probs,
            best=False,
        )

    @torch.inference_mode()
    def distributions(self, logits_NV: Tensor, rows: Seq[Rows], ids: Seq[int]) -> Tensor:
        """What drafts were drawn from, float32 [N, V]; one-hot where they were not drawn.

        Args:
            logits_NV: raw float32 logits of the draft.
            rows: what they are rows of, a single row each.
            ids: the drafts.
        """
        drawn = [i for i, row in enumerate(rows) if self.draws(row.sequence.request.params)]
        if len(drawn) == len(rows):
            return self.sampler.distributions(logits_NV, rows)
        probs_NV = torch.zeros_like(logits_NV)
        probs_NV[torch.arange(len(rows)), torch.tensor(ids)] = 1.0
        if drawn:
            some = [rows[i] for i in drawn]
            probs_NV[drawn] = self.sampler.distributions(logits_NV[drawn], some)
        return probs_NV

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
        ids = [0] * len(rows)
        for some, choose in ((drawn, self._draw), (_others(drawn, len(rows)), self._settle)):
            if some:
                part_PV = logits_BV if len(some) == len(rows) else logits_BV[some]
                tokens = choose(part_PV, [rows[i] for i in some])
                for i, token in zip(some, tokens, strict=True):
                    ids[i] = token
        wanted = bool(drawn) if with_probs is None else with_probs
        probs_BV = self.distributions(logits_BV, rows, ids) if wanted else None
        return DraftChoice(ids=ids, probs_BV=probs_BV)

    def _draw(self, logits_PV: Tensor, rows: list[Rows]) -> list[int]:
        """Tokens of their own distribution, with noise of their own."""
        tokens: list[int] = self.sampler.choose(logits_PV, rows, Stream.DRAFT).tolist()
        return tokens

    def _settle(self, logits_PV: Tensor, rows: list[Rows]) -> list[int]:
        """Tokens without a distribution: the best, or what the target's own noise draws."""
        if self.prefers_best:
            tokens_P = self.sampler.best(logits_PV, rows)
        else:
            tokens_P = self.sampler.choose(logits_PV, rows)
        tokens: list[int] = tokens_P.tolist()
        return tokens


def _others(some: Seq[int], count: int) -> list[int]:
    """Indices below `count` that are not among `some`."""
    return sorted(set(range(count)).difference(some))
