"""Where a run comes from: `provenance.json` in its folder, one record for each start.

Owns that file. It knows nothing of what is trained.
"""

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tokenizers
import torch

import foretoken

FILE = "provenance.json"


def versions() -> dict[str, str]:
    """The versions of what decides the numbers."""
    return {
        "foretoken": foretoken.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
    }


def write_provenance(
    folder: Path, settings: dict[str, Any], data_digest: str | None, processes: int = 1
) -> None:
    """Add this start: time, command, versions, settings, data's digest, processes."""
    path = folder / FILE
    starts: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    starts.append(
        {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "versions": versions(),
            "seed": settings["seed"],
            "processes": processes,
            "data": data_digest,
            "settings": settings,
        }
    )
    part = path.with_suffix(".part")
    part.write_text(json.dumps(starts, indent=2) + "\n")
    os.replace(part, path)
