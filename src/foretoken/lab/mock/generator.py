"""What the mock server writes and when: words from a hash, in steps whose time a law gives.

`MockModel` is a language of 32 words: the same prompt and history give the same logits, so that
greedy and seeded texts can be compared; `skew` changes the distribution a little, as a lossy server
would. `MockEngine` computes nothing and batches continuously as real engines do: all running
requests take part in a step, which takes `step_s` plus `row_s` per further row, and gives each one
token and its accepted drafts. What it notes (`Timing`) is the truth that the client's numbers are
held against.
"""

import asyncio
import hashlib
import random
import struct
from collections import deque
from dataclasses import dataclass

import numpy as np

from foretoken.lab.http.timed import now
from foretoken.lab.stats.intervals import Floats

WORDS = tuple(
    " the of and to in is it you that he was for on are with as his they be at one have this from"
    " or had by hot but some what there".split()
)


def _hash(*parts: object) -> int:
    text = "\x1f".join(map(str, parts)).encode()
    return int(struct.unpack("<Q", hashlib.blake2b(text, digest_size=8).digest())[0])


CONTEXTS = 8
"""Prompts fall into so many kinds, so that tables can be kept."""


class MockModel:
    """Logits of the next word after the last one."""

    def __init__(self, seed: int = 0, skew: float = 0.0) -> None:
        """With `skew` above 0, what is sampled is not what logprobs say."""
        self.seed, self.skew = seed, skew
        self._tables: dict[tuple[int, int], Floats] = {}

    def logits(self, prompt: str, last: int) -> Floats:
        """Logits (32) after word `last` (-1 at the start)."""
        return self._logits(_hash(prompt) % CONTEXTS, last)

    def _logits(self, context: int, last: int) -> Floats:
        found = self._tables.get((context, last))
        if found is None:
            rng = np.random.default_rng(_hash(self.seed, context, last))
            found = self._tables[context, last] = rng.normal(0.0, 2.0, len(WORDS))
        return found

    def _next_word(self, context: int, last: int, temperature: float, noise: float) -> int:
        """A word by inverse transform from `noise` in [0, 1); the likeliest at temperature 0."""
        logits = self._logits(context, last)
        if temperature == 0.0:
            best = np.argsort(-logits)
            return int(best[1 if noise < self.skew else 0])
        chances = np.exp((logits - logits.max()) / (temperature * (1.0 - 0.5 * self.skew)))
        sums = np.cumsum(chances)
        return int(np.searchsorted(sums, noise * sums[-1]))

    def write(self, prompt: str, count: int, temperature: float, seed: int) -> list[int]:
        """`count` words; equal seeds write equal texts."""
        rng = np.random.default_rng(_hash("noise", seed))
        words: list[int] = []
        context = _hash(prompt) % CONTEXTS
        last = -1
        for noise in rng.random(count):
            last = self._next_word(context, last, temperature, float(noise))
            words.append(last)
        return words

    def top(self, prompt: str, last: int, count: int) -> dict[str, float]:
        """The `count` likeliest words with their log-probabilities."""
        logits = self.logits(prompt, last)
        logs = logits - logits.max()
        logs = logs - np.log(np.exp(logs).sum())
        return {" " + WORDS[i]: float(logs[i]) for i in np.argsort(-logs)[:count]}


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
        """Ask for `total` tokens, each draft accepted with chance `alpha`."""
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
        """Draw this start's speed."""
        self.law = law
        self._rng = random.Random(law.seed)
        self.pace = max(0.2, 1.0 + self._rng.gauss(0.0, law.restart_sd))
        self.waiting: deque[MockJob] = deque()
        self.running: list[MockJob] = []
        self._wake = asyncio.Event()
        self.num_drafts = self.num_drafted = self.num_accepted = self.num_tokens = 0
        self.per_position = [0] * law.k

    def submit(self, request_id: str, total: int, temperature: float) -> MockJob:
        """Queue a request of `total` tokens; its tokens come through `deltas`, 0 at its end."""
        alpha = self.law.alpha + self.law.alpha_per_temperature * temperature
        alpha = min(0.98, max(0.02, self._rng.gauss(alpha, self.law.alpha_spread)))
        job = MockJob(request_id, total, alpha)
        job.prefill_left_s = self.law.prefill_s * self.pace
        self.waiting.append(job)
        self._wake.set()
        return job

    def abort(self, job: MockJob) -> None:
        """Forget a request whose client has gone."""
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
        step = self.law.step_s + self.law.row_s * (rows - 1) + self.law.draft_s * self.law.k
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
            self.per_position[accepted] += 1
            accepted += 1
        self.num_drafts += 1
        self.num_drafted += k
        self.num_accepted += accepted
        job.accepted.append(accepted)
        job.drafted.append(k)
        return accepted
