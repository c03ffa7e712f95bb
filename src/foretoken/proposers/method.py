"""What every drafting method offers: a function `load_spec`, in the module that its row names.

    def load_spec(config, target) -> DrafterSpec

An engine asks twice. First it finds its drafters: that reads files and no weights are put to work,
because the size of the KV cache depends on what the drafters will keep. Then, with the target
running, it builds them. Knows no method.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretoken.config import DrafterConfig
from foretoken.config.memory import HeadMemory, ModelMemory
from foretoken.config.quantization import PrecisionConfig
from foretoken.kv.pool import PagePool
from foretoken.kv.shared_pages import DraftPages, SharedPages
from foretoken.kv.store import KVStore
from foretoken.proposers.base import Proposer
from foretoken.runtime.runner import Runner
from foretoken.runtime.verifier import Verifier
from foretoken.shape import ModelShape
from foretoken.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that drafts are made for, before it is loaded."""

    shape: ModelShape
    tokenizer: Tokenizer | None
    """None: the engine takes and gives ids only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What the engine gives the drafters that it builds."""

    target: Runner
    """Runs, and keeps the hidden states that drafters asked for."""
    verifier: Verifier
    pool: PagePool
    """The target's pages. A drafter's own keys and values lie under the same numbers."""
    load_model: Callable[[Path, PrecisionConfig], Runner]
    """(folder, how its numbers are kept) -> another model over a KV store of its own, with as many
    pages as the target's."""
    device: str
    """Where the target runs."""
    max_model_len: int
    max_num_batched_tokens: int
    shared: SharedPages | None = None
    """Says what drafters may write; None: every page of theirs has its memory."""

    def draft_pages(
        self, label: str, store: "KVStore | Runner", pool: PagePool | None = None
    ) -> DraftPages | None:
        """The book of a drafter's keys and values; `pool`: whose pages they are, if its own."""
        if self.shared is None:
            return None
        return self.shared.add((label,), store.page_bytes, store.give_back, pool)

    @property
    def vocab_size(self) -> int:
        """Ids that the target knows."""
        return self.target.model.shape.vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """A drafter as its settings and its files describe it."""

    build: Callable[[BuildContext], Proposer]
    """Puts it to work; asked once."""
    model: ModelMemory | None = None
    """What a language model that drafts will keep in memory."""
    head: HeadMemory | None = None
    """What a head will keep in memory."""
    points: tuple[int, ...] = ()
    """Where it reads the target's hidden states (see `foretoken.kv.features`)."""
    checked: bool = False
    """Whether its drafts are not believed: code of a user's own."""


LoadSpec = Callable[[DrafterConfig, Target], DrafterSpec]
"""What the module of a method has as `load_spec`."""
