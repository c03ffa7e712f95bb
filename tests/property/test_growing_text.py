"""Text of any ids, one by one: never an error, nothing taken back, and the text of all at once."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from foretoken.text.tokenizer import TextOptions, Tokenizer

WORDS = ["a", "b", "\u2581a", "\u2581", "\u00e9", "\ufffd", "\u2581the", "."]
SPECIAL = ["<s>", "</s>"]


def byte(value: int) -> int:
    return len(SPECIAL) + 1 + value


A = byte(255) + 1
"""Id of the first of WORDS."""
NEWLINE, E2, STRAY = byte(0x0A), byte(0xE2), byte(0x80)
FACE = [byte(value) for value in "\U0001f600".encode()]
EURO = [byte(value) for value in "\u20ac".encode()]
SIZE = A + len(WORDS) + 3
"""Ids up to here, the last three of no token at all."""


def of(folder: Path, decoder: decoders.Decoder | None, *, byte_fallback: bool = True) -> Tokenizer:
    names = ["<unk>", *SPECIAL, *(f"<0x{value:02X}>" for value in range(256)), *WORDS]
    vocabulary = {name: i for i, name in enumerate(names)}
    raw = RawTokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=byte_fallback, unk_token="<unk>")
    )
    raw.decoder = decoder
    raw.add_special_tokens(SPECIAL)
    folder.mkdir()
    raw.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module", params=["llama", "gemma", "metaspace", "word pieces", "plain"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """Decoders as published models have them."""
    fallback, fuse = decoders.ByteFallback(), decoders.Fuse()
    space = decoders.Replace("\u2581", " ")
    made: dict[str, decoders.Decoder | None] = {
        "llama": decoders.Sequence([space, fallback, fuse, decoders.Strip(" ", 1, 0)]),
        "gemma": decoders.Sequence([space, fallback, fuse]),
        "metaspace": decoders.Sequence([fallback, decoders.Metaspace()]),
        "word pieces": decoders.WordPiece(),
        "plain": None,
    }
    return of(tmp_path_factory.mktemp("decoders") / "one", made[request.param])


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    """What had been given out after each id, and at the end."""
    stream = tokenizer.stream(TextOptions(skip_special_tokens=skip))
    given_out = []
    for token in ids:
        assert stream.feed([token]) is None
        given_out.append(stream.text[: stream.stable_length()])
    stream.finish()
    return [*given_out, stream.text]


# Bytes, parts of characters and words in any order; whole characters more often than chance.
pieces = st.one_of(
    st.integers(0, SIZE).map(lambda i: [i]),
    st.sampled_from([[NEWLINE], [E2], [STRAY], FACE, EURO, EURO[:2], FACE[:3], [A], [A + 2]]),
    st.text(max_size=3).map(lambda text: [byte(value) for value in text.encode()]),
)
any_ids = st.lists(pieces, max_size=24).map(lambda some: [i for one in some for i in one])


@settings(max_examples=100)
@given(any_ids, st.booleans())
@example([NEWLINE, E2, A], True)
@example([*FACE, STRAY, A], True)
@example([*FACE, STRAY, A + 2, NEWLINE, *EURO, E2], True)
def test_nothing_raises_and_nothing_is_taken_back(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    given_out = streamed(tokenizer, ids, skip=skip)
    for before, after in zip(given_out, given_out[1:], strict=False):
        assert after.startswith(before)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    kept = [whole.startswith(text) for text in given_out[:-1]]
    if all(kept):  # else the tokenizer itself took back what it had said
        assert given_out[-1] == whole
    else:
        first = kept.index(False)
        so_far = tokenizer.decode(ids[: first + 1], skip_special_tokens=skip)
        assert so_far.startswith(given_out[first])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As Llama 2 has it."""
    space, fuse = decoders.Replace("\u2581", " "), decoders.Fuse()
    decoder = decoders.Sequence([space, decoders.ByteFallback(), fuse, decoders.Strip(" ", 1, 0)])
    return of(tmp_path_factory.mktemp("decoders") / "llama", decoder)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([NEWLINE, E2, A], "\n\ufffda"),
        ([*FACE, STRAY, A + 2], "\U0001f600\ufffd a"),
        ([*FACE, *EURO, A], "\U0001f600\u20aca"),
        ([STRAY, NEWLINE, A], "\ufffd\ufffda"),
        ([NEWLINE, E2], "\n\ufffd"),
        ([A, *EURO[:2], byte(0x41), A], "a\ufffd\ufffd\ufffda"),
    ],
)
def test_bytes_that_are_no_character_are_replaced(
    llama: Tokenizer, ids: list[int], text: str
) -> None:
    """What was given out before them stays; they become replacement characters."""
    assert streamed(llama, ids)[-1] == text


def test_characters_of_several_bytes_come_at_once(llama: Tokenizer) -> None:
    """A run of byte tokens is not held back until it ends."""
    ids = [NEWLINE, *FACE, *EURO]
    assert streamed(llama, ids)[-2] == "\n\U0001f600\u20ac"
    assert streamed(llama, ids)[0] == "\n"


def test_a_newline_of_one_byte_is_found_as_stop_string_at_once(llama: Tokenizer) -> None:
    stream = llama.stream(TextOptions(stop=("\n",)))
    match = stream.feed([A, NEWLINE, E2, A])
    assert match is not None
    assert match.num_keep == 2
    assert stream.text == "a"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "repeated",
    [[STRAY], [E2], [E2, byte(0x41)], EURO[:2], [1], [A + 5], [1, STRAY], [SIZE]],
    ids=["stray", "begun", "broken", "half", "special", "replacement", "both", "unknown"],
)
def test_a_long_run_without_text_is_not_decoded_again_and_again(
    llama: Tokenizer, repeated: list[int], skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long, and then text goes on as it should."""
    lengths = []
    decode = llama.decode
    ids = [A, *(repeated * 400), *EURO, A + 6, *FACE, A]
    stream = llama.stream(TextOptions(skip_special_tokens=skip))
    growing = stream._growing._decode

    def counted(some: list[int]) -> str:
        lengths.append(len(some))
        return growing(some)

    monkeypatch.setattr(stream._growing, "_decode", counted)
    stream.feed(ids)
    assert stream.text == decode(ids, skip_special_tokens=skip)
    assert max(lengths) < 140, max(lengths)
