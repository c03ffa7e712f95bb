"""What the servers of `real_pair.py` are asked, read as the lab reads answers of any server."""

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pair_servers import Running

from foretoken.lab.http.client import connect
from foretoken.lab.http.timed import now
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.workload import Item
from foretoken.lab.records.results import RequestRecord
from foretoken.shape.gguf import open_gguf

TIMEOUT_S = 600.0
Prompts = Sequence[tuple[str, str]]
"""Kinds and texts."""


def has_chat_template(model: Path) -> bool:
    """Whether a GGUF file says how conversations are written down."""
    return open_gguf(model).get("tokenizer.chat_template", str) is not None


def questions(
    prompts: Prompts, tokens: int, temperature: float = 0.0, *, chat: bool = True
) -> list[Item]:
    """Messages of a user, to be answered as the file's template has it; texts to go on with, to
    the last token, where it has none."""
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


def decode_speed(record: RequestRecord) -> float | None:
    """Tokens a second from the first to the last; None of a single chunk."""
    assert record.first_s is not None and record.last_s is not None
    taken = record.last_s - record.first_s
    return record.tokens_after_first / taken if taken > 0 else None


def median_speed(records: Sequence[RequestRecord]) -> float:
    """The median answer's tokens a second while decoding."""
    return statistics.median(speed for one in records if (speed := decode_speed(one)) is not None)


def drafts_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Drafts for each token, the share that was accepted, and by position where it is told."""
    known = [one.acceptance for one in records if one.acceptance is not None]
    drafted = sum(one.num_drafted for one in known)
    tokens = sum(one.output_tokens or 0 for one in records)
    deepest = max((len(one.histogram) for one in known), default=0) - 1
    counts = [sum(sum(one.histogram[j + 1 :]) for one in known) for j in range(max(deepest, 0))]
    steps = sum(sum(one.histogram) for one in known)
    return {
        "drafted_per_token": drafted / tokens if tokens else 0.0,
        "accepted_share": sum(one.num_accepted for one in known) / drafted if drafted else 0.0,
        "accepted_by_position": [count / steps for count in counts] if steps else [],
    }
