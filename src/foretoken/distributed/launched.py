"""The processes of a group that a launcher has started, such as torchrun.

They have no line to rank 0 from birth. It listens under a name that follows from what the launcher
told all of them, in Linux's abstract namespace, which goes with the process. Who comes says its
rank; the socket is its line from then on, and brings the memory of the group. Only processes of the
same user are let in, and only such a one is obeyed.
"""

import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Final, Self, final

from foretoken.distributed.processes import Others, obey
from foretoken.errors import ConfigError, RankLostError
from foretoken.kernels.structures import MOST_RANKS

_TOLD: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
"""What makes a launched process of one."""
_NAMING: Final = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_JOIN_S: Final = 120.0
"""A busy machine takes its time to start processes that import PyTorch."""
_SAYING_S: Final = 5.0
_PAUSE_S: Final = 0.1
_PEER: Final = Struct("3i")
"""Process, user and group, as the system has them."""


@final
@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """What the launcher told this process."""

    rank: int
    size: int
    name: bytes
    """Of the socket where its processes meet."""

    @classmethod
    def found(cls, told: Mapping[str, str]) -> "Self | None":
        """By the environment, as torchrun sets it; None: nobody launched this process.

        Raises:
            ConfigError: it is no rank of that size, has processes on several machines, or they
                cannot meet on this system.
        """
        if not all(map(told.get, _TOLD)):
            return None
        size = _number(told, "WORLD_SIZE", range(1, MOST_RANKS + 1))
        rank = _number(told, "RANK", range(size))
        local = told.get("LOCAL_WORLD_SIZE", str(size))
        if local != str(size):
            allowed = f"{local}, the LOCAL_WORLD_SIZE: processes of one machine share its memory"
            raise ConfigError("WORLD_SIZE", size, allowed)
        if size > 1 and sys.platform != "linux":
            raise ConfigError("WORLD_SIZE", size, f"1 on {sys.platform}")
        digest = hashlib.sha256("\0".join(told.get(key, "") for key in _NAMING).encode())
        return cls(rank, size, b"\0foretoken " + digest.hexdigest().encode())


def _number(told: Mapping[str, str], name: str, allowed: range) -> int:
    try:
        found = int(told[name])
    except ValueError:
        found = -1
    if found not in allowed:
        raise ConfigError(name, told[name], f"an integer from {allowed[0]} to {allowed[-1]}")
    return found


@final
class Launched(Others):
    """Those who come to rank 0."""

    def __init__(self, launch: LaunchedRank) -> None:
        """Listen from now on, so that they notice when this process dies.

        Raises:
            ConfigError: another rank 0 does.
        """
        assert launch.rank == 0, launch.rank
        self._come: dict[int, socket.socket] = {}
        self._process_ids: list[int] = []
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening.bind(launch.name)
            self._listening.listen(launch.size)
        except OSError as error:
            self._listening.close()
            allowed = f"0 in one process of a launch ({error})"
            raise ConfigError("RANK", 0, allowed) from error

    @property
    def process_ids(self) -> list[int]:
        return self._process_ids

    def line_to(self, rank: int, descriptors: tuple[int, ...]) -> socket.socket:
        until = time.monotonic() + _JOIN_S
        while rank not in self._come:
            self._listening.settimeout(max(0.001, until - time.monotonic()))
            try:
                line, _ = self._listening.accept()
            except TimeoutError as error:
                why = f"the process of rank {rank} did not come within {_JOIN_S:g} s"
                raise RankLostError(why) from error
            self._let_in(line)
        line = self._come.pop(rank)
        socket.send_fds(line, [b"\0"], descriptors)
        return line

    def close(self) -> None:
        """Whoever has not been asked for goes; the launcher sees all of them end."""
        self._listening.close()
        for line in self._come.values():
            line.close()
        self._come = {}

    def _let_in(self, line: socket.socket) -> None:
        process_id, user = _peer_of(line)
        line.settimeout(_SAYING_S)
        try:
            said = line.recv(1) if user == os.getuid() else b""
        except OSError:
            said = b""
        if not said:
            line.close()
            return
        line.settimeout(None)
        self._process_ids.append(process_id)
        self._come[said[0]] = line


def come(launch: LaunchedRank) -> int:
    """Be a rank from 1 up: find rank 0, obey it, and leave when the group has ended.

    Signals that ask for an end are left to rank 0, which a launcher sends them too.

    Returns:
        The exit status; 0 where rank 0 knows what became of the group, and says it.

    Raises:
        RankLostError: rank 0 is not there.
        ForetokenError: what was to be done could not be.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with _reached(launch) as line:
        message, received, _, _ = socket.recv_fds(line, 1, MOST_RANKS)
        if message:
            with suppress(RankLostError):
                obey(line, received)
    return 0


def _reached(launch: LaunchedRank) -> socket.socket:
    """A line to rank 0."""
    until = time.monotonic() + _JOIN_S
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(launch.name)
            break
        except ConnectionRefusedError as error:
            line.close()
            if time.monotonic() > until:
                raise RankLostError(f"rank 0 was not there within {_JOIN_S:g} s") from error
        time.sleep(_PAUSE_S)
    if _peer_of(line)[1] != os.getuid():
        line.close()
        raise RankLostError("a process of another user says that it is rank 0")
    line.sendall(bytes([launch.rank]))
    return line


def _peer_of(line: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    process_id, user, _ = _PEER.unpack(told)
    return process_id, user
