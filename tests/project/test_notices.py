"""A notice is seen once, whatever logging a program has set up, and when."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hdet.notices import tell

LOGGER = logging.getLogger("hdet")


@contextmanager
def without_logging() -> Iterator[None]:
    """As in a program that has not set it up; pytest has, for the length of each test."""
    kept = [(logger, logger.handlers, logger.level) for logger in (logging.root, LOGGER)]
    logging.root.handlers, LOGGER.handlers = [], []
    LOGGER.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        for logger, handlers, level in kept:
            logger.handlers = handlers
            logger.setLevel(level)


def test_without_logging_it_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with without_logging():
        tell("one")
        tell("two")
        assert not LOGGER.handlers
    assert capsys.readouterr() == ("", "hdet: one\nhdet: two\n")


def test_logging_that_is_set_up_before_says_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with without_logging():
        logging.basicConfig(format="mine: %(message)s")
        tell("one")
    assert capsys.readouterr() == ("", "mine: one\n")


def test_logging_that_is_set_up_later_says_it_alone_from_then_on(capsys: pytest.CaptureFixture[str]) -> None:
    with without_logging():
        tell("one")
        logging.basicConfig(format="mine: %(message)s")
        tell("two")
    assert capsys.readouterr() == ("", "hdet: one\nmine: two\n")


def test_a_level_silences_it(capsys: pytest.CaptureFixture[str]) -> None:
    with without_logging():
        LOGGER.setLevel(logging.WARNING)
        tell("one")
    assert capsys.readouterr() == ("", "")


def test_caplog_has_it_once(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level("INFO", logger="hdet"):
        tell("one")
    assert [(record.name, record.message) for record in caplog.records] == [("hdet", "one")]
    assert capsys.readouterr() == ("", "")
