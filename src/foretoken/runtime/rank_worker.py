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
from foretoken.runtime.rank0_driver import LoadShare, listen
from foretoken.runtime.runner import Runner


def follow(group: Group, threads: int, device: str) -> None:
    """Load a share of a model and run its steps, as rank 0 says, until the group ends.

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
    runner: Runner | None = None
    for said in listen(group):
        if isinstance(said, LoadShare):
            options = replace(said.options, group=group)
            runner = Runner.load(said.folder, options, num_pages=said.num_pages)
        else:
            assert runner is not None, "the model is loaded first"
            with backend_for(runner.device).step_threads(runner.dtype, threads):
                runner.obey(said)
                group.finish()
