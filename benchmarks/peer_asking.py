"""One measurement of one engine: which prompts, for how many tokens, and whether it wrote right.

Decoding is timed from the first token to the last.
"""

from dataclasses import dataclass

from peer_cases import Case
from peer_floor import Limits
from peer_setup import Worker
from prompts import CyclePrompts

TAIL = 16
"""Tokens of a prompt that a search keeps, where what stands before changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How an engine is asked."""

    prompts: CyclePrompts
    count: int
    """Groups of prompts, one after the other."""
    tokens: int
    shortened: bool = False
    """Only the tails of prompts: for searches, where first tokens do not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One engine, one turn, summed over the prompts."""

    decode_s: float
    total_s: float
    prefill_s: float
    right: bool
    """Whether every token was the one that the model must write."""
    limits: Limits
    """Of the machine at that moment."""


def groups(case: Case, asking: Asking) -> list[tuple[list[list[int]], int]]:
    """Prompts of the case's size and number, each group with the index of its first answer."""
    found = []
    prompts = asking.prompts
    for first in range(asking.count):
        group = []
        for n in range(case.batch):
            ids = prompts.ids[(first + n) % len(prompts.ids)]
            filling = (ids * (case.prompt_tokens // len(ids) + 1))[: case.prompt_tokens - len(ids)]
            whole = [*filling, *ids]
            cut = asking.shortened and case.may_be_cut
            group.append(whole[-TAIL:] if cut else whole)
        found.append((group, first))
    return found


def measure(
    worker: Worker, case: Case, asking: Asking, limits: Limits, k: int | None = None
) -> Timing:
    """All prompts once.

    llama.cpp keeps back the end of a stream whose bytes are no text: half of it has to come.

    Raises:
        WorkerEnded: it stopped.
    """
    total_s, first_s, right = 0.0, 0.0, True
    for group, first in groups(case, asking):
        answer = worker.ask(group, asking.tokens, k)
        total_s += answer.seconds
        first_s += answer.first_s
        for n, ids in enumerate(answer.token_ids):
            answers = asking.prompts.answers
            expected = answers[(first + n) % len(answers)][: asking.tokens]
            least = asking.tokens // 2 if worker.engine == "llama-cpp" else asking.tokens
            right = right and len(ids) >= least and ids == expected[: len(ids)]
    return Timing(
        decode_s=total_s - first_s,
        total_s=total_s,
        prefill_s=first_s / asking.count,
        right=right,
        limits=limits,
    )
