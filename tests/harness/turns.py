"""Several processes of pytest at the same time (pytest-xdist), and tests that run undisturbed.

A test marked ``alone`` begins when no worker runs a test, and no worker begins a test before it has ended. Workers
coordinate through locks on two files. Without pytest-xdist nothing waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import Iterator

import pytest

_INPUT = "harness-turns"  # key of the folder in pytest-xdist's input for workers


class Turns:
    """Plugin of the process in which the user called pytest, and of the workers that pytest-xdist starts from it."""

    def __init__(self, config: pytest.Config) -> None:
        given = getattr(config, "workerinput", None)  # None in all processes but workers
        self._is_worker = given is not None
        self._folder = Path(given[_INPUT]) if self._is_worker else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        """Called by pytest-xdist before it starts a worker."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="mykv-tests-"))
        node.workerinput[_INPUT] = str(self._folder)

    def pytest_unconfigure(self) -> None:
        if not self._is_worker and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)  # outside of pytest-timeout, which counts the seconds of a test
    def pytest_runtest_protocol(self, item: pytest.Item):
        with contextlib.ExitStack() as held:
            if self._is_worker:
                held.enter_context(self._turn(item.get_closest_marker("alone") is not None))
            yield

    @contextlib.contextmanager
    def _turn(self, is_alone: bool) -> Iterator[None]:
        # A waiting test holds the gate's lock, so no other test overtakes it.
        with (self._folder / "room").open("w") as room:
            with (self._folder / "gate").open("w") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
            yield
