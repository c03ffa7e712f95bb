"""Bytes of tokens: those of a text, joined, are the text's, wherever characters are cut."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from foretoken.checkpoint import packaged_model
from foretoken.text.tokenizer import Tokenizer as OurTokenizer

TEXTS = [
    "def f(x):\n\treturn x  # plain",
    "na\u00efve caf\u00e9 \u2014 \u4f60\u597d \u0645\u0631\u062d\u0628\u0627",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea e\u0301",
    "\x00\x7f\x80\xad\xff\ufffd<0x41>\u2581",
    " a  <tool> b ",
]


def saved(tokenizer: Tokenizer, folder: Path) -> OurTokenizer:
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return OurTokenizer(folder)


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma write texts."""
    letters = [f"<0x{byte:02X}>" for byte in range(256)] + list("abdefnrtuxcv:()") + ["\u2581"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def byte_level() -> Tokenizer:
    letters = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["packaged", "byte level", "byte fallback"])
def test_they_are_those_of_the_text(kind: str, text: str, tmp_path: Path) -> None:
    if kind == "packaged":
        tokenizer = OurTokenizer(packaged_model("demo"))
    else:
        tokenizer = saved(byte_level() if kind == "byte level" else byte_fallback(), tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = b"".join(map(tokenizer.token_bytes, ids))
    # A metaspace in the text is a space to who writes spaces so.
    expected = text.replace("\u2581", " ") if kind == "byte fallback" else text
    assert found == expected.encode()
    assert tokenizer.token_bytes(1 << 30) == b""


def test_another_decoder_gives_the_bytes_of_its_text(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"ab": 0, "c": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    tokenizer = saved(made, tmp_path)
    assert [tokenizer.token_bytes(i) for i in range(2)] == [b"ab", b"c"]
