"""Tokenizers of GGUF files whose parts do not fit together. The guarded bugs: a traceback, a guess,
or ids of another vocabulary where a message belongs."""

from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import ForetokenError, PromptError
from foretoken.text import gguf_tokenizer
from foretoken.text.tokenizer import Tokenizer
from tests.unit.gguf_tokens import CONTROL, NORMAL, UNUSED, write_gguf

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


def test_more_merges_than_any_vocabulary_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.text.score_merges._MOST_MERGES", 30)
    tokens = ["<unk>", "<s>", "</s>", *("a" * count for count in range(1, 20))]
    fields = {"model": "llama", "tokens": tokens, "token_type": [2, 3, 3] + [1] * 19}
    with pytest.raises(ForetokenError, match=r"tokens: got .*171 .*; allowed: "):
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
