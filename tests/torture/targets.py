"""The targets by name: each is a module whose ``run(budget)`` returns a Tally."""

from __future__ import annotations

TARGETS = {
    "programs": "torture.programs",  # random operations with planted disagreements, against numpy
    "retry": "torture.retry",  # trainings in which a user makes a mistake, catches the error and continues
    "idioms": "torture.idioms",  # trainings as users write them, against one process of plain gluon.Trainer
    "asymmetric": "torture.asymmetric",  # trainings in which one rank does other local work
    "kills": "torture.kills",  # kill -9 of a worker at any moment
    "elastic": "torture.elastic",  # kill -9 of workers, without which the others continue
    "respawn": "torture.respawn",  # kill -9 of workers that are replaced
    "stops": "torture.stops",  # SIGSTOP of a worker in the middle of a training
    "ends": "torture.ends",  # a worker ends in any way in any phase of its script
    "leave": "torture.leave",  # ranks that leave, fail or are stopped while hosts work together
    "delays": "torture.delays",  # the same training under other timings has the same bits
    "soak": "torture.soak",  # very many small steps: nothing grows
    "keys": "torture.keys",  # very many keys, made and dropped: none is left
    "launches": "torture.launches",  # mpirun again and again: the first message of a job
    "large": "torture.large",  # arrays that fill more than half of the memory
    "fuzz": "torture.fuzz",  # fuzzed bytes for every parser of external input
}
