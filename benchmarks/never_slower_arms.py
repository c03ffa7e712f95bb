"""The servers that are compared, and what they serve: the packaged pair, or one from two folders.

Every arm is a server process of its own, started when it is first asked for and kept beside the
others, idle unless it is its turn. Knows no case and no bar.
"""

import json
import os
import random
import re
import urllib.request
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common import ROOT
from never_slower_drafter import METHOD, VARIABLE
from never_slower_load import Ask, Crowd, Round, run_round
from served import SIZES, Server, demo_server, pages_of

from foretoken.checkpoint import find_model
from foretoken.cli.demo import METHODS
from foretoken.lab.http.timed import TransportError
from foretoken.text.tokenizer import Tokenizer
from tools.python_text.stdlib import held_out_files

ADMIN_KEY = "benchmark"
CHARACTERS = 600_000
"""Of held-out code that prompts are cut from."""

HERE = Path(__file__).parent
BESIDE = "PYTHONPATH", os.pathsep.join(map(str, (HERE, ROOT, os.environ.get("PYTHONPATH", ""))))
"""The variable by which a server finds the modules of this folder, and what lies beside it."""
DRAFTING = dict(METHODS["draft_model"] or {})
"""What drafts for the packaged target: the other half of the pair."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What makes a server another one."""

    options: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    module: str = "foretoken"
    """What is run; it takes the command line of `foretoken`."""
    copy: int = 0
    """A second server that is told the same."""

    def again(self) -> "ServerSpec":
        return replace(self, copy=self.copy + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of a comparison: a server, and what its requests say beside the prompt."""

    name: str
    spec: ServerSpec
    extra: Mapping[str, Any] = field(default_factory=dict)

    def limited(self, length: int) -> "Arm":
        """The same server, at most so many drafts a step."""
        limit = {"speculation": {"num_speculative_tokens": length}}
        return replace(self, name=f"fixed {length}", extra=limit)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, how it is drafted for, and how servers of it are told to run."""

    name: str
    target: str
    drafting: Mapping[str, Any]
    """speculative_config without a number of drafts."""
    options: tuple[str, ...]
    context: int
    """Most tokens of a request."""
    prompt_tokens: int
    tokens: tuple[int, int]
    """Fewest and most tokens of an answer."""
    most_servers: int
    fewest: float
    """Requests of a round for each one in flight, at least."""
    temperatures: tuple[float, ...] = (0.8,)
    """Of requests, in turns: more than one are classes that differ in what they accept."""

    @property
    def second_off(self) -> int:
        """1 if a second server without drafts fits beside the others; else one is asked twice."""
        return int(self.most_servers >= 4)

    @cached_property
    def _ids(self) -> list[int]:
        """Held-out code as the target reads it."""
        tokenizer = Tokenizer.of_folder(find_model(self.target))
        assert tokenizer is not None, self.target
        text = "".join(file.text for file in held_out_files())[:CHARACTERS]
        lines = [line for line in text.splitlines(keepends=True) if line.strip()]
        return [i for ids in tokenizer.encode_many(["".join(lines)]) for i in ids]

    def prompt(self, number: int, length: int) -> list[int]:
        """Held-out code; another piece for every number, as far as it reaches."""
        start = random.Random(f"{number} {length}").randrange(len(self._ids) - length)
        return [0, *self._ids[start : start + length - 1]]

    def off(self, *options: str) -> ServerSpec:
        return ServerSpec((*self.options, "--speculative-config", "none", *options))

    def drafted(self, config: Mapping[str, Any], *options: str) -> ServerSpec:
        return ServerSpec((*self.options, "--speculative-config", json.dumps(config), *options))

    def steered(self, streams: Path, most: int, *options: str) -> ServerSpec:
        """A server whose drafter does what a file says."""
        env = (VARIABLE, str(streams)), BESIDE
        spec = self.drafted({**METHOD, "num_speculative_tokens": most}, *options)
        return replace(spec, env=env)


def demo_pair() -> Pair:
    drafting = {k: v for k, v in DRAFTING.items() if k != "num_speculative_tokens"}
    return Pair(
        name="demo",
        target="demo",
        drafting=drafting,
        options=(*SIZES, "--admin-key", ADMIN_KEY),
        context=2048,
        prompt_tokens=64,
        tokens=(32, 96),
        most_servers=6,
        fewest=2.0,
    )


def folder_pair(target: Path, draft: Path) -> Pair:
    """A pair from two folders, in int8."""
    config = json.loads((target / "config.json").read_text())
    return Pair(
        name=f"{target.name} + {draft.name}",
        target=str(target),
        drafting={"method": "draft_model", "model": str(draft), "quantization": "int8"},
        options=("--quantization", "int8", "--kv-cache-memory-bytes", "1600000000",
                 "--admin-key", ADMIN_KEY),
        context=config["max_position_embeddings"],
        prompt_tokens=128,
        tokens=(24, 64),
        most_servers=3,
        fewest=1.5,
        temperatures=(0.8, 0.0),
    )  # fmt: skip


class Servers:
    """The servers that run, at most so many; the one that was idle longest makes room."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._running: OrderedDict[ServerSpec, tuple[Server, ExitStack]] = OrderedDict()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for spec in list(self._running):
            self.stop(spec)

    def start(self, specs: Sequence[ServerSpec]) -> None:
        """Have all of these run side by side."""
        assert len(set(specs)) <= self.pair.most_servers, (len(specs), self.pair.most_servers)
        # Those that run first, so that none of them makes room.
        for spec in sorted(specs, key=lambda one: one not in self._running):
            self.url(spec)

    def url(self, spec: ServerSpec) -> str:
        """Where it listens; it is started if it does not run."""
        if spec not in self._running:
            while len(self._running) >= self.pair.most_servers:
                self.stop(next(iter(self._running)))
            stack = ExitStack()
            server = demo_server(
                *spec.options, model=self.pair.target, env=dict(spec.env), module=spec.module
            )
            self._running[spec] = stack.enter_context(server), stack
        self._running.move_to_end(spec)
        return self._running[spec][0].url

    def stop(self, spec: ServerSpec) -> None:
        """End one that runs, as its operator would."""
        self._running.pop(spec)[1].close()

    def ask(self, arm: Arm, crowds: Sequence[Crowd]) -> Round:
        """A round of one arm, while the others wait."""
        url = self.url(arm.spec)
        try:
            return run_round(url, crowds, arm.extra)
        except TransportError as error:
            code = self._running[arm.spec][0].process.poll()
            state = "runs" if code is None else f"ended with {code}"
            raise SystemExit(f"the server of `{arm.name}`, which {state}: {error}") from error

    def set_speculation(self, spec: ServerSpec, policy: Mapping[str, Any]) -> None:
        """Say as its operator how it may draft from now on."""
        request = urllib.request.Request(
            f"{self.url(spec)}/admin/speculation",
            data=json.dumps(policy).encode(),
            method="PUT",
            headers={"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).close()

    def metrics(self, spec: ServerSpec) -> str:
        with urllib.request.urlopen(f"{self.url(spec)}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def kv_tokens(self, spec: ServerSpec) -> int:
        size, pages = pages_of(self.metrics(spec))
        return size * pages


def counters(page: str, part: str) -> dict[str, float]:
    """Counters of a metrics page whose names hold `part`."""
    found = re.findall(rf"^(\w[\w:]*{part}[\w:]*_total)(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    return {name: float(value) for name, value in found}


def plain_ask(pair: Pair, number: int, *, group: str = "", length: int | None = None) -> Ask:
    """A request for code, greedy or drawn with a seed."""
    draw = random.Random(number)
    body: dict[str, Any] = {
        "prompt": pair.prompt(number, length or pair.prompt_tokens),
        "max_tokens": draw.randint(*pair.tokens),
        "temperature": pair.temperatures[number % len(pair.temperatures)],
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if body["temperature"]:
        body["seed"] = number
    return Ask(key=f"{length} {number}", body=body, group=group)
