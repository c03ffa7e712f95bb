"""A run's hidden states on disk, the `[states]` table: written before the first step, then read.

Owns the choice of what is kept for a run, the estimate of its size before anything is done, and
`target.safetensors` of a states folder: embedding, output head and sizes of the target, so that
training on stored states loads no target.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL
from foretoken.training.data.answers import FILE as ANSWERS_FILE
from foretoken.training.data.answers import read_answers
from foretoken.training.data.loaded_target import LoadedTarget
from foretoken.training.data.packed_rows import (
    ANSWERS,
    HELD_OUT,
    TEXT,
    count_rows,
    held_out_rows,
    packed_rows,
    rows_of,
)
from foretoken.training.data.prompts import PromptSet
from foretoken.training.data.shards import (
    RowSet,
    StatePlan,
    agree,
    require_room,
    write_plan,
    write_states,
    write_whole,
)
from foretoken.training.data.text import text_tokens
from foretoken.training.heads.kind import find_kind
from foretoken.training.heads.target import TargetParts
from foretoken.training.run_folder import make
from foretoken.training.settings import Settings, StateSettings

TARGET_FILE = "target.safetensors"
NARROW = (torch.bfloat16, torch.float16)


def states_folder(settings: Settings, folder: Path) -> Path:
    """Where a run's hidden states are."""
    asked = None if settings.states is None else settings.states.folder
    return folder / "states" if asked is None else Path(asked).expanduser()


def plan_states(
    target: LoadedTarget,
    settings: Settings,
    tokens: Mapping[str, int],
    source: str,
    kinds: Sequence[str] = (),
) -> StatePlan:
    """What a run wants on disk.

    Args:
        target: whose hidden states.
        settings: of the run, with a head.
        tokens: how many there are, by set.
        source: digest of the tokens.
        kinds: of heads that will read them too, beside the run's own.
    """
    assert settings.head is not None, "a run of a head"
    asked = settings.states or StateSettings()
    wanted = sorted({(rows_of(stage), stage.length) for stage in settings.stages})
    last = settings.stages[-1].length
    sets = [
        RowSet(name=name, length=length, count=count_rows(tokens[name], length))
        for name, length in wanted
    ]
    held = held_out_rows(tokens[HELD_OUT], last)
    readers = (settings.head.kind, *kinds)
    points = [point for kind in readers for point in find_kind(kind).points(target.parts)]
    dtype = str(target.dtype).removeprefix("torch.") if asked.dtype == "auto" else asked.dtype
    return StatePlan(
        source=source,
        sets=(RowSet(name=HELD_OUT, length=last, count=held), *sets),
        points=tuple(dict.fromkeys((*points, FINAL))),
        hidden_size=target.parts.hidden_size,
        dtype=dtype,
        shard_bytes=asked.shard_megabytes << 20,
    )


def keep_states(
    target: LoadedTarget,
    settings: Settings,
    folder: Path,
    text_digest: str | None,
    report: Callable[[str], None],
    kinds: Sequence[str] = (),
) -> None:
    """Write the hidden states of the answers and text in `folder` that are not on disk yet.

    Heads of `kinds` will read them too, beside the run's own.

    Raises:
        ConfigError: they do not fit, or the states folder holds others.
        TrainingError: a shard cannot be written.
    """
    rows, kept = packed_rows(settings, folder), states_folder(settings, folder)
    make(kept, "states.folder")
    read = f"{settings.target} {text_digest}".encode() + (folder / ANSWERS_FILE).read_bytes()
    digest = hashlib.sha256(read).hexdigest()[:16]
    tokens = {name: packed.tokens for name, packed in rows.items()}
    plan = agree(plan_states(target, settings, tokens, digest, kinds), kept)
    matrices = 0 if (kept / TARGET_FILE).is_file() else _matrix_bytes(target)
    needed = require_room(plan, kept, matrices)
    report(_estimate(plan, matrices, needed))
    write_plan(plan, kept)
    if matrices:
        save_parts(target.parts, kept)
    write_states(
        plan,
        kept,
        lambda of, number: rows[of.name].rows([number], of.length)[0],
        lambda tokens_T: target.capture(tokens_T[None], plan.points).features_BTF[0],
        report,
    )


def estimate_states(
    target: LoadedTarget,
    prompts: PromptSet,
    settings: Settings,
    folder: Path,
    report: Callable[[str], None],
) -> int:
    """Bytes that the hidden states of a run will take, at most; nothing is written.

    A prompt without an answer yet counts with the longest that it may get.
    """
    assert settings.data is not None, "a run on own data"
    known, longest = read_answers(folder), settings.data.answer_tokens
    sizes = [len(ids) for ids in known]
    sizes += [len(ids) + longest for ids in prompts.ids[len(known) :]]
    held = settings.data.held_out
    tokens = {ANSWERS: sum(sizes[held:]), HELD_OUT: sum(sizes[:held])}
    if settings.data.text is not None:
        tokens[TEXT] = len(text_tokens(settings.data, target.engine.parts.tokenizer)[0])
    plan, matrices = plan_states(target, settings, tokens, ""), _matrix_bytes(target)
    needed = sum(plan.shard_size(*shard) for shard in plan.shards()) + matrices
    if len(known) < len(prompts.ids):
        report(f"{len(prompts.ids) - len(known)} prompts have no answer yet: at most")
    report(_estimate(plan, matrices, needed))
    return needed


def _matrix_bytes(target: LoadedTarget) -> int:
    return sum(tensor.nbytes for tensor in stored_tensors(target.parts).values())


def _estimate(plan: StatePlan, matrices: int, needed: int) -> str:
    return (
        f"hidden states: {needed:,} bytes to write in {len(plan.shards())} shards "
        f"({plan.arithmetic()}; embedding and output head of the target: {matrices:,} bytes)"
    )


def save_parts(parts: TargetParts, folder: Path) -> None:
    """Keep what a head needs of its target, each tensor in the narrowest type that is exact."""
    every = {field.name: getattr(parts, field.name) for field in fields(parts)}
    sizes = {name: value for name, value in every.items() if isinstance(value, int | float)}
    metadata = {"sizes": json.dumps(sizes)}
    write_whole(folder / TARGET_FILE, partial(save_file, stored_tensors(parts), metadata=metadata))


def stored_tensors(parts: TargetParts) -> dict[str, Tensor]:
    """Embedding and output head; a tied head once."""
    found = {"embedding_VD": _narrow(parts.embedding_VD)}
    if not torch.equal(parts.embedding_VD, parts.head_VD):
        found["head_VD"] = _narrow(parts.head_VD)
    return found


def read_parts(folder: Path, device: torch.device) -> TargetParts:
    """What `save_parts` kept, in float32. Raises ConfigError where the file is broken."""
    path = folder / TARGET_FILE
    try:
        with safe_open(path, framework="pt") as file:
            sizes = json.loads(file.metadata()["sizes"])
        tensors = {name: t.float().to(device) for name, t in load_file(path).items()}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            str(path), str(error), "a whole file; delete it and start again"
        ) from error
    embedding_VD = tensors["embedding_VD"]
    head_VD = tensors.get("head_VD", embedding_VD)
    return TargetParts(embedding_VD=embedding_VD, head_VD=head_VD, **sizes)


def _narrow(tensor: Tensor) -> Tensor:
    for kind in NARROW:
        if torch.equal(tensor.to(kind).float(), tensor):
            return tensor.to(kind).cpu().contiguous()
    return tensor.cpu().contiguous()
