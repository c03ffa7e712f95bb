"""Tokenizers of published GGUF files, in the folder that FORETOKEN_REAL names, against llama.cpp
and transformers. The guarded bugs: what only a whole vocabulary shows.

`published_ids.json` has, for each file, the beginning of the SHA-256 of the ids that llama.cpp
(build 11549) finds for each of the hard texts.
"""

import hashlib
import json
import os
import re
import unicodedata
from pathlib import Path

import pytest

from foretoken.shape.gguf import open_gguf
from foretoken.text.pre_tokenizers import WORD_RULES
from foretoken.text.tokenizer import Tokenizer
from tests.unit.gguf_tokens import TEXTS

PUBLISHED: dict[str, str] = json.loads(
    (Path(__file__).parent / "published_ids.json").read_text("utf-8")
)
FOLDER = os.environ.get("FORETOKEN_REAL")
WRONG_IN_TRANSFORMERS = ("smollm",)
"""Pre-tokenizers that it takes for GPT-2's."""


@pytest.fixture(params=PUBLISHED)
def path(request: pytest.FixtureRequest) -> Path:
    if FOLDER is None:
        pytest.skip("FORETOKEN_REAL names no folder with published GGUF files")
    found = Path(FOLDER) / f"{request.param}.gguf"
    if not found.is_file():
        pytest.skip(f"{found.name} is not in FORETOKEN_REAL")
    return found


def is_normal(text: str, pre: str | None) -> bool:
    """Whether nothing is left to normalize, which the two others leave out."""
    rule = WORD_RULES.get(pre or "")
    return rule is None or not rule.nfc or unicodedata.is_normalized("NFC", text)


def test_ids_are_those_of_llama_cpp(path: Path) -> None:
    found, pre = Tokenizer(path), open_gguf(path).get("tokenizer.ggml.pre", str)
    for text, expected in zip(TEXTS, PUBLISHED[path.stem].split(), strict=True):
        if not is_normal(text, pre) or ("</s>" in text and pre == "qwen2"):
            continue  # Qwen has a word `</s>`, which llama.cpp takes for a control token
        ids = found.encode(text)
        assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:6] == expected, text


@pytest.mark.slow
def test_texts_come_back(path: Path) -> None:
    """All whose bytes the vocabulary has: SmolLM2's lacks some control characters."""
    found, pre = Tokenizer(path), open_gguf(path).get("tokenizer.ggml.pre", str)
    known = {found.token_bytes(token) for token in found.vocabulary().values()}
    for text in TEXTS:
        has_all = all(bytes([byte]) in known for byte in text.encode())
        if has_all and is_normal(text, pre) and "\u2581" not in text:
            ids = found.encode(text, add_special_tokens=False)
            assert found.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_ids_are_those_of_transformers(path: Path) -> None:
    from transformers import AutoTokenizer

    pre = open_gguf(path).get("tokenizer.ggml.pre", str)
    if pre in WRONG_IN_TRANSFORMERS:
        pytest.skip(f"transformers does not know {pre}")
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found = Tokenizer(path)
    for text in TEXTS:
        if is_normal(text, pre) and not re.search("\u2581|( ){32,}", text):
            # Longer runs of spaces it merges, where SentencePiece takes the longest token first.
            assert found.encode(text) == expected(text)["input_ids"], text
