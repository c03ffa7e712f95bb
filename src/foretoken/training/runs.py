"""`foretoken train CONFIG` from end to end: prompts, the target's answers, hidden states, steps.

Owns that order, and what a run refuses before anything is done. It knows no loss and no format of
files.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from foretoken.checkpoint import find_model
from foretoken.errors import ConfigError
from foretoken.training.data.answers import write_answers
from foretoken.training.data.loaded_target import LoadedTarget
from foretoken.training.data.packed_rows import OnlineStates, RunRows, packed_rows
from foretoken.training.data.prompts import PromptSet, keep_text, read_prompt_set
from foretoken.training.data.states import (
    StoredStates,
    estimate_states,
    keep_states,
    read_parts,
    read_plan,
    states_folder,
)
from foretoken.training.heads.export import export_run
from foretoken.training.heads.kind import find_kind, fresh_head, require_fit, require_form
from foretoken.training.heads.task import HeadTraining
from foretoken.training.llama import copy_tokenizer, keep_special_ids
from foretoken.training.loop import Job, Progress, Trainer, pick_device, tell_compiling
from foretoken.training.ranks import joined
from foretoken.training.run_folder import folder_of, write_provenance
from foretoken.training.settings import Settings, StateSettings, read_settings
from foretoken.training.trained_kinds import trained_kinds

Report = Callable[[str], None]


def train(
    config: str | Path,
    out: Path | None,
    target: Path | None,
    report: Report,
    kind: str | None = None,
    export: str | None = None,
) -> Progress:
    """Run the TOML file `config` to the end of its budget.

    Goes on from the newest checkpoint in the run's folder, `out`. `target` replaces the config's.
    `export` names a format in which the model is written to the folder `export` of the run's.
    Under torchrun all its processes train one model: rank 0 reports and writes the files.

    Raises:
        ConfigError: a wrong config, or one that trains something else than `kind`.
        ModelError: the target cannot be run, or not by a family of our own.
    """
    settings = _read(config, target)
    if kind is not None and settings.kind != kind:
        command = trained_kinds()[settings.kind].command
        allowed = f"a config of {kind!r}; this one is for `foretoken train {command} {config}`"
        raise ConfigError("CONFIG", f"{config}, which trains {settings.kind!r}", allowed)
    require_form(settings.kind, export, "--export")
    folder = folder_of(settings, out)
    with joined() as ranks:
        told = report if ranks.leads else lambda _: None
        data = ranks.lead(lambda: prepare_data(settings, folder, told))
        if ranks.leads:
            write_provenance(folder, asdict(settings), data, ranks.size)
        if find_kind(settings.kind).compiles:
            tell_compiling(settings, told)
        done = Trainer(build_job(settings, folder), settings, folder, ranks).run(told)
        if export is not None and ranks.leads:
            export_run(folder, folder / "export", verifier=str(settings.target), form=export)
            told(f"wrote {folder / 'export'}")
        told(f"done: {done.step} steps, {done.tokens} tokens, {done.seconds / 60:.1f} minutes")
    return done


def store_states(
    config: str | Path,
    out: Path | None,
    target: Path | None,
    report: Report,
    *,
    only_estimate: bool = False,
) -> None:
    """Write the answers and hidden states that a run will read, and take no step.

    `only_estimate`: report how many bytes they take, and write nothing.

    Raises:
        ConfigError: a wrong config, or a disk that is too small.
        ModelError: as `train`.
    """
    settings = _read(config, target)
    folder = folder_of(settings, out)
    if only_estimate:
        loaded = open_target(settings)
        prompts = read_prompts(settings, loaded, report)
        estimate_states(loaded, prompts, settings, folder, report)
    else:
        prepare_data(replace(settings, states=settings.states or StateSettings()), folder, report)


def open_target(settings: Settings) -> LoadedTarget:
    """The target of a run. Raises ConfigError: there is none, or rows longer than its context;
    ModelError: it cannot be run, or not by a family of our own."""
    if settings.target is None:
        allowed = "the folder, packaged name or hub id of the target; --target gives it, too"
        raise ConfigError("config.target", None, allowed)
    target = LoadedTarget(find_model(settings.target))
    longest = max(stage.length for stage in settings.stages)
    if longest > target.max_length:
        allowed = f"at most {target.max_length}, the longest context of the target"
        raise ConfigError("stages.length", longest, allowed)
    if settings.of_data.answer_tokens >= target.max_length:
        given = settings.of_data.answer_tokens
        allowed = f"below {target.max_length}, the longest context of the target"
        raise ConfigError("data.answer_tokens", given, allowed)
    require_fit(target.parts, settings)
    return target


def read_prompts(settings: Settings, target: LoadedTarget, report: Report) -> PromptSet:
    """The prompts of a run. Raises ConfigError as `read_prompt_set`."""
    room = target.max_length - settings.of_data.answer_tokens
    found = read_prompt_set(settings.of_data, target.engine.parts.tokenizer, room)
    if found.skipped:
        report(f"left out {found.skipped} broken lines of {settings.of_data.prompts}")
    return found


def prepare_data(settings: Settings, folder: Path, report: Report) -> str:
    """Read prompts and text, let the target answer, keep its hidden states if that is asked.

    Returns the digest of the data. What `folder` has by now is not done again.

    Raises:
        ConfigError, ModelError: as `open_target` and `read_prompt_set`; ConfigError, too, where
            the states do not fit the disk.
    """
    target = open_target(settings)
    found = read_prompts(settings, target, report)
    text_digest = None
    if settings.of_data.text is not None:
        tokenizer = target.engine.parts.tokenizer
        text_digest = keep_text(settings.of_data, tokenizer, folder, report)
    write_answers(target.engine, found, settings.of_data, folder, report)
    if find_kind(settings.kind).layout is None:  # a model of its own, which needs a tokenizer
        copy_tokenizer(find_model(str(settings.target)), folder)
        keep_special_ids(find_model(str(settings.target)), folder)
    if settings.states is not None:
        keep_states(target, settings, folder, text_digest, report)
    digests = [found.digest, *([text_digest] if text_digest else [])]
    return " ".join(digests)


def build_job(settings: Settings, folder: Path) -> Job:
    """A fresh head and its task on the answers that `folder` holds.

    With states on disk the target is not loaded: its matrices are beside them.
    """
    assert settings.target is not None and settings.data is not None, "checked before"
    rows, kind = packed_rows(settings, folder), find_kind(settings.of_head.kind)
    if settings.states is None:
        target = LoadedTarget(find_model(settings.target))
        parts, points = target.parts, kind.points(target.parts)
        source = RunRows(OnlineStates(target, rows, points), rows, parts.head_VD, settings)
    else:
        stored, device = states_folder(settings, folder), pick_device()
        plan, parts = read_plan(stored), read_parts(stored, device)
        assert plan is not None, f"{stored} was written before"
        states = StoredStates(stored, plan, kind.points(parts), device)
        source = RunRows(states, rows, parts.head_VD, settings)
    torch.manual_seed(settings.seed)
    head = fresh_head(parts, settings, rows["answers"].frequent_ids(parts.vocab_size))
    head.net.to(parts.head_VD.device)
    return Job(head.net, HeadTraining(head, settings, source))


def _read(config: str | Path, target: Path | None) -> Settings:
    settings = read_settings(config)
    if settings.head is None or settings.data is None:
        allowed = "a config with [head] and [data], as docs/training.md shows one"
        raise ConfigError("CONFIG", str(config), allowed)
    return settings if target is None else replace(settings, target=str(target))
