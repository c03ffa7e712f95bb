"""Text of the command line becomes settings, or an error that names the option."""

from pathlib import Path

import pytest

from foretoken.cli.options import parse_invariant, parse_speculation, read_prompts
from foretoken.errors import ConfigError


@pytest.mark.parametrize(("word", "meaning"), [("none", None), (" Auto", {"method": "auto"})])
def test_words_instead_of_json(word: str, meaning: dict[str, str] | None) -> None:
    assert parse_speculation(word) == meaning


def test_json_is_taken_as_it_is() -> None:
    assert parse_speculation('{"method": "ngram"}') == {"method": "ngram"}


@pytest.mark.parametrize("text", ["{", "ngram", "[1]", "3", '"x"'])
def test_other_text_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config"):
        parse_speculation(text)


def test_invariance_has_three_values() -> None:
    assert [parse_invariant(text) for text in ("auto", "on", "off")] == ["auto", True, False]
    with pytest.raises(ConfigError, match="auto, on, off"):
        parse_invariant("yes")


def test_prompts_one_per_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\n  second\n")
    assert read_prompts(file) == ("first", "  second")


def test_prompts_as_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb", "id": 1}\n{"prompt": "c"}\n')
    assert read_prompts(file) == ("a\nb", "c")


def test_json_lines_are_recognised_without_their_suffix(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('{"prompt": "a"}\n')
    assert read_prompts(file) == ("a",)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "at least one prompt"),
        ("a.jsonl", '{"prompt": "a"}\nnot json\n', "line 2"),
        ("a.jsonl", '{"text": "a"}\n', "line 1"),
        ("a.jsonl", '{"prompt": ""}\n', "line 1"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prompts(file)


def test_missing_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts"):
        read_prompts(tmp_path / "nowhere.txt")
