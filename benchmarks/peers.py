"""Foretoken against other engines at their best, on the same models, prompts and weights, in turns.

    python benchmarks/peers.py --models MODELS --environments FOLDER --prepare
    python benchmarks/peers.py --models MODELS --environments FOLDER

`make bench-peers-prepare` and `make bench-peers` are these two. The first makes the models,
installs each peer into a virtual environment of its own, converts, and tunes every engine for every
case, ours too (`peer_search.py`); what was found is kept and used again on the same machine with
the same versions. The second prints the table of `peer_table.py`: each row with its mode, its goal,
who met it and by how much it was missed.

All engines of a row stay loaded and take turns; ratios are of medians over turns, with 95 % of
their bootstrap. Beside each figure stands what memory gave to plain reading right then. A part that
has been measured is kept until the whole table is, so that an ended run goes on where it was.
A peer that cannot be installed is named and left out. `--instructions avx2` makes the table of a
processor without AVX-512, as far as each engine can be held to that (`peer_instructions.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, Ratio, announce, finish, make_parser, ratio_of_medians
from peer_cases import CASES, OURS, OURS_8, describe
from peer_compare import (
    CaseResult,
    Tuner,
    asking_for,
    choose_arms,
    compare,
    measured,
    searching_for,
)
from peer_floor import LimitsProbe
from peer_instructions import CHOICES, NATIVE, STAYS, VARIABLES, suffix_of
from peer_kept import Kept
from peer_load import Loader
from peer_servers import SERVING, serve_and_measure, server_arms
from peer_settings import Found, SettingsFile
from peer_setup import PEERS, is_installed
from peer_starts import PAIRS, starts
from peer_table import (
    ALLOWED_S,
    DECODE,
    FIRST,
    ROWS,
    SIXTEEN,
    WEIGHT_ONLY,
    Measured,
    Row,
    RowResult,
    goals,
    judge,
    lines,
)
from peer_vllm_int8 import write_int8

from foretoken.shape.model import ModelShape

STANDARD = ("openvino", "llama-cpp", "vllm", "onnxruntime")
TURNS = 7
TURN_EXTRA_S = 1.5
"""Of one arm's turn: the pause, and measuring the machine before and after."""
LOAD_S = {"vllm": 60.0}
OTHER_LOAD_S = 8.0
START_S = 6.0
STARTING = (OURS, "openvino", "llama-cpp")
"""Engines whose start-up is measured."""
SERVER_TURN_S = 30.0
LOOP_S = 90.0
MODELS = ("cycle-target", "cycle-draft-80", "cycle-draft-100")
MODELS_MINUTES = 5
INSTALL_MINUTES = {"openvino": 8, "llama-cpp": 20, "vllm": 8, "transformers": 4, "onnxruntime": 5}
SEARCH_MINUTES = {OURS: 0.7, OURS_8: 0.7, "vllm": 6.0}
OTHER_SEARCH_MINUTES = 2.0


class Table:
    """The parts of the table, with the options of the command line."""

    def __init__(self, arguments: argparse.Namespace, where: Mapping[str, Any]) -> None:
        """Find out which engines there are, and read what was kept."""
        self._given = arguments
        self._models: Path = arguments.models
        self._loader = loader_of(arguments)
        self._probe = LimitsProbe(2)
        self._shape = ModelShape.from_config(arguments.models / "cycle-target")
        wanted = (OURS, OURS_8, *arguments.peer)
        self.absent = {e: why for e in wanted if (why := self._loader.absent(e)) is not None}
        self._engines = [engine for engine in wanted if engine not in self.absent]
        path: Path = arguments.settings
        suffix = suffix_of(arguments.instructions)
        own = path.with_name(path.stem + suffix + path.suffix) if suffix else None
        self._file = SettingsFile(path, machine_of(where, arguments.models), own)
        self._tuner = Tuner(self._engines, self._loader, self._file, self._probe)

    def versions(self) -> dict[str, dict[str, str]]:
        """Of every engine that takes part."""
        return {engine: self._loader.versions(engine) for engine in self._engines}

    def tune(self, name: str, only: Sequence[str] | None = None) -> dict[tuple[str, str], Found]:
        """Best settings of the engines for a case, searched where they are not known."""
        case = CASES[name]
        asking = searching_for(case, self._models, self._given.search_tokens)
        return {(engine, name): self._tuner.tune(engine, name, asking)
                for engine in self._engines
                if engine in case.engines and (only is None or engine in only)}  # fmt: skip

    def forget(self, names: Sequence[str]) -> None:
        """Search again what is known."""
        self._file.forget(self._engines, names)

    def seconds(self, part: str) -> float:
        """About how long a part takes, from what searches have measured."""
        turns, loads = self._given.repeats, len(self._engines) * START_S
        if part == "start-up":
            return len(PAIRS) * (turns + 1) * loads
        if part == "loop":
            return len(PAIRS) * LOOP_S * turns / TURNS
        if part.startswith("server"):
            served = [e for e in self._engines if e in (OURS, *SERVING)]
            return turns * len(served) * SERVER_TURN_S + LOAD_S["vllm"]
        names = cases_of(part)
        known = {
            (engine, name): found
            for name in names
            for engine in self._engines
            if engine in CASES[name].engines and (found := self._tuner.found(engine, name))
        }
        total = 0.0
        for arm in choose_arms(names, known).arms.values():
            work = sum(expected_s(name, known.get((arm.engine, name))) for name in names)
            total += LOAD_S.get(arm.engine, OTHER_LOAD_S) + work
            total += turns * (TURN_EXTRA_S + work)
        return total

    def untuned(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Engines and cases that have to be searched."""
        return [
            (engine, name)
            for name in names
            for engine in self._engines
            if engine in CASES[name].engines and self._tuner.found(engine, name) is None
        ]

    def run(self, part: str, rows: Sequence[Row]) -> list[RowResult]:
        """Measure a part and judge its rows."""
        if part == "start-up":
            return [self._start(row) for row in rows]
        if part == "loop":
            return [self._loop(row) for row in rows]
        if part.startswith("server"):
            return self._serve(part, rows)
        return self._cases(part, rows)

    def _cases(self, part: str, rows: Sequence[Row]) -> list[RowResult]:
        names = cases_of(part)
        found = {key: one for name in names for key, one in self.tune(name).items()}
        chosen = choose_arms(names, found)
        case = CASES[names[0]].work
        asking = asking_for(case, self._models, prompts=self._given.prompts,
                            tokens=self._given.tokens)  # fmt: skip
        result = compare(case, chosen, asking, self._loader, self._probe, self._given.repeats)
        judged = []
        for row in rows:
            own = measured(case, result, row.metric, asking, self._shape)
            judged.append(judge(row, own, note=self._note(row, result.missing)))
        self._show_versions(result)
        return judged

    def _serve(self, part: str, rows: Sequence[Row]) -> list[RowResult]:
        arms, missing = server_arms(part, self._models, self._loader, self._given.peer)
        if rows[0].ours not in arms:
            return [judge(row, {}, note=missing[row.ours]) for row in rows]
        logs = self._given.environments / "logs"
        tokens = {"tokens": 8} if self._given.quick else {}
        found, failed = serve_and_measure(
            arms, self._models, logs, self._probe, turns=self._given.repeats, **tokens
        )
        notes = {**missing, **failed}
        return [judge(row, found[int(row.metric)], note=self._note(row, notes)) for row in rows]

    def _start(self, row: Row) -> RowResult:
        name = PAIRS[row.metric]
        settings = {
            engine: one.best for (engine, _), one in self.tune(name, STARTING).items() if one.best
        }
        found, missing = starts(
            self._loader, settings, row.metric, self._models, self._given.repeats
        )
        ours = found.get(row.ours)
        own = ratio_to_allowed(ours) if ours else None
        return judge(row, found, own=own, note=self._note(row, missing))

    def _loop(self, row: Row) -> RowResult:
        command = [sys.executable, str(ROOT / "benchmarks" / "loop.py"), "--parts", "overhead"]
        command += ["--models", str(self._models), "--weights", row.metric, "--threads", "2"]
        command += ["--quick"] if self._given.quick else ["--repeats", str(self._given.repeats)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return judge(row, {}, note=f"loop.py failed: {done.stderr[-300:]}")
        document = json.loads(done.stdout.strip().splitlines()[-1])
        found = document["results"]["overhead"]
        read = self._probe.now().read_bytes_per_s / 1e9
        ours = Measured(
            seconds=(),
            shown=found["speedup"]["value"],
            unit="x",
            read_gb_per_s=read,
            note=f"AL {found['acceptance_length']:.2f}, V {found['verification']['value']:.2f}, "
            f"c {found['draft']['value']:.3f}, AL / (V + k c) {found['predicted']:.2f}",
            right=found["same"],
        )
        return judge(row, {row.ours: ours}, own=Ratio(**found["efficiency"]))

    def _note(self, row: Row, missing: Mapping[str, str]) -> str:
        """Who is not in a row that could be, and why."""
        everyone = {**self.absent, **missing}
        other = OURS if row.ours == OURS_8 else OURS_8
        return "; ".join(f"{name}: {why}" for name, why in everyone.items() if name != other)

    def _show_versions(self, result: CaseResult) -> None:
        for name, versions in result.versions.items():
            text = ", ".join(f"{package} {version}" for package, version in versions.items())
            print(f"    {name}: {text}")


def rows_of(part: str) -> list[Row]:
    """The table's rows of a part; of another case one row without a goal."""
    table = parts_of(ROWS)
    found = table.get(cases_of(part)[0] if part in CASES else part)
    if found is not None:
        return found
    case = CASES[part]
    mode = SIXTEEN if case.weights == "16 bit" else WEIGHT_ONLY
    metric = FIRST if case.prefill else DECODE
    return [Row(name=part, part=part, metric=metric, mode=mode, wanted=None)]


def cases_of(part: str) -> list[str]:
    """Cases of a part: the one it is named after, and those of equal work."""
    return [name for name, case in CASES.items() if case.work == CASES[part].work]


def parts_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the part that is run for them; cases of equal work are one part."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        part = cases_of(row.part)[0] if row.part in CASES else row.part
        found.setdefault(part, []).append(row)
    return found


def expected_s(name: str, found: Found | None) -> float:
    """Seconds of one turn of a case, from the speed that a search has measured; 0 if unknown."""
    if found is None or not found.speed:
        return 0.0
    if CASES[name].prefill:
        return 1.0 / found.speed
    return CASES[name].tokens / found.speed


def ratio_to_allowed(ours: Measured) -> Ratio:
    """The second that is allowed over those that were taken."""
    return ratio_of_medians([ALLOWED_S] * len(ours.seconds), ours.seconds)


def machine_of(where: Mapping[str, Any], models: Path) -> dict[str, Any]:
    """What settings depend on."""
    config = json.loads((models / "cycle-target" / "config.json").read_text())
    shape = f"{config['num_hidden_layers']} layers of {config['hidden_size']}"
    return {**{key: where[key] for key in ("cpu", "cores", "cpu_flags")}, "models": shape}


def make_arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser(__doc__)
    parts = tuple(parts_of(ROWS))
    parser.add_argument("--models", type=Path, required=True, help="made by --prepare if missing")
    parser.add_argument("--environments", type=Path, required=True, help="where venvs go")
    parser.add_argument("--prepare", action="store_true", help="install, convert, tune, then stop")
    parser.add_argument("--no-search", action="store_true", help="with --prepare: tune nothing")
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=list(STANDARD))
    parser.add_argument("--parts", nargs="+", choices=[*parts, *CASES], default=list(parts),
                        help="of the table, or other cases; default: the table")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="measure kept parts again, too")
    parser.add_argument("--torch-index", help="package index of a CPU build of PyTorch")
    parser.add_argument(
        "--instructions",
        choices=CHOICES,
        default=NATIVE,
        help="hold every engine to these; settings are the machine's own where they are known",
    )
    parser.add_argument("--prompts", type=int, default=1, help="per turn; default: %(default)s")
    parser.add_argument("--tokens", type=int, help="at most; default: what each case says")
    parser.add_argument("--settings", type=Path, help="default: MODELS/peer-settings.json")
    parser.add_argument("--search", action="store_true", help="search what is known already, too")
    parser.add_argument("--search-tokens", type=int, default=50,
                        help="each setting is tried with; default: %(default)s")  # fmt: skip
    parser.set_defaults(repeats=TURNS)
    return parser


def loader_of(given: argparse.Namespace) -> Loader:
    """Of engines as the command line asks for them."""
    return Loader(given.models, given.environments, given.torch_index, given.instructions)


def has_models(folder: Path) -> bool:
    """Whether make_models.py has come to its end there."""
    return all((folder / name / "model.safetensors").is_file() for name in MODELS)


def make_models(folder: Path, shape: str) -> None:
    """The cycle models, unless they are there."""
    if has_models(folder):
        return
    print(f"making models in {folder} (once)", flush=True)
    script = str(ROOT / "benchmarks" / "make_models.py")
    command = [sys.executable, script, str(folder), "--only", "cycle", "--shape", shape]
    subprocess.run(command, check=True)


def cases_to_tune(parts: Sequence[str]) -> list[str]:
    """Cases whose settings the parts use, each once."""
    names = [name for part in parts for name in (cases_of(part) if part in CASES else ())]
    names += PAIRS.values() if "start-up" in parts else ()
    return list(dict.fromkeys(names))


def prepare(given: argparse.Namespace) -> None:
    """All that is done once: models, environments, converted files."""
    missing = [peer for peer in given.peer if not is_installed(peer, given.environments)]
    minutes = sum(INSTALL_MINUTES[peer] for peer in missing)
    minutes += 0 if has_models(given.models) else MODELS_MINUTES
    print(f"to install: {', '.join(missing) or 'nothing'}; models, installing and compiling take "
          f"about {minutes} minutes, conversions up to 10 more, once", flush=True)  # fmt: skip
    make_models(given.models, "tiny" if given.quick else "1b")
    loader = loader_of(given)
    names = cases_to_tune(given.parts)
    for engine in (OURS_8, *given.peer):
        wanted = [CASES[name] for name in names if engine in CASES[name].engines]
        why = loader.prepare(engine, wanted)
        print(f"{engine}: {'left out, ' + why if why else 'ready'}", flush=True)
    if "vllm" in given.peer and "server, int8" in given.parts:
        write_int8(given.models / "cycle-target")


def search(given: argparse.Namespace, table: Table) -> None:
    """Tune every engine for every case that will be run, unless it is known."""
    names = cases_to_tune(given.parts)
    left = table.untuned(names)
    minutes = sum(SEARCH_MINUTES.get(engine, OTHER_SEARCH_MINUTES) for engine, _ in left)
    print(f"{len(left)} searches to make, about {minutes:.0f} minutes", flush=True)
    for name in names:
        for (engine, _), found in table.tune(name).items():
            print(f"{name}, {engine}: {describe(found.best) or 'nothing works'}", flush=True)


def run_table(given: argparse.Namespace, table: Table, where: Mapping[str, Any]) -> None:
    """Every part, kept ones from the file; then the verdicts and one line of JSON."""
    key = {"git": where["git"], "cpu": where["cpu"], "versions": table.versions(),
           "quick": given.quick, "repeats": given.repeats, "tokens": given.tokens,
           "prompts": given.prompts}  # fmt: skip
    kept = Kept(given.models / f"peer-table{suffix_of(given.instructions)}.json", key)
    known = {} if given.again else {p: rows for p in given.parts if (rows := kept.rows(p))}
    left = [part for part in given.parts if part not in known]
    minutes = sum(table.seconds(part) for part in left) / 60
    print(f"{len(left)} of {len(given.parts)} parts to measure, about {minutes:.0f} minutes")
    for engine, why in table.absent.items():
        print(f"left out: {engine}: {why}")
    if given.instructions != NATIVE:
        for engine, what in STAYS.items():
            print(f"not held to {given.instructions}: {engine}: {what}")
    results: list[RowResult] = []
    for part in given.parts:
        found = known.get(part)
        if found is None:
            print(f"\n== {part}, about {table.seconds(part) / 60:.0f} minutes", flush=True)
            began = time.monotonic()
            found = table.run(part, rows_of(part))
            kept.put(part, found)
            print(f"({time.monotonic() - began:.0f} s)")
        else:
            print(f"\n== {part}, kept from {kept.when(part)}")
        for row in found:
            print("\n".join(lines(row)), flush=True)
        results += found
    print()
    finish("peers", where, given, {"rows": results, "left_out": table.absent}, goals(results))
    if set(given.parts) >= set(parts_of(ROWS)):
        kept.remove()


def main() -> None:
    """Prepare or measure."""
    given = make_arguments().parse_args()
    if given.quick:
        given.repeats, given.tokens, given.search_tokens = 2, 24, 8
        given.models = given.models / "quick"
    # For this process, whose limits are measured with them, and for all that it starts.
    os.environ.update(VARIABLES[given.instructions])
    given.settings = given.settings or given.models / "peer-settings.json"
    if given.prepare:
        prepare(given)
        if given.no_search:
            return
    where = announce(given)
    table = Table(given, where)
    if given.search:
        table.forget(cases_to_tune(given.parts))
    if given.prepare:
        search(given, table)
    else:
        run_table(given, table, where)


if __name__ == "__main__":
    main()
