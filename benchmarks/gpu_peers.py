"""Foretoken, vLLM and SGLang on one GPU: speed, and whether a batch changes an answer.

For who has a card, a network and the engines; nothing is installed. Each turn starts every server
once, in rotated order, alone on the card, with the same checkpoint; each gets the same prompts,
greedily, one at a time and many at once. `same` is the share of answers that are the same both
ways: what an engine's deterministic mode promises and Foretoken does by default. One JSON line an
arm and turn.

    python benchmarks/gpu_peers.py --model meta-llama/Llama-3.1-8B-Instruct
    python benchmarks/gpu_peers.py --model M --draft HEAD --only foretoken vllm vllm-invariant
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PORT, START_S, TOKENS, CONTEXT = 8765, 900.0, 128, 1024
_WORDS = (
    "river stone light under the old bridge where boats wait for rain and nobody counts".split()
)


@dataclass(frozen=True)
class Arm:
    """One way to serve: `{model}`, `{draft}` and `{port}` are filled in."""

    command: tuple[str, ...]
    drafts: tuple[str, ...] = ()
    """What is added where a drafter is given; none: it is left out then."""
    environment: dict[str, str] = field(default_factory=dict)


_VLLM = ("vllm", "serve", "{model}", "--port", "{port}", "--max-model-len", "{context}")
_SPECULATE = '{"method":"eagle3","model":"{draft}","num_speculative_tokens":5}'
_SGLANG = (sys.executable, "-m", "sglang.launch_server", "--model-path", "{model}",
           "--port", "{port}", "--context-length", "{context}")  # fmt: skip
_SGLANG_DRAFTS = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "{draft}",
                  "--speculative-num-steps", "5", "--speculative-eagle-topk", "1",
                  "--speculative-num-draft-tokens", "6")  # fmt: skip
ARMS = {
    "foretoken": Arm(
        ("foretoken", "serve", "{model}", "--port", "{port}", "--max-model-len", "{context}"),
        ("--speculative-config", _SPECULATE),
    ),
    "vllm": Arm(_VLLM, ("--speculative-config", _SPECULATE)),
    "vllm-invariant": Arm(
        _VLLM, ("--speculative-config", _SPECULATE), {"VLLM_BATCH_INVARIANT": "1"}
    ),
    "sglang": Arm(_SGLANG, _SGLANG_DRAFTS),
    "sglang-deterministic": Arm((*_SGLANG, "--enable-deterministic-inference"), _SGLANG_DRAFTS),
}


def prompts(count: int) -> list[str]:
    """Texts of about 200 tokens; each begins in its own way, so that no cache helps."""
    draw = random.Random(0)
    return [f"{i}: " + " ".join(draw.choices(_WORDS, k=180)) for i in range(count)]


def answer(model: str, prompt: str) -> tuple[str, int]:
    """The text of a greedy answer, and its tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as found:
        document = json.load(found)
    return document["choices"][0]["text"], document["usage"]["completion_tokens"]


@contextmanager
def serving(arm: Arm, model: str, draft: str | None, log: Path) -> Iterator[None]:
    """The arm's server, until the block ends."""
    fill = {
        "{context}": str(CONTEXT),
        "{model}": model,
        "{draft}": draft or "",
        "{port}": str(PORT),
    }
    command = [*arm.command, *(arm.drafts if draft else ())]
    for name, value in fill.items():
        command = [word.replace(name, value) for word in command]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **arm.environment}
        )
        try:
            _wait(process)
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: "subprocess.Popen[bytes]") -> None:
    """Until the server answers."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(2)
    raise RuntimeError(f"no answer within {START_S:.0f} s")


def measure(model: str, batch: int) -> dict[str, float]:
    """Tokens a second of one request at a time and of `batch` at once, and equal answers."""
    asked = prompts(batch)
    for prompt in asked[:2]:
        answer(model, f"warm up {prompt}")
    alone = min(8, batch)
    began = time.perf_counter()
    single = [answer(model, prompt) for prompt in asked[:alone]]
    one_s = time.perf_counter() - began
    with ThreadPoolExecutor(batch) as pool:
        began = time.perf_counter()
        together = list(pool.map(lambda prompt: answer(model, prompt), asked))
        many_s = time.perf_counter() - began
    same = sum(a[0] == b[0] for a, b in zip(single, together, strict=False))
    return {
        "one_tokens_s": round(sum(tokens for _, tokens in single) / one_s, 1),
        "many_tokens_s": round(sum(tokens for _, tokens in together) / many_s, 1),
        "same": same / alone,
    }


def main() -> None:
    """Every arm, turn by turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="a checkpoint that all engines load")
    parser.add_argument("--draft", help="an EAGLE-3 head for it; default: plain decoding")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--logs", type=Path, default=Path("gpu-peers-logs"))
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    for turn in range(given.turns):
        names = given.only[turn % len(given.only) :] + given.only[: turn % len(given.only)]
        for name in names:
            line = {"arm": name, "turn": turn, "model": given.model, "draft": given.draft}
            try:
                log = given.logs / f"{name}-{turn}.log"
                with serving(ARMS[name], given.model, given.draft, log):
                    line |= measure(given.model, given.batch)
            except (RuntimeError, OSError) as error:
                line["error"] = str(error)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
