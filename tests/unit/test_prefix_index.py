"""What the router remembers of replicas, by example."""

import pickle

from tests.unit.router_fakes import index_of, prompt

NAMES = prompt(range(40)).names


def test_pages_count_from_the_first_one_without_a_gap() -> None:
    index = index_of("a", "b", "c")
    index.store("a", NAMES)
    index.store("b", NAMES[:4])
    index.store("c", NAMES[1:])
    assert index.known(NAMES) == {"a": 10, "b": 4}
    index.remove("a", NAMES[6:7])
    assert index.known(NAMES) == {"a": 6, "b": 4}
    assert index.known(NAMES[:2]) == {"a": 2, "b": 2}


def test_a_replica_that_is_gone_is_forgotten_and_stays_so() -> None:
    index = index_of("a", "b")
    index.store("a", NAMES)
    index.drop("a")
    index.store("a", NAMES)
    index.remove("a", NAMES)
    index.clear("a")
    assert index.known(NAMES) == {} and len(index) == 0 and index.replicas == {"b"}


def test_a_replica_that_was_emptied_may_fill_again() -> None:
    index = index_of("a")
    index.store("a", NAMES)
    index.clear("a")
    assert index.known(NAMES) == {}
    index.store("a", NAMES[:1])
    assert index.known(NAMES) == {"a": 1}


def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    index = index_of("a", most_pages=6)
    other = prompt(range(100, 116)).names
    index.store("a", NAMES[:4])
    index.store("a", other)
    assert index.known(NAMES) == {"a": 2} and index.known(other) == {"a": 4}
    index.store("a", NAMES[:2])
    index.store("a", prompt(range(200, 208)).names)
    assert index.known(NAMES) == {"a": 2} and index.known(other) == {"a": 2}


def test_of_a_prompt_longer_than_a_replica_its_beginning_is_kept() -> None:
    index = index_of("a", most_pages=3)
    index.store("a", NAMES)
    assert index.known(NAMES) == {"a": 3} and len(index) == 3


def test_neither_salt_nor_tokens_are_kept() -> None:
    index, salt = index_of("a"), "a very secret salt"
    text = b"tokens as bytes!"
    index.store("a", prompt(list(text), salt).names)
    kept = pickle.dumps(index)
    assert salt.encode() not in kept and text[:8] not in kept
