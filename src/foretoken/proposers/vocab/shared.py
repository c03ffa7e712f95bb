"""A draft model with another vocabulary, through the tokens that both vocabularies have.

The draft may only say shared tokens, so its distribution is one over the target's ids, and every
rule stays exact: whatever distribution a draft was drawn from, the output has the target's. It
reads the target's tokens one for one, with a stand-in for those it does not know; that costs
agreement, never correctness.

Source: token-level intersection of Timor et al. 2025 (arXiv 2502.05202).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np
import torch
from torch import Tensor

from foretoken.models.tensors import RolloutPlan
from foretoken.proposers.models.language import DraftLanguageModel, Places, Tokens
from foretoken.proposers.vocab.bytes import TokenBytes
from foretoken.text.tokenizer import Tokenizer

UNSHARED = -1e20
"""Logit of target tokens that the draft cannot say: probability 0 beside any other, but finite,
so that a request which allows nothing else still has a distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedVocabulary:
    """Which ids of two models mean the same."""

    target_ids: tuple[int, ...]
    """Shared tokens in the target's ids, without repetition."""
    draft_ids: tuple[int, ...]
    """The shared tokens in the draft's ids, in the same order."""
    stand_ins: tuple[int, ...]
    """For each id of the target's model the draft id to read in its place."""

    @property
    def size(self) -> int:
        """How many tokens are shared."""
        return len(self.target_ids)

    @classmethod
    def padded(cls, target_size: int, draft_size: int) -> Self:
        """One vocabulary, padded to different sizes."""
        shared = tuple(range(min(target_size, draft_size)))
        beyond = (0,) * (target_size - len(shared))
        return cls(target_ids=shared, draft_ids=shared, stand_ins=shared + beyond)

    @classmethod
    def of(
        cls,
        target: TokenBytes,
        draft: TokenBytes,
        *,
        target_size: int,
        draft_size: int,
        draft_tokenizer: Tokenizer,
    ) -> Self:
        """Pair equal tokens; the lowest id counts where a vocabulary has one twice.

        Args:
            target: of the target's tokenizer.
            draft: of the draft's.
            target_size: ids of the target model.
            draft_size: ids of the draft model.
            draft_tokenizer: spells what the draft has no token for: its last piece stands in.
        """
        known = _by_meaning(draft, draft_size)
        pairs = {
            index: known[meaning]
            for meaning, index in _by_meaning(target, target_size).items()
            if meaning in known
        }
        fallback = draft.eos_token_id or 0
        stand_ins = [fallback] * target_size
        unknown = []
        for index in range(min(target_size, len(target.bytes_V))):
            if index in pairs:
                stand_ins[index] = pairs[index]
            elif index not in target.special:
                unknown.append(index)
        texts = [target.bytes_V[index].decode("utf-8", "ignore") for index in unknown]
        spelled = draft_tokenizer.encode_many(texts)
        for index, ids in zip(unknown, spelled, strict=True):
            if ids and ids[-1] < draft_size:
                stand_ins[index] = ids[-1]
        shared = sorted(pairs)
        return cls(
            target_ids=tuple(shared),
            draft_ids=tuple(pairs[index] for index in shared),
            stand_ins=tuple(stand_ins),
        )


def _by_meaning(table: TokenBytes, size: int) -> dict[tuple[str, bytes], int]:
    found: dict[tuple[str, bytes], int] = {}
    for index in range(min(size, len(table.bytes_V))):
        meaning = table.meaning(index)
        if meaning is not None:
            found.setdefault(meaning, index)
    return found


@final
class SharedVocabularyRunner:
    """A draft model that reads and speaks the target's ids."""

    def __init__(
        self, runner: DraftLanguageModel, shared: SharedVocabulary, target_size: int, device: str
    ) -> None:
        """Translate for `runner`, a draft model over its own store on `device`."""
        self._runner = runner
        self._target_size = target_size
        self._target_ids = torch.tensor(shared.target_ids, dtype=torch.int64, device=device)
        self._draft_ids = torch.tensor(shared.draft_ids, dtype=torch.int64, device=device)
        self._stand_ins = np.asarray(shared.stand_ins, dtype=np.int64)

    def roll_out(self, layouts: Places, token_ids: Tokens, plan: RolloutPlan) -> None:
        """Token by token: what is drafted must be among the tokens that both have."""

    def forward_last(self, layouts: Places, token_ids: Tokens) -> Tensor:
        return self._spoken(self._runner.forward_last(layouts, self._read(token_ids)))

    def logits_at(self, layouts: Places, token_ids: Tokens, rows: Sequence[int]) -> Tensor:
        return self._spoken(self._runner.logits_at(layouts, self._read(token_ids), rows))

    def _read(self, token_ids: Tokens) -> list[list[int]]:
        return [self._stand_ins[np.asarray(ids)].tolist() for ids in token_ids]

    def _spoken(self, drafted_RV: Tensor) -> Tensor:
        logits_RV = drafted_RV.new_full((drafted_RV.shape[0], self._target_size), UNSHARED)
        logits_RV[:, self._target_ids] = drafted_RV[:, self._draft_ids]
        return logits_RV
