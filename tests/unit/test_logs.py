"""A library is quiet: who asks sees its lines, nobody else does."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from foretoken.engine.logs import LEVEL_VARIABLE, show_logs
from foretoken.errors import ConfigError
from foretoken.llm import _progress


@contextmanager
def fresh_program() -> Iterator[logging.Logger]:
    """The library's logger where nothing is set up, not even pytest's handlers."""
    logger = logging.getLogger("foretoken")
    kept = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [], False
    logger.setLevel(logging.NOTSET)
    try:
        yield logger
    finally:
        logger.handlers[:], logger.propagate = kept[0], kept[2]
        logger.setLevel(kept[1])


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the variable is where the tests run."""
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)


def test_nothing_is_set_up_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_program() as logger:
        show_logs(wanted=False)
        logger.info("where the memory went")
        assert logger.handlers == []
        assert logger.level == logging.NOTSET, "the program's own level decides"
    assert capsys.readouterr().err == ""


def test_the_variable_turns_lines_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "info")
    with fresh_program() as logger:
        show_logs(wanted=False)
        logger.info("where the memory went")
        logger.debug("too much")
    shown = capsys.readouterr().err
    assert shown.startswith("INFO") and "where the memory went" in shown
    assert "too much" not in shown


def test_who_asks_for_statistics_sees_them(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_program() as logger:
        show_logs(wanted=True)
        logger.info("12.0 tokens/s")
    assert "12.0 tokens/s" in capsys.readouterr().err


def test_a_program_that_handles_its_logs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "INFO")
    own = logging.NullHandler()
    with fresh_program() as logger:
        logger.addHandler(own)
        show_logs()
        assert logger.handlers == [own]


def test_a_wrong_level_says_which_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "loud")
    with fresh_program(), pytest.raises(ConfigError, match="DEBUG, INFO"):
        show_logs(wanted=False)


def test_a_short_call_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = _progress(3, shown=True)
    bar.update(3)
    bar.close()
    assert capsys.readouterr().err == ""
