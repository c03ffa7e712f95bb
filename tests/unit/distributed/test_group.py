"""Processes that swap tensors get exactly what the others gave, or all of them leave."""

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch

from foretoken.distributed import Rendezvous
from foretoken.distributed.gloo import GlooRendezvous
from foretoken.distributed.group import Label
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
