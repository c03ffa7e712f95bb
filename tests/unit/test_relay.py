"""What becomes of a stream when replicas fail, by example."""

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
from tests.unit.router_fakes import HERE, view


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


def test_a_stream_without_failures_passes_through() -> None:
    relay = started()
    assert relay.handle(Chunk(1, 0, 0, (5, 6)), 1.0) == (Deliver(0, (5, 6)),)
    last = relay.handle(Chunk(1, 0, 2, (7,), "stop"), 1.0)
    assert last[0] == Deliver(0, (7,), "stop")
    end = ended(last)
    assert (end.outcome, end.attempts, end.in_distribution) == (Outcome.COMPLETED, 1, False)
    assert relay.ended and relay.outputs == [(5, 6, 7)]
    assert relay.handle(Failed(1, "late"), 2.0) == ()


def test_before_the_first_token_the_request_goes_anywhere_else() -> None:
    seek = sought(started().handle(Failed(1, "connection reset"), 1.0))
    assert seek.restart is Restart.REPLAY and seek.outputs == {}
    assert seek.needs == RouteNeeds(without=frozenset("a"))
    assert seek.why == (
        "replica a failed (connection reset) before its first token: the request goes elsewhere"
    )


def test_begun_streams_go_on_where_the_arithmetic_is_the_same() -> None:
    relay = started(choices=3)
    relay.handle(Chunk(1, 0, 0, (5, 6)), 1.0)
    relay.handle(Chunk(1, 1, 0, (7,), "stop"), 1.0)
    seek = sought(relay.handle(Failed(1, "died"), 1.0))
    assert seek.restart is Restart.EXACT and seek.needs.fingerprint == HERE
    assert seek.outputs == {0: (5, 6), 2: ()}
    assert relay.handle(Chunk(1, 0, 2, (9,)), 1.0) == ()  # the dead one's last words
    assert relay.handle(Chunk(2, 0, 2, (9,)), 1.0) == ()  # nobody was chosen yet
    relay.handle(Routed(2, view("b")), 1.0)
    assert relay.handle(Chunk(2, 0, 2, (8,)), 1.0) == (Deliver(0, (8,)),)


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


def test_tokens_that_come_twice_are_delivered_once() -> None:
    relay = started()
    relay.handle(Chunk(1, 0, 0, (5, 6)), 1.0)
    assert relay.handle(Chunk(1, 0, 0, (5, 6)), 1.0) == ()
    assert relay.handle(Chunk(1, 0, 1, (6, 7)), 1.0) == (Deliver(0, (7,)),)


def test_a_replica_that_leaves_tokens_out_or_changes_them_has_failed() -> None:
    for wrong in (
        Chunk(1, 0, 3, (9,)),
        Chunk(1, 0, 1, (9, 7)),
        Chunk(1, 0, -1, (5,)),
        Chunk(1, 0, 1, (), "stop"),
        Chunk(1, 4, 0, (5,)),
    ):
        relay = started()
        relay.handle(Chunk(1, 0, 0, (5, 6)), 1.0)
        assert sought(relay.handle(wrong, 1.0)).restart is Restart.EXACT
        assert relay.outputs == [(5, 6)]
