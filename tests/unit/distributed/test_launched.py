"""Processes that a launcher started: what it told them, who is let in, and how they end."""

import multiprocessing
import os
import socket
from collections.abc import Mapping

import pytest

from foretoken.distributed import launched
from foretoken.distributed.launched import Launched, LaunchedRank, come
from foretoken.distributed.processes import Followers, meet
from foretoken.errors import ConfigError, RankLostError
from tests.unit.distributed import working

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
