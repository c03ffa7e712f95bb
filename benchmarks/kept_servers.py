"""Servers that stay up between blocks, where starting one takes longer than measuring with it.

What is lost is the difference between starts, so a verdict on kept servers has no `restarts` rule.
"""

import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from foretoken.errors import EndpointError

START_S, STOP_S = 600.0, 60.0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def kept(command: str, env: Mapping[str, str], log: Path, port: int) -> Iterator[str]:
    """The URL of a server that runs as long as the block; `command` has {port}.

    The port is given, since a run can be resumed only with the settings that it began with.

    Raises:
        EndpointError: it ends, or does not answer in ten minutes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    words = shlex.split(command.replace("{port}", str(port)))
    with log.open("ab") as out:
        process = subprocess.Popen(
            words, env={**os.environ, **env}, stdout=out, stderr=out, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > until:
                raise EndpointError(f"`{words[0]}` did not start: see {log}")
            time.sleep(0.5)
        yield url
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    for sign in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(STOP_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
