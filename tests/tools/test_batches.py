"""What training tools make: batches that repeat exactly, a tokenizer, cards."""

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
from foretoken.training import run_folder
from tools.demo_models import card
from tools.demo_models.batches import (
    Batch,
    MadeAhead,
    Mix,
    TokenStream,
    TrainingData,
    bytes_per_token,
    held_out_rows,
)
from tools.demo_models.card import CardInput, draft_card, head_card, target_card, thin
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


def test_transformers_reads_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, 64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
    assert tokenizer.encode("x").ids[0] == tokenizer.token_to_id("<s>") == 0
    assert tokenizer.token_to_id("</s>") == 1
    assert loaded(TEXTS[0])["input_ids"] == tokenizer.encode(TEXTS[0]).ids
    chat = loaded.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<s># user\nhello\n# assistant\n"


PART = {"agreement": 0.61, "length": 2.71, "overlap": 0.582}
MEASURED = {
    "target_bits_per_byte": {"512": 1.234, "2048": 1.111},
    "draft_bits_per_byte": {"512": 2.345},
    "repeated_4grams_greedy": 0.25,
    "repeated_4grams_at_0.7": 0.075,
    "repeated_4grams_at_0.8": 0.05,
    "repeated_4grams_of_text": 0.025,
    "functions": PART,
    "edits": {**PART, "length": 3.33},
    "step_milliseconds": {"target": 12.5, "draft": 1.25},
}
RECORD = {
    "step": 100, "tokens": 819200, "minutes": 4, "loss": 4.567, "nats": 4.321,
    "bits_per_byte": 1.543, "agreement": 0.5, "tokens_a_step": 2.2, "edit_tokens_a_step": 2.1,
}  # fmt: skip


@pytest.mark.slow
def test_cards(tmp_path: Path) -> None:
    progress = {"step": 100, "tokens": 819200, "seconds": 240.0, "history": [RECORD]}
    run_folder.save(tmp_path, 100, {"progress": progress})
    given = CardInput(run=tmp_path, measured=MEASURED, notes=("resumed twice",))
    target, draft = target_card(given), draft_card(given)
    for piece in ("| 1.234 |", "| 25.0% |", "4.321", "- resumed twice", "`textwrap.py`"):
        assert piece in target, piece
    for piece in ("| 2.71 | 3.33 |", "61.0%", "12.50 ms", "2.345", "- resumed twice"):
        assert piece in draft, piece


@pytest.mark.slow
def test_a_card_tells_the_run_and_what_packages_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SourceFile(path="inner.py", text="x = 1\n" * 200_000, is_test=False)
    package = Package(name="outer", version="1.5", licence="MIT", files=(file,))
    monkeypatch.setattr(card, "load_packages", lambda: (package,))
    monkeypatch.setattr(run_folder, "device_name", lambda: "a large GPU")
    progress = {"step": 200, "tokens": 1638400, "seconds": 60.0, "history": [RECORD]}
    run_folder.save(tmp_path, 200, {"progress": progress})
    settings = {"seed": 0, "name": "demo-more", "package_share": 0.6}
    run_folder.write_provenance(tmp_path, settings, "data")
    told = " ".join(target_card(CardInput(run=tmp_path, measured=MEASURED)).split())
    pieces = ("train demo-more`: 200 steps", "1.0 minutes on a large GPU", "torch ", "| 7.5% |")
    for piece in (*pieces, "outer 1.5 (MIT)", "1 files (1.2 MB) of 1 packages", "60% of"):
        assert piece in told, piece
    run_folder.write_provenance(tmp_path, {**settings, "on_policy_share": 0.6}, "data")
    told = " ".join(draft_card(CardInput(run=tmp_path, measured=MEASURED)).split())
    for piece in ("train demo-more --target", "60% of the rows", "the card of `demo`"):
        assert piece in told, piece


@pytest.mark.parametrize("kind", ["eagle3", "mlp", "medusa", "parallel", "dflash", "dspark"])
def test_cards_of_heads(tmp_path: Path, kind: str) -> None:
    record = {**RECORD, "depth_1": 0.712, "depth_2": 0.533}
    progress = {"step": 100, "tokens": 819200, "seconds": 240.0, "history": [record]}
    head = {"kind": kind, "depth": 2, "depth_decay": 0.8}
    state = {"progress": progress, "kind": kind, "head": head, "model": {"w": torch.zeros(1000, 9)}}
    run_folder.save(tmp_path, 100, state)
    found = {"by_position": [0.61, 0.42], "lengths": [1.61, 2.03], "num_verifications": 50}
    costs = [
        {"drafts": k, "total_s": 0.004, "drafting_s": 0.001, "verifying_s": 0.003} for k in range(3)
    ]
    measured = {"acceptance": {"0": found}, "costs": costs, "speedups": {"0": [1.31, 1.52]}}
    card = head_card(CardInput(run=tmp_path, measured=measured, notes=("short",)), f"demo-{kind}")
    config = "pard" if kind == "parallel" else kind
    for piece in (
        f"# Model card: demo-{kind}",
        f"tools.demo_models train demo-{config} ",
        "| 0 | 2.03 | 0.61 0.42 |",
        "| 2 | 4.00 | 1.00 | 1.52 |",
        "0.712 | 0.533",
        "- short",
        "card of `demo`",
        "0.01 M parameters",
    ):
        assert piece in card, piece


def test_a_thin_history_keeps_its_end() -> None:
    records = [{"step": float(i)} for i in range(50)]
    kept = thin(records)
    assert len(kept) <= 12 and kept[-1] == records[-1]
    assert thin(records[:3]) == records[:3]


def test_a_card_needs_a_run_of_a_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RUN: "):
        head_card(CardInput(run=tmp_path, measured={}), "x")
