"""Hidden states read back from their shards, mapped into memory, and the target's own matrices.

Owns `target.safetensors` of a states folder: embedding, output head and sizes, so that training on
stored states loads no target. Invariant: what is read is what the target computed, exactly where
the states' type is the target's.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL
from foretoken.training.data.states import RowSet, StatePlan, shard_file, write_whole
from foretoken.training.heads.target import Captured, TargetParts

FILE = "target.safetensors"
NARROW = (torch.bfloat16, torch.float16)


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
        """The rows of these numbers of a set, float32.

        Raises:
            ConfigError: a shard is missing or broken.
        """
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


def save_parts(parts: TargetParts, folder: Path) -> None:
    """Keep what a head needs of its target, each tensor in the narrowest type that is exact."""
    every = {field.name: getattr(parts, field.name) for field in fields(parts)}
    sizes = {name: value for name, value in every.items() if isinstance(value, int | float)}
    metadata = {"sizes": json.dumps(sizes)}
    write_whole(folder / FILE, partial(save_file, stored_tensors(parts), metadata=metadata))


def stored_tensors(parts: TargetParts) -> dict[str, Tensor]:
    """Embedding and output head; a tied head once."""
    found = {"embedding_VD": _narrow(parts.embedding_VD)}
    if not torch.equal(parts.embedding_VD, parts.head_VD):
        found["head_VD"] = _narrow(parts.head_VD)
    return found


def read_parts(folder: Path, device: torch.device) -> TargetParts:
    """What `save_parts` kept, in float32."""
    path = folder / FILE
    with safe_open(path, framework="pt") as file:
        sizes = json.loads(file.metadata()["sizes"])
    tensors = {name: t.float().to(device) for name, t in load_file(path).items()}
    embedding_VD = tensors["embedding_VD"]
    head_VD = tensors.get("head_VD", embedding_VD)
    return TargetParts(embedding_VD=embedding_VD, head_VD=head_VD, **sizes)


def _narrow(tensor: Tensor) -> Tensor:
    for kind in NARROW:
        if torch.equal(tensor.to(kind).float(), tensor):
            return tensor.to(kind).cpu().contiguous()
    return tensor.cpu().contiguous()
