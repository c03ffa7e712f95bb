"""A published model and its draft, as people have them: Foretoken beside llama.cpp at its best.

    python benchmarks/real_pair.py --model TARGET.gguf --draft DRAFT.gguf --environments FOLDER

Both are servers, asked over HTTP as their clients do: prompts of code, chat, edits and summaries,
one request at a time, in turns. First every setting of both is tried for few tokens; then the best
plain and the best of all go through whole turns, greedy and at temperature 0.7. Then prompts of 128
and 2,048 tokens, twelve requests at once, starts and memory. Speeds are the median answer's tokens
a second from the first token to the last. llama.cpp is compiled once, for this processor, below
FOLDER. `--parts` runs some of it; `--quick` is a smoke test. The last line is JSON.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bandwidth import ReadProbe
from common import Goal, announce, at_least, at_most, finish, make_parser, ratio_of_medians
from engines import install
from pair_prompts import EDIT, SUMMARY, prompts_of
from pair_servers import (
    OURS,
    PEER,
    Files,
    Running,
    Setting,
    imports_s,
    memory_of,
    our_settings,
    peer_settings,
    running,
)

from foretoken.errors import EndpointError
from foretoken.lab.http.client import connect
from foretoken.lab.http.timed import now
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.workload import Item
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.repeats import in_turn
from foretoken.shape.gguf import open_gguf
from foretoken.types.accepted import acceptance_rate, accepted_by_position

PROMPTS = (128, 2048)
LETTERS_PER_TOKEN = 4
TOGETHER = 12
ROUNDED = ", int8 activations"
SEARCH_TURN = 20
"""Of prompts: none that the measured turns ask."""
TIMEOUT_S = 600.0
Prompts = Sequence[tuple[str, str]]
"""Kinds and texts."""


@dataclass(slots=True)
class Bench:
    """What all parts need."""

    settings: argparse.Namespace
    files: Files
    logs: Path
    probe: ReadProbe
    results: dict[str, Any] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)

    def items(self, prompts: Prompts, tokens: int, temperature: float = 0.0) -> list[Item]:
        """Messages of a user, to be answered as the file's template has it; texts to go on with, to
        the last token, where it has none."""
        chat = open_gguf(self.files.model).get("tokenizer.chat_template", str) is not None
        return [
            Item(
                index=number,
                category=kind,
                prompt="" if chat else f"{text}\n",
                messages=({"role": "user", "content": text},) if chat else (),
                max_tokens=tokens,
                temperature=temperature,
                seed=number,
                parameters={} if chat else {"ignore_eos": True},
            )
            for number, (kind, text) in enumerate(prompts)
        ]


def ask(server: Running, items: Sequence[Item], *, together: bool = False) -> list[RequestRecord]:
    """The answers, one after another or all at once, each by a client of its own.

    Raises:
        RuntimeError: an answer is not whole.
    """
    return asyncio.run(_ask(server, items, together))


async def _ask(server: Running, items: Sequence[Item], together: bool) -> list[RequestRecord]:
    extra: dict[str, Any] = {**server.setting.body}
    client = await connect(ArmConfig(url=server.url, timeout_s=TIMEOUT_S, extra_body=extra))
    start_s = now()

    async def one(item: Item) -> RequestRecord:
        record = RequestRecord(index=item.index, category=item.category)
        return await client.complete(item, record, start_s, keep_text=True)

    try:
        if together:
            found = list(await asyncio.gather(*(one(item) for item in items)))
        else:
            found = [await one(item) for item in items]
    finally:
        await client.close()
    for record in found:
        if not record.ok:
            raise RuntimeError(f"{server.setting.engine}, {server.setting.name}: {record.error}")
    return found


def first_s(record: RequestRecord) -> float:
    """Seconds from the request to the first token."""
    assert record.first_s is not None and record.sent_s is not None
    return record.first_s - record.sent_s


def median_speed(records: Sequence[RequestRecord]) -> float:
    """The median answer's tokens a second from the first to the last; without single chunks."""
    speeds = []
    for one in records:
        assert one.first_s is not None and one.last_s is not None
        if one.last_s > one.first_s:
            speeds.append(one.tokens_after_first / (one.last_s - one.first_s))
    return statistics.median(speeds)


def drafts_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Drafts for each token, the share that was accepted, and by position where it is told."""
    known = [one.acceptance for one in records if one.acceptance is not None]
    drafted = sum(one.num_drafted for one in known)
    tokens = sum(one.output_tokens or 0 for one in records)
    accepted = sum(one.num_accepted for one in known)
    steps_j = list(map(sum, zip_longest(*(one.histogram for one in known), fillvalue=0)))
    return {
        "drafted_per_token": drafted / tokens if tokens else 0.0,
        "accepted_share": acceptance_rate(accepted, drafted),
        "accepted_by_position": list(accepted_by_position(steps_j, steps_j, of_all=True)),
    }


def try_all(bench: Bench, every: Sequence[Setting]) -> list[tuple[float, Setting]]:
    """Every setting once, few tokens, the fastest first; what fails is said and left out."""
    prompts, found = prompts_of(SEARCH_TURN, 1), []
    command, server, stack = None, None, ExitStack()
    with stack:
        for setting in every:
            try:
                if command != setting.command:
                    stack.close()
                    server = stack.enter_context(running(setting, bench.logs))
                    command = setting.command
                    ask(server, bench.items(prompts[:1], 8))
                assert server is not None
                asked = Running(url=server.url, setting=setting, process=server.process)
                speed = median_speed(ask(asked, bench.items(prompts, bench.settings.search_tokens)))
            except (EndpointError, RuntimeError) as error:
                print(f"  {setting.engine:10} {setting.name:46} {error}", flush=True)
                command = None
                continue
            found.append((speed, setting))
            print(f"  {setting.engine:10} {setting.name:46} {speed:6.1f} tokens/s", flush=True)
    return sorted(found, key=lambda one: -one[0])


def best_of(tried: Sequence[tuple[float, Setting]]) -> list[Setting]:
    """The fastest plain setting, and the fastest that drafts."""
    firsts = [[one for _, one in tried if one.drafts is drafts][:1] for drafts in (False, True)]
    return [setting for first in firsts for setting in first]


def measure_speed(bench: Bench) -> None:
    """Search both engines, then their best settings in turns."""
    tried = {
        OURS: try_all(bench, our_settings(bench.files)),
        PEER: try_all(bench, peer_settings(bench.files)),
    }
    bench.results["tried"] = {
        engine: {setting.name: speed for speed, setting in found} for engine, found in tried.items()
    }
    controlled = [one for _, one in tried[OURS] if "control" in one.name]
    arms = [*best_of(tried[OURS]), *controlled[:1], *best_of(tried[PEER])]
    named = {f"{one.engine}: {one.name}": one for one in arms}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(setting, bench.logs))
            for name, setting in named.items()
        }
        memory = dict[str, tuple[float, float]]()
        for temperature in bench.settings.temperatures:
            asked, reads = take_turns(bench, servers, temperature)
            memory |= {name: memory_of(server.process) for name, server in servers.items()}
            report_speed(bench, temperature, asked, reads)
        bench.results["memory_gb"] = memory
        for name, (resident, anonymous) in memory.items():
            print(f"{name:58} resident {resident:.2f} GB, anonymous {anonymous:.2f} GB")


Answers = Mapping[str, list[list[RequestRecord]]]
"""By arm: of each turn its answers."""


def take_turns(
    bench: Bench, servers: Mapping[str, Running], temperature: float
) -> tuple[Answers, list[float]]:
    """All arms over the same prompts, other ones in each turn, and what memory gave meanwhile."""
    asked: dict[str, list[list[RequestRecord]]] = {name: [] for name in servers}
    reads = []
    for turn in range(bench.settings.repeats):
        prompts = prompts_of(turn, bench.settings.each)
        items = bench.items(prompts, bench.settings.tokens, temperature)
        reads.append(bench.probe.gb_per_s())
        for name in in_turn(list(servers), turn):
            asked[name].append(ask(servers[name], items))
    return asked, reads


def report_speed(bench: Bench, temperature: float, asked: Answers, reads: Sequence[float]) -> None:
    """Print a table, keep it, and hold it against the goals."""
    read = statistics.median(reads)
    print(f"\ntemperature {temperature}; memory is read at {read:.1f} GB/s")
    speeds = {name: [median_speed(turn) for turn in turns] for name, turns in asked.items()}
    kept = dict[str, Any]()
    for name, turns in asked.items():
        whole = [one for turn in turns for one in turn]
        kinds = {
            kind: median_speed([one for one in whole if one.category == kind])
            for kind in dict.fromkeys(one.category for one in whole)
        }
        drafts = drafts_of(whole)
        first_ms = 1000 * statistics.median(first_s(one) for one in whole)
        kept[name] = {
            "tokens_per_s": statistics.median(speeds[name]), "turns": speeds[name],
            "by_kind": kinds, "first_ms": first_ms, **drafts,
        }  # fmt: skip
        by_kind = "  ".join(f"{kind} {speed:.1f}" for kind, speed in kinds.items())
        share = f"accepted {drafts['accepted_share']:.0%}"
        print(f"{name:58} {statistics.median(speeds[name]):6.1f} tokens/s   {by_kind}   {share}   "
              f"first token {first_ms:.0f} ms")  # fmt: skip
    bench.results[f"speed at temperature {temperature}"] = {"read_gb_per_s": read, **kept}
    ours = {name: speeds[name] for name in speeds if name.startswith(OURS)}
    theirs = {name: speeds[name] for name in speeds if name.startswith(PEER)}
    if temperature or not (ours and theirs):
        return
    plain = [next(name for name in side if "plain" in name) for side in (ours, theirs)]
    best = [max(side, key=lambda name: statistics.median(side[name])) for side in (ours, theirs)]
    for what, (one, other), wanted in (
        ("plain over llama.cpp's best plain", plain, 1.3),
        ("best over llama.cpp's best of everything", best, 1.6),
    ):
        ratio = ratio_of_medians(speeds[one], speeds[other])
        print(f"{what}: {ratio} ({one} / {other})")
        bench.goals.append(at_least(what, ratio.value, wanted))


def measure_prompts(bench: Bench) -> None:
    """First tokens of long prompts: tokens of a prompt for each second."""
    with ExitStack() as stack:
        plain = (our_settings(bench.files)[0], peer_settings(bench.files)[0])
        servers = {one.engine: stack.enter_context(running(one, bench.logs)) for one in plain}
        for length in PROMPTS:
            rates: dict[str, list[float]] = {name: [] for name in servers}
            for turn in range(bench.settings.repeats):
                text = "\n\n".join([*SUMMARY, *EDIT][turn % 7 :]) * 2
                prompt = f"Text {turn}. {text[: length * LETTERS_PER_TOKEN]}"
                item = Item(index=turn, prompt=prompt, max_tokens=1, temperature=0.0)
                for name in in_turn(list(servers), turn):
                    [one] = ask(servers[name], [item])
                    rates[name].append((one.prompt_tokens or 0) / first_s(one))
            ratio = ratio_of_medians(rates[OURS], rates[PEER])
            shown = ", ".join(f"{name} {statistics.median(of):.0f}" for name, of in rates.items())
            print(f"prompt of {length}: {shown} tokens/s, {ratio}")
            bench.results[f"prompt of {length}"] = rates
            bench.goals.append(at_least(f"prompt of {length} over llama.cpp", ratio.value, 1.3))


def measure_load(bench: Bench) -> None:
    """Twelve requests at once: control over plain decoding, and llama.cpp beside them."""
    ours = {one.name: one for one in our_settings(bench.files, TOGETHER)}
    control = "look-ups, control" if bench.files.draft is None else "draft and look-ups, control"
    arms = {"plain": ours["plain"], "control": ours[control]}
    rounded = f"{control}{ROUNDED}"
    if rounded in ours:
        arms |= {f"plain{ROUNDED}": ours[f"plain{ROUNDED}"], f"control{ROUNDED}": ours[rounded]}
    arms[PEER] = peer_settings(bench.files, TOGETHER)[0]
    times: dict[str, list[float]] = {name: [] for name in arms}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(one, bench.logs)) for name, one in arms.items()
        }
        for turn in range(bench.settings.repeats + 1):
            items = bench.items(prompts_of(turn, TOGETHER // 4), bench.settings.tokens)
            for name in in_turn(list(servers), turn):
                began = time.perf_counter()
                records = ask(servers[name], items, together=True)
                taken = time.perf_counter() - began
                tokens = sum(one.output_tokens or 0 for one in records)
                if turn:  # the first of them is warm-up
                    times[name].append(tokens / taken)
    for name, found in times.items():
        print(f"{TOGETHER} at once, {name:24} {statistics.median(found):6.1f} tokens/s")
    bench.results[f"{TOGETHER} at once"] = times
    for note in ("", ROUNDED):
        if f"control{note}" in times:
            over = ratio_of_medians(times[f"control{note}"], times[f"plain{note}"])
            peer = ratio_of_medians(times[f"control{note}"], times[PEER])
            print(f"control{note} over plain {over}, over llama.cpp {peer}")
            bench.goals.append(
                at_least(f"{TOGETHER} at once, control over plain{note}", over.value, 0.98)
            )


def measure_starts(bench: Bench) -> None:
    """Seconds from a process's start to its first answer: with nothing kept, and again."""
    ours, peer = our_settings(bench.files), peer_settings(bench.files)
    arms = {"plain": ours[0], PEER: peer[0]}
    if bench.files.draft is not None:
        arms["with a draft"] = next(one for one in ours if one.name == "draft, control")
        arms[f"{PEER} with a draft"] = next(one for one in peer if one.name == "draft, k=4")
    imports = statistics.median(imports_s() for _ in range(bench.settings.repeats))
    print(f"imports {imports:.2f} s")
    found: dict[str, list[float]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as caches:
        cold = Setting(engine=OURS, name="cold", command=ours[0].command,
                       env={**ours[0].env, "XDG_CACHE_HOME": caches})  # fmt: skip
        found["cold"] = [start_s(bench, cold)]
    for turn in range(bench.settings.repeats + 1):
        for name in in_turn(list(arms), turn):
            seconds = start_s(bench, arms[name])
            if turn:
                found[name].append(seconds)
    medians = {name: statistics.median(of) for name, of in found.items()}
    for name, seconds in medians.items():
        print(f"start, {name:24} {seconds:5.2f} s")
    bench.results["starts"] = {"imports_s": imports, **found}
    bench.goals += [
        at_most("start with nothing kept, s", medians["cold"], 4.0),
        at_most("second start, s", medians["plain"], 2.5),
        at_most("second start after the imports, s", medians["plain"] - imports, 0.7),
    ]


def start_s(bench: Bench, setting: Setting) -> float:
    """Seconds from a process's start to its first token."""
    began = time.perf_counter()
    with running(setting, bench.logs) as server:
        ask(server, bench.items([("", "Hello")], 1))
        return time.perf_counter() - began


PARTS = {
    "speed": measure_speed,
    "prompts": measure_prompts,
    "load": measure_load,
    "starts": measure_starts,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--draft", type=Path, help="a smaller one with the same vocabulary")
    parser.add_argument("--environments", type=Path, required=True, help="for llama.cpp")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--each", type=int, default=2, help="prompts of a kind; %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer; %(default)s")
    parser.add_argument("--search-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 0.7])
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.each, settings.tokens, settings.search_tokens = 1, 1, 8, 8
    threads = settings.threads or len(os.sched_getaffinity(0))
    environment = install("llama-cpp", settings.environments, None)
    where = announce(settings)
    files = Files(
        model=settings.model.resolve(),
        draft=settings.draft.resolve() if settings.draft else None,
        environment=environment,
        threads=threads,
    )
    with tempfile.TemporaryDirectory() as logs:
        bench = Bench(settings=settings, files=files, logs=Path(logs), probe=ReadProbe(threads))
        for part in settings.parts:
            print(f"\n{part}", flush=True)
            PARTS[part](bench)
    finish("real_pair", where, settings, bench.results, bench.goals)


if __name__ == "__main__":
    main()
