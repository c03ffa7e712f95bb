"""Batches repeat exactly, hold the mix asked for, and shift targets by one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from foretoken.errors import ConfigError
from tools.demo_models.ahead import MadeAhead
from tools.demo_models.batches import (
    Batch,
    Mix,
    TokenStream,
    TrainingData,
    bytes_per_token,
    held_out_rows,
)
from tools.demo_models.packages import Package
from tools.demo_models.tokenizer import BEGIN_ID, save_tokenizer, train_tokenizer
from tools.python_text.stdlib import Corpus, SourceFile

TEXT = "".join(
    f"def function_{i}(left, right):\n    return left * {i} + right\n" for i in range(60)
)
CORPUS = Corpus(
    training=(
        SourceFile(path="a.py", text=TEXT, is_test=False),
        SourceFile(path="test/b.py", text="assert True\n" * 200, is_test=True),
    ),
    held_out=(SourceFile(path="c.py", text=TEXT[:1500], is_test=False),),
)
TOKENIZER = train_tokenizer([TEXT], 300)
GIVEN = CORPUS, TOKENIZER


def data(**shares: float) -> TrainingData:
    mix: dict[str, Any] = {"edit_share": 0.0, "repeat_share": 0.0, "test_share": 0.0, **shares}
    return TrainingData(CORPUS, TOKENIZER, Mix(**mix), 7)


def texts(made: TrainingData) -> list[str]:
    rows = made.batch(3, 512, 128).tokens.tolist()
    return [TOKENIZER.decode(row, skip_special_tokens=False) for row in rows]


def test_batches_repeat_and_shift() -> None:
    shares = {"edit_share": 0.4, "repeat_share": 0.3, "test_share": 0.5}
    first, again = data(**shares).batch(5, 256, 64), data(**shares).batch(5, 256, 64)
    assert torch.equal(first.tokens, again.tokens)
    assert first.tokens.shape == (4, 64)
    assert torch.equal(first.tokens[:, 1:], first.targets[:, :-1])
    assert not torch.equal(first.tokens, data(**shares).batch(6, 256, 64).tokens)


@pytest.mark.parametrize(
    ("share", "mark"), [("edit_share", "# edited: "), ("test_share", "assert True")]
)
def test_shares(share: str, mark: str) -> None:
    assert all(mark in text for text in texts(data(**{share: 1.0})))
    assert not any(mark in text for text in texts(data()))


def test_packages_have_their_share_of_text_and_of_edits() -> None:
    text = "".join(f"def packaged_{i}(value):\n    return packaged(value)\n" for i in range(60))
    file = SourceFile(path="inner.py", text=text, is_test=False)
    package = Package(name="outer", version="1", licence="MIT", files=(file,))
    shares: dict[str, Any] = {"test_share": 0.5, "package_share": 0.5}
    for edit_share, other in ((0.0, "assert True"), (1.0, "function_")):
        mix = Mix(edit_share=edit_share, **shares)
        made = [row for seed in (7, 8) for row in texts(TrainingData(*GIVEN, mix, seed, [package]))]
        assert any("packaged" in row for row in made) and any(other in row for row in made)
        assert all("packaged" in row or other in row for row in made), made
    with pytest.raises(ConfigError, match="package_share"):
        TrainingData(*GIVEN, mix, 7)


def test_noise_is_said_again() -> None:
    for row in data(repeat_share=1.0).batch(0, 512, 128).tokens.tolist():
        assert row[0] == BEGIN_ID
        size = next(n for n in range(6, 65) if row[1 : 1 + n // 2] == row[1 + n : 1 + n + n // 2])
        assert size >= 6


def test_noise_has_its_time() -> None:
    mix = Mix(edit_share=0.0, repeat_share=1.0, repeat_until=1024, test_share=0.0)
    early = TrainingData(CORPUS, TOKENIZER, mix, 7)
    assert torch.equal(
        early.batch(1, 512, 128).tokens, data(repeat_share=1.0).batch(1, 512, 128)[0]
    )
    assert torch.equal(early.batch(2, 512, 128).tokens, data().batch(2, 512, 128).tokens)


def test_a_stream_uses_every_row_once_an_epoch() -> None:
    stream = TokenStream(np.arange(1000, dtype=np.uint16), 0)
    starts = [int(stream.row(i, 10)[1]) for i in range(99)]
    assert len(set(starts)) == 99
    assert sorted(starts) != starts
    assert {int(stream.row(i, 10)[1]) for i in range(99, 198)} != set(starts)


def test_held_out_rows_and_bytes() -> None:
    batch = held_out_rows(CORPUS, TOKENIZER, 4, 32)
    assert batch.tokens.shape == (4, 32)
    per_token = bytes_per_token(TOKENIZER, batch)
    assert 1.0 <= per_token <= 12.0


class _Numbered:
    """Rows that say what was asked for."""

    tokenizer = SimpleNamespace()

    def batch(self, index: int, tokens: int, length: int) -> Batch:
        rows = torch.full((tokens // length, length), index)
        return Batch(rows, rows + 1)


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 1, 3])
def test_parts_come_in_their_order(loaders: int) -> None:
    """Over a change of the rows' length, and after a jump backwards and one ahead."""
    ahead = MadeAhead(cast(TrainingData, _Numbered()), loaders)
    asked = [(index, 8, 4) for index in (0, *range(9))]
    asked += [(index, 8, 2) for index in (9, 10, 11, 3, 4, 70)]
    for index, tokens, length in asked:
        found, wanted = ahead.batch(index, tokens, length), _Numbered().batch(index, tokens, length)
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.targets, wanted.targets)


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
