"""Beginning with a head that was trained before, on this target or on one that it was made from.

A target that is trained on moves its hidden states a little at a time, so the head of the old one
is nearer to what the new one needs than random weights are. Knows no kind but by its network.
"""

from pathlib import Path

import torch
from torch import nn

from foretoken.errors import ConfigError
from foretoken.proposers.heads.base import DraftHead
from foretoken.proposers.heads.folder import method_of, read_head
from foretoken.training.heads.target import TargetParts

_KEY = "head.start"


def begin_with_head(
    net: nn.Module, points: tuple[int, ...], folder: Path, target: TargetParts
) -> None:
    """Give `net` the weights of a head of its kind and sizes, its draft vocabulary included.

    Args:
        net: a head.
        points: where it reads the target's hidden states.
        folder: of the head to begin with.
        target: which `net` is for.

    Raises:
        ConfigError: the head is another kind, has other sizes, or reads other points.
        ModelError: its folder is broken.
    """
    start = read_start(net, points, folder, target)
    net.load_state_dict(start.state_dict())


def read_start(
    net: nn.Module, points: tuple[int, ...], folder: Path, target: TargetParts
) -> DraftHead:
    """The head in `folder`, all of whose tensors `net` has too; the rest as `begin_with_head`."""
    assert isinstance(net, DraftHead), type(net)
    read = read_head(folder)
    kind = method_of(read)
    if kind != net.method:
        raise ConfigError(_KEY, str(folder), f"a head of kind {net.method}, not {kind}")
    with torch.no_grad():
        start = type(net).read(read, target.layer_shape(inner_size=0, layers=target.layers))
    wanted = {name: list(tensor.shape) for name, tensor in net.state_dict().items()}
    for name, tensor in start.state_dict().items():
        if wanted.get(name) != list(tensor.shape):
            given = f"{name} {list(tensor.shape)}"
            raise ConfigError(_KEY, given, f"{wanted.get(name)}, as in this config")
    if start.points != points:
        allowed = f"one that reads the layers {points}, as this config's does"
        raise ConfigError(_KEY, f"a head that reads the layers {start.points}", allowed)
    return start
