"""Pieces by source are exactly the streamed text, whatever is held back."""

from rich.style import Style

from foretoken.cli.writing.paint import BLOCK, MEANINGS, STYLES, Painter, legend
from foretoken.types import Output, TokenSource


class LetterStream:
    """Writes token 65 as `A`; token 0 shows only with the token after it."""

    def __init__(self) -> None:
        self.text = ""
        self.held = ""

    def feed(self, ids: list[int]) -> None:
        for token in ids:
            if token == 0:
                self.held += "?"
            else:
                self.text += self.held + chr(token)
                self.held = ""


class LetterTokenizer:
    def stream(self, options: object) -> LetterStream:
        return LetterStream()


def output(ids: str, sources: str, text: str, drafter: str = "one") -> Output:
    """An output; sources by first letter, `.` for a token that shows no text yet."""
    by_letter = {source.value[0]: source for source in TokenSource}
    return Output(
        request_id="0",
        new_token_ids=tuple(0 if c == "." else ord(c) for c in ids),
        sources=tuple(by_letter[c] for c in sources),
        drafters=tuple(drafter if c == "a" else None for c in sources),
        text=text,
    )


def paint(*outputs: Output) -> list[list[tuple[str, str]]]:
    painter = Painter(LetterTokenizer())  # type: ignore[arg-type]
    return [[(piece, s[0]) for piece, s in painter.paint(one)] for one in outputs]


def test_each_token_keeps_its_source() -> None:
    [pieces] = paint(output("abc", "aar", "abc"))
    assert pieces == [("a", "a"), ("b", "a"), ("c", "r")]


def test_text_held_back_comes_later_with_its_own_source() -> None:
    first, second = paint(output("ab", "ab", "a"), output("c", "t", "bc"))
    assert first == [("a", "a")]
    assert second == [("b", "b"), ("c", "t")]


def test_an_incomplete_character_goes_with_the_token_that_completes_it() -> None:
    first, second = paint(output(".", "a", ""), output("x", "r", "?x"))
    assert first == []
    assert second == [("?x", "r")]


def test_text_that_no_token_explains_is_not_lost() -> None:
    [pieces] = paint(output("a", "a", "a!!"))
    assert "".join(piece for piece, _ in pieces) == "a!!"


def test_a_cut_stop_string_is_not_shown() -> None:
    [pieces] = paint(output("abc", "aar", "ab"))
    assert "".join(piece for piece, _ in pieces) == "ab"


def test_accepted_drafts_of_blocks_are_marked_apart() -> None:
    painter = Painter(LetterTokenizer(), frozenset({"wide"}))  # type: ignore[arg-type]
    wide = list(painter.paint(output("abc", "aab", "abc", "wide")))
    assert wide == [("a", BLOCK), ("b", BLOCK), ("c", TokenSource.BONUS)]
    [other] = painter.paint(output("d", "a", "d"))
    assert other == ("d", TokenSource.ACCEPTED)


def test_every_source_has_a_style_of_its_own_and_a_meaning() -> None:
    assert set(STYLES) == set(MEANINGS) == {*TokenSource, BLOCK}
    assert len({*STYLES.values()}) == len(STYLES)
    assert all(meaning in legend().plain for meaning in MEANINGS.values())


def test_blocks_are_told_apart_without_colour() -> None:
    underlined = {source for source, style in STYLES.items() if Style.parse(style).underline}
    assert underlined == {BLOCK}
