"""Batches of token rows: chunks of files, and file-then-edited-file documents.

Owns the mix, and the processes that make batches before they are asked for. Invariant: batch `step`
depends on the seed, the step and the row length only, so a resumed run sees what the first would
have seen, and nothing about the data needs saving.
"""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from foretoken.errors import ConfigError
from tools.demo_models.packages import Package, load_packages
from tools.demo_models.tokenizer import BEGIN_ID, END_ID
from tools.python_text.heldout import edit_document, excerpt
from tools.python_text.stdlib import Corpus, SourceFile, load_corpus

CHARACTERS_PER_TOKEN = 3.4
SHORTEST_EDITED = 1000
FILES_AT_ONCE = 64
"""A tokenizer's own records of a text are far larger than the text."""
MADE_AHEAD = 8
"""Batches that each process is ahead at most."""


class Batch(NamedTuple):
    """Inputs and next-token targets, int64 [B, T] each."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What kinds of rows a run sees, as keys of its config."""

    edit_share: float = 0.22
    """Rows that show code and then an edit of it."""
    repeat_share: float = 0.0
    """Rows of repeated noise, which teach copying,"""
    repeat_from: int = 0
    """from so many tokens on"""
    repeat_until: int = 1 << 62
    """until so many."""
    test_share: float = 0.25
    """Rows from tests, of those that are text."""
    package_share: float = 0.0
    """Rows from installed packages, of those that are text, and edits of theirs, of all edits."""

    @property
    def packages(self) -> tuple[Package, ...]:
        """The packages that rows come from; none, unread, where no row does."""
        return load_packages() if self.package_share else ()


def encode_files(tokenizer: Tokenizer, files: Iterable[SourceFile]) -> NDArray[np.uint16]:
    """All files in a row, each between <s> and </s>."""
    parts = []
    for some in _some_at_once(file.text for file in files):
        encoded = tokenizer.encode_batch(some, add_special_tokens=False)
        parts += [np.array([BEGIN_ID, *entry.ids, END_ID], dtype=np.uint16) for entry in encoded]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)


def _some_at_once(texts: Iterable[str]) -> Iterator[list[str]]:
    left = iter(texts)
    while some := list(islice(left, FILES_AT_ONCE)):
        yield some


class TokenStream:
    """One token array, cut anew into rows each time it has been used up."""

    def __init__(self, tokens: NDArray[np.uint16], seed: int) -> None:
        assert len(tokens) > 0, "an empty stream has no rows"
        self._tokens = tokens
        self._seed = seed
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def row(self, index: int, length: int) -> NDArray[np.uint16]:
        """Row `index` (it may exceed an epoch) of `length` tokens; its first is always <s>."""
        per_epoch = max(1, len(self._tokens) // length - 1)
        epoch, place = divmod(index, per_epoch)
        key = epoch * 1_000_003 + length
        if self._order is None or self._order[0] != key:
            order = np.random.default_rng((self._seed, key)).permutation(per_epoch)
            self._order = key, order
        shift = int(np.random.default_rng((self._seed, key, 1)).integers(length))
        start = min(int(self._order[1][place]) * length + shift, max(0, len(self._tokens) - length))
        row = np.resize(self._tokens[start : start + length], length).copy()
        row[0] = BEGIN_ID
        return row


class TrainingData:
    """The training rows of a corpus and packages under a mix; see `batch`."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        mix: Mix,
        seed: int,
        packages: Sequence[Package] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._mix = mix
        self._seed = seed
        library = [file for file in corpus.training if not file.is_test]
        tests = [file for file in corpus.training if file.is_test]
        self._sources = [file.text for file in library if len(file.text) > SHORTEST_EDITED]
        self._tokens = encode_files(tokenizer, library)
        self._library = TokenStream(self._tokens, seed)
        self._tests = TokenStream(encode_files(tokenizer, tests), seed + 1) if tests else None
        files = [file for package in packages for file in package.files]
        self._package_sources = [file.text for file in files if len(file.text) > SHORTEST_EDITED]
        self._packages = TokenStream(encode_files(tokenizer, files), seed + 2) if files else None
        if mix.package_share and not files:
            raise ConfigError("package_share", mix.package_share, "0 where no package is installed")

    def _edit_row(self, length: int, rng: random.Random) -> NDArray[np.uint16]:
        row: list[int] = []
        while len(row) < length:
            room = min(length - len(row), length) * CHARACTERS_PER_TOKEN / 2
            piece = excerpt(self._source(rng), int(room * rng.uniform(0.12, 0.95)), rng)
            text = edit_document(piece, rng).text
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            row += [BEGIN_ID, *ids, END_ID]
        return np.array(row[:length], dtype=np.uint16)

    def _source(self, rng: random.Random) -> str:
        share = self._mix.package_share
        return rng.choice(
            self._package_sources if share and rng.random() < share else self._sources
        )

    def _repeat_row(self, length: int, rng: random.Random) -> NDArray[np.uint16]:
        """Random tokens said twice or more: only copying predicts them."""
        row: list[int] = []
        while len(row) < length:
            size = rng.randint(6, max(7, length // 3))
            noise = [int(self._tokens[rng.randrange(len(self._tokens))]) for _ in range(size)]
            row += [BEGIN_ID, *noise * rng.randint(2, 3), END_ID]
        return np.array(row[:length], dtype=np.uint16)

    def _stream(self, draw: float) -> TokenStream:
        """Where a row of text comes from, given a number drawn from 0..1."""
        if self._packages is not None and draw < self._mix.package_share:
            return self._packages
        from_tests = draw < self._mix.package_share + self._mix.test_share
        return self._tests if from_tests and self._tests is not None else self._library

    def batch(self, step: int, tokens: int, length: int) -> Batch:
        """The rows of `step` (or of a part of one): tokens / length, `length` inputs each."""
        rng = random.Random(self._seed * 1_000_003 + step)
        count = tokens // length
        noisy = self._mix.repeat_from <= step * tokens < self._mix.repeat_until
        made = self._mix.edit_share + (self._mix.repeat_share if noisy else 0.0)
        rows = []
        for index in range(count):
            draw = rng.random()
            if draw < self._mix.edit_share:
                rows.append(self._edit_row(length + 1, rng))
                continue
            if draw < made:
                rows.append(self._repeat_row(length + 1, rng))
                continue
            rest = (draw - made) / max(1e-9, 1 - made)
            rows.append(self._stream(rest).row(step * count + index, length + 1))
        stacked = torch.from_numpy(np.stack(rows).astype(np.int64))
        return Batch(stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous())


def read_training_data(tokenizer: Tokenizer, mix: Mix, seed: int) -> TrainingData:
    """The rows of this interpreter's library, and of its packages if the mix has some."""
    return TrainingData(load_corpus(), tokenizer, mix, seed, mix.packages)


def held_out_rows(corpus: Corpus, tokenizer: Tokenizer, rows: int, length: int) -> Batch:
    """`rows` rows of held-out text spread evenly over the held-out files."""
    tokens = encode_files(tokenizer, corpus.held_out)
    starts = np.linspace(0, len(tokens) - length - 2, rows).astype(int)
    stacked = torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]).astype("i8"))
    stacked[:, 0] = BEGIN_ID
    return Batch(stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous())


def bytes_per_token(tokenizer: Tokenizer, batch: Batch) -> float:
    """Mean UTF-8 bytes of a target token of `batch`."""
    texts = tokenizer.decode_batch(batch.targets.tolist(), skip_special_tokens=True)
    return sum(len(text.encode()) for text in texts) / batch.targets.numel()


class _Kind(NamedTuple):
    """What the batches of a stage have in common."""

    tokens: int
    length: int


class _Parts(IterableDataset[Batch]):
    """Every part from `first` on, shared out among the processes in turns."""

    def __init__(self, data: TrainingData, kind: _Kind, first: int) -> None:
        self._data, self._kind, self._first = data, kind, first

    def __iter__(self) -> Iterator[Batch]:
        """This process's parts, without an end."""
        worker = get_worker_info()
        assert worker is not None, "made in a process of its own"
        part = self._first + worker.id
        while True:
            yield self._data.batch(part, *self._kind)
            part += worker.num_workers


class MadeAhead:
    """Parts of a run in their order, made by `loaders` processes, at most one a core; 0: when asked
    for."""

    def __init__(self, data: TrainingData, loaders: int) -> None:
        self.tokenizer = data.tokenizer
        self._data, self._loaders = data, min(loaders, os.cpu_count() or 1)
        self._next: tuple[_Kind, int] | None = None
        self._made: Iterator[Batch] = iter(())

    def batch(self, index: int, tokens: int, length: int) -> Batch:
        """Part `index`: rows of `length` tokens, `tokens` in all."""
        if self._loaders == 0:
            return self._data.batch(index, tokens, length)
        kind = _Kind(tokens, length)
        if self._next != (kind, index):
            self._made = self._begin(kind, index)
        self._next = kind, index + 1
        return next(self._made)

    def _begin(self, kind: _Kind, first: int) -> Iterator[Batch]:
        parts = _Parts(self._data, kind, first)
        return iter(
            DataLoader(
                parts,
                batch_size=None,
                num_workers=self._loaders,
                prefetch_factor=MADE_AHEAD,
                multiprocessing_context="fork",  # the text is not copied
            )
        )
