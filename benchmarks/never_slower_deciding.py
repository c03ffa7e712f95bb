"""What deciding how far to draft takes of a step, by the clock of the process that decides.

    python benchmarks/never_slower_deciding.py [--sequences 64]

A process of its own: so many requests of the packaged pair, adaptive, and the time in the plan
before each step and in all that learn after it, over the time of the steps. One line of JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import common  # noqa: F401  (it makes the packages beside it known)
import numpy as np

from foretoken import LLM, SamplingParams
from foretoken.cli.demo import METHODS
from tools.python_text.heldout import heldout_prompts


def measure(llm: LLM, sequences: int, tokens: int) -> dict[str, Any]:
    """Shares of whole steps in which all sequences decode, after a tenth of them."""
    engine, spent, steps = llm._engine, [0.0], list[tuple[float, float]]()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    def note(*arguments: Any) -> None:
        stats = arguments[-1]
        if stats.num_prefilled == 0 and stats.num_sampled == sequences:
            steps.append((spent[0], stats.total_s + spent[0]))
        spent[0] = 0.0

    scheduler = engine.parts.scheduler
    scheduler._plan_drafts = timed(scheduler._plan_drafts)
    observers = [timed(observe) for observe in engine.parts.observers]
    engine.parts = replace(engine.parts, observers=(*observers, note))
    encode = llm.get_tokenizer().encode
    texts = [prompt.text for prompt in heldout_prompts(sequences, tokens=64)]
    prompts = [{"prompt_token_ids": encode(text)[:64]} for text in texts]
    params = [
        SamplingParams(max_tokens=tokens, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(sequences)
    ]
    llm.generate(prompts, params, use_tqdm=False)
    deciding, whole = np.array(steps[len(steps) // 10 :]).T
    return {
        "steps": len(whole),
        "share": float(deciding.sum() / whole.sum()),
        "deciding_us_p50": 1e6 * float(np.median(deciding)),
        "deciding_us_p99": 1e6 * float(np.percentile(deciding, 99)),
        "step_us_p50": 1e6 * float(np.median(whole)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a smoke test, no numbers")
    given = parser.parse_args()
    drafting = dict(METHODS["draft_model"] or {})
    with LLM("demo", speculative_config=drafting, adaptive_speculation=True,
             kv_cache_memory_bytes=200_000_000) as llm:  # fmt: skip
        print(json.dumps(measure(llm, given.sequences, 48 if given.quick else 512)))


if __name__ == "__main__":
    main()
