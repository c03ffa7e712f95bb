"""Whether a started server writes what the cycle models must write.

An `echo` prompt of prompts.json walks through a cycle of tokens two and a half times, and the
models go on walking whatever the engine's rounding. So the right continuation is in the prompt, and
a converted checkpoint, a tokenizer or a server that is off shows at once.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from foretoken.errors import EndpointError
from foretoken.lab.http.client import Client
from foretoken.lab.http.read_answer import parse_events
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.servers import serving

TOKENS = 40
SEEN = 10
PROMPTS = 2


def known_answers(prompts: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts with the tokens that have to follow."""
    found = json.loads(prompts.read_text("utf-8"))["echo"][:PROMPTS]
    return [(ids, continue_cycle(ids, TOKENS)) for ids in found]


def continue_cycle(ids: list[int], count: int) -> list[int]:
    """What follows where the last tokens were seen before."""
    period = next(p for p in range(1, len(ids)) if ids[-p - SEEN : -p] == ids[-SEEN:])
    return [ids[len(ids) - period + n % period] for n in range(count)]


async def _ask(client: Client, prompt: list[int]) -> list[int]:
    """Tokens of a stream: llama.cpp ends a whole answer in an error where its bytes are no text."""
    own: dict[str, Any]
    if client.info.engine == "llama.cpp":
        path, own = "/completion", {"n_predict": TOKENS, "return_tokens": True}
    else:
        path = "/v1/completions"
        own = {"max_tokens": TOKENS, "return_token_ids": True, "model": client.info.model}
    body = {"prompt": prompt, "temperature": 0.0, "ignore_eos": True, "stream": True, **own}
    answer = await client.pool.send("POST", path, json.dumps(body).encode(), timeout_s=300.0)
    tokens: list[int] = []
    for _, event in parse_events(answer.pieces)[0]:
        choice = (event.get("choices") or [event])[0]
        tokens += choice.get("token_ids") or choice.get("tokens") or []
    return tokens


def count_right(arm: ArmConfig, prompts: Path, log: Path) -> tuple[int, int]:
    """Tokens of the started arm's greedy answers that are right, and of how many that came.

    A build of llama.cpp keeps back the end of a stream whose bytes are no text.

    Raises:
        EndpointError: the server does not start, or writes less than half of an answer.
    """

    async def run() -> tuple[int, int]:
        right = total = 0
        async with serving(arm, log) as client:
            for prompt, expected in known_answers(prompts):
                found = await _ask(client, prompt)
                if len(found) < TOKENS // 2:
                    raise EndpointError(f"{len(found)} of {TOKENS} tokens came: see {log}")
                right += sum(a == b for a, b in zip(found, expected, strict=False))
                total += len(found)
        return right, total

    return asyncio.run(run())
