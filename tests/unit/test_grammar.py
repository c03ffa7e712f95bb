"""Grammars: masks of rows, forced tokens, what is refused, what fails on the way."""

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
from foretoken.errors import ForetokenError, ParameterError
from foretoken.runtime import compile_grammar
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.rows import Rows
from foretoken.runtime.sequence import Sequence
from foretoken.text.spelling import spelling_json
from foretoken.text.tokenizer import Tokenizer
from foretoken.types import Request, SamplingParams
from tests.marks import slow_but

VOCAB, EOS = 8000, 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(packaged_model("demo"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_json, VOCAB, [EOS])


def request_of(structured: dict[str, Any] | None, **others: Any) -> Request:
    params = SamplingParams(structured_outputs=structured, **others)
    return Request(request_id="r", prompt_token_ids=(5, 6), params=params, seed=1, max_tokens=50)


def sequence_of(
    grammars: Grammars, structured: dict[str, Any] | None, output: list[int]
) -> Sequence:
    request = request_of(structured)
    request = replace(request, grammar=grammars.compiled(request.params))
    sequence = Sequence.of(request)
    sequence.token_ids.extend(output)
    return sequence


def allowed(grammars: Grammars, sequence: Sequence, drafts: tuple[int, ...] = ()) -> list[set[int]]:
    rows = Rows(sequence=sequence, drafts=drafts)
    logits_RV = torch.zeros(rows.num_rows, VOCAB)
    grammars.forbid(logits_RV, rows)
    grammars.release("r")
    return [set((row == 0).nonzero().flatten().tolist()) for row in logits_RV]


def test_rows_after_drafts_are_the_rows_after_those_tokens(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    choice = {"choice": ["import os", "import sys", "import re"]}
    drafts = tuple(tokenizer.encode("import os", add_special_tokens=False))
    rows = allowed(grammars, sequence_of(grammars, choice, []), drafts)
    for count, row in enumerate(rows):
        assert row == allowed(grammars, sequence_of(grammars, choice, list(drafts[:count])))[0]
    assert rows[-1] == {EOS}


def test_rows_after_a_forbidden_draft_are_left_alone(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    sequence = sequence_of(grammars, {"choice": ["yes", "no"]}, [])
    first, second = allowed(grammars, sequence, (EOS,))
    assert EOS not in first and len(second) == VOCAB
    bad = tokenizer.encode("maybe", add_special_tokens=False)[0]
    first, second = allowed(grammars, sequence, (bad,))
    assert bad not in first and len(second) == VOCAB


def test_forced_text_has_one_spelling(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sequence = sequence_of(grammars, {"regex": "def __init__\\(self\\): (pass|return)"}, [])
    forced = grammars.forced(sequence, 50)
    assert tokenizer.decode(forced).startswith("def __init__(self")
    assert grammars.forced(sequence, 2) == forced[:2]
    for row, token in zip(allowed(grammars, sequence, forced), forced, strict=False):
        assert row == {token}


def test_the_end_is_forced_when_nothing_else_can_follow(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("yes", add_special_tokens=False)
    sequence = sequence_of(grammars, {"choice": ["yes", "no"]}, ids)
    assert grammars.forced(sequence, 5) == (EOS,)
    assert allowed(grammars, sequence) == [{EOS}]


def test_without_a_grammar_nothing_happens(grammars: Grammars) -> None:
    assert len(allowed(grammars, sequence_of(grammars, None, []))[0]) == VOCAB
    assert grammars.forced(sequence_of(grammars, None, []), 5) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"json": {}, "regex": "x"},
        {"json": "[1]"},
        {"json": "{"},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [""]},
        {"regex": 3},
        {"json_object": False},
        {"xml": "x"},
        {"grammar": "x" * 200_000},
        "json",
    ],
)
def test_wrong_values(wrong: Any) -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        SamplingParams(structured_outputs=wrong)


@pytest.mark.parametrize(
    "wrong", [{"regex": "("}, {"grammar": "start: missing"}, {"json": {"type": "nonsense"}}]
)
def test_what_does_not_compile_is_refused(grammars: Grammars, wrong: Any) -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        grammars.compiled(SamplingParams(structured_outputs=wrong))


def test_clashes_are_refused(grammars: Grammars) -> None:
    for others in ({"min_tokens": 2, "max_tokens": 9}, {"ignore_eos": True}, {"bad_words": ["x"]}):
        with pytest.raises(ParameterError, match="nothing beside structured_outputs"):
            grammars.compiled(request_of({"json_object": True}, **others).params)
    with pytest.raises(ParameterError, match="tokenizer"):
        Grammars(None, VOCAB, [EOS]).compiled(request_of({"json_object": True}).params)


def test_tokens_that_it_cannot_read_are_a_failure(grammars: Grammars) -> None:
    sequence = sequence_of(grammars, {"choice": ["yes", "no"]}, [17, 18, 19])
    logits_RV = torch.zeros(1, VOCAB)
    grammars.forbid(logits_RV, Rows(sequence=sequence))
    assert (logits_RV == 0).all()
    assert list(grammars.take_failures()) == ["r"]
    assert grammars.take_failures() == {}
    grammars.release("r")


def exploding(count: int) -> dict[str, Any]:
    """A schema that llguidance needs time for that doubles with every pattern."""
    patterns = [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(count)]
    return {"json": {"allOf": patterns}}


def ladder(count: int) -> dict[str, Any]:
    """A schema of 70 kB whose nesting is deeper than a thread's stack."""
    steps = {
        f"d{i}": {"properties": {side: {"$ref": f"#/$defs/d{i + 1}"} for side in "lr"}}
        for i in range(count)
    }
    return {"json": {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{count}": {}}}}


@pytest.mark.parametrize(
    "endless",
    [
        {"grammar": "start: start"},
        {"grammar": "start: a\na: b\nb: a"},
        {"grammar": 'start: start "a"'},
        {"grammar": "root ::= root"},
        {"grammar": 'start: %json {"$ref": "#"}'},
        {"json": {"$ref": "#"}},
        {"json": {"anyOf": [{"$ref": "#"}]}},
        {"regex": "[^\\s\\S]"},
    ],
)
def test_what_no_text_can_match_is_refused(grammars: Grammars, endless: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="what some text can match"):
        grammars.compiled(SamplingParams(structured_outputs=endless))


@pytest.mark.slow
def test_compiling_ends_though_the_compiler_would_not(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer.to_json, VOCAB, [EOS])
    assert grammars.compiled(SamplingParams(structured_outputs={"regex": "b+"})) is not None
    monkeypatch.setattr(compile_grammar, "_MOST_WAITED_S", 1.0)
    given = SamplingParams(structured_outputs=exploding(60))
    for _ in range(2):  # the second time from memory
        with pytest.raises(ParameterError, match="what compiles within"):
            grammars.compiled(given)
    monkeypatch.undo()
    assert grammars.compiled(SamplingParams(structured_outputs={"regex": "a+"})) is not None


def test_a_grammar_that_would_end_the_process_is_refused(grammars: Grammars) -> None:
    with pytest.raises(ParameterError, match="what compiles within"):
        grammars.compiled(SamplingParams(structured_outputs=ladder(1000)))
    assert grammars.compiled(SamplingParams(structured_outputs=ladder(10))) is not None


def test_a_compiler_that_does_not_start_is_not_the_clients_fault(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer.to_json, VOCAB, [EOS])
    monkeypatch.setattr("sys.executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(ForetokenError, match="compiler of grammars"):
            grammars.compiled(SamplingParams(structured_outputs={"regex": "a+"}))


def test_a_thousand_properties_are_followed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    opened = tokenizer.encode('{"', add_special_tokens=False)
    sequence = sequence_of(grammars, {"json": json.dumps(schema)}, opened)
    assert allowed(grammars, sequence)[0] and not grammars.take_failures()


# Whatever a tokenizer does to a text, what a grammar forces is that text, and its drafts are what
# the masks of their rows allow. The guarded bugs: added tokens found in forced text, spaces that
# they take with them, text that is normalised before it is spelt.
ADDED = {
    "<call>": False, "<end>": True, "[X]": True, "[Y]": False, "\n\n": False, "é!": True,
    "e\u0301": False,
}  # fmt: skip
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
