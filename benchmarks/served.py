"""Starting servers, ours and others': one way for all benchmarks, ended with the block.

A server is a process of its own. It is ended also by a SIGTERM to the benchmark.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foretoken.errors import EndpointError
from foretoken.hardware import anonymous_memory

START_S, STOP_S = 600.0, 60.0
SIZES = ("--kv-cache-memory-bytes", "200000000")
"""Options of a server of the packaged models that leaves memory to others."""


@dataclass(slots=True)
class Server:
    """Where it listens, and its process."""

    url: str
    process: "subprocess.Popen[bytes]"

    def stop(self) -> int:
        """Tell it to stop as an operator would; its exit code, -9 if it had to be killed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def started(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    *,
    poll_s: float = 0.05,
) -> Iterator[Server]:
    """A server that answers and runs as long as the block; {port} in `command` is a free port.

    Raises:
        EndpointError: it ends, or does not answer in ten minutes.
    """
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in command]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    out = log.open("ab") if log is not None else None
    process = subprocess.Popen(
        words,
        env={**os.environ, **(env or {})},
        stdout=out or subprocess.DEVNULL,
        stderr=out,
        start_new_session=True,
    )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        until = time.monotonic() + START_S
        while not _answers(server.url):
            if process.poll() is not None or time.monotonic() > until:
                where = f": see {log}" if log else ""
                raise EndpointError(f"`{' '.join(words)}` did not start{where}")
            time.sleep(poll_s)
        yield server
    finally:
        server.stop()
        if out is not None:
            out.close()


@contextmanager
def demo_server(
    *options: str,
    model: str = "demo",
    env: Mapping[str, str] | None = None,
    module: str = "foretoken",
) -> Iterator[Server]:
    """`foretoken serve` of the packaged target, or another, with `options`.

    Another `module` is run in place of Foretoken's command line.

    Raises:
        EndpointError: it does not start.
    """
    command = [sys.executable, "-m", module, "serve", model, "--port", "{port}", *options]
    with started(command, {"FORETOKEN_LOGGING_LEVEL": "WARNING", **(env or {})}) as server:
        yield server


def anonymous_bytes(process: int | str = "self") -> int:
    """Bytes of anonymous memory of a process.

    Raises:
        SystemExit: this kernel does not say.
    """
    found = anonymous_memory(process)
    if found is None:
        raise SystemExit("this kernel does not say RssAnon")
    return found


def pages_of(page: str) -> tuple[int, int]:
    """Tokens of a KV page, and pages, as /metrics tells them."""
    found = re.search(r'cache_config_info\{block_size="(\d+)",num_gpu_blocks="(\d+)"', page)
    assert found is not None, "no cache_config_info"
    return int(found[1]), int(found[2])
