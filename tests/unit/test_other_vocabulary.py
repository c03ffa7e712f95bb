"""Tokens as bytes, shared vocabularies, and text cut anew, on tokenizers of both families."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from foretoken.config import DrafterConfig, SpeculativeConfig
from foretoken.errors import ConfigError
from foretoken.proposers.vocab.bytes import ByteEncoder, ByteText, TokenBytes, complete
from foretoken.proposers.vocab.shared import SharedVocabulary
from foretoken.proposers.vocab.translation import Translation, Vocabulary, translation
from foretoken.text.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def save(backend: Backend, folder: Path) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return Tokenizer(folder)


def byte_level(folder: Path, tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *tokens])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return save(backend, folder)


def pieces(folder: Path, *, lower: bool = False) -> Tokenizer:
    """In the manner of SentencePiece: a mark for spaces, single bytes as a last resort."""
    marked = ["\u2581", "a", "b", "c", "\u2581a", "\u2581b", "bc", "\u2581abc"]
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *spelled, *marked])}
    merges = [("\u2581", "a"), ("\u2581", "b"), ("b", "c"), ("\u2581a", "bc")]
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    if lower:
        backend.normalizer = normalizers.Lowercase()
    return save(backend, folder)


@pytest.fixture
def bytes_like(tmp_path: Path) -> Tokenizer:
    tokens = ["\u0120", "a", "b", "c", "ab", "\u0120a", "\u00c3", "\u00a9", "\u00c3\u00a9"]
    merges = [("a", "b"), ("\u0120", "a"), ("\u00c3", "\u00a9")]
    return byte_level(tmp_path / "bytes", tokens, merges)


@pytest.fixture
def pieces_like(tmp_path: Path) -> Tokenizer:
    return pieces(tmp_path / "pieces")


def test_bytes_of_tokens(bytes_like: Tokenizer, pieces_like: Tokenizer) -> None:
    for tokenizer in (bytes_like, pieces_like):
        table = TokenBytes.of(tokenizer)
        for text in ("a b c", "abc ab a", "caf\u00e9 abc"):
            known = text if tokenizer is pieces_like else text.replace("f", "")
            ids = tokenizer.encode(known, add_special_tokens=False)
            assert table.join(ids).lstrip() == known.encode()
        assert table.meaning(0) == ("bos", b"") and table.meaning(1) == ("eos", b"")


def test_shared_tokens_and_stand_ins(bytes_like: Tokenizer, pieces_like: Tokenizer) -> None:
    ours, theirs = TokenBytes.of(bytes_like), TokenBytes.of(pieces_like)
    sizes = {"target_size": 13, "draft_size": 270}
    shared = SharedVocabulary.of(ours, theirs, draft_tokenizer=pieces_like, **sizes)
    pairs = dict(zip(shared.target_ids, shared.draft_ids, strict=True))
    spoken = {ours.bytes_V[i]: theirs.bytes_V[j] for i, j in pairs.items()}
    assert all(mine == other for mine, other in spoken.items() if mine not in (b"<s>", b"</s>"))
    # All but `ab` and the whole character; its two halves are bytes of the other side too.
    assert spoken.keys() == {b"<s>", b"</s>", b" ", b"a", b"b", b"c", b" a", b"\xc3", b"\xa9"}
    assert len(shared.stand_ins) == 13
    assert all(shared.stand_ins[i] == j for i, j in pairs.items())
    whole = ours.bytes_V.index("\u00e9".encode())
    assert theirs.bytes_V[shared.stand_ins[whole]] == b"\xa9", "the last piece of its spelling"


def test_incomplete_characters() -> None:
    text = "a\u00e9\u4e16\U0001f600".encode()
    for end in range(len(text) + 1):
        found = complete(text[:end])
        found.decode("utf-8")
        assert len(found) > end - 4
    assert complete(b"\xff\xfe") in (b"\xff\xfe", b"\xff", b""), "junk does not raise"


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_growing_text_is_the_text(kind: str, bytes_like: Tokenizer, pieces_like: Tokenizer) -> None:
    """Whatever arrives in whatever portions: the tokens spell it, and kept tokens are kept."""
    tokenizer = bytes_like if kind == "bytes" else pieces_like
    table = TokenBytes.of(tokenizer)
    draw = random.Random(1)
    for _ in range(20):
        text = ByteText(ByteEncoder(tokenizer, table))
        whole = "".join(draw.choices("ab c\u00e9", k=60)).encode()
        at = 0
        while at < len(whole):
            before, step = list(text.ids), draw.randint(1, 4)
            kept = text.extend(whole[at : at + step])
            at += step
            assert text.ids[:kept] == before[:kept]
            found = table.join(text.ids)
            assert found.removeprefix(b" " if whole[:1] != b" " else b"") == complete(whole[:at])
            assert text.is_whole == (complete(whole[:at]) == whole[:at])


def test_text_after_a_context(bytes_like: Tokenizer) -> None:
    table = TokenBytes.of(bytes_like)
    encoder = ByteEncoder(bytes_like, table)
    assert table.join(encoder.encode_after(b"c a", b" ab")) == b" ab"
    inside = encoder.encode_after(b"c a", b"b")
    assert [table.bytes_V[i] for i in inside] == [b"b"], "the border is inside `ab`: cut alone"
    assert encoder.encode_after(b"c", b"z") == [], "a letter it does not have"


def config(**keys: object) -> DrafterConfig:
    given = {"model": "x", "num_speculative_tokens": 2, **keys}
    return SpeculativeConfig.from_dict(given).drafters[0]


def test_ways(bytes_like: Tokenizer, pieces_like: Tokenizer, tmp_path: Path) -> None:
    ours, theirs = Vocabulary(13, bytes_like), Vocabulary(270, pieces_like)
    assert translation(config(), ours, Vocabulary(13, bytes_like)) == Translation()
    padded = translation(config(), ours, Vocabulary(16, bytes_like))
    assert padded.shared is not None and padded.shared.size == 13
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab.*use_string_matching"):
        translation(config(), ours, theirs)
    shared = translation(config(use_heterogeneous_vocab=True), ours, theirs)
    assert shared.shared is not None
    strings = translation(config(use_string_matching=True), ours, theirs)
    assert strings.encoders is not None
    with pytest.raises(ConfigError, match="no tokenizer"):
        translation(config(use_string_matching=True), ours, Vocabulary(270, None))
    with pytest.raises(ConfigError, match="13 tokens"):
        translation(config(), Vocabulary(13, None), Vocabulary(270, None))


def test_a_tokenizer_that_changes_text_is_refused(tmp_path: Path) -> None:
    capitals = byte_level(tmp_path / "capitals", ["A", "B", "C"], [])
    lower = pieces(tmp_path / "lower", lower=True)
    with pytest.raises(ConfigError, match="draft's tokenizer changes text"):
        translation(
            config(use_string_matching=True), Vocabulary(5, capitals), Vocabulary(270, lower)
        )


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="one of"):
        config(use_heterogeneous_vocab=True, use_string_matching=True)
    with pytest.raises(ConfigError, match="ngram has no tokenizer"):
        SpeculativeConfig.from_dict({"method": "ngram", "use_string_matching": True})
    with pytest.raises(ConfigError, match="True or False"):
        config(use_heterogeneous_vocab="yes")
