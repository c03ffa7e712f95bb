"""What ranks 1 and up of an engine's group do: the steps of rank 0, over their own share.

Knows neither requests nor drafts: what a step computes is in the message that begins it.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from foretoken.backend import backend_for
from foretoken.distributed import Group
from foretoken.models import LoadOptions
from foretoken.runtime.leading import listen
from foretoken.runtime.runner import Runner


def follow(group: Group, folder: Path, options: LoadOptions, num_pages: int, threads: int) -> None:
    """Load this rank's share of a model, then do what rank 0 says until the group ends.

    Args:
        group: the ranks.
        folder: of the checkpoint.
        options: as rank 0 loads it.
        num_pages: of its KV store.
        threads: of this process.

    Raises:
        RankLostError: the group has ended, by rank 0's word or because a rank is lost.
        ModelError: the checkpoint is not supported or broken.
    """
    logging.getLogger("foretoken").setLevel(logging.ERROR)  # rank 0 says it
    torch.set_num_threads(threads)
    runner = Runner.load(folder, replace(options, group=group), num_pages=num_pages)
    working = backend_for(options.device).step_threads(options.dtype, threads)
    for said in listen(group):
        with working:
            runner.obey(said)
