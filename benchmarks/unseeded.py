"""Is sampling without a seed as fast as with one? Every method and filter, alone and in company.

    python benchmarks/unseeded.py [--requests 30] [--beside 0 1 2] [--methods ...] [--filters ...]
    python benchmarks/unseeded.py --paths [--beside 0 2]

64 tokens at temperature 0.8 by the packaged models, one request at a time, the cells in turns, each
request from another prompt and with another seed. Then the same with one and with two processes
that spin, started here. Reported are medians and 99th percentiles of a whole request, unseeded over
seeded with its interval, acceptance length, and the speed-up over unseeded plain decoding with the
same filter.

Beside each median stands the processor time of a request, all threads together. A request that had
the processor to itself for that long, and among spinning processes got its share of one core, would
take quiet processor time / share: `explained`. --paths asks whether any other path takes more than
twice that: look-ups, heads, trees, grammars, logprobs, the prefill of 1,000 tokens; greedy.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beside import share_of_core, spinning
from common import (
    Goal,
    Ratio,
    announce,
    at_least,
    at_most,
    finish,
    in_turn,
    make_parser,
    ratio_of_medians,
    use_threads,
)
from runs import Run, acceptance, build, run_once
from unseeded_cells import FILTERS, METHODS, PLAIN, PREFILL, Cell, pairs, paths

from foretoken import LLM, SamplingParams
from tools.python_text.heldout import heldout_prompts

FASTER = ("draft_model k=4", "eagle3 k=3")
"""Methods that have to be faster than plain decoding, and by how much."""
WANTED = 1.2
MOST_NOISE = 3.0
FEWEST_FOR_P99 = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request."""

    run: Run
    processor_s: float
    """All threads of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One cell beside so many spinning processes; times are of whole requests."""

    requests: int
    median_ms: float
    p99_ms: float
    processor_ms: float
    """Median, all threads together."""
    acceptance_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """A method with a filter, seeded and not."""

    seeded: CellResult
    unseeded: CellResult
    ratio: Ratio
    """Unseeded over seeded, of medians."""
    speedup: Ratio
    """Over unseeded plain decoding with the same filter, unseeded."""
    speedup_seeded: Ratio


def prompts_of(llm: LLM, count: int, tokens: int) -> list[list[int]]:
    """Starts of held-out functions."""
    encode = llm.get_tokenizer().encode
    return [encode(p.text)[:tokens] for p in heldout_prompts(count, tokens=tokens)]


def ask(llm: LLM, cell: Cell, prompt: Sequence[int], turn: int, tokens: int, salt: str) -> Sample:
    """One request, timed; `salt` keeps its outputs from later requests with the same seed."""
    given: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, **cell.parameters}
    params = SamplingParams(seed=turn if cell.seeded else None, **given)
    began = time.process_time()
    run = run_once(llm, prompt, params, f"{cell.name} {turn} {salt}")
    return Sample(run=run, processor_s=time.process_time() - began)


def measure(
    cells: Mapping[str, Cell], llms: Mapping[str, LLM], settings: argparse.Namespace, beside: int
) -> dict[str, list[Sample]]:
    """All cells in turns, `requests` times or until the time is over.

    So many processes spin beside it.
    """
    llm = llms[PLAIN]
    prompts = {False: prompts_of(llm, settings.prompts, 64)}
    if any(cell.long for cell in cells.values()):
        [long] = prompts_of(llm, 1, settings.prefill)
        prompts[True] = [long]
    found: dict[str, list[Sample]] = {name: [] for name in cells}
    until = time.monotonic() + settings.budget_s
    for turn in range(-1, settings.requests):
        for name in in_turn(list(cells), turn + 1):
            cell = cells[name]
            own = prompts[cell.long]
            prompt, salt = own[turn % len(own)], f"beside {beside}"
            sample = ask(llms[cell.method], cell, prompt, turn + 1, settings.tokens, salt)
            if turn >= 0:
                found[name].append(sample)
        if turn >= 1 and time.monotonic() > until:
            print(f"the time is over after {turn + 1} of {settings.requests} requests")
            break
    return found


def summed_up(samples: Sequence[Sample]) -> CellResult:
    """Medians of a cell."""
    seconds = [sample.run.total_s for sample in samples]
    return CellResult(
        requests=len(samples),
        median_ms=statistics.median(seconds) * 1e3,
        p99_ms=statistics.quantiles(seconds, n=100, method="inclusive")[98] * 1e3,
        processor_ms=statistics.median(sample.processor_s for sample in samples) * 1e3,
        acceptance_length=acceptance(sample.run for sample in samples).length,
    )


def seconds_of(samples: Sequence[Sample]) -> list[float]:
    """Of whole requests."""
    return [sample.run.total_s for sample in samples]


def seeding(found: Mapping[str, list[Sample]], settings: argparse.Namespace) -> dict[str, Any]:
    """Every method and filter, seeded and not."""
    results = {}
    for method in settings.methods:
        for kind in settings.filters:
            seeded, unseeded = (found[f"{method}, {kind}, {s}"] for s in ("seeded", "unseeded"))
            plain = seconds_of(found[f"{PLAIN}, {kind}, unseeded"])
            result = PairResult(
                seeded=summed_up(seeded),
                unseeded=summed_up(unseeded),
                ratio=ratio_of_medians(seconds_of(unseeded), seconds_of(seeded)),
                speedup=ratio_of_medians(plain, seconds_of(unseeded)),
                speedup_seeded=ratio_of_medians(plain, seconds_of(seeded)),
            )
            results[f"{method}, {kind}"] = result
            a, b = result.seeded, result.unseeded
            print(f"{method:17}{kind:10}{a.median_ms:8.1f}{b.median_ms:9.1f}{a.p99_ms:9.1f}"
                  f"{b.p99_ms:9.1f}{a.processor_ms:8.1f}{b.processor_ms:8.1f}  {result.ratio!s:22}"
                  f"{a.acceptance_length:5.2f} {b.acceptance_length:5.2f}  "
                  f"{result.speedup_seeded.value:5.2f} {result.speedup}", flush=True)  # fmt: skip
    return results


def heading(beside: int) -> None:
    """Of the table that `seeding` prints."""
    print(f"\n{beside} spinning processes; milliseconds of a request; s: seeded, u: unseeded")
    print(f"{'':27}{'s':>8}{'u':>9}{'P99 s':>9}{'P99 u':>9}{'cpu s':>8}{'cpu u':>8}  "
          f"{'u / s':22}{'AL s':>5} {'AL u':>5}  {'x s':>5} x u")  # fmt: skip


def stretches(
    found: Mapping[str, list[Sample]], quiet: Mapping[str, CellResult], beside: int
) -> dict[str, Any]:
    """How long each cell took against what its quiet processor time explains."""
    results = {}
    for name, samples in found.items():
        result = summed_up(samples)
        before = quiet.get(name, result)
        explained_ms = before.processor_ms / share_of_core(beside)
        results[name] = {"cell": result, "over explained": result.median_ms / explained_ms}
        print(f"{name:36}{result.median_ms:9.1f} ms  P99 {result.p99_ms:9.1f}  processor "
              f"{result.processor_ms:8.1f}  of explained {results[name]['over explained']:6.2f}  "
              f"length {result.acceptance_length:.2f}", flush=True)  # fmt: skip
    return results


def goals_of(results: Mapping[str, Any], settings: argparse.Namespace) -> list[Goal]:
    """Ratios, tails, speed-ups and stretches, the worst cell of each."""
    found = []
    for beside in settings.beside:
        part = results[f"beside {beside}"]
        if settings.paths:
            worst = max(part, key=lambda name: part[name]["over explained"])
            found.append(at_most(f"beside {beside}, time over explained: {worst}",
                                 part[worst]["over explained"], 2.0))  # fmt: skip
            continue
        worst = max(part, key=lambda name: part[name].ratio.value)
        found.append(at_most(f"beside {beside}, unseeded over seeded: {worst}",
                             part[worst].ratio.value, 1.25 if beside else 1.10))  # fmt: skip
        tails = {name: one.unseeded.p99_ms / one.unseeded.median_ms for name, one in part.items()
                 if one.unseeded.requests >= FEWEST_FOR_P99}  # fmt: skip
        if tails:
            worst = max(tails, key=lambda name: tails[name])
            found.append(at_most(f"beside {beside}, P99 over median: {worst}",
                                 tails[worst], MOST_NOISE))  # fmt: skip
        if beside == 0:
            for method in (m for m in FASTER if f"{m}, none" in part):
                one = part[f"{method}, none"]
                found.append(at_least(f"{method}, unseeded over plain", one.speedup.value, WANTED))
                found.append(
                    at_least(f"{method}, seeded over plain", one.speedup_seeded.value, WANTED)
                )
    return found


def main() -> None:
    """Measure at every number of spinning processes, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--paths", action="store_true", help="other paths, not seeds")
    parser.add_argument("--requests", type=int, default=30, help="a cell; default: %(default)s")
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 1, 2],
                        help="spinning processes; default: %(default)s")  # fmt: skip
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--filters", nargs="+", choices=FILTERS, default=list(FILTERS))
    parser.add_argument("--tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--budget-s", type=float, default=600.0,
                        help="for each of --beside; default: %(default)s")  # fmt: skip
    settings = parser.parse_args()
    settings.prefill = PREFILL
    if settings.quick:
        settings.requests, settings.tokens, settings.prompts = 2, 8, 2
    settings.methods = [PLAIN, *(m for m in settings.methods if m != PLAIN)]
    settings.beside = sorted(settings.beside)
    use_threads(settings.threads)
    limits = {"max_model_len": 1536, "kv_cache_memory_bytes": 64_000_000}
    llms = {name: build("demo", METHODS[name], **limits) for name in settings.methods}
    where = announce(settings)
    cells = paths(settings.methods) if settings.paths else pairs(settings.methods, settings.filters)
    results: dict[str, Any] = {}
    quiet: dict[str, CellResult] = {}
    for beside in settings.beside:
        with spinning(beside, 2 * settings.budget_s + 600):
            found = measure(cells, llms, settings, beside)
        if beside == 0:
            quiet = {name: summed_up(samples) for name, samples in found.items()}
        if settings.paths:
            print(f"\n{beside} spinning processes")
            results[f"beside {beside}"] = stretches(found, quiet, beside)
        else:
            heading(beside)
            results[f"beside {beside}"] = seeding(found, settings)
    finish("unseeded", where, settings, results, goals_of(results, settings))


if __name__ == "__main__":
    main()
