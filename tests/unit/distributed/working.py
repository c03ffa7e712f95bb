"""What ranks of tests do. Fresh processes import it, so it imports little."""

import os
import random
import subprocess
import time
from contextlib import closing
from datetime import timedelta
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from foretoken.distributed import Group, Share
from foretoken.distributed.on_device import DeviceGroup, group_on, store_of
from foretoken.distributed.processes import Followers, Started
from foretoken.errors import ConfigError
from foretoken.models.stages import Stages

TYPES = (torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.float16)


def shares(seed: int, size: int, *, large: bool) -> tuple[int, list[Tensor]]:
    """A dimension, and one tensor for each rank that differ there only."""
    made = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    dtype = draw.choice(TYPES)
    shape = [draw.randint(1, 6) for _ in range(draw.randint(1, 4))]
    dim = draw.randrange(len(shape))
    if large:
        shape[dim - 1 if dim else -1] *= draw.randint(1, 3000)
    found = []
    for _ in range(size):
        shape[dim] = draw.randint(0 if draw.random() < 0.2 else 1, 7)
        raw = torch.randint(-100, 100, shape, generator=made)
        x = raw.to(dtype)
        found.append(x.mT.contiguous().mT if x.ndim > 1 and draw.random() < 0.3 else x)
    return draw.choice([dim, dim - len(shape)]), found


def gathers(group: Group, seeds: range, large: frozenset[int]) -> None:
    """Every operation in turn; what comes out is what torch.cat makes."""
    for seed in seeds:
        dim, parts = shares(seed, group.size, large=seed in large)
        wanted, own = torch.cat(parts, dim), parts[group.rank]
        found = group.all_gather(own, dim)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), seed
        collected = group.gather(own, dim)
        assert (collected is None) == (group.rank > 0)
        assert collected is None or torch.equal(collected, wanted), seed
        said = random.Random(seed).randbytes(seed * 1000 if seed in large else seed)
        assert group.broadcast(None if group.rank else said) == said, seed
        if seed % 7 == group.rank:
            time.sleep(0.002)


def turns(group: Group, times: int) -> None:
    """Short gathers without end or for a number of times."""
    for turn in range(times):
        found = group.all_gather(torch.tensor([[turn, group.rank]]), 0)
        assert found.tolist() == [[turn, rank] for rank in range(group.size)], found


def harms_itself(group: Group, rank: int, after: int, how: int) -> None:
    """One rank sends itself a signal after some turns, the others go on."""
    turns(group, after)
    if group.rank == rank:
        os.kill(os.getpid(), how)
    turns(group, 1 << 30)


def breaks(group: Group, rank: int, bug: bool) -> None:
    turns(group, 3)
    if group.rank == rank:
        raise ValueError("no") if bug else ConfigError("page_size", 3, "a power of two")
    turns(group, 1 << 30)


def is_slow(group: Group, rank: int, seconds: float) -> None:
    turns(group, 3)
    if group.rank == rank:
        time.sleep(seconds)
    turns(group, 1 << 30)


def hears_once(group: Group) -> None:
    """One rank idles after the first word, the others compute something long."""
    group.broadcast(None, idle=True)
    if group.rank > 1:
        time.sleep(60.0)
    group.broadcast(None, idle=True)


def listens(group: Group) -> None:
    """Echo what rank 0 says until it says nothing more."""
    while said := group.broadcast(None, idle=True):
        group.gather(torch.tensor(list(said)), 0)


def started(followers: Followers) -> list["subprocess.Popen[bytes]"]:
    assert isinstance(followers._others, Started)
    return followers._others._processes


def stages(group: Group, cases: list[tuple[int, tuple[int, ...]]]) -> None:
    """Layers that work in place: layer k makes 2 x + k of x."""
    for num_layers, points in cases:
        own = Share(group.rank, group.size).of(num_layers)
        wanted = [torch.arange(6.0).view(2, 3)]
        for layer in range(num_layers):
            wanted.append(2 * wanted[-1] + layer)
        shown: dict[int, Tensor] = {}

        def run(x_TD: Tensor, layers: range, first: int = own.start) -> Tensor:
            for layer in layers:
                x_TD.mul_(2).add_(first + layer)
            return x_TD

        def show(x_TD: Tensor, layer: int, shown: dict[int, Tensor] = shown) -> None:
            shown[layer] = x_TD.clone()

        found = Stages(group, num_layers, points)(wanted[0].clone(), run, show)
        assert torch.equal(found, wanted[-1]), (group.rank, num_layers)
        if not group.rank:
            assert set(points).difference(own) <= shown.keys(), (points, shown.keys())
            assert all(torch.equal(x_TD, wanted[layer]) for layer, x_TD in shown.items())


def on_device(host: Group) -> DeviceGroup:
    """What a rank has on CUDA, over gloo: its device is the CPU, which is done at once."""
    store, long = store_of(host), timedelta(seconds=60)
    found = _distributed_c10d.ProcessGroupGloo(store, host.rank, host.size, long)
    return DeviceGroup(host, found, lambda: lambda: True)


class _Nccl(_distributed_c10d.ProcessGroupGloo):
    """Made as PyTorch makes its own for NCCL, which there may be none of."""

    class Options:
        """The usual ones."""

    def __init__(self, store: Any, rank: int, size: int, options: object) -> None:
        assert isinstance(options, _Nccl.Options), options
        super().__init__(store, rank, size, timedelta(seconds=60))


def is_on_cuda(host: Group) -> None:
    """Join as where there is a GPU for each rank, and gather."""
    zeros, event = torch.zeros, Mock()
    event.query.side_effect = [False, True, True]
    with (
        patch.object(_distributed_c10d, "ProcessGroupNCCL", _Nccl, create=True),
        patch.object(torch, "zeros", lambda size, device: zeros(size) if device == "cuda" else 1),
        patch.multiple(torch.cuda, set_device=DEFAULT, Event=lambda: event) as cuda,
        patch.dict(os.environ),
        closing(group_on("cuda", host)) as group,
    ):
        cuda["set_device"].assert_called_once_with(host.rank)
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert [part.item() for part in group.parts(torch.tensor([host.rank]))] == [0, 1]
        group.finish()
        assert (event.record.call_count, event.query.call_count) == (2, 3)
        group.broadcast(None if group.rank else b"all were there")


def gathers_on_devices(host: Group, shapes: list[tuple[int, ...]]) -> None:
    """Parts of equal sizes, beside messages of any size."""
    with closing(on_device(host)) as group:
        for at, shape in enumerate(shapes):
            made = torch.Generator().manual_seed(at)
            wanted = [
                torch.randn(shape, generator=made).to(TYPES[at % 2]) for _ in range(host.size)
            ]
            own = wanted[group.rank].mT.contiguous().mT
            assert all(map(torch.equal, group.parts(own), wanted)), (at, shape)
            assert torch.equal(group.all_gather(own, 1), torch.cat(wanted, 1)), (at, shape)
            given = torch.stack([wanted[group.rank] + rank for rank in range(group.size)])
            for one in (group, host):
                found = torch.empty_like(given)
                one.exchange_into(given, found)
                assert torch.equal(found, torch.stack(wanted) + group.rank), (at, shape)
                one.gather_into(own.contiguous(), found)
                assert torch.equal(found, torch.stack(wanted)), (at, shape)
            group.finish()
            said = bytes(range(at))
            assert group.broadcast(None if group.rank else said) == said, at


def harms_itself_on_a_device(host: Group, rank: int, after: int, how: int) -> None:
    """One rank sends itself a signal after some gathers, the others go on."""
    with closing(on_device(host)) as group:
        for turn in range(1 << 30):
            if (turn, group.rank) == (after, rank):
                os.kill(os.getpid(), how)
            group.parts(torch.ones(3))
            group.finish()
