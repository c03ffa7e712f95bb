"""Parts of the table that were measured already, so that an ended run goes on where it was.

They count only for the same machine, versions, commit and settings; the file goes when the table is
whole. Knows nothing of how a part is measured.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Ratio
from peer_table import Measured, RowResult


class Kept:
    """The file of finished parts."""

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        """Read what is there; parts measured under another `key` are forgotten."""
        self._path, self._key = path, json.loads(json.dumps(key))
        self._parts: dict[str, Any] = {}
        if path.is_file():
            document = json.loads(path.read_text())
            if document["key"] == self._key:
                self._parts = document["parts"]

    def rows(self, part: str) -> list[RowResult] | None:
        """What was measured for a part; None if it was not."""
        found = self._parts.get(part)
        return [_row(one) for one in found["rows"]] if found else None

    def when(self, part: str) -> str:
        """When a kept part was measured."""
        return str(self._parts[part]["when"])

    def put(self, part: str, rows: Sequence[RowResult]) -> None:
        """Add a part and write the file."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._parts[part] = {"when": when, "rows": [asdict(row) for row in rows]}
        whole = self._path.with_suffix(".part")
        whole.write_text(json.dumps({"key": self._key, "parts": self._parts}, indent=1))
        whole.replace(self._path)

    def remove(self) -> None:
        """The table is whole: the next run measures everything."""
        self._path.unlink(missing_ok=True)


def _row(fields: Mapping[str, Any]) -> RowResult:
    ratios = {name: _ratio(fields[name]) for name in ("over_peer", "over_floor", "judged")}
    peers = {name: _measured(one) for name, one in fields["peers"].items()}
    ours = _measured(fields["ours"]) if fields["ours"] else None
    return RowResult(**{**fields, **ratios, "ours": ours, "peers": peers})


def _ratio(fields: Mapping[str, Any] | None) -> Ratio | None:
    return Ratio(**fields) if fields else None


def _measured(fields: Mapping[str, Any]) -> Measured:
    lists = {name: tuple(fields[name]) for name in ("seconds", "floor_s")}
    return Measured(**{**fields, **lists})
