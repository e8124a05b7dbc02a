"""Finds the best of each peer's documented settings, for each case.

A short run of all settings makes the choice; the main measurement then runs the peer as installed and with the chosen
setting. 'best' in the table is the better of the two.
"""

from __future__ import annotations

from . import peers
from .cases import Case, shortened
from .peers import Setup
from .results import Results
from .runner import Item, run

_ITERATIONS = 5


def choose(cases_of: dict[str, list[Case]], results: Results) -> list[Item]:
    """Measure every setting of every peer but mykv on 2 ranks, into `results`; launches of the chosen ones.

    Parameters
    ----------
    cases_of : dict
        The cases of each peer.
    """
    plan = []
    for peer, cases in cases_of.items():
        for setup in peers.SETUPS[peer]:
            fitting = [case for case in cases if case["id"].startswith(setup.suits)]
            plan.append(Item(setup, 2, shortened(fitting, _ITERATIONS)))
    run(plan, results, 1)
    chosen: list[Item] = []
    for peer, cases in cases_of.items():
        won: dict[str, list[Case]] = {}
        for case in cases:
            best = results.best(peer, case["id"])
            if best is not None:
                won.setdefault(best.setup, []).append(case)
        by_name: dict[str, Setup] = {setup.name: setup for setup in peers.SETUPS[peer]}
        chosen += [Item(by_name[name], 2, mine) for name, mine in won.items() if name != peers.AS_INSTALLED]
    return chosen
