"""What all tests share: few threads, and a quiet, repeatable hypothesis."""

import gc
import os
import ssl
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models gain nothing from a second thread, and OpenMP's spinning threads stall on a busy
# machine (benchmarks/LOG.md). What depends on the number of threads sets it itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Engines begin with what a data sheet says of their steps, instead of timing them.
os.environ.setdefault("FORETOKEN_TIMING_SECONDS", "0")

settings.register_profile(
    "quick",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "full", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_finish() -> None:
    """What has been imported stays: no search for garbage looks at these million objects again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Each HTTP client would read a few hundred, for longer than most tests take; none uses one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield
