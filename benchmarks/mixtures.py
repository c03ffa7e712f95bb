"""Mixtures of experts at full width: Foretoken beside llama.cpp, step by step.

    python benchmarks/mixtures.py MODEL --files FOLDER --vocabulary FILE.gguf --environments FOLDER

MODEL is a name of `mixture_files.py`, which writes the file if it is not there: no trained router
is had, so rows choose evenly, or as a bias of routers has it (`--skew`). Both engines run the same
tokens, in turns, in the same file, on as many threads: steps of n rows of one sequence and of n
sequences, and prompts. llama.cpp is driven by `workers/llama_rows.c`, compiled beside its library;
`--parts search` tries its threads, attention, repacking and batches for the settings that the other
parts are given. `--parts serve` compares servers: without speculation, twice, and control beside
drafts of 80 % and of none, which `never_slower_drafter.py` gives from answers that it was told.
Ours runs with activations of 16 bits, and of 8 as llama.cpp's. V(n) is the time of a step of n rows
over that of one. What `info` says V(n) is, is worked out for the experts that the steps read. Files
are not small and not committed. The last line is JSON.
"""

import argparse
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bandwidth import ReadProbe
from common import (
    Goal,
    announce,
    at_least,
    at_most,
    finish,
    make_parser,
    ratio_of_medians,
    use_threads,
)
from engines import install, library_path, llama_folder, run_quietly
from mixture_files import MIXTURES, write_mixture
from never_slower_arms import ADMIN_KEY, Arm, Pair, Servers
from never_slower_drafter import Stream, write_streams
from never_slower_load import Ask, Crowd

from foretoken.config import EngineConfig
from foretoken.config.memory import ModelMemory
from foretoken.control.cost import StepShape
from foretoken.control.usual_machine import usual_machine
from foretoken.engine.engine import EngineParts
from foretoken.engine.wiring import build_engine
from foretoken.lab.stats.repeats import in_turn
from foretoken.models.tensors import SpanLayout
from foretoken.shape import ModelShape

ROWS = (1, 2, 4, 6, 8, 16)
PROMPT = 2048
CONTEXT = 32
PAUSE_S = 0.03
"""Threads of the engine before may still wait for work."""
OURS, EIGHT, PEER = "foretoken", "foretoken, 8-bit activations", "llama.cpp"
SOURCE = Path(__file__).with_name("workers") / "llama_rows.c"
Shape = tuple[int, int]
"""Rows of a step, and the sequences that share them."""
SHAPES: tuple[Shape, ...] = (*((n, 1) for n in ROWS), *((n, n) for n in ROWS[1:]))


@dataclass(frozen=True, slots=True)
class Took:
    """A step: its time, the token of each row, and the experts that a layer read."""

    seconds: float
    tokens: list[int]
    experts: float | None = None


PLAIN_STEPS = 5
"""Steps of one row that a turn has: they are short, and all others are held against them."""
Step = Callable[[list[int], int], Took]
"""Of these tokens, shared among so many sequences; 0: a prompt."""


class Ours:
    """Foretoken's runner, whose steps leave nothing behind."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self._size = parts.runner.page_size
        self._each = -(-(PROMPT + 1) // self._size)
        for sequence in range(max(ROWS)):
            ids = [(7919 * i + 31 * sequence) % parts.runner.model.shape.vocab_size
                   for i in range(CONTEXT)]  # fmt: skip
            self._run([ids], [self._layout(sequence, 0, CONTEXT)], [CONTEXT - 1])

    def _layout(self, sequence: int, start: int, count: int) -> SpanLayout:
        # A sequence's first pages lie behind those of the first, which prompts want.
        pages = -(-(CONTEXT + max(ROWS)) // self._size)
        first = sequence and self._each + (sequence - 1) * pages
        table = list(range(first, first + (pages if sequence else self._each)))
        return SpanLayout(start=start, num_tokens=count, page_table=table)

    def _run(self, ids: list[list[int]], layouts: list[SpanLayout], rows: list[int]) -> Took:
        with self.parts.threads, torch.inference_mode():
            began = time.perf_counter()
            output = self.parts.runner.forward(layouts, ids, rows)
            tokens = output.logits_RV.argmax(dim=-1).tolist()
            seconds = time.perf_counter() - began
        return Took(seconds, tokens, output.experts_read)

    def step(self, tokens: list[int], sequences: int) -> Took:
        """A step behind the context of so many sequences, all of whose rows want logits."""
        if not sequences:
            found = self._run([tokens], [self._layout(0, 0, len(tokens))], [len(tokens) - 1])
            ids = [(7919 * i) % self.parts.runner.model.shape.vocab_size for i in range(CONTEXT)]
            self._run([ids], [self._layout(0, 0, CONTEXT)], [CONTEXT - 1])
            return found
        each = len(tokens) // sequences
        layouts = [self._layout(at, CONTEXT, each) for at in range(sequences)]
        ids = [tokens[at * each : (at + 1) * each] for at in range(sequences)]
        return self._run(ids, layouts, list(range(len(tokens))))


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What llama.cpp is told."""

    threads: int
    pool: str = "own"
    flash: bool = True
    repack: bool = True
    ubatch: int = 512


@contextmanager
def llama(model: Path, environment: Path, told: PeerSettings) -> Iterator[Step]:
    """llama.cpp's steps, in a process that runs as long as the block."""
    folder = llama_folder(environment)
    program = folder / "llama_rows"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        source, libraries = folder / "source", folder / "pool" / "bin"
        include = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
        linked = ["-lllama", "-lggml", "-lggml-cpu", "-lggml-base", f"-Wl,-rpath-link,{libraries}"]
        command = ["cc", "-O2", str(SOURCE), *include, f"-L{libraries}", *linked]
        run_quietly([*command, "-o", str(program)])
    flags = told.threads, int(told.flash), int(told.repack), told.ubatch, CONTEXT, max(ROWS)
    words = map(str, (program, model, *flags))
    env = {**os.environ, "LD_LIBRARY_PATH": library_path(environment, told.pool)}
    pipe = subprocess.PIPE
    with subprocess.Popen([*words], stdin=pipe, stdout=pipe, text=True, env=env) as process:
        lines, said = process.stdin, process.stdout
        assert lines is not None and said is not None
        if not said.readline():
            raise SystemExit("llama.cpp did not start")

        def step(tokens: list[int], sequences: int) -> Took:
            what = f"step {sequences}" if sequences else "prompt"
            lines.write(f"{what} {' '.join(map(str, tokens))}\n")
            lines.flush()
            seconds, *found = said.readline().split()
            return Took(float(seconds), [int(token) for token in found])

        try:
            yield step
        finally:
            lines.close()


@dataclass(slots=True)
class Bench:
    """What the parts share."""

    settings: argparse.Namespace
    model: Path
    memory: ModelMemory
    vocabulary: int
    probe: ReadProbe
    results: dict[str, Any] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)

    def tokens(self, seed: int, count: int) -> list[int]:
        return random.Random(seed).choices(range(self.vocabulary), k=count)

    def read_bytes(self, experts: float) -> float:
        """Of a step whose layers read so many experts, as `info` and `lab plan` count them."""
        count = MIXTURES[self.settings.model].experts
        return self.memory.step_bytes(2, 0) + experts / count * self.memory.expert_bytes(2)

    def planned_s(self, experts: float, rows: int, name: str) -> float:
        """Of such a step with so many rows, as `info` has it."""
        cost = usual_machine(self.memory, 2, x_bits=8 if name == EIGHT else 16)
        return cost.seconds(StepShape(rows, context=CONTEXT, experts=experts))


def measure_steps(bench: Bench, arms: Mapping[str, Step]) -> None:
    """Steps of all shapes in turns, each after one that does not count; short ones last, since the
    threads of the engine before may look for work for as long as some of them take."""
    times: dict[str, dict[Shape, list[float]]] = {
        name: {shape: [] for shape in SHAPES} for name in arms
    }
    experts: dict[Shape, list[float]] = {shape: [] for shape in SHAPES}
    reads, same = list[float](), list[bool]()
    for turn in range(bench.settings.repeats + 1):
        reads.append(bench.probe.gb_per_s())
        said: dict[str, list[int]] = {name: [] for name in arms}
        for name in in_turn(list(arms), turn):
            time.sleep(PAUSE_S)
            for rows, sequences in reversed(SHAPES):
                arms[name](bench.tokens(-1 - rows, rows), sequences)
                seconds = []
                for again in range(PLAIN_STEPS if rows == 1 else 1):
                    seed = 1000 * turn + 100 * again + rows + sequences
                    took = arms[name](bench.tokens(seed, rows), sequences)
                    seconds.append(took.seconds)
                    if turn and name == OURS and took.experts is not None:
                        experts[rows, sequences].append(took.experts)
                said[name] += took.tokens
                if turn:
                    times[name][rows, sequences].append(statistics.median(seconds))
        same += [a == b for a, b in zip(said[OURS], said[PEER], strict=True)]
    read = statistics.median(reads)
    touched = {shape: statistics.mean(found) for shape, found in experts.items()}
    show_steps(bench, times, touched, read)
    bench.results["steps"] = {
        "read_gb_per_s": read,
        "rows_whose_tokens_are_llama.cpp's": statistics.mean(same),
        "experts_of_a_layer": by_name(touched),
        **{name: by_name(own) for name, own in times.items()},
    }


def by_name(of_shapes: Mapping[Shape, Any]) -> dict[str, Any]:
    return {f"{rows} of {sequences}": found for (rows, sequences), found in of_shapes.items()}


def show_steps(
    bench: Bench,
    times: Mapping[str, Mapping[Shape, Sequence[float]]],
    touched: Mapping[Shape, float],
    read: float,
) -> None:
    """A table of times and of V(n), and how they stand to the goals."""
    names = list(times)
    print(f"\nmemory is read at {read:.1f} GB/s; ms of a step, and V = over that of one row")
    heads = "  ".join(f"{name:>28}" for name in names)
    print(f"{'rows':>4} {'of':>3} {'experts':>8} {'floor':>7}  {heads}")
    middle = {
        name: {shape: statistics.median(found) for shape, found in own.items()}
        for name, own in times.items()
    }
    for rows, of in SHAPES:
        count = bench.read_bytes(touched[rows, of])
        pairs = [(own[rows, of], own[rows, of] / own[1, 1]) for own in middle.values()]
        cells = "  ".join(f"{1e3 * seconds:20.1f} {over:7.2f}" for seconds, over in pairs)
        print(f"{rows:4} {of:3} {touched[rows, of]:8.1f} {count / read / 1e6:7.1f} "
              f" {cells}")  # fmt: skip
    for name in names[:-1]:
        plain = ratio_of_medians(times[PEER][1, 1], times[name][1, 1])
        print(f"{name}, plain over llama.cpp: {plain}")
        bench.goals.append(at_least(f"{name}: plain over llama.cpp", plain.value, 1.15))
        own, peer = middle[name], middle[PEER]
        for of, what in ((1, "one sequence"), (8, "8 sequences")):
            ratio = own[8, of] / own[1, 1] / (peer[8, of] / peer[1, 1])
            bench.goals.append(at_most(f"{name}: V(8) over llama.cpp's, {what}", ratio, 0.85))
        for of in (1, 2):  # tokens a second of two rows, over those of one
            dip = 2 * own[1, 1] / own[2, of]
            bench.goals.append(at_least(f"{name}: two rows of {of} over one", dip, 1.0))
        planned = {shape: bench.planned_s(touched[shape], shape[0], name) for shape in SHAPES}
        over = {shape: found / planned[1, 1] for shape, found in planned.items()}
        print(f"{name}, V as planned: {by_name({at: round(v, 2) for at, v in over.items()})}")
        far = {shape: own[shape] / own[1, 1] / over[shape] for shape in SHAPES}
        for what, pick in (("most", max), ("least", min)):
            at = pick(far, key=lambda shape: far[shape])
            note = f"{name}: V over planned, {what}, {at[0]} rows of {at[1]}"
            goal = at_most(note, far[at], 1.15) if what == "most" else at_least(note, far[at], 0.85)
            bench.goals.append(goal)


def measure_prompts(bench: Bench, arms: Mapping[str, Step]) -> None:
    """Prompts in turns, tokens a second."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(bench.settings.prompts):
        for name in in_turn(list(arms), turn):
            time.sleep(PAUSE_S)
            count = bench.settings.prompt
            took = arms[name](bench.tokens(turn, count), 0)
            rates[name].append(count / took.seconds)
    bench.results["prompts"] = rates
    for name, found in rates.items():
        print(f"prompt of {bench.settings.prompt}, {name}: {statistics.median(found):.1f} tokens/s")
        if name != PEER:
            over = ratio_of_medians(found, rates[PEER])
            bench.goals.append(at_least(f"{name}: prompt over llama.cpp", over.value, 1.2))


def search(bench: Bench, environment: Path, threads: int) -> None:
    """llama.cpp's settings, each in place of a usual one."""
    usual = PeerSettings(threads)
    for number, one in enumerate((
        usual, replace(usual, flash=False), replace(usual, pool="openmp"),
        replace(usual, repack=False), replace(usual, threads=1), replace(usual, ubatch=128),
        replace(usual, ubatch=2048),
    )):  # fmt: skip
        with llama(bench.model, environment, one) as step:
            found = {
                rows: 1e3 * min(step(bench.tokens(turn, rows), 1).seconds for turn in range(12))
                for rows in (1, 8)
            }
            rate = bench.settings.prompt / step(bench.tokens(0, bench.settings.prompt), 0).seconds
        print(f"llama.cpp, {one}: {found} ms, prompt {rate:.1f} tokens/s", flush=True)
        bench.results[f"search {number}"] = asdict(one) | {"ms": found, "prompt": rate}


SERVED = 32
"""Tokens of a prompt and of an answer."""


def serve(bench: Bench) -> None:
    """Servers of the model in turns, with the same requests."""
    pair = Pair(
        name=bench.settings.model, target=str(bench.model), drafting={},
        options=("--kv-cache-memory-bytes", "400000000", "--admin-key", ADMIN_KEY,
                 "--max-model-len", "512", "--no-enable-prefix-caching"),
        context=512, prompt_tokens=SERVED, tokens=(SERVED, SERVED), most_servers=4, fewest=1.0,
    )  # fmt: skip

    def asks(clients: int, turn: int) -> list[Ask]:
        body = {"max_tokens": SERVED, "temperature": 0.8, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        first = 1000 * clients + 100 * turn
        return [
            Ask(key=str(seed), body={**body, "seed": seed, "prompt": bench.tokens(seed, SERVED)})
            for seed in range(first, first + max(4, clients))
        ]

    off = pair.off()
    with Servers(pair) as servers, tempfile.TemporaryDirectory() as scratch:
        turns = range(bench.settings.repeats + 1)
        told = [ask for clients in bench.settings.clients for turn in turns
                for ask in asks(clients, turn)]  # fmt: skip
        known = servers.ask(Arm(name="off", spec=off), [Crowd(told, 16)]).replies
        answers = {one.ask.key: one.ids for one in known}
        # One without speculation before and after each of the others.
        specs = {"off": off}
        for chance in (0.8, 0.0):
            streams = [
                Stream(prompt=one.ask.body["prompt"], seed=one.ask.body["seed"], tokens=one.ids,
                       chances=[(0, chance)])
                for one in known
            ]  # fmt: skip
            path = Path(scratch) / f"{chance}.json"
            write_streams(path, streams, bench.settings.pass_ms / 1e3)
            specs[f"drafts of {chance}"] = pair.steered(path, 8)
            specs.setdefault("off again", off.again())
        servers.start([*specs.values()])
        for clients in bench.settings.clients:
            rates: dict[str, list[float]] = {name: [] for name in specs}
            for turn in turns:
                for name in in_turn([*specs], turn):
                    arm = Arm(name=name, spec=specs[name])
                    found = servers.ask(arm, [Crowd(asks(clients, turn), clients)])
                    assert all(answers[one.ask.key] == one.ids for one in found.replies), name
                    if turn:
                        rates[name].append(len(found.replies) * SERVED / found.lasted_s)
            bench.results[f"{clients} clients"] = rates
            plain = [(a * b) ** 0.5 for a, b in zip(rates["off"], rates["off again"], strict=True)]
            for name, own in rates.items():
                turns_own = [a / b for a, b in zip(own, plain, strict=True)]
                over = statistics.median(turns_own)
                print(
                    f"{clients} clients, {name}: {statistics.median(own):.2f} tokens/s, over off "
                    f"{over:.3f} [{min(turns_own):.3f}, {max(turns_own):.3f}]",
                    flush=True,
                )
                if name.startswith("drafts"):
                    wanted = 1.0 if clients == 1 and name.endswith("0.8") else 0.97
                    bench.goals.append(at_least(f"{clients} clients, {name}", over, wanted))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=MIXTURES)
    parser.add_argument("--files", type=Path, required=True, help="where models lie or are written")
    parser.add_argument("--vocabulary", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--environments", type=Path, required=True, help="for llama.cpp")
    parser.add_argument("--skew", type=float, default=0.0, help="of routers' biases")
    parser.add_argument("--parts", nargs="+", choices=["search", "steps", "prompts", "serve"],
                        default=["steps", "prompts"])  # fmt: skip
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="of servers")
    parser.add_argument("--pass-ms", type=float, default=0.1, help="of a served draft's token")
    parser.add_argument("--arms", nargs="+", choices=[OURS, EIGHT], default=[OURS, EIGHT])
    parser.add_argument("--prompt", type=int, default=PROMPT, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=3, help="turns; default: %(default)s")
    parser.add_argument("--pool", choices=["own", "openmp"], default="own")
    parser.add_argument("--no-flash", action="store_true", help="llama.cpp's flash attention off")
    parser.add_argument("--no-repack", action="store_true", help="of llama.cpp's weights")
    parser.add_argument("--ubatch", type=int, default=512, help="llama.cpp's; default: %(default)s")
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.prompt, settings.prompts = 1, 64, 1
    threads = settings.threads or len(os.sched_getaffinity(0))
    use_threads(threads)
    environment = install("llama-cpp", settings.environments, None)
    model = settings.files / f"{settings.model}{'-skewed' if settings.skew else ''}.gguf"
    if not model.exists():
        write_mixture(settings.model, model, settings.vocabulary, skew=settings.skew)
    where = announce(settings)
    with ExitStack() as stack:
        arms: dict[str, Step] = {}
        stepping = {"steps", "prompts"} & {*settings.parts}
        for name in settings.arms if stepping else ():
            config = EngineConfig.from_kwargs(
                model=str(model), max_num_seqs=max(ROWS), max_model_len=2 * PROMPT,
                kv_cache_memory_bytes=400_000_000, activations="int8" if name == EIGHT else "auto",
                adaptive_speculation=False,
            )  # fmt: skip
            ours = Ours(build_engine(config).parts)
            arms[name] = ours.step
        shape = ModelShape.from_config(model)
        memory, probe = ModelMemory(shape=shape), ReadProbe(threads)
        bench = Bench(settings, model, memory, shape.vocab_size, probe)
        if "search" in settings.parts:
            search(bench, environment, threads)
        if "serve" in settings.parts:
            serve(bench)
        if stepping:
            told = PeerSettings(threads, settings.pool, not settings.no_flash,
                                not settings.no_repack, settings.ubatch)  # fmt: skip
            arms[PEER] = stack.enter_context(llama(model, environment, told))
        for part, measure in (("steps", measure_steps), ("prompts", measure_prompts)):
            if part in settings.parts:
                measure(bench, arms)
    finish("mixtures", where, settings, bench.results, bench.goals)


if __name__ == "__main__":
    main()
