"""Whole models with activations of 8 bits against those of 16, integer weights, in turns.

    python benchmarks/activations.py --models FOLDER [--weights int4] [--parts decode prompt drafts]

FOLDER is what make_models.py wrote.
decode: tokens/s of 1, 8 and 32 sequences without drafts, first tokens excluded.
prompt: seconds to the first token of a long prompt.
drafts: one target with 16-bit weights and the draft model in `--weights`, its activations of 16
    bits or of 8, one sequence: tokens/s of whole requests, the drafter's seconds for each token it
    drafted, the share that was accepted, and whether the tokens are those of plain decoding.
Each comparison says how fast memory was read meanwhile. Floors are the longer of reading and
multiplying (peer_floor.py).
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Ratio, announce, finish, interleave, make_parser, ratio_of_medians, use_threads
from peer_floor import LimitsProbe, Work, between
from prompts import load_prompts
from runs import Run, acceptance, build, greedy, run_once

from foretoken import LLM
from foretoken.shape.model import ModelShape

PARTS = ("decode", "prompt", "drafts")
ARMS = {"16": "int16", "8": "int8"}
"""Bits of activations, by what `LLM` calls them."""
SHORT_PROMPT = 64
NUM_DRAFTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Seconds with activations of 16 bits over seconds with 8."""

    seconds: dict[str, float]
    """Median of each arm: for a token of each sequence, or for the prompt."""
    faster: Ratio
    of_floor: dict[str, float]
    """The floor's seconds over those measured; empty where no floor is known."""
    read_gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """A draft model with both kinds of activations, and no drafts at all."""

    tokens_per_s: dict[str, float]
    faster: Ratio
    """Whole requests, 16 bits over 8."""
    drafting_faster: Ratio
    """Seconds in the drafter, 16 bits over 8."""
    ms_per_draft: dict[str, float]
    accepted: dict[str, float]
    same_tokens: bool
    read_gb_per_s: float


class Pair:
    """The target once with each kind of activations, and what the machine could do."""

    def __init__(self, settings: argparse.Namespace) -> None:
        """Load both; at the second time they are mapped."""
        self._settings, folder = settings, settings.models / "cycle-target"
        limits = {
            "max_num_seqs": max(settings.batches),
            "max_model_len": settings.prompt + 256,
            "kv_cache_memory_bytes": 1 << 30,
        }
        self._llms = {
            name: build(str(folder), quantization=settings.weights, activations=kind, **limits)
            for name, kind in ARMS.items()
        }
        self._probe = LimitsProbe(settings.threads or 2)
        shape = ModelShape.from_config(folder)
        self._works = {
            name: Work(shape=shape, weights=settings.weights, eight_bit_activations=name == "8")
            for name in ARMS
        }

    def decode(self, batch: int) -> Compared:
        """Of `batch` sequences at once."""
        tokens = self._settings.tokens
        context = (SHORT_PROMPT, SHORT_PROMPT + tokens)
        arms = {name: decode_timer(llm, batch, tokens) for name, llm in self._llms.items()}
        floor = (lambda work, limits: work.decode_s(limits, *context)) if batch == 1 else None
        return self._compare(arms, floor)

    def prompt(self) -> Compared:
        """Of one long prompt."""
        length = self._settings.prompt
        arms = {name: prompt_timer(llm, length) for name, llm in self._llms.items()}
        return self._compare(arms, lambda work, limits: work.prompt_s(limits, length))

    def _compare(
        self, arms: dict[str, Callable[[], float]], floor: Callable[..., float] | None
    ) -> Compared:
        before = self._probe.now()
        times = interleave(arms, self._settings.repeats)
        limits = between(before, self._probe.now())
        seconds = {name: statistics.median(kept) for name, kept in times.items()}
        return Compared(
            seconds=seconds,
            faster=ratio_of_medians(times["16"], times["8"]),
            of_floor={
                name: floor(self._works[name], limits) / value for name, value in seconds.items()
            }
            if floor
            else {},
            read_gb_per_s=limits.read_bytes_per_s / 1e9,
        )


def decode_timer(llm: LLM, batch: int, tokens: int) -> Callable[[], float]:
    """Seconds for one step of `batch` random prompts, from the last one's first token on."""
    rng = random.Random(batch)
    vocab = llm._engine.parts.vocab_size
    given = [
        {"prompt_token_ids": rng.choices(range(2, vocab), k=SHORT_PROMPT)} for _ in range(batch)
    ]

    def measure() -> float:
        results = llm.generate(given, greedy(tokens), use_tqdm=False)
        metrics = [m for result in results if (m := result.outputs[0].metrics)]
        last = max(m.finished_s for m in metrics)
        return (last - max(m.first_token_s for m in metrics)) / (tokens - 1)

    return measure


def prompt_timer(llm: LLM, length: int) -> Callable[[], float]:
    """Seconds from the call to the first token of a random prompt."""
    ids = random.Random(length).choices(range(2, llm._engine.parts.vocab_size), k=length)
    return lambda: run_once(llm, ids, greedy(1)).total_s


def drafts(settings: argparse.Namespace) -> Drafting:
    """Requests with a quantized draft model whose activations differ."""
    target = str(settings.models / "cycle-target")
    model = str(settings.models / settings.draft)
    limits = {"max_model_len": 1024, "quantization": settings.target_weights}
    config = {"method": "draft_model", "model": model, "quantization": settings.weights,
              "num_speculative_tokens": NUM_DRAFTS}  # fmt: skip
    llms = {
        name: build(target, config | {"activations": kind}, **limits) for name, kind in ARMS.items()
    }
    plain = build(target, **limits)
    prompts = load_prompts(settings.models, "fresh").ids[: settings.prompts]
    params = greedy(settings.tokens)

    def once(llm: LLM) -> Callable[[], list[Run]]:
        return lambda: [run_once(llm, ids, params) for ids in prompts]

    probe = LimitsProbe(settings.threads or 2)
    before = probe.now()
    runs = interleave({name: once(llm) for name, llm in llms.items()}, settings.repeats)
    read = between(before, probe.now()).read_bytes_per_s / 1e9
    wanted = [run.token_ids for run in once(plain)()]
    seconds = {name: of_turns(kept, "decode_s") for name, kept in runs.items()}
    drafting = {name: of_turns(kept, "drafting_s") for name, kept in runs.items()}
    drafted = {name: sum(sum(run.drafted) for run in kept[0]) for name, kept in runs.items()}
    return Drafting(
        tokens_per_s={
            name: len(prompts) * (settings.tokens - 1) / statistics.median(kept)
            for name, kept in seconds.items()
        },
        faster=ratio_of_medians(seconds["16"], seconds["8"]),
        drafting_faster=ratio_of_medians(drafting["16"], drafting["8"]),
        ms_per_draft={
            name: statistics.median(kept) / drafted[name] * 1e3 for name, kept in drafting.items()
        },
        accepted={name: acceptance(kept[0]).rate for name, kept in runs.items()},
        same_tokens=all(
            [run.token_ids for run in turn] == wanted for kept in runs.values() for turn in kept
        ),
        read_gb_per_s=read,
    )


def of_turns(turns: Sequence[Sequence[Run]], name: str) -> list[float]:
    """The sum of a duration over each turn's requests."""
    return [sum(getattr(run, name) for run in turn) for turn in turns]


def show(title: str, found: Compared) -> None:
    """One comparison as a line."""
    times = ", ".join(f"{name} bits {1e3 * s:.1f} ms" for name, s in found.seconds.items())
    floors = ", ".join(f"{name} bits {share:.2f}" for name, share in found.of_floor.items())
    print(f"{title}: {times}; 16 bits / 8 bits {found.faster}"
          + (f"; of the floor: {floors}" if floors else "")
          + f"; read {found.read_gb_per_s:.0f} GB/s", flush=True)  # fmt: skip


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    """The parts asked for, printed as they come."""
    results: dict[str, Any] = {}
    if {"decode", "prompt"} & set(settings.parts):
        pair = Pair(settings)
        if "decode" in settings.parts:
            for batch in settings.batches:
                found = results[f"decode, {batch}"] = pair.decode(batch)
                show(f"{settings.weights}, a step of {batch} sequences", found)
        if "prompt" in settings.parts:
            results["prompt"] = pair.prompt()
            show(f"{settings.weights}, a prompt of {settings.prompt}", results["prompt"])
        del pair
    if "drafts" in settings.parts:
        results["drafts"] = drafts(settings)
        print(f"{settings.weights} drafts: {results['drafts']}", flush=True)
    return results


def main() -> None:
    """Measure what was asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="what make_models.py wrote")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--weights", choices=("int8", "int4"), default="int8")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32, help="new ones; default: %(default)s")
    parser.add_argument("--prompt", type=int, default=3_800, help="its tokens; %(default)s")
    parser.add_argument("--draft", default="cycle-draft-80", help="of `drafts`; %(default)s")
    parser.add_argument("--target-weights", choices=("int8", "int4"), help="of `drafts`; 16 bit")
    parser.add_argument("--prompts", type=int, default=2, help="of `drafts`; %(default)s")
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.tokens, settings.prompt = 2, 8, 100
    use_threads(settings.threads)
    where = announce(settings)
    finish("activations", where, settings, measure(settings), [])


if __name__ == "__main__":
    main()
