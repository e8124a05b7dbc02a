"""Common code of benchmarks that run alone: their arguments, and a table of times on the terminal."""

from __future__ import annotations

import argparse

from . import peers
from .cases import KB, MB, Case, shortened
from .results import Results, Spread
from .runner import Item, run


def parser(description: str, ranks: str = "2") -> argparse.ArgumentParser:
    """The arguments --ranks, --peers, --setups, --rounds and --iterations."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--ranks", default=ranks, help="numbers of ranks, such as 2,4 (default: %(default)s)")
    made.add_argument("--peers", default="all", help="all, none, or some of " + ",".join(peers.PEERS))
    made.add_argument("--setups", choices=("installed", "all"), default="all", help="settings of the peers")
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--iterations", type=int, default=1000, help="at most this number of each case and round")
    return made


def measure(arguments: argparse.Namespace, cases_of: dict[str, list[Case]]) -> Results:
    """Measure cases (by peer, including 'mykv') with these arguments, and print the results."""
    results = Results()
    plan = []
    for ranks in numbers(arguments.ranks):
        for peer in peers.chosen(arguments.peers):
            cases = shortened(cases_of.get(peer, []), arguments.iterations)
            setups = peers.SETUPS[peer] if arguments.setups == "all" else peers.SETUPS[peer][:1]
            plan += [Item(setup, ranks, cases) for setup in setups if cases]
    run(plan, results, arguments.rounds)
    show(results)
    return results


def show(results: Results) -> None:
    """Print medians and quartiles of everything."""
    keys = list(dict.fromkeys((r["case"], r["series"], r["ranks"], r["peer"], r["setup"]) for r in results.records))
    for case, series, ranks, peer, setup in sorted(keys):
        found = results.get(peer, case, series, ranks, setup)
        print(f"{case:28} {series:22} {ranks:3} ranks  {f'{peer}, {setup}':40} {formatted(found, series)}")


def formatted(found: Spread, series: str) -> str:
    """A median with its quartiles in the unit of the series."""
    factor, unit = {"share": (100, "%"), "bytes": (1 / MB, "MB")}.get(series.split()[-1], (1e3, "ms"))
    low, middle, high = (f"{value * factor:.4g}" for value in (found.lower, found.median, found.upper))
    return f"{middle:>8} {unit} ({low} to {high}, n={found.count})"


def numbers(text: str) -> list[int]:
    """'2,4' -> [2, 4]; '4KB,64MB' -> [4096, 67108864]."""
    units = {"KB": KB, "MB": MB}
    found = []
    for word in text.split(","):
        unit = word.strip().upper()[-2:]
        found.append(int(word.strip()[:-2]) * units[unit] if unit in units else int(word))
    return found
