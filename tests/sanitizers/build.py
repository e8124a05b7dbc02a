"""Builds the core with a sanitizer: ``python build.py thread|address`` makes build/sanitize/<it>/ranks.

``ranks`` is the C++ program beside this file, whose ranks are threads of one process. With ``address``, and
with it UndefinedBehaviorSanitizer, the extension module is made too, and goes into the environment of this Python.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("tests/sanitizers")
sys.path.insert(0, str(ROOT / "build_backend"))

from mykv_build import compile_target, cxx_compiler, find_mpi  # noqa: E402

_COMMON = ["-O1", "-g", "-fno-omit-frame-pointer"]
SANITIZERS = {
    # The compiler warns that ThreadSanitizer does not see fences. Nothing relies on a fence but the log of the host's
    # table (csrc/table/event_log.h), whose cells are atomic.
    "thread": [*_COMMON, "-fsanitize=thread", "-Wno-tsan"],
    "address": [*_COMMON, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}
# What needs Python; the rest is the core without it.
_OF_PYTHON = ("csrc/module.cpp", "csrc/python/", "csrc/mxnet/", "csrc/testing/")


def folder(sanitizer: str) -> Path:
    """Where everything of this sanitizer lies, as seen from the root of the tree."""
    return Path("build/sanitize") / sanitizer


def build_module() -> None:
    """The extension modules with AddressSanitizer: the core in the environment of this Python, and that for tests."""
    flags = " ".join(SANITIZERS["address"])
    objects = ["--build-temp", str(folder("address") / "module")]
    command = [sys.executable, "setup.py", "-q", "build_ext", *objects, "--build-lib", sysconfig.get_path("platlib")]
    command += ["build_testing", *objects]
    subprocess.run(command, check=True, env={**os.environ, "CXXFLAGS": flags, "MYKV_WERROR": "1"}, stdout=sys.stderr)


def build_ranks(sanitizer: str) -> Path:
    """The program `ranks`; returns its path."""
    mpi, cxx, flags = find_mpi(), cxx_compiler(), SANITIZERS[sanitizer]
    core = [path for path in Path("csrc").rglob("*.cpp") if not str(path).startswith(_OF_PYTHON)]
    library = compile_target(
        *(folder(sanitizer) / "ranks.objects", "part", cxx, ["-Werror", *flags, *mpi.compile_flags]),
        MYKV_INCLUDES=[HERE],
        MYKV_PART=sorted([*core, *HERE.glob("*.cpp")]),
        # The files of single instruction sets take minutes, and the generic loops do the same.
        MYKV_SIMD="OFF",
    )
    program = folder(sanitizer) / "ranks"
    without_mpi = _no_mpi(library, folder(sanitizer) / "no_mpi.c")
    whole = ["-Wl,--whole-archive", str(library), "-Wl,--no-whole-archive", "-xc", str(without_mpi)]
    subprocess.run([*cxx, *flags, "-pthread", *whole, "-o", str(program)], check=True)
    return program


def _no_mpi(library: Path, source: Path) -> Path:
    """Writes a C file with all MPI functions that the library uses; a call of any of them ends the program.

    The ranks of one host call nothing of it. With a real MPI its hooks into malloc and mmap would run in threads that
    ThreadSanitizer has not begun to watch, or not any more, and crash it.
    """
    wanted = subprocess.run(["nm", "-u", str(library)], check=True, capture_output=True, text=True).stdout
    names = sorted(set(re.findall(r"^ +U ((?:MPI|PMPI|ompi|mpi)_\w+)$", wanted, re.MULTILINE)))
    source.write_text("void abort(void);\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names))
    return source


if __name__ == "__main__":
    os.chdir(ROOT)
    folder(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    if sys.argv[1] == "address":
        build_module()
    build_ranks(sys.argv[1])
