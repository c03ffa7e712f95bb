"""What a suffix look-up costs, and how much memory the shared cache takes when it is full.

    python benchmarks/suffix_lookup.py [--requests 10000] [--tokens 500] [--model demo]

The cache is filled with outputs cut from the standard library's code, half of them records of
templates whose fields vary (long equal pieces, many places). Then texts that the cache has never
seen, and new records, are written as an engine would: in every step one draft is looked up and
some tokens are committed. Each step is timed on its own: bringing the indices up to date, the
look-up, the draft; a request's first step, which indexes its prompt, is reported apart. Times are
the thread's own processor time, which leaves out what other processes of a busy machine take.
Wanted: P99 < 0.2 ms per sequence and step.
"""

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common import announce, at_least, at_most, finish, make_parser

from foretoken.checkpoint import find_model
from foretoken.proposers.base import Context
from foretoken.proposers.lookup.suffix.proposer import SuffixProposer
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence as Running
from foretoken.text.tokenizer import Tokenizer
from foretoken.types import Request, SamplingParams
from tools.python_text.stdlib import load_corpus

PROMPT = 200
BUDGET = 24
NAMES = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta", "zeta", "eta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds of steps, and what came of them."""

    count: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    drafted_share: float
    """Steps with a draft."""
    accepted_per_step: float


def record(rng: random.Random, number: int) -> str:
    """One filled-in template."""
    name, other = rng.choice(NAMES), rng.choice(NAMES)
    return (
        f'    {{"id": {number}, "name": "{name}_{rng.randrange(100)}", "kind": "{other}",\n'
        f'     "enabled": {rng.choice(("True", "False"))}, "tags": ["{name}", "{other}"],\n'
        f'     "path": "src/{other}/{name}.py", "lines": {rng.randrange(2000)}}},\n'
    )


def records(tokenizer: Tokenizer, rng: random.Random, tokens: int) -> list[int]:
    """A list of records, `tokens` long."""
    text, ids = "", []
    while len(ids) < tokens:
        text += "".join(record(rng, rng.randrange(10_000)) for _ in range(8))
        ids = tokenizer.encode("RECORDS = [\n" + text, add_special_tokens=False)
    return ids[:tokens]


def pieces(ids: Sequence[int], count: int, tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """`count` cuts of one long text."""
    for _ in range(count):
        start = rng.randrange(len(ids) - tokens)
        yield list(ids[start : start + tokens])


def start(name: str, prompt: list[int]) -> Running:
    """A sequence with its first output token still to come."""
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(),
        seed=0,
        max_tokens=1 << 20,
    )
    return Running.of(request)


def ask(proposer: SuffixProposer, sequence: Running, budget: int) -> tuple[int, ...]:
    """One step's draft."""
    at = sequence.num_tokens - 1
    span = Span(sequence=sequence, start=at, length=1, draft_budget=budget, samples=True)
    return proposer.propose(Context((span,))).ids[0]


def fill(proposer: SuffixProposer, texts: Sequence[list[int]]) -> float:
    """Make outputs of all texts; seconds per finished output."""
    began = time.thread_time()
    for index, ids in enumerate(texts):
        sequence = start(f"past-{index}", [1])
        sequence.token_ids.append(ids[0])
        ask(proposer, sequence, 1)
        sequence.token_ids.extend(ids[1:])
        proposer.release(f"past-{index}")
    return (time.thread_time() - began) / len(texts)


@dataclass(slots=True)
class Timed:
    """Steps as they are measured."""

    first: list[float]
    later: list[float]
    drafted: int = 0
    accepted: int = 0


def write(proposer: SuffixProposer, name: str, ids: list[int], timed: Timed) -> None:
    """Write `ids` step by step as a target that always says them would."""
    sequence = start(name, ids[:PROMPT])
    sequence.token_ids.append(ids[PROMPT])
    while sequence.num_tokens < len(ids) - 1:
        began = time.thread_time()
        draft = ask(proposer, sequence, BUDGET)
        took = time.thread_time() - began
        (timed.later if sequence.num_output > 1 else timed.first).append(took)
        right = ids[sequence.num_tokens : sequence.num_tokens + len(draft)]
        accepted = 0
        for drafted, token in zip(draft, right, strict=False):
            if drafted != token:
                break
            accepted += 1
        timed.drafted += bool(draft)
        timed.accepted += accepted
        sequence.token_ids.extend(ids[sequence.num_tokens : sequence.num_tokens + accepted + 1])
    proposer.release(name)


def summary(timed: Timed, seconds: list[float]) -> Steps:
    """Of one kind of step."""
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    total = len(timed.first) + len(timed.later)
    return Steps(
        count=len(ordered),
        p50_ms=1e3 * statistics.median(ordered),
        p99_ms=at(0.99),
        p999_ms=at(0.999),
        max_ms=1e3 * ordered[-1],
        drafted_share=timed.drafted / total,
        accepted_per_step=timed.accepted / total,
    )


def show(title: str, steps: Steps) -> None:
    """One line."""
    print(
        f"{title:28}{steps.count:8} steps  P50 {steps.p50_ms:.3f}  P99 {steps.p99_ms:.3f}  "
        f"P99.9 {steps.p999_ms:.3f}  max {steps.max_ms:.3f} ms  drafts in "
        f"{steps.drafted_share:.0%}, {steps.accepted_per_step:.2f} accepted per step"
    )


def texts(settings: argparse.Namespace) -> tuple[list[list[int]], dict[str, list[list[int]]]]:
    """The outputs to cache, and by kind those to write."""
    tokenizer, rng = Tokenizer(find_model(settings.model)), random.Random(0)
    corpus = load_corpus()
    files = corpus.training[:: 40 if settings.quick else 2]
    known = [t for f in files for t in tokenizer.encode(f.text, add_special_tokens=False)]
    half = settings.requests // 2
    past = list(pieces(known, half, settings.tokens, rng))
    some = [records(tokenizer, rng, settings.tokens) for _ in range(min(half, 500))]
    while len(past) < settings.requests:
        past.append(some[len(past) % len(some)] if len(past) % 3 else records_like(some, rng))
    rng.shuffle(past)
    unseen = [t for f in corpus.held_out for t in tokenizer.encode(f.text)]
    length = PROMPT + settings.tokens
    return past, {
        "code never seen": list(pieces(unseen, settings.written, length, rng)),
        "code written before": list(pieces(known, settings.written, length, rng)),
        "records of a template": [
            records(tokenizer, rng, length) for _ in range(min(settings.written, 50))
        ],
    }


def records_like(some: list[list[int]], rng: random.Random) -> list[int]:
    """Two halves of different lists of records."""
    one, other = rng.choice(some), rng.choice(some)
    middle = len(one) // 2
    return one[:middle] + other[middle:]


def main() -> None:
    """Fill, write, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="for its tokenizer; default: %(default)s")
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=500, help="of an output; default: 500")
    parser.add_argument("--written", type=int, default=40, help="texts per kind; default: 40")
    settings = parser.parse_args()
    if settings.quick:
        settings.requests, settings.tokens, settings.written = 100, 200, 2
    where = announce(settings)
    past, kinds = texts(settings)
    proposer = SuffixProposer(
        max_tree_depth=24,
        max_cached_requests=settings.requests,
        max_spec_factor=1.0,
        min_token_prob=0.1,
    )
    gc.collect()
    gc.freeze()
    finished_s = fill(proposer, past)
    reported = proposer.num_bytes
    print(f"filled: {settings.requests} outputs, {reported / 2**20:.0f} MiB reported, "
          f"{1e3 * finished_s:.2f} ms per output\n")  # fmt: skip
    results: dict[str, object] = {"finished_ms": 1e3 * finished_s, "reported_bytes": reported}
    worst = 0.0
    for kind, several in kinds.items():
        timed = Timed([], [])
        for index, ids in enumerate(several):
            write(proposer, f"{kind}-{index}", ids, timed)
        later = summary(timed, timed.later)
        results[kind] = {"steps": later, "first steps": summary(timed, timed.first)}
        show(kind, later)
        show("  first step of a request", summary(timed, timed.first))
        worst = max(worst, later.p99_ms)
    measured = measured_bytes(past[: len(past) // 10], settings)
    results["measured_bytes_of_a_tenth"], results["reported_bytes_of_a_tenth"] = measured
    goals = [
        at_most("P99 of a step, worst kind, ms", worst, 0.2),
        at_most("reported bytes / most bytes", reported / proposer.most_bytes, 1.0),
        at_least("reported / measured memory of a tenth", measured[1] / measured[0], 0.9),
    ]
    finish("suffix_lookup", where, settings, results, goals)


def measured_bytes(past: list[list[int]], settings: argparse.Namespace) -> tuple[int, int]:
    """Memory of a cache with some of the outputs: as Python counts it, as the cache reports it."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    proposer = SuffixProposer(
        max_tree_depth=24,
        max_cached_requests=settings.requests,
        max_spec_factor=1.0,
        min_token_prob=0.1,
    )
    fill(proposer, past)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before, proposer.num_bytes


if __name__ == "__main__":
    main()
