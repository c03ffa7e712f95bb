"""Who sees Foretoken's log lines: a library is quiet, a server speaks, and a variable decides.

Everything goes to the logger "foretoken". Nothing is set up for a program that uses the library, so
that Python's own rule holds: warnings go to stderr, the rest is for those who configure `logging`.
FORETOKEN_LOGGING_LEVEL turns the lines on without code. Owns only the handler of that logger.
"""

import logging
import os

from foretoken.errors import ConfigError

LEVEL_VARIABLE = "FORETOKEN_LOGGING_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def chosen_level() -> str | None:
    """The level that FORETOKEN_LOGGING_LEVEL names; None where it is not set. Raises ConfigError:
    it is no level."""
    level = os.environ.get(LEVEL_VARIABLE, "").upper()
    if level and level not in _LEVELS:
        raise ConfigError(LEVEL_VARIABLE, level, ", ".join(_LEVELS))
    return level or None


def show_logs(formatter: logging.Formatter | None = None, *, wanted: bool = True) -> None:
    """Print the "foretoken" logger to stderr, unless the program handles its logs itself.

    Args:
        formatter: if given, lines are printed in any case, and only so.
        wanted: False: only where FORETOKEN_LOGGING_LEVEL is set. Its level is the one shown, INFO
            by default.

    Raises:
        ConfigError: FORETOKEN_LOGGING_LEVEL is no level.
    """
    level = chosen_level()
    logger = logging.getLogger("foretoken")
    if not wanted and level is None:
        return
    if formatter is None and logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S")
    handler.setFormatter(formatter or plain)
    logger.handlers[:] = [handler]
    logger.setLevel(level or "INFO")
    logger.propagate = False
