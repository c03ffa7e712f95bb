"""What is too large is refused before anything costly is done with it; the rest is unchanged."""

import json
from typing import Any

import httpx
import pytest

from foretoken.server.schemas import MOST_STOPS, MOST_WORDS
from foretoken.text.tokenizer import Tokenizer
from tests.e2e.serving import Serving, post

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MANY = 1_000_000


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    lengths: list[int] = []
    encode, encode_many = Tokenizer.encode, Tokenizer.encode_many

    def one(self: Tokenizer, text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **options)

    def many(self: Tokenizer, texts: Any) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return encode_many(self, texts)

    monkeypatch.setattr(Tokenizer, "encode", one)
    monkeypatch.setattr(Tokenizer, "encode_many", many)
    return lengths


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (TEXT, {"prompt": "a" * MANY}, "prompt"),
        (TEXT, {"prompt": ["a", "b" * MANY]}, "prompt"),
        (TEXT, {"prompt": "a", "prediction": {"type": "content", "content": "a" * MANY}},
         "prediction"),
        (TEXT, {"prompt": "a", "bad_words": ["a" * MANY]}, "bad_words"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * MANY}]}, "messages"),
        ("/tokenize", {"prompt": "a" * MANY}, "prompt"),
    ],
)  # fmt: skip
def test_texts_that_cannot_fit_are_refused_unread(
    server: Serving, encoded: list[int], path: str, body: Any, named: str
) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == named
    assert "characters" in answer.json()["error"]["message"]
    assert max(encoded, default=0) < MANY


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (TEXT, {"bad_words": ["a"] * (MOST_WORDS + 1)}, "bad_words"),
        (TEXT, {"stop": ["a"] * (MOST_STOPS + 1)}, "stop"),
        (TEXT, {"prompt": [1] * 300_000}, "values"),
        (TEXT, {"prompt": [[1]] * 20_000}, "lists"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 20_000}, "objects"),
        (TEXT, {"logit_bias": {str(i): 1 for i in range(30_000)}}, "members"),
    ],
)
def test_many_values_are_refused(
    server: Serving, encoded: list[int], path: str, fields: Any, named: str
) -> None:
    answer = post(server, path, {"prompt": "a", **fields} if path == TEXT else fields)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert not encoded


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": [1] * 100_000 + ["a"]}),
        (TEXT, {"prompt": [["a"] * 100_000]}),
        (CHAT, {"messages": [1] * 100_000}),
        (TEXT, {"prompt": "a", "stop_token_ids": ["a"] * 100_000}),
        ("/detokenize", {"tokens": ["a"] * 100_000}),
    ],
)
def test_a_list_of_mistakes_is_one_mistake(server: Serving, path: str, body: Any) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400
    assert "more)" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("prompt", [None, 1, True, {}, [], [None], [1, True], [[]], [[1], "a"]])
def test_prompts_of_no_form_are_named(server: Serving, prompt: Any) -> None:
    answer = post(server, TEXT, {"prompt": prompt})
    assert answer.status_code == 400
    assert "prompt" in answer.json()["error"]["message"]


def test_long_texts_are_the_same_ids_as_ever(server: Serving) -> None:
    text = "def f(x):\n    return x  # é ü 漢字 🎉\n" * 700
    tokenizer = server.state.tokenizer
    assert tokenizer is not None
    expected = tokenizer._tokenizer.encode(text).ids
    answer = post(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == expected and answer["count"] == len(expected) > 5000
    assert "".join(answer["token_strs"]).count("return") == 700
    back = post(server, "/detokenize", {"tokens": expected[1:]}).json()
    assert back["prompt"] == text


def test_text_may_be_full_of_what_json_is_made_of(server: Serving) -> None:
    """Only values outside of strings count."""
    text = json.dumps({"a": [[], {}, '\\"']}) * 20_000
    answer = post(server, "/tokenize", {"prompt": text[:200_000]})
    assert answer.status_code == 200, answer.text[:300]
    assert httpx.get(server.url + "/health").status_code == 200
