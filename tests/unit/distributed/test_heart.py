"""Ranks that are stopped, killed or stuck are noticed while nobody waits for them.

The guarded bugs: an idle group that learns of a lost rank hours later, ranks that outlive rank 0, a
pause of the watcher that is taken for a pause of the watched.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foretoken.distributed.heart import SILENT_S, Listening
from foretoken.distributed.processes import Followers, meet
from foretoken.errors import RankLostError
from foretoken.kernels.library import find_library
from tests.unit.distributed import working

BUSY_S = 4.0
"""What a machine with other work may add to what is promised."""
LEAVES_S = 10.0
"""The promise: everybody has left by then."""


@pytest.fixture(autouse=True)
def _shared_memory() -> None:
    if sys.platform != "linux" or find_library() is None:
        pytest.skip("no compiled kernels")


def _wait_until(done: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _lost(followers: Followers) -> str:
    try:
        followers.check()
    except RankLostError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said", "within_s"),
    [
        (signal.SIGKILL, "rank 1 has died", 1.0),
        (signal.SIGSTOP, "rank 1 has given no sign of life for 5 s", SILENT_S + 1.0),
    ],
    ids=["killed", "stopped"],
)
def test_an_idle_group_learns_who_is_lost(how: int, said: str, within_s: float) -> None:
    with Followers(meet(3, 60.0), working.listens) as followers:
        assert not _lost(followers)
        first, second = working.started(followers)
        os.kill(first.pid, how)
        assert _wait_until(lambda: bool(_lost(followers)), within_s + BUSY_S)
        assert said in _lost(followers)
        assert second.wait(BUSY_S) == RankLostError.exit_code
    assert first.returncode in (-signal.SIGKILL, RankLostError.exit_code)


RANK_0 = """
import sys
from foretoken.distributed.processes import Followers, meet
from tests.unit.distributed import working
if __name__ == "__main__":
    with Followers(meet(3, 60.0), working.hears_once) as followers:
        print(*followers.process_ids, flush=True)
        followers.group.broadcast(b"", idle=True)
        sys.stdin.read()
"""


@pytest.mark.slow
def test_no_rank_outlives_rank_0() -> None:
    """One that idles and one that computes, and does not look for a minute."""
    path = os.pathsep.join(filter(None, [*sys.path, str(Path(__file__).parents[3])]))
    first = subprocess.Popen(
        [sys.executable, "-c", RANK_0],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    with first:
        assert first.stdout is not None
        others = [Path("/proc", number) for number in first.stdout.readline().split()]
        assert len(others) == 2 and all(other.exists() for other in others)
        first.kill()
    assert _wait_until(lambda: not any(map(_runs, others)), LEAVES_S + BUSY_S)


def _runs(process: Path) -> bool:
    """Nobody may be there to collect the exit status of an orphan."""
    try:
        return " Z " not in (process / "stat").read_text()
    except OSError:
        return False


def test_silence_is_counted_in_looks() -> None:
    """Who has never beaten is not silent, and time alone makes nobody so."""
    heard = Listening(3)
    assert not heard.look([1, 3, 0])
    for own in range(2, 11):
        assert not heard.look([own, 3, 0])
    assert heard.look([11, 3, 0]) == [1]
    assert not heard.look([12, 4, 1])
