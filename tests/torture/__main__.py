"""``python -m torture --minutes 10``: every target for its share of the time, then a table; 1 if anything failed."""

from __future__ import annotations

import argparse
import importlib
import sys
import time

from mykvrun.progress import Progress

from .tally import Budget, Tally
from .targets import TARGETS


def main(arguments: list[str] | None = None) -> int:
    """Run the targets on the command line, and return an exit status."""
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--only", default=",".join(TARGETS), help="names of targets, with commas between them")
    parser.add_argument("--seed", type=int, help="where random numbers begin; by default the time")
    parser.add_argument("--most", type=int, help="how often a target tries at most")
    given = parser.parse_args(arguments)
    names = given.only.split(",")
    unknown = sorted(set(names) - set(TARGETS))
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    seed = int(time.time()) if given.seed is None else given.seed
    print(f"seed {seed}, {given.minutes:g} minutes for {', '.join(names)}", flush=True)
    end = time.monotonic() + 60 * given.minutes
    tallies: dict[str, Tally] = {}
    for number, name in enumerate(names):
        share = (end - time.monotonic()) / (len(names) - number)
        begin = time.monotonic()
        with Progress(round(share), name, "s") as progress:
            budget = Budget(share, seed, given.most, progress)
            tally = tallies[name] = importlib.import_module(TARGETS[name]).run(budget)
        print(f"\n{name}: {time.monotonic() - begin:.0f} s", *tally.notes, sep="\n  ", flush=True)
        for failure in tally.failures:
            print(f"FAILED {name}: {failure}", flush=True)
    print(f"\n{'target':<12}{'tried':>10}{'survived':>10}{'failed':>10}")
    for name, tally in tallies.items():
        print(f"{name:<12}{tally.tried:>10}{tally.survived:>10}{len(tally.failures):>10}")
    return 1 if any(one.failures or not (one.tried or one.is_missing) for one in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
