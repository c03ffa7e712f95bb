"""Restarts a server that somebody else runs, by the user's own shell command, and waits for it.

An arm given by URL is one start unless something restarts it: whatever a systemd unit, a container
or a script of one's own takes. The command has to end; what it leaves running is the server, and is
not ours to stop. Where a server says when it started, it is checked that it did.
"""

import asyncio
import os
import signal
from pathlib import Path

from foretoken.errors import EndpointError
from foretoken.lab.http.client import key_headers
from foretoken.lab.http.scraping import scrape
from foretoken.lab.http.timed import HttpPool, TransportError, now
from foretoken.lab.measure.experiment import ArmConfig

_STARTED = "process_start_time_seconds"


async def restart(arm: ArmConfig, log: Path, key: str | None) -> None:
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
        while not await is_ready(pool):
            if now() > until:
                raise EndpointError(
                    f"arm {arm.name!r}: {arm.url} does not answer {arm.ready_timeout_s:g} s after "
                    f"`{command}` was begun (ready_timeout_s of the arm); the end of {log}:\n"
                    f"{tail(log)}"
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
        _kill(process.pid)
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
            f"arm {arm.name!r}: `{command}` ended with code {code}; the end of {log}:\n{tail(log)}"
        )


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


async def _started(url: str, key: str | None) -> float | None:
    """When the server's process began, by its metrics; None where it does not say."""
    pool = HttpPool(url, headers=key_headers(key))
    try:
        found = await scrape(pool)
    finally:
        await pool.close()
    return (found or {}).get(_STARTED)


async def is_ready(pool: HttpPool) -> bool:
    """Whether a server lists its models, and calls itself healthy if it has a word for it."""
    try:
        answer = await pool.send("GET", "/v1/models", timeout_s=5.0)
        health = await pool.send("GET", "/health", timeout_s=5.0)
    except TransportError:
        return False
    return answer.status == 200 and health.status in (200, 404)


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log."""
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:]) or "(empty)"
