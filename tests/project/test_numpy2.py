"""tests/numpy2: MXNet's own tests with two releases of numpy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from numpy2 import run

_TESTS = """
import os
import sys
import numpy as np
import unittest
from nose.tools import assert_raises, make_decorator, raises

def doubled(test):
    @make_decorator(test)
    def both(*args):
        test(1)
        test(2)
    return both

@doubled
def test_passes(number):
    assert np.product([number, 2]) == np.float(2 * number) and np.int is int

@raises(KeyError, ValueError)
def test_raises():
    assert_raises(KeyError, dict().__getitem__, 1)
    int("a")

@raises(KeyError)
def test_raises_nothing():
    pass

def test_crashes():
    os._exit(3)

@unittest.skip("a reason")
def test_skipped():
    pass

def test_goes_on():
    assert sum(np.random.rand(3)) == sum(np.random.RandomState(1).rand(3))
"""


def _write(path: Path, *lines: tuple[str, str]) -> dict:
    path.write_text("".join(json.dumps({"test": test, "outcome": out, "text": "E 1"}) + "\n" for test, out in lines))
    return run.read_outcomes(path)


def test_what_passes_with_the_old_numpy_alone_is_told(tmp_path, capsys):
    names = ("both", "fails", "crashes", "by its code", "is not run", "skipped", "neither")
    both, fails, crashes, own, missing, skipped, neither = (f"test_a.py::{name}" for name in names)
    started = ((test, "started") for test in (both, fails, crashes))
    old = [*started, *((test, "passed") for test in (both, fails, crashes, own, missing, skipped)), (neither, "failed")]
    new = [(both, "passed"), (fails, "failed"), (crashes, "started"), (own, "failed"), (skipped, "skipped")]
    new += [(neither, "started"), (neither, "failed"), ("test_b.py::new", "passed")]
    outcomes = [_write(tmp_path / "old", *old), _write(tmp_path / "new", *new)]
    assert outcomes[1][crashes][0] == "crashed" and outcomes[1][neither][0] == "failed"
    assert run.read_outcomes(tmp_path / "none") == {}
    assert run.read_own_code("# words\n\na.py::b divides by an int\n") == {"a.py::b": "divides by an int"}
    assert run.report(*outcomes, {own: "a reason"}) == sorted([fails, crashes, missing, skipped])
    printed = capsys.readouterr().out
    assert "| test_a.py | 1 | 5 | 0 | 1 |" in printed and "| test_b.py | 0 | 0 | 1 | 0 |" in printed
    assert f"FAILED {crashes}: passed with numpy 1.23, crashed with the newest. E 1" in printed
    assert f"FAILED {missing}: passed with numpy 1.23, not run with the newest." in printed
    assert f"By its own code, {own}: a reason" in printed


def test_the_list_of_tests_with_code_of_their_own_names_tests():
    listed = run.read_own_code(run._OWN_CODE.read_text())
    assert all(test.partition("::")[0] in run.FILES and reason for test, reason in listed.items())


@pytest.mark.timeout(170)
def test_old_tests_run_and_a_crash_ends_one_test_only(tmp_path, monkeypatch):
    """They import nose and numpy's old names, and each begins with the same random values."""
    folder = tmp_path / "checkout/tests/python/unittest"
    folder.mkdir(parents=True)
    (folder / "test_old.py").write_text(_TESTS)
    monkeypatch.setattr(run, "_FILE_TIMEOUT", 150.0)
    found = run._run(Path(sys.executable), tmp_path / "checkout", ["test_old.py"], tmp_path / "run")
    assert {test.partition("::")[2]: outcome for test, (outcome, _) in found.items()} == {
        "test_passes": "passed",
        "test_raises": "passed",
        "test_raises_nothing": "failed",
        "test_crashes": "crashed",
        "test_skipped": "skipped",
        "test_goes_on": "passed",
    }, (tmp_path / "run/test_old.py.log").read_text()
