"""Fuzz every parser for a while: ``python tests/fuzz/run.py --seconds 60``, or ``make fuzz``.

The core's parsers (csrc/testing/parsers.cpp) run under libFuzzer with the address and undefined-behaviour sanitizers,
which needs clang; those in Python (parsers.py) run under atheris. Inputs that reach something new are kept in --work
from run to run; with --keep they are merged into the corpus (corpus.py), which the ordinary tests replay. An input that
a parser does not bear ends its run with an error, and its file is named.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "build_backend"), str(HERE.parent)]

from fuzz import corpus  # noqa: E402

# What the parsers need of the core: neither MPI nor Python.
SOURCES = [
    "testing/parsers.cpp",
    "base/text.cpp",
    "compress",
    "kernels/dtype.cpp",
    "agreement/messages.cpp",
    "world/door.cpp",
]
FLAGS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
MOST_BYTES = {"call": 64, "answer": 512, "question": 512, "news": 1024, "settings": 256, "versions": 256}


def main() -> int:
    """Run what was asked for; the exit code is that of a process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for each parser")
    parser.add_argument("--runs", type=int, default=-1, help="inputs for each parser, if that takes less time")
    parser.add_argument("--only", nargs="*", help="some parsers by their names")
    parser.add_argument("--work", type=Path, default=ROOT / "build/fuzz", help="for what was built and found")
    parser.add_argument("--keep", action="store_true", help="merge what was found into the corpus of the tests")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    total = failed = 0
    for name, command in commands(chosen.work, chosen.only).items():
        inputs, failure = fuzz(name, command, chosen)
        total += inputs
        failed += bool(failure)
    print(f"{total} inputs in all, {failed} parsers failed")
    return 1 if failed else 0


def names() -> tuple[list[str], list[str]]:
    """The parsers of the core, and those in Python."""
    every = corpus.parsers()
    core = [name for name in every if f'{{"{name}", ' in (ROOT / "csrc/testing/parsers.cpp").read_text()]
    return core, [name for name in every if name not in core]


def commands(work: Path, only: list[str] | None) -> dict[str, list[str]]:
    """For each parser what runs its fuzzer."""
    found = {}
    core, in_python = names()
    wanted = [name for name in sorted(core + in_python) if not only or name in only]
    if set(core) & set(wanted):
        library = compile_core(work, compiler(), [*FLAGS, "-fsanitize=fuzzer-no-link"])
    for name in wanted:
        if name in core:
            found[name] = [str(link(work, name, library))]
        else:
            found[name] = [sys.executable, str(HERE / "fuzz_python.py"), name]
    return found


def compiler() -> str:
    """Clang."""
    names = [os.environ.get("CXX", ""), "clang++", *(f"clang++-{version}" for version in range(22, 11, -1))]
    for name in names:
        if "clang" in name and shutil.which(name):
            return name
    raise SystemExit("fuzzing the core needs clang (on Debian: apt-get install clang-14 libclang-rt-14-dev)")


def compile_core(work: Path, cxx: str, flags: list[str]) -> Path:
    """The library that all fuzzers are linked from."""
    from mykv_build import compile_target

    sources = [path for name in SOURCES for path in sorted((ROOT / "csrc" / name).glob("*.cpp")) or [f"csrc/{name}"]]
    return compile_target(work / "objects", "part", [cxx], flags, MYKV_PART=sources)


def link(work: Path, name: str, library: Path) -> Path:
    """The fuzzer of one of the core's parsers."""
    target = work / f"fuzz-{name}"
    more = ["-fsanitize=fuzzer", f'-DMYKV_PARSER="{name}"', f"-I{ROOT}/csrc", str(HERE / "fuzz.cpp"), str(library)]
    subprocess.run([compiler(), "-std=c++17", "-pthread", *FLAGS, *more, "-o", str(target)], check=True)
    return target


def fuzz(name: str, command: list[str], chosen: argparse.Namespace) -> tuple[int, str]:
    """How many inputs a parser was given, and what the fuzzer said if it failed."""
    found, crashes = chosen.work / f"found-{name}", chosen.work / f"crashes-{name}"
    for path in (found, crashes):
        path.mkdir(exist_ok=True)
    options = [
        "-print_final_stats=1",
        f"-artifact_prefix={crashes}/",
        "-timeout=10",
        "-rss_limit_mb=3000",
        "-verbosity=0",
    ]
    options += [f"-max_len={MOST_BYTES.get(name, 4096)}"]
    limits = [f"-max_total_time={max(1, round(chosen.seconds))}", f"-runs={chosen.runs}"]
    command = [*command, *options]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # one fuzzer, one core
    with tempfile.TemporaryDirectory() as unpacked:
        for file, data in corpus.read(name).items():
            Path(unpacked, file).write_bytes(data)
        ran = subprocess.run(
            [*command, *limits, str(found), unpacked], capture_output=True, text=True, errors="replace", env=environment
        )
        count = re.search(r"number_of_executed_units:\s*(\d+)|Done (\d+) runs", ran.stderr)
        inputs = int(count.group(1) or count.group(2)) if count else 0
        print(f"{name}: {inputs} inputs, exit code {ran.returncode}", flush=True)
        if ran.returncode:
            print(ran.stderr[-6000:])
            return inputs, ran.stderr[-6000:] or f"exit code {ran.returncode}"
        if chosen.keep:
            merge = [*command, "-merge=1", unpacked, str(found)]
            subprocess.run(merge, check=True, capture_output=True, env=environment)
            new = corpus.add(name, [path.read_bytes() for path in Path(unpacked).iterdir()])
            print(f"{name}: {new} inputs added to the corpus", flush=True)
    return inputs, ""


if __name__ == "__main__":
    sys.exit(main())
