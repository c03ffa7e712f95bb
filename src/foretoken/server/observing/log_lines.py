"""Log lines of the server: JSON with request ids, or text. Owns the format, no handler's place.

A record is one line in both, so that what reads logs line by line loses nothing. Of an exception
the text has its words and its innermost places, JSON the whole traceback as one field; at DEBUG
the text has the traceback too, on lines of its own.
"""

import json
import logging
import traceback
from datetime import UTC, datetime
from pathlib import Path

from foretoken.errors import ForetokenError

LOG_FORMATS = ("text", "json")
_MOST_PLACES = 3


class LineFormatter(logging.Formatter):
    """One line per record; what `extra={"facts": {...}}` adds becomes fields."""

    def __init__(self, kind: str) -> None:
        super().__init__("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S")
        assert kind in LOG_FORMATS, kind
        self._json = kind == "json"

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        if not self._json:
            return self._text(record, facts)
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

    def _text(self, record: logging.LogRecord, facts: dict[str, object]) -> str:
        parts = [record.levelname, self.formatTime(record, self.datefmt), record.getMessage()]
        for name, value in facts.items():
            parts.append(f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            parts[2] += f": {describe(error)}"
        line = " ".join(" ".join(parts).splitlines())
        if error is not None and logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
            line += "\n" + "".join(traceback.format_exception(error)).rstrip()
        return line


def describe(error: BaseException) -> str:
    """An exception in words; with the places that it came from, unless a user made the mistake."""
    if isinstance(error, ForetokenError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-_MOST_PLACES:]
    places = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    text = f"{type(error).__name__}: {error}"
    return f"{text} [{places}]" if places else text


def milliseconds(seconds: float) -> float:
    """Seconds as the milliseconds of a log line, to the microsecond."""
    return round(1e3 * seconds, 3)
