"""From raw logits to tokens, for targets and drafters alike: one path, whatever the rows.

Owns the order of processing and the per-request state it needs; the arithmetic is in `ops`.
Knows nothing of verification. Invariants: what is chosen at a row depends on its logits, its
history (committed tokens and the drafts before it), its request and its position, never on other
rows; raw logits are not changed.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from foretoken.ops.logits import NEVER, Filters, keep_filtered, scale
from foretoken.ops.noise import KeyedNoise, Stream, pack_keys
from foretoken.ops.reject import wants_distribution
from foretoken.ops.sampling import draw, draw_filtered, greedy
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.penalties import PenaltyCounts
from foretoken.runtime.rows import Profile, Rows, banned_cells
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request, SamplingParams


class _Kind(IntEnum):
    GREEDY = 0
    OPEN = 1
    FILTERED = 2


@dataclass(frozen=True, slots=True)
class _Group:
    """One Rows with its request's profile and where its logits start."""

    rows: Rows
    profile: Profile
    start: int

    @property
    def kind(self) -> _Kind:
        if self.profile.greedy:
            return _Kind.GREEDY
        return _Kind.OPEN if self.profile.filters is None else _Kind.FILTERED

    @property
    def end(self) -> int:
        return self.start + self.rows.num_rows


class Sampler:
    """Processes rows of logits and chooses tokens with keyed noise."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        grammars: Grammars | None = None,
    ) -> None:
        """Serve rows of `vocab_size` logits on `device`; without `grammars` none is obeyed."""
        self.vocab_size = vocab_size
        self.grammars = grammars
        self.device = torch.device(device)
        self.noise = KeyedNoise(vocab_size, self.device)
        self._counts = PenaltyCounts(self.device)
        self._profiles: dict[str, Profile] = {}

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        self._profiles.pop(request_id, None)
        self._counts.release(request_id)
        if self.grammars is not None:
            self.grammars.release(request_id)

    def profile(self, request: Request) -> Profile:
        """What the request needs, worked out at its first row."""
        profile = self._profiles.get(request.request_id)
        if profile is None or profile.request is not request:
            self.release(request.request_id)
            profile = Profile.of(request, self.vocab_size, self.device)
            self._profiles[request.request_id] = profile
        return profile

    def choose(self, logits_RV: Tensor, rows: Seq[Rows], stream: Stream = Stream.TARGET) -> Tensor:
        """The token of every row, int64 [R]: the best for greedy requests, else a keyed draw.

        Args:
            logits_RV: raw float32 logits.
            rows: what the logits' rows are, in order.
            stream: which noise to draw with.
        """
        groups = self._groups(logits_RV, rows)
        edited_RV = self._edit(logits_RV, groups)
        kinds = sorted({group.kind for group in groups})
        if len(kinds) == 1:
            return self._choose(edited_RV, groups, stream)
        chosen_R = torch.empty(logits_RV.shape[0], dtype=torch.int64, device=self.device)
        for kind in kinds:
            part = [group for group in groups if group.kind is kind]
            index_P = self._index(part)
            chosen_R[index_P] = self._choose(edited_RV[index_P], part, stream)
        return chosen_R

    def best(self, logits_RV: Tensor, rows: Seq[Rows]) -> Tensor:
        """The most probable id of every row, whatever the temperature, int64 [R]."""
        return greedy(self.edited(logits_RV, rows))

    def edited(self, logits_RV: Tensor, rows: Seq[Rows]) -> Tensor:
        """Logits before temperature, whatever that is, [R, V]; perhaps the given tensor."""
        return self._edit(logits_RV, self._groups(logits_RV, rows))

    def process(self, logits_RV: Tensor, rows: Seq[Rows]) -> Tensor:
        """Logits whose softmax is the distribution of each row's token; a new tensor [R, V].

        Greedy requests have no such distribution and may not be among the rows.
        """
        groups = self._groups(logits_RV, rows)
        assert not any(g.profile.greedy for g in groups), "greedy rows have no distribution"
        edited_RV = self._edit(logits_RV, groups)
        scaled_RV = scale(edited_RV, self._temperatures(groups))
        part = [group for group in groups if group.kind is _Kind.FILTERED]
        if len(part) == len(groups):
            return keep_filtered(scaled_RV, self._filters(part))
        if part:
            index_P = self._index(part)
            scaled_RV[index_P] = keep_filtered(scaled_RV[index_P], self._filters(part))
        return scaled_RV

    def keys(self, rows: Seq[Rows], stream: Stream) -> Tensor:
        """Row keys, int32 [R, 2]."""
        keys: list[int] = []
        for group in rows:
            keys.extend(self.profile(group.sequence.request).keys(group, stream))
        return pack_keys(keys, self.device)

    def _choose(self, edited_PV: Tensor, part: list[_Group], stream: Stream) -> Tensor:
        """Tokens of groups that are all of one kind."""
        kind = part[0].kind
        if kind is _Kind.GREEDY:
            return greedy(edited_PV)
        scaled_PV = scale(edited_PV, self._temperatures(part))
        keys_P2 = self.keys([group.rows for group in part], stream)
        if kind is _Kind.OPEN:
            return draw(scaled_PV, keys_P2, self.noise)
        return draw_filtered(scaled_PV, self._filters(part), keys_P2, self.noise)

    def _groups(self, logits_RV: Tensor, rows: Seq[Rows]) -> list[_Group]:
        groups, start = [], 0
        for group in rows:
            groups.append(_Group(group, self.profile(group.sequence.request), start))
            start += group.num_rows
        assert logits_RV.shape == (start, self.vocab_size), (logits_RV.shape, start)
        assert logits_RV.dtype == torch.float32, logits_RV.dtype
        return groups

    def _edit(self, logits_RV: Tensor, groups: list[_Group]) -> Tensor:
        """Everything before temperature; the given tensor itself if there is nothing to do."""
        touched = [group for group in groups if group.profile.edits]
        if not touched:
            return logits_RV
        edited_RV = logits_RV.clone()
        banned: list[tuple[int, int]] = []
        for group in touched:
            if self.grammars is not None:
                self.grammars.forbid(edited_RV[group.start : group.end], group.rows)
            forbidden_V = group.profile.forbidden_V
            if forbidden_V is not None:
                edited_RV[group.start : group.end].masked_fill_(forbidden_V, NEVER)
            banned.extend((group.start + row, i) for row, i in banned_cells(group.rows))
        if banned:
            at_N2 = torch.tensor(banned, device=self.device)
            edited_RV[at_N2[:, 0], at_N2[:, 1]] = NEVER
        for group in touched:
            rows_RV = edited_RV[group.start : group.end]
            if group.profile.bias is not None:
                ids, values = group.profile.bias
                rows_RV.index_add_(1, ids, values.expand(group.rows.num_rows, -1))
            if group.profile.penalties is not None:
                self._counts.apply(rows_RV, group.rows, group.profile.penalties)
        return edited_RV

    def _index(self, part: list[_Group]) -> Tensor:
        """Rows of the groups, int64."""
        return torch.tensor([i for g in part for i in range(g.start, g.end)], device=self.device)

    def _temperatures(self, groups: list[_Group]) -> list[float]:
        return [g.profile.temperature for g in groups for _ in range(g.rows.num_rows)]

    def _filters(self, groups: list[_Group]) -> Filters:
        each = [
            (g.profile.filters or (0.0, 0, 1.0)) for g in groups for _ in range(g.rows.num_rows)
        ]
        return Filters.of(each, self.vocab_size, self.device)


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

    def takes_best(self, sequences: Seq[Sequence]) -> bool:
        """Whether every draft of these is the draft's best token by its raw logits."""
        profiles = (self.sampler.profile(s.request) for s in sequences)
        plain = all(p.greedy and not p.edits for p in profiles)
        return plain and not any(self.draws(s.request.params) for s in sequences)

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
        if with_probs or (with_probs is None and drawn):
            probs_BV = torch.zeros_like(logits_BV)
        if others:
            part = [rows[i] for i in others]
            for i, token in zip(others, self._settle(logits_BV[others], part), strict=True):
                ids[i] = token
                if probs_BV is not None:
                    probs_BV[i, token] = 1.0
        if drawn:
            assert probs_BV is not None, "drawn drafts need their distributions"
            part = [rows[i] for i in drawn]
            processed_DV = self.sampler.process(logits_BV[drawn], part)
            probs_BV[drawn] = processed_DV.softmax(dim=-1)
            keys_D2 = self.sampler.keys(part, Stream.DRAFT)
            tokens_D = draw(processed_DV, keys_D2, self.sampler.noise)
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
