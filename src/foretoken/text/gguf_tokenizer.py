"""The tokenizer of a GGUF file, built from its metadata with the `tokenizers` library alone.

Two kinds are read: byte-level BPE (`gpt2`) with the family's own cut into words, and SentencePiece
(`llama`), whose scores become merges. Nothing in the file is believed: every list is held against
the others before anything is made of it.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import methodcaller
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Split
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

_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_MERGES, _SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_MOST_BYTES: Final = 1 << 24
"""Of all tokens, and half of all merges: four times what Gemma's 262,144 take."""
_SPACE: Final = "\u2581"
_ENDS: Final = ("eos", "eot", "eom")
_SENTENCEPIECE_IDS: Final = {"bos": 1, "eos": 2, "unknown": 0}
"""What files of SentencePiece models mean where they do not say."""
_MOST_CUT: Final = 1 << 30
"""Characters of all that tokens are cut into, about: some forty times what Gemma's have."""
_GPT2, _DIGIT, _DIGITS, _PUNCTUATION = "gpt2", "digit", "digits", "punctuation"
_MADE: Final[Mapping[str, Callable[[], PreTokenizer]]] = {
    _GPT2: lambda: ByteLevel(add_prefix_space=False, use_regex=True),
    _DIGIT: lambda: Digits(individual_digits=True),
    _DIGITS: lambda: Digits(individual_digits=False),
    _PUNCTUATION: lambda: Punctuation(behavior="contiguous"),
}
"""Cuts that the library has by name; all others are patterns."""


class WordRule(NamedTuple):
    """How a text becomes words, and what else hangs on the family.

    Within a word bytes are merged, never across words, so another cut means other ids. Patterns are
    those of the families' own tokenizer.json files, in the syntax of the `tokenizers` library;
    where no such file was at hand, those of llama.cpp. A name without a rule is refused, not
    guessed.
    """

    cuts: tuple[str, ...]
    """One after the other, each applied to the pieces of the one before."""
    nfc: bool = False
    """Whether a text is normalized (NFC) first."""
    whole: bool = False
    """Whether a word that is a token is taken as it is, whatever the merges say."""
    begins: bool = False
    """Whether a text begins with BOS where the file does not say."""

    def pre_tokenizer(self) -> PreTokenizer:
        """What cuts a text, and writes its bytes as letters."""
        steps = [_MADE[cut]() if cut in _MADE else _split(cut) for cut in self.cuts]
        if _GPT2 not in self.cuts:
            steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _split(pattern: str) -> PreTokenizer:
    return Split(Regex(pattern), behavior="isolated")


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ASCII_SIGNS = "!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~"


def _cased(after: str, digits: str) -> str:
    """Words that change case once at most; `after` may stand behind them."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_ONE_DIGIT = rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_SIGNS}"
_THREE_DIGITS = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}"
_O200K = _cased(_SHORT + "?", r"\p{N}{1,3}")
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    f"[{_ASCII_SIGNS}][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
_CASED_RANGES = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""Letters with two cases, as DeepSeek's first tokenizer lists them."""


def _letters(ranges: str) -> str:
    ends = (one.split("-") for one in ranges.split())
    return "".join("-".join(chr(int(end, 16)) for end in one) for one in ends)


_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_letters(_CASED_RANGES)}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    _DIGIT,
)
_TABLE: Final[Mapping[str, WordRule]] = {
    "gpt-2 phi-2 gigachat a.x-4.0 mellum jais trillion granite-docling exaone4": WordRule((_GPT2,)),
    "mpt olmo": WordRule((_GPT2,), nfc=True),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": WordRule((_DIGIT, _GPT2)),
    "command-r": WordRule((_DIGIT, _GPT2), nfc=True),
    "falcon": WordRule((_PUNCTUATION, _GPT2, _DIGITS, "[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": WordRule(
        (_THREE_DIGITS,), whole=True, begins=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": WordRule((_THREE_DIGITS,)),
    "minicpm5": WordRule((r"\p{N}{1,3}", rf"{_SHORT}|{_LETTERS}|\p{{N}}+|{_SIGNS}"), whole=True),
    "qwen2 deepseek-r1-qwen megrez": WordRule((_ONE_DIGIT,), nfc=True),
    "stablelm2 hunyuan solar-open grok-2 kormo": WordRule((_ONE_DIGIT,)),
    "qwen35": WordRule(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        nfc=True,
    ),
    "deepseek-llm": WordRule(_DEEPSEEK),
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm": WordRule(_DEEPSEEK3),
    "tekken": WordRule((_cased("", r"\p{N}"),), whole=True, begins=True),
    "gpt-4o llama4 kanana2 minimax-m2": WordRule((_O200K,)),
    "bloom poro-chat gpt3-finnish": WordRule((_BLOOM,)),
    "viking": WordRule((_BLOOM, _DIGIT)),
    "bailingmoe bailingmoe2 llada-moe": WordRule(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "seed-coder": WordRule((rf"{_SHORT}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "exaone-moe": WordRule(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "ufakzeka": WordRule((rf"{_LETTERS}|\p{{N}}|{_SIGNS}",)),
    "superbpe": WordRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}


def _by_name(table: Mapping[str, WordRule]) -> dict[str, WordRule]:
    return {name: words for names, words in table.items() for name in names.split()}


WORD_RULES: Final[Mapping[str, WordRule]] = _by_name(_TABLE)
"""By `tokenizer.ggml.pre`."""


def merges_of_scores(
    texts: Sequence[str], scores: npt.NDArray[np.float64], ids: npt.NDArray[np.int64]
) -> list[tuple[str, str]]:
    """Every pair of tokens that is a token, in the order of transformers' converters.

    SentencePiece joins the two neighbours whose union has the best score.

    Args:
        texts: of all tokens.
        scores: of all tokens; higher ones are joined first.
        ids: ascending; the tokens that may be joined, and joined to.

    Raises:
        ValueError: they are too long.

    Returns:
        Their texts. Of equal scores the longer left part goes first, then the longer right part.
    """
    order: list[int] = ids[np.argsort(-scores[ids], kind="stable")].tolist()
    cut = sum(len(texts[token]) ** 2 for token in order)
    if cut > _MOST_CUT:
        raise ValueError(f"{cut:,} characters in the parts of tokens, more than {_MOST_CUT:,}")
    known = {texts[token] for token in order}
    found: list[tuple[str, str]] = []
    for _, tokens in groupby(order, key=scores.tolist().__getitem__):
        pairs = [
            (left, right)
            for text in map(texts.__getitem__, tokens)
            for at in range(len(text) - 1, 0, -1)
            if (left := text[:at]) in known and (right := text[at:]) in known
        ]
        pairs.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        found += pairs
    return found


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

    texts: Sequence[str]
    types: Types
    ids: Mapping[str, int | None]
    """By what the file calls them: `bos`, `eos`, `unknown`, `padding` and the like."""

    def text_of(self, name: str) -> str | None:
        """The token that the file calls so, if it has one."""
        token = self.ids[name]
        return None if token is None else self.texts[token]

    def by_text(self) -> dict[str, int]:
        """Ids; without tokens that are only there to fill the embedding up. Raises TokenizerError:
        a token is there twice."""
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
    types = np.ones(strings.size, np.int32) if types is None else types
    return _Vocabulary(strings.texts(), types, ids)


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
    try:
        return merges_of_scores(found.texts, scores, np.flatnonzero(words))
    except ValueError as error:
        raise TokenizerError(TOKENS, str(error), "a vocabulary of SentencePiece") from None


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
    tokenizer: tokenizers.Tokenizer, found: _Vocabulary, before: Sequence[str], after: Sequence[str]
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
