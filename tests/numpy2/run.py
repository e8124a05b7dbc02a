"""Runs MXNet's own unit tests with numpy 1.23 and with the newest numpy: ``python run.py CHECKOUT [FILE...]``.

`make test-mxnet MXNET_SOURCE=CHECKOUT` makes the two environments, .venv-numpy1 without mykv and .venv-numpy2 with it,
and calls this. Tests that pass with the old numpy alone are errors, except those in own_code.txt. The tests run in a
copy of the checkout's tests/python, since MXNet's Python code beside them would be imported. What they leave is in
build/numpy2.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_WORK = _ROOT / "build" / "numpy2"
_OWN_CODE = _HERE / "own_code.txt"
_FILE_TIMEOUT = 1800.0  # seconds for one file in one environment
_TEST_TIMEOUT = 300  # seconds for one test

# What training uses. MXNet's releases have some of these files only.
FILES = (
    "test_autograd.py",
    "test_gluon.py",
    "test_gluon_rnn.py",
    "test_gluon_trainer.py",
    "test_init.py",
    "test_loss.py",
    "test_lr_scheduler.py",
    "test_metric.py",
    "test_ndarray.py",
    "test_numpy_ndarray.py",
    "test_numpy_op.py",
    "test_optimizer.py",
    "test_random.py",
)


def read_outcomes(path: Path) -> dict[str, tuple[str, str]]:
    """The outcome of each test and its text, from the lines that inside/outcomes.py has written.

    If only a test's start was written, its process crashed during the test: the outcome is "crashed".
    """
    found: dict[str, tuple[str, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        one = json.loads(line)
        outcome = "crashed" if one["outcome"] == "started" else one["outcome"]
        found[one["test"]] = (outcome, one["text"])
    return found


def compare(old: dict[str, tuple[str, str]], new: dict[str, tuple[str, str]]) -> dict[str, list[str]]:
    """The tests that pass on both, only with the old numpy, only with the new one, and on neither of them."""
    found: dict[str, list[str]] = {"both": [], "only old": [], "only new": [], "neither": []}
    for test in sorted({*old, *new}):
        passed = [outcomes.get(test, ("", ""))[0] == "passed" for outcomes in (old, new)]
        kind = ("both" if passed[1] else "only old") if passed[0] else "only new" if passed[1] else "neither"
        found[kind].append(test)
    return found


def read_own_code(text: str) -> dict[str, str]:
    """The reason for each test that fails by its own code: lines of a test and a reason."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {line.split(None, 1)[0]: line.split(None, 1)[1] for line in lines}


def report(old: dict[str, tuple[str, str]], new: dict[str, tuple[str, str]], own_code: dict[str, str]) -> list[str]:
    """Print a table of counts by file and each test that passes with the old numpy alone, and return those tests.

    Tests in `own_code` are printed but not returned.
    """
    found = compare(old, new)
    counts = {kind: collections.Counter(test.partition("::")[0] for test in tests) for kind, tests in found.items()}
    print("\n| file | passed with both | only numpy 1.23 | only the newest | neither, or skipped |")
    print("| --- | --- | --- | --- | --- |")
    for name in sorted({test.partition("::")[0] for test in {*old, *new}}):
        print(f"| {name} | {' | '.join(str(counts[kind][name]) for kind in found)} |")
    for test in found["only old"]:
        outcome, text = new.get(test, ("not run", ""))
        if test in own_code:
            print(f"\nBy its own code, {test}: {own_code[test]}")
        else:
            print(f"\nFAILED {test}: passed with numpy 1.23, {outcome} with the newest. {text}")
    return [test for test in found["only old"] if test not in own_code]


def _run_file(python: Path, directory: Path, name: str) -> None:
    """Run one file of tests, in a new process after each crash."""
    outcomes = directory / f"{name}.jsonl"
    folder = directory / "tests" / "python" / "unittest"
    env = {
        **os.environ,
        "PYTHONPATH": str(_HERE / "inside"),
        "MYKV_TEST_OUTCOMES": str(outcomes),
        "OMP_NUM_THREADS": "1",
        # The same random values in both environments.
        "MXNET_TEST_SEED": "1",
        "MXNET_MODULE_SEED": "1",
    }
    command = [python, "-m", "pytest", name, "-q", "-p", "outcomes", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", folder, "--import-mode=prepend", "--tb=short"]
    command += [f"--timeout={_TEST_TIMEOUT}", "--timeout-method=thread"]
    end = time.monotonic() + _FILE_TIMEOUT
    before = -1
    with (directory / f"{name}.log").open("w") as log:
        while time.monotonic() < end and len(read_outcomes(outcomes)) > before:
            before = len(read_outcomes(outcomes))
            try:
                done = subprocess.run(
                    command, cwd=folder, env=env, stdout=log, stderr=log, timeout=max(1.0, end - time.monotonic())
                )
            except subprocess.TimeoutExpired:
                return
            if 0 <= done.returncode <= 5 and not _crashed_last(outcomes):  # pytest ended by itself
                return


def _crashed_last(outcomes: Path) -> bool:
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    return bool(lines) and json.loads(lines[-1])["outcome"] == "started"


def _run(python: Path, source: Path, names: list[str], directory: Path) -> dict[str, tuple[str, str]]:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source / "tests" / "python", directory / "tests" / "python")
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        begun = time.monotonic()
        _run_file(python, directory, name)
        outcomes = read_outcomes(directory / f"{name}.jsonl") or {name: ("not run", "See its log.")}
        found.update(outcomes)
        counts = collections.Counter(outcome for outcome, _ in outcomes.values())
        shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        print(f"{directory.name}, {name}: {shown}, {time.monotonic() - begun:.0f} s", flush=True)
    return found


def main() -> int:
    """Run the files with both, and return the exit status: 1 where a test passes with the old numpy alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkout of MXNet, of the release that is installed")
    parser.add_argument("files", nargs="*", default=list(FILES), help="names in its tests/python/unittest")
    parser.add_argument("--old", type=Path, default=_ROOT / ".venv-numpy1/bin/python", help="Python with numpy 1.23")
    parser.add_argument("--new", type=Path, default=_ROOT / ".venv-numpy2/bin/python", help="Python with mykv")
    options = parser.parse_args()
    folder = options.source / "tests" / "python" / "unittest"
    names = [name for name in options.files if (folder / name).exists()]
    if not names:
        parser.error(f"{folder} has none of {', '.join(options.files)}")
    old = _run(options.old.absolute(), options.source, names, _WORK / "old")
    new = _run(options.new.absolute(), options.source, names, _WORK / "new")
    failed = report(old, new, read_own_code(_OWN_CODE.read_text()))
    print(f"\n{len(failed)} tests pass with numpy 1.23 alone. Logs: {_WORK}")
    return 1 if failed or not any(outcome == "passed" for outcome, _ in old.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
