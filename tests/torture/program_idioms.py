"""A rank that runs drawn trainings on all workers, and again alone with plain gluon.Trainer and the whole batch.

Weights must be equal after each piece, beyond rounding, and those of all workers bit by bit.
"""

from __future__ import annotations

import random
from typing import Any

import kvstore_plugin as mykv
from harness.support import checksum
from mpi4py import MPI

from . import pieces
from .course import FORMS, Program, difference, sequence, together
from .idiom_pieces import Idioms
from .loop import loop

_LIMIT = 400.0  # seconds for one program
_STARTS = {
    "plain": 2.0,
    "held": 2.0,
    "recorded": 2.0,
    "written": 1.5,
    "evaluated": 1.0,
    "probed": 1.0,
    "frozen": 0.7,
}
PIECES = {
    "step": 5.0,
    "unused": 1.0,
    "losses": 0.7,
    "accumulated": 1.5,
    "accumulated_sums": 1.0,
    "skipped": 2.0,
    "left_out": 0.7,
    "clipped": 2.0,
    "clipped_norm": 1.0,
    "scaled": 0.7,
    "zeroed": 0.5,
    "all_frozen": 0.7,
    "hold": 0.7,
    "rate": 1.0,
    "set_data": 1.0,
    "written_weights": 1.0,
    "best": 0.7,
    "load": 0.7,
    "freeze": 1.2,
    "unfreeze": 1.2,
    "new_head": 1.0,
    "new_trainer": 1.0,
    "second_trainer": 1.0,
    "resume": 1.5,
    "reinitialize": 0.5,
    "moved": 0.5,
    "rehybridized": 0.5,
    "saliency": 0.7,
    "child": 0.6,
    "loader": 0.25,
    "collective": 0.5,
}


def drawn(seed: int) -> Program:
    """The program with a seed."""
    chance = random.Random(seed)
    form = chance.choice(FORMS)
    number = pieces.drawn_optimizer(chance, form)
    options: dict[str, Any] = {}
    if form.startswith("own"):
        if chance.random() < 0.3:
            options["bucket_bytes"] = chance.choice([0, 256])
        if chance.random() < 0.2:
            options["clip_global_norm"] = chance.choice([0.05, 1e9])
        if chance.random() < 0.15:
            options["broadcast_period"] = 2
        if chance.random() < 0.2 and form == "own":
            options["gradients_after_allreduce"] = "sum"
    return Program(
        seed,
        form,
        dtype=chance.choice(["float32", "float64" if pieces.takes_float64(number) else "float32"]),
        is_deferred=chance.random() < 0.3,
        hybrid=chance.choice(["", "plain", "static"]),
        optimizer=number,
        schedule=chance.choice(["", "", *pieces.SCHEDULES]),
        options=tuple(sorted(options.items())),
        has_own_device=chance.random() < 0.4,
        takes_list=chance.random() < 0.4,
        start=pieces.weighted(chance, _STARTS),
        phases=sequence(chance, PIECES, 3, 8),
    )


def run(seed: int) -> tuple[list[str], bool]:
    """Run one program; returns the errors, and whether there is no reference."""
    program = drawn(seed)
    what = f"program {seed}, rank {mykv.rank()}, {program}"
    comm = MPI.COMM_WORLD
    course = Idioms(program)
    got, wrong = together(course)
    if wrong:
        return [f"{what}: {wrong}"], False
    updates = course.optimizer.num_update
    if len(set(comm.allgather((checksum(course.net), updates)))) > 1:
        return [f"{what}: the weights or updates differ between ranks"], False
    judge = Idioms(program, is_alone=True)
    right = judge.all()
    wrong = difference(program, got, right)
    if not wrong and updates != judge.optimizer.num_update:
        wrong = f"{updates} updates in place of {judge.optimizer.num_update}"
    if wrong and difference(program, right, Idioms(program, is_alone=True, is_hybrid=False).all()):
        return [], True  # MXNet itself is wrong where a network with static_alloc has had grad_req 'add'
    return [f"{what}: differs {wrong}"] if wrong else [], False


def main() -> None:
    """Run programs."""
    mykv.init()
    loop(run, _LIMIT)


if __name__ == "__main__":
    main()
