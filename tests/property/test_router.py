"""Any replicas, prompts, history and events: what the router and a relay always keep to."""

from collections import Counter
from itertools import count, pairwise
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foretoken.router.choosing import OVERLOAD, RouteReason, choose, rendezvous
from foretoken.router.prefix_index import PrefixIndex
from foretoken.router.prompt import RoutedPrompt
from foretoken.router.relay import MOST_RESTARTS, GivenUp, Relay, Restart, WrongProgress
from foretoken.router.view import ReplicaView, RouteNeeds
from foretoken.types.fingerprint import Fingerprint
from tests.unit.router_fakes import HERE, index_of, prompt, view

SECONDS = st.sampled_from((0.0, 0.01, 0.1, 0.5, 3.0)) | st.floats(0.0, 100.0)
PRINTS = (HERE, HERE._replace(kernels="neon"), Fingerprint("2.0", "bf16", "neon"))
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=24)
salts = st.sampled_from((None, "a", "b"))


@st.composite
def replicas(draw: st.DrawFn) -> list[ReplicaView]:
    return [
        ReplicaView(
            replica_id=f"r{number}",
            fingerprint=draw(st.sampled_from(PRINTS)),
            queue_s=draw(SECONDS),
            prefill_token_s=draw(st.sampled_from((0.01, 0.01, 0.002))),
            draining=draw(st.integers(0, 4)) == 0,
        )
        for number in range(draw(st.integers(1, 12)))
    ]


@st.composite
def histories(draw: st.DrawFn) -> PrefixIndex:
    """What some of them were given."""
    index = index_of(*(f"r{number}" for number in range(12)), most_pages=8)
    for _ in range(draw(st.integers(0, 8))):
        replica_id = f"r{draw(st.integers(0, 11))}"
        index.store(replica_id, prompt(draw(tokens), draw(salts)).names)
    return index


needs = st.builds(
    RouteNeeds,
    fingerprint=st.none() | st.sampled_from(PRINTS),
    precision=st.none() | st.just("int8"),
    without=st.frozensets(st.sampled_from([f"r{number}" for number in range(12)]), max_size=4),
)


@pytest.mark.slow
@given(views=replicas(), index=histories(), asked=tokens, salt=salts, need=needs)
@settings(max_examples=400, deadline=None)
def test_only_replicas_that_may_and_none_above_the_cap(
    views: list[ReplicaView], index: PrefixIndex, asked: list[int], salt: str | None, need: Any
) -> None:
    routed = prompt(asked, salt)
    route = choose(routed, views, index, need)
    able = [one for one in views if need.allows(one)]
    assert (route.replica is None) == (not able) == (route.reason is RouteReason.NONE)
    if route.replica is None:
        assert all(need.refusal(one) for one in views)
        return
    assert route.replica in able and not route.replica.draining
    held = index.known(routed.names).get(route.replica.replica_id, 0)
    assert route.hit_tokens == routed.hit_tokens(held) < routed.tokens
    waits, wait_s = [one.wait_s(routed.tokens) for one in able], route.replica.wait_s(routed.tokens)
    if route.reason is RouteReason.PREFIX:
        assert wait_s <= OVERLOAD * median(waits)
    if route.reason is RouteReason.HASH:
        assert wait_s <= OVERLOAD * min(waits)
    # Nobody who holds nothing would have been faster where a prefix or the load decided.
    if route.reason is not RouteReason.HASH:
        assert route.first_token_s <= min(waits) + 1e-9


@pytest.mark.slow
@given(views=replicas(), index=histories(), asked=tokens, salt=salts, data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_order_of_views_does_not_matter(
    views: list[ReplicaView], index: PrefixIndex, asked: list[int], salt: str | None, data: Any
) -> None:
    routed = prompt(asked, salt)
    shuffled = data.draw(st.permutations(views))
    assert choose(routed, shuffled, index) == choose(routed, views, index)


@pytest.mark.slow
@given(first=tokens, second=tokens, index=histories())
@settings(max_examples=200, deadline=None)
def test_tenants_never_see_each_others_prefixes(
    first: list[int], second: list[int], index: PrefixIndex
) -> None:
    """The histories are of other salts, and hold the same tokens often."""
    index.store("r0", prompt(first, "c").names)
    assert index.known(prompt(second, "d").names) == {}
    assert index.known(prompt(first, None).names).keys() <= index.replicas
    shared = set(prompt(first, "c").names) & set(prompt(first, "d").names)
    assert not shared and prompt(first, "c").key != prompt(first, "d").key


@given(ids=st.sets(st.text(min_size=1, max_size=4), min_size=2, max_size=20), keys=st.data())
def test_a_replica_that_leaves_or_joins_moves_its_own_share_only(
    ids: set[str], keys: st.DataObject
) -> None:
    gone = keys.draw(st.sampled_from(sorted(ids)))
    for key in keys.draw(st.lists(st.binary(min_size=1, max_size=16), max_size=20)):
        before, after = rendezvous(key, ids), rendezvous(key, ids - {gone})
        assert after == [one for one in before if one != gone]


@pytest.mark.slow
def test_hashed_prompts_are_spread_evenly_and_few_move() -> None:
    """Of 6,000 prompts on 12 idle replicas each has 500; the shares have a standard deviation of
    21, so that 5 of those are exceeded once in 100,000 choices of the hash."""
    views = [view(f"r{number}") for number in range(12)]
    asked = [prompt([number, 1, 2, 3, 4]) for number in range(6000)]

    def places(among: list[ReplicaView]) -> list[str]:
        routes = [choose(one, among, index_of()) for one in asked]
        return [route.replica.replica_id for route in routes if route.replica]

    everywhere, without = places(views), places(views[1:])
    shares = Counter(everywhere)
    assert all(abs(share - 500) < 5 * 21.4 for share in shares.values()), shares
    moved = [(one, other) for one, other in zip(everywhere, without, strict=True) if one != other]
    assert len(moved) == shares["r0"] and {one for one, _ in moved} == {"r0"}
    assert len({other for _, other in moved}) == 11


@pytest.mark.slow
@given(
    count=st.integers(2, 8),
    kinds=st.lists(st.integers(0, 3), min_size=60, max_size=120),
    length=st.integers(4, 40),
)
@settings(max_examples=60, deadline=None)
def test_no_replica_starves_and_none_is_buried(count: int, kinds: list[int], length: int) -> None:
    """Prompts of a few kinds come while nothing ends. Whoever was given one had a wait below the
    cap, or the first token first; so no queue is far above the shortest."""
    views = {f"r{number}": view(f"r{number}") for number in range(count)}
    index = index_of(*views)
    for kind in kinds:
        asked = prompt([kind] * length)
        route = choose(asked, list(views.values()), index)
        assert route.replica is not None
        replica_id = route.replica.replica_id
        views[replica_id] = views[replica_id].given(asked.tokens - route.hit_tokens)
        index.store(replica_id, asked.names)
    waits = [one.wait_s(length) for one in views.values()]
    assert max(waits) <= OVERLOAD * median(waits) + length * 0.01 + 1e-9
    assert min(one.queue_s for one in views.values()) > 0


class Remembering(RuleBasedStateMachine):
    """The index against what it was told, in any order."""

    MOST = 6

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.MOST)
        self.there: set[str] = set()
        self.told: dict[str, set[bytes]] = {}
        self.removed = False

    @rule(who=st.sampled_from("xyz"))
    def add(self, who: str) -> None:
        self.index.add(who)
        self.there.add(who)
        self.told.setdefault(who, set())

    @rule(who=st.sampled_from("xyz"), ids=tokens, salt=salts)
    def store(self, who: str, ids: list[int], salt: str | None) -> None:
        names = prompt(ids, salt).names
        self.index.store(who, names)
        if who in self.there:
            self.told[who].update(names)
            # What was told last is known, as far as a replica has pages.
            assert self.index.known(names).get(who, 0) == min(len(names), self.MOST)

    @rule(who=st.sampled_from("xyz"), ids=tokens, salt=salts)
    def remove(self, who: str, ids: list[int], salt: str | None) -> None:
        names = prompt(ids, salt).names[-1:]
        self.index.remove(who, names)
        self.removed = True
        self.told.get(who, set()).difference_update(names)

    @rule(who=st.sampled_from("xyz"))
    def drop(self, who: str) -> None:
        self.index.drop(who)
        self.there.discard(who)
        self.told.pop(who, None)

    @rule(ids=tokens, salt=salts)
    def ask(self, ids: list[int], salt: str | None) -> None:
        names = prompt(ids, salt).names
        for who, pages in self.index.known(names).items():
            assert who in self.there and set(names[:pages]) <= self.told[who]

    @invariant()
    def bounded(self) -> None:
        assert len(self.index) <= self.MOST * len(self.there)
        assert self.index.replicas == self.there


TestRemembering = Remembering.TestCase
TestRemembering.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@given(ids=st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=10))
@settings(max_examples=100, deadline=None)
def test_every_known_page_can_be_found(ids: list[list[int]]) -> None:
    """Without removals no page stays whose beginning was forgotten."""
    index = index_of("x", most_pages=7)
    prompts = [RoutedPrompt.of([*one, 9], None, page_size=2) for one in ids]
    for one in prompts:
        index.store("x", one.names)
    found: set[bytes] = set()
    for one in prompts:
        found.update(one.names[: index.known(one.names).get("x", 0)])
    assert len(found) == len(index) <= 7
    assert all(len(name) == 16 for name in found)
    assert all(one.names != other.names or one == other for one, other in pairwise(prompts))


DEADLINE = 50.0
LENGTH = 9


class Relaying(RuleBasedStateMachine):
    """Replicas write the answer that a request has; without a seed each writes one of its own
    behind what it was given. What they say comes in pieces, and is wrong at times."""

    @initialize(choices=st.integers(1, 3), repeatable=st.booleans())
    def begin(self, choices: int, repeatable: bool) -> None:
        self.relay = Relay(choices=choices, repeatable=repeatable, deadline=DEADLINE)
        self.repeatable, self.now, self.attempt = repeatable, 0.0, 1
        self.fresh = count(1000)
        self.answer = [[100 * choice + i for i in range(LENGTH)] for choice in range(choices)]
        self.undisturbed = [list(one) for one in self.answer]
        self.client: list[list[int]] = [[] for _ in range(choices)]
        self.finished = [False] * choices
        self.over = False

    def gained(self, choice: int, length: int) -> tuple[int, tuple[int, ...], str | None]:
        """What comes next of a choice."""
        start = len(self.client[choice])
        ids = tuple(self.answer[choice][start : start + length])
        return choice, ids, "stop" if start + length >= LENGTH else None

    @precondition(lambda self: not self.over)
    @rule(data=st.data(), length=st.integers(0, 5))
    def say(self, data: st.DataObject, length: int) -> None:
        left = [choice for choice, done in enumerate(self.finished) if not done]
        choices = data.draw(st.lists(st.sampled_from(left), unique=True)) if left else []
        gained = [self.gained(choice, length) for choice in choices]
        self.relay.take(gained)
        for choice, ids, end in gained:
            self.client[choice] += ids
            self.finished[choice] = end is not None

    @precondition(lambda self: not self.over)
    @rule(choice=st.integers(-2, 4), length=st.integers(0, 3), first=st.integers(0, 2))
    def say_what_cannot_be(self, choice: int, length: int, first: int) -> None:
        """What is right beside it does not count either; the invariants look."""
        if choice in range(len(self.client)) and not self.finished[choice]:
            return
        first %= len(self.client)
        right = [] if self.finished[first] else [self.gained(first, 2)]
        with pytest.raises(WrongProgress):
            self.relay.take([*right, (choice, (7,) * length, None)])

    @precondition(lambda self: not self.over)
    @rule()
    def fail(self) -> None:
        begun = any(self.client) or any(self.finished)
        replica = view(f"r{self.attempt}")
        try:
            seek = self.relay.fail(replica, "connection reset", self.now)
        except GivenUp as why:
            self.over = True
            assert self.attempt > MOST_RESTARTS or self.now >= DEADLINE
            assert "connection reset" in str(why)
            return
        assert self.now < DEADLINE and self.attempt <= MOST_RESTARTS
        assert len(seek.needs.without) == self.attempt and not seek.needs.allows(replica)
        self.attempt += 1
        if not begun:
            assert seek.restart is Restart.REPLAY
        else:
            assert (seek.restart is Restart.EXACT) == self.repeatable
            assert (seek.needs.fingerprint == HERE) == self.repeatable
            assert (seek.needs.precision == HERE.precision) != self.repeatable
        if not self.repeatable:
            # Another replica goes on as it likes.
            self.answer = [
                [*ids, *(next(self.fresh) for _ in range(LENGTH - len(ids)))] for ids in self.client
            ]
            if not begun:
                self.undisturbed = [list(one) for one in self.answer]

    @rule(seconds=st.sampled_from((0.1, 1.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        for choice, ids in enumerate(self.client):
            assert ids == self.answer[choice][: len(ids)]
            assert not self.finished[choice] or ids == self.answer[choice]
        there = zip(self.client, self.finished, strict=True)
        assert self.relay.outputs == [(tuple(ids), done) for ids, done in there]
        assert self.relay.begun == (any(self.client) or any(self.finished))
        assert self.relay.complete == all(self.finished)
        if self.repeatable:
            assert self.answer == self.undisturbed

    def teardown(self) -> None:
        """Whatever came before: a replica that goes on to the end ends it."""
        if hasattr(self, "relay") and not self.over:
            for choice, done in enumerate(self.finished):
                if not done:
                    self.relay.take([self.gained(choice, LENGTH)])
            assert self.relay.complete
            assert [list(ids) for ids, _ in self.relay.outputs] == self.answer


TestRelaying = Relaying.TestCase
TestRelaying.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


TestRelayingAtLength: Any = pytest.mark.slow(type("TestRelayingAtLength", (TestRelaying,), {}))
TestRelayingAtLength.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
