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
from contextlib import asynccontextmanager
from pathlib import Path

from foretoken.errors import ConfigError, EndpointError
from foretoken.lab.http.client import Client, EndpointConfig, connect, key_headers
from foretoken.lab.http.scraping import scrape
from foretoken.lab.http.timed import HttpPool, TransportError, now
from foretoken.lab.measure.experiment import SERVER, ArmConfig

_PATIENCE_S = 15.0
_PORTS = (20_000, 32_000)
_SIGNAL_AT_PARENTS_DEATH = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""
_STARTED = "process_start_time_seconds"


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
            await _restart(arm, log, key)
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
                f"{log}:\n{_tail(log)}"
            )
        if await _is_ready(pool):
            return
        await asyncio.sleep(0.2)
    raise EndpointError(
        f"the server was not ready after {timeout_s:g} s (ready_timeout_s of the arm); the end of "
        f"{log}:\n{_tail(log)}"
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


async def _restart(arm: ArmConfig, log: Path, key: str | None) -> None:
    """Run the arm's `restart_command` and return once its server answers.

    `{arm}` and `{url}` in the command are the arm's. What it prints goes to `log`.

    Raises:
        EndpointError: it fails, takes longer than `ready_timeout_s`, or the server does not
            answer after it or has not been restarted.
    """
    assert arm.url is not None and arm.restart_command is not None, arm
    command = arm.restart_command.replace("{arm}", arm.name).replace("{url}", arm.url)
    before = await _started(arm.url, key)
    until = now() + arm.ready_timeout_s
    await _run(command, arm, log)
    pool = HttpPool(arm.url, headers=key_headers(key))
    try:
        while not await _is_ready(pool):
            if now() > until:
                raise EndpointError(
                    f"arm {arm.name!r}: {arm.url} does not answer {arm.ready_timeout_s:g} s after "
                    f"`{command}` was begun (ready_timeout_s of the arm); the end of {log}:\n"
                    f"{_tail(log)}"
                )
            await asyncio.sleep(0.2)
    finally:
        await pool.close()
    if before is not None and await _started(arm.url, key) == before:
        raise EndpointError(
            f"arm {arm.name!r}: `{command}` ended, but {arm.url} is still the process of before "
            f"({_STARTED} {before:.0f}); the command has to end the server and start it anew"
        )


async def _run(command: str, arm: ArmConfig, log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
            env={**os.environ, **arm.env}, start_new_session=True,
        )  # fmt: skip
    try:
        async with asyncio.timeout(arm.ready_timeout_s):
            code = await process.wait()
    except BaseException as error:
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        if isinstance(error, TimeoutError):
            raise EndpointError(
                f"arm {arm.name!r}: `{command}` had not ended after {arm.ready_timeout_s:g} s "
                "(ready_timeout_s of the arm); a server that it starts has to be left in the "
                "background"
            ) from error
        raise
    if code != 0:
        raise EndpointError(
            f"arm {arm.name!r}: `{command}` ended with code {code}; the end of {log}:\n{_tail(log)}"
        )


async def _started(url: str, key: str | None) -> float | None:
    """When the server's process began, by its metrics; None where it does not say."""
    pool = HttpPool(url, headers=key_headers(key))
    try:
        found = await scrape(pool)
    finally:
        await pool.close()
    return (found or {}).get(_STARTED)


async def _is_ready(pool: HttpPool) -> bool:
    """Whether a server lists its models, and calls itself healthy if it has a word for it."""
    try:
        answer = await pool.send("GET", "/v1/models", timeout_s=5.0)
        health = await pool.send("GET", "/health", timeout_s=5.0)
    except TransportError:
        return False
    return answer.status == 200 and health.status in (200, 404)


def _tail(log: Path, lines: int = 15) -> str:
    """The end of a log."""
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:]) or "(empty)"
