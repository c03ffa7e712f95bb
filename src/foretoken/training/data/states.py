"""Hidden states on disk, the `[states]` table: what a run keeps, whether it fits, shards, reading.

Owns a states folder: `states.json`, which says what it holds; one file a shard, mapped into memory;
and `target.safetensors`, embedding, output head and sizes of the target, so that training on stored
states loads no target. Invariants: a shard with its final name is complete, since it is renamed
into place after it is on disk; a folder holds the states of one target over one set of tokens; what
is read is what the target computed, exactly where the states' type is the target's.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

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
)
from foretoken.training.data.prompts import PromptSet, text_tokens
from foretoken.training.heads.kind import find_kind
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.run_folder import make, write_whole
from foretoken.training.settings import Settings, StateSettings

FILE = "states.json"
TARGET_FILE = "target.safetensors"
NARROW = (torch.bfloat16, torch.float16)
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """`count` rows of `length` tokens; `name` says whose."""

    name: str
    length: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """What a states folder holds, and in which files."""

    source: str
    """Digest of the tokens and the target's name: the states of anything else are others."""
    sets: tuple[RowSet, ...]
    points: tuple[int, ...]
    """Where hidden states are taken, side by side in this order (see `foretoken.kv.features`)."""
    hidden_size: int
    dtype: str
    shard_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the stored values."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype), self.dtype
        return found

    def row_bytes(self, length: int) -> int:
        """A row's hidden states and token ids."""
        values = len(self.points) * self.hidden_size
        return length * (values * self.torch_dtype.itemsize + TOKEN_BYTES)

    def rows_a_shard(self, length: int) -> int:
        """How many rows a shard has; a set's last may have fewer."""
        return max(1, self.shard_bytes // self.row_bytes(length))

    def shards(self) -> list[tuple[RowSet, int]]:
        """All shards in the order of their writing: the set and the number within it."""
        return [
            (rows, index)
            for rows in self.sets
            for index in range(math.ceil(rows.count / self.rows_a_shard(rows.length)))
        ]

    def numbers(self, rows: RowSet, shard: int) -> range:
        """The numbers of a shard's rows."""
        size = self.rows_a_shard(rows.length)
        return range(shard * size, min((shard + 1) * size, rows.count))

    def shard_size(self, rows: RowSet, shard: int) -> int:
        """Bytes of a shard's values, without the few hundred of its header."""
        return len(self.numbers(rows, shard)) * self.row_bytes(rows.length)

    def arithmetic(self) -> str:
        """How many bytes there will be, and why."""
        width = f"{len(self.points)} x {self.hidden_size:,} values x {self.torch_dtype.itemsize}"
        parts = [
            f"{rows.name}: {rows.count:,} rows x {rows.length:,} tokens x "
            f"({width} bytes + {TOKEN_BYTES}) = {rows.count * self.row_bytes(rows.length):,} bytes"
            for rows in self.sets
        ]
        return "; ".join(parts)


def shard_file(folder: Path, rows: RowSet, shard: int) -> Path:
    """Where a shard is."""
    return folder / f"{rows.name}-{rows.length}-{shard:05d}.safetensors"


def read_plan(folder: Path) -> StatePlan | None:
    """What `folder` says it holds; None: nothing. Raises ConfigError: `states.json` is broken."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        record["sets"] = tuple(RowSet(**rows) for rows in record["sets"])
        record["points"] = tuple(record["points"])
        return StatePlan(**record)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(str(path), str(error), "what a run wrote; delete the folder") from error


def agree(wanted: StatePlan, folder: Path) -> StatePlan:
    """The plan to follow in `folder`: its own, where it holds all that is wanted, or `wanted`.
    Raises ConfigError: the folder holds the states of something else."""
    found = read_plan(folder)
    if found is None:
        return wanted
    facts = {
        "source": found.source == wanted.source,
        "points": set(wanted.points) <= set(found.points),
        "sets": set(wanted.sets) <= set(found.sets),
        "hidden_size": found.hidden_size == wanted.hidden_size,
        "dtype": found.dtype == wanted.dtype,
    }
    for name, fine in facts.items():
        if not fine:
            allowed = (
                f"{name} {getattr(wanted, name)}; set another states.folder, or delete this one"
            )
            raise ConfigError(f"states in {folder}", f"{name} {getattr(found, name)}", allowed)
    return found


def require_room(plan: StatePlan, folder: Path, more: int = 0) -> int:
    """Bytes still to be written: the missing shards and `more`. Raises ConfigError: the disk has
    fewer free; the message holds the arithmetic."""
    missing = [
        plan.shard_size(rows, shard)
        for rows, shard in plan.shards()
        if not shard_file(folder, rows, shard).is_file()
    ]
    needed, free = sum(missing) + more, shutil.disk_usage(folder).free
    if needed > free:
        allowed = (
            f"a disk with {needed:,} bytes free ({plan.arithmetic()}; target: {more:,} bytes), and "
            f"it has {free:,}: set states.folder, fewer data.most_prompts, states.dtype, or leave "
            "[states] out, which computes them as they are used"
        )
        raise ConfigError("states.folder", str(folder), allowed)
    return needed


def write_plan(plan: StatePlan, folder: Path) -> None:
    """Say in `folder` what it is for."""
    write_whole(folder / FILE, lambda part: part.write_text(json.dumps(asdict(plan), indent=2)))


def write_states(
    plan: StatePlan,
    folder: Path,
    row: Callable[[RowSet, int], Tensor],
    states: Callable[[Tensor], Tensor],
    report: Callable[[str], None],
) -> None:
    """Write the shards that are not there yet.

    Args:
        plan: as agreed with `folder`.
        folder: with room for them.
        row: the tokens of a set's row of this number, int64 [T].
        states: their hidden states [T, W], W = points x hidden size.
        report: takes a line a shard.

    Raises:
        TrainingError: a shard cannot be written; those before it are intact.
    """
    shards = plan.shards()
    for done, (rows, shard) in enumerate(shards, start=1):
        path, numbers = shard_file(folder, rows, shard), plan.numbers(rows, shard)
        if path.is_file():
            continue
        width = len(plan.points) * plan.hidden_size
        tokens_NT = torch.empty(len(numbers), rows.length, dtype=torch.int32)
        states_NTW = torch.empty(len(numbers), rows.length, width, dtype=plan.torch_dtype)
        for place, number in enumerate(numbers):
            tokens_T = row(rows, number)
            tokens_NT[place] = tokens_T
            states_NTW[place] = states(tokens_T)
        tensors = {"tokens": tokens_NT, "states": states_NTW}
        write_whole(path, partial(save_file, tensors))
        report(f"hidden states: wrote shard {done} of {len(shards)}, {path.name}")


class StoredStates:
    """Rows of hidden states by number; shards are opened as they are used and stay open."""

    def __init__(
        self, folder: Path, plan: StatePlan, points: Sequence[int], device: torch.device
    ) -> None:
        """Read `points`, all of which `plan` has, from its shards in `folder`, to `device`."""
        self._folder, self._plan, self._points = folder, plan, tuple(points)
        self._sets = {(rows.name, rows.length): rows for rows in plan.sets}
        self._device = device
        self._files: dict[Path, Any] = {}

    def captured(self, name: str, numbers: Sequence[int], length: int) -> Captured:
        """The rows of these numbers of a set, float32. Raises ConfigError: a shard is missing or
        broken."""
        rows = self._sets[name, length]
        size = self._plan.rows_a_shard(length)
        read = [self._row(rows, *divmod(number, size)) for number in numbers]
        states_BTW = torch.cat([states for _, states in read]).to(self._device).float()
        return Captured(
            tokens_BT=torch.cat([tokens for tokens, _ in read]).to(self._device).long(),
            features_BTF=torch.cat([self._part(states_BTW, p) for p in self._points], dim=-1),
            final_BTD=self._part(states_BTW, FINAL),
        )

    def _part(self, states_BTW: Tensor, point: int) -> Tensor:
        start = self._plan.points.index(point) * self._plan.hidden_size
        return states_BTW[..., start : start + self._plan.hidden_size]

    def _row(self, rows: RowSet, shard: int, place: int) -> tuple[Tensor, Tensor]:
        """Token ids [1, T] and hidden states [1, T, W]; only this row is read from disk."""
        path = shard_file(self._folder, rows, shard)
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            file = self._files[path]
            one = slice(place, place + 1)
            return file.get_slice("tokens")[one], file.get_slice("states")[one]
        except (OSError, SafetensorError) as error:
            allowed = "a whole shard; delete it and start again"
            raise ConfigError(str(path), str(error), allowed) from error


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
    asked = settings.states or StateSettings()
    wanted = sorted({(stage.rows or ANSWERS, stage.length) for stage in settings.stages})
    last = settings.stages[-1].length
    sets = [
        RowSet(name=name, length=length, count=count_rows(tokens[name], length))
        for name, length in wanted
    ]
    held = held_out_rows(tokens[HELD_OUT], last)
    readers = (settings.of_head.kind, *kinds)
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
    known, longest = read_answers(folder), settings.of_data.answer_tokens
    sizes = [len(ids) for ids in known]
    sizes += [len(ids) + longest for ids in prompts.ids[len(known) :]]
    held = settings.of_data.held_out
    tokens = {ANSWERS: sum(sizes[held:]), HELD_OUT: sum(sizes[:held])}
    if settings.of_data.text is not None:
        tokens[TEXT] = len(text_tokens(settings.of_data, target.engine.parts.tokenizer)[0])
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
