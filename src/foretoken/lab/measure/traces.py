"""Workload files to items: own JSONL, plain lines, ShareGPT, Spec-Bench, Mooncake, Azure, BurstGPT.

A line that cannot be read is skipped and counted, or an error with `strict`. Traces that have
lengths but no text get prompts of made-up words, shared prefixes as their block hashes say.
"""

import csv
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError, one_of
from foretoken.lab.measure.experiment import WorkloadConfig
from foretoken.lab.measure.workload import Item, with_settings, with_temperatures

FORMATS = ("jsonl", "lines", "sharegpt", "spec-bench", "mooncake", "azure", "burstgpt")
_KNOWN = {"index", "prompt", "messages", "max_tokens", "temperature", "seed", "parameters",
          "category", "cluster", "arrival_s", "kind", "conversation", "observed",
          "prompt_hash"}  # fmt: skip
WORDS = tuple(
    " the of and to in is it you that he was for on are with as his they be at one have this from"
    " or had by hot but some what there".split()
)
"""Made-up prompts are of these."""
MOONCAKE_BLOCK = 512
"""Tokens per hash of a Mooncake trace."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Items in order of arrival or of the file, and how many lines were skipped."""

    items: tuple[Item, ...]
    format: str
    skipped: int
    first_problem: str = ""


def load_items(config: WorkloadConfig) -> tuple[list[Item], tuple[str, ...]]:
    """The items of a workload as they are to be sent, and notes on what was left out.

    Raises:
        ConfigError: the file cannot be read, or has nothing of the class.
    """
    loaded = load_workload(Path(config.file), format=config.format, strict=config.strict)
    items = with_temperatures(loaded.items, config.temperatures)
    items = with_settings(
        items, max_tokens=config.max_tokens, seed=config.seed, parameters=config.parameters
    )
    if config.category is not None:
        have = sorted({item.category for item in items if item.category})
        items = [item for item in items if item.category == config.category]
        if not items:
            allowed = one_of(config.category, have) if have else "none: no request has a class"
            raise ConfigError("workload.category", config.category, allowed)
    said = f"{loaded.skipped} broken lines were skipped: {loaded.first_problem}"
    return items, (said,) if loaded.skipped else ()


def load_workload(path: Path, *, format: str = "auto", strict: bool = False) -> Loaded:
    """The items of a file.

    Raises:
        ConfigError: it cannot be read, its format is unknown, it has no item, or with `strict`
            a line of it cannot be read.
    """
    try:
        text = path.read_text("utf-8", errors="replace" if not strict else "strict")
    except (OSError, UnicodeDecodeError) as error:
        allowed = f"a readable file, or demo for held-out Python ({error})"
        raise ConfigError("--workload", str(path), allowed) from error
    kind = _detect(path, text) if format == "auto" else format
    if kind not in FORMATS:
        raise ConfigError("workload.format", format, one_of(format, ("auto", *FORMATS)))
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
    return Loaded(tuple(items), kind, len(problems), problems[0] if problems else "")


def _detect(path: Path, text: str) -> str:
    head = text.lstrip()[:4000]
    if path.suffix == ".csv":
        first = head.split("\n", 1)[0].lower()
        return "azure" if "contexttokens" in first else "burstgpt"
    if head.startswith("["):
        return "sharegpt"
    if not head.startswith("{"):
        return "lines"
    first = head.split("\n", 1)[0]
    if '"turns"' in first:
        return "spec-bench"
    return "mooncake" if '"input_length"' in first else "jsonl"


def _rows(kind: str, text: str) -> Iterator[tuple[int, Any]]:
    if kind == "sharegpt":
        try:
            rows = list(json.loads(text))
        except (ValueError, TypeError) as error:
            allowed = f"ShareGPT, a JSON list of conversations ({error})"
            raise ConfigError("--workload", text[:80], allowed) from error
        yield from enumerate(rows, start=1)
    elif kind in ("azure", "burstgpt"):
        yield from enumerate(csv.DictReader(text.splitlines()), start=2)
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield number, line


def _own(index: int, line: str) -> Item:
    row = json.loads(line)
    extra = {k: v for k, v in row.items() if k not in _KNOWN}
    prompt = row.get("prompt") or _stand_in(row)
    messages = tuple(row.get("messages") or ())
    if not isinstance(prompt, str) or not (prompt or messages):
        raise ValueError("neither a prompt nor messages")
    return Item(
        index=index,
        prompt=prompt,
        messages=messages,
        max_tokens=int(row.get("max_tokens", 128)),
        temperature=_number(row.get("temperature")),
        seed=row.get("seed"),
        parameters={**row.get("parameters", {}), **extra},
        category=str(row.get("category", "")),
        cluster=str(row.get("cluster", row.get("conversation", ""))),
        arrival_s=_number(row.get("arrival_s")),
    )


def _stand_in(row: dict[str, Any]) -> str:
    """Words in place of a prompt that was recorded as a hash: as long, and equal for equal ones."""
    length = (row.get("observed") or {}).get("prompt_tokens")
    if not row.get("prompt_hash") or not length:
        return ""
    return " ".join(_words(str(row["prompt_hash"]), int(length)))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _line(index: int, line: str) -> Item:
    return Item(index=index, prompt=line)


def _sharegpt(index: int, row: dict[str, Any]) -> Item:
    turns = row["conversations"]
    asked = [i for i, turn in enumerate(turns) if turn["from"] in ("human", "user")]
    if not asked:
        raise ValueError("no turn of a human")
    first = asked[0]
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


def _mooncake(index: int, line: str) -> Item:
    row = json.loads(line)
    length = int(row["input_length"])
    blocks = row.get("hash_ids") or [f"own {index}"]
    words: list[str] = []
    for block in blocks:
        words += _words(str(block), MOONCAKE_BLOCK if len(blocks) > 1 else length)
    return Item(
        index=index,
        prompt=" ".join(words[:length]),
        max_tokens=max(1, int(row["output_length"])),
        arrival_s=float(row["timestamp"]) / 1000,
        cluster=str(blocks[0]),
    )


def _azure(index: int, row: dict[str, str]) -> Item:
    at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    return _lengths(index, at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burstgpt(index: int, row: dict[str, str]) -> Item:
    tokens = int(row["Request tokens"]), int(row["Response tokens"])
    if tokens[1] <= 0:
        raise ValueError("a failed request, without a response")
    item = _lengths(index, float(row["Timestamp"]), *tokens)
    return item


def _lengths(index: int, at: float, prompt: int, output: int) -> Item:
    text = " ".join(_words(f"own {index}", prompt))
    return Item(index=index, prompt=text, max_tokens=max(1, output), arrival_s=at)


def _words(seed: str, count: int) -> list[str]:
    """About one token per word."""
    return random.Random(seed).choices(WORDS, k=count)


_READERS: dict[str, Callable[[int, Any], Item]] = {
    "jsonl": _own,
    "lines": _line,
    "sharegpt": _sharegpt,
    "spec-bench": _spec_bench,
    "mooncake": _mooncake,
    "azure": _azure,
    "burstgpt": _burstgpt,
}
