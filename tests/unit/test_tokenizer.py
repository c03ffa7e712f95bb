"""Text and ids: incremental text equals decoding at once, stop strings cut exactly."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from foretoken.checkpoint import packaged_model
from foretoken.errors import TokenizerError
from foretoken.text.tokenizer import StopMatch, TextOptions, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer with a few merges."""
    folder = tmp_path_factory.mktemp("tokenizer")
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["def hello(self): return self.hello"] * 20, trainer)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    return Tokenizer(folder)


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id == 1
    assert tokenizer.bos_token_id is None


@given(st.text(max_size=30))
def test_growing_text_equals_decoding_at_once(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = tokenizer.stream(TextOptions())
    given_out = ""
    for token in ids:
        assert stream.feed([token]) is None
        stable = stream.text[: stream.stable_length()]
        assert stable.startswith(given_out)
        given_out = stable
    stream.finish()
    assert stream.text == tokenizer.decode(ids) == text


def test_stop_string_across_tokens_is_cut(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc STOP xyz")
    options = TextOptions(stop=("OP x", "zzz"))
    stream = tokenizer.stream(options)
    match = stream.feed(ids)
    assert match is not None
    assert match.stop == "OP x"
    assert tokenizer.decode(ids[: match.num_keep]).endswith("STOP x")
    assert stream.text == "abc ST"
    kept = tokenizer.stream(TextOptions(stop=("OP x",), include_stop_str=True))
    assert kept.feed(ids) == StopMatch(match.num_keep, "OP x")
    assert kept.text == "abc STOP x"


def test_text_that_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream(TextOptions(stop=("end",)))
    stream.feed(tokenizer.encode("the en"))
    assert stream.text[: stream.stable_length()] == "the "
    stream.finish()
    assert stream.text[: stream.stable_length()] == "the en"


def test_the_earliest_stop_string_wins(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream(TextOptions(stop=("c", "b")))
    match = stream.feed(tokenizer.encode("abc"))
    assert match is not None
    assert match.stop == "b"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab ab")
    stream = tokenizer.stream(TextOptions(stop=("b",), min_tokens=2))
    match = stream.feed(ids)
    assert match is not None
    assert match.num_keep > 2
    assert stream.text.startswith("ab")


def test_bad_words_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    spelled = {tokenizer.decode(ids) for ids in tokenizer.bad_words_ids(["hello"])}
    assert spelled == {"hello", " hello"}


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="tokenizer"):
        Tokenizer(tmp_path)


def test_the_first_chats_may_come_at_once() -> None:
    chat = [{"role": "user", "content": "x"}]
    fresh, tokenizer = (Tokenizer(packaged_model("demo")) for _ in range(2))
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(fresh.apply_chat_template, chat) for _ in range(8)]
        assert all(one.result() == tokenizer.apply_chat_template(chat) for one in asked)
