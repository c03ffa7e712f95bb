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
    RelayEvent,
    Restart,
    Routed,
    Seek,
)
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
        assert sum(need.refusals(views)) == len(views)
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
    assert min(one.queued for one in views.values()) > 0


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

    @rule(who=st.sampled_from("xyz"))
    def clear(self, who: str) -> None:
        self.index.clear(who)
        if who in self.there:
            self.told[who].clear()

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
    behind what it was given. Their chunks come in pieces, twice, late, from the dead, and wrong."""

    @initialize(choices=st.integers(1, 3), repeatable=st.booleans())
    def begin(self, choices: int, repeatable: bool) -> None:
        self.relay = Relay(
            RelayedRequest(choices=choices, repeatable=repeatable, deadline=DEADLINE)
        )
        self.repeatable, self.now = repeatable, 0.0
        self.fresh = count(1000)
        self.answer = [[100 * choice + i for i in range(LENGTH)] for choice in range(choices)]
        self.undisturbed = [list(one) for one in self.answer]
        self.client: list[list[int]] = [[] for _ in range(choices)]
        self.finished = [False] * choices
        self.ends: list[End] = []
        self.seeks: list[Seek] = []
        self.running = False
        self.act((self.relay.begin(),))

    def tell(self, event: RelayEvent) -> tuple[RelayAction, ...]:
        before = list(self.ends)
        actions = self.relay.handle(event, self.now)
        assert not before or not actions, "an action after the end"
        self.act(actions)
        return actions

    def act(self, actions: tuple[RelayAction, ...]) -> None:
        """What a server would do."""
        for action in actions:
            assert not self.ends
            if isinstance(action, Deliver):
                assert not self.finished[action.choice]
                assert action.token_ids or action.finish_reason
                self.client[action.choice] += action.token_ids
                self.finished[action.choice] = action.finish_reason is not None
            elif isinstance(action, Seek):
                self.seek(action)
            else:
                self.ends.append(action)
                self.running = False

    def seek(self, seek: Seek) -> None:
        begun = any(self.client) or any(self.finished)
        self.seeks.append(seek)
        assert seek.attempt == len(self.seeks) <= MOST_RESTARTS + 1
        assert len(seek.needs.without) == seek.attempt - 1
        self.running = False
        if not begun:
            assert seek.restart in (Restart.FIRST, Restart.REPLAY) and not seek.outputs
        else:
            assert self.now < DEADLINE
            assert seek.outputs == {
                choice: tuple(ids)
                for choice, ids in enumerate(self.client)
                if not self.finished[choice]
            }
            assert (seek.restart is Restart.EXACT) == self.repeatable
            assert (seek.needs.fingerprint == HERE) == self.repeatable
        if not self.repeatable and seek.attempt > 1:
            # Another replica goes on as it likes.
            self.answer = [
                [*ids, *(next(self.fresh) for _ in range(LENGTH - len(ids)))] for ids in self.client
            ]
            if not begun:
                self.undisturbed = [list(one) for one in self.answer]

    def chunk(self, attempt: int, choice: int, start: int, length: int) -> Chunk:
        ids = tuple(self.answer[choice][start : start + length])
        ended = start + length >= LENGTH
        return Chunk(attempt, choice, start, ids, "stop" if ended else None)

    @property
    def attempt(self) -> int:
        return len(self.seeks)

    @precondition(lambda self: not self.ends and not self.running)
    @rule()
    def route(self) -> None:
        assert self.tell(Routed(self.attempt, view(f"r{self.attempt}"))) == ()
        self.running = True

    @precondition(lambda self: not self.ends and not self.running and self.attempt > 1)
    @rule(chance=st.integers(0, 5))
    def find_nobody(self, chance: int) -> None:
        if chance == 0:
            [end] = self.tell(Routed(self.attempt, None, "there is no replica"))
            assert isinstance(end, End) and end.outcome is Outcome.FAILED and end.why

    @rule(data=st.data(), length=st.integers(1, 5), back=st.sampled_from((0, 0, 0, 1, 3)))
    def say(self, data: st.DataObject, length: int, back: int) -> None:
        """What comes next, perhaps once more from a little before."""
        choice = data.draw(st.integers(0, len(self.client) - 1))
        start = max(len(self.client[choice]) - back, 0)
        known, running, done = len(self.client[choice]), self.running, self.finished[choice]
        actions = self.tell(self.chunk(self.attempt, choice, start, length + back))
        assert all(not isinstance(action, Seek) for action in actions)
        told = min(start + length + back, LENGTH) if running and not done else known
        assert len(self.client[choice]) == max(told, known)

    @rule(choice=st.integers(0, 2), gap=st.integers(1, 3), length=st.integers(0, 3))
    def leave_out(self, choice: int, gap: int, length: int) -> None:
        choice %= len(self.client)
        start = len(self.client[choice]) + gap
        before = [list(ids) for ids in self.client]
        self.tell(Chunk(self.attempt, choice, start, (7,) * length))
        assert self.client == before

    @rule(choice=st.integers(0, 3), back=st.integers(1, 4))
    def contradict(self, choice: int, back: int) -> None:
        held = self.client[choice] if choice < len(self.client) else []
        if choice < len(self.client) and not held:
            return
        before = [list(ids) for ids in self.client]
        self.tell(Chunk(self.attempt, choice, max(len(held) - back, 0), (-1, -2)))
        assert self.client == before

    @rule(data=st.data(), start=st.integers(0, LENGTH), length=st.integers(0, 4))
    def say_late(self, data: st.DataObject, start: int, length: int) -> None:
        """A replica that was given up goes on."""
        if self.attempt > 1:
            attempt = data.draw(st.integers(1, self.attempt - 1))
            choice = data.draw(st.integers(0, len(self.client) - 1))
            assert self.tell(self.chunk(attempt, choice, start, length)) == ()
            assert self.tell(Failed(attempt, "again")) == ()

    @precondition(lambda self: self.running)
    @rule()
    def fail(self) -> None:
        [action] = self.tell(Failed(self.attempt, "connection reset"))
        over = self.attempt > MOST_RESTARTS or self.now >= DEADLINE
        if isinstance(action, End):
            assert over and action.outcome is Outcome.FAILED and "connection reset" in action.why

    @rule(seconds=st.sampled_from((0.1, 1.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.attempt > 1)
    @rule(refused=st.booleans(), chance=st.integers(0, 8))
    def give_up(self, refused: bool, chance: int) -> None:
        if chance == 0:
            ended, running = bool(self.ends), self.running
            actions = self.tell(Refused(self.attempt, "wrong") if refused else Left())
            if not ended and (running or not refused):
                assert isinstance(actions[-1], End)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        for choice, ids in enumerate(self.client):
            assert ids == self.answer[choice][: len(ids)]
            assert not self.finished[choice] or ids == self.answer[choice]
        assert self.relay.outputs == [tuple(ids) for ids in self.client]
        if self.repeatable:
            assert self.answer == self.undisturbed

    @invariant()
    def there_is_one_end(self) -> None:
        assert len(self.ends) == self.relay.ended <= 1
        for end in self.ends:
            assert (end.outcome is Outcome.COMPLETED) == all(self.finished)
            changed = any(
                ids != before[: len(ids)]
                for ids, before in zip(self.client, self.undisturbed, strict=True)
            )
            assert end.in_distribution == changed
            assert end.attempts <= self.attempt

    def teardown(self) -> None:
        """Whatever came before: a replica that goes on to the end ends it."""
        if hasattr(self, "relay") and not self.ends:
            if not self.running:
                self.route()
            for choice, ids in enumerate(self.client):
                if not self.finished[choice]:
                    self.tell(self.chunk(self.attempt, choice, len(ids), LENGTH))
            assert [end.outcome for end in self.ends] == [Outcome.COMPLETED]
            self.nothing_is_lost_or_doubled()
            self.there_is_one_end()


TestRelaying = Relaying.TestCase
TestRelaying.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


TestRelayingAtLength: Any = pytest.mark.slow(type("TestRelayingAtLength", (TestRelaying,), {}))
TestRelayingAtLength.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
