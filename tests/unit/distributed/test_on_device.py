"""Ranks that compute on devices get what the others computed, or leave; gloo stands in for NCCL.

The guarded bugs: parts in another order, a message that waits for a device, a rank that waits for a
gather without end because nobody aborts it, and tokens made of what an aborted gather left behind.
"""

import os
import signal
import threading
import time

import pytest

from foretoken.distributed.gloo import GlooRendezvous
from foretoken.distributed.on_device import DeviceGroup, group_on
from foretoken.distributed.processes import Followers, meet
from foretoken.errors import RankLostError
from tests.unit.distributed import working

BUSY_S = 5.0
"""What a machine with other work may take."""


class Gathering:
    """Notes that it was aborted; what it gathers never comes."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


def never() -> bool:
    return False


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_parts_go_from_device_to_device(size: int) -> None:
    shapes = [(1, 4), (5, 3), (2, 3, 4), (0, 6), (300, 70)]
    with Followers(meet(size, 60.0), working.gathers_on_devices, shapes) as followers:
        working.gathers_on_devices(followers.joined, shapes)
        statuses = [one.wait(BUSY_S) for one in working.started(followers)]
    assert statuses == [0] * (size - 1)


@pytest.mark.slow
def test_ranks_join_over_nccl_as_pytorch_makes_it() -> None:
    """As far as that goes without a GPU: names and order of what is called."""
    with Followers(meet(2, 60.0), working.is_on_cuda) as followers:
        working.is_on_cuda(followers.joined)
        assert [one.wait(BUSY_S) for one in working.started(followers)] == [0]


@pytest.mark.slow
def test_a_killed_rank_ends_all_others() -> None:
    given = (2, 7, signal.SIGKILL)
    with Followers(meet(3, 60.0), working.harms_itself_on_a_device, *given) as followers:
        with pytest.raises(RankLostError):
            working.harms_itself_on_a_device(followers.joined, *given)
        statuses = [one.wait(BUSY_S) for one in working.started(followers)]
    assert statuses == [RankLostError.exit_code, -signal.SIGKILL]


@pytest.mark.slow
def test_who_waits_for_its_device_learns_who_died() -> None:
    """Long before the deadline; and what is queued is aborted."""
    with Followers(meet(2, 60.0), working.listens) as followers:
        gathering = Gathering()
        group = DeviceGroup(followers.joined, gathering, lambda: never)
        [process] = working.started(followers)
        process.kill()
        began = time.monotonic()
        with pytest.raises(RankLostError, match="rank 1 has died"):
            group.finish()
        assert time.monotonic() - began < 60.0
        group.abort("it failed")
        assert gathering.aborted.wait(BUSY_S)


@pytest.mark.slow
def test_what_is_queued_is_aborted_while_the_thread_is_held_up() -> None:
    """It may sit in a call into CUDA, which ends with the gather only."""
    rendezvous = meet(2, 60.0)
    if isinstance(rendezvous, GlooRendezvous):
        pytest.skip("no compiled kernels: no heartbeats")
    with Followers(rendezvous, working.listens) as followers:
        gathering = Gathering()
        group = DeviceGroup(followers.joined, gathering, lambda: lambda: True)
        [process] = working.started(followers)
        os.kill(process.pid, signal.SIGKILL)
        assert gathering.aborted.wait(BUSY_S)
        with pytest.raises(RankLostError, match="rank 1 has died"):
            group.finish()


@pytest.mark.slow
def test_a_device_that_is_late_ends_the_step() -> None:
    with Followers(GlooRendezvous.make(2, 60.0), working.listens) as followers:
        gathering = Gathering()
        group = DeviceGroup(followers.joined, gathering, lambda: never)
        group.wait_s = 0.2
        assert followers.joined.wait_s == 0.2
        with pytest.raises(RankLostError, match=r"did not finish a step within 0\.2 s"):
            group.finish()
        group.close()
        assert gathering.aborted.wait(BUSY_S)


@pytest.mark.slow
def test_on_the_cpu_there_is_the_group_of_the_host_alone() -> None:
    with Followers(GlooRendezvous.make(2, 60.0), working.listens) as followers:
        assert group_on("cpu", followers.joined) is followers.joined
