"""Starts a server from its command line, or restarts one that somebody else runs, and waits for it.

A started server gets its own process group and log file. Stopping asks first (SIGTERM, SIGINT) and
kills after a while; a server that dies while starting is an error with the end of its log.

An arm given by URL is one start unless the user's own shell command restarts it: whatever a systemd
unit, a container or a script takes. The command has to end; what it leaves running is the server,
and is not ours to stop. Where a server says when it started, it is checked that it did.
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
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from foretoken.errors import ConfigError, EndpointError
from foretoken.lab.http.client import Client, connect, scrape
from foretoken.lab.http.timed import HttpPool, TransportError, now
from foretoken.lab.measure.experiment import SERVER, ArmConfig

_PATIENCE_S = 15.0
_PORTS = (20_000, 32_000)
_SIGNAL_AT_PARENTS_DEATH = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""
_STARTED = "process_start_time_seconds"
_Process = asyncio.subprocess.Process


def free_port() -> int:
    """A port that is free now. It is below those that the system gives to outgoing connections:
    between now and the server's start, one of them could take it."""
    for port in [*(random.SystemRandom().randrange(*_PORTS) for _ in range(50)), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise EndpointError("no port is free on this machine; end what listens, and try again")


@asynccontextmanager
async def serving(arm: ArmConfig, log: Path) -> AsyncIterator[Client]:
    """A client of the arm's server, which is started and stopped if the arm has a command. One by
    URL is restarted first if the arm says how. Raises EndpointError: it does not start, or does not
    answer."""
    _ = arm.headers  # a key that is not set is told before anything is started
    async with AsyncExitStack() as stack:
        url = arm.url
        if url is None:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            process = await _start(arm, port, log)
            stack.push_async_callback(_stop, process)
            late = f"the server was not ready after {arm.ready_timeout_s:g} s"
            await _wait_ready(arm, url, log, late, process)
        elif arm.restart_command is not None:
            await _restart(arm, url, log)
        client = await connect(arm, url)
        stack.push_async_callback(client.close)
        yield client


def _apart(arm: ArmConfig, out: IO[bytes]) -> dict[str, Any]:
    """How a process is started that is not to share our input, output and signals."""
    return {"stdin": asyncio.subprocess.DEVNULL, "stdout": out, "stderr": out,
            "env": {**os.environ, **arm.env}, "start_new_session": True}  # fmt: skip


async def _start(arm: ArmConfig, port: int, log: Path) -> _Process:
    given = arm.command or ""
    if "{port}" not in given:
        raise ConfigError(f"arm {arm.name!r}", given, SERVER)
    command = given.replace("{port}", str(port))
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        words, end = shlex.split(command), None
        if words and re.match(r"[A-Za-z_]\w*=", words[0]):
            words.insert(0, "env")  # which sets variables, as a shell would do it
        if sys.platform == "linux":  # ended if we are killed, so that nothing keeps its memory
            end = partial(ctypes.CDLL(None).prctl, _SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)
        with log.open("ab") as out:
            return await asyncio.create_subprocess_exec(*words, preexec_fn=end, **_apart(arm, out))
    except (OSError, ValueError) as error:
        allowed = "try the command line in a shell first"
        raise EndpointError(
            f"arm {arm.name!r}: cannot start `{command}`: {error}; {allowed}"
        ) from error


async def _wait_ready(
    arm: ArmConfig, url: str, log: Path, late: str, process: _Process | None = None
) -> None:
    """Wait until the server lists its models, and calls itself healthy if it has a word for it.
    Raises EndpointError: `process` ends, or it takes longer than `ready_timeout_s`, which is said
    in the words of `late`."""
    until = now() + arm.ready_timeout_s
    pool = HttpPool(url, headers=arm.headers)
    try:
        while True:
            if process is not None and process.returncode is not None:
                said = f"the server ended with code {process.returncode} while starting"
                raise EndpointError(f"{said}; {_end_of(log)}")
            try:
                answer = await pool.send("GET", "/v1/models", timeout_s=5.0)
                health = await pool.send("GET", "/health", timeout_s=5.0)
                if answer.status == 200 and health.status in (200, 404):
                    return
            except TransportError:
                pass
            if now() > until:
                raise EndpointError(f"{late} (ready_timeout_s of the arm); {_end_of(log)}")
            await asyncio.sleep(0.2)
    finally:
        await pool.close()


async def _stop(process: _Process) -> None:
    """Ask, wait, ask again, and kill; at once where the waiting is cancelled. SIGTERM comes first:
    whoever is started in the background of a shell ignores SIGINT, and so does what it starts."""
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


async def _restart(arm: ArmConfig, url: str, log: Path) -> None:
    """Run the arm's `restart_command` and return once its server answers. `{arm}` and `{url}` in
    the command are the arm's. What it prints goes to `log`. Raises EndpointError: it fails, takes
    longer than `ready_timeout_s`, or the server does not answer after it or has not been
    restarted."""
    command = (arm.restart_command or "").replace("{arm}", arm.name).replace("{url}", url)
    where, most_s = f"arm {arm.name!r}", f"{arm.ready_timeout_s:g} s"
    before = await _started(arm, url)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_shell(command, **_apart(arm, out))
    try:
        async with asyncio.timeout(arm.ready_timeout_s):
            code = await process.wait()
    except BaseException as error:
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        if isinstance(error, TimeoutError):
            raise EndpointError(
                f"{where}: `{command}` had not ended after {most_s} (ready_timeout_s of the arm); "
                "a server that it starts has to be left in the background"
            ) from error
        raise
    if code != 0:
        raise EndpointError(f"{where}: `{command}` ended with code {code}; {_end_of(log)}")
    late = f"{where}: {url} does not answer {most_s} after `{command}` ended"
    await _wait_ready(arm, url, log, late)
    if before is not None and await _started(arm, url) == before:
        raise EndpointError(
            f"{where}: `{command}` ended, but {url} is still the process of before "
            f"({_STARTED} {before:.0f}); the command has to end the server and start it anew"
        )


async def _started(arm: ArmConfig, url: str) -> float | None:
    """When the server's process began, by its metrics; None where it does not say."""
    pool = HttpPool(url, headers=arm.headers)
    try:
        found = await scrape(pool)
    finally:
        await pool.close()
    return (found or {}).get(_STARTED)


def _end_of(log: Path) -> str:
    tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:]) or "(empty)"
    return f"the end of {log}:\n{tail}"
