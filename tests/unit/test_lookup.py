"""Drafts that are looked up or said: n-grams, suffixes, predictions, and text."""

from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.kv.pool import PagePool
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context
from foretoken.proposers.lookup.ngram import NgramProposer
from foretoken.proposers.lookup.prediction import PredictionProposer
from foretoken.proposers.lookup.suffix.path import PathLimits, Place, RecentTokens, best_path
from foretoken.proposers.lookup.suffix.proposer import SuffixProposer
from foretoken.proposers.lookup.suffix.texts import OWN_LENGTHS, TOKENS_EACH, LocalText, SuffixCache
from foretoken.proposers.models.strings import StringDraftProposer
from foretoken.proposers.vocab.bytes import ByteEncoder, TokenBytes
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence
from foretoken.text.tokenizer import Tokenizer
from foretoken.types import Request, SamplingParams
from tests.unit.proposing import make_context, make_sequence
from tests.unit.test_other_vocabulary import byte_level, pieces


def ngram_sequence(token_ids: list[int], num_prompt: int = 1) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(token_ids[:num_prompt]),
        params=SamplingParams(),
        seed=0,
        max_tokens=100,
    )
    return Sequence(request=request, token_ids=token_ids, num_prompt=num_prompt)


def draft(proposer: NgramProposer, sequence: Sequence, budget: int) -> tuple[int, ...]:
    at = sequence.num_tokens - 1
    span = Span(sequence=sequence, start=at, length=1, draft_budget=budget, samples=True)
    return proposer.propose(Context((span,))).ids[0]


def scan(tokens: list[int], low: int, high: int, count: int) -> tuple[int, ...]:
    for length in range(high, low - 1, -1):
        if length >= len(tokens):
            continue
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                period = len(tokens) - end
                text = list(tokens)
                for _ in range(count):
                    text.append(text[-period])
                return tuple(text[len(tokens) :])
    return ()


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    proposer = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)
    sequence = ngram_sequence([1, 2, 3, 7, 9, 3, 8, 1, 2, 3])
    assert draft(proposer, sequence, 2) == (7, 9)


def test_the_most_recent_place_wins_among_equals() -> None:
    proposer = NgramProposer(prompt_lookup_min=2, prompt_lookup_max=2)
    assert draft(proposer, ngram_sequence([1, 2, 5, 1, 2, 6, 1, 2]), 1) == (6,)


def test_no_match_no_draft_and_no_budget_no_work() -> None:
    proposer = NgramProposer(prompt_lookup_min=2, prompt_lookup_max=4)
    assert draft(proposer, ngram_sequence([1, 2, 3, 4]), 3) == ()
    assert draft(proposer, ngram_sequence([1, 1, 1, 1]), 0) == ()


def test_a_repeating_text_goes_on_past_its_end() -> None:
    proposer = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=4)
    assert draft(proposer, ngram_sequence([5, 6, 5, 6, 5]), 5) == (6, 5, 6, 5, 6)


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_growing_index_equals_a_scan(tokens: list[int], low: int, more: int, count: int) -> None:
    proposer = NgramProposer(prompt_lookup_min=low, prompt_lookup_max=low + more)
    sequence = ngram_sequence([])
    for token in tokens:
        sequence.token_ids.append(token)
        found = draft(proposer, sequence, count)
        assert found == scan(sequence.token_ids, low, low + more, count)


def test_release_forgets() -> None:
    proposer = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=2)
    assert draft(proposer, ngram_sequence([1, 2, 1]), 1) == (2,)
    proposer.release("r")
    proposer.release("unknown")
    assert draft(proposer, ngram_sequence([1, 3, 1]), 1) == (3,)


EASY = PathLimits(per_match=1.0, least_probability=0.1)
TEXTS = st.lists(st.integers(0, 3), min_size=2, max_size=60)


def place(match: int, tokens: list[int]) -> Place:
    return Place(match, array("I", [9] + tokens), 1, False)


def suffix(cached: int = 10, **changes: float) -> SuffixProposer:
    values = {"max_spec_factor": 1.0, "min_token_prob": 0.1, **changes}
    return SuffixProposer(max_tree_depth=24, max_cached_requests=cached, **values)


def suffix_draft(proposer: SuffixProposer, sequence: Sequence, budget: int = 24) -> tuple[int, ...]:
    return proposer.propose(make_context((sequence, budget))).ids[0]


def write(proposer: SuffixProposer, name: str, output: list[int], salt: str | None = None) -> None:
    sequence = make_sequence([90, 91], output[:1], request_id=name, cache_salt=salt)
    suffix_draft(proposer, sequence)
    sequence.token_ids.extend(output[1:])
    proposer.release(name)


def matching(text: list[int], at: int, context: list[int]) -> int:
    """The definition: how many tokens before `at` are the newest of the context."""
    count = 0
    while count < min(at, len(context)) and text[at - 1 - count] == context[-1 - count]:
        count += 1
    return count


@pytest.mark.slow
@given(TEXTS, TEXTS, st.data())
def test_a_window_counts_matching_tokens(
    text: list[int], context: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, len(text)))
    found = RecentTokens(context[-24:]).match(array("I", text), at)
    assert found == min(matching(text, at, context), 24)


@given(TEXTS, st.lists(st.integers(1, 7)))
def test_local_places_are_real_and_none_is_longer(text: list[int], cuts: list[int]) -> None:
    """Whatever pieces the text came in: each place matches as far as it says, and if the newest
    token stood anywhere before, something is found for the longest n-gram that did."""
    local = LocalText()
    rest = list(text)
    for cut in cuts:
        local.extend(rest[:cut])
        rest = rest[cut:]
    local.extend(rest)
    assert local.tokens.tolist() == text
    found = local.places(RecentTokens(text[-24:]))
    for one in found:
        assert one.match == min(matching(text, one.at, text), 24)
    best = max((min(matching(text, at, text), 24) for at in range(1, len(text))), default=0)
    usable = [n for n in OWN_LENGTHS if n <= best]
    assert bool(found) == bool(usable)
    if usable:
        assert all(one.match >= usable[-1] for one in found)


def test_the_most_frequent_continuation_is_drafted() -> None:
    places = [place(5, [1, 2, 3]), place(5, [1, 4, 5]), place(5, [1, 4, 6]), place(5, [7])]
    path = best_path(places, 8, EASY)
    assert path.tokens[:2] == [1, 4]
    assert path.score == pytest.approx(0.75 + 0.5 + 0.25)


def test_a_draft_is_as_long_as_its_context_matches() -> None:
    following = list(range(20))
    assert best_path([place(5, following)], 24, EASY).tokens == following[:5]
    assert best_path([place(5, following)], 3, EASY).tokens == following[:3]
    twice = PathLimits(per_match=2.0, least_probability=0.1)
    assert best_path([place(5, following)], 24, twice).tokens == following[:10]
    none = PathLimits(per_match=0.0, least_probability=0.1)
    assert best_path([place(5, following)], 24, none).tokens == []


def test_an_improbable_token_ends_the_draft() -> None:
    places = [place(6, [1, 2, token]) for token in range(10, 14)]
    strict = PathLimits(per_match=1.0, least_probability=0.5)
    assert best_path(places, 6, strict).tokens == [1, 2]


def test_a_shorter_match_wins_where_the_counts_say_so() -> None:
    """One long match whose text ends against many that agree."""
    places = [place(9, [5]), *[place(4, [5, 6, 7, 8])] * 6]
    assert best_path(places, 8, EASY).tokens == [5, 6, 7, 8]


def test_own_text_is_drafted_from_and_goes_on_repeating() -> None:
    sequence = make_sequence([1, 2, 3, 4, 5, 6], [7, 1, 2, 3])
    assert suffix_draft(suffix(0), sequence) == (4, 5, 6)
    loop = make_sequence([1, 2, 1, 2, 1, 2, 1], [2])
    assert suffix_draft(suffix(0), loop, 4) == (1, 2, 1, 2)


def test_past_outputs_are_drafted_from() -> None:
    proposer = suffix()
    write(proposer, "old", [50, 51, 52, 53, 54, 55, 56])
    sequence = make_sequence([1], [50, 51, 52, 53], request_id="new")
    assert suffix_draft(proposer, sequence) == (54, 55, 56)
    assert suffix_draft(suffix(0), sequence) == ()


def test_outputs_that_are_still_growing_help_each_other() -> None:
    proposer = suffix()
    first = make_sequence([1], [50, 51, 52, 53, 54], request_id="first")
    suffix_draft(proposer, first)
    second = make_sequence([2], [50, 51, 52], request_id="second")
    assert suffix_draft(proposer, second) == (53, 54)


@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), (None, "b"), ("a", None)])
def test_salts_do_not_meet(ours: str | None, theirs: str | None) -> None:
    proposer = suffix()
    write(proposer, "old", [50, 51, 52, 53, 54, 55, 56], theirs)
    context = [50, 51, 52, 53]
    stranger = make_sequence([1], context, request_id="x", cache_salt=ours)
    friend = make_sequence([1], context, request_id="y", cache_salt=theirs)
    assert suffix_draft(proposer, stranger) == ()
    assert suffix_draft(proposer, friend) == (54, 55, 56)


def test_a_collision_of_salts_shows_nothing() -> None:
    """Even where two salts share every slot of the table, texts are told apart."""
    cache = SuffixCache(4)
    one, other = cache.open("a"), cache.open("b")
    other = other._replace(salt_hash=one.salt_hash)
    cache.extend(one, [5, 6, 7, 8, 9])
    assert cache.places(RecentTokens([5, 6, 7]), other) == []
    friend = cache.open("a")
    assert [p.match for p in cache.places(RecentTokens([5, 6, 7]), friend)] == [3]


def test_the_oldest_output_is_forgotten_first() -> None:
    proposer = suffix(2)
    for index in range(4):
        write(proposer, f"old-{index}", [index * 10 + i for i in range(8)])
    found = []
    for index in range(4):
        name = f"new-{index}"
        sequence = make_sequence([99], [index * 10 + i for i in range(4)], request_id=name)
        found.append(bool(suffix_draft(proposer, sequence)))
    assert found == [False, False, True, True]


def test_memory_is_bounded_and_reported() -> None:
    cache = SuffixCache(3)
    for start in range(12):
        text = cache.open(None)
        cache.extend(text, list(range(start, start + TOKENS_EACH * 2)))
        cache.finish(text)
    assert cache.num_tokens <= 3 * TOKENS_EACH
    assert cache.num_bytes <= cache.most_bytes
    proposer = suffix()
    before = proposer.num_bytes
    write(proposer, "old", list(range(100)))
    assert before < proposer.num_bytes < before + 10_000


@given(st.lists(st.tuples(st.sampled_from("abc"), TEXTS), min_size=1, max_size=12), TEXTS)
def test_shared_places_are_real(past: list[tuple[str, list[int]]], output: list[int]) -> None:
    """After evictions and with several salts: every place is a match of the same salt."""
    cache = SuffixCache(4)
    for salt, tokens in past:
        text = cache.open(salt)
        cache.extend(text, tokens[:7])
        cache.extend(text, tokens[7:])
        cache.finish(text)
    alive = [list(text.tokens) for text in cache._texts.values() if text.salt == "a"]
    own = cache.open("a")
    cache.extend(own, output)
    for found in cache.places(RecentTokens(output[-24:]), own):
        there = found.text.tolist()
        assert there in alive
        assert found.match == min(matching(there, found.at, output), 24)


def test_budget_zero_costs_nothing() -> None:
    proposer = suffix()
    sequence = make_sequence([1, 2, 1], [2])
    assert proposer.propose(make_context((sequence, 0))).ids == ((),)
    assert not proposer._texts


def test_release_forgets_the_request_and_knows_strangers() -> None:
    proposer = suffix()
    proposer.release("nobody")
    write(proposer, "old", [1, 2, 3])
    assert not proposer._texts


FILE = tuple(range(100, 160))
PROMPT = (1, 2, 3)


def drafts_after(output: list[int], budget: int = 8, expected: tuple[int, ...] = FILE) -> list[int]:
    proposer = PredictionProposer()
    sequence = make_sequence(PROMPT, prediction_ids=expected)
    draft: list[int] = []
    for token in output:
        sequence.token_ids.append(token)
        draft = list(proposer.propose(make_context((sequence, budget))).ids[0])
    return draft


def test_an_agreeing_output_gets_the_next_expected_tokens() -> None:
    assert drafts_after([100, 101, 102]) == list(FILE[3:11])


def test_the_end_of_the_prediction_ends_the_drafts() -> None:
    assert drafts_after(list(FILE[:57])) == [157, 158, 159]
    assert drafts_after(list(FILE)) == []


@pytest.mark.parametrize(
    ("change", "resumed"),
    [([7], 111), ([7, 8, 9], 111), ([110, 7, 8], 111), ([], 111)],
    ids=["one token replaced", "three for one", "inserted", "deleted"],
)
def test_the_pointer_is_set_again_after_a_change(change: list[int], resumed: int) -> None:
    """Two agreeing tokens after the change are enough; then drafts continue from there."""
    output = [*FILE[:10], *change, 111, 112]
    draft = drafts_after(output)
    assert draft, "nothing was drafted after the change"
    assert draft == list(range(113, 113 + len(draft)))


def test_drafts_are_short_until_agreement_is_sure_again() -> None:
    lengths = [len(drafts_after([*FILE[:10], 7, *FILE[11 : 11 + n]])) for n in range(1, 7)]
    assert lengths[0] < 8
    assert lengths == sorted(lengths)
    assert lengths[-1] == 8


def test_an_unrelated_output_gets_no_drafts() -> None:
    assert drafts_after([5, 6, 7, 8]) == []


def test_of_equal_places_the_nearest_ahead_is_taken() -> None:
    expected = (50, 51, 60, 1, 50, 51, 70, 2, 50, 51, 80, 3)
    assert drafts_after([50, 51, 60, 1, 9, 50, 51], 1, expected) == [70]


def test_a_request_without_prediction_gets_nothing_and_is_not_remembered() -> None:
    proposer = PredictionProposer()
    context = make_context((make_sequence(PROMPT, [1]), 5), (make_sequence(PROMPT, [1]), 0))
    assert proposer.propose(context).ids == ((), ())
    assert not proposer._followers


def test_release_forgets_predictions() -> None:
    proposer = PredictionProposer()
    sequence = make_sequence(PROMPT, [100], prediction_ids=FILE)
    proposer.propose(make_context((sequence, 4)))
    assert proposer._followers
    proposer.release("r")
    proposer.release("unknown")
    assert not proposer._followers


# Drafts through text, with a drafter that says always the same. The guarded bugs: shadows that
# take each other's pages in one step, a page that is never given back, the target's first token
# read as text.
TOKENS = ["\u0120", "a", "b", "c", "\u00c3", "\u00a9"]
BOS, SPACE, A, B, C, FIRST, SECOND = 0, 2, 3, 4, 5, 6, 7
"""Of the target; FIRST and SECOND are the bytes of one character."""
SAYS = 261
"""Of the draft: b."""


class Parrot:
    """Drafts one token, whatever came before; stands for a draft model."""

    name = "parrot"

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
        return Draft(ids=((SAYS,),) * count)


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
