"""What is asked and when: the requests of a workload file, and when a load has them sent.

Files are our own JSONL, plain lines, ShareGPT and Spec-Bench. A line that cannot be read is skipped
and counted, or an error with `strict`. Traces that have lengths but no texts are refused.

An `Item` is what both arms of a comparison get alike. Poisson and gamma arrivals are drawn from a
seed, so that two arms can be given the same instants. Knows no server and no clock.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from foretoken.config.reader import Allowed, at_least, check_fields, require
from foretoken.errors import ConfigError, one_of
from foretoken.lab.stats.intervals import Floats

_TEMPERATURES = Allowed("numbers >= 0", lambda found: all(value >= 0 for value in found))
_KNOWN = {"index", "prompt", "messages", "max_tokens", "temperature", "seed", "parameters",
          "category", "cluster", "arrival_s", "kind", "conversation", "observed",
          "prompt_hash"}  # fmt: skip
WORDS = tuple(
    " the of and to in is it you that he was for on are with as his they be at one have this from"
    " or had by hot but some what there".split()
)
"""Prompts that stand in for what was recorded as hashes are of these."""
_TRACES_OF_LENGTHS = ("lengths", "mooncake", "azure", "burstgpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    file: str
    """A file, forms in docs/deciding.md; `demo`: held-out Python, for the packaged model."""
    format: str = "auto"
    strict: bool = False
    max_tokens: Annotated[int, at_least(1)] | None = None
    """None: as the file has it."""
    temperatures: Annotated[tuple[float, ...], _TEMPERATURES] = (0.0,)
    """Dealt out in turn over requests without one; empty: the server's default."""
    seed: int | None = None
    """Sent with requests, counted up; None: not sent."""
    parameters: dict[str, Any] = field(default_factory=dict)
    category: str | None = None
    """Only requests of this class."""

    def __post_init__(self) -> None:
        check_fields(self, "workload.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    index: int
    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    """A conversation; takes the chat endpoint instead of completions."""
    max_tokens: int = 128
    temperature: float | None = None
    """None: what the server does by default."""
    seed: int | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    category: str = ""
    cluster: str = ""
    arrival_s: float | None = None
    """Seconds from the start of the workload; None where arrivals are generated."""


def load_items(config: WorkloadConfig) -> tuple[list[Item], tuple[str, ...]]:
    """The items of a workload as they are to be sent, and notes on what was left out. Raises
    ConfigError: the file cannot be read, or has nothing of the class."""
    own, problems = load_workload(Path(config.file), format=config.format, strict=config.strict)
    items, dealt = [], config.temperatures
    for item in own:
        temperature = item.temperature
        if temperature is None and dealt:
            temperature = float(dealt[item.index % len(dealt)])
        items.append(replace(
            item,
            temperature=temperature,
            max_tokens=item.max_tokens if config.max_tokens is None else config.max_tokens,
            seed=item.seed if config.seed is None else config.seed + item.index,
            parameters={**item.parameters, **config.parameters},
        ))  # fmt: skip
    if config.category is not None:
        have = sorted({item.category for item in items if item.category})
        items = [item for item in items if item.category == config.category]
        if not items:
            allowed = one_of(config.category, have) if have else "none: no request has a class"
            raise ConfigError("workload.category", config.category, allowed)
    said = f"{len(problems)} broken lines were skipped: {problems[0]}" if problems else ""
    return items, (said,) if said else ()


def take(items: Sequence[Item], count: int, start: int = 0) -> list[Item]:
    """`count` items from `start`, going round when they run out, indices counted on."""
    if not items:
        raise ConfigError("--workload", "no prompts", "a file with at least one prompt, or demo")
    return [
        replace(items[i % len(items)], index=i, cluster=items[i % len(items)].cluster or str(i))
        for i in range(start, start + count)
    ]


def load_workload(
    path: Path, *, format: str = "auto", strict: bool = False
) -> tuple[list[Item], list[str]]:
    """The items of a file, in order of arrival or as they stand, and why lines were skipped. Raises
    ConfigError: it cannot be read, its format is unknown, it has no item, or with `strict` a line
    of it cannot be read."""
    try:
        text = path.read_text("utf-8", errors="replace" if not strict else "strict")
    except (OSError, UnicodeDecodeError) as error:
        allowed = f"a readable file, or demo for held-out Python ({error})"
        raise ConfigError("--workload", str(path), allowed) from error
    kind = _detect(path, text) if format == "auto" else format
    if kind in _TRACES_OF_LENGTHS:
        allowed = (
            "requests with their texts, since drafts are right or wrong about real text; "
            "arrivals are arrival_s of our own jsonl"
        )
        raise ConfigError("--workload", f"{path}, a trace of lengths", allowed)
    if kind not in _READERS:
        raise ConfigError("workload.format", format, one_of(format, ("auto", *_READERS)))
    items: list[Item] = []
    problems: list[str] = []
    for number, row in _rows(kind, text):
        try:
            items.append(_READERS[kind](len(items), row))
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            problems.append(f"{path.name} line {number}: {type(error).__name__}: {error}")
            if strict:
                allowed = f"{kind} lines that can be read; without --strict others are left out"
                raise ConfigError("--workload", problems[0], allowed) from error
    if not items:
        why = f", read as {kind}: {problems[0]}" if problems else ""
        allowed = "a file with at least one request (--set workload.format= says how it is read)"
        raise ConfigError("--workload", f"{path}{why}", allowed)
    if all(item.arrival_s is not None for item in items):
        items.sort(key=lambda item: item.arrival_s or 0.0)
    return items, problems


def _detect(path: Path, text: str) -> str:
    head = text.lstrip()[:4000]
    first = head.split("\n", 1)[0]
    if path.suffix == ".csv" or '"input_length"' in first:
        return "lengths"
    if head.startswith("["):
        return "sharegpt"
    if not head.startswith("{"):
        return "lines"
    return "spec-bench" if '"turns"' in first else "jsonl"


def _rows(kind: str, text: str) -> Iterator[tuple[int, Any]]:
    if kind == "sharegpt":
        try:
            rows = list(json.loads(text))
        except (ValueError, TypeError) as error:
            allowed = f"ShareGPT, a JSON list of conversations ({error})"
            raise ConfigError("--workload", text[:80], allowed) from error
        yield from enumerate(rows, start=1)
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield number, line


def _own(index: int, line: str) -> Item:
    row = json.loads(line)
    prompt, messages = row.get("prompt"), tuple(row.get("messages") or ())
    length = (row.get("observed") or {}).get("prompt_tokens")
    if not prompt and row.get("prompt_hash") and length:
        # Recorded as a hash: words as many as the prompt had tokens, equal for equal hashes.
        luck = random.Random(str(row["prompt_hash"]))
        prompt = " ".join(luck.choices(WORDS, k=int(length)))
    if not isinstance(prompt or "", str) or not (prompt or messages):
        raise ValueError("neither a prompt nor messages")
    temperature, arrival_s = row.get("temperature"), row.get("arrival_s")
    return Item(
        index=index,
        prompt=prompt or "",
        messages=messages,
        max_tokens=int(row.get("max_tokens", 128)),
        temperature=None if temperature is None else float(temperature),
        seed=row.get("seed"),
        parameters={
            **row.get("parameters", {}), **{k: v for k, v in row.items() if k not in _KNOWN}
        },
        category=str(row.get("category", "")),
        cluster=str(row.get("cluster", row.get("conversation", ""))),
        arrival_s=None if arrival_s is None else float(arrival_s),
    )  # fmt: skip


def _sharegpt(index: int, row: dict[str, Any]) -> Item:
    turns = row["conversations"]
    first = next((i for i, turn in enumerate(turns) if turn["from"] in ("human", "user")), None)
    if first is None:
        raise ValueError("no turn of a human")
    reply = turns[first + 1]["value"] if len(turns) > first + 1 else ""
    # About four characters per token, as in English text.
    length = max(4, len(reply) // 4) if reply else 128
    return Item(
        index=index,
        messages=({"role": "user", "content": turns[first]["value"]},),
        max_tokens=min(length, 1024),
        cluster=str(row.get("id", "")),
    )


def _spec_bench(index: int, line: str) -> Item:
    row = json.loads(line)
    return Item(
        index=index,
        messages=({"role": "user", "content": row["turns"][0]},),
        max_tokens=int(row.get("max_tokens", 256)),
        category=str(row.get("category", "")),
        cluster=str(row.get("question_id", "")),
    )


_READERS: dict[str, Callable[[int, Any], Item]] = {
    "jsonl": _own,
    "lines": lambda index, line: Item(index=index, prompt=line),
    "sharegpt": _sharegpt,
    "spec-bench": _spec_bench,
}


Kind = Literal["closed", "constant", "poisson", "gamma", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    kind: Kind = "closed"
    """closed: `concurrency` requests in flight; the others are open: arrivals do not wait."""
    concurrency: int = 1
    rate: float | None = None
    """Requests per second of constant, poisson and gamma arrivals."""
    burstiness: float = 1.0
    """Shape of gamma arrivals as in vLLM's benchmark: 1 is Poisson, below it bursts more."""
    speed: float = 1.0
    """Pace of a trace: 2 replays it in half its time."""

    def __post_init__(self) -> None:
        open_loop = self.kind in ("constant", "poisson", "gamma")
        allowed = f"requests per second > 0, as in --load {self.kind}:2"
        require("load.rate", self.rate, not open_loop or (self.rate or 0) > 0, allowed)
        require("load.concurrency", self.concurrency, self.concurrency >= 1, "an integer >= 1")
        require("load.burstiness", self.burstiness, self.burstiness > 0, "a number > 0")
        require("load.speed", self.speed, self.speed > 0, "a number > 0")

    def __str__(self) -> str:
        if self.kind == "closed":
            return f"{self.concurrency} in flight"
        if self.kind == "trace":
            return f"trace x{self.speed:g}"
        burst = f", burstiness {self.burstiness:g}" if self.kind == "gamma" else ""
        return f"{self.rate:g}/s {self.kind}{burst}"


def draw_arrivals(load: Load, count: int, seed: int) -> Floats:
    """`count` instants of generated arrivals, from 0, in order."""
    assert load.kind in ("constant", "poisson", "gamma") and load.rate, load
    if load.kind == "constant":
        return np.arange(count) / load.rate
    shape = 1.0 if load.kind == "poisson" else load.burstiness
    gaps_N = np.random.default_rng(seed).gamma(shape, 1.0 / (shape * load.rate), count)
    return np.asarray(np.cumsum(gaps_N) - gaps_N[0] if count else gaps_N, np.float64)
