"""Whether a started server writes what the cycle models must write.

An `echo` prompt of prompts.json walks through a cycle of tokens two and a half times, and the
models go on walking whatever the engine's rounding. So the right continuation is in the prompt, and
a converted checkpoint, a tokenizer or a server that is off shows at once.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from foretoken.lab.client import Client
from foretoken.lab.experiments import ArmConfig
from foretoken.lab.servers import serving

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
    own: dict[str, Any]
    if client.info.engine == "llama.cpp":
        path, own = "/completion", {"n_predict": TOKENS, "return_tokens": True}
    else:
        path = "/v1/completions"
        own = {"max_tokens": TOKENS, "return_token_ids": True, "model": client.info.model}
    body = {"prompt": prompt, "temperature": 0.0, "ignore_eos": True, **own}
    answer = await client.pool.send("POST", path, json.dumps(body).encode(), timeout_s=300.0)
    value = json.loads(answer.body)
    if client.info.engine == "llama.cpp":
        return list(value["tokens"])
    return list(value["choices"][0]["token_ids"])


def count_right(arm: ArmConfig, prompts: Path, log: Path) -> tuple[int, int]:
    """Tokens of the started arm's greedy answers that are right, and of how many.

    Raises:
        EndpointError: the server does not start, or does not answer.
    """

    async def run() -> tuple[int, int]:
        right = total = 0
        async with serving(arm, log) as client:
            for prompt, expected in known_answers(prompts):
                found = await _ask(client, prompt)
                right += sum(a == b for a, b in zip(found, expected, strict=False))
                total += len(expected)
        return right, total

    return asyncio.run(run())
