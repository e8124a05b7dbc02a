"""Runs a plan: every launch once per round, so that variations of the machine affect all peers."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass

from mykvrun.progress import Progress

from .cases import Case
from .launch import LaunchError, launch
from .peers import Setup
from .results import Results

LIMIT_S = 120.0  # limit of one launch, at least twice the expected time


@dataclass
class Item:
    """One launch of each round."""

    setup: Setup
    ranks: int
    cases: list[Case]
    rounds: int | None = None  # at most this number; None: the run's number


def run(plan: list[Item], results: Results, rounds: int, deadline: float | None = None) -> int:
    """Run the plan for some rounds, each beginning with another item; returns the number of rounds.

    Parameters
    ----------
    deadline : float, optional
        As time.monotonic() counts. No round begins that would end later if it took as long as the previous one.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that launch() ends its processes
    turns = [[item for item in plan if item.rounds is None or number < item.rounds] for number in range(rounds)]
    with Progress(sum(map(len, turns)), "launches", "launch") as progress:
        for number, todo in enumerate(turns):
            begin = time.monotonic()
            first = number * max(1, len(todo) // rounds) % max(1, len(todo))
            for item in todo[first:] + todo[:first]:
                progress.tell(f"{item.setup.title}, {item.ranks} ranks")
                _run_item(item, number, results, progress)
                progress.advance()
            now = time.monotonic()
            if deadline is not None and now + (now - begin) > deadline:
                return number + 1
    return rounds


def _run_item(item: Item, number: int, results: Results, progress: Progress) -> None:
    begin = time.monotonic()
    about = {"peer": item.setup.peer, "setup": item.setup.name, "ranks": item.ranks, "round": number}
    try:
        results.add(about, launch(item.setup, item.ranks, item.cases, LIMIT_S))
        outcome = ""
    except LaunchError as error:
        results.failures.append({**about, "cases": [case["id"] for case in item.cases], "error": str(error)})
        outcome = f"  FAILED: {error}"
    took = time.monotonic() - begin
    progress.write(f"round {number + 1}: {item.setup.title}, {item.ranks} ranks: {took:.1f} s{outcome}")
