"""What the mock server writes and when: words from a hash, in steps whose time a law gives.

`MockModel` is a language of 32 words: the same prompt and history give the same logits, so that
greedy and seeded texts can be compared; `skew` changes the distribution a little, as a lossy server
would. `MockEngine` computes nothing and batches continuously as real engines do: all running
requests take part in a step, which takes `step_s` plus `row_s` per further row, and gives each one
token and its accepted drafts. What it notes (`Timing`) is the truth that the client's numbers are
held against.
"""

import asyncio
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretoken.control.cost import speculative_step
from foretoken.lab.http.timed import now
from foretoken.lab.measure.workload import WORDS
from foretoken.lab.stats.intervals import Floats
from tests.mock_server.faults import hash_of

_NUMBERS = {word: number for number, word in enumerate(WORDS)}

CONTEXTS = 8
"""Prompts fall into so many kinds, so that tables can be kept."""


@dataclass(frozen=True, slots=True)
class Words:
    """What was written: words by their number, and the logits that each was chosen from."""

    words: list[int]
    logits_T32: list[Floats]


class _Noise(NamedTuple):
    """What one word is drawn with."""

    uniform: float
    gumbel_32: Floats


def _noise(seed: int, count: int) -> Iterator[_Noise]:
    rng = np.random.default_rng(hash_of("noise", seed))
    return map(_Noise, rng.random(count).tolist(), rng.gumbel(size=(count, len(WORDS))))


class MockModel:
    """Logits of the next word after the last one."""

    def __init__(self, seed: int = 0, skew: float = 0.0, rounding: float = 0.0) -> None:
        """With `skew` above 0, what is sampled is not what logprobs say; `rounding` is the standard
        deviation by which every request's logits are off, as those of other batches are."""
        self.seed, self.skew, self.rounding = seed, skew, rounding
        self._tables: dict[tuple[int, int], Floats] = {}

    def place(self, prompt: str) -> tuple[int, int]:
        """The kind of a prompt, and its last word, -1 if it is none of WORDS.

        Words of WORDS at its end are not part of the kind: an answer that is asked to be continued
        goes on as it would have.
        """
        given = prompt.split(" ")
        end = len(given)
        while end > 1 and given[end - 1] in _NUMBERS:
            end -= 1
        last = _NUMBERS[given[-1]] if end < len(given) else -1
        return hash_of(" ".join(given[:end])) % CONTEXTS, last

    def _logits(self, context: int, last: int) -> Floats:
        found = self._tables.get((context, last))
        if found is None:
            rng = np.random.default_rng(hash_of(self.seed, context, last))
            found = self._tables[context, last] = rng.normal(0.0, 2.0, len(WORDS))
        return found

    def draft_logits(self, context: int, last: int) -> Floats:
        """What a model that drafts for this one has: alike, and often wrong."""
        key = (context - CONTEXTS, last)
        found = self._tables.get(key)
        if found is None:
            other = np.random.default_rng(hash_of(self.seed, "draft", context, last))
            own = 0.6 * self._logits(context, last) + 0.8 * other.normal(0.0, 2.0, len(WORDS))
            found = self._tables[key] = own
        return found

    def _next_word(self, logits: Floats, temperature: float, noise: "_Noise") -> int:
        """The likeliest word at temperature 0, else a draw by Gumbel's maximum, which rounding
        turns as seldom as it does in engines."""
        if temperature == 0.0:
            best = np.argsort(-logits)
            return int(best[1 if noise.uniform < self.skew else 0])
        scaled = logits / (temperature * (1.0 - 0.5 * self.skew))
        return int(np.argmax(scaled + noise.gumbel_32))

    def write(
        self,
        prompt: str,
        count: int,
        temperature: float,
        seed: int,
        *,
        request: int = 0,
        unverified: float = 0.0,
    ) -> Words:
        """`count` words; equal seeds write equal texts, up to the rounding of a request.

        Of the words after the first, a share of `unverified` are the draft's.
        """
        written = Words([], [])
        context, last = self.place(prompt)
        luck = np.random.default_rng(hash_of("rounding", request))
        for number, noise in enumerate(_noise(seed, count)):
            logits = self._logits(context, last)
            if self.rounding:
                logits = logits + luck.normal(0.0, self.rounding, len(WORDS))
            drafted = bool(unverified) and number > 0 and luck.random() < unverified
            chosen = self.draft_logits(context, last) if drafted else logits
            last = self._next_word(chosen, temperature, noise)
            written.words.append(last)
            written.logits_T32.append(logits)
        return written


def log_chances(logits: Floats) -> Floats:
    logs = logits - logits.max()
    return np.asarray(logs - np.log(np.exp(logs).sum()), np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MockLaw:
    """How fast and how well the mock drafts; seconds."""

    step_s: float = 0.004
    row_s: float = 0.0
    """More per row of a step beyond the first; rows are running requests times 1 + k."""
    prefill_s: float = 0.002
    """Before a request's first token, once it is admitted."""
    k: int = 0
    """Draft tokens per step; 0: no speculation."""
    draft_s: float = 0.0
    """Per draft token of a step."""
    alpha: float = 0.7
    """Chance of each draft token, at temperature 0."""
    alpha_per_temperature: float = -0.3
    """Change of that chance per unit of temperature."""
    alpha_spread: float = 0.0
    """Standard deviation of requests' own chances."""
    max_running: int = 256
    restart_sd: float = 0.0
    """Every start of the mock is slower or faster by this share."""
    seed: int | None = None


class MockJob:
    """One request on its way; its tokens per step come through `deltas`."""

    def __init__(self, request_id: str, total: int, alpha: float) -> None:
        self.request_id, self.total, self.alpha = request_id, total, alpha
        self.deltas: asyncio.Queue[int] = asyncio.Queue()
        self.emitted = 0
        self.prefill_left_s = self.first_s = self.last_s = 0.0
        self.drafted: list[int] = []
        self.accepted: list[int] = []


@dataclass(frozen=True, slots=True)
class Timing:
    """When the tokens of one request left, on the monotonic clock."""

    request_id: str
    received_s: float
    first_s: float
    last_s: float
    tokens: int


class MockEngine:
    """Runs jobs in steps; one task."""

    def __init__(self, law: MockLaw) -> None:
        self.law = law
        self._rng = random.Random(law.seed)
        self.pace = max(0.2, 1.0 + self._rng.gauss(0.0, law.restart_sd))
        self.waiting: deque[MockJob] = deque()
        self.running: list[MockJob] = []
        self._wake = asyncio.Event()
        self.num_drafts = self.num_drafted = self.num_accepted = self.num_tokens = 0
        self.per_position = [0] * law.k

    def submit(self, request_id: str, total: int, temperature: float) -> MockJob:
        alpha = self.law.alpha + self.law.alpha_per_temperature * temperature
        alpha = min(0.98, max(0.02, self._rng.gauss(alpha, self.law.alpha_spread)))
        job = MockJob(request_id, total, alpha)
        job.prefill_left_s = self.law.prefill_s * self.pace
        self.waiting.append(job)
        self._wake.set()
        return job

    def abort(self, job: MockJob) -> None:
        job.total = 0

    async def run(self) -> None:
        """Step for ever."""
        free_at = now()
        while True:
            self._admit()
            if not self.running:
                self._wake.clear()
                await self._wake.wait()
                free_at = now()
                continue
            # Timers are up to a millisecond late; the next step makes up for a part of it.
            step = self._step_time()
            free_at = max(free_at, now() - min(0.002, 0.3 * step)) + step
            await asyncio.sleep(max(0.0, free_at - now()))
            self._emit(now())

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.law.max_running:
            self.running.append(self.waiting.popleft())

    def _step_time(self) -> float:
        prefills = sum(job.prefill_left_s for job in self.running)
        for job in self.running:
            job.prefill_left_s = 0.0
        rows = len(self.running) * (1 + self.law.k)
        target_s = self.law.step_s + self.law.row_s * (rows - 1)
        step = speculative_step(target_s, self.law.draft_s, self.law.k)
        return step * self.pace + prefills

    def _emit(self, at: float) -> None:
        for job in self.running:
            count = min(1 + self._accept(job), job.total - job.emitted)
            if count > 0:
                job.first_s = job.first_s or at
                job.last_s = at
                job.emitted += count
                self.num_tokens += count
                job.deltas.put_nowait(count)
            if job.emitted >= job.total:
                job.deltas.put_nowait(0)
        self.running = [job for job in self.running if job.emitted < job.total]

    def _accept(self, job: MockJob) -> int:
        k = min(self.law.k, job.total - job.emitted - 1)
        if k <= 0 or job.emitted == 0:
            return 0
        accepted = 0
        while accepted < k and self._rng.random() < job.alpha:
            accepted += 1
        self.num_drafts += 1
        self.num_drafted += k
        self.num_accepted += accepted
        job.accepted.append(accepted)
        job.drafted.append(k)
        return accepted
