"""Whatever a tokenizer does to a text, what a grammar forces is that text, and its drafts are what
the masks of their rows allow. The guarded bugs: added tokens found in forced text, spaces that they
take with them, text that is normalised before it is spelt."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import llguidance
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from foretoken.checkpoint import packaged_model
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.rows import Rows
from foretoken.runtime.sequence import Sequence
from foretoken.text.spelling import spelling_json
from foretoken.types import Request, SamplingParams
from tests.marks import slow_but

ADDED = {
    "<call>": False,
    "<end>": True,
    "[X]": True,
    "[Y]": False,
    "\n\n": False,
    "é!": True,
    "e\u0301": False,
}
"""Texts of added tokens, and whether they are special."""
PIECES = [*ADDED, "</s>", "<s>", *" <>[", "say", "e", "\u0301", "\n", "\u00a0", "ﬁ", "É", "😀", '"']


def byte_level(normalizer: str | None = None, **flags: bool) -> Backend:
    """The packaged model's tokenizer with added tokens."""
    content = json.loads((packaged_model("demo") / "tokenizer.json").read_text())
    content["normalizer"] = None if normalizer is None else {"type": normalizer}
    like = {**content["added_tokens"][0], **flags}
    for number, (text, special) in enumerate(ADDED.items()):
        one = {**like, "id": 8000 + number, "content": text, "special": special}
        content["added_tokens"].append(one)
    return Backend.from_str(json.dumps(content))


def with_byte_fallback(prepend: str) -> Backend:
    """As SentencePiece's models are written: a space is a letter, unknown letters are bytes."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("▁", "s"), ("s", "a"), ("sa", "y"), ("▁", "▁"), ("<", "/"), ("</", "s"), ("s", ">")]
    letters = list('ABCDEFGHIJKLMNOPQRSTUVWXYZ/[]<>"!▁') + [chr(97 + i) for i in range(26)]
    made = [left + right for left, right in merges]
    pieces = ["<unk>", "<s>", "</s>", *fallback, *letters, *made]
    ids = {piece: token_id for token_id, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend == "normalizer":
        steps: list[Any] = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_special_tokens([text for text, special in ADDED.items() if special])
    backend.add_tokens([text for text, special in ADDED.items() if not special])
    return backend


TOKENIZERS: dict[str, Callable[[], Backend]] = {
    "plain": byte_level,
    "nfc": partial(byte_level, "NFC", normalized=True),
    "nfkc": partial(byte_level, "NFKC"),
    "lower": partial(byte_level, "Lowercase"),
    "words": partial(byte_level, single_word=True),
    "spaces": partial(byte_level, lstrip=True, rstrip=True),
    "prepended": partial(with_byte_fallback, "normalizer"),
    "always": partial(with_byte_fallback, "always"),
    "never": partial(with_byte_fallback, "never"),
}


def id_of(backend: Backend, token: str) -> int:
    found = backend.token_to_id(token)
    assert found is not None, token
    return found


def structures(draw: random.Random) -> Iterator[tuple[dict[str, Any], str]]:
    """Structures over random texts, and patterns of what they allow."""
    one, other = ("".join(draw.choices(PIECES, k=draw.randint(1, 5))) for _ in range(2))
    first, second = re.escape(one), re.escape(other)
    yield {"choice": [one]}, first
    yield {"choice": [one, one + other]}, f"{first}({second})?"
    yield {"regex": f"[a-c<]{{0,2}}{first}[<x]?"}, f"[a-c<]{{0,2}}{first}[<x]?"
    lark = f"start: a b\na: {json.dumps(one)}\nb: {json.dumps(other)}"
    yield {"grammar": lark}, first + second


def written(grammars: Grammars, size: int, end: int, given: Any, draw: random.Random) -> list[int]:
    """Random tokens that the grammar allows, until it ends. Forced drafts are what the masks of
    their rows allow, now and after each of them."""
    params = SamplingParams(structured_outputs=given)
    request = Request(request_id="r", prompt_token_ids=(5,), params=params, seed=1, max_tokens=500)
    sequence = Sequence.of(replace(request, grammar=grammars.compiled(params)))
    ids: list[int] = []
    promised: list[int] = []
    while not ids or ids[-1] != end:
        forced = grammars.forced(sequence, 8)
        logits_RV = torch.zeros(len(forced) or 1, size)
        grammars.forbid(logits_RV, Rows(sequence=sequence, drafts=forced[:-1]))
        assert not grammars.take_failures(), (given, ids)
        allowed = [(row == 0).nonzero().flatten().tolist() for row in logits_RV]
        if forced:
            assert allowed == [[token] for token in forced], (given, ids)
        assert not promised or allowed[0] == promised[:1], (given, ids)
        promised = list(forced[1:]) or promised[1:]
        ids.append(draw.choice(allowed[0]))
        sequence.token_ids.append(ids[-1])
    grammars.release("r")
    return ids[:-1]


@pytest.mark.parametrize("name", slow_but(TOKENIZERS, *list(TOKENIZERS)[::3]))
def test_forced_text_is_that_text(name: str) -> None:
    backend = TOKENIZERS[name]()
    size, end = backend.get_vocab_size() + 4, id_of(backend, "</s>")
    grammars = Grammars(backend.to_str, size, [end])
    spelt = llguidance.LLTokenizer(spelling_json(backend.to_str(), [end]), n_vocab=size)
    draw = random.Random(name)
    for _ in range(8):
        for given, pattern in structures(draw):
            ids = written(grammars, size, end, given, draw)
            text = spelt.decode_bytes(ids).decode()
            assert re.fullmatch(pattern, text), (given, text, ids)
            assert not any(map(spelt.is_special_token, ids)), (given, ids)
    grammars.stop()


def test_an_end_that_is_a_word_spells_no_text() -> None:
    """An id of the vocabulary, or an added token that is not special, may end outputs."""
    backend = byte_level()
    ends = [id_of(backend, text) for text in ("Ġnow", "[Y]")]
    content = json.loads(spelling_json(backend.to_str(), ends))
    special = {one["id"] for one in content["added_tokens"] if one["special"]}
    assert special >= set(ends)
    grammars = Grammars(backend.to_str, 8010, ends)
    ids = written(grammars, 8010, ends[0], {"choice": ["say now[Y]!"]}, random.Random(1))
    assert not set(ends) & set(ids)
    assert backend.decode(ids) == "say now[Y]!"
    grammars.stop()
