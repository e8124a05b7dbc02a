"""Installs the harness for tests of several ranks (tests/harness)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `harness`: pytest's import mode here leaves sys.path alone

from harness import pytest_configure  # noqa: F401


@pytest.fixture(autouse=True)
def _no_error_is_left_in_the_engine():
    """Fail a test in which an operation failed that nobody read; a test that wants one calls support.clear_errors()."""
    yield
    if "mxnet" in sys.modules:
        sys.modules["mxnet"].nd.waitall()
