"""The results, and their statistics."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .peers import AS_INSTALLED

# Series that are added up over the ranks; for other series the largest value counts.
_ADDED = ("bytes", "cpu of all ranks")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of the numbers of all rounds."""

    median: float
    lower: float
    upper: float
    count: int
    setup: str = AS_INSTALLED


def spread(numbers: list[float], setup: str = AS_INSTALLED) -> Spread:
    """Median and quartiles of at least one number."""
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0], 1, setup)
    lower, _, upper = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(statistics.median(numbers), lower, upper, len(numbers), setup)


@dataclass
class Results:
    """All records of a run: {'peer', 'setup', 'ranks', 'case', 'series', 'round', 'numbers'}.

    Attributes
    ----------
    about : dict
        Machine, versions, commands, rounds and minutes.
    failures : list of dict
        Launches that gave no results, with the error.
    tuning : list of dict
        Records for the choice of settings only.
    """

    about: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    tuning: list[dict[str, Any]] = field(default_factory=list)

    def add(self, about: dict[str, Any], lines: list[list[dict[str, Any]]]) -> None:
        """Add the lines of all ranks of a launch (peer, setup, ranks and round in `about`)."""
        for per_rank in zip(*lines):
            first = per_rank[0]
            combine = sum if first["series"] in _ADDED else max
            numbers = [combine(numbers) for numbers in zip(*(line["numbers"] for line in per_rank))]
            self.records.append({**about, "case": first["case"], "series": first["series"], "numbers": numbers})

    def numbers(self, peer: str, case: str, series: str, ranks: int) -> dict[str, list[float]]:
        """The numbers of all rounds, by the name of the setup."""
        found: dict[str, list[float]] = {}
        for record in self.records:
            if (record["peer"], record["case"], record["series"], record["ranks"]) == (peer, case, series, ranks):
                found.setdefault(record["setup"], []).extend(record["numbers"])
        return found

    def get(
        self, peer: str, case: str, series: str = "time", ranks: int = 2, setup: str = AS_INSTALLED
    ) -> Spread | None:
        """The statistics with one setup; None if it was not measured."""
        numbers = self.numbers(peer, case, series, ranks).get(setup)
        return spread(numbers, setup) if numbers else None

    def best(self, peer: str, case: str, series: str = "time", ranks: int = 2) -> Spread | None:
        """The setup with the smallest median; None if nothing was measured."""
        found = [spread(n, setup) for setup, n in self.numbers(peer, case, series, ranks).items() if n]
        return min(found, key=lambda one: one.median, default=None)

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        everything = vars(self)
        path.write_text(json.dumps(everything), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file of save()."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
