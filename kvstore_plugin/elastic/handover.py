"""Copies a commit of the living workers to new workers."""

from __future__ import annotations

from typing import Any, Hashable, Mapping, NamedTuple, Sequence

from ..collectives.objects import allgather_object, broadcast_object, pickled
from ..compat import arrays
from ..compat.mxnet import NDArray, Parameter
from ..compat.state_tree import Leaf, leaves, made_array, mapped
from ..coordination import agreement
from ..parameters import deferred_init, load_tracking
from ..world.process_set import global_process_set
from . import shard_replicas, snapshots
from .members import Members, Memory


class _Told(NamedTuple):
    """Everything in a commit except arrays. The scopes serve to detect that a new worker has different trainers."""

    number: int
    keepers: list[int]
    values: dict[str, Any]
    scopes: list[list[str]]
    names: list[bool]  # for each parameter, whether it has values
    training: list[dict[str, Any]]
    options: list[tuple[int, list[str]]]  # the options of each trainer
    memory: Memory  # the attribute of Members


def check(values: Mapping[str, Any], trainings: Mapping[str, snapshots.Training]) -> None:
    """Find out whether a commit can be handed over to a new worker. Collective.

    Parameters
    ----------
    values : dict
        The values of the ElasticState by their names.
    trainings : dict of Training
        The copies of the trainers' states, by the names of the trainers.

    Raises
    ------
    TypeError
        Raised on all workers: a part of the commit cannot be pickled on one of the workers.
    """
    parts = {repr(name): value for name, value in values.items()}
    for name, training in trainings.items():
        for kind, part in training.description().items():
            more = part if kind == "optimizer" else {kind: part}
            parts.update({f"{key!r} of the optimizer of {name!r}": value for key, value in more.items()})
    reasons = allgather_object(next(filter(None, (_why_not(what, part) for what, part in parts.items())), None))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise TypeError(
                f"A new worker of run_elastic() could not get {reason} on rank {rank}. Use functions and classes of a "
                "module, install cloudpickle, or keep it outside of the ElasticState; or leave respawn and grow_to out."
            )


def _why_not(what: str, part: Any) -> str | None:
    try:
        pickled(part)
    except Exception as error:  # any exception: objects define their own pickling methods
        return f"{what} of the ElasticState, which pickle does not take ({type(error).__name__}: {error})"
    return None


def hand_over(
    copy: Any, parameters: Sequence[Parameter], trainers: Sequence[Any], donor: int, members: Members
) -> None:
    """If `copy` is incomplete, fill it with the commit of the rank `donor`. Collective.

    Parameters
    ----------
    copy : _Copy
        The copy in an ElasticState. Its number is negative if it does not hold the commit.
    parameters, trainers : sequence
        Those of the ElasticState, in the same order on all workers.
    donor : int
    members : Members
        Its attribute `memory` gets the donor's value.
    """
    is_new = copy.number < 0
    is_donor = global_process_set.rank() == donor
    scopes = [[share.scope for share in trainer._shares] for trainer in trainers]
    told = trees = packed = None
    if is_donor:
        trees = {
            "parameters": [copy.parameters.kept.get(parameter) for parameter in parameters],
            **{str(number): one.trees(trainers[number]) for number, one in enumerate(copy.training)},
        }
        packed = shard_replicas.pack(trees)
        told = _Told(
            copy.number,
            copy.keepers,
            copy.values,
            scopes,
            [array is not None for array in trees["parameters"]],
            [one.description() for one in copy.training],
            [trainer._options_of_world() for trainer in trainers],
            members.memory,
        )
    told = broadcast_object(told, donor)
    packed = agreement.bytes_of_rank(global_process_set, "world/handover", packed, donor)
    members.memory = told.memory
    if not is_new:
        return
    if told.scopes != scopes or len(told.names) != len(parameters):
        raise RuntimeError(
            "The script of a new worker has made other networks or trainers than those of the living workers, so it "
            "cannot take over their state: a script that gets new workers in run_elastic() must make the same ones "
            "whenever it begins."
        )
    made: dict[Hashable, Any] = {
        key: _made(tree, pieces) for key, (tree, pieces) in shard_replicas.unpack(packed).items()
    }
    _give_values(parameters, made["parameters"])
    copy.parameters.adopt(parameters, made["parameters"])
    for trainer, options in zip(trainers, told.options):
        trainer._take_options_of_world(*options)
    for number, (training, trainer) in enumerate(zip(copy.training, trainers)):
        training.adopt(trainer, made[str(number)], told.training[number])
    copy.number, copy.keepers, copy.values = told.number, told.keepers, told.values


def _made(tree: Any, pieces: Sequence[Any]) -> Any:
    left = iter(pieces)

    def array_of(leaf: Leaf) -> NDArray:
        array = made_array(leaf)
        arrays.memory(array)[:] = next(left)
        return array

    assert len(leaves(tree, Leaf)) == len(pieces)
    return mapped(tree, array_of, Leaf)


def _give_values(parameters: Sequence[Parameter], values: Sequence[NDArray | None]) -> None:
    """Initialize parameters that are still deferred here but have values on the living workers."""
    deferred_init.forget("")  # drops notes from the time when this process was the only worker
    for parameter, value in zip(parameters, values):
        if value is not None and parameter._data is None:
            parameter._load_init(value, snapshots.devices_of(parameter))
    load_tracking.forget(parameters)
