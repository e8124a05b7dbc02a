"""The pictures of docs/pictures.md: ``python -m benchmarks.pictures`` measures (as root), draws and writes the page.

``--draw`` draws and writes it again from what was measured last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

from kvstore_plugin.timeline.recording import Recording, read

from . import about, environments, launch, network, overlap, peers, picture_plots, pictures_page
from .environments import ROOT
from .network import Network

RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "pictures.md"
RATE, HIDDEN = "100mbit", 2048
LIMIT_S = 300.0  # for one job
_DRAWN_STEPS = 3  # steps of the timeline to draw

_TOGETHER: dict[str, Any] = {"trainer": "DistributedTrainer", "options": {}, "timeline": None}
_LOCAL: dict[str, Any] = {**_TOGETHER, "trainer": "LocalTrainer"}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": _TOGETHER,
    "fp16": {**_TOGETHER, "options": {"compression_params": {"type": "fp16"}}},
    "2-bit": {**_TOGETHER, "options": {"compression_params": {"type": "2bit", "threshold": 0.05}}},
    "LocalTrainer, period 8": {**_LOCAL, "options": {"period": 8, "warmup_steps": 22}},
    "LocalTrainer, period 32": {**_LOCAL, "options": {"period": 32, "warmup_steps": 22}},
}
WORKERS = (1, 2, 4)


def main() -> None:
    """Measure unless told not to, draw, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--rounds", type=int, default=3, help="of the runs over the slow link (default: %(default)s)")
    given = parser.parse_args()
    if not given.draw:
        reason = network.unavailable()
        if reason:
            sys.exit(f"The hosts of these pictures are network namespaces: {reason}.")
        RESULTS.write_text(json.dumps(_measure(given.rounds)) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    folder = PAGE.with_suffix("")
    folder.mkdir(exist_ok=True)
    picture_plots.draw(results, folder)
    PAGE.write_text(pictures_page.text(results, folder.name), encoding="utf-8")
    print(f"wrote {PAGE}")


def _measure(rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {"about": about.collect([]), "curves": {}, "times": {mode: [] for mode in MODES}}
    for workers in WORKERS:
        found = _run(_here(workers), {**_TOGETHER, "epochs": 6, "hidden": 128})
        results["curves"][str(workers)] = {"losses": found["losses"], "epochs": found["epochs"]}
    with Network(2, RATE) as hosts:
        for number in range(rounds):
            for mode, job in MODES.items():  # modes take turns, so that the machine's load affects all of them
                found = _run(_over(hosts), {**job, "epochs": 8, "hidden": HIDDEN})
                kept = {"epochs": found["epochs"], "steps": len(found["steps"]), "parameters": found["parameters"]}
                results["times"][mode].append({**kept, "load": os.getloadavg()[0]})
                seconds, right = found["epochs"][-1]
                print(f"round {number}, {mode}: {seconds:.1f} s, {right:.1%}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "timeline.mykv")
            found = _run(_over(hosts), {**_TOGETHER, "epochs": 1, "hidden": HIDDEN, "timeline": str(file)})
            results["timeline"] = _middle(read(str(file)), found["steps"])
    return results


def _middle(recording: Recording, steps: list[float]) -> dict[str, Any]:
    """Some steps of a timeline: their start times, and bars (bucket, phase, start, length), in seconds.

    Times count from the start of the first of these steps.

    `steps`: unix times at which rank 0 begins each step.
    """
    first = len(steps) // 2
    drawn = steps[first : first + _DRAWN_STEPS + 1]
    zero = recording.zero / 1e9 - drawn[0]
    bars = [
        (bucket, phase.name, zero + phase.begin / 1e9, (phase.end - phase.begin) / 1e9)
        for bucket, phase in overlap.bucket_phases(recording, picture_plots.PHASES)
    ]
    length = drawn[-1] - drawn[0]
    return {"steps": [one - drawn[0] for one in drawn], "bars": [one for one in bars if -one[3] < one[2] < length]}


Started = Callable[["list[str]"], "list[str]"]  # the command line that runs a program in all workers


def _here(workers: int) -> Started:
    """This number of workers on this machine."""
    return lambda program: [environments.mpirun(sys.executable), "-n", str(workers), *peers.UNBOUND, *program]


def _over(hosts: Network) -> Started:
    """A worker on each host."""
    return lambda program: hosts.mpirun(environments.mpirun(sys.executable), [1] * hosts.hosts, program)


def _run(started: Started, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job of several workers and return its results; raises an error if the weights differ at the end."""
    program = [sys.executable, launch.WORKER, "digits", json.dumps(job)]
    printed = launch.run_program(peers.MYKV, started(program), LIMIT_S)
    found = json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))
    if not found.pop("same"):
        raise RuntimeError(f"The workers of a job of the pictures end with different weights: {job}.")
    return found


if __name__ == "__main__":
    main()
