"""Tokenizers of GGUF files against the families' own. The guarded bugs: words cut as another
family cuts them, a token of the text taken for a control token, a BOS too much or too few."""

import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from foretoken.errors import ForetokenError, PromptError
from foretoken.text import gguf_tokenizer
from foretoken.text.gguf_tokenizer import WORD_RULES, merges_of_scores
from foretoken.text.tokenizer import Tokenizer
from tests.unit.gguf_tokens import (
    CONTROL,
    ENDS,
    NORMAL,
    TEXTS,
    UNUSED,
    USER_DEFINED,
    fields_of,
    sentencepiece_fields,
    train,
    write_gguf,
)

Json = dict[str, Any]
GPT2: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": True}  # fmt: skip
BYTES: Json = {**GPT2, "use_regex": False}


def split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def digits(*, single: bool) -> Json:
    return {"type": "Digits", "individual_digits": single}


def sequence(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
FAMILIES: dict[str, tuple[Json, bool, bool]] = {
    "gpt-2": (GPT2, False, False),
    "olmo": (GPT2, True, False),
    "smollm": (sequence(digits(single=True), GPT2), False, False),
    "starcoder": (sequence(digits(single=True), GPT2), False, False),
    "command-r": (sequence(digits(single=True), GPT2), True, False),
    "falcon": (
        sequence(
            {"type": "Punctuation", "behavior": "Contiguous"},
            GPT2,
            digits(single=False),
            split("[0-9][0-9][0-9]"),
        ),
        False,
        False,
    ),
    "llama-bpe": (sequence(split(LLAMA3), BYTES), False, True),
    "dbrx": (sequence(split(LLAMA3), BYTES), False, False),
    "qwen2": (sequence(split(QWEN2), BYTES), True, False),
    "qwen35": (sequence(split(QWEN35), BYTES), True, False),
    "tekken": (sequence(split(TEKKEN), BYTES), False, True),
    "gpt-4o": (sequence(split(GPT4O), BYTES), False, False),
    "deepseek-coder": (
        sequence(
            split("[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
            digits(single=True),
            BYTES,
        ),
        False,
        False,
    ),
    "deepseek-v3": (
        sequence(
            split(r"\p{N}{1,3}"),
            split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
            split(DEEPSEEK3),
            BYTES,
        ),
        False,
        False,
    ),
    "bloom": (sequence(split(BLOOM), BYTES), False, False),
}
"""By GGUF's name: pre_tokenizer of the family's tokenizer.json, whether it has NFC, and whether it
has `ignore_merges`."""


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RawTokenizer, Tokenizer]:
    """A family's own tokenizer, and ours of the file that a converter makes of it."""
    definition, nfc, whole = FAMILIES[request.param]
    original = train(definition, nfc=nfc, whole=whole)
    fields = {**fields_of(original, request.param), "add_bos_token": False}
    return original, Tokenizer(write_gguf(tmp_path / "model.gguf", fields))


def test_ids_are_those_of_the_family(pair: tuple[RawTokenizer, Tokenizer]) -> None:
    original, found = pair
    for text in [*TEXTS, *(f"{text}{ENDS[1]}{text}" for text in TEXTS[:40])]:
        ids = found.encode(text)
        assert ids == original.encode(text).ids, text
        same = {text, unicodedata.normalize("NFC", text)}
        assert found.decode(ids, skip_special_tokens=False) in same


def test_every_name_cuts_texts() -> None:
    """And leaves nothing out: each letter of the pieces is a byte of the text."""
    for words in set(WORD_RULES.values()):
        pre_tokenizer = words.pre_tokenizer()
        for text in TEXTS:
            pieces = pre_tokenizer.pre_tokenize_str(text)
            assert sum(len(piece) for piece, _ in pieces) == len(text.encode()), words


def test_cased_letters_of_deepseek() -> None:
    """The list of code points has none that has no case."""
    cut = WORD_RULES["deepseek-llm"].cuts[1]
    listed = cut.removeprefix("\\s?[").removesuffix("]+")
    points: list[str] = []
    letters = iter(listed)
    for letter in letters:
        if letter == "-":
            points += [chr(code) for code in range(ord(points[-1]) + 1, ord(next(letters)) + 1)]
        else:
            points.append(letter)
    assigned = [one for one in points if unicodedata.category(one) != "Cn"]
    cased = [one for one in assigned if unicodedata.category(one) in ("Lu", "Ll", "Lt")]
    assert len(points) == len(set(points)) and len(cased) > 0.98 * len(assigned)


def slow_merges(fields: Json) -> list[tuple[str, str]]:
    """As transformers' converters make them, of the words."""
    words = {
        token: score
        for token, kind, score in zip(
            fields["tokens"], fields["token_type"], fields["scores"], strict=True
        )
        if kind == 1
    }
    places = {token: place for place, token in enumerate(words)}
    found = []
    for word, score in words.items():
        cuts = [(word[:i], word[i:], score) for i in range(1, len(word))]
        cuts = [one for one in cuts if one[0] in words and one[1] in words]
        found += sorted(cuts, key=lambda one: (places[one[0]], places[one[1]]))
    found.sort(key=lambda one: (one[2], len(one[0]), len(one[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


def sentencepiece(fields: Json, *, prefix: bool) -> RawTokenizer:
    """As the converter of Llama makes it."""
    vocabulary = {token: place for place, token in enumerate(fields["tokens"])}
    tokenizer = RawTokenizer(
        BPE(vocabulary, slow_merges(fields), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replaced = normalizers.Replace(" ", "\u2581")
    before = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, replaced])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    own = [
        AddedToken(token, normalized=False)
        for token, kind in zip(fields["tokens"], fields["token_type"], strict=True)
        if kind == USER_DEFINED
    ]
    tokenizer.add_tokens(own)
    return tokenizer


RUNS = [(mark * count, USER_DEFINED) for mark in " \n\t" for count in range(2, 32)]
"""As Gemma has them."""


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, *, prefix: bool) -> None:
    fields = sentencepiece_fields(TEXTS[:120], RUNS if not prefix else ())
    given = fields if prefix else {**fields, "add_space_prefix": False}
    found = Tokenizer(write_gguf(tmp_path / "model.gguf", given))
    original = sentencepiece(fields, prefix=prefix)
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        assert found.decode(ids) == original.decode(ids)
        assert found.encode(text) == [1, *ids]  # a SentencePiece model begins with BOS
    assert found.token_bytes(3 + 0x41) == b"A"


def test_stored_merges_go_before_scores(tmp_path: Path) -> None:
    fields = sentencepiece_fields(TEXTS[:60])
    merges = [" ".join(pair) for pair in slow_merges(fields)]
    stored = write_gguf(tmp_path / "a.gguf", {**fields, "merges": merges, "scores": None})
    found = Tokenizer(stored)
    assert found.encode("def f(x):", add_special_tokens=False) == sentencepiece(
        fields, prefix=True
    ).encode("def f(x):", add_special_tokens=False).ids  # fmt: skip


def test_merges_of_equal_scores() -> None:
    """The longer left part goes first, then the longer right part."""
    texts = ["a", "b", "ab", "ba", "aba", "\u00e9", "a\u00e9", ""]
    found = merges_of_scores(texts, np.zeros(8), np.arange(8))
    assert found == [("ab", "a"), ("a", "ba"), ("a", "b"), ("b", "a"), ("a", "\u00e9")]
    assert merges_of_scores(texts, np.zeros(8), np.arange(0)) == []


def test_tokens_that_fill_up_are_no_text(tmp_path: Path) -> None:
    fields = fields_of(train(GPT2), "gpt-2")
    size = len(fields["tokens"])
    fields["tokens"] += [f"[PAD{size + i}]" for i in range(3)]
    fields["token_type"] += [5, 5, 5]
    found = Tokenizer(write_gguf(tmp_path / "model.gguf", fields, rows=size + 3))
    assert len(found) == size and found.decode([size]) == "" and found.token_bytes(size) == b""


def test_what_stands_around_a_text(tmp_path: Path) -> None:
    fields = fields_of(train(GPT2), "gpt-2")
    bos, eos = fields["bos_token_id"], fields["eos_token_id"]
    cases: list[tuple[Json, list[int], list[int]]] = [
        ({}, [], []),
        ({"add_bos_token": True}, [bos], []),
        ({"add_eos_token": True}, [], [eos]),
        ({"pre": "llama-bpe"}, [bos], []),
        ({"pre": "llama-bpe", "bos_token_id": None}, [], []),
        ({"pre": "tekken", "add_bos_token": False}, [], []),
    ]
    for change, before, after in cases:
        found = Tokenizer(write_gguf(tmp_path / "model.gguf", {**fields, **change}))
        ids = found.encode("x", add_special_tokens=False)
        assert found.encode("x") == [*before, *ids, *after], change
        assert (found.bos_token_id, found.eos_token_id) == (
            fields["bos_token_id"] if "bos_token_id" not in change else None,
            eos,
        )


def test_ends_that_are_marked_as_words_are_special(tmp_path: Path) -> None:
    fields = fields_of(train(GPT2), "gpt-2")
    fields["token_type"][fields["eos_token_id"]] = USER_DEFINED
    found = Tokenizer(write_gguf(tmp_path / "model.gguf", fields))
    ids = found.encode(f"x{ENDS[1]}")
    assert ids[-1] == found.eos_token_id and found.decode(ids) == "x"


def test_chat_templates(tmp_path: Path) -> None:
    fields = fields_of(train(GPT2), "gpt-2")
    one = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    named = {"chat_templates": ["tool_use"], "chat_template.tool_use": "T{{ tools[0].name }}"}
    messages = [{"role": "user", "content": "hi"}]
    path = write_gguf(tmp_path / "model.gguf", {**fields, "chat_template": one, **named})
    found = Tokenizer(path)
    assert found.chat_text(messages) == ENDS[0] + "hi"
    assert found.chat_text(messages, tools=[{"name": "f"}]) == "Tf"
    assert found.apply_chat_template(messages)[0] == found.bos_token_id


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", fields_of(train(GPT2), "gpt-2"))
    script = (
        "import sys\nfrom pathlib import Path\nfrom foretoken.text.tokenizer import Tokenizer\n"
        "Tokenizer(Path(sys.argv[1])).encode('a b')\nassert 'transformers' not in sys.modules\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "deepseek-coder", "gpt-4o"])
def test_a_long_run_of_one_letter_ends(tmp_path: Path, pre: str) -> None:
    """In seconds: nothing goes with the square of its length."""
    path = write_gguf(tmp_path / "model.gguf", fields_of(train(GPT2), pre))
    found = Tokenizer(path)
    text = "a" * (4 << 20)
    ids = found.encode(text, add_special_tokens=False)
    assert found.decode(ids) == text


# Tokenizers of GGUF files whose parts do not fit together. The guarded bugs: a traceback, a
# guess, or ids of another vocabulary where a message belongs.
TINY: dict[str, Any] = {
    "model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab", "</s>"],
    "token_type": [NORMAL, NORMAL, NORMAL, CONTROL], "merges": ["a b"], "eos_token_id": 3,
}  # fmt: skip
SCORED: dict[str, Any] = {
    "model": "llama", "tokens": ["<unk>", "<s>", "</s>", "a"],
    "token_type": [2, CONTROL, CONTROL, NORMAL], "scores": [0.0, 0.0, 0.0, -1.0],
}  # fmt: skip
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, r"tokenizer\.ggml\.model: got None; allowed: gpt2, llama"),
    ({"model": "bert"}, r"tokenizer\.ggml\.model: got 'bert'; allowed: gpt2, llama"),
    ({"model": "none"}, r"tokenizer\.ggml\.model: got 'none'; allowed: gpt2, llama"),
    ({"pre": None}, r"tokenizer\.ggml\.pre: got None; allowed: .*qwen2.*smollm|smollm.*qwen2"),
    ({"pre": "default"}, r"tokenizer\.ggml\.pre: got 'default'; allowed: gpt-2, "),
    ({"pre": "qwen3"}, r"tokenizer\.ggml\.pre: got 'qwen3'; allowed: .*did you mean 'qwen"),
    ({"tokens": None}, r"tokenizer\.ggml\.tokens: got None; allowed: a list of tokens"),
    ({"tokens": ["a", "b", "a", "c"]}, r"tokenizer\.ggml\.tokens: got 'a'; allowed: each token"),
    ({"merges": None}, r"tokenizer\.ggml\.merges: got None"),
    ({"merges": ["a b", "a x"]}, r"tokenizer\.ggml\.merges: got .*x.*pairs of tokens"),
    ({"merges": ["b a"]}, r"tokenizer\.ggml\.merges: got .*ba.*pairs of tokens"),
    ({"merges": ["a b", "ab"]}, r"tokenizer\.ggml\.merges: got 'ab'; allowed: two tokens"),
    ({"merges": ["a b c"]}, r"tokenizer\.ggml\.merges: got 'a b c'; allowed: two tokens"),
    ({"merges": [1, 2]}, r"tokenizer\.ggml\.merges: got 'a list of 2'; allowed: a list"),
    ({"token_type": [1, 1, 3]}, r"tokenizer\.ggml\.token_type: got 'a list of 3 .*; allowed: 4"),
    ({"token_type": [1.0, 1.0, 1.0, 3.0]}, r"tokenizer\.ggml\.token_type: got .*allowed: 4 integ"),
    ({"eos_token_id": 4}, r"tokenizer\.ggml\.eos_token_id: got 4; allowed: 0 to 3"),
    ({"bos_token_id": 9}, r"tokenizer\.ggml\.bos_token_id: got 9; allowed: 0 to 3"),
    ({"add_bos_token": True}, r"bos_token_id: got None; allowed: the id of a token, since"),
    ({"eos_token_id": "3"}, r"tokenizer\.ggml\.eos_token_id: got '3'; allowed: an integer"),
    ({"add_eos_token": 1}, r"tokenizer\.ggml\.add_eos_token: got 1; allowed: true or false"),
    ({"chat_template": 3}, r"tokenizer\.chat_template: got 3; allowed: a text"),
]
BROKEN_SCORES: list[tuple[dict[str, Any], str]] = [
    ({"scores": None}, r"tokenizer\.ggml\.scores: got None; allowed: 4 numbers"),
    ({"scores": [0.0]}, r"tokenizer\.ggml\.scores: got 'a list of 1'; allowed: 4 numbers"),
    ({"scores": [0.0, 0.0, 0.0, float("nan")]}, r"tokenizer\.ggml\.scores: got nan; allowed: fin"),
    ({"token_type": [5, 3, 3, 1]}, r"unknown_token_id: got '<unk>'; allowed: a token that is used"),
    ({"unknown_token_id": 7}, r"unknown_token_id: got 7; allowed: 0 to 3"),
]


def read(folder: Path, fields: dict[str, Any], rows: int | None = None) -> Tokenizer:
    return Tokenizer(write_gguf(folder / "model.gguf", fields, rows))


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_byte_level(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ForetokenError, match=message):
        read(tmp_path, {**TINY, **change})


@pytest.mark.parametrize(("change", "message"), BROKEN_SCORES)
def test_scores(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ForetokenError, match=message):
        read(tmp_path, {**SCORED, **change})


@pytest.mark.parametrize("rows", [3, 5])
def test_an_embedding_of_another_length(tmp_path: Path, rows: int) -> None:
    message = rf"tokenizer\.ggml\.tokens: got '4 tokens'; allowed: {rows}, the rows of token_embd"
    with pytest.raises(ForetokenError, match=message):
        read(tmp_path, TINY, rows)
    assert len(read(tmp_path, TINY, 4)) == 4


def test_tokens_that_are_no_text(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {**TINY, "tokens": ["a", "b", "ab", "</s>#"]})
    path.write_bytes(path.read_bytes().replace(b"</s>#", b"</s>\xff"))
    with pytest.raises(ForetokenError, match=r"tokenizer\.ggml\.tokens: got .*UTF-8"):
        Tokenizer(path)


def test_lists_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer, "_MOST_BYTES", 39)
    with pytest.raises(ForetokenError, match=r"tokens: got '40 bytes'; allowed: at most 39"):
        read(tmp_path, TINY)


def test_longer_tokens_than_any_vocabulary_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.text.gguf_tokenizer._MOST_CUT", 30)
    tokens = ["<unk>", "<s>", "</s>", *("a" * count for count in range(1, 20))]
    fields = {"model": "llama", "tokens": tokens, "token_type": [2, 3, 3] + [1] * 19}
    with pytest.raises(ForetokenError, match=r"tokens: got .*2,470 .*; allowed: "):
        read(tmp_path, {**fields, "scores": [0.0] * 22})


def test_what_is_no_mistake(tmp_path: Path) -> None:
    """Empty tokens, padding that is no token, a vocabulary without types or a chat template."""
    empty = {"tokens": ["a", "b", "ab", "</s>", "", ""], "token_type": [1, 1, 1, 3, UNUSED, 1]}
    found = read(tmp_path, {**TINY, **empty, "padding_token_id": 4294967295})
    assert found.encode("ab") == [2] and len(found) == 4
    assert read(tmp_path, {**TINY, "token_type": None}).encode("ab</s>") == [2, 3]
    with pytest.raises(PromptError, match="a model with a chat template"):
        found.chat_text([{"role": "user", "content": "hi"}])
    assert read(tmp_path, SCORED).encode("a") == [1, 0, 3]
    assert len(read(tmp_path, {**TINY, "token_type": [1, 1, 1, UNUSED]})) == 3
    assert read(tmp_path, {**TINY, "eos_token_id": None}).eos_token_id is None
