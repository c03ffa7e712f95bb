"""The corpus keeps held-out text out of training, and prompts inside it."""

import random
from pathlib import Path

import pytest

from foretoken.errors import ConfigError
from tools.python_text.heldout import (
    EDITS,
    edit_document,
    edit_prompts,
    edit_text,
    excerpt,
    heldout_prompts,
)
from tools.python_text.stdlib import (
    HELD_OUT,
    MOST_SHARED_LINES,
    Corpus,
    distinctive_lines,
    load_corpus,
)

HELD = "".join(
    f"def held_out_function_{i}(argument):\n    return argument + {i}\n" for i in range(9)
)
FREE = "".join(f"class Something{i}(BaseOfEverything):\n    attribute = None\n" for i in range(9))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "textwrap.py").write_text(HELD)
    (tmp_path / "free.py").write_text(FREE)
    (tmp_path / "twin.py").write_text(FREE)
    (tmp_path / "copied.py").write_text(FREE.replace("Something", "Else") + HELD[:200])
    (tmp_path / "table.py").write_text("TABLE = [" + "0x1234, " * 200 + "]\n")
    for folder in ("encodings", "site-packages", "test"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "inner.py").write_text(f"class Inner_{folder}:\n    pass\n")
    (tmp_path / "test" / "test_textwrap.py").write_text("class TestOfHeldOut:\n    pass\n")
    return tmp_path


def test_selection(library: Path) -> None:
    corpus = load_corpus(library)
    assert [file.path for file in corpus.held_out] == ["textwrap.py"]
    assert {file.path: file.is_test for file in corpus.training} == {
        "free.py": False,
        "test/inner.py": True,
    }


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="corpus"):
        load_corpus(tmp_path)


@pytest.fixture(scope="module")
def installed() -> Corpus:
    return load_corpus()


@pytest.mark.slow
def test_no_held_out_text_is_trained_on(installed: Corpus) -> None:
    held = {file.path for file in installed.held_out}
    assert held <= set(HELD_OUT) and len(held) >= 35
    assert not held & {file.path for file in installed.training}
    assert not {file.digest for file in installed.held_out} & {
        file.digest for file in installed.training
    }
    everything = [distinctive_lines(file.text) for file in installed.training]
    for file in installed.held_out:
        lines = distinctive_lines(file.text)
        worst = max(len(lines & other) for other in everything)
        assert worst <= MOST_SHARED_LINES * len(lines), (file.path, worst, len(lines))


@pytest.mark.slow
def test_prompts_are_held_out_and_repeatable(installed: Corpus) -> None:
    prompts = heldout_prompts(12, tokens=64, rest=32)
    assert prompts == heldout_prompts(12, tokens=64, rest=32)
    assert prompts != heldout_prompts(12, tokens=64, rest=32, seed=1)
    texts = {file.path: file.text for file in installed.held_out}
    for prompt in prompts:
        assert prompt.text + prompt.reference in texts[prompt.name.split(":")[0]]
        assert prompt.text.endswith(":") or '"""' in prompt.text.split("\n")[-1]
        assert prompt.reference.startswith("\n")


def test_edit_prompts_hold_what_they_ask_to_copy() -> None:
    for prompt in edit_prompts(12, tokens=120):
        original, _, started = prompt.text.removeprefix("# original\n").partition("# edited: ")
        edited = started.partition("\n")[2] + prompt.reference
        shared = set(original.splitlines()) & set(edited.splitlines())
        assert len(shared) >= 0.3 * len(set(original.splitlines())), prompt.name


def test_every_edit_changes_and_says_so() -> None:
    source = "# note\ndef area(width, height):\n    return width * height * 7 or 'none'\n"
    for make in dict.fromkeys(EDITS):
        edit = make(source, random.Random(3))
        assert edit is not None
        assert (edit.text == source) == (edit.request == "no change"), edit


def test_edit_document_is_repeatable() -> None:
    first = edit_document(HELD, random.Random(5))
    assert first == edit_document(HELD, random.Random(5))
    assert first.text.startswith("# original\n" + HELD)
    assert edit_text("", random.Random(0)).request == "no change"


def test_excerpt_is_whole_lines() -> None:
    piece = excerpt(HELD, 150, random.Random(1))
    assert piece in HELD and piece.endswith("\n") and len(piece) <= 150
