"""Which replica a request goes to, what the router remembers, and what becomes of a stream, by
example."""

import pickle

from foretoken.kv.pool import PagePool
from foretoken.kv.prefix import PrefixCache
from foretoken.router.choosing import OVERLOAD, RouteReason, choose, rendezvous
from foretoken.router.prompt import RoutedPrompt
from foretoken.router.relay import MOST_RESTARTS, Relay, RelayedRequest
from foretoken.router.relay_messages import (
    Chunk,
    Deliver,
    End,
    Failed,
    Left,
    Outcome,
    Refused,
    RelayAction,
    Restart,
    Routed,
    Seek,
)
from foretoken.router.view import RouteNeeds
from tests.unit.router_fakes import HERE, PAGE, index_of, prompt, view

TOKENS = list(range(100, 141))


def test_a_page_has_the_name_that_the_engine_gives_it() -> None:
    prefix, names = PrefixCache(PagePool(16, PAGE)), list[bytes]()
    prefix.extend_names(names, TOKENS, "tenant", 10)
    routed = RoutedPrompt.of(TOKENS, "tenant", page_size=PAGE)
    assert routed.names == tuple(names) and routed.key == names[0]


def test_a_prompt_below_a_page_has_a_key_and_no_names() -> None:
    short = prompt([1, 2, 3], "a")
    assert short.names == () and short.key == prompt([1, 2, 3], "a").key
    assert short.key != prompt([1, 2, 3], "b").key


def test_one_token_is_always_computed() -> None:
    assert prompt(TOKENS[:8]).hit_tokens(2) == 4
    assert prompt(TOKENS[:9]).hit_tokens(2) == 8


def test_the_longest_prefix_wins_while_it_saves_more_than_its_queue_takes() -> None:
    asked, index = prompt(TOKENS), index_of("one", "two", "three")
    index.store("one", asked.names[:3])
    index.store("two", asked.names[:9])
    busy = [view("one"), view("two", queue_s=0.1), view("three", queue_s=0.05)]
    route = choose(asked, busy, index)
    assert route.replica == busy[1] and route.reason is RouteReason.PREFIX
    assert route.hit_tokens == 36 and abs(route.first_token_s - 0.15) < 1e-9
    assert route.why == (
        "replica two holds 36 of 41 tokens, which saves 0.36 s, and its queue takes 0.1 s; without "
        "them it would take 0.51 s (at most 0.598, 1.3 times the median)"
    )


def test_a_queue_that_takes_longer_than_the_prefix_saves_is_passed_by() -> None:
    asked, index = prompt(TOKENS), index_of("one", "two")
    index.store("two", asked.names[:2])
    route = choose(asked, [view("one"), view("two", queue_s=0.09)], index)
    assert route.replica == view("one") and route.reason is RouteReason.LOAD
    assert "holds 8 of 41 tokens, but its queue takes 0.09 s" in route.why


def test_nobody_above_the_cap_is_taken_for_its_prefix() -> None:
    """The prefix would save 0.4 s, and the queue takes 0.3 s: too long beside idle ones."""
    asked, index = prompt(TOKENS), index_of("one", "two", "three")
    index.store("one", asked.names)
    index.store("two", asked.names[:1])
    views = [view("one", queue_s=0.3), view("two"), view("three")]
    route = choose(asked, views, index)
    assert views[0].wait_s(41) > OVERLOAD * views[1].wait_s(41)
    assert route.replica == views[1] and route.reason is RouteReason.LOAD
    assert "1.3 times the median is 0.533" in route.why


def test_equal_prompts_of_a_tenant_meet_and_tenants_do_not_share_a_place() -> None:
    views, index = [view(str(number)) for number in range(8)], index_of()
    first = choose(prompt(TOKENS, "a"), views, index)
    assert first.reason is RouteReason.HASH and "no replica is known to hold" in first.why
    assert choose(prompt([*TOKENS, 7], "a"), views, index).replica == first.replica
    places = {choose(prompt(TOKENS, str(salt)), views, index).replica for salt in range(40)}
    assert len(places) == 8


def test_a_hash_that_leads_to_a_long_queue_leads_on() -> None:
    asked = prompt(TOKENS)
    first, second, third = rendezvous(asked.key, ["x", "y", "z"])
    views = [view(first, queue_s=5.0), view(second), view(third)]
    route = choose(asked, views, index_of())
    assert route.replica == views[1] and "1 before it wait too long" in route.why


def test_faster_replicas_are_expected_to_answer_sooner() -> None:
    asked, index = prompt(TOKENS), index_of("slow", "fast")
    index.store("slow", asked.names[:4])
    views = [view("slow", prefill_token_s=0.01), view("fast", prefill_token_s=0.001)]
    assert choose(asked, views, index).replica == views[1]


def test_who_may_not_serve_is_counted() -> None:
    other = HERE._replace(kernels="neon")
    views = [view("a", draining=True), view("b"), view("c", fingerprint=other), view("d")]
    needs = RouteNeeds(fingerprint=HERE, without=frozenset("b"))
    assert choose(prompt(TOKENS), views, index_of(), needs).replica == views[3]
    route = choose(prompt(TOKENS), views[:3], index_of(), needs)
    assert route.replica is None and route.reason is RouteReason.NONE
    assert route.why == (
        "none of 3 replicas may serve it: "
        "1 draining, 1 failed this request before, 1 of another arithmetic"
    )
    assert choose(prompt(TOKENS), [], index_of()).why == "there is no replica"


def test_a_stream_without_a_seed_goes_on_with_another_build() -> None:
    views = [view("a", fingerprint=HERE._replace(build="2.0"))]
    assert choose(prompt(TOKENS), views, index_of(), RouteNeeds(precision="int8")).replica
    assert not choose(prompt(TOKENS), views, index_of(), RouteNeeds(precision="bf16")).replica


def test_requests_that_come_at_once_spread() -> None:
    """What a replica was given counts before it reports."""
    views = {name: view(name) for name in "abcd"}
    index = index_of(*views)
    for number in range(200):
        asked = prompt([7] * 8 + [number] * 32)
        route = choose(asked, list(views.values()), index)
        assert route.replica is not None
        name = route.replica.replica_id
        views[name] = views[name].given(asked.tokens - route.hit_tokens)
        index.store(name, asked.names)
    assert sum(one.queued for one in views.values()) == 200
    assert min(one.queued for one in views.values()) >= 40


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


def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    index = index_of("a", most_pages=6)
    other = prompt(range(100, 116)).names
    index.store("a", NAMES[:4])
    index.store("a", other)
    assert index.known(NAMES) == {"a": 2} and index.known(other) == {"a": 4}
    index.store("a", NAMES[:2])
    index.store("a", prompt(range(200, 208)).names)
    assert index.known(NAMES) == {"a": 2} and index.known(other) == {"a": 2}


def test_neither_salt_nor_tokens_are_kept() -> None:
    index, salt = index_of("a"), "a very secret salt"
    text = b"tokens as bytes!"
    index.store("a", prompt(list(text), salt).names)
    kept = pickle.dumps(index)
    assert salt.encode() not in kept and text[:8] not in kept


def started(choices: int = 1, *, repeatable: bool = True, deadline: float = 60.0) -> Relay:
    """A relay whose first attempt runs on replica `a`."""
    relay = Relay(RelayedRequest(choices=choices, repeatable=repeatable, deadline=deadline))
    assert relay.begin().restart is Restart.FIRST
    assert relay.handle(Routed(1, view("a")), 0.0) == ()
    return relay


def sought(actions: tuple[RelayAction, ...]) -> Seek:
    [seek] = actions
    assert isinstance(seek, Seek), seek
    return seek


def ended(actions: tuple[RelayAction, ...]) -> End:
    end = actions[-1]
    assert isinstance(end, End), actions
    return end


def test_before_the_first_token_the_request_goes_anywhere_else() -> None:
    seek = sought(started().handle(Failed(1, "connection reset"), 1.0))
    assert seek.restart is Restart.REPLAY and seek.outputs == {}
    assert seek.needs == RouteNeeds(without=frozenset("a"))
    assert seek.why == (
        "replica a failed (connection reset) before its first token: the request goes elsewhere"
    )


def test_without_a_seed_it_goes_on_in_distribution_and_says_so() -> None:
    relay = started(repeatable=False)
    relay.handle(Chunk(1, 0, 0, (5,)), 1.0)
    seek = sought(relay.handle(Failed(1, "died"), 1.0))
    assert seek.restart is Restart.IN_DISTRIBUTION and "without a seed" in seek.why
    assert seek.needs == RouteNeeds(precision="int8", without=frozenset("a"))
    relay.handle(Routed(2, view("b")), 1.0)
    assert ended(relay.handle(Chunk(2, 0, 1, (6,), "length"), 1.0)).in_distribution


def test_what_was_never_continued_is_not_said_to_be() -> None:
    relay = started(repeatable=False)
    relay.handle(Chunk(1, 0, 0, (5,)), 1.0)
    relay.handle(Failed(1, "died"), 1.0)
    end = ended(relay.handle(Routed(2, None, "none of 1 replicas may serve it: 1 draining"), 1.0))
    assert end.outcome is Outcome.FAILED and not end.in_distribution
    assert end.why == "none of 1 replicas may serve it: 1 draining"


def test_a_request_takes_four_replicas_with_it_at_most() -> None:
    relay = started()
    for attempt in range(1, MOST_RESTARTS + 1):
        seek = sought(relay.handle(Failed(attempt, "died"), 1.0))
        assert len(seek.needs.without) == attempt
        relay.handle(Routed(attempt + 1, view(f"b{attempt}")), 1.0)
    end = ended(relay.handle(Failed(MOST_RESTARTS + 1, "died"), 1.0))
    assert end.attempts == 4 and "after 3 restarts, which is the most" in end.why


def test_after_the_deadline_nothing_is_begun_again() -> None:
    end = ended(started(deadline=10.0).handle(Failed(1, "died"), 12.5))
    assert end.why == "replica a failed (died), 2.5 s after the deadline"


def test_a_refused_request_is_not_tried_elsewhere() -> None:
    end = ended(started().handle(Refused(1, "temperature: got -1"), 1.0))
    assert end.why == "the request was refused: temperature: got -1"


def test_a_client_that_leaves_ends_it_even_between_replicas() -> None:
    relay = started()
    relay.handle(Failed(1, "died"), 1.0)
    assert ended(relay.handle(Left(), 1.0)).outcome is Outcome.ABANDONED
    assert relay.handle(Routed(2, view("b")), 1.0) == ()


def test_a_replica_that_leaves_tokens_out_or_changes_them_has_failed() -> None:
    for wrong in (
        Chunk(1, 0, 3, (9,)),
        Chunk(1, 0, 1, (9, 7)),
        Chunk(1, 0, -1, (5,)),
        Chunk(1, 0, 1, (), "stop"),
        Chunk(1, 4, 0, (5,)),
    ):
        relay = started()
        assert relay.handle(Chunk(1, 0, 0, (5, 6)), 1.0) == (Deliver(0, (5, 6)),)
        assert relay.handle(Chunk(1, 0, 0, (5, 6)), 1.0) == (), "once more"
        assert sought(relay.handle(wrong, 1.0)).restart is Restart.EXACT
        assert relay.outputs == [(5, 6)]
