"""Which tokens of a GGUF file end a text. The guarded bug: a Qwen that runs past the end of a
document, since the file names only the end of an answer."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import CheckpointError
from foretoken.shape.gguf import gguf_config, open_gguf
from foretoken.shape.gguf_ends import ends_of_text
from foretoken.shape.gguf_file import Strings
from tests.unit.gguf_tokens import CONTROL, NORMAL, UNUSED, USER_DEFINED, write_gguf


def ends(folder: Path, tokens: dict[str, int], **fields: Any) -> dict[int, str]:
    given = {"tokens": list(tokens), "token_type": list(tokens.values()), **fields}
    return ends_of_text(open_gguf(write_gguf(folder / "model.gguf", given)))


def test_ids_and_names(tmp_path: Path) -> None:
    tokens = {
        "a": NORMAL, "<|im_end|>": CONTROL, "<|endoftext|>": CONTROL, "<|eom_id|>": USER_DEFINED,
        "</s>": NORMAL, "<|eot_id|>": NORMAL, "<EOT>": UNUSED, "<|end|>x": CONTROL, "b": NORMAL,
    }  # fmt: skip
    found = ends(tmp_path, tokens, eos_token_id=1, eot_token_id=8)
    assert found == {1: "<|im_end|>", 2: "<|endoftext|>", 3: "<|eom_id|>", 8: "b"}
    assert gguf_config(write_gguf(tmp_path / "none.gguf", {}, rows=3))["eos_token_id"] == []
    ids = write_gguf(tmp_path / "ids.gguf", {"eos_token_id": 2, "eom_token_id": 1}, rows=3)
    assert gguf_config(ids)["eos_token_id"] == [1, 2]


def test_a_struck_out_text_has_its_own_end(tmp_path: Path) -> None:
    assert ends(tmp_path, {"a": NORMAL, "</s>": USER_DEFINED}) == {}
    assert ends(tmp_path, {"a": NORMAL, "</s>": CONTROL}) == {1: "</s>"}


def test_parts_of_an_answer(tmp_path: Path) -> None:
    tokens = {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}
    assert ends(tmp_path, tokens, eos_token_id=1) == {1: "<|return|>"}
    assert ends(tmp_path, {"<|end|>": CONTROL, "<|call|>": CONTROL}) == {0: "<|end|>"}


def test_a_file_without_types(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"tokens": ["<|im_end|>", "x"], "eos_token_id": 1})
    assert ends_of_text(open_gguf(path)) == {1: "x"}


@pytest.mark.parametrize("field", ["eos", "eot", "eom"])
def test_ids_out_of_range(tmp_path: Path, field: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{field}_token_id: got 2; allowed: 0 to 1"):
        ends(tmp_path, {"a": NORMAL, "b": NORMAL}, **{f"{field}_token_id": 2})


def test_finding_in_a_list(tmp_path: Path) -> None:
    """Bytes that look like an entry, but begin within another, are none."""
    entry = "\x01\0\0\0\0\0\0\0b"
    path = write_gguf(tmp_path / "m.gguf", {"tokens": [f"x{entry}", "b", "", "c\0d", "b"]})
    tokens = open_gguf(path).get("tokenizer.ggml.tokens", Strings)
    assert tokens.find(["b", "", "d", "c\0d"]) == {"b": 1, "": 2, "c\0d": 3}
    assert tokens.texts() == list(tokens) == [f"x{entry}", "b", "", "c\0d", "b"]
    assert [tokens.at(i) for i in range(5)] == tokens.texts()


def test_info_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tokens = {"a": NORMAL, "<|im_end|>": CONTROL, "<|endoftext|>": CONTROL}
    fields = {"tokens": list(tokens), "token_type": list(tokens.values()), "eos_token_id": 1}
    fields |= {"model": "gpt2", "pre": "gpt-2"}
    path = write_gguf(tmp_path / "model.gguf", fields, rows=3)
    answer = CliRunner().invoke(app, ["info", str(path)])
    assert answer.exit_code == 0, answer.output
    assert "<|im_end|> (1), <|endoftext|> (2)" in answer.output
