"""No token covers more of a text than is said, and nothing is said where there is no proof."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from foretoken.checkpoint import packaged_model
from foretoken.text.max_token_length import max_token_length
from foretoken.text.tokenizer import Tokenizer as ModelTokenizer

TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet=" \t\n\u00a0a", max_size=80),
    st.text(alphabet="α\u0313\u0300\u0345e\u0301ﬁ한\u1112\u1161\u11ab", max_size=80),
    st.builds(lambda word, count: word * count, st.sampled_from(["a", " ", "<s>", "hello "]),
              st.integers(0, 60)),
)  # fmt: skip


def trained(normalizer: Any = None, cutter: Any = None, model: Any = None) -> Tokenizer:
    raw = Tokenizer(model or models.BPE())
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.pre_tokenizer = cutter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["hello hello aaaaaaaa        def x(self):"] * 20, trainer)
    return raw


def sentence_pieces() -> Tokenizer:
    """Like Llama 2: spaces as ▁, unknown characters as bytes."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "▁", "a", "e", "▁a", "aa"]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(names)},
        merges=[("▁", "a"), ("a", "a")],
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    raw = Tokenizer(model)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return raw


def length_of(raw: Tokenizer, **changes: Any) -> int | None:
    tokens = raw.get_vocab()
    longest = max(map(len, tokens), default=0)
    return max_token_length({**json.loads(raw.to_str()), **changes}, tokens.__contains__, longest)


BOUNDED = {
    "bytes": trained(),
    "composed": trained(normalizers.NFC()),
    "compatible": trained(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "digits": trained(cutter=pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
    "sentence pieces": sentence_pieces(),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_no_token_covers_more(name: str, text: str) -> None:
    raw = BOUNDED[name]
    longest = length_of(raw)
    assert longest is not None
    ids = raw.encode(text, add_special_tokens=False).ids
    assert len(text) <= longest * len(ids)


def test_the_bound_is_the_longest_token_where_nothing_is_composed() -> None:
    raw = BOUNDED["bytes"]
    longest = max(map(len, raw.get_vocab()))
    assert length_of(raw) == longest


@pytest.mark.parametrize(
    "raw",
    [
        trained(normalizers.Strip()),
        trained(normalizers.StripAccents()),
        trained(normalizers.Replace("aa", "b")),
        trained(cutter=pre_tokenizers.Whitespace()),
        trained(cutter=pre_tokenizers.Split(" ", "removed")),
        trained(cutter=pre_tokenizers.Metaspace()),
        Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Tokenizer(models.WordLevel(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
        Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True)),
        Tokenizer(models.Unigram(vocab=[("?", 0.0), ("a", -1.0)], unk_id=0)),
    ],
)  # fmt: skip
def test_what_may_lose_characters_has_no_bound(raw: Tokenizer) -> None:
    assert length_of(raw) is None


def test_tokens_that_take_spaces_along_and_truncation_have_no_bound() -> None:
    raw = trained()
    raw.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert len(raw.encode(" " * 500 + "<mask>").ids) == 1
    assert length_of(raw) is None
    assert length_of(trained(), truncation={"max_length": 4}) is None


def test_a_description_says_what_tokenizer_json_says() -> None:
    """But for the vocabulary, which nobody asks for."""
    tokenizer = ModelTokenizer(packaged_model("demo"))
    whole, found = json.loads(tokenizer.to_json()), tokenizer.describe()
    assert found["added_tokens"] and found.keys() >= {"normalizer", "pre_tokenizer", "decoder"}
    for name, told in found.items():
        known = whole[name]
        if name == "model":
            known = {key: known[key] for key in told}
        if name == "added_tokens":
            known = [{key: one[key] for key in told[0]} for one in known]
        assert told == known
