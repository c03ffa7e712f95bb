"""The same forwards on every rank of a group, or alone, for tests that compare them."""

import pickle
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from foretoken.backend import PlainTorch
from foretoken.distributed import Group
from foretoken.kv.store import KVStore
from foretoken.layers import attention, mlp, norm
from foretoken.models import LoadOptions, load, load_model
from foretoken.runtime.runner import Runner
from tests.golden.scenario import NUM_PAGES, PAGE, cut, forward, tables
from tests.unit.distributed import working

LENGTH = 75


@dataclass(frozen=True)
class Forwards:
    folder: Path
    dtype: torch.dtype
    vocab: int
    kv_store_dtype: torch.dtype | None = None
    quantization: str | None = None
    by_layers: bool = False
    """Whether ranks have some layers each, instead of a share of all."""
    on_torch: bool = False
    """Whether PyTorch's operations compute it, as where there are no kernels."""
    on_device: bool = False
    """Whether parts are gathered as between GPUs, by gloo."""


@contextmanager
def without_kernels(is_so: bool = True) -> Iterator[None]:
    """Within, if `is_so`, PyTorch's operations compute a model, as where there are no kernels."""
    with ExitStack() as stack:
        if is_so:
            for module in (load, attention, mlp, norm):
                stack.enter_context(patch.object(module, "backend_for", PlainTorch))
        yield


def compute(group: Group | None, what: Forwards) -> tuple[Tensor, KVStore]:
    """Logits of two sequences in pieces of all sizes, and the keys and values of this rank."""
    with without_kernels(what.on_torch):
        if what.on_device and group is not None:
            # The group of the host stays for the next forward.
            group = working.on_device(group)
        return _compute(group, what)


def _compute(group: Group | None, what: Forwards) -> tuple[Tensor, KVStore]:
    options = LoadOptions(
        dtype=what.dtype, device=torch.device("cpu"), batch_invariant=True, page_size=PAGE,
        kv_store_dtype=what.kv_store_dtype, quantization=what.quantization, group=group,
        by_layers=what.by_layers,
    )  # fmt: skip
    model = load_model(what.folder, options)
    here = len(options.layers(model.shape.num_hidden_layers))
    store = KVStore(
        replace(model.shape, num_hidden_layers=here),
        num_pages=NUM_PAGES,
        page_size=PAGE,
        dtype=what.kv_store_dtype or what.dtype,
        device=options.device,
        kv_heads=options.share.key_heads(model.shape.num_key_value_heads),
    )
    runner, draw = Runner(model, store), random.Random(5)
    ids = [draw.randrange(what.vocab) for _ in range(LENGTH)]
    first, second = tables(draw, [LENGTH, LENGTH], together=False)
    rows, at = [], 0
    for count in cut(draw, LENGTH, [1, 1, 5, 33]):
        spans = [(ids, at, at + count, pages) for pages in (first, second)]
        rows.append(forward(runner, spans if count != 5 else spans[:1]))
        at += count
    return torch.cat(rows), store


def compute_on_all(group: Group, what: Forwards) -> tuple[Tensor, KVStore]:
    """Rank 0's side; the others are in `follow`."""
    group.broadcast(pickle.dumps(what), idle=True)
    return compute(group, what)


def follow(group: Group) -> None:
    torch.set_num_threads(1)
    while True:
        compute(group, pickle.loads(group.broadcast(None, idle=True)))
