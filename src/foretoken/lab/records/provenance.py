"""What a measured number must be read with: versions, machine, time, command line. No torch."""

import platform
import sys
import time
from typing import Any

import foretoken
from foretoken.hardware import Hardware


def describe_client() -> dict[str, Any]:
    """The measuring side as plain data; servers describe themselves in ServerInfo."""
    hardware = Hardware.detect()
    return {
        "foretoken": foretoken.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "client_cpu": hardware.cpu_name,
        "client_cores": hardware.num_cores,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command_line": [redact(word) for word in sys.argv],
    }


def redact(word: str) -> str:
    """A word of a command line without what looks like a secret."""
    lowered = word.lower()
    if lowered.startswith(("sk-", "hf_", "bearer ")):
        return "[redacted]"
    for name in ("api-key=", "api_key=", "token=", "password="):
        if name in lowered:
            return word[: lowered.index(name) + len(name)] + "[redacted]"
    return word
