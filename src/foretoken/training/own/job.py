"""Heads for a target of one's own: what a run reads, and the task that trains on it.

Owns the order: prompts, answers, hidden states, steps. The rollouts, losses and the loop are those
of the packaged heads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from foretoken.checkpoint import find_model
from foretoken.errors import ConfigError
from foretoken.training.crew import Job
from foretoken.training.export import copy_tokenizer, keep_special_ids
from foretoken.training.heads.build import HeadTraining, fresh_head, head_points, require_fit
from foretoken.training.loop import Progress, Trainer, pick_device, run_folder, tell_compiling
from foretoken.training.own.answers import write_answers
from foretoken.training.own.keep import estimate_states, keep_states, states_folder
from foretoken.training.own.prompts import PromptSet, read_prompt_set
from foretoken.training.own.settings import StateSettings
from foretoken.training.own.source import OnlineStates, OwnSource, packed_rows
from foretoken.training.own.states import read_plan
from foretoken.training.own.stored import StoredStates, read_parts
from foretoken.training.own.target import OwnTarget
from foretoken.training.own.text import keep_text
from foretoken.training.provenance import write_provenance
from foretoken.training.ranks import Ranks
from foretoken.training.settings import Settings


def open_target(settings: Settings) -> OwnTarget:
    """The target of a run on own data.

    Raises:
        ConfigError: there is none, or rows longer than its context.
        ModelError: it cannot be run, or not by a family of our own.
    """
    if settings.target is None:
        raise ConfigError("target", None, "the folder, packaged name or hub id of the target")
    assert settings.data is not None, "a run on own data"
    target = OwnTarget(find_model(settings.target))
    longest = max(stage.length for stage in settings.stages)
    if longest > target.max_length:
        raise ConfigError("stages.length", longest, f"at most the target's {target.max_length}")
    if settings.data.answer_tokens >= target.max_length:
        given, allowed = settings.data.answer_tokens, f"below the target's {target.max_length}"
        raise ConfigError("data.answer_tokens", given, allowed)
    require_fit(target.parts, settings)
    return target


def read_own_prompts(
    settings: Settings, target: OwnTarget, report: Callable[[str], None]
) -> PromptSet:
    """The prompts of a run. Raises ConfigError as `read_prompt_set`."""
    assert settings.data is not None, "a run on own data"
    room = target.max_length - settings.data.answer_tokens
    found = read_prompt_set(settings.data, target.engine.parts.tokenizer, room)
    if found.skipped:
        report(f"left out {found.skipped} broken lines of {settings.data.prompts}")
    return found


def prepare_own(settings: Settings, folder: Path, report: Callable[[str], None]) -> str:
    """Read prompts and text, let the target answer, keep its hidden states if that is asked.

    Returns the digest of the data.

    What `folder` has by now is not done again. Raises ConfigError and ModelError as `open_target`
    and `read_prompt_set`; ConfigError, too, where the states do not fit the disk.
    """
    target = open_target(settings)
    assert settings.data is not None, "a run on own data"
    found = read_own_prompts(settings, target, report)
    text_digest = None
    if settings.data.text is not None:
        tokenizer = target.engine.parts.tokenizer
        text_digest = keep_text(settings.data, tokenizer, folder, report)
    write_answers(target.engine, found, settings.data, folder, report)
    if settings.head is not None and settings.head.kind in ("draft", "parallel"):
        copy_tokenizer(find_model(str(settings.target)), folder)
        keep_special_ids(find_model(str(settings.target)), folder)
    if settings.states is not None:
        keep_states(target, settings, folder, text_digest, report)
    digests = [found.digest, *([text_digest] if text_digest else [])]
    return " ".join(digests)


def build_own_job(settings: Settings, folder: Path) -> Job:
    """A fresh head and its task on the answers that `folder` holds.

    With states on disk the target is not loaded: its matrices are beside them.
    """
    assert settings.target is not None and settings.data is not None, "checked before"
    assert settings.head is not None, "a run of a head"
    rows = packed_rows(settings, folder)
    if settings.states is None:
        target = OwnTarget(find_model(settings.target))
        parts, points = target.parts, head_points(target.parts, settings.head)
        source = OwnSource(OnlineStates(target, rows, points), rows, parts.head_VD, settings)
    else:
        stored, device = states_folder(settings, folder), pick_device()
        plan, parts = read_plan(stored), read_parts(stored, device)
        assert plan is not None, f"{stored} was written before"
        states = StoredStates(stored, plan, head_points(parts, settings.head), device)
        source = OwnSource(states, rows, parts.head_VD, settings)
    torch.manual_seed(settings.seed)
    head = fresh_head(parts, settings, rows["answers"].frequent_ids(parts.vocab_size))
    head.net.to(parts.head_VD.device)
    return Job(head.net, HeadTraining(head, settings, source))


def train_own_head(
    settings: Settings, out: Path | None, report: Callable[[str], None], ranks: Ranks
) -> Progress:
    """Train a head of `settings.target` on its answers to `settings.data` until the budget ends.

    Raises:
        ConfigError, ModelError: as `prepare_own`.
    """
    folder = run_folder(settings, out)

    def begin() -> None:
        digest = prepare_own(settings, folder, report)
        write_provenance(folder, settings, digest, ranks.size)

    ranks.lead(begin)
    if settings.head is not None and settings.head.kind == "draft":
        tell_compiling(settings, report)
    build = partial(build_own_job, settings, folder)
    return Trainer(build(), settings, folder, build, ranks).run(report)


def store_own_states(
    settings: Settings, out: Path | None, report: Callable[[str], None], *, only_estimate: bool
) -> None:
    """Answers and their hidden states for a run, without its steps; or only their size in bytes.

    Raises:
        ConfigError, ModelError: as `prepare_own`.
    """
    folder = run_folder(settings, out)
    if only_estimate:
        target = open_target(settings)
        prompts = read_own_prompts(settings, target, report)
        estimate_states(target, prompts, settings, folder, report)
    else:
        prepare_own(replace(settings, states=settings.states or StateSettings()), folder, report)
