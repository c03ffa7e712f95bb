"""Suffix look-up: places, paths, the shared cache with its salts and bounds, and the drafter."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.proposers.lookup.suffix.path import PathLimits, Place, RecentTokens, best_path
from foretoken.proposers.lookup.suffix.proposer import SuffixProposer
from foretoken.proposers.lookup.suffix.texts import OWN_LENGTHS, TOKENS_EACH, LocalText, SuffixCache
from foretoken.runtime.sequence import Sequence
from tests.unit.proposing import make_context, make_sequence

EASY = PathLimits(per_match=1.0, least_probability=0.1)
TEXTS = st.lists(st.integers(0, 3), min_size=2, max_size=60)


def place(match: int, tokens: list[int]) -> Place:
    return Place(match, array("I", [9] + tokens), 1, False)


def suffix(cached: int = 10, **changes: float) -> SuffixProposer:
    values = {"max_spec_factor": 1.0, "min_token_prob": 0.1, **changes}
    return SuffixProposer(max_tree_depth=24, max_cached_requests=cached, **values)


def draft(proposer: SuffixProposer, sequence: Sequence, budget: int = 24) -> tuple[int, ...]:
    return proposer.propose(make_context((sequence, budget))).ids[0]


def write(proposer: SuffixProposer, name: str, output: list[int], salt: str | None = None) -> None:
    sequence = make_sequence([90, 91], output[:1], request_id=name, cache_salt=salt)
    draft(proposer, sequence)
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
    assert draft(suffix(0), sequence) == (4, 5, 6)
    loop = make_sequence([1, 2, 1, 2, 1, 2, 1], [2])
    assert draft(suffix(0), loop, 4) == (1, 2, 1, 2)


def test_past_outputs_are_drafted_from() -> None:
    proposer = suffix()
    write(proposer, "old", [50, 51, 52, 53, 54, 55, 56])
    sequence = make_sequence([1], [50, 51, 52, 53], request_id="new")
    assert draft(proposer, sequence) == (54, 55, 56)
    assert draft(suffix(0), sequence) == ()


def test_outputs_that_are_still_growing_help_each_other() -> None:
    proposer = suffix()
    first = make_sequence([1], [50, 51, 52, 53, 54], request_id="first")
    draft(proposer, first)
    second = make_sequence([2], [50, 51, 52], request_id="second")
    assert draft(proposer, second) == (53, 54)


@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), (None, "b"), ("a", None)])
def test_salts_do_not_meet(ours: str | None, theirs: str | None) -> None:
    proposer = suffix()
    write(proposer, "old", [50, 51, 52, 53, 54, 55, 56], theirs)
    context = [50, 51, 52, 53]
    stranger = make_sequence([1], context, request_id="x", cache_salt=ours)
    friend = make_sequence([1], context, request_id="y", cache_salt=theirs)
    assert draft(proposer, stranger) == ()
    assert draft(proposer, friend) == (54, 55, 56)


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
        found.append(bool(draft(proposer, sequence)))
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
