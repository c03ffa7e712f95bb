"""The loop's own cost on the shape of a billion parameters.

    python benchmarks/loop.py --models FOLDER [--weights int8]

FOLDER is what make_models.py wrote. With a draft that is always right, the measured speed-up over
plain decoding in the same mode, against AL / (V + k c). V is a target pass over k + 1 rows over one
of 1 row, c a draft pass over a target pass of 1 row, timed as bare forwards, logits included and
sampling not. Wanted: >= 0.95.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    RESAMPLES,
    Ratio,
    announce,
    at_least,
    finish,
    interleave,
    make_parser,
    ratio_of_medians,
    use_threads,
)
from prompts import load_prompts
from runs import Run, acceptance, build, greedy, run_once
from torch import Tensor

from foretoken import LLM
from foretoken.lab.stats.repeats import bootstrap_ends
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.models.draft_model.steps import ModelSteps
from foretoken.proposers.own_kv import KVProposer
from foretoken.runtime.runner import Runner

NUM_DRAFTS = 5
SCHEMES = {"16 bit": None, "int8": "int8", "int4": "int4"}


class Turn(NamedTuple):
    """Seconds of one turn."""

    plain: float
    spec: float
    one: float
    check: float
    draft: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A runner whose first pages hold `context` random tokens, and that nothing else uses."""

    runner: Runner
    context: int
    vocab: int

    def prefill(self) -> None:
        """Write the context's keys and values."""
        self._forward(0, self.context)

    def seconds(self, rows: int, times: int) -> float:
        """Mean time of a pass over `rows` tokens after the context, logits for each."""
        began = time.perf_counter()
        for _ in range(times):
            self._forward(self.context, rows)
        return (time.perf_counter() - began) / times

    def timer(self, rows: int, times: int) -> Callable[[], float]:
        """`seconds`, to be called later."""
        return lambda: self.seconds(rows, times)

    def _forward(self, start: int, rows: int) -> Tensor:
        pages = list(range(-(-(start + rows) // self.runner.page_size)))
        layout = SpanLayout(start=start, num_tokens=rows, page_table=pages)
        ids = random.Random(rows).choices(range(2, self.vocab), k=rows)
        return self.runner.forward([layout], [ids], range(rows)).logits_RV


def target_probe(llm: LLM, context: int) -> Probe:
    """Over the target of an idle LLM."""
    parts = llm._engine.parts
    probe = Probe(runner=parts.runner, context=context, vocab=parts.vocab_size)
    probe.prefill()
    return probe


def draft_probe(llm: LLM, context: int) -> Probe:
    """Over the draft model of an idle LLM with method draft_model."""
    parts = llm._engine.parts
    assert isinstance(parts.proposer, Drafters), parts.proposer.name
    proposer = parts.proposer.members["draft_model"].proposer
    assert isinstance(proposer, KVProposer), proposer.name
    steps = proposer.make_steps([])
    assert isinstance(steps, ModelSteps), type(steps)
    probe = Probe(runner=steps.runner, context=context, vocab=parts.vocab_size)
    probe.prefill()
    return probe


def overhead(settings: argparse.Namespace) -> dict[str, Any]:
    """Speed-up with the always-right draft, and the passes it is made of."""
    folder, k = settings.models, NUM_DRAFTS
    scheme = SCHEMES[settings.weights]
    config = {"method": "draft_model", "model": str(folder / "cycle-draft-100")}
    config |= {"quantization": scheme} if scheme else {}
    target, mode = str(folder / "cycle-target"), settings.batch_invariant
    limits = {"max_model_len": 1024, "batch_invariant": {"on": True, "off": False}.get(mode, mode)}
    limits |= {"quantization": scheme}
    plain = build(target, **limits)
    spec = build(target, config | {"num_speculative_tokens": k}, **limits)
    prompt = load_prompts(folder, "fresh").ids[0]
    params = greedy(settings.tokens)

    def once(llm: LLM) -> Callable[[], Run]:
        return lambda: run_once(llm, prompt, params)

    runs = interleave({"plain": once(plain), "spec": once(spec)}, settings.repeats)
    context = len(prompt) + settings.tokens // 2
    target_pass, draft_pass = target_probe(spec, context), draft_probe(spec, context)
    passes = interleave(
        {
            "one": target_pass.timer(1, settings.times),
            "check": target_pass.timer(k + 1, settings.times),
            "draft": draft_pass.timer(1, settings.times),
        },
        settings.repeats,
    )
    decode = {name: [run.decode_s for run in kept] for name, kept in runs.items()}
    verification = ratio_of_medians(passes["check"], passes["one"])
    draft = ratio_of_medians(passes["draft"], passes["one"])
    length = acceptance(runs["spec"]).length
    turns = zip(decode["plain"], decode["spec"], *passes.values(), strict=True)
    new = settings.tokens - 1
    return {
        "speedup": ratio_of_medians(decode["plain"], decode["spec"]),
        "acceptance_length": length,
        "verification": verification,
        "draft": draft,
        "predicted": length / (verification.value + k * draft.value),
        "efficiency": efficiency([Turn(*times) for times in turns], length),
        "plain_tokens_per_s": new / statistics.median(decode["plain"]),
        "speculative_tokens_per_s": new / statistics.median(decode["spec"]),
        "same": runs["plain"][0].token_ids == runs["spec"][0].token_ids,
    }


def efficiency(turns: Sequence[Turn], length: float) -> Ratio:
    """Measured speed-up over AL / (V + k c), all of them medians over turns."""

    def share(drawn: Sequence[Turn]) -> float:
        plain, spec, one, check, draft = (
            statistics.median(kind) for kind in zip(*drawn, strict=True)
        )
        return (plain / spec) / (length * one / (check + NUM_DRAFTS * draft))

    low, high = bootstrap_ends(turns, share, resamples=RESAMPLES)
    singles = [share([turn]) for turn in turns]
    return Ratio(value=share(turns), low=low, high=high, least=min(singles), most=max(singles),
                 repeats=len(turns))  # fmt: skip


def main() -> None:
    """Measure, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="what make_models.py wrote")
    parser.add_argument("--batch-invariant", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--weights", choices=SCHEMES, default="16 bit", help="of target and draft")
    parser.add_argument("--tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--times", type=int, default=10, help="passes per timing")
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.tokens, settings.times = 2, 24, 2
    use_threads(settings.threads)
    where = announce(settings)
    o = overhead(settings)
    for name, value in o.items():
        print(f"{name}: {value if isinstance(value, Ratio) else round(value, 3)}")
    goals = [at_least("speed-up / (AL / (V + k c))", o["efficiency"].value, 0.95)]
    finish("loop", where, settings, {"overhead": o}, goals)


if __name__ == "__main__":
    main()
