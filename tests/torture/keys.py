"""Target: creating and dropping very many keys takes the same processor time in each round and leaks nothing.

Each key counts as one try; a job in which a later round leaves more than the first one, or takes much longer, as one
failure. Where all keys are under way at once, more than the table of a host holds, only the time counts: how much
memory that takes at the most depends on how far the ranks are apart.
"""

from __future__ import annotations

import ast
import re

from .job import Job
from .tally import Budget, Tally

_FEW = 500  # keys under way together: far fewer than the table of a host holds
_ALL = 100_000
CASES = [  # mode, ranks, hosts, keys under way together
    ("core", 2, 1, _FEW),
    ("store", 2, 1, _FEW),
    ("trainers", 2, 1, _FEW),
    ("core", 4, 2, _FEW),
    ("core", 2, 1, _ALL),
    ("core", 2, 2, _ALL),
    ("store", 2, 1, _ALL),
    ("store", 2, 2, _ALL),
]
ROUNDS = 3
_KEYS = 100_000  # of one round
# Minimum number of keys per second and rank, on a busy machine.
_SLOWEST = {"core": 1000, "store": 1000, "trainers": 80}
_START_S = 90.0
# What a later round may leave more than the first one. No names; two of Python's arenas, of 1 MiB each, which come and
# go (16 rounds of 20 000 keys ended where the first few had been), and 15 bytes for each of 100 000 keys.
_LEFT = {"own_kib": 3584, "shared_kib": 4096, "maps": 8}
# Between hosts rank 0 remembers the texts of so many operations at most, in so many KiB.
_TEXTS, _TEXTS_KIB = 1 << 15, 8192


def run(budget: Budget, cases: list[tuple] = CASES) -> Tally:
    """One job for each case: as many keys as the share of the time allows at the slowest, 100 000 a round at most."""
    tally = Tally()
    for number, (mode, ranks, hosts, at_once) in enumerate(cases):
        seconds = max(budget.left() / (len(cases) - number), 1.0)
        keys = min(_KEYS, budget.most or _KEYS, max(1000, int(seconds / ROUNDS * _SLOWEST[mode])))
        with Job(ranks, "torture.keyed", mode, keys, ROUNDS, min(keys, at_once), hosts=hosts) as job:
            ended = job.wait(2 * ROUNDS * keys / _SLOWEST[mode] + _START_S)
        what = f"{mode}, {keys} keys in each of {ROUNDS} rounds, {min(keys, at_once)} at once"
        what += f", {ranks} ranks on {hosts} hosts"
        if ended.code != 0 or "fine" not in ended.text:
            tally.add(f"{what}: {'hung' if ended.hung else ended.code}\n{ended.tail}")
            continue
        tally.tried += keys * ROUNDS
        wrong, shown = _looked_at(ended.text, ranks, keys, at_once <= _FEW, hosts > 1 and keys < _TEXTS)
        if wrong:
            tally.failures.append(f"{what}: {'; '.join(wrong)}")
        tally.notes.append(f"{what}: {shown}")
    return tally


def _looked_at(text: str, ranks: int, keys: int, leaves_nothing: bool, gathers_texts: bool) -> tuple[list[str], str]:
    """The errors of a job's rounds, and rank 0's time and memory per key."""
    wrong = []
    for rank in reversed(range(ranks)):
        rounds = [ast.literal_eval(one) for one in re.findall(rf"round {rank} \d+ (\[.*?\}}\])", text)]
        assert len(rounds) == ROUNDS, text
        first, last = rounds[0][4], rounds[-1][4]
        for name in first:
            most = _LEFT.get(name, 0) + _TEXTS_KIB * (gathers_texts and name == "own_kib")
            if leaves_nothing and last[name] - first[name] > most:
                wrong.append(f"rank {rank}: {name} from {first[name]} to {last[name]}")
        # Time that grows with the rounds would mean a growing table, or a linear search.
        took = [one[0] + one[1] for one in rounds]
        if took[-1] > 3 * took[0] + 2:
            wrong.append(f"rank {rank}: {took[0]:.1f} s for the first round and {took[-1]:.1f} s for the last")
    made, dropped, before, most, left = rounds[0]
    per_key = (most["own_kib"] - before["own_kib"]) * 1024 / keys
    return wrong, (
        f"{made / keys * 1e6:.0f} us to make one, {dropped / keys * 1e6:.1f} us to drop it, "
        f"{per_key:.0f} bytes for each; {left['own_kib'] - before['own_kib']} KiB left after the first round, "
        f"{last['own_kib'] - before['own_kib']} KiB after the last"
    )
