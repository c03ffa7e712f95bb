"""How `peers.py` talks to an engine in another process and another virtual environment.

One JSON document per line. The worker is given a Job as its only argument, answers with its
versions once loaded, then answers every {"prompts": lists of ids, "tokens": n, "k": drafts or null}
with the seconds it took, those up to the last prompt's first token, and the new ids of each. Uses
the standard library only. Whatever the engine prints goes to standard error.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SIGNAL_AT_PARENTS_DEATH = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass(frozen=True)
class Generated:
    """What an engine wrote."""

    ids: list[list[int]]
    """New greedy ids of each prompt."""
    first_s: float
    """From the call to the first token of the prompt that got its own last."""


Generate = Callable[[list[list[int]], int, int], Generated]
"""Of prompts, so many new tokens, so many drafts at a time."""


@dataclass(frozen=True)
class Job:
    """What to load: a target, a draft or a look-up if it is to speculate, and how it is tuned."""

    target: str
    draft: str | None
    method: str | None
    """None, "draft_model" or "ngram"."""
    max_model_len: int
    weights: str = "16 bit"
    """Of the target: "16 bit", "int8" or "int4"; peers are given files that have them already."""
    batch: int = 1
    """Most prompts at once; transformers, OpenVINO and llama.cpp are asked one at a time."""
    setting: dict[str, Any] = field(default_factory=dict)
    """A value for each axis that `peer_cases.py` has for the engine."""

    @property
    def k(self) -> int:
        """Drafts at a time; 0 without."""
        return int(self.setting.get("k", 0))

    @property
    def threads(self) -> int:
        """Of the engine."""
        return int(self.setting["threads"])


@dataclass(frozen=True)
class Loaded:
    """An engine ready to work."""

    versions: dict[str, str]
    generate: Generate


def one_by_one(
    generate: Callable[[list[int], int, int], tuple[list[int], float]],
) -> Generate:
    """`Loaded.generate` of an engine that takes a prompt at a time, and there is only one."""

    def generate_one(prompts: list[list[int]], tokens: int, k: int) -> Generated:
        [prompt] = prompts
        ids, first_s = generate(prompt, tokens, k)
        return Generated([ids], first_s)

    return generate_one


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends: a killed benchmark would leave
    engines that finish what they were asked, and take the processor from what is measured next."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)


def serve(load: Callable[[Job], Loaded]) -> None:
    """Load the engine of the command line and answer until standard input ends."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    began = time.perf_counter()
    job = Job(**json.loads(sys.argv[1]))
    loaded = load(job)
    load_s = time.perf_counter() - began
    print(json.dumps({"versions": loaded.versions, "load_s": load_s}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        k = job.k if request["k"] is None else request["k"]
        began = time.perf_counter()
        found = loaded.generate(request["prompts"], request["tokens"], k)
        seconds = time.perf_counter() - began
        ids = [[int(i) for i in one] for one in found.ids]
        answer = {"seconds": seconds, "first_s": found.first_s, "token_ids": ids}
        print(json.dumps(answer), file=answers)
