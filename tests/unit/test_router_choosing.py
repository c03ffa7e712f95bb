"""Which replica a request goes to, by example."""

from foretoken.kv.pool import PagePool
from foretoken.kv.prefix import PrefixCache
from foretoken.router.choosing import OVERLOAD, RouteReason, choose, rendezvous
from foretoken.router.prompt import RoutedPrompt
from foretoken.router.view import RouteNeeds
from tests.unit.router_fakes import HERE, PAGE, index_of, prompt, view

TOKENS = list(range(100, 141))


def test_a_page_has_the_name_that_the_engine_gives_it() -> None:
    prefix, names = PrefixCache(PagePool(16, PAGE), identity="model"), list[bytes]()
    prefix.extend_names(names, TOKENS, "tenant", 10)
    routed = RoutedPrompt.of(TOKENS, "tenant", page_size=PAGE, identity="model")
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
