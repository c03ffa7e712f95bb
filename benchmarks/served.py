"""A server of the packaged models for the benchmarks that measure one: its start, pages, memory.

The server is a process of its own and is ended with the block, also by a SIGTERM to the benchmark.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from foretoken.hardware import anonymous_memory

START_S = 120.0
STOP_S = 60.0


@dataclass(slots=True)
class DemoServer:
    """Where it listens, and its process."""

    url: str
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """Tell it to stop as an operator would; its exit code, -9 if it had to be killed."""
        self.process.terminate()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def anonymous_bytes(self) -> int:
        """Memory of its own that the process has."""
        return anonymous_bytes(self.process.pid)


@contextmanager
def demo_server(
    *options: str,
    model: str = "demo",
    env: Mapping[str, str] | None = None,
    module: str = "foretoken",
) -> Iterator[DemoServer]:
    """`foretoken serve` of the packaged target, or another, with `options` on any free port.

    Another `module` is run in place of Foretoken's command line.

    Raises:
        SystemExit: it does not start.
    """
    command = [sys.executable, "-m", module, "serve", model, "--port", "0", *options]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FORETOKEN_LOGGING_LEVEL": "WARNING", **(env or {})},
    )
    late = threading.Timer(START_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        late.cancel()
        if found is None:
            raise SystemExit("the server did not start: " + " ".join(command[2:]))
        server = DemoServer(found[0], process)
        yield server
    finally:
        late.cancel()
        if process.poll() is None:
            DemoServer("", process).stop()
        if process.stdout is not None:
            process.stdout.close()


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
