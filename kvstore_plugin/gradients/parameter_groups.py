"""The workers that train each parameter of a trainer: the trainer's process set, another set, or this worker alone."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, NamedTuple, Sequence

from ..compat.arguments import check_is_added
from ..compat.mxnet import Parameter
from ..coordination import agreement, operation, operation_names
from ..parameters.naming import Named
from ..world.process_set import ProcessSet, global_process_set

_CALL = "DistributedTrainer()"


class Share(NamedTuple):
    """The parameters that one process set trains together, and their names."""

    process_set: ProcessSet
    scope: str
    named: Sequence[Named]
    root: int  # rank within the set
    names: Any  # the KeptNames of the scope


class TrainerWorkers:
    """The workers of a trainer's process set. They skip a step together, and join() lets them end at different steps.

    Parameters
    ----------
    process_set : ProcessSet
        The trainer's process set.
    shares : sequence of Share
        The trainer's shares.
    stays_local : bool
        Whether the trainer has parameters that are trained on this worker alone.

    Attributes
    ----------
    process_set : ProcessSet
    scope : str
        Prefix of the names of the set's operations; empty if this worker is not in the set.
    gradients_may_differ : bool
        Whether some parameter on some worker is not reduced over the whole set. Gradients may then differ between
        workers.
    has_other_groups : bool
        Whether some worker trains parameters in another process set.
    overlaps_outside : bool
        Whether some worker shares parameters with workers outside the set.
    """

    def __init__(self, process_set: ProcessSet, shares: Sequence[Share], stays_local: bool) -> None:
        self.process_set = process_set
        self.scope = next((share.scope for share in shares if share.process_set is process_set), "")
        others = [share.process_set for share in shares if share.process_set is not process_set and share.named]
        inside = set(process_set.ranks) if self.scope else set()
        self.gradients_may_differ = bool(self.scope) and bool(others or stays_local)
        self.has_other_groups = bool(others)
        self.overlaps_outside = any(not inside.issuperset(other.ranks) for other in others)

    def meet(self) -> None:
        """Set each attribute on all workers if it is set on some worker. Collective over the process set."""
        mine = [self.gradients_may_differ, self.has_other_groups, self.overlaps_outside]
        _, some = agreement.extremes(self.process_set, f"{self.scope}/parameters", mine)
        self.gradients_may_differ, self.has_other_groups, self.overlaps_outside = map(bool, some)

    def check_undivided(self, what: str) -> None:
        """Raise a ValueError if some parameters are trained in another process set."""
        if self.has_other_groups:
            raise ValueError(
                f"{what} needs all parameters of a trainer in its process set, or local, but parameter_process_sets "
                "names other process sets."
            )

    def check(self, what: str) -> None:
        """Raise a ValueError if some worker shares parameters with workers outside the set."""
        if self.overlaps_outside:
            raise ValueError(
                f"{what} needs all workers that share parameters of a trainer in its process set, but "
                "parameter_process_sets has ranks outside of process_set."
            )


def sets_of(process_set: Any, of_parameters: Any) -> list[ProcessSet]:
    """The process sets of a trainer's parameters that include this rank.

    The order is the same on all ranks: a rank waits in one set after another, so different orders could deadlock.
    """
    given = [process_set if isinstance(process_set, ProcessSet) else global_process_set]
    if isinstance(of_parameters, Mapping):
        given += [process_set for process_set in of_parameters.values() if isinstance(process_set, ProcessSet)]
    sets = {process_set.process_set_id: process_set for process_set in given if process_set.included()}
    return [process_set for _, process_set in sorted(sets.items())]


def scopes_of(sets: Sequence[ProcessSet], order: Sequence[int]) -> tuple[dict[ProcessSet, str], bool]:
    """The prefix of a trainer's operation names in each process set. Waits for the other members of each set.

    Parameters
    ----------
    sets : sequence of ProcessSet
        See `sets_of`.
    order : sequence of int
        The order in which gluon.Trainer numbers the parameters: the position of each among all workers' parameters.

    Returns
    -------
    dict
        The prefix for each process set.
    bool
        Whether the members of these sets have the same order.
    """
    scopes, is_common = {}, True
    mine = agreement.digest([str(position) for position in order])
    for number, process_set in enumerate(sets):
        try:
            with operation.waiting(process_set, _CALL) as turn:
                numbered = operation_names.numbered_alike(turn, process_set, "trainer", _CALL, [mine])
                scopes[process_set], orders = numbered
        except Exception as error:
            refuse(sets[number + 1 :], error)
            raise
        is_common = is_common and agreement.first_that_differs(orders) is None
    return scopes, is_common


def refuse(sets: Iterable[ProcessSet], error: Exception) -> None:
    """Tell the other members of process sets, which wait in DistributedTrainer(), why this rank fails."""
    for process_set in sets:
        operation.waiting(process_set, _CALL).leave_out(str(error), None)


def root_of(process_set: ProcessSet, root_rank: int, of_trainer: ProcessSet) -> int:
    """Rank within a process set of the worker whose initial values are broadcast to the set."""
    if process_set is of_trainer and root_rank != 0:
        return process_set._position_of(root_rank)
    return process_set._position_of(root_rank) if root_rank in process_set.ranks else 0


def divide(
    params: Any, named: Sequence[Named], process_set: ProcessSet, of_parameters: Any
) -> dict[ProcessSet | None, list[Named]]:
    """The parameters of each process set that this rank is in, and under None the local parameters."""
    if of_parameters is not None and not isinstance(of_parameters, Mapping):
        raise TypeError(f"parameter_process_sets must be a dict, not {type(of_parameters).__name__}.")
    known = {id(item.value) for item in named}
    chosen: dict[int, ProcessSet | None] = {}
    for key, given in (of_parameters or {}).items():
        parameter = key if isinstance(key, Parameter) else _with_key(params, key)
        if id(parameter) not in known:
            raise ValueError(f"parameter_process_sets holds {key!r}, which is not in params.")
        if given is not None and not isinstance(given, ProcessSet):
            raise TypeError(f"parameter_process_sets must hold ProcessSets or None, not {type(given).__name__}.")
        if given is not None:
            check_is_added(given)
        chosen[id(parameter)] = given
    divided: dict[ProcessSet | None, list[Named]] = {}
    for item in named:
        of_parameter = chosen.get(id(item.value), process_set)
        is_shared = of_parameter is not None and of_parameter.included()
        divided.setdefault(of_parameter if is_shared else None, []).append(item)
    return divided


def _with_key(params: Any, key: Any) -> Any:
    """The parameter with a key, or at a position; None if there is no such parameter."""
    try:
        return params[key]
    except (KeyError, IndexError, TypeError):
        return None
