"""A copy of the tree, in which a fault is planted, built, and looked for by the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Collection, NamedTuple

from harness import launcher
from harness.processes import Launch

from .coverage import tests_of
from .fault import Fault

_BUILD_S = 1800.0
_LIMIT_S = 1800.0  # of the tests of a file; each of them has its own, which is much shorter
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
# What a test says whose ranks, program or own steps did not end in time.
_HUNG = re.compile(r"did not end within|did not finish|Timeout (?:>|\()|TimeoutExpired|timed out")


class Outcome(NamedTuple):
    """What became of a fault.

    Attributes
    ----------
    what : str
        'noticed', 'hang', 'not noticed', or 'not built'.
    by : str
        The first test that failed.
    seconds : float
    """

    what: str
    by: str
    seconds: float


class Tree:
    """A copy of the working tree with what has been built of it; goes with the ``with`` block.

    Parameters
    ----------
    root : Path
        The working tree, which is only read.
    """

    def __init__(self, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="mykv-faults-"))
        listed = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        files = subprocess.run(listed, capture_output=True, check=True, text=True).stdout.split("\0")
        for name in filter(None, files):
            if (root / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)
        for built in ["build", *(f"kvstore_plugin/{one.name}" for one in root.glob("kvstore_plugin/_core*.so"))]:
            if (root / built).is_dir():
                shutil.copytree(root / built, self.path / built)
            elif (root / built).exists():
                shutil.copy2(root / built, self.path / built)
        self._good: set[str] = set()  # tests that pass without a fault
        self._bad: set[str] = set()  # tests that do not

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def source(self, file: str) -> str:
        """Text of a file."""
        return (self.path / file).read_text()

    def build(self) -> str:
        """Build the core as far as it has changed; what the compiler said if it cannot."""
        command = [sys.executable, "setup.py", "build_ext", "--inplace", "build_testing"]
        env = {**os.environ, "MYKV_WERROR": ""}
        try:
            done = subprocess.run(command, cwd=self.path, env=env, capture_output=True, text=True, timeout=_BUILD_S)
        except subprocess.TimeoutExpired:
            return f"it took more than {_BUILD_S:.0f} s"
        return "" if done.returncode == 0 else done.stderr[-2000:] or "it failed"

    def try_one(self, fault: Fault) -> Outcome:
        """Plant a fault, run the tests of its file until one fails that does not without it, and take it out again."""
        path, source = self.path / fault.file, self.source(fault.file)
        is_built = fault.file.endswith(".cpp")
        chance: set[str] = set()  # tests that failed with the fault, and then passed with it
        while True:
            path.write_text(fault.planted(source))
            try:
                if is_built and self.build():
                    return Outcome("not built", "", 0.0)
                code, text, seconds = self._run(tests_of(fault.file), chance)
                by = (_FAILED.findall(text) or [""])[0]
                is_hang = code is None or _HUNG.search(text) is not None
                # Other work on the machine makes a test late too: a test that was late has to fail twice.
                if by and is_hang and self._run([by])[0] == 0:
                    chance.add(by)
                    continue
            finally:
                path.write_text(source)
            if code == 0:
                return Outcome("not noticed", "", seconds)
            if code is None or self._passes_without(by, is_built):
                return Outcome("hang" if is_hang else "noticed", by, seconds)
            self._bad.add(by)

    def _passes_without(self, test: str, is_built: bool) -> bool:
        """Whether a test that failed passes without a fault; '' are all tests, which are then only collected."""
        if test not in self._good:
            if is_built:
                self.build()
            code, text, _ = self._run([test] if test else ["--collect-only", "tests"])
            if code != 0 and not test:
                raise RuntimeError(f"The tests cannot be collected:\n{text[-3000:]}")
            if code != 0:
                print(f"fails without a fault, and is left out: {test}", flush=True)
                return False
            self._good.add(test)
        return True

    def _run(self, tests: list[str], without: Collection[str] = ()) -> tuple[int | None, str, float]:
        """Exit code of pytest (None where it did not end), its output, and the seconds that it took."""
        left_out = [f"--deselect={name}" for name in [*self._bad, *without]]
        options = ["-x", "-q", "-m", "not long", "-p", "no:cacheprovider", "-W", "ignore"]
        command = [sys.executable, "-m", "pytest", *tests, *left_out, *options]
        with tempfile.TemporaryDirectory(prefix="mykv-fault-") as directory:
            variables = {"PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": directory}
            env = {**launcher.environment(Path(directory)), **variables}
            begin = time.monotonic()
            output = Path(directory) / "output"
            with output.open("wb") as written:
                launch = Launch(command, env, written, subprocess.STDOUT, str(self.path))
                try:
                    code: int | None = launch.process.wait(_LIMIT_S)
                except subprocess.TimeoutExpired:
                    code = None
                launch.kill()
            return code, output.read_text(errors="replace"), time.monotonic() - begin
