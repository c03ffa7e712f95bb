"""The loop's own cost on the shape of a billion parameters.

    python benchmarks/loop.py --models FOLDER [--parts overhead batch shares]

FOLDER is what make_models.py wrote.
overhead: with a draft that is always right, the measured speed-up over plain decoding in the same
    mode, against AL / (V + k c). V is a target pass over k + 1 rows over one of 1 row, c a draft
    pass over a target pass of 1 row, timed as bare forwards. Wanted: >= 0.95. `--weights` gives
    target and draft int8 or int4 weights.
batch: decoding throughput of 8 sequences over that of 1 at context 256. Wanted: >= 5.
shares: where a plain step's time goes at batch 1 and 16, context 1,024. Recorded.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    RESAMPLES,
    Goal,
    Ratio,
    announce,
    at_least,
    finish,
    interleave,
    make_parser,
    ratio_of_medians,
    use_threads,
)
from forwards import draft_probe, target_probe
from prompts import load_prompts
from runs import Run, acceptance, build, greedy, run_once
from step_shares import StepShares, measure_shares

from foretoken import LLM
from foretoken.lab.stats.repeats import bootstrap_ends

PARTS = ("overhead", "batch", "shares")
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
class Overhead:
    """The loop against what its forward passes alone would allow."""

    speedup: Ratio
    acceptance_length: float
    verification: Ratio
    """V."""
    draft: Ratio
    """c."""
    predicted: float
    efficiency: Ratio
    """speedup / predicted, its interval by drawing turns of all five timings again."""
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    same: bool
    """Whether both wrote the same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Decoding throughput, prefill excluded."""

    tokens_per_s: dict[str, float]
    ratio: Ratio


def overhead(settings: argparse.Namespace) -> Overhead:
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
    speedup = ratio_of_medians(decode["plain"], decode["spec"])
    verification = ratio_of_medians(passes["check"], passes["one"])
    draft = ratio_of_medians(passes["draft"], passes["one"])
    length = acceptance(runs["spec"]).length
    predicted = length / (verification.value + k * draft.value)
    turns = [
        Turn(*times)
        for times in zip(decode["plain"], decode["spec"], *passes.values(), strict=True)
    ]
    new = settings.tokens - 1
    return Overhead(
        speedup=speedup,
        acceptance_length=length,
        verification=verification,
        draft=draft,
        predicted=predicted,
        efficiency=efficiency(turns, length),
        plain_tokens_per_s=new / statistics.median(decode["plain"]),
        speculative_tokens_per_s=new / statistics.median(decode["spec"]),
        same=runs["plain"][0].token_ids == runs["spec"][0].token_ids,
    )


def efficiency(turns: Sequence[Turn], length: float) -> Ratio:
    """Measured speed-up over AL / (V + k c), all of them medians over turns."""

    def share(drawn: Sequence[Turn]) -> float:
        plain, spec, one, check, draft = (
            statistics.median(kind) for kind in zip(*drawn, strict=True)
        )
        return (plain / spec) / (length * one / (check + NUM_DRAFTS * draft))

    singles = [share([turn]) for turn in turns]
    low, high = bootstrap_ends(turns, share, resamples=RESAMPLES)
    return Ratio(value=share(turns), low=low, high=high, least=min(singles), most=max(singles),
                 repeats=len(turns))  # fmt: skip


def batching(settings: argparse.Namespace) -> Batching:
    """One LLM, 1 and 8 different prompts that end around context 256."""
    llm = build(
        str(settings.models / "cycle-target"),
        max_num_seqs=settings.batch,
        max_model_len=1024,
        max_num_batched_tokens=4096,
    )
    tokens = settings.tokens // 2
    length = settings.context - tokens // 2
    rng = random.Random(0)
    vocab = llm._engine.parts.vocab_size
    prompts = [rng.choices(range(2, vocab), k=length) for _ in range(settings.batch)]

    def seconds_per_token(count: int) -> Callable[[], float]:
        given = [{"prompt_token_ids": ids} for ids in prompts[:count]]

        def measure() -> float:
            results = llm.generate(given, greedy(tokens), use_tqdm=False)
            metrics = [result.outputs[0].metrics for result in results]
            last = max(m.finished_s for m in metrics if m)
            first = max(m.first_token_s for m in metrics if m)
            new: int = count * (tokens - 1)
            return float(last - first) / new

        return measure

    counts = (1, settings.batch)
    times = interleave({str(c): seconds_per_token(c) for c in counts}, settings.repeats)
    return Batching(
        tokens_per_s={name: 1 / statistics.median(kept) for name, kept in times.items()},
        ratio=ratio_of_medians(times["1"], times[str(settings.batch)]),
    )


def shares(settings: argparse.Namespace) -> dict[str, StepShares]:
    """A step's time by part at small and large batch."""
    sizes = settings.share_batches
    llm = build(
        str(settings.models / "cycle-target"),
        max_num_seqs=max(sizes),
        max_model_len=settings.share_context + 256,
    )
    steps = settings.times * 2
    return {str(n): measure_shares(llm, n, settings.share_context, steps) for n in sizes}


def report(results: dict[str, Any], settings: argparse.Namespace) -> list[Goal]:
    """Print what was measured; the goals of the parts that ran."""
    goals = []
    if "overhead" in results:
        o: Overhead = results["overhead"]
        print(
            f"plain {o.plain_tokens_per_s:.1f}, k={NUM_DRAFTS} {o.speculative_tokens_per_s:.1f} "
            f"tokens/s: speed-up {o.speedup}, same tokens: {o.same}\n"
            f"AL {o.acceptance_length:.2f}, V {o.verification}, c {o.draft}: "
            f"AL / (V + k c) = {o.predicted:.3f}, measured over it {o.efficiency}"
        )
        goals.append(at_least("speed-up / (AL / (V + k c))", o.efficiency.value, 0.95))
    if "batch" in results:
        b: Batching = results["batch"]
        print(f"tokens/s by batch {b.tokens_per_s}, ratio {b.ratio}")
        title = f"throughput, batch {settings.batch} / batch 1, context {settings.context}"
        goals.append(at_least(title, b.ratio.value, 5.0))
    for name, one in results.get("shares", {}).items():
        print(f"batch {name}, context {settings.share_context}: {one}")
    return goals


def main() -> None:
    """Run the parts asked for, one set of models in memory at a time."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="what make_models.py wrote")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batch-invariant", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--weights", choices=SCHEMES, default="16 bit", help="of `overhead`")
    parser.add_argument("--tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--times", type=int, default=10, help="passes per timing")
    parser.add_argument("--batch", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=256, help="of `batch`; %(default)s")
    parser.add_argument("--share-batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--share-context", type=int, default=1024, help="default: %(default)s")
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.tokens, settings.times = 2, 24, 2
        settings.context, settings.share_context = 64, 128
    use_threads(settings.threads)
    where = announce(settings)
    measures: dict[str, Callable[[argparse.Namespace], Any]] = {
        "overhead": overhead,
        "batch": batching,
        "shares": shares,
    }
    results = {part: measures[part](settings) for part in settings.parts}
    finish("loop", where, settings, results, report(results, settings))


if __name__ == "__main__":
    main()
