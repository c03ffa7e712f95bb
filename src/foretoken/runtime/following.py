"""What ranks 1 and up of an engine's group do: the steps of rank 0, over their own share.

Knows neither requests nor drafts: what a step computes is in the message that begins it.
"""

import logging
from contextlib import closing
from dataclasses import replace

import torch

from foretoken.backend import backend_for
from foretoken.distributed import Group
from foretoken.distributed.on_device import group_on
from foretoken.runtime.leading import DropShare, LoadShare, listen
from foretoken.runtime.runner import Runner


def follow(group: Group, threads: int, device: str) -> None:
    """Load shares of models and run their steps, as rank 0 says, until the group ends.

    Args:
        group: the ranks.
        threads: of this process.
        device: where models are computed, by its kind.

    Raises:
        RankLostError: the group has ended, by rank 0's word or because a rank is lost.
        ModelError: a checkpoint is not supported or broken.
    """
    logging.getLogger("foretoken").setLevel(logging.ERROR)  # rank 0 says it
    torch.set_num_threads(threads)
    with closing(group_on(device, group)) as on_device:
        _follow(on_device, threads)


def _follow(group: Group, threads: int) -> None:
    runners = dict[int, Runner]()
    for number, said in listen(group):
        if isinstance(said, LoadShare):
            options = replace(said.options, group=group)
            runners[number] = Runner.load(said.folder, options, num_pages=said.num_pages)
        elif isinstance(said, DropShare):
            del runners[number]
        else:
            runner = runners[number]
            with backend_for(runner.device).step_threads(runner.dtype, threads):
                runner.obey(said)
                group.finish()
