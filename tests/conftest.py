"""What all tests share: devices that may be missing, and a quiet, repeatable hypothesis."""

import os

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


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests for a GPU where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
