"""What deciding how far to draft takes of a step, by the clock of the process that decides.

    python benchmarks/never_slower_deciding.py [--sequences 64]

A process of its own: so many requests of the packaged pair, adaptive, and the time in the plan
before each step and in all that learn after it, over the time of the steps. One line of JSON.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from common import make_pair_parser, use_threads

from foretoken import LLM, SamplingParams
from foretoken.config.methods import find_method
from foretoken.types import StepStats
from tools.python_text.heldout import heldout_prompts

T = TypeVar("T")


@dataclass(slots=True)
class _Clock:
    """Seconds of what it wraps, since it was last emptied."""

    seconds: float = 0.0

    def timed(self, function: Callable[..., T]) -> Callable[..., T]:
        def timed(*arguments: Any) -> T:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def measure(llm: LLM, sequences: int, tokens: int) -> dict[str, Any]:
    """Shares of whole steps in which all sequences decode, after a tenth of them."""
    engine, clock = llm._engine, _Clock()
    steps: list[tuple[float, float]] = []

    def note(*arguments: Any) -> None:
        stats: StepStats = arguments[-1]
        if stats.num_prefilled == 0 and stats.num_sampled == sequences:
            steps.append((clock.seconds, stats.total_s + clock.seconds))
        clock.seconds = 0.0

    scheduler = engine.parts.scheduler
    scheduler._plan_drafts = clock.timed(scheduler._plan_drafts)
    observers = [clock.timed(observe) for observe in engine.parts.observers]
    engine.parts = replace(engine.parts, observers=(*observers, note))
    encode = llm.get_tokenizer().encode
    prompts = [
        {"prompt_token_ids": encode(p.text)[:64]} for p in heldout_prompts(sequences, tokens=64)
    ]
    params = [
        SamplingParams(max_tokens=tokens, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(sequences)
    ]
    llm.generate(prompts, params, use_tqdm=False)
    found = np.array(steps[len(steps) // 10 :])
    deciding, whole = found[:, 0], found[:, 1]
    return {
        "steps": len(found),
        "share": float(deciding.sum() / whole.sum()),
        "deciding_us_p50": 1e6 * float(np.median(deciding)),
        "deciding_us_p99": 1e6 * float(np.percentile(deciding, 99)),
        "step_us_p50": 1e6 * float(np.median(whole)),
    }


def main() -> None:
    parser = make_pair_parser(__doc__, 512)
    parser.add_argument("--sequences", type=int, default=64, help="default: %(default)s")
    given = parser.parse_args()
    if given.quick:
        given.tokens = 48
    use_threads(given.threads)
    with LLM(
        "demo",
        speculative_config=dict(find_method("draft_model").demo or {}),
        adaptive_speculation=True,
        kv_cache_memory_bytes=200_000_000,
    ) as llm:
        print(json.dumps(measure(llm, given.sequences, given.tokens)))


if __name__ == "__main__":
    main()
