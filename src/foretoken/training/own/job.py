"""Heads for a target of one's own: what a run reads, and the task that trains on it.

Owns the order: prompts, answers, hidden states. The rollouts, losses and the loop are those of
the packaged heads.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from foretoken.checkpoint import find_model
from foretoken.errors import ConfigError
from foretoken.training.crew import Job
from foretoken.training.heads.build import HeadTraining, fresh_head
from foretoken.training.heads.capture import Captured
from foretoken.training.loop import Progress, Trainer, run_folder
from foretoken.training.own.answers import PackedRows, read_answers, write_answers
from foretoken.training.own.prompts import PromptSet, read_prompt_set
from foretoken.training.own.target import OwnTarget
from foretoken.training.provenance import write_provenance
from foretoken.training.settings import Settings


class OwnSource:
    """Batches of a target's own answers with its hidden states, computed on the fly."""

    def __init__(
        self,
        target: OwnTarget,
        answers: list[list[int]],
        settings: Settings,
        points: tuple[int, ...],
    ) -> None:
        """Read hidden states at `points`; the first `data.held_out` answers are held out."""
        assert settings.data is not None, "a run on data of one's own"
        held = settings.data.held_out
        self._target, self._points = target, points
        self._rows = PackedRows(answers[held:], settings.seed)
        self._held = PackedRows(answers[:held], settings.seed)
        self._length = settings.stages[-1].length
        self.head_VD = target.parts.head_VD
        self.device = self.head_VD.device

    def batch(self, index: int, tokens: int, length: int) -> Captured:
        """Part `index`: `tokens` tokens in rows of `length`."""
        return self._target.capture(self._rows.rows(index, tokens // length, length), self._points)

    def held_out(self) -> Captured:
        """Greedy answers to held-out prompts."""
        return self._target.capture(self._held.rows(0, 8, self._length), self._points)

    def logits(self, states: Tensor) -> Tensor:
        """The target's own."""
        return torch.nn.functional.linear(states.float(), self.head_VD)


def prepare_own(settings: Settings, folder: Path, report: Callable[[str], None]) -> PromptSet:
    """Read the prompts and let the target answer them, as far as `folder` has no answers yet.

    Raises:
        ConfigError: as `read_prompt_set`; rows longer than the target's context.
    """
    assert settings.data is not None and settings.target is not None, "a run on own data"
    target = OwnTarget(find_model(settings.target))
    longest = max(stage.length for stage in settings.stages)
    if longest > target.max_length:
        raise ConfigError("stages.length", longest, f"at most the target's {target.max_length}")
    room = target.max_length - settings.data.answer_tokens
    if room < 1:
        given, allowed = settings.data.answer_tokens, f"below the target's {target.max_length}"
        raise ConfigError("data.answer_tokens", given, allowed)
    found = read_prompt_set(settings.data, target.engine.parts.tokenizer, room)
    if found.skipped:
        report(f"left out {found.skipped} broken lines of {settings.data.prompts}")
    write_answers(target.engine, found, settings.data, folder, report)
    return found


def build_own_job(settings: Settings, folder: Path) -> Job:
    """A fresh head and its task on the answers that `folder` holds."""
    assert settings.target is not None and settings.data is not None, "checked before"
    target = OwnTarget(find_model(settings.target))
    answers = read_answers(folder)
    torch.manual_seed(settings.seed)
    seen = PackedRows(answers[settings.data.held_out :], settings.seed)
    frequent = seen.frequent_ids(target.parts.vocab_size)
    head = fresh_head(target.parts, settings, frequent)
    head.net.to(target.parts.head_VD.device)
    source = OwnSource(target, answers, settings, head.points)
    return Job(head.net, HeadTraining(head, settings, source))


def train_own_head(settings: Settings, out: Path | None, report: Callable[[str], None]) -> Progress:
    """Train a head of `settings.target` on its answers to `settings.data` until the budget ends.

    Raises:
        ConfigError: no target, or as `prepare_own`.
        ModelError: the target cannot be run, or not by a family of our own.
    """
    if settings.target is None:
        raise ConfigError("target", None, "the folder, packaged name or hub id of the target")
    folder = run_folder(settings, out)
    found = prepare_own(settings, folder, report)
    write_provenance(folder, settings, found.digest)
    build = partial(build_own_job, settings, folder)
    return Trainer(build(), settings, folder, build).run(report)
