"""Foretoken against other engines at their best, on the same models, prompts and weights, in turns.

    python benchmarks/peers.py --peer openvino llama-cpp --models MODELS --environments FOLDER

MODELS is what make_models.py wrote. Each peer is installed into its own virtual environment below
--environments. First every engine, ours too, is tuned for every case: the number of drafts, the
draft's precision, threads, and what else it has to set (`peer_cases.py`). What was found is kept
in --settings and used again on the same machine with the same versions; --search looks again.

Then all of them stay loaded and are asked in turns, one request at a time: 128-token prompts,
greedy, batch 1. Decode tokens/s is (n - 1) / (time of n tokens - time of 1 token); ratios are ours
/ the peer's, so above 1 is faster. Where a peer's best draft has another precision than ours, we
are measured with the peer's precision too. Beside each figure stands what memory gave to plain
reading in the same minute, and every text is compared with the one that the models must write.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandwidth import ReadProbe
from common import Goal, Ratio, announce, at_least, finish, in_turn, make_parser, ratio_of_medians
from peer_asking import Asking, Timing, measure
from peer_cases import CASES, OURS, STANDARD, Case, Setting, describe
from peer_load import Loader
from peer_search import Search
from peer_settings import Found, SettingsFile
from peer_setup import PEERS
from prompts import load_prompts

PAUSE_S = 0.5
TOKENS = 128
SEARCH_TOKENS = 50
"""One round of a cycle: every place at which a draft is wrong counts once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One engine in one setting."""

    engine: str
    setting: Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """Medians over turns."""

    engine: str
    setting: Setting
    versions: dict[str, str]
    decode_tokens_per_s: float
    end_to_end_tokens_per_s: float
    prefill_s: float
    read_gb_per_s: float
    """What memory gave right before this arm's turns."""
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many times as fast as a peer we are."""

    decode: Ratio
    end_to_end: Ratio
    prefill: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case: arms by name, and our arms over each peer's, `ours / peer`."""

    arms: dict[str, ArmResult]
    speeds: dict[str, Comparison]


class Bench:
    """Searches and comparisons with the options of the command line."""

    def __init__(self, arguments: argparse.Namespace, machine: Mapping[str, Any]) -> None:
        """Read the file of settings."""
        self._arguments = arguments
        self._loader = Loader(arguments.models, arguments.environments, arguments.torch_index)
        self._probe = ReadProbe(2)
        self._file = SettingsFile(arguments.settings, dict(machine))
        self._engines = (OURS, *arguments.peer)
        self._versions = {engine: self._loader.versions(engine) for engine in self._engines}
        if arguments.search:
            self._file.forget(self._engines, arguments.cases)

    def tuned(self, engine: str, name: str) -> Setting:
        """The best setting of an engine for a case, searched if it is not known."""
        versions, case = self._versions[engine], CASES[name]
        known = self._file.get(engine, name, versions)
        if known is not None:
            return known.best
        print(f"{name}: searching the best setting of {engine}", flush=True)
        search = Search(engine, case, self._asking(case, searching=True), self._loader, self._probe)
        best = search.run(self._file.of_kind(engine, case.kind, versions))
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        found = Found(best=best, versions=versions, tokens=self._arguments.search_tokens, when=when,
                      tried=search.tried)  # fmt: skip
        self._file.put(engine, name, found)
        return best

    def arms(self, name: str) -> dict[str, Arm]:
        """Every engine of a case at its best, and ours at the draft precision of each peer's."""
        case = CASES[name]
        ours = self.tuned(OURS, name)
        found = {OURS: Arm(engine=OURS, setting=ours)}
        for peer in self._arguments.peer:
            if peer not in case.goals:
                continue
            theirs = self.tuned(peer, name)
            found[peer] = Arm(engine=peer, setting=theirs)
            precision = theirs.get("draft", "16 bit")
            if case.draft and precision != ours["draft"]:
                alike = Arm(engine=OURS, setting={**ours, "draft": precision})
                found[f"{OURS}, draft {precision}"] = alike
        return found

    def compare(self, case: Case, arms: Mapping[str, Arm]) -> CaseResult:
        """Load all arms of a case and ask them in turns."""
        asking = self._asking(case, searching=False)
        timings: dict[str, list[Timing]] = {arm: [] for arm in arms}
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(self._loader.load(arm.engine, case, arm.setting))
                for name, arm in arms.items()
            }
            for worker in workers.values():
                measure(worker, case, replace(asking, count=1, tokens=8), 0.0)
            for turn in range(self._arguments.repeats):
                for arm in in_turn(list(arms), turn):
                    time.sleep(PAUSE_S)
                    read = self._probe.gb_per_s()
                    timings[arm].append(measure(workers[arm], case, asking, read))
            versions = {arm: worker.versions for arm, worker in workers.items()}
        count = self._arguments.prompts * case.batch
        return CaseResult(
            arms={
                name: summed_up(arm, timings[name], versions[name], count, self._arguments.tokens)
                for name, arm in arms.items()
            },
            speeds={
                f"{mine} / {peer}": compared(timings[mine], timings[peer])
                for mine, peer in pairs(arms)
            },
        )

    def _asking(self, case: Case, *, searching: bool) -> Asking:
        """How engines are asked; a prompt is cut only where nothing depends on it."""
        prompts = load_prompts(self._arguments.models, case.prompts)
        if searching:
            tokens = self._arguments.search_tokens
            return Asking(prompts=prompts, count=1, tokens=tokens, shortened=True)
        return Asking(prompts=prompts, count=self._arguments.prompts, tokens=self._arguments.tokens)


def pairs(arms: Mapping[str, Arm]) -> list[tuple[str, str]]:
    """(our arm, peer): each peer with our best, and with ours at its draft's precision."""
    found = []
    for peer, arm in arms.items():
        if arm.engine == OURS:
            continue
        alike = f"{OURS}, draft {arm.setting.get('draft', '16 bit')}"
        found += [(mine, peer) for mine in (OURS, alike) if mine in arms]
    return found


def summed_up(
    arm: Arm, timings: Sequence[Timing], versions: dict[str, str], count: int, tokens: int
) -> ArmResult:
    """Medians of an arm that wrote `count` texts of `tokens` each turn."""
    return ArmResult(
        engine=arm.engine,
        setting=arm.setting,
        versions=versions,
        decode_tokens_per_s=(tokens - 1) * count / statistics.median(t.decode_s for t in timings),
        end_to_end_tokens_per_s=tokens * count / statistics.median(t.total_s for t in timings),
        prefill_s=statistics.median(t.prefill_s for t in timings),
        read_gb_per_s=statistics.median(t.read_gb_per_s for t in timings),
        right=all(t.right for t in timings),
    )


def compared(ours: Sequence[Timing], peer: Sequence[Timing]) -> Comparison:
    """The peer's times over ours."""
    return Comparison(
        decode=ratio_of_medians([t.decode_s for t in peer], [t.decode_s for t in ours]),
        end_to_end=ratio_of_medians([t.total_s for t in peer], [t.total_s for t in ours]),
        prefill=ratio_of_medians([t.prefill_s for t in peer], [t.prefill_s for t in ours]),
    )


def show(name: str, result: CaseResult) -> None:
    """One case as a small table."""
    print(f"\n{name}")
    print(f"  {'':24}{'decode':>8}{'whole':>8}  {'prefill':>9}  {'read':>9}  text   setting")
    for title, arm in result.arms.items():
        print(
            f"  {title:24}{arm.decode_tokens_per_s:8.1f}{arm.end_to_end_tokens_per_s:8.1f}  "
            f"{arm.prefill_s:7.3f} s  {arm.read_gb_per_s:4.1f} GB/s  "
            f"{'right' if arm.right else 'WRONG'}  {describe(arm.setting)}"
        )
    for pair, speed in result.speeds.items():
        print(f"  {pair}: decode {speed.decode}; whole {speed.end_to_end}; "
              f"first token {speed.prefill}")  # fmt: skip
    print(flush=True)


def goals(results: Mapping[str, CaseResult]) -> list[Goal]:
    """The wanted ratio of the bests, case by case."""
    found = []
    for name, result in results.items():
        case = CASES[name]
        for peer, wanted in case.goals.items():
            speed = result.speeds.get(f"{OURS} / {peer}")
            if speed is not None:
                what, ratio = (
                    ("first token", speed.prefill) if case.prefill else ("decode", speed.decode)
                )
                found.append(at_least(f"{name}, {what}, ours / {peer}", ratio.value, wanted))
    return found


def machine_of(where: Mapping[str, Any], models: Path) -> dict[str, Any]:
    """What settings depend on."""
    config = json.loads((models / "cycle-target" / "config.json").read_text())
    shape = f"{config['num_hidden_layers']} layers of {config['hidden_size']}"
    return {**{key: where[key] for key in ("cpu", "cores", "cpu_flags")}, "models": shape}


def make_arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--peer", nargs="+", choices=PEERS, required=True)
    parser.add_argument("--models", type=Path, required=True, help="what make_models.py wrote")
    parser.add_argument("--environments", type=Path, required=True, help="where venvs go")
    parser.add_argument("--torch-index", help="package index of a CPU build of PyTorch")
    parser.add_argument("--prepare", action="store_true", help="install and convert, then stop")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: the first six")
    parser.add_argument("--prompts", type=int, default=1, help="per repeat; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="default: %(default)s")
    parser.add_argument("--settings", type=Path, help="default: MODELS/peer-settings.json")
    parser.add_argument("--search", action="store_true", help="search what is known already, too")
    parser.add_argument("--only-search", action="store_true", help="search, compare nothing")
    parser.add_argument("--search-tokens", type=int, default=SEARCH_TOKENS,
                        help="each setting is tried with; default: %(default)s")  # fmt: skip
    return parser


def main() -> None:
    """Prepare, search, compare every case, report."""
    parser = make_arguments()
    arguments = parser.parse_args()
    quick = "-quick" if arguments.quick else ""
    arguments.settings = arguments.settings or arguments.models / f"peer-settings{quick}.json"
    if arguments.quick:
        arguments.repeats, arguments.tokens, arguments.search_tokens = 2, 24, 8
    arguments.cases = cases = arguments.cases or STANDARD
    loader = Loader(arguments.models, arguments.environments, arguments.torch_index)
    for peer in arguments.peer:
        loader.prepare(peer, [CASES[name] for name in cases if peer in CASES[name].goals])
    if arguments.prepare:
        return
    where = announce(arguments)
    bench = Bench(arguments, machine_of(where, arguments.models))
    results = {}
    for name in cases:
        arms = bench.arms(name)
        if not arguments.only_search:
            results[name] = bench.compare(CASES[name], arms)
            show(name, results[name])
        else:
            for arm in arms:
                print(f"{name}, {arm}: {describe(arms[arm].setting)}", flush=True)
    finish("peers", where, arguments, results, goals(results))


if __name__ == "__main__":
    main()
