"""Checks the models in docs/model with spin: ``python model.py [--all]``.

Without ``--all`` the small configurations and every planted error, in some seconds; with it the large ones too, which
take some minutes each. Where spin or a C compiler is missing it says so and ends with the status 77.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).resolve().parents[2] / "docs/model"
SKIPPED = 77

# What must hold, by the model's macros: every state is looked at.
QUICK = [
    "RANKS=2",
    "RANKS=2 SECOND=OWNED",
    "RANKS=2 FIRST=SHARED SECOND=OWNED",
    "RANKS=2 ENTRIES=2",
    "RANKS=2 LOG=2",
    "RANKS=2 OPERATIONS=1 FIRST=SHARED GIVE_UP",
    "RANKS=3 OPERATIONS=1",
    "RANKS=3 OPERATIONS=1 FIRST=SHARED",
    "RANKS=3 OPERATIONS=1 FIRST=SHARED SAME_WORKERS",
    "RANKS=3 OPERATIONS=1 FIRST=OWNED",
]
# Every state too, in minutes and up to 3 GB each.
LARGE = ["RANKS=2 GIVE_UP", "RANKS=3 OPERATIONS=1 FIRST=SHARED GIVE_UP", "RANKS=3", "RANKS=3 POSTERS=1"]
# More states than memory holds: as many as some minutes allow, by hashes of them.
SEARCHED = ["RANKS=3 FIRST=SHARED SECOND=OWNED", "RANKS=3 LOG=2", "RANKS=3 ENTRIES=2"]
# What must be found, each in a small configuration that shows it.
PLANTED = {
    "RING_BEFORE_APPEND": "RANKS=3",
    "RING_LOOKS_FIRST": "RANKS=2",
    "WAIT_WITHOUT_SEEN": "RANKS=2",
    "SEEN_AFTER_WORK": "RANKS=2",
    "CLAIM_LATE": "RANKS=2",
    "NO_GENERATION": "RANKS=2",
    "FREED_EARLY": "RANKS=2",
    "LEFT_BEFORE_COPIED": "RANKS=2",
    "COUNTED_BEFORE_WRITTEN": "RANKS=2",
    "NO_OVERRUN_CHECK": "RANKS=2 LOG=2",
    "OTHERS_ARE_WOKEN": "RANKS=3 OPERATIONS=1 FIRST=SHARED SAME_WORKERS",
}
# The same of docs/model/departures.pml.
DEPARTURES = [
    "HOSTS=2 LOCAL=1",
    "HOSTS=2 LOCAL=2 SLICES=1 GOING=1",
    "HOSTS=3 LOCAL=1 GOING=1",
]
LARGE_DEPARTURES = ["HOSTS=2 LOCAL=2 GOING=1", "HOSTS=2 LOCAL=2 SLICES=1", "HOSTS=3 LOCAL=1"]
PLANTED_DEPARTURES = {
    "NO_NOTICE": "HOSTS=2 LOCAL=1 GOING=1",
    "ENDS_ITS_OWN": "HOSTS=2 LOCAL=1 GOING=1",
    "VERDICT_FORGOTTEN": "HOSTS=2 LOCAL=2 SLICES=1 GOING=1",
    "HELD_IS_LEFT": "HOSTS=2 LOCAL=2 SLICES=1 GOING=1",
    "OWES_WHAT_IT_HOLDS": "HOSTS=2 LOCAL=2 SLICES=1 GOING=1",
    "NO_LOOK_AT_START": "HOSTS=2 LOCAL=1 GOING=1",
    "RESULT_IS_DROPPED": "HOSTS=2 LOCAL=2 SLICES=1 GOING=1",
}
# The same of docs/model/loop.pml.
LOOP = ["CHANGES=1", "CHANGES=2 CALLERS=1 TIMED", "CHANGES=1 CALLERS=1 EARLY"]
LARGE_LOOP = ["CHANGES=2"]
PLANTED_LOOP = {
    "LOOP_BEFORE_BELL": "CHANGES=2",
    "RINGS_THE_THREAD": "CALLERS=1",
    "NO_RING_AT_THE_END": "CALLERS=1",
    "RINGS_FORGOTTEN": "CALLERS=1",
    "LEAVING_FORGOTTEN": "CALLERS=1 EARLY",
    "SEEN_AFTER_ROUND": "CALLERS=1",
}


class Effort(NamedTuple):
    """How far to look."""

    flags: tuple[str, ...]
    seconds: float
    log2_table: int
    whole: bool  # all states, or the check has no answer


# COLLAPSE: states are kept compressed. BITSTATE: only bits at their hashes are kept; 33: 1 GiB of them.
SMALL = Effort(("-DCOLLAPSE", "-DMEMLIM=4000"), 120, 22, True)
LONG = Effort(("-DCOLLAPSE", "-DMEMLIM=7500"), 3600, 26, True)
SEARCH = Effort(("-DBITSTATE",), 300, 33, False)


def check(configuration: str, effort: Effort = SMALL, model: str = "protocol") -> tuple[str | None, int]:
    """What spin finds wrong, or None; and how many states it has looked at."""
    with tempfile.TemporaryDirectory(prefix="spin-") as folder:
        flags = ["-D" + word for word in configuration.split()]
        subprocess.run(
            ["spin", "-a", *flags, str(MODELS / f"{model}.pml")], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        # SAFETY: assertions and deadlocks, no cycles.
        subprocess.run(["gcc", "-w", "-O1", "-DSAFETY", *effort.flags, "-o", "pan", "pan.c"], cwd=folder, check=True)
        command = ["timeout", "-s", "INT", str(effort.seconds), "./pan", "-m100000", f"-w{effort.log2_table}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = re.search(r"^pan:\d+: (.*?)(?: \(at depth|$)", done.stdout, re.MULTILINE)
    states = re.findall(r"^ *([\d.e+]+) states, stored", done.stdout, re.MULTILINE)
    unfinished = "Search not completed" in done.stdout and effort.whole
    if not states or (unfinished and found is None):
        raise RuntimeError(f"spin gave no answer for {configuration}:\n{done.stdout}{done.stderr}")
    return found.group(1) if found else None, int(float(states[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="the large configurations too")
    arguments = parser.parse_args()
    missing = [program for program in ("spin", "gcc") if shutil.which(program) is None]
    if missing:
        print(f"the model was not checked: there is no {' and no '.join(missing)} (Debian's packages of these names)")
        return SKIPPED
    failures = 0
    jobs = [("", configuration, SMALL, "protocol") for configuration in QUICK]
    jobs += [("", configuration, SMALL, "departures") for configuration in DEPARTURES]
    jobs += [("", configuration, SMALL, "loop") for configuration in LOOP]
    jobs += [(error, configuration, SMALL, "protocol") for error, configuration in PLANTED.items()]
    jobs += [(error, configuration, SMALL, "departures") for error, configuration in PLANTED_DEPARTURES.items()]
    jobs += [(error, configuration, SMALL, "loop") for error, configuration in PLANTED_LOOP.items()]
    if arguments.all:
        jobs += [("", configuration, LONG, "loop") for configuration in LARGE_LOOP]
        jobs += [("", configuration, LONG, "protocol") for configuration in LARGE]
        jobs += [("", configuration, LONG, "departures") for configuration in LARGE_DEPARTURES]
        jobs += [("", configuration, SEARCH, "protocol") for configuration in SEARCHED]
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda job: check(f"{job[1]} {job[0]}", *job[2:]), jobs)
        for (error, configuration, effort, _), (found, states) in zip(jobs, results):
            fine = (found is None) == (error == "")
            failures += not fine
            searched = f"{states} states" + ("" if effort.whole else f", not all, in {effort.seconds} s")
            what = f"{error}: {found or 'NOT FOUND'}" if error else found or f"{searched}, nothing wrong"
            print(f"{'ok    ' if fine else 'FAILED'} {configuration}: {what}", flush=True)
    print(f"{len(jobs)} checks, {failures} failed, {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
