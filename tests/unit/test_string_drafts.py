"""Drafts through text, with a drafter that says always the same. The guarded bugs: shadows that
take each other's pages in one step, a page that is never given back, the target's first token read
as text."""

from pathlib import Path
from typing import Any

import pytest

from foretoken.kv.pool import PagePool
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context
from foretoken.proposers.models.draft_model.strings import StringDraftProposer
from foretoken.proposers.vocab.bytes import ByteEncoder, TokenBytes
from foretoken.runtime.sequence import Sequence
from foretoken.text.tokenizer import Tokenizer
from tests.unit.proposing import make_context, make_sequence
from tests.unit.test_other_vocabulary import byte_level, pieces

TOKENS = ["\u0120", "a", "b", "c", "\u00c3", "\u00a9"]
BOS, SPACE, A, B, C, FIRST, SECOND = 0, 2, 3, 4, 5, 6, 7
"""Of the target; FIRST and SECOND are the bytes of one character."""
SAYS = 261
"""Of the draft: b."""


class Parrot:
    """Drafts one token, whatever came before; stands for a draft model."""

    gain = None

    def __init__(self) -> None:
        self.progress = self
        self.seen: list[list[int]] = []
        self.released: list[str] = []

    def rewind(self, sequence: Sequence, kept: int) -> None:
        """Nothing is kept."""

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    def propose(self, context: Context) -> Draft:
        self.seen += [list(span.sequence.token_ids) for span in context.spans]
        count = len(context.spans)
        return Draft(ids=((SAYS,),) * count, promises=(0.5,) * count)


def encoder(tokenizer: Tokenizer) -> ByteEncoder:
    return ByteEncoder(tokenizer, TokenBytes.of(tokenizer))


def make(folder: Path, num_pages: int) -> tuple[StringDraftProposer, Parrot, PagePool]:
    parrot, pool = Parrot(), PagePool(num_pages, 4)
    inner: Any = parrot
    target, draft = encoder(byte_level(folder / "t", TOKENS, [])), encoder(pieces(folder / "d"))
    return StringDraftProposer(inner, pool, target, draft), parrot, pool


def named(name: str, ids: list[int]) -> Sequence:
    return make_sequence(ids, request_id=name)


def test_drafts_come_back_in_the_targets_tokens(tmp_path: Path) -> None:
    proposer, _, _ = make(tmp_path, 8)
    found = proposer.propose(make_context((named("x", [A, C]), 3), (named("y", [C]), 0)))
    assert found.ids == ((B,), ())
    assert found.promises == (0.5, None)


def test_the_oldest_shadow_makes_room_but_none_of_this_step(tmp_path: Path) -> None:
    """12 tokens of text fill the pool, for one sequence."""
    proposer, parrot, pool = make(tmp_path, 4)
    first, second = (named(name, [A, C] * 6) for name in ("first", "second"))
    assert proposer.propose(make_context((first, 2))).ids == ((B,),)
    assert pool.num_available == 0
    assert proposer.propose(make_context((second, 2))).ids == ((B,),)
    assert parrot.released == ["first"], "its pages went to the second"
    assert proposer.propose(make_context((first, 2), (second, 2))).ids == ((B,), ())
    assert parrot.released == ["first", "second"]
    for name in ("first", "second", "never seen"):
        proposer.release(name)
    assert pool.num_used == 0


def test_the_first_token_of_the_target_is_no_text(tmp_path: Path) -> None:
    proposer, parrot, _ = make(tmp_path, 8)
    proposer.propose(make_context((named("with", [BOS, A, C]), 1), (named("without", [A, C]), 1)))
    assert parrot.seen[0] == parrot.seen[1]


@pytest.mark.parametrize("ids", [[A, FIRST], [A, FIRST, SECOND, FIRST]])
def test_text_that_ends_inside_a_character_is_not_continued(ids: list[int], tmp_path: Path) -> None:
    proposer, parrot, _ = make(tmp_path, 8)
    assert proposer.propose(make_context((named("x", ids), 2))).ids == ((),)
    assert parrot.seen == []


def test_a_context_that_begins_inside_a_character(tmp_path: Path) -> None:
    """Only the last eight tokens are cut together with the draft."""
    proposer, _, _ = make(tmp_path, 8)
    ids = [FIRST, SECOND, A, C, A, C, A, C, SPACE]
    assert proposer.propose(make_context((named("x", ids), 2))).ids == ((B,),)
