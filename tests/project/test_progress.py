"""Progress bars of long work: only in terminals, and no installation needs tqdm."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from harness.marks import long

ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 120.0  # seconds
_SCRIPT = """
import sys
from mykvrun.progress import Progress
with Progress(4, "work", "turn") as progress:
    progress.advance()
    progress.tell("now")
    progress.write("a line")
    progress.reach(3)
print("after", file=sys.stderr)
"""
_BENCHMARK = """
from types import SimpleNamespace
from benchmarks import runner
runner.launch = lambda *_: {}
item = runner.Item(SimpleNamespace(peer="p", name="n", title="title"), 2, [])
runner.run([item], SimpleNamespace(add=lambda *_: None, failures=[]), 2)
"""
_TORTURE = """
import sys
import torture.__main__ as main
from torture.tally import Tally
sys.modules["short"] = main
main.TARGETS = {"short": "short"}
def run(budget):
    tally = Tally()
    while budget.allows(tally):
        tally.add(None)
    return tally
main.run = run
main.main(["--minutes", "0.05", "--most", "3"])
"""
_WHEELS = """
import sys
sys.path.insert(0, "tests/wheels")
import run
run.Trial.install = lambda self: self.progress.tell("install")
run.Trial.check = run.Trial.uninstall = lambda self: None
sys.argv[1:] = ["mykv-1-cp311-none.whl", "--mpi", "openmpi"]
run._bare_path = lambda: run._WORK
run.main()
"""
_SELFTEST = "import runpy; runpy.run_module('kvstore_plugin.selftest', run_name='__main__')"
_PROGRAMS = {"work": _SCRIPT, "launches": _BENCHMARK, "short": _TORTURE, "wheels": _WHEELS, "self-test": _SELFTEST}
_LONG = ["work", "launches", "wheels", "self-test"]  # left out of `make test`


def _run(script: str, terminal: bool, path: Path | None = None) -> str:
    """A program's output on stderr, which may be a terminal."""
    places = [*([path] if path else []), ROOT / "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    # From the root, `benchmarks` is found; -P is not in Python 3.8, so the installed package is put first.
    code = f"import sys; sys.path.remove(''); import kvstore_plugin, mykvrun; sys.path.append('')\n{script}"
    command = [sys.executable, "-c", code]
    if not terminal:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT)
        assert done.returncode == 0, done.stderr
        return done.stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 200, 0, 0))
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    read = b""
    try:
        while True:
            read += os.read(ours, 4096)
    except OSError:  # the program has ended
        pass
    finally:
        os.close(ours)
    assert process.wait(_LIMIT) == 0, read.decode()
    return read.decode()


@pytest.mark.parametrize("what", [long(name) if name in _LONG else name for name in _PROGRAMS])
def test_long_work_shows_a_bar_on_a_terminal_and_nothing_elsewhere(what):
    pytest.importorskip("tqdm")
    shown = _run(_PROGRAMS[what], terminal=True)
    assert f"{what}: " in shown and "%|" in shown, shown
    plain = _run(_PROGRAMS[what], terminal=False)
    assert "%|" not in plain and "\r" not in plain, plain


def test_lines_are_printed_beside_the_bar(tmp_path):
    assert _run(_SCRIPT, terminal=False) == "a line\nafter\n"
    (tmp_path / "tqdm.py").write_text("raise ImportError('not installed')")
    assert _run(_SCRIPT, terminal=True, path=tmp_path) == "a line\r\nafter\r\n"
