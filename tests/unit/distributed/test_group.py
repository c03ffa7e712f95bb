"""Processes that swap tensors get exactly what the others gave, on devices too, or all of them
leave; also those that a launcher started."""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

import pytest
import torch

from foretoken.distributed import Rendezvous, launched
from foretoken.distributed.gloo import GlooRendezvous
from foretoken.distributed.group import Label
from foretoken.distributed.launched import Launched, LaunchedRank, come
from foretoken.distributed.on_device import DeviceGroup, group_on
from foretoken.distributed.processes import Followers, meet
from foretoken.distributed.shared_memory import SharedMemoryRendezvous
from foretoken.errors import ConfigError, RankLostError
from foretoken.kernels.library import find_library
from tests.unit.distributed import working

Make = Callable[[int, float], Rendezvous]
SMALL_BYTES = 4096
"""Of buffers, so that tensors go in several turns."""
LEAVES_S = 1.0
"""How soon everybody has left once one is known to be lost. A promise, not a speed."""
BUSY_S = 4.0
"""What a machine with other work may add to it."""


def _shared(size: int, wait_s: float) -> Rendezvous:
    if sys.platform != "linux" or find_library() is None:
        pytest.skip("no compiled kernels")
    return SharedMemoryRendezvous.make(size, wait_s, SMALL_BYTES)


both = pytest.mark.parametrize("make", [_shared, GlooRendezvous.make], ids=["shared", "gloo"])


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _left_by(followers: Followers) -> list[int | None]:
    """Exit statuses of the others, all of which leave by themselves."""
    return [process.wait(LEAVES_S + BUSY_S) for process in working.started(followers)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size"), [(_shared, 2), (_shared, 3), (_shared, 4), (GlooRendezvous.make, 3)]
)
def test_ranks_get_what_torch_cat_makes(make: Make, size: int) -> None:
    seeds, large = range(1, 60), frozenset({5, 23, 41})
    opened = _open_files()
    with Followers(make(size, 60.0), working.gathers, seeds, large) as followers:
        assert followers.group is not None and followers.group.size == size
        working.gathers(followers.group, seeds, large)
        assert _left_by(followers) == [0] * (size - 1)
    assert _open_files() == opened or make is not _shared


@pytest.mark.slow
@both
def test_a_rank_that_is_killed_ends_the_group(make: Make) -> None:
    with Followers(make(3, 60.0), working.harms_itself, 2, 17, signal.SIGKILL) as followers:
        assert followers.group is not None
        with pytest.raises(RankLostError) as found:
            working.turns(followers.group, 1 << 30)
        assert "rank 2 has died" in str(found.value) or make is not _shared
        assert _left_by(followers) == [RankLostError.exit_code, -signal.SIGKILL]


@pytest.mark.slow
@both
def test_a_rank_that_is_stopped_ends_the_group(make: Make) -> None:
    with Followers(make(3, 1.5), working.harms_itself, 1, 9, signal.SIGSTOP) as followers:
        assert followers.group is not None
        with pytest.raises(RankLostError) as found:
            working.turns(followers.group, 1 << 30)
        assert "rank 1 did not answer within 1.5 s" in str(found.value) or make is not _shared
        stopped, other = working.started(followers)
        assert other.wait(LEAVES_S + BUSY_S) == RankLostError.exit_code
        assert stopped.poll() is None
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.wait(LEAVES_S + BUSY_S) == RankLostError.exit_code


@pytest.mark.slow
@both
def test_a_slow_rank_ends_the_group_and_leaves_when_it_comes(make: Make) -> None:
    with Followers(make(3, 1.0), working.is_slow, 1, 2.5) as followers:
        assert followers.group is not None
        with pytest.raises(RankLostError):
            working.turns(followers.group, 1 << 30)
        assert _left_by(followers) == [RankLostError.exit_code] * 2


@pytest.mark.slow
def test_closing_wakes_one_that_is_stopped() -> None:
    followers = Followers(_shared(2, 0.5), working.harms_itself, 1, 2, signal.SIGSTOP)
    assert followers.group is not None
    [process] = working.started(followers)
    with pytest.raises(RankLostError):
        working.turns(followers.group, 1 << 30)
    followers.close()
    assert process.returncode == RankLostError.exit_code
    followers.close()
    with pytest.raises(RankLostError, match="closed"):
        followers.group.all_gather(torch.zeros(1), 0)


@pytest.mark.slow
def test_others_are_told_what_a_rank_said_last() -> None:
    with Followers(_shared(3, 60.0), working.breaks, 2, False) as followers:
        assert followers.group is not None
        with pytest.raises(RankLostError, match="rank 2 has left: page_size: got 3; allowed: a po"):
            working.turns(followers.group, 1 << 30)
        assert _left_by(followers) == [RankLostError.exit_code, ConfigError.exit_code]


@pytest.mark.slow
def test_a_bug_is_told_with_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    with Followers(_shared(2, 60.0), working.breaks, 1, True) as followers:
        assert followers.group is not None
        with pytest.raises(RankLostError, match="rank 1 has left: ValueError: no"):
            working.turns(followers.group, 1 << 30)
        assert _left_by(followers) == [1]
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.slow
def test_a_process_that_never_joins_is_noticed() -> None:
    with pytest.raises(RankLostError, match="rank 1 has died"):
        Followers(_shared(2, 60.0), working.turns, _Unloadable())


class _Unloadable:
    """Its pickle cannot be loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[int]]:
        return os._exit, (3,)


@pytest.mark.slow
@both
def test_ranks_that_idle_leave_when_rank_0_does(make: Make) -> None:
    with Followers(make(3, 0.5), working.listens) as followers:
        assert followers.group is not None
        time.sleep(1.2)  # longer than anybody waits for an answer
        for said in (b"ab", b"c"):
            followers.group.broadcast(said, idle=True)
            found = followers.group.gather(torch.empty(0, dtype=torch.int64), 0)
            assert found is not None and bytes(found.tolist()) == said * 2
        followers.group.close()
        assert _left_by(followers) == [RankLostError.exit_code] * 2


@pytest.mark.slow
@both
def test_ranks_that_idle_leave_by_word(make: Make) -> None:
    with Followers(make(2, 60.0), working.listens) as followers:
        assert followers.group is not None
        followers.group.broadcast(b"", idle=True)
        assert _left_by(followers) == [0]


def test_a_label_says_what_it_was_made_of() -> None:
    for x in (torch.zeros(()), torch.zeros(2, 0, 3, dtype=torch.bool), torch.ones(5).bfloat16()):
        label = Label.from_numbers(tuple(Label.of(x).numbers()))
        size = x.numel() * x.element_size()
        assert (label.payload, label.dtype, label.shape) == (size, x.dtype, tuple(x.shape))


def test_shared_memory_is_the_default_where_there_are_kernels() -> None:
    made = meet(2, 1.0)
    wanted = SharedMemoryRendezvous if find_library() is not None else GlooRendezvous
    assert isinstance(made, wanted) and made.size == 2
    for descriptor in made.descriptors:
        os.close(descriptor)


# Layers on several ranks: each is run once, in order, and rank 0 sees what it asked for. The
# guarded bugs: a stage that works on another's buffer, a run that begins at the wrong layer, a
# point that nobody shows.
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_layer_is_run_once_and_in_order(size: int) -> None:
    cases = [(size, ()), (7, ()), (7, (0, 3, 4, 6)), (8, (7, 5, 1)), (8, tuple(range(8)))]
    with Followers(meet(size, 60.0), working.stages, cases) as followers:
        working.stages(followers.joined, cases)


TOLD = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_all_processes_of_a_launch_meet_under_one_name() -> None:
    one = LaunchedRank.found(TOLD)
    other = LaunchedRank.found({**TOLD, "RANK": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"})
    assert one is not None and other is not None
    assert (one.rank, one.size, other.rank) == (1, 3, 2)
    assert one.name == other.name and one.name[0] == 0
    for change in ({"MASTER_PORT": "29501"}, {"TORCHELASTIC_RUN_ID": "x"}):
        found = LaunchedRank.found({**TOLD, **change})
        assert found is not None and found.name != one.name


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_nobody_launched_a_process_that_was_not_told_all(missing: str) -> None:
    assert LaunchedRank.found({key: value for key, value in TOLD.items() if key != missing}) is None


@pytest.mark.parametrize(
    ("change", "field", "allowed"),
    [
        ({"RANK": "3"}, "RANK", "0 to 2"),
        ({"RANK": "x"}, "RANK", "0 to 2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE", "1 to 64"),
        ({"LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE", "2, the LOCAL_WORLD_SIZE"),
    ],
)
def test_what_cannot_be_is_refused(change: Mapping[str, str], field: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed) as found:
        LaunchedRank.found({**TOLD, **change})
    assert found.value.field == field


def _launch(rank: int, port: int) -> LaunchedRank:
    told = {**TOLD, "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    found = LaunchedRank.found(told)
    assert found is not None
    return found


def _come(rank: int, port: int) -> None:
    raise SystemExit(come(_launch(rank, port)))


@pytest.mark.slow
def test_they_swap_as_those_that_were_started() -> None:
    """Whatever the order in which they come, and beside one who says nothing."""
    context = multiprocessing.get_context("spawn")
    others = Launched(_launch(0, 1))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(_launch(0, 1).name)
        silent.shutdown(socket.SHUT_WR)
        processes = [context.Process(target=_come, args=(rank, 1)) for rank in (2, 1)]
        for process in processes:
            process.start()
        seeds, large = range(3), frozenset[int]()
        with Followers(meet(3, 60.0), working.gathers, seeds, large, others=others) as followers:
            assert sorted(followers.process_ids) == sorted(one.pid or 0 for one in processes)
            working.gathers(followers.joined, seeds, large)
        for process in processes:
            process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.slow
def test_they_leave_when_rank_0_ends_before_it_began() -> None:
    """A setting was wrong, or there is no such model."""
    others = Launched(_launch(0, 5))
    process = multiprocessing.get_context("spawn").Process(target=_come, args=(1, 5))
    process.start()
    line, _ = others._listening.accept()
    others._let_in(line)
    others.close()
    process.join(60)
    assert process.exitcode == 0


def test_one_rank_0_for_each_launch() -> None:
    first = Launched(_launch(0, 2))
    with pytest.raises(ConfigError, match="one process of a launch"):
        Launched(_launch(0, 2))
    first.close()
    Launched(_launch(0, 2)).close()


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "_JOIN_S", 0.05)
    others = Launched(_launch(0, 3))
    with pytest.raises(RankLostError, match="rank 1 did not come within 0.05 s"):
        Followers(meet(3, 60.0), working.listens, others=others)
    with pytest.raises(RankLostError, match="rank 0 was not there"):
        launched._reached(_launch(1, 3))


def test_nobody_obeys_or_lets_in_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "_JOIN_S", 0.2)
    others = Launched(_launch(0, 4))
    with monkeypatch.context() as one:
        one.setattr(launched, "_peer_of", lambda line: (1, -1))
        with pytest.raises(RankLostError, match="another user"):
            launched._reached(_launch(1, 4))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(_launch(0, 4).name)
        stranger.sendall(b"\1")
        monkeypatch.setattr(launched, "_peer_of", lambda line: (1, os.getuid() + 1))
        with pytest.raises(RankLostError, match="did not come"):
            others.line_to(1, ())
        with pytest.raises(ConnectionResetError):
            stranger.recv(1)
    others.close()


# Ranks that compute on devices get what the others computed, or leave; gloo stands in for NCCL.
# The guarded bugs: parts in another order, a message that waits for a device, a rank that waits
# for a gather without end because nobody aborts it, and tokens made of what an aborted gather
# left behind.
DEVICE_BUSY_S = 5.0
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
        statuses = [one.wait(DEVICE_BUSY_S) for one in working.started(followers)]
    assert statuses == [0] * (size - 1)


@pytest.mark.slow
def test_ranks_join_over_nccl_as_pytorch_makes_it() -> None:
    """As far as that goes without a GPU: names and order of what is called."""
    with Followers(meet(2, 60.0), working.is_on_cuda) as followers:
        working.is_on_cuda(followers.joined)
        assert [one.wait(DEVICE_BUSY_S) for one in working.started(followers)] == [0]


@pytest.mark.slow
def test_a_killed_rank_ends_all_others() -> None:
    given = (2, 7, signal.SIGKILL)
    with Followers(meet(3, 60.0), working.harms_itself_on_a_device, *given) as followers:
        with pytest.raises(RankLostError):
            working.harms_itself_on_a_device(followers.joined, *given)
        statuses = [one.wait(DEVICE_BUSY_S) for one in working.started(followers)]
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
        assert gathering.aborted.wait(DEVICE_BUSY_S)


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
        assert gathering.aborted.wait(DEVICE_BUSY_S)
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
        assert gathering.aborted.wait(DEVICE_BUSY_S)


@pytest.mark.slow
def test_on_the_cpu_there_is_the_group_of_the_host_alone() -> None:
    with Followers(GlooRendezvous.make(2, 60.0), working.listens) as followers:
        assert group_on("cpu", followers.joined) is followers.joined
