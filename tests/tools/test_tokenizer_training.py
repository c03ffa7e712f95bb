"""The trained tokenizer gives every text back, here and through transformers."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tools.demo_models.tokenizer import save_tokenizer, train_tokenizer

TEXTS = ["def add(left, right):\n    return left + right\n", "class Point:\n    x = 0\n"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 290)


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("x").ids[0] == tokenizer.token_to_id("<s>") == 0
    assert tokenizer.token_to_id("</s>") == 1


def test_transformers_reads_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
    assert loaded(TEXTS[0])["input_ids"] == tokenizer.encode(TEXTS[0]).ids
    chat = loaded.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<s># user\nhello\n# assistant\n"
