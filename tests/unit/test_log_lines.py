"""Log lines: one record is one line, times are milliseconds, a user's mistake has no traceback."""

import json
import logging
import sys

from foretoken.errors import ForetokenError, PromptError
from foretoken.server.observing.log_lines import LineFormatter, milliseconds


def line(kind: str, message: str, error: Exception | None = None, **facts: object) -> str:
    logger = logging.getLogger("foretoken.test_log_lines")
    info = None
    if error is not None:
        try:
            raise error
        except type(error):
            info = sys.exc_info()
    record = logger.makeRecord(
        "foretoken", 40, "x.py", 1, message, (), info, None, {"facts": facts}
    )
    return LineFormatter(kind).format(record)


def test_an_error_of_the_engine_is_one_line_with_its_place() -> None:
    shown = line("text", "a step failed; requests a, b end", RuntimeError("sizes\n(3) and (4)"))
    assert len(shown.splitlines()) == 1
    assert "requests a, b end: RuntimeError: sizes (3) and (4) [test_log_lines.py:" in shown
    assert "Traceback" not in shown
    whole = json.loads(line("json", "a step failed", RuntimeError("sizes")))
    assert "Traceback" in whole["exception"] and whole["message"] == "a step failed"


def test_at_debug_the_traceback_follows() -> None:
    logger = logging.getLogger("foretoken")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        first, *rest = line("text", "a step failed", RuntimeError("sizes")).splitlines()
    finally:
        logger.setLevel(level)
    assert "sizes" in first and "Traceback" in rest[0]


def test_a_mistake_of_a_user_is_only_its_words() -> None:
    error: ForetokenError = PromptError("prompt", "", "at least one token")
    shown = line("text", "refused", error)
    assert shown.endswith("refused: prompt: got ''; allowed: at least one token")


def test_numbers_are_short() -> None:
    shown = line("text", "ended", queued_ms=milliseconds(0.009934337999766285), tokens=20, id="a")
    assert shown.endswith("ended queued_ms=9.93 tokens=20 id=a")
