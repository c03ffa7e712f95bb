"""The target's own answers to the prompts, kept in the run's folder as they come.

Owns `answers.jsonl`: one JSON line per prompt, in the order of the prompts, the held-out ones
first and greedy. A line that a killed run left half written is dropped and written anew.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.engine import Engine
from foretoken.training.answers import answer_all
from foretoken.training.own.prompts import PromptSet
from foretoken.training.own.settings import DataSettings
from foretoken.types import SamplingParams

FILE = "answers.jsonl"


def read_answers(folder: Path) -> list[list[int]]:
    """Prompt and answer of every whole line, as token ids; a cut-off last line is removed."""
    path = folder / FILE
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line)["ids"] for line in whole.splitlines()]


def write_answers(
    engine: Engine,
    prompts: PromptSet,
    settings: DataSettings,
    folder: Path,
    report: Callable[[str], None],
) -> None:
    """Let the target answer every prompt that has no answer in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    done = len(read_answers(folder))
    while done < len(prompts.ids):
        end = min(done + settings.batch, len(prompts.ids))
        if done < settings.held_out:
            end, temperature = min(end, settings.held_out), 0.0
        else:
            turn = (done - settings.held_out) // settings.batch
            temperature = settings.temperatures[turn % len(settings.temperatures)]
        params = SamplingParams(
            temperature=temperature, seed=done, max_tokens=settings.answer_tokens, detokenize=False
        )
        asked = prompts.ids[done:end]
        found = answer_all(engine, asked, params)
        with (folder / FILE).open("a", encoding="ascii") as file:
            for ids, answer in zip(asked, found, strict=True):
                file.write(json.dumps({"ids": [*ids, *answer.token_ids]}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        done = end
        report(f"answered {done} prompts of {len(prompts.ids)}")


class PackedRows:
    """Answers laid end to end and cut into rows at random; the same for the same part."""

    def __init__(self, answers: Sequence[Sequence[int]], seed: int) -> None:
        """Pack `answers`, of which there must be at least one."""
        assert answers, "nothing to pack"
        self._tokens: NDArray[np.int64] = np.concatenate(
            [np.asarray(ids, dtype=np.int64) for ids in answers]
        )
        self._seed = seed

    def rows(self, index: int, count: int, length: int) -> Tensor:
        """`count` rows of `length` tokens for part `index`, int64; short data repeats."""
        rng = np.random.default_rng((self._seed, index))
        starts = rng.integers(0, max(1, len(self._tokens) - length + 1), size=count)
        cut = [np.resize(self._tokens[start : start + length], length) for start in starts]
        return torch.from_numpy(np.stack(cut))

    def frequent_ids(self, vocab_size: int) -> Tensor:
        """All token ids, those that occur most often first, int64 [V]."""
        counts = np.bincount(self._tokens, minlength=vocab_size)
        return torch.from_numpy(np.argsort(-counts, kind="stable"))
