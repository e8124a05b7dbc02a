"""Installs the harness for tests of several ranks (tests/harness)."""

import sys
from pathlib import Path

import pytest

# For `harness` and `compiled`: pytest's import mode here leaves sys.path alone.
sys.path.insert(0, str(Path(__file__).parent))

from harness import pytest_configure  # noqa: F401

# What may come out differently on another machine, for machines.py: because of its instructions and threads, and of
# what a process may do there.
_MARKS = {
    "numeric": (
        "amp",
        "equivalence",
        "everyday",
        "gradient_compression",
        "distributed_optimizer",
        "sharded_optimizer",
        "sync_batch_norm",
    ),
    "rights": ("launch_checks", "memory", "namespaces", "network", "process", "region", "security"),
}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark all tests of some files."""
    for item in items:
        for mark, names in _MARKS.items():
            if item.path.stem in [f"test_{name}" for name in names]:
                item.add_marker(mark)


@pytest.fixture(autouse=True)
def _no_error_is_left_in_the_engine():
    """Fail a test in which an operation failed that nobody read; a test that wants one calls support.clear_errors()."""
    yield
    if "mxnet" in sys.modules:
        sys.modules["mxnet"].nd.waitall()
