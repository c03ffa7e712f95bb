"""Log lines of the server: JSON with request ids, or text. Owns the format, no handler's place."""

import json
import logging
from datetime import UTC, datetime

LOG_FORMATS = ("text", "json")


class LineFormatter(logging.Formatter):
    """One line per record; what `extra={"facts": {...}}` adds becomes fields."""

    def __init__(self, kind: str) -> None:
        """`kind` is one of LOG_FORMATS."""
        super().__init__("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S")
        assert kind in LOG_FORMATS, kind
        self._json = kind == "json"

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        facts = getattr(record, "facts", {})
        if not self._json:
            shown = " ".join(f"{name}={value}" for name, value in facts.items())
            return f"{super().format(record)} {shown}".rstrip()
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **facts,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
