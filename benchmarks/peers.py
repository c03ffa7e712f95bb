"""Foretoken against another engine, on the same models, prompts and threads, in turns.

    python benchmarks/peers.py --peer vllm --models FOLDER --environments FOLDER

FOLDER of --models is what make_models.py wrote. The peer is installed into its own virtual
environment below --environments. Both engines stay loaded and are asked alternately, one request
at a time: 128-token prompts, 128 new tokens, greedy, bfloat16 (OpenVINO: 16-bit weights), batch 1.
Decode tokens/s is 127 / (time of 128 tokens - time of 1 token); ratios are ours / the peer's, so
above 1 is faster. Every text is compared with the one that the models must write.

llama.cpp has Q8_0 weights in every case, against our int8 and int4. vLLM is also asked for eight
answers at once (prompts of 384 tokens) and for the first token of prompts of 1,024.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import Goal, Ratio, announce, at_least, finish, make_parser, ratio_of_medians, rotated
from peer_setup import (
    PEERS,
    Worker,
    convert_for_llama_cpp,
    convert_for_openvino,
    install,
    process_environment,
    python_of,
)
from prompts import CyclePrompts, load_prompts
from workers.protocol import Job

CONTEXT = 1280
PAUSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What both engines do, and the wanted ratio by peer."""

    goals: dict[str, float]
    draft: str | None = None
    method: str | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    prompts: str = "fresh"
    prompt_tokens: int = 128
    batch: int = 1
    num_drafts: int = 5
    prefill: bool = False
    """Judged by the time of the first token, not by the others."""


EVERYONE = {"transformers": 1.0, "vllm": 1.0, "openvino": 0.88}
PAIR: dict[str, Any] = {"draft": "cycle-draft-80", "method": "draft_model"}
RIGHT: dict[str, Any] = {**PAIR, "draft": "cycle-draft-100"}
CASES = {
    "plain": Case(goals={**EVERYONE, "openvino": 1.0}),
    "draft 100 %": Case(goals=EVERYONE, **RIGHT),
    "draft 80 %": Case(goals=EVERYONE, **PAIR),
    "int8 draft 80 %": Case(goals={"openvino": 1.25}, draft_quantization="int8", **PAIR),
    "n-gram echo": Case(goals={**EVERYONE, "openvino": 1.05}, method="ngram", prompts="echo"),
    "n-gram echo k=15": Case(
        goals={"openvino": 0.95}, method="ngram", prompts="echo", num_drafts=15
    ),
    "batch 8": Case(goals={"vllm": 1.0}, prompt_tokens=384, batch=8),
    "prefill 1024": Case(goals={"vllm": 1.0}, prompt_tokens=1024, prefill=True),
    "int8": Case(goals={"llama-cpp": 0.95}, quantization="int8"),
    "int8 pair 100 %": Case(
        goals={"llama-cpp": 1.35}, quantization="int8", draft_quantization="int8", **RIGHT
    ),
    "int8 pair 80 %": Case(
        goals={"llama-cpp": 1.35}, quantization="int8", draft_quantization="int8", **PAIR
    ),
    "int4 pair 100 %": Case(
        goals={"llama-cpp": 2.0}, quantization="int4", draft_quantization="int4", **RIGHT
    ),
}
"""A case is run against the peers that it has a goal for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One engine, one repeat, summed over the prompts."""

    decode_s: float
    total_s: float
    prefill_s: float
    right: bool
    """Whether every token was the one that the model must write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case; tokens/s are medians over repeats, speeds are ours / the peer's."""

    ours_decode: float
    peer_decode: float
    decode_speed: Ratio
    ours_end_to_end: float
    peer_end_to_end: float
    end_to_end_speed: Ratio
    ours_prefill_s: float
    peer_prefill_s: float
    prefill_speed: Ratio
    ours_right: bool
    peer_right: bool
    versions: dict[str, dict[str, str]]


def batches(prompts: CyclePrompts, case: Case, count: int) -> list[tuple[list[list[int]], int]]:
    """`count` groups of prompts of the case's size, each with the index of its first answer.

    What stands before a prompt changes nothing in how the models go on.
    """
    found = []
    for first in range(count):
        group = []
        for n in range(case.batch):
            ids = prompts.ids[(first + n) % len(prompts.ids)]
            filling = (ids * (case.prompt_tokens // len(ids) + 1))[: case.prompt_tokens - len(ids)]
            group.append([*filling, *ids])
        found.append((group, first))
    return found


def measure(
    worker: Worker, prompts: CyclePrompts, case: Case, arguments: argparse.Namespace
) -> Timing:
    """All prompts once, for all tokens and for one."""
    long_s, short_s, right = 0.0, 0.0, True
    for group, first in batches(prompts, case, arguments.prompts):
        answer = worker.ask(group, arguments.tokens)
        long_s += answer.seconds
        short_s += worker.ask(group, 1).seconds
        for n, ids in enumerate(answer.token_ids):
            expected = prompts.answers[(first + n) % len(prompts.ids)][: arguments.tokens]
            enough = len(ids) >= arguments.tokens // 2 if arguments.peer == "llama-cpp" else (
                len(ids) == arguments.tokens)  # fmt: skip
            right = right and enough and ids == expected[: len(ids)]
    return Timing(
        decode_s=long_s - short_s,
        total_s=long_s,
        prefill_s=short_s / arguments.prompts,
        right=right,
    )


def compare(ours: Worker, peer: Worker, case: Case, arguments: argparse.Namespace) -> CaseResult:
    """Alternate between both engines, starting with either in turn."""
    prompts = load_prompts(arguments.models, case.prompts)
    workers = {"ours": ours, "peer": peer}
    timings: dict[str, list[Timing]] = {name: [] for name in workers}
    for worker in workers.values():
        measure(worker, prompts, case, arguments)
    for turn in range(arguments.repeats):
        for name in rotated(list(workers), turn):
            time.sleep(PAUSE_S)
            timings[name].append(measure(workers[name], prompts, case, arguments))
    decode = {name: [t.decode_s for t in ts] for name, ts in timings.items()}
    total = {name: [t.total_s for t in ts] for name, ts in timings.items()}
    prefill = {name: [t.prefill_s for t in ts] for name, ts in timings.items()}
    count = arguments.prompts * case.batch
    new = arguments.tokens * count
    return CaseResult(
        ours_decode=(new - count) / statistics.median(decode["ours"]),
        peer_decode=(new - count) / statistics.median(decode["peer"]),
        decode_speed=ratio_of_medians(decode["peer"], decode["ours"]),
        ours_end_to_end=new / statistics.median(total["ours"]),
        peer_end_to_end=new / statistics.median(total["peer"]),
        end_to_end_speed=ratio_of_medians(total["peer"], total["ours"]),
        ours_prefill_s=statistics.median(prefill["ours"]),
        peer_prefill_s=statistics.median(prefill["peer"]),
        prefill_speed=ratio_of_medians(prefill["peer"], prefill["ours"]),
        ours_right=all(t.right for t in timings["ours"]),
        peer_right=all(t.right for t in timings["peer"]),
        versions={name: worker.versions for name, worker in workers.items()},
    )


def peer_job(job: Job, environment: Path, arguments: argparse.Namespace) -> Job:
    """The same job in the peer's own formats, models converted."""
    job = replace(job, option=None)
    folders = [Path(job.target), *([Path(job.draft)] if job.draft else [])]
    if arguments.peer == "openvino":
        index = arguments.torch_index
        files = [convert_for_openvino(f, arguments.environments, index) for f in folders]
    elif arguments.peer == "llama-cpp":
        files = [convert_for_llama_cpp(f, environment, "Q8_0") for f in folders]
    else:
        return job
    return replace(job, target=str(files[0]), draft=str(files[1]) if job.draft else None)


def job_of(case: Case, arguments: argparse.Namespace) -> Job:
    """What our worker loads."""
    models: Path = arguments.models
    return Job(
        target=str(models / "cycle-target"),
        draft=str(models / case.draft) if case.draft else None,
        method=case.method,
        num_drafts=case.num_drafts,
        threads=arguments.threads,
        max_model_len=CONTEXT,
        batch=case.batch,
        quantization=case.quantization,
        draft_quantization=case.draft_quantization,
        option=arguments.batch_invariant,
    )


def run_case(case: Case, environment: Path, arguments: argparse.Namespace) -> CaseResult:
    """Load both engines for one case and compare them."""
    job = job_of(case, arguments)
    theirs = peer_job(job, environment, arguments)
    ours_variables = process_environment("foretoken", None, arguments.threads)
    peer_variables = process_environment(arguments.peer, environment, arguments.threads)
    with (
        Worker("foretoken", Path(sys.executable), job, ours_variables) as ours,
        Worker(arguments.peer, python_of(environment), theirs, peer_variables) as peer,
    ):
        return compare(ours, peer, case, arguments)


def show(name: str, result: CaseResult) -> None:
    """One case as two lines."""
    print(
        f"{name}: decode {result.ours_decode:.1f} ours, {result.peer_decode:.1f} peer tokens/s, "
        f"ours/peer {result.decode_speed}; end to end {result.ours_end_to_end:.1f}, "
        f"{result.peer_end_to_end:.1f}, {result.end_to_end_speed}\n"
        f"  prefill {result.ours_prefill_s:.3f} s ours, {result.peer_prefill_s:.3f} s peer, "
        f"{result.prefill_speed}; "
        f"right text: ours {result.ours_right}, peer {result.peer_right}",
        flush=True,
    )


def goals(peer: str, results: dict[str, CaseResult]) -> Sequence[Goal]:
    """The wanted share of the peer's speed, case by case."""
    found = []
    for name, result in results.items():
        case = CASES[name]
        what, speed = ("prefill", result.prefill_speed) if case.prefill else (
            "decode", result.decode_speed)  # fmt: skip
        found.append(at_least(f"{name}, {what}, ours / {peer}", speed.value, case.goals[peer]))
    return found


def main() -> None:
    """Prepare, compare every case, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--models", type=Path, required=True, help="what make_models.py wrote")
    parser.add_argument("--environments", type=Path, required=True, help="where venvs go")
    parser.add_argument("--torch-index", help="package index of a CPU build of PyTorch")
    parser.add_argument("--prepare", action="store_true", help="install and convert, then stop")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: all of the peer")
    parser.add_argument("--prompts", type=int, default=2, help="per repeat; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--batch-invariant", choices=("auto", "on", "off"), default="auto")
    parser.set_defaults(threads=2)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.prompts, arguments.tokens = 2, 1, 24
    environment = install(arguments.peer, arguments.environments, arguments.torch_index)
    cases = arguments.cases or [n for n, case in CASES.items() if arguments.peer in case.goals]
    for name in cases:
        if arguments.peer not in CASES[name].goals:
            parser.error(f"case {name!r} is not run against {arguments.peer}")
        peer_job(job_of(CASES[name], arguments), environment, arguments)
    if arguments.prepare:
        return
    where = announce(arguments)
    results = {}
    for name in cases:
        results[name] = run_case(CASES[name], environment, arguments)
        show(name, results[name])
    finish("peers", where, arguments, results, goals(arguments.peer, results))


if __name__ == "__main__":
    main()
