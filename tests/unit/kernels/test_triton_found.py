"""Where Triton kernels may run. The guarded bugs: a GPU that cannot run them, or a machine that
cannot build their launcher, is given them; `off` is not heeded."""

import importlib.util
import logging

import pytest
import torch

from foretoken.kernels import build, triton_found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine where everything is there; nothing is remembered from test to test."""
    monkeypatch.delenv("FORETOKEN_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or None)
    monkeypatch.setattr(build, "compiler", lambda: "cc")
    monkeypatch.setattr(triton_found, "has_triton", triton_found.has_triton.__wrapped__)
    monkeypatch.setattr(triton_found, "say_which", triton_found.say_which.__wrapped__)
    return monkeypatch


def test_all_is_there(gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert triton_found.has_triton()
    with caplog.at_level(logging.INFO, "foretoken"):
        triton_found.say_which()
    assert "by Triton kernels" in caplog.text and "no time" in caplog.text


@pytest.mark.parametrize("lacking", ["off", "no triton", "8.0", "C compiler"])
def test_something_is_missing(
    lacking: str, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler() -> str:
        raise build.BuildError("none")

    if lacking == "off":
        gpu.setenv("FORETOKEN_KERNELS", "off")
    elif lacking == "no triton":
        gpu.setattr(importlib.util, "find_spec", lambda name: None)
    elif lacking == "8.0":
        gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    else:
        gpu.setattr(build, "compiler", no_compiler)
    assert not triton_found.has_triton()
    with caplog.at_level(logging.INFO, "foretoken"):
        triton_found.say_which()
    assert "multiplied out" in caplog.text and lacking in caplog.text


def test_no_gpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert not triton_found.has_triton()
