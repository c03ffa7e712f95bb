"""Foretoken against another engine, on the same models, prompts and threads, in turns.

    python benchmarks/peers.py --peer vllm --models FOLDER --environments FOLDER

FOLDER of --models is what make_models.py wrote. The peer is installed into its own virtual
environment below --environments. Both engines stay loaded and are asked alternately, one request
at a time: 128-token prompts, 128 new tokens, greedy, bfloat16 (OpenVINO: 16-bit weights), batch 1.
Decode tokens/s is 127 / (time of 128 tokens - time of 1 token); ratios are ours / the peer's, so
above 1 is faster. Every text is compared with the one that the models must write.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import Goal, Ratio, announce, at_least, finish, make_parser, ratio_of_medians, rotated
from peer_setup import PEERS, Worker, convert_for_openvino, install, process_environment, python_of
from prompts import CyclePrompts, load_prompts
from workers.protocol import Job

CONTEXT = 1024
PAUSE_S = 0.5
GOALS = {"transformers": 1.0, "vllm": 1.0, "openvino": 0.88}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What both engines do."""

    draft: str | None
    method: str | None
    prompts: str


CASES = {
    "plain": Case(draft=None, method=None, prompts="fresh"),
    "draft 100 %": Case(draft="cycle-draft-100", method="draft_model", prompts="fresh"),
    "draft 80 %": Case(draft="cycle-draft-80", method="draft_model", prompts="fresh"),
    "n-gram echo": Case(draft=None, method="ngram", prompts="echo"),
}


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
    ours_right: bool
    peer_right: bool
    versions: dict[str, dict[str, str]]


def measure(worker: Worker, prompts: CyclePrompts, arguments: argparse.Namespace) -> Timing:
    """All prompts once, for all tokens and for one."""
    long_s, short_s, right = 0.0, 0.0, True
    pairs = zip(prompts.ids, prompts.answers, strict=True)
    for ids, expected in list(pairs)[: arguments.prompts]:
        answer = worker.ask(ids, arguments.tokens)
        long_s += answer.seconds
        short_s += worker.ask(ids, 1).seconds
        right = right and answer.token_ids == expected[: arguments.tokens]
    return Timing(
        decode_s=long_s - short_s,
        total_s=long_s,
        prefill_s=short_s / arguments.prompts,
        right=right,
    )


def compare(
    ours: Worker, peer: Worker, prompts: CyclePrompts, arguments: argparse.Namespace
) -> CaseResult:
    """Alternate between both engines, starting with either in turn."""
    workers = {"ours": ours, "peer": peer}
    timings: dict[str, list[Timing]] = {name: [] for name in workers}
    for worker in workers.values():
        measure(worker, prompts, arguments)
    for turn in range(arguments.repeats):
        for name in rotated(list(workers), turn):
            time.sleep(PAUSE_S)
            timings[name].append(measure(workers[name], prompts, arguments))
    decode = {name: [t.decode_s for t in ts] for name, ts in timings.items()}
    total = {name: [t.total_s for t in ts] for name, ts in timings.items()}
    new = arguments.tokens * arguments.prompts
    return CaseResult(
        ours_decode=(new - arguments.prompts) / statistics.median(decode["ours"]),
        peer_decode=(new - arguments.prompts) / statistics.median(decode["peer"]),
        decode_speed=ratio_of_medians(decode["peer"], decode["ours"]),
        ours_end_to_end=new / statistics.median(total["ours"]),
        peer_end_to_end=new / statistics.median(total["peer"]),
        end_to_end_speed=ratio_of_medians(total["peer"], total["ours"]),
        ours_prefill_s=statistics.median(t.prefill_s for t in timings["ours"]),
        peer_prefill_s=statistics.median(t.prefill_s for t in timings["peer"]),
        ours_right=all(t.right for t in timings["ours"]),
        peer_right=all(t.right for t in timings["peer"]),
        versions={name: worker.versions for name, worker in workers.items()},
    )


def peer_job(peer: str, job: Job, arguments: argparse.Namespace) -> Job:
    """The same job in the peer's own formats."""
    if peer != "openvino":
        return replace(job, option=None)
    folders = [Path(job.target), *([Path(job.draft)] if job.draft else [])]
    target, *drafts = (
        str(convert_for_openvino(f, arguments.environments, arguments.torch_index)) for f in folders
    )
    return replace(job, option=None, target=target, draft=drafts[0] if drafts else None)


def run_case(case: Case, environment: Path, arguments: argparse.Namespace) -> CaseResult:
    """Load both engines for one case and compare them."""
    models: Path = arguments.models
    job = Job(
        target=str(models / "cycle-target"),
        draft=str(models / case.draft) if case.draft else None,
        method=case.method,
        num_drafts=arguments.num_drafts,
        threads=arguments.threads,
        max_model_len=CONTEXT,
        option=arguments.batch_invariant,
    )
    theirs = peer_job(arguments.peer, job, arguments)
    prompts = load_prompts(models, case.prompts)
    ours_variables = process_environment("foretoken", None, arguments.threads)
    peer_variables = process_environment(arguments.peer, environment, arguments.threads)
    with (
        Worker("foretoken", Path(sys.executable), job, ours_variables) as ours,
        Worker(arguments.peer, python_of(environment), theirs, peer_variables) as peer,
    ):
        return compare(ours, peer, prompts, arguments)


def show(name: str, result: CaseResult) -> None:
    """One case as two lines."""
    print(
        f"{name}: decode {result.ours_decode:.1f} ours, {result.peer_decode:.1f} peer tokens/s, "
        f"ours/peer {result.decode_speed}; end to end {result.ours_end_to_end:.1f}, "
        f"{result.peer_end_to_end:.1f}, {result.end_to_end_speed}\n"
        f"  prefill {result.ours_prefill_s:.3f} s ours, {result.peer_prefill_s:.3f} s peer; "
        f"right text: ours {result.ours_right}, peer {result.peer_right}",
        flush=True,
    )


def goals(peer: str, results: dict[str, CaseResult]) -> Sequence[Goal]:
    """The wanted share of the peer's decode speed, case by case."""
    return [
        at_least(f"{name}, decode, ours / {peer}", result.decode_speed.value, GOALS[peer])
        for name, result in results.items()
    ]


def main() -> None:
    """Prepare, compare every case, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--models", type=Path, required=True, help="what make_models.py wrote")
    parser.add_argument("--environments", type=Path, required=True, help="where venvs go")
    parser.add_argument("--torch-index", help="package index of a CPU build of PyTorch")
    parser.add_argument("--prepare", action="store_true", help="install and convert, then stop")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--prompts", type=int, default=2, help="per repeat; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--num-drafts", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--batch-invariant", choices=("auto", "on", "off"), default="auto")
    parser.set_defaults(threads=2)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.prompts, arguments.tokens = 2, 1, 24
    environment = install(arguments.peer, arguments.environments, arguments.torch_index)
    if arguments.prepare:
        for case in (CASES[name] for name in arguments.cases):
            for model in filter(None, ("cycle-target", case.draft)):
                if arguments.peer == "openvino":
                    folder = arguments.models / model
                    convert_for_openvino(folder, arguments.environments, arguments.torch_index)
        return
    where = announce(arguments)
    results = {}
    for name in arguments.cases:
        results[name] = run_case(CASES[name], environment, arguments)
        show(name, results[name])
    finish("peers", where, arguments, results, goals(arguments.peer, results))


if __name__ == "__main__":
    main()
