"""A drafter whose acceptance is steered from outside, for the cases that need to know it.

It is given the texts that requests will get, learnt from a server without drafts, and drafts from
them: right with a chance that depends on the place in the answer, else a wrong token. Requests that
it was told nothing of get drafts that are always wrong. A draft takes as long as it is told,
in work that leaves the interpreter to others as a model's pass does. FORETOKEN_STEERED names the
JSON file with all of it. The coins are fixed by prompt and place, so every arm sees the same.
"""

import hashlib
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from foretoken.models.tensors import Draft
from foretoken.proposers import Context, Proposer, ProposerSettings

VARIABLE = "FORETOKEN_STEERED"
METHOD = {"method": "custom_class", "model": "never_slower_drafter.SteeredProposer"}
_WORK = bytes(32 << 10)
"""Hashing it takes about 20 microseconds, without the interpreter's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The answer to one request, and the chance of a right draft from each place on."""

    prompt: Sequence[int]
    seed: int | None
    tokens: Sequence[int]
    chances: Sequence[tuple[int, float]]
    """(first place, chance), ascending from 0."""

    def drafts(self, vocab_size: int) -> list[int]:
        """What is drafted for each place of the answer."""
        draw, drafts = random.Random(f"{self.seed} {list(self.prompt)[-16:]}"), []
        for place, token in enumerate(self.tokens):
            chance = [chance for first, chance in self.chances if first <= place][-1]
            drafts.append(token if draw.random() < chance else (token + 1) % vocab_size)
        return drafts


def write_streams(path: Path, streams: Sequence[Stream], pass_s: float) -> None:
    """The file that FORETOKEN_STEERED names; a drafted token takes `pass_s`."""
    path.write_text(json.dumps({"pass_s": pass_s, "streams": [asdict(one) for one in streams]}))


@final
class SteeredProposer(Proposer):
    """Drafts from answers that it was told."""

    name = "steered"

    def __init__(self, settings: ProposerSettings) -> None:
        told = json.loads(Path(os.environ[VARIABLE]).read_text())
        self._pass_s = float(told["pass_s"])
        self._drafts: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
        for one in told["streams"]:
            stream = Stream(**one)
            key = tuple(stream.prompt), stream.seed
            self._drafts[key] = stream.drafts(settings.vocab_size)
        self._wrong = [settings.vocab_size - 1] * settings.max_model_len
        self._by_request: dict[str, list[int]] = {}

    def propose(self, context: Context) -> Draft:
        until = time.perf_counter()
        ids: list[tuple[int, ...]] = [()] * len(context.spans)
        for i in context.wanted:
            span = context.spans[i]
            request, place = span.sequence.request, span.sequence.num_output
            known = self._by_request.get(request.request_id)
            if known is None:
                key = request.prompt_token_ids, request.params.seed
                known = self._by_request[request.request_id] = self._drafts.get(key, self._wrong)
            ids[i] = tuple(known[place : place + span.draft_budget])
        until += self._pass_s * max(map(len, ids), default=0)
        while time.perf_counter() < until:
            hashlib.sha256(_WORK)
        return Draft(ids=tuple(ids), drafter=self.name)

    def release(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)
