"""Foretoken against other engines at their best, on the same models, prompts and weights, in turns.

    python benchmarks/peers.py --models MODELS --environments FOLDER --prepare
    python benchmarks/peers.py --models MODELS --environments FOLDER

`make bench-peers-prepare` and `make bench-peers` are these two. The first makes the models,
installs each peer into a virtual environment of its own, converts, and tunes every engine for every
case, ours too (`peer_search.py`); what was found is kept and used again on the same machine with
the same versions. The second prints the table of `peer_table.py`: each row with its mode, its goal,
who met it and by how much it was missed. `--parts` runs some of it.

All engines of a row stay loaded and take turns; ratios are of medians over turns, with 95 % of
their bootstrap. Beside each figure stands what memory gave to plain reading right then. A peer that
cannot be installed is named and left out. Servers are compared by `foretoken lab ab`.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandwidth import ReadProbe, floor_bytes
from common import ROOT, announce, finish, make_parser
from engines import PEERS, Place, PreparationError, WorkerEnded
from peer_cases import CASES, OURS, OURS_8, SEARCH_TOKENS, Case, Setting, describe, mode_of
from peer_search import Found, Peers, SettingsFile, Timing, load_prompts, tune
from peer_table import FIRST, ROWS, Measured, Row, RowResult, goals, judge, lines

from foretoken.lab.stats.repeats import in_turn
from foretoken.shape.model import ModelShape

TURNS, PAUSE_S, THREADS = 7, 0.5, 2
FAR = 0.5
"""A peer whose best setting came to less than this share of the fastest peer's is not asked again:
it cannot become the fastest one, and slow engines would take most of the time."""
WARM_UP_TOKENS = 8
PARTS = tuple(dict.fromkeys(row.part for row in ROWS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    engine: str
    setting: Setting


def far_behind(speeds: Mapping[str, float]) -> dict[str, str]:
    """Peers that a search has found much slower than the fastest one, with the reason."""
    best = max(speeds, key=lambda name: speeds[name], default="")
    return {
        name: f"{speed / speeds[best]:.2f} of {best}'s speed when it was tuned: not asked again"
        for name, speed in speeds.items()
        if speed < FAR * speeds[best]
    }


def choose_arms(case: Case, found: Mapping[str, Found]) -> tuple[dict[str, Arm], dict[str, str]]:
    """Arms by name from each engine's search, and who is left out, with the reason. We are also
    asked with the draft precision of each peer."""
    able = {engine: one for engine, one in found.items() if one.best}
    slow = far_behind({e: one.speed for e, one in able.items() if e not in (OURS, OURS_8)})
    missing = dict.fromkeys(found.keys() - able.keys(), "works in no setting that was tried") | slow
    arms = {e: Arm(engine=e, setting=one.best) for e, one in able.items() if e not in slow}
    if case.draft and OURS in arms:
        for engine in arms.keys() - {OURS, OURS_8}:
            draft = arms[engine].setting.get("draft", "16 bit")
            own = Arm(engine=OURS, setting={**arms[OURS].setting, "draft": draft})
            if own not in arms.values():
                arms[f"{OURS} (draft {draft})"] = own
    return arms, missing


def compare(
    peers: Peers, case: Case, arms: Mapping[str, Arm], given: argparse.Namespace
) -> tuple[dict[str, list[Timing]], dict[str, str]]:
    """Load all arms and ask them in turns; an engine that ends is left out with the reason."""
    missing: dict[str, str] = {}
    timings: dict[str, list[Timing]] = {}
    tokens = min(given.tokens or case.tokens, case.tokens)
    with ExitStack() as stack:
        workers = {}
        for name, arm in arms.items():
            try:
                worker = stack.enter_context(peers.load(arm.engine, case, arm.setting))
                peers.measure(worker, case, WARM_UP_TOKENS)
            except (WorkerEnded, PreparationError) as error:
                missing[name] = str(error)
                continue
            workers[name], timings[name] = worker, []
            print(f"    {name}: {worker.versions}")
        for turn in range(given.repeats):
            for name in in_turn(list(workers), turn):
                time.sleep(PAUSE_S)
                timing = peers.measure(workers[name], case, tokens)
                read = (timing.read_gb_per_s + peers.probe.gb_per_s()) / 2
                timings[name].append(replace(timing, read_gb_per_s=read))
    return timings, missing


def measured(
    case: Case, arm: Arm, timings: Sequence[Timing], metric: str, tokens: int, shape: ModelShape
) -> Measured:
    """An arm by a metric; beside the seconds of plain decoding their floor."""
    floors = list[float]()
    if metric == FIRST:
        seconds = [timing.prefill_s for timing in timings]
    else:
        seconds = [timing.decode_s / ((tokens - 1) * case.batch) for timing in timings]
        if case.draft is None and case.batch == 1:
            read = floor_bytes(shape, case.weights, case.prompt_tokens + tokens / 2) / 1e9
            floors = [read / t.read_gb_per_s for t in timings if t.read_gb_per_s]
    middle = statistics.median(seconds)
    return Measured(
        seconds=tuple(seconds),
        shown=middle if metric == FIRST else 1.0 / middle,
        unit="s" if metric == FIRST else "tokens/s",
        read_gb_per_s=statistics.median(t.read_gb_per_s for t in timings),
        note=f"{mode_of(arm.engine, case.weights, arm.setting)}; {describe(arm.setting)}",
        right=all(timing.right for timing in timings),
        floor_s=tuple(floors),
    )


def best_of_engine(arms: Mapping[str, Arm], found: Mapping[str, Measured]) -> dict[str, Measured]:
    """Each engine's arm: ours is what its own search chose, a peer's is its only one."""
    return {arms[name].engine: found[name] for name in reversed(list(found))}


class Table:
    """The parts of the table, with the options of the command line."""

    def __init__(self, given: argparse.Namespace, where: Mapping[str, Any]) -> None:
        """Read what was tuned before."""
        self._given = given
        place = Place(given.models, given.environments, given.torch_index)
        self._peers = Peers(place, ReadProbe(THREADS), load_prompts(given.models, "fresh"))
        self._shape = ModelShape.from_config(given.models / "cycle-target")
        shape = f"{self._shape.num_hidden_layers} layers of {self._shape.hidden_size}"
        machine = {key: where[key] for key in ("cpu", "cores", "cpu_flags")}
        self._file = SettingsFile(given.settings, {**machine, "models": shape})
        self.absent: dict[str, str] = {}
        for engine in given.peer:
            try:
                place.environment(engine)
            except (PreparationError, OSError, subprocess.SubprocessError) as error:
                self.absent[engine] = f"could not be installed: {error}"
        self._engines = [e for e in (OURS, OURS_8, *given.peer) if e not in self.absent]

    def tune(self, part: str) -> dict[str, Found]:
        """Best settings of the engines for a case, searched where they are not known."""
        own = [engine for engine in self._engines if engine in CASES[part].engines]
        again, tokens = self._given.search, self._given.search_tokens
        return {
            engine: tune(self._peers, self._file, engine, part, again=again, tokens=tokens)
            for engine in own
        }

    def run(self, part: str) -> list[RowResult]:
        """Measure a part and judge its rows."""
        case, rows = CASES[part], [row for row in ROWS if row.part == part]
        arms, missing = choose_arms(case, self.tune(part))
        timings, failed = compare(self._peers, case, arms, self._given)
        tokens = min(self._given.tokens or case.tokens, case.tokens)
        judged = []
        for row in rows:
            found = {
                name: measured(case, arms[name], own, row.metric, tokens, self._shape)
                for name, own in timings.items()
            }
            note = self._note(row, {**missing, **failed})
            judged.append(judge(row, best_of_engine(arms, found), note=note))
        return judged

    def _note(self, row: Row, missing: Mapping[str, str]) -> str:
        """Who is not in a row that could be, and why."""
        other = OURS if row.ours == OURS_8 else OURS_8
        everyone = {**self.absent, **missing}
        return "; ".join(f"{name}: {why}" for name, why in everyone.items() if name != other)


def make_models(folder: Path, shape: str) -> None:
    """The cycle models, unless they are there."""
    names = ("cycle-target", "cycle-draft-80")
    if not all((folder / name / "model.safetensors").is_file() for name in names):
        print(f"making models in {folder} (once)", flush=True)
        script = str(ROOT / "benchmarks" / "make_models.py")
        subprocess.run([sys.executable, script, str(folder), "--shape", shape], check=True)


def make_arguments() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="made by --prepare if missing")
    parser.add_argument("--environments", type=Path, required=True, help="where venvs go")
    parser.add_argument("--prepare", action="store_true", help="install, convert, tune, then stop")
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--torch-index", help="package index of a CPU build of PyTorch")
    parser.add_argument("--tokens", type=int, help="at most; default: what each case says")
    parser.add_argument("--settings", type=Path, help="default: MODELS/peer-search.json")
    parser.add_argument("--search", action="store_true", help="search what is known already, too")
    parser.add_argument("--search-tokens", type=int, default=SEARCH_TOKENS,
                        help="each setting is tried with; default: %(default)s")  # fmt: skip
    parser.set_defaults(repeats=TURNS)
    return parser


def main() -> None:
    given = make_arguments().parse_args()
    if given.quick:
        given.repeats, given.tokens, given.search_tokens = 2, 24, 8
        given.models = given.models / "quick"
    given.settings = given.settings or given.models / "peer-search.json"
    if given.prepare:
        make_models(given.models, "tiny" if given.quick else "1b")
    where = announce(given)
    table = Table(given, where)
    for engine, why in table.absent.items():
        print(f"left out: {engine}: {why}", flush=True)
    results: list[RowResult] = []
    for part in given.parts:
        print(f"\n== {part}", flush=True)
        if given.prepare:
            for engine, found in table.tune(part).items():
                print(f"{engine}: {describe(found.best) or 'nothing works'}", flush=True)
            continue
        for row in table.run(part):
            print("\n".join(lines(row)), flush=True)
            results.append(row)
    if not given.prepare:
        finish("peers", where, given, {"rows": results, "left_out": table.absent}, goals(results))


if __name__ == "__main__":
    main()
