"""Which word of `foretoken generate` is the model and which the prompt."""

from pathlib import Path

import pytest

from foretoken.cli.writing.generate import _words
from foretoken.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("m.gguf", "my model.gguf", "folder/config.json", "ggufs/a.gguf", "empty/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_a_model_before_a_prompt(here: Path) -> None:
    for model in ("m.gguf", "demo", "org/repo:Q4_K_M", "folder"):
        assert _words(model, "a text", None) == (model, "a text")


@pytest.mark.parametrize("word", ["m.gguf", "my model.gguf", "folder", "ggufs", "misspelt.gguf"])
def test_one_word_that_is_a_model(here: Path, word: str) -> None:
    assert _words(word, None, None) == (word, None)
    assert _words(word, None, "demo") == ("demo", word), "beside --model it is a prompt"


@pytest.mark.parametrize(
    "word",
    ["demo", "", "empty", "what is m.gguf", "def f():\n", "x" * 5000, "a\0b", "org/repo:Q4_K_M"],
)
def test_one_word_that_is_a_prompt(here: Path, word: str) -> None:
    assert _words(word, None, None) == (None, word)


def test_no_word_and_two_models(here: Path) -> None:
    assert _words(None, None, None) == (None, None)
    with pytest.raises(ConfigError, match="nothing beside --model demo"):
        _words("m.gguf", "a text", "demo")
