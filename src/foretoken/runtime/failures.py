"""What is said when the output of one request cannot be made: that request ends, the others go on.

An error here is a bug of ours or of a library. It is logged once with its traceback; what the
request is told names it on one line. Knows neither requests nor streams.
"""

import logging

logger = logging.getLogger("foretoken")


def say_failure(request_id: str, error: Exception) -> str:
    """Log `error` and put it into words for the output of the request."""
    text = f"its output could not be made ({type(error).__name__}: {error})"
    logger.error("request %s ends: %s", request_id, text, exc_info=error)
    return text
