"""How `peers.py` talks to an engine in another process and another virtual environment.

One JSON document per line. The worker is given a Job as its only argument, answers with its
versions once loaded, then answers every {"prompts": lists of ids, "tokens": n} with the seconds it
took and the new ids of each. Uses the standard library only. Whatever the engine prints goes to
standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """What to load: a target, and a draft or a look-up if it is to speculate."""

    target: str
    draft: str | None
    method: str | None
    """None, "draft_model" or "ngram"."""
    num_drafts: int
    threads: int
    max_model_len: int
    batch: int = 1
    """Most prompts at once; transformers, OpenVINO and llama.cpp are asked one at a time."""
    quantization: str | None = None
    draft_quantization: str | None = None
    """Schemes of our weights; peers are given files that are quantized already."""
    option: str | None = None
    """A word that only one engine understands."""


@dataclass(frozen=True)
class Loaded:
    """An engine ready to work; `generate(prompts, n)` gives n new greedy ids for each prompt."""

    versions: dict[str, str]
    generate: Callable[[list[list[int]], int], list[list[int]]]


def one_by_one(generate: Callable[[list[int], int], list[int]]
) -> Callable[[list[list[int]], int], list[list[int]]]:  # fmt: skip
    """`Loaded.generate` of an engine that takes a prompt at a time."""
    return lambda prompts, tokens: [generate(prompt, tokens) for prompt in prompts]


def serve(load: Callable[[Job], Loaded]) -> None:
    """Load the engine of the command line and answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    began = time.perf_counter()
    loaded = load(Job(**json.loads(sys.argv[1])))
    load_s = time.perf_counter() - began
    print(json.dumps({"versions": loaded.versions, "load_s": load_s}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        found = loaded.generate(request["prompts"], request["tokens"])
        seconds = time.perf_counter() - began
        ids = [[int(i) for i in one] for one in found]
        print(json.dumps({"seconds": seconds, "token_ids": ids}), file=answers)
