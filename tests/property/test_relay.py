"""A relay under any sequence of events: no token twice, none left out, one end."""

from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from tests.unit.router_fakes import HERE, view

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
