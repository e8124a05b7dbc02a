"""A plugin of pytest for MXNet's own tests: writes each outcome at once, and gives tests numpy's old names.

MYKV_TEST_OUTCOMES names the file. Tests that are in it already, since a process before crashed, are not run again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

_OUTCOMES = Path(os.environ["MYKV_TEST_OUTCOMES"])


def _write(test: str, outcome: str, text: str = "") -> None:
    with _OUTCOMES.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "text": text[-1500:]}) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """MXNet's tests say np.float and np.bool: their modules get the numpy that MXNet's modules get."""
    _keep_chisquare()
    try:
        from mykvrun import numpy_for_mxnet
    except ImportError:  # the environment with the old numpy
        return
    folder = config.rootpath

    class OfTests:
        """Finds the modules in the folder of the tests."""

        def __init__(self) -> None:
            self._of_mxnet = numpy_for_mxnet._Finder()

        def find_spec(self, name, path=None, target=None):
            if not (folder / f"{name}.py").exists():
                return None
            spec = numpy_for_mxnet.found_by_others(self, name, path, target)
            if spec is not None:
                spec.loader = numpy_for_mxnet._Loader(spec.loader, self._of_mxnet)
            return spec

    sys.meta_path.insert(0, OfTests())


def _keep_chisquare() -> None:
    """Sums may differ by rounding, as when MXNet's tests were written: scipy has become strict in both environments."""
    import functools
    import inspect

    from scipy import stats

    if "sum_check" in inspect.signature(stats.chisquare).parameters:
        stats.chisquare = functools.partial(stats.chisquare, sum_check=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what an earlier process has run."""
    seen = {json.loads(line)["test"] for line in _OUTCOMES.read_text().splitlines()} if _OUTCOMES.exists() else ()
    items[:] = [item for item in items if item.nodeid not in seen]


def pytest_runtest_setup() -> None:
    """The same random values in both environments, also for tests that MXNet's with_seed does not seed."""
    import random

    import mxnet as mx
    import numpy as np

    for seed in (random.seed, np.random.seed, mx.random.seed):
        seed(1)


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test after which nothing else is written has crashed."""
    _write(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The outcome of the test, or of its setup or teardown if that failed or skipped it."""
    if report.when == "call" or not report.passed:
        outcome = "expected to fail" if hasattr(report, "wasxfail") else report.outcome
        _write(report.nodeid, outcome, "" if report.passed else str(report.longrepr))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported."""
    if report.failed:
        _write(report.nodeid, "not imported", str(report.longrepr))
