"""Several drafters behind one: who is asked, who is not, and how one draft is put together."""

import pytest
import torch
from torch import Tensor

from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.choose.offers import Member
from foretoken.proposers.choose.policy import FirstPolicy
from foretoken.runtime.sequence import Sequence
from tests.unit.proposing import make_context, make_sequence

VOCAB = 11


class Stub(Proposer):
    """Drafts its own number for the requests it knows, and writes down what it was asked."""

    def __init__(self, name: str, token: int, knows: str, drawn: bool = False) -> None:
        self.name = name
        self.token = token
        self.knows = knows
        self.drawn = drawn
        self.asked: list[tuple[str, int]] = []
        self.released: list[str] = []

    def propose(self, context: Context) -> Draft:
        ids = []
        for span in context.spans:
            request_id = span.sequence.request.request_id
            self.asked.append((request_id, span.draft_budget))
            known = request_id in self.knows
            ids.append((self.token,) * (span.draft_budget if known else 0))
        total = sum(len(one) for one in ids)
        probs_KV = torch.full((total, VOCAB), 1 / VOCAB) if self.drawn else None
        return Draft(ids=tuple(ids), probs_KV=probs_KV, drafter="inner name")

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class ShortStub(Stub):
    looks_up = True

    def propose(self, context: Context) -> Draft:
        return Draft(ids=tuple((self.token,) for _ in context.spans), drafter="inner name")


def drafters(*members: tuple[Stub, int], least: int = 0) -> Drafters:
    each = {s.name: Member(proposer=s, most=most, least=least) for s, most in members}
    return Drafters(each, FirstPolicy())


def sequences(names: str, **changes: object) -> list[Sequence]:
    return [make_sequence([1], [2], request_id=name, **changes) for name in names]


def test_the_first_with_an_offer_wins_and_the_next_serves_the_rest() -> None:
    one, two = Stub("one", 1, "a"), Stub("two", 2, "ab")
    a, b, c = sequences("abc")
    draft = drafters((one, 3), (two, 5)).propose(make_context((a, 4), (b, 4), (c, 0)))
    assert draft.ids == ((1, 1, 1), (2, 2, 2, 2), ())
    assert draft.names == ("one", "two", "")
    assert one.asked == [("a", 3), ("b", 3)]
    assert two.asked == [("b", 4)]


def test_nobody_is_asked_at_budget_zero() -> None:
    one = Stub("one", 1, "ab")
    a, b = sequences("ab")
    draft = drafters((one, 3)).propose(make_context((a, 0), (b, 0)))
    assert draft.ids == ((), ())
    assert not one.asked


def test_a_request_gets_the_drafter_it_names_and_no_other() -> None:
    one, two = Stub("one", 1, "ab"), Stub("two", 2, "b")
    [a] = sequences("a", params={"speculation": {"drafter": "two"}})
    [b] = sequences("b")
    draft = drafters((one, 3), (two, 3)).propose(make_context((a, 3), (b, 3)))
    assert draft.ids == ((), (1, 1, 1))
    assert two.asked == [("a", 3)]


def test_a_prediction_comes_first() -> None:
    one = Stub("one", 1, "ab")
    [a] = sequences("a", prediction_ids=(2, 7, 8, 9))
    [b] = sequences("b")
    draft = drafters((one, 2)).propose(make_context((a, 3), (b, 3)))
    assert draft.ids == ((7, 8, 9), (1, 1))
    assert draft.names == ("prediction", "one")


def _rows(probs_KV: Tensor | None) -> list[list[float]]:
    assert probs_KV is not None
    rows: list[list[float]] = probs_KV.tolist()
    return rows


def test_distributions_stay_with_their_tokens_and_looked_up_tokens_are_one_hot() -> None:
    drawn, looked_up = Stub("drawn", 1, "bd", drawn=True), Stub("looked up", 4, "ac")
    a, b, c, d = sequences("abcd")
    context = make_context((a, 2), (b, 1), (c, 1), (d, 2))
    draft = drafters((looked_up, 5), (drawn, 5)).propose(context)
    assert draft.ids == ((4, 4), (1,), (4,), (1, 1))
    flat, hot = [pytest.approx(1 / VOCAB)] * VOCAB, [0.0] * VOCAB
    hot[4] = 1.0
    assert _rows(draft.probs_KV) == [hot, hot, flat, hot, flat, flat]
    assert [draft.is_one_hot(i) for i in range(4)] == [True, False, True, False]
    draft.check()


def test_short_looked_up_drafts_are_dropped_and_short_budgets_not_asked_for() -> None:
    short, long = ShortStub("short", 1, ""), Stub("long", 2, "a")
    [a] = sequences("a")
    draft = drafters((short, 4), (long, 4), least=2).propose(make_context((a, 4)))
    assert draft.ids == ((2, 2, 2, 2),)
    assert drafters((long, 4), least=2).propose(make_context((a, 1))).ids == ((),)


def test_the_only_drafter_goes_under_its_own_name() -> None:
    [a] = sequences("a")
    draft = drafters((Stub("mine", 3, "a"), 2)).propose(make_context((a, 2)))
    assert (draft.ids, draft.names) == (((3, 3),), ("mine",))


def test_release_tells_everybody() -> None:
    one, two = Stub("one", 1, ""), Stub("two", 1, "")
    drafters((one, 1), (two, 1)).release("a")
    assert (one.released, two.released) == (["a"], ["a"])


def test_who_drafts_blocks_is_known_by_its_name() -> None:
    """A draft carries the name that the user gave, not the method's."""
    one, wide = Stub("one", 1, ""), Stub("wide", 2, "")
    wide.drafts_blocks = True
    assert drafters((one, 1), (wide, 1)).block_drafters == {"wide"}
