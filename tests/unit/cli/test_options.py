"""Words of the command line: help, settings from text, which is the model, tables."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.cli.generate import _words
from foretoken.cli.options import parse_invariant, parse_speculation, read_prompts
from foretoken.cli.serve_options import DEFAULTS, GROUPS, option
from foretoken.cli.train import worth_table
from foretoken.errors import ConfigError
from foretoken.training.evaluation import Accepted, DecodingStep, Worth


@pytest.mark.parametrize(
    ("word", "meaning"),
    [("none", None), (" Auto", {"method": "auto"}), ('{"method": "ngram"}', {"method": "ngram"})],
)
def test_words_and_json(word: str, meaning: dict[str, str] | None) -> None:
    assert parse_speculation(word) == meaning


@pytest.mark.parametrize("text", ["{", "ngram", "[1]", "3", '"x"'])
def test_other_text_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config"):
        parse_speculation(text)


def test_invariance_has_three_values() -> None:
    assert [parse_invariant(text) for text in ("auto", "on", "off")] == ["auto", True, False]
    with pytest.raises(ConfigError, match="auto, on, off"):
        parse_invariant("yes")


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "first\n\n  second\n", ("first", "  second")),
        ("a.jsonl", '{"prompt": "a\\nb", "id": 1}\n{"prompt": "c"}\n', ("a\nb", "c")),
        ("json-lines.txt", '{"prompt": "a"}\n', ("a",)),
    ],
)
def test_prompts(tmp_path: Path, name: str, text: str, prompts: tuple[str, ...]) -> None:
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == prompts


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "at least one prompt"),
        ("a.jsonl", '{"prompt": "a"}\nnot json\n', "line 2"),
        ("a.jsonl", '{"text": "a"}\n', "line 1"),
        ("a.jsonl", '{"prompt": ""}\n', "line 1"),
        ("nowhere.txt", None, "--prompts"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prompts(file)


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from paths(child, (*path, name))


def find(path: tuple[str, ...]) -> Any:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return command


def helped(path: tuple[str, ...]) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("path", list(paths(typer.main.get_command(app))), ids=" ".join)
def test_names_are_whole_at_80_columns(path: tuple[str, ...]) -> None:
    text = helped(path)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    assert not re.search(r"[\w,]\.\.\.$", text, re.MULTILINE)
    words = text.replace(",", " ").split()
    for parameter in find(path).params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            for name in (*parameter.opts, *parameter.secondary_opts):
                assert name in words, name


def test_options_of_serving_are_grouped_and_say_their_defaults() -> None:
    text = helped(("serve",))
    assert [line[:-1] for line in text.splitlines() if line.rstrip(":") in GROUPS] == list(GROUPS)
    flat = " ".join(text.split())
    for said in ("8000", "127.0.0.1", "64", "2048", "600", "30", "on", "hermes", "0.9"):
        assert f"[default: {said}]" in flat, said
    assert "(none)" not in flat


def test_every_row_of_the_table_is_an_option_of_serving() -> None:
    names = {parameter.name for parameter in find(("serve",)).params}
    rows = {name for group in GROUPS.values() for name in group}
    assert rows == names - {"model", "help"}
    assert option("max_queue").show_default == str(DEFAULTS["max_queue"])


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
    with pytest.raises(ConfigError, match="nothing beside --model demo"):
        _words(word, "a text", "demo")


@pytest.mark.parametrize(
    "word",
    [
        None,
        "demo",
        "",
        "empty",
        "what is m.gguf",
        "def f():\n",
        "x" * 5000,
        "a\0b",
        "org/repo:Q4_K_M",
    ],
)
def test_one_word_that_is_a_prompt(here: Path, word: str | None) -> None:
    assert _words(word, None, None) == (None, word)


def test_every_number_is_in_its_place() -> None:
    lengths = {"0": (1.6, 2.0), "0.8": (1.5, 1.7)}
    kept = {
        name: Accepted(by_position=(0.6, 0.44), lengths=found, num_verifications=9)
        for name, found in lengths.items()
    }
    costs = tuple(
        DecodingStep(drafts=k, total_s=s, drafting_s=0.0, verifying_s=s)
        for k, s in enumerate((0.002, 0.0025, 0.004))
    )
    speedups: dict[str, tuple[float, ...]] = {"0": (1.28, 1.0), "0.8": (1.2, 0.85)}
    found = Worth(acceptance=kept, costs=costs, speedups=speedups)
    file = io.StringIO()
    Console(file=file, width=100).print(worth_table(found, "head for target"))
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines() if line.strip()]
    assert lines[0] == "head for target"
    assert "speed-up: what tokens a step and the times of steps come to" in " ".join(lines)
    assert "over steps of 2.0 ms without drafts" in " ".join(lines)
    assert "temp. drafts 1 2" in lines
    assert "0 accepted 60% 44%" in lines and "0.8 accepted 60% 44%" in lines
    assert "tokens a step 1.60 2.00" in lines and "tokens a step 1.50 1.70" in lines
    assert "speed-up 1.28 1.00" in lines
    assert lines[-1] == "any step, ms 2.5 4.0"


def test_a_drafter_that_never_drafts_has_a_table_too() -> None:
    kept = {"0": Accepted(by_position=(), lengths=(1.0,), num_verifications=0)}
    cost = DecodingStep(drafts=0, total_s=0.002, drafting_s=0.0, verifying_s=0.002)
    found = Worth(acceptance=kept, costs=(cost,), speedups={"0": ()})
    Console(file=io.StringIO()).print(worth_table(found, "none"))
