"""Tiny models that the end-to-end tests share."""

from pathlib import Path

import pytest

from foretoken.testing import write_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target."""
    return write_tiny_llama(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own weights with one layer less: agrees sometimes."""
    return write_tiny_llama(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)
