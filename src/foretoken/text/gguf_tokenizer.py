"""The tokenizer of a GGUF file, built from its metadata with the `tokenizers` library alone.

Two kinds are read: byte-level BPE (`gpt2`) with the family's own cut into words, and SentencePiece
(`llama`), whose scores become merges. Nothing in the file is believed: every list is held against
the others before anything is made of it.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from foretoken.errors import TokenizerError
from foretoken.shape.gguf import about_gguf, open_gguf
from foretoken.shape.gguf_ends import (
    BYTE,
    CONTROL,
    TOKENS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Types,
    id_of,
    types_of,
)
from foretoken.shape.gguf_file import GgufTable, Strings
from foretoken.text.chat_template import ChatTemplate
from foretoken.text.pre_tokenizers import WORD_RULES, WordRule
from foretoken.text.score_merges import Pieces, merges_of_scores

_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_MERGES, _SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_MOST_BYTES: Final = 1 << 24
"""Of all tokens, and half of all merges: four times what Gemma's 262,144 take."""
_SPACE: Final = "\u2581"
_ENDS: Final = ("eos", "eot", "eom")
_SENTENCEPIECE_IDS: Final = {"bos": 1, "eos": 2, "unknown": 0}
"""What files of SentencePiece models mean where they do not say."""


class TokenizerParts(NamedTuple):
    """What a checkpoint has to make text of ids and ids of text."""

    tokenizer: tokenizers.Tokenizer
    chat: ChatTemplate | None
    bos_token_id: int | None
    eos_token_id: int | None
    longest: int | None = None
    """Characters of the longest token, where that is known without asking for each."""


class _Vocabulary(NamedTuple):
    """The tokens of a file, and what it says of some of them."""

    strings: Strings
    texts: Sequence[str]
    types: Types
    ids: Mapping[str, int | None]
    """By what the file calls them: `bos`, `eos`, `unknown`, `padding` and the like."""

    def text_of(self, name: str) -> str | None:
        """The token that the file calls so, if it has one."""
        token = self.ids[name]
        return None if token is None else self.texts[token]

    def by_text(self) -> dict[str, int]:
        """Ids; without tokens that are only there to fill the embedding up.

        Raises:
            TokenizerError: a token is there twice.
        """
        found = dict(zip(self.texts, range(len(self.texts)), strict=True))
        empty = self.texts.count("")
        if len(found) + max(0, empty - 1) != len(self.texts):
            twice = next(text for place, text in enumerate(self.texts) if found[text] != place)
            raise TokenizerError(TOKENS, twice, "each token once")
        found.pop("", None)
        for token in np.flatnonzero(self.types == UNUSED).tolist():
            found.pop(self.texts[token], None)
        return found


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Build the tokenizer of a file.

    Raises:
        TokenizerError: it has none, one of another kind, or parts that do not fit together.
        CheckpointError: no GGUF file, one that is broken, or a field of the wrong kind.
    """
    table = open_gguf(path)
    with about_gguf(path):
        return _read(table)


def check_gguf_tokenizer(path: Path) -> None:
    """Raise what `read_gguf_tokenizer` would say of the kind of a file's tokenizer and of the
    number of its tokens; no token is looked at."""
    table = open_gguf(path)
    with about_gguf(path):
        _kind_of(table)
        _strings_of(table)


def _kind_of(table: GgufTable) -> tuple[str, WordRule | None]:
    """The model of a tokenizer, and how it cuts texts into words, if it does."""
    kind = table.get(_MODEL, str)
    if kind not in _KINDS:
        raise TokenizerError(_MODEL, kind, ", ".join(_KINDS))
    if kind != "gpt2":
        return kind, None
    name = table.get(_PRE, str)
    if name not in WORD_RULES:
        raise TokenizerError(_PRE, name, ", ".join(WORD_RULES))
    return kind, WORD_RULES[name]


def _read(table: GgufTable) -> TokenizerParts:
    kind, words = _kind_of(table)
    found = _vocabulary(table, {} if words else _SENTENCEPIECE_IDS)
    tokenizer = _KINDS[kind](table, found)
    _add_tokens(tokenizer, found)
    begins = table.get("tokenizer.ggml.add_bos_token", bool)
    if begins is None:
        begins = found.ids["bos"] is not None and (words is None or words.begins)
    ends = table.get("tokenizer.ggml.add_eos_token", bool, False)
    _frame(tokenizer, found, ("bos",) if begins else (), ("eos",) if ends else ())
    bos, eos = found.ids["bos"], found.ids["eos"]
    return TokenizerParts(tokenizer, _chat(table, found), bos, eos, max(map(len, found.texts)))


def _strings_of(table: GgufTable) -> Strings:
    """The texts of all tokens, as many as the embedding has rows."""
    strings: Strings | None = table.get(TOKENS, Strings)
    if strings is None or not strings.size:
        raise TokenizerError(TOKENS, None if strings is None else [], "a list of tokens")
    _check_bytes(strings, _MOST_BYTES)
    embedding = table.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[-1] != strings.size:
        allowed = f"{embedding.shape[-1]:,}, the rows of token_embd.weight"
        raise TokenizerError(TOKENS, f"{strings.size:,} tokens", allowed)
    return strings


def _vocabulary(table: GgufTable, defaults: Mapping[str, int]) -> _Vocabulary:
    strings = _strings_of(table)
    known = {name: token for name, token in defaults.items() if token < strings.size}
    ids = {name: id_of(table, name, known.get(name)) for name in (*_ENDS, "bos", "unknown")}
    padding = table.get("tokenizer.ggml.padding_token_id", int)  # in some files it is no token
    ids["padding"] = padding if padding is not None and 0 <= padding < strings.size else None
    types = types_of(table)
    return _Vocabulary(
        strings, strings.texts(), np.ones(strings.size, np.int32) if types is None else types, ids
    )


def _check_bytes(strings: Strings, most: int) -> None:
    if len(strings.raw) > most:
        raise TokenizerError(strings.name, f"{len(strings.raw):,} bytes", f"at most {most:,}")


def _byte_level(table: GgufTable, found: _Vocabulary) -> tokenizers.Tokenizer:
    """A tokenizer whose words are merged from bytes."""
    words = WORD_RULES[table.get(_PRE, str)]
    merges = _stored_merges(table)
    if merges is None:
        raise TokenizerError(_MERGES, None, "a list of pairs of tokens")
    tokenizer = tokenizers.Tokenizer(_bpe(found, merges, ignore_merges=words.whole))
    if words.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(table: GgufTable, found: _Vocabulary) -> tokenizers.Tokenizer:
    """A tokenizer whose texts are merged from characters, and those it lacks from bytes."""
    merges = _stored_merges(table)
    if merges is None:
        merges = _merges_of_scores(table, found)
    unknown = found.text_of("unknown")
    rest: dict[str, Any] = {} if unknown is None else {"unk_token": unknown}
    tokenizer = tokenizers.Tokenizer(_bpe(found, merges, byte_fallback=True, fuse_unk=True, **rest))
    prefix = table.get("tokenizer.ggml.add_space_prefix", bool, True)
    replaced = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if prefix else replaced
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


_KINDS: Final[Mapping[str, Callable[[GgufTable, _Vocabulary], tokenizers.Tokenizer]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
"""By `tokenizer.ggml.model`."""


def _bpe(found: _Vocabulary, merges: list[tuple[str, str]], **settings: Any) -> BPE:
    vocabulary = found.by_text()
    unknown = settings.get("unk_token")
    if unknown is not None and unknown not in vocabulary:
        raise TokenizerError("tokenizer.ggml.unknown_token_id", unknown, "a token that is used")
    try:
        return BPE(vocab=vocabulary, merges=merges, **settings)
    except Exception as error:  # noqa: BLE001 - the library raises bare exceptions
        allowed = "pairs of tokens that together are a token"
        raise TokenizerError(_MERGES, str(error), allowed) from None


def _stored_merges(table: GgufTable) -> list[tuple[str, str]] | None:
    """Pairs of tokens, the one to join first at the beginning; None if the file has none."""
    strings = table.get(_MERGES, Strings)
    if strings is None:
        return None
    _check_bytes(strings, 2 * _MOST_BYTES)
    texts = strings.texts()
    if set(map(methodcaller("count", " "), texts)) - {1}:
        wrong = next(text for text in texts if text.count(" ") != 1)
        raise TokenizerError(_MERGES, wrong, "two tokens with one space between")
    parts = " ".join(texts).split(" ") if texts else []
    return list(zip(parts[::2], parts[1::2], strict=True))


def _merges_of_scores(table: GgufTable, found: _Vocabulary) -> list[tuple[str, str]]:
    scores = table.get(_SCORES, np.ndarray)
    if scores is None or len(scores) != len(found.texts):
        given = None if scores is None else f"a list of {len(scores)}"
        raise TokenizerError(_SCORES, given, f"{len(found.texts)} numbers, one for each token")
    scores = scores.astype(np.float64)
    if not np.isfinite(scores).all():
        raise TokenizerError(_SCORES, float(scores[~np.isfinite(scores)][0]), "finite numbers")
    words = ~np.isin(found.types, (UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE))
    strings = found.strings
    pieces = Pieces(np.frombuffer(strings.raw, np.uint8), strings.starts, strings.ends)
    try:
        left, right = merges_of_scores(pieces, scores, np.flatnonzero(words))
    except ValueError as error:
        raise TokenizerError(TOKENS, str(error), "a vocabulary of SentencePiece") from None
    texts = np.array(found.texts, object)
    return list(zip(texts[left].tolist(), texts[right].tolist(), strict=True))


def _add_tokens(tokenizer: tokenizers.Tokenizer, found: _Vocabulary) -> None:
    """Have tokens that are no words be found in a text before anything else is."""
    special, added = np.isin(found.types, (UNKNOWN, CONTROL)), found.types == USER_DEFINED
    bos, ends = found.ids["bos"], [found.ids[name] for name in _ENDS]
    special[[token for token in ends if token is not None]] = True
    if bos is not None and added[bos]:
        special[bos] = True
    special &= found.types != UNUSED  # which would get an id of its own
    for chosen, is_special in ((special, True), (added & ~special, False)):
        texts = (found.texts[token] for token in np.flatnonzero(chosen).tolist())
        tokens = [AddedToken(one, normalized=False, special=is_special) for one in texts if one]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(tokens)


def _frame(
    tokenizer: tokenizers.Tokenizer,
    found: _Vocabulary,
    before: Sequence[str],
    after: Sequence[str],
) -> None:
    """Put tokens around every text that is encoded with special tokens."""
    used = {}
    for name in (*before, *after):
        token = found.ids[name]
        if token is None:
            allowed = f"the id of a token, since tokenizer.ggml.add_{name}_token is true"
            raise TokenizerError(f"tokenizer.ggml.{name}_token_id", None, allowed)
        used[name] = {"id": name, "ids": [token], "tokens": [found.texts[token]]}
    if used:
        tokenizer.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=list(used.values()),
        )


def _chat(table: GgufTable, found: _Vocabulary) -> ChatTemplate | None:
    """The file's templates, of which the one without a name is the usual one."""
    sources = {
        name: table.get(f"{_TEMPLATE}.{name}", str) for name in table.get(_TEMPLATES, Strings, ())
    }
    sources["default"] = table.get(_TEMPLATE, str) or sources.get("default")
    sources = {name: source for name, source in sources.items() if source is not None}
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    specials = {f"{short}_token": found.text_of(name) for name, short in names.items()}
    known = {name: text for name, text in specials.items() if text is not None}
    return ChatTemplate(sources, known) if sources else None
