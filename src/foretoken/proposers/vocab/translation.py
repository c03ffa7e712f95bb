"""How a draft model's vocabulary relates to the target's, and what to do about it.

Decides once, when an engine is put together; knows no step. Every refusal says which of the two
ways to draft across vocabularies to set.
"""

import logging
from dataclasses import dataclass

from foretoken.config import DrafterConfig
from foretoken.errors import ConfigError
from foretoken.proposers.vocab.bytes import ByteEncoder, TokenBytes
from foretoken.proposers.vocab.shared import SharedVocabulary
from foretoken.text.tokenizer import Tokenizer

logger = logging.getLogger("foretoken")

_WHERE = "speculative_config."
_FEW = 100
_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One model's words: how many ids it has, and its tokenizer if there is one."""

    vocab_size: int
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True)
class Translation:
    """How drafts get from one vocabulary to the other; with neither field, ids mean the same."""

    shared: SharedVocabulary | None = None
    """Through the tokens that both have."""
    encoders: tuple[ByteEncoder, ByteEncoder] | None = None
    """Through text: the target's encoder and the draft's."""


def translation(config: DrafterConfig, target: Vocabulary, draft: Vocabulary) -> Translation:
    """Choose the way for these two models. Raises ConfigError: the vocabularies differ and no way
    was set, or the one set cannot work."""
    if target.tokenizer is None or draft.tokenizer is None:
        return _without_tokenizers(config, target, draft)
    if _alike(target.tokenizer, draft.tokenizer):
        if target.vocab_size == draft.vocab_size:
            return Translation()
        logger.info("The draft has the target's tokenizer, padded to another size")
        padded = SharedVocabulary.padded(target.vocab_size, draft.vocab_size)
        return Translation(shared=padded)
    if config.vocabulary.use_string_matching:
        return Translation(encoders=_encoders(target.tokenizer, draft.tokenizer))
    shared = SharedVocabulary.of(
        TokenBytes.of(target.tokenizer),
        TokenBytes.of(draft.tokenizer),
        target_size=target.vocab_size,
        draft_size=draft.vocab_size,
        draft_tokenizer=draft.tokenizer,
    )
    count = f"{shared.size} of {target.vocab_size} tokens shared with the target"
    if not config.vocabulary.use_heterogeneous_vocab:
        allowed = (
            "a draft with the target's tokenizer; or set use_heterogeneous_vocab (drafts shared "
            "tokens only, exact under sampling) or use_string_matching (drafts any text, greedily)"
        )
        raise ConfigError(_WHERE + "model", f"{config.model} with {count}", allowed)
    if shared.size == 0:
        raise ConfigError(_WHERE + "use_heterogeneous_vocab", count, "use_string_matching instead")
    if shared.size < _FEW:
        logger.warning("Only %s: use_string_matching may draft better", count)
    logger.info("Drafting across vocabularies: %s", count)
    return Translation(shared=shared)


def _without_tokenizers(
    config: DrafterConfig, target: Vocabulary, draft: Vocabulary
) -> Translation:
    """Without tokenizers to compare, equal sizes are taken for equal vocabularies."""
    for name in ("use_heterogeneous_vocab", "use_string_matching"):
        if getattr(config.vocabulary, name):
            allowed = "False: the target or the draft has no tokenizer to compare"
            raise ConfigError(_WHERE + name, True, allowed)
    if target.vocab_size != draft.vocab_size:
        allowed = f"a draft with the target's vocabulary ({target.vocab_size} tokens)"
        raise ConfigError(_WHERE + "model", f"{draft.vocab_size} tokens", allowed)
    return Translation()


def _alike(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether every token that both have has the same id, and both have (nearly) the same."""
    ours, theirs = target.vocabulary(), draft.vocabulary()
    if ours == theirs:
        return True
    common = ours.keys() & theirs.keys()
    different = len(ours.keys() ^ theirs.keys())
    return different <= len(common) // 100 and all(ours[t] == theirs[t] for t in common)


def _encoders(target: Tokenizer, draft: Tokenizer) -> tuple[ByteEncoder, ByteEncoder]:
    """One for each tokenizer. Raises ConfigError: a tokenizer changes the text, so that it cannot
    be cut anew."""
    table = TokenBytes.of(target)
    encoders = ByteEncoder(target, table), ByteEncoder(draft, TokenBytes.of(draft))
    texts = [text for i, text in enumerate(table.bytes_V) if i not in table.special and text]
    step = max(1, len(texts) // _SAMPLES)
    for whose, encoder in zip(("target", "draft"), encoders, strict=True):
        kept = [encoder.encode(text, at_start=True) is not None for text in texts[::step]]
        if sum(kept) < len(kept) / 2:
            allowed = f"False: the {whose}'s tokenizer changes text (such as its case) as it reads"
            raise ConfigError(_WHERE + "use_string_matching", True, allowed)
    return encoders
