"""A rank that runs drawn trainings twice: all workers alike, and with one worker that does other work meanwhile.

Weights must have the same bits after each piece, in both runs and on all workers.
"""

from __future__ import annotations

import hashlib
import random

import kvstore_plugin as mykv
from mpi4py import MPI

from . import pieces
from .course import FORMS, Program, difference, sequence, together
from .disturbances import Disturbance
from .loop import loop
from .symmetric_pieces import Symmetric

_LIMIT = 400.0  # seconds for one program
_STARTS = {"plain": 3.0, "held": 1.0, "recorded": 1.0, "written": 1.0, "evaluated": 1.0, "probed": 1.0, "frozen": 0.7}
PIECES = {
    "step": 4.0,
    "unused": 0.7,
    "accumulated": 1.0,
    "skipped": 1.0,
    "clipped": 1.0,
    "all_frozen": 0.5,
    "hold": 0.3,
    "set_data": 0.5,
    "best": 0.3,
    "load": 0.5,
    "freeze": 1.0,
    "unfreeze": 1.0,
    "new_head": 0.7,
    "new_trainer": 1.0,
    "second_trainer": 0.7,
    "resume": 1.0,
    "reinitialize": 1.5,
    "moved": 1.5,
    "rehybridized": 0.3,
    "stage": 2.0,
    "cast": 0.7,
    "copied": 0.7,
    "pickled": 0.5,
    "evaluated": 0.7,
    "process_set": 0.7,
    "store": 1.0,
    "sums": 1.0,
    "join": 0.7,
    "dropped": 0.7,
    "loaded": 0.4,
}


def drawn(seed: int) -> Program:
    """The program with a seed."""
    chance = random.Random(seed)
    form = chance.choice(FORMS)
    number = pieces.drawn_optimizer(chance, form)
    norm = chance.choice(["", "", "", "batch", "sync"])
    dtypes = ["float32", "float64"] if pieces.takes_float64(number) and not norm else ["float32"]
    options = {}
    if form.startswith("own") and chance.random() < 0.3:
        options["bucket_bytes"] = chance.choice([0, 256])
    return Program(
        seed,
        form,
        dtype=chance.choice(dtypes),
        is_deferred=chance.random() < 0.3,
        hybrid=chance.choice(["", "plain", "static"]),
        optimizer=number,
        schedule=chance.choice(["", "", "", *pieces.SCHEDULES]),
        options=tuple(sorted(options.items())),
        has_own_device=chance.random() < 0.3,
        takes_list=chance.random() < 0.4,
        norm=norm,
        start=pieces.weighted(chance, _STARTS),
        phases=sequence(chance, PIECES, 3, 9),
    )


class _Disturbed(Symmetric):
    """A run during which this worker does other work."""

    disturbance: Disturbance | None = None

    def disturb(self, where: str) -> None:
        if self.disturbance is not None:
            self.disturbance(where)

    def done(self) -> str:
        return f"disturbed: {self.disturbance.done if self.disturbance else 'not here'}"


def _digests(trace: list) -> list[str]:
    found = []
    for _, values in trace:
        digest = hashlib.sha256()
        for name, one in sorted(values.items()):
            if "running" not in name:  # of a BatchNorm, whose statistics are a worker's own
                digest.update(one.tobytes())
        found.append(digest.hexdigest())
    return found


def _has_no_judge(program: Program) -> bool:
    """Whether MXNet alone, without a store, reaches different weights when hybridized or disturbed.

    Hybridized networks of MXNet, static ones above all, may do so after a forward pass of another kind, or after their
    parameters were initialized again.
    """
    trace = Symmetric(program, is_alone=True).all()
    if program.hybrid and difference(program, trace, Symmetric(program, is_alone=True, is_hybrid=False).all()):
        return True
    undisturbed = _digests(trace)
    course = _Disturbed(program, is_alone=True)
    with Disturbance(course, random.Random(program.seed + 2)) as course.disturbance:
        return _digests(course.all()) != undisturbed


def run(seed: int) -> tuple[list[str], bool]:
    """Run one program; returns the errors, and whether there is no reference."""
    program, comm, rank = drawn(seed), MPI.COMM_WORLD, mykv.rank()
    what = f"program {seed}, rank {rank}, {program}"
    trace, wrong = together(Symmetric(program))
    if wrong:
        return [f"{what}: fails without a disturbance {wrong}"], False
    undisturbed = _digests(trace)
    course = _Disturbed(program)
    victim = random.Random(seed + 1).randrange(mykv.size())
    if rank == victim:
        with Disturbance(course, random.Random(seed + 2)) as course.disturbance:
            trace, wrong = together(course)
    else:
        trace, wrong = together(course)
    if wrong:
        return [f"{what}: fails where rank {victim} is disturbed {wrong}; {course.done()}"], False
    disturbed = _digests(trace)
    names = ["start", *(name for name, _ in program.phases)]
    everybody = list(zip(comm.allgather(undisturbed), comm.allgather(disturbed)))
    if any(one != other for one, other in everybody) and all(comm.allgather(_has_no_judge(program))):
        return [], True
    for number, both in enumerate(everybody):
        if number == rank:
            apart = [f"{k}, {names[k]}" for k, pair in enumerate(zip(*both)) if pair[0] != pair[1]]
            if apart:
                wrong = f"other bits where rank {victim} is disturbed from piece {apart[0]} on; {course.done()}"
                return [f"{what}: {wrong}"], False
    everybody = comm.allgather(undisturbed[-1:])
    if any(one != everybody[0] for one in everybody):
        return [f"{what}: the weights differ between ranks without a disturbance"], False
    return [], False


def main() -> None:
    """Run programs."""
    mykv.init()
    loop(run, _LIMIT)


if __name__ == "__main__":
    main()
