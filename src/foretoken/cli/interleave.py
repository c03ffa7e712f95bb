"""Runs the same prompts through several LLMs in turns, so that drift of the machine hits all alike.

Owns the order and the clock. Knows nothing about what is compared; one request at a time.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.types import CompletionOutput, SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things compared."""

    name: str
    llm: "LLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and how they are continued."""

    name: str
    prompts: tuple[str, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request of one arm."""

    arm: str
    workload: str
    prompt_index: int
    repeat: int
    seconds: float
    """From call to return, tokenizing included."""
    output: CompletionOutput

    @property
    def seconds_per_token(self) -> float:
        """Seconds per output token."""
        return self.seconds / max(1, len(self.output.token_ids))


def interleave(arms: Sequence[Arm], workload: Workload, repeat: int) -> Iterator[Run]:
    """Every prompt through every arm once; who goes first rotates with prompt and repeat."""
    for index, prompt in enumerate(workload.prompts):
        shift = (index + repeat) % len(arms)
        for arm in (*arms[shift:], *arms[:shift]):
            began = time.perf_counter()
            [result] = arm.llm.generate(prompt, workload.params, use_tqdm=False)
            yield Run(
                arm=arm.name,
                workload=workload.name,
                prompt_index=index,
                repeat=repeat,
                seconds=time.perf_counter() - began,
                output=result.outputs[0],
            )


def warm_up(arms: Sequence[Arm], workload: Workload) -> None:
    """One unmeasured request per arm."""
    for arm in arms:
        arm.llm.generate(workload.prompts[0], workload.params, use_tqdm=False)
