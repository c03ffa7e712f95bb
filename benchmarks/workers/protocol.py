"""How `peers.py` talks to an engine in another process and another virtual environment.

One JSON document per line. The worker is given a Job as its only argument, answers with its
versions once loaded, then answers every {"prompt": ids, "tokens": n} with the seconds it took and
the ids. Uses the standard library only. Whatever the engine prints goes to standard error.
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
    option: str | None = None
    """A word that only one engine understands."""


@dataclass(frozen=True)
class Loaded:
    """An engine ready to work; `generate(prompt_ids, n)` gives exactly n new greedy ids."""

    versions: dict[str, str]
    generate: Callable[[list[int], int], list[int]]


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
        ids = loaded.generate(request["prompt"], request["tokens"])
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "token_ids": [int(i) for i in ids]}), file=answers)
