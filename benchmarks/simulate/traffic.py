"""Who asks for what and when, and which drafts would be right.

Whether the draft at an output position is right is drawn once for each request, so that all arms
that serve a traffic are given the same answers to write, and differ by what they do alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import ConfigError
from foretoken.lab.measure.workload import Item, load_workload
from foretoken.types import Request, SamplingParams

END_TOKEN, TEXT_TOKEN = 1, 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChance:
    """How often a drafter is right about a class of requests."""

    chance: float
    """Of a first draft."""
    deeper: float = 1.0
    """What the chance is multiplied by for each draft before it."""
    by_depth: tuple[float, ...] = ()
    """Instead: the chances of draft 1, 2, ... where all before are right; the last one goes on."""
    spread: float = 0.0
    """Standard deviation between requests, of the logarithm of the odds."""
    later: tuple[tuple[int, float], ...] = ()
    """From these output tokens on it is another: (first token, chance)."""
    found: float = 1.0
    """Of look-ups: share of the tokens at which anything is found."""

    def factor(self, depth: int) -> float:
        """The chance with so many drafts before it, over that of a first one."""
        if not self.by_depth:
            return self.deeper**depth
        return self.by_depth[min(depth, len(self.by_depth) - 1)] / self.by_depth[0]

    def by_position(self, length: int, random: np.random.Generator) -> NDArray[np.float64]:
        """The chance at each output position of one request."""
        chances = np.full(length, self.chance)
        for first, chance in self.later:
            chances[first:] = chance
        if self.spread:
            odds = np.clip(chances, 1e-6, 1 - 1e-6)
            odds = odds / (1 - odds) * np.exp(self.spread * random.standard_normal())
            chances = odds / (1 + odds)
        return chances


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """Requests that are alike."""

    name: str = "all"
    share: float = 1.0
    """Of all requests."""
    prompt: int = 128
    """Tokens of a prompt, on average."""
    output: int = 128
    """Tokens of an answer, on average."""
    varied: bool = True
    """Lengths differ: prompts by half, answers geometrically; else all are alike."""
    chances: Mapping[str, DraftChance] = field(default_factory=dict)
    """By drafter."""
    temperature: float = 0.0
    salt: str | None = None
    forced: float = 0.0
    """Share of the answer that a JSON schema leaves no choice about; 0: no schema."""
    forced_run: int = 4
    """Tokens of such a place, on average."""


class RecordedRequest(NamedTuple):
    """One request of a recorded workload."""

    arrival: float | None
    """None, as of all others: the clients decide."""
    prompt: int
    output: int
    """Its `max_tokens` too: the answer is as long as it may be."""


@final
class SimulatedRequest:
    """One request and its answer: how long, and which drafts of it would be right."""

    def __init__(
        self,
        kind: RequestClass,
        index: int,
        seed: int,
        recorded: RecordedRequest | None = None,
    ) -> None:
        """Draw it, but for what was recorded: the same for the same seed and index."""
        random = np.random.default_rng((seed, index))
        self.kind, self.index = kind, index
        self.prompt, length = kind.prompt, kind.output
        if kind.varied:
            self.prompt = max(int(kind.prompt * random.uniform(0.5, 1.5)), 1)
            length = int(random.geometric(1 / kind.output))
        self.length = min(length, 8 * kind.output)
        most = max(16 * kind.output, 2 * self.length)
        if recorded is not None:
            self.prompt, self.length = recorded.prompt, recorded.output
            most = self.length
        self._max_tokens = most
        self._found: dict[str, NDArray[np.bool_]] = {}
        self._draws: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        for name, law in kind.chances.items():
            chances = law.by_position(self.length, random)
            self._draws[name] = chances, random.random(self.length)
            self._found[name] = random.random(self.length) < law.found
        self.forced = _runs(kind, self.length, random)

    def request(self, arrival: float) -> Request:
        """What the scheduler is given at that time."""
        kind = self.kind
        return Request(
            request_id=f"{kind.name}-{self.index}",
            prompt_token_ids=(TEXT_TOKEN,) * self.prompt,
            params=SamplingParams(
                temperature=kind.temperature,
                max_tokens=None,
                structured_outputs={"json_object": True} if kind.forced else None,
            ),
            seed=self.index,
            max_tokens=self._max_tokens,
            stop_ids=frozenset({END_TOKEN}),
            arrival=arrival,
            cache_salt=kind.salt,
        )

    def accepted(self, drafter: str, done: int, drafted: int) -> int:
        """Of so many drafts after `done` output tokens, how many are right in turn."""
        if drafter not in self._draws:
            return 0
        law = self.kind.chances[drafter]
        chances, draws = self._draws[drafter]
        most = min(drafted, self.length - done)
        for depth in range(most):
            if draws[done + depth] >= chances[done + depth] * law.factor(depth):
                return depth
        return most

    def finds(self, drafter: str, done: int) -> bool:
        """Whether a look-up finds anything after `done` output tokens."""
        found = self._found.get(drafter)
        return found is not None and done < self.length and bool(found[done])

    def tokens(self, done: int, count: int) -> tuple[int, ...]:
        """What the target says after `done` output tokens, beyond the end as well."""
        before = min(count, self.length - done - 1)
        after = count - before - 1
        return (TEXT_TOKEN,) * before + ((END_TOKEN,) + (TEXT_TOKEN,) * after if after >= 0 else ())


def _runs(kind: RequestClass, length: int, random: np.random.Generator) -> NDArray[np.int64]:
    """At each output position, how many tokens from there on are forced by a schema."""
    left = np.zeros(length + 1, np.int64)
    if not kind.forced:
        return left
    begins = kind.forced / (1.0 - kind.forced) / kind.forced_run
    position = 0
    while position < length:
        if random.random() < begins:
            run = min(int(random.geometric(1 / kind.forced_run)), length - position)
            left[position : position + run] = np.arange(run, 0, -1)
            position += run
        position += 1
    return left


def recorded_requests(path: Path) -> tuple[RecordedRequest, ...]:
    """Arrivals and lengths of a workload file, as `foretoken lab record` writes one: a word of a
    prompt is a token, and an answer is as long as it may be.

    Raises:
        ConfigError: it cannot be read, or does not say when requests arrived.
    """
    items, _ = load_workload(path)
    arrivals = [item.arrival_s for item in items if item.arrival_s is not None]
    if len(arrivals) < len(items):
        raise ConfigError("--workload", str(path), "a file with arrival_s in every line")
    return tuple(
        RecordedRequest(at - arrivals[0], _words(item), item.max_tokens)
        for item, at in zip(items, arrivals, strict=True)
    )


def _words(item: Item) -> int:
    """Words of a prompt or of a conversation."""
    texts = [item.prompt, *(str(message.get("content", "")) for message in item.messages)]
    return max(sum(len(text.split()) for text in texts), 1)


Clients = Callable[[float], int]
"""How many requests are in flight at a time."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of some classes, by a number of clients or by times of arrival."""

    classes: tuple[RequestClass, ...]
    requests: int
    """How many in all."""
    clients: int | Clients = 1
    """Each asks again when it was answered; a function of the time where they come and go."""
    rate: float = 0.0
    """Requests per second that arrive whoever waits (Poisson); 0: the clients decide."""
    recorded: tuple[RecordedRequest, ...] = ()
    """When they arrive and how long they are, as it was recorded; empty: the rate or the clients
    decide, and lengths are drawn."""
    seed: int = 0

    def draw(self) -> list[SimulatedRequest]:
        """All requests, in order of arrival."""
        shares = np.array([kind.share for kind in self.classes])
        # Classes come in turn rather than by chance: a short run has its shares exactly.
        debts, found = np.zeros(len(shares)), []
        for index in range(self.requests):
            debts += shares / shares.sum()
            kind = int(debts.argmax())
            debts[kind] -= 1.0
            given = self.recorded[index] if self.recorded else None
            found.append(SimulatedRequest(self.classes[kind], index, self.seed, given))
        return found

    def times(self) -> list[float]:
        """When they arrive; empty where the clients decide."""
        arrivals = [one.arrival for one in self.recorded if one.arrival is not None]
        if arrivals:
            return arrivals
        if not self.rate:
            return []
        gaps = np.random.default_rng((self.seed, 1 << 20)).exponential(1 / self.rate, self.requests)
        times: list[float] = np.cumsum(gaps).tolist()
        return times

    def in_flight(self, now: float) -> int:
        return self.clients(now) if callable(self.clients) else self.clients
