"""Starts a server from its command line, waits until it answers, and stops all of it.

A server gets its own process group and log file. Stopping asks first (SIGTERM, SIGINT) and kills
after a while; a server that dies while starting is an error with the end of its log.
"""

import asyncio
import ctypes
import os
import random
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from foretoken.errors import ConfigError, EndpointError
from foretoken.lab.http.client import Client, EndpointConfig, connect, key_headers
from foretoken.lab.http.timed import HttpPool, now
from foretoken.lab.measure.experiment import SERVER, ArmConfig
from foretoken.lab.measure.restarts import is_ready, restart, tail

_PATIENCE_S = 15.0
_PORTS = (20_000, 32_000)
_SIGNAL_AT_PARENTS_DEATH = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def free_port() -> int:
    """A port that is free now.

    It is below those that the system gives to outgoing connections: between now and the server's
    start, one of them could take it.
    """
    for _ in range(50):
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def serving(arm: ArmConfig, log: Path) -> AsyncIterator[Client]:
    """A client of the arm's server, which is started and stopped if the arm has a command.

    One by URL is restarted first if the arm says how.

    Raises:
        EndpointError: it does not start, or does not answer.
    """
    key = os.environ.get(arm.api_key_env) if arm.api_key_env else None
    if arm.api_key_env and key is None:
        allowed = f"an environment variable that is set: export {arm.api_key_env}=KEY"
        raise ConfigError(f"arm {arm.name!r}: api_key_env", arm.api_key_env, allowed)

    def endpoint(url: str) -> EndpointConfig:
        return EndpointConfig(
            url=url,
            model=arm.model,
            engine=arm.engine,
            api_key=key,
            timeout_s=arm.timeout_s,
            k=arm.k,
            extra_body=arm.extra_body,
        )

    if arm.url is not None:
        if arm.restart_command is not None:
            await restart(arm, log, key)
        client = await connect(endpoint(arm.url), restarted_by=arm.restart_command)
        try:
            yield client
        finally:
            await client.close()
        return
    assert arm.command is not None
    port = free_port()
    command = arm.command.replace("{port}", str(port))
    process = await _start(command, arm, log)
    try:
        url = f"http://127.0.0.1:{port}"
        pool = HttpPool(url, headers=key_headers(key))
        try:
            await _wait_ready(process, pool, arm.ready_timeout_s, log)
        finally:
            await pool.close()
        client = await connect(endpoint(url), command=arm.command)
        try:
            yield client
        finally:
            await client.close()
    finally:
        await _stop(process)


def _words_of(command: str) -> list[str]:
    """The words of a command; variables that it begins with are set, as a shell would do it."""
    words = shlex.split(command)
    return ["env", *words] if words and re.match(r"[A-Za-z_]\w*=", words[0]) else words


async def _start(command: str, arm: ArmConfig, log: Path) -> asyncio.subprocess.Process:
    if "{port}" not in (arm.command or ""):
        raise ConfigError(f"arm {arm.name!r}", arm.command, SERVER)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        words = _words_of(command)
        with log.open("ab") as out:
            return await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **arm.env},
                start_new_session=True,
                preexec_fn=_end_with_us if sys.platform == "linux" else None,
            )
    except (OSError, ValueError) as error:
        allowed = "try the command line in a shell first"
        raise EndpointError(
            f"arm {arm.name!r}: cannot start `{command}`: {error}; {allowed}"
        ) from error


def _end_with_us() -> None:
    """Ask the kernel to end the server if we are killed, so that nothing keeps its memory."""
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)


async def _wait_ready(
    process: asyncio.subprocess.Process, pool: HttpPool, timeout_s: float, log: Path
) -> None:
    until = now() + timeout_s
    while now() < until:
        if process.returncode is not None:
            raise EndpointError(
                f"the server ended with code {process.returncode} while starting; the end of "
                f"{log}:\n{tail(log)}"
            )
        if await is_ready(pool):
            return
        await asyncio.sleep(0.2)
    raise EndpointError(
        f"the server was not ready after {timeout_s:g} s (ready_timeout_s of the arm); the end of "
        f"{log}:\n{tail(log)}"
    )


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask, wait, ask again, and kill; at once where the waiting is cancelled.

    SIGTERM comes first: whoever is started in the background of a shell ignores SIGINT, and so
    does what it starts.
    """
    try:
        for sign in (signal.SIGTERM, signal.SIGINT):
            if process.returncode is not None:
                break
            _signal_group(process.pid, sign)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await process.wait()
            except TimeoutError:
                continue
    finally:
        _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_group(pid: int, sign: signal.Signals) -> None:
    """Send a signal to every process of a server's session; those that have gone are no loss."""
    try:
        os.killpg(pid, sign)
    except ProcessLookupError:
        return
