"""Makes Foretoken's log lines visible to people who have set up no logging of their own.

One line when a model is ready (types, KV memory, concurrency) and, if asked for, one every ten
seconds. Owns only the handler of the "foretoken" logger.
"""

import logging
import os

from foretoken.errors import ConfigError

LEVEL_VARIABLE = "FORETOKEN_LOGGING_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def show_logs(formatter: logging.Formatter | None = None) -> None:
    """Print the "foretoken" logger to stderr, unless the program handles its logs itself.

    With a `formatter` it is printed in any case, and only so. The level is that of
    FORETOKEN_LOGGING_LEVEL, INFO by default.

    Raises:
        ConfigError: FORETOKEN_LOGGING_LEVEL is no level.
    """
    level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if level not in _LEVELS:
        raise ConfigError(LEVEL_VARIABLE, level, ", ".join(_LEVELS))
    logger = logging.getLogger("foretoken")
    if formatter is None and logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S")
    handler.setFormatter(formatter or plain)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
