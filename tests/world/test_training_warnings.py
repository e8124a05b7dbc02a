"""Warnings about wrong training reach the terminal, once."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from kvstore_plugin.world import training_warnings

_TEXT = "Each of the %d workers trains alone."


@pytest.fixture
def logger(monkeypatch):
    """A logger without the handlers of pytest, as in a program."""
    logger = logging.Logger("kvstore_plugin", logging.WARNING)
    monkeypatch.setattr(training_warnings, "_log", logger)
    monkeypatch.setattr(training_warnings, "_told", set())
    return logger


def test_a_warning_is_written_to_stderr_once_where_logging_goes_to_a_file(logger, tmp_path, capfd):
    file = logging.FileHandler(tmp_path / "log")
    logger.addHandler(file)
    for _ in range(2):
        training_warnings.warn(_TEXT, 2)
    file.close()
    assert (tmp_path / "log").read_text().count("Each of the 2 workers trains alone.") == 2
    assert capfd.readouterr().err.count("Each of the 2 workers trains alone.\n") == 1


class _Own(logging.Handler):
    """A handler of another library, which may show messages."""

    def emit(self, record):
        pass


@pytest.mark.parametrize("kind", ["none", "stderr", "stdout", "own"])
def test_it_appears_in_one_form_where_logging_shows_it(logger, capfd, kind):
    streams = {"stderr": sys.stderr, "stdout": sys.stdout}
    if kind != "none":
        logger.addHandler(_Own() if kind == "own" else logging.StreamHandler(streams[kind]))
    training_warnings.warn(_TEXT, 2)
    shown = capfd.readouterr()
    assert (shown.out + shown.err).count("trains alone") == (0 if kind == "own" else 1)


@pytest.mark.parametrize("kind", ["high", "text"])
def test_a_handler_that_does_not_show_it_does_not_count(logger, capfd, kind):
    handler = logging.StreamHandler(sys.stderr if kind == "high" else io.StringIO())
    handler.setLevel(logging.ERROR if kind == "high" else logging.NOTSET)
    logger.addHandler(handler)
    training_warnings.warn(_TEXT, 2)
    assert capfd.readouterr().err.count("trains alone") == 1
    logger.setLevel(logging.ERROR)  # the program wants no warnings
    logger._cache.clear()  # which logging does for loggers that it knows
    training_warnings.warn(_TEXT, 3)
    assert "3 workers" not in capfd.readouterr().err
