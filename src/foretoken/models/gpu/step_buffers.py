"""What changes from step to step, as one block of int32: filled on the host, copied once.

A step is one pass over some rows, or several passes that follow one another on the device (a chain
of drafts). Every pass has the same named slices, whose places in the block depend on the sizes
alone; the page tables, shared by all passes, are its end. So a graph that was recorded for a
`StepKey` finds the numbers of every later step of that key where it found those of the first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import UNIT_INTS, AttentionInts
from foretoken.ops.attention.gpu import Ints, LaidOut, RowPiece, UnitPlan
from foretoken.ops.gpu.drawing import Draws
from foretoken.shape.memory_formula import RECORDED_ROWS

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)


class PassKey(NamedTuple):
    """Sizes of a pass, each rounded up to a bucket."""

    rows: int
    units: int
    logits: int
    depth: int
    """Places of the longest branch of a tree; 0: there are chains only."""
    splits: bool
    masks: bool = False
    fed: int = 0
    """Rows of which keys and values alone are wanted."""
    newest: int = 0
    whole: bool = False
    """Whether rows may see places behind their own."""
    filtered: bool = False
    """Whether ids are left out before some rows are drawn."""
    pieces: tuple[RowPiece, ...] = ()
    """Of a pass that is not recorded, for it has more partial results than there is room for."""


StepKey = tuple[PassKey, ...]


def bucket(rows: int) -> int:
    """The number of rows that a pass of so many is padded to."""
    return next((size for size in _ROWS if rows <= size), -(-rows // RECORDED_ROWS) * RECORDED_ROWS)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """One pass as the host knows it."""

    plan: UnitPlan
    tokens: Sequence[int]
    """Empty: they are those that the pass before draws."""
    logits: Sequence[int] | npt.NDArray[np.int64]
    """Rows that need logits."""
    draws: Draws | None
    """How their tokens are drawn; None: not here."""
    fed: LaidOut | None = None
    """Places of a block head's context that have features, of which keys and values are made."""
    newest: Sequence[int] = ()
    """Of a block head the token before each block's first draft."""
    whole: bool = False
    """Whether rows see all of their span, in some layers."""
    masks: tuple[Sequence[int], Sequence[int]] | None = None
    """Of a head with mask slots: for each row the number of its mask, 0 for a row that has
    features, and the row whose features it takes; RECORDED_ROWS: none."""

    @property
    def key(self) -> PassKey:
        """Its sizes."""
        plan = self.plan
        return PassKey(
            rows=bucket(len(plan.places_T)),
            units=_power(len(plan.units_U)),
            logits=bucket(len(self.logits)) if len(self.logits) else 0,
            depth=_power(plan.tails_XJ.shape[1]),
            splits=plan.splits,
            masks=self.masks is not None,
            fed=0 if self.fed is None or not len(self.fed.places) else bucket(len(self.fed.places)),
            newest=bucket(len(self.newest)) if self.newest else 0,
            whole=self.whole,
            filtered=self.draws is not None and self.draws.filtered,
            pieces=plan.pieces if len(plan.pieces) > 1 else (),
        )


class DevicePass(NamedTuple):
    """One pass as the device knows it: views of the block."""

    tokens_T: Tensor
    places_T: Tensor
    """Of the rows, and behind them of those that are fed."""
    slots_T: Tensor
    rows_R: Tensor
    keys_R2: Tensor
    how_R4: Tensor
    filtered: bool
    attention: AttentionInts
    pieces: tuple[RowPiece, ...]
    mask_T: Tensor
    """Which mask each row has; of a pass with masks."""
    anchor_T: Tensor
    """Whose features it has."""
    features_T: Tensor
    """Slots of the features of what is fed."""
    newest_B: Tensor
    live_1: Tensor
    """How many rows are none of padding."""


@final
class StepBuffers:
    """The block, once on the host and once on the device."""

    def __init__(self, device: torch.device, scratch: int, *, on_gpu: bool) -> None:
        """Nothing is filled yet.

        Args:
            device: where passes run.
            scratch: a slot that nobody reads, for keys and values of rows that are padding.
            on_gpu: whether copies go on by themselves.
        """
        self._device, self._scratch, self._on_gpu = device, scratch, on_gpu
        self.generation = 0
        """Grows where the block moves: what was recorded reads the old one."""
        self._copied: torch.cuda.Event | None = None
        self._make(1 << 14)
        self._found = [self._results(1 << 12), self._results(1 << 12)]

    def _results(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=self._on_gpu)

    def _make(self, count: int) -> None:
        with torch.inference_mode(False):
            self._host = torch.empty(count, dtype=torch.int32, pin_memory=self._on_gpu)
            self._block = torch.zeros(count, dtype=torch.int32, device=self._device)
        self._numbers: Ints = self._host.numpy()
        self.generation += 1

    def fill(self, passes: Sequence[PassRows]) -> StepKey:
        """Copy a step's numbers to the device, without waiting; all passes have the page tables of
        the first."""
        keys = tuple(one.key for one in passes)
        pages_P = passes[0].plan.pages_P
        first = sum(_slices(key).ints for key in keys)
        if first + len(pages_P) > len(self._numbers):
            if self._on_gpu:
                torch.cuda.synchronize(self._device)
            self._make(2 * (first + len(pages_P)))
        elif self._on_gpu and self._copied is not None:
            self._copied.synchronize()  # Of the step before; it ended long ago.
        numbers = self._numbers
        numbers[:first], used = 0, first + len(pages_P)
        for one, key, parts in zip(passes, keys, _parts(numbers, keys), strict=True):
            self._fill_pass(one, key, parts)
        numbers[first:used] = pages_P
        self._block[:used].copy_(self._host[:used], non_blocking=True)
        if self._on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return keys

    def _fill_pass(self, one: PassRows, key: PassKey, parts: dict[str, Ints]) -> None:
        plan = one.plan
        parts["slots"][:] = self._scratch
        parts["runs"][:] = -1
        found: dict[str, npt.NDArray[np.int32] | Sequence[int]] = {
            "tokens": one.tokens,
            "places": plan.places_T,
            "slots": plan.slots_T,
            "runs": plan.runs_T,
            "bases": plan.bases_T,
            "rows": np.asarray(one.logits, np.int32),
            "units": plan.units_U.ravel(),
        }
        if one.masks is not None:
            parts["anchor"][:] = RECORDED_ROWS
            found["mask"], found["anchor"] = one.masks
        if one.draws is not None:
            found["keys"] = one.draws.keys_R2.ravel()
            found["how"] = one.draws.how_R4.ravel().view(np.int32)
        if one.fed is not None:
            behind = slice(key.rows, key.rows + len(one.fed.places))
            parts["places"][behind], parts["slots"][behind] = one.fed.places, one.fed.slots
            found["features"] = one.fed.slots
        parts["live"][0] = len(plan.places_T)
        found["newest"] = one.newest
        if key.whole:
            found["lasts"] = plan.lasts_T
        for name, values in found.items():
            parts[name][: len(values)] = values
        if key.depth:
            runs, depth = plan.tails_XJ.shape
            parts["tails"].reshape(-1, key.depth)[:runs, :depth] = plan.tails_XJ

    def passes(self, keys: StepKey) -> list[DevicePass]:
        """Where the device has the passes of steps of this key."""
        found = []
        pages_P = self._block[sum(_slices(key).ints for key in keys) :]
        for key, parts in zip(keys, _parts(self._block, keys), strict=True):
            found.append(
                DevicePass(
                    tokens_T=parts["tokens"],
                    places_T=parts["places"],
                    slots_T=parts["slots"],
                    rows_R=parts["rows"],
                    keys_R2=parts["keys"].view(-1, 2),
                    how_R4=parts["how"].view(torch.float32).view(-1, 4),
                    filtered=key.filtered,
                    attention=AttentionInts(
                        places_T=parts["places"][: key.rows],
                        runs_T=parts["runs"],
                        bases_T=parts["bases"],
                        units_U=parts["units"].view(-1, UNIT_INTS),
                        pages_P=pages_P,
                        tails_XJ=parts["tails"].view(-1, max(key.depth, 1)),
                        trees=key.depth > 0,
                        splits=key.splits,
                        lasts_T=parts["lasts"] if key.whole else None,
                    ),
                    pieces=key.pieces,
                    mask_T=parts["mask"],
                    anchor_T=parts["anchor"],
                    features_T=parts["features"],
                    newest_B=parts["newest"],
                    live_1=parts["live"],
                )
            )
        return found

    def tokens(self, keys: StepKey) -> Tensor:
        """Where the device has the tokens of the first pass."""
        return self._block[_slices(keys[0]).named["tokens"]]

    def send(self, tokens: Tensor) -> Callable[[], list[int]]:
        """int32 results, in one copy; what it gives waits until they are there, and is to be called
        before those after the next are sent."""
        flat = tokens.reshape(-1)
        room, other = self._found
        if len(flat) > len(room):
            room = self._results(2 * len(flat))
        self._found = [other, room]
        found, there = room[: len(flat)], None
        found.copy_(flat, non_blocking=True)
        if self._on_gpu:
            there = torch.cuda.Event()
            there.record()

        def read() -> list[int]:
            if there is not None:
                there.synchronize()
            ids: list[int] = found.tolist()
            return ids

        return read


class _Slices(NamedTuple):
    """Where a pass has its numbers, from the beginning of the pass; each begins at a multiple of 16
    bytes, so that kernels need no variants."""

    named: dict[str, slice]
    ints: int


Block = TypeVar("Block", Tensor, Ints)


def _parts(block: Block, keys: StepKey) -> Iterator[dict[str, Block]]:
    """The numbers of each pass, by name."""
    at = 0
    for key in keys:
        named, count = _slices(key)
        yield {name: block[at:][where] for name, where in named.items()}
        at += count


@cache
def _slices(key: PassKey) -> _Slices:
    named, at = {}, 0
    sizes = dict.fromkeys(("tokens", "runs", "bases"), key.rows)
    sizes |= dict.fromkeys(("places", "slots"), key.rows + key.fed)
    sizes |= {"features": key.fed, "newest": key.newest, "lasts": key.rows * key.whole, "live": 1}
    sizes |= {"rows": key.logits, "keys": 2 * key.logits, "how": 4 * key.logits}
    sizes |= dict.fromkeys(("mask", "anchor"), key.rows if key.masks else 0)
    sizes |= {"units": UNIT_INTS * key.units, "tails": key.rows * key.depth}
    for name, size in sizes.items():
        named[name] = slice(at, at + size)
        at += -(-size // 4) * 4
    return _Slices(named, at)
