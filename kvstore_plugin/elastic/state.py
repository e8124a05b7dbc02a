"""ElasticState: the state from which training continues when a worker has died.

commit() is collective and has three steps. First the workers wait for each other, so that a worker overwrites a copy
only when all workers have completed the previous commit. Then each worker copies its state, and sends its share of the
optimizer's states to its keeper. Last, without communication, it marks the new copy as complete. Commits are
double-buffered: one copy is overwritten while the other copy is complete. So at any moment there is a commit that all
living workers have completed, at most one behind the fastest worker. After a death they return to the last such commit.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterable, Sequence

import numpy as np

from ..collectives.objects import allgather_object
from ..compat import errors
from ..compat.errors import WorkersLost
from ..compat.mxnet import MXNetError, Parameter, Trainer, forget_recorded, gluon, wait_for_all
from ..coordination import operation
from ..parameters.naming import named_parameters
from ..training.trainer import DistributedTrainer
from ..world import new_workers
from ..world.process_set import global_process_set
from . import handover, shard_replicas, snapshots
from .members import Members, MoreWorkers

_NEVER = -1
_REFUSED = (
    "An ElasticState cannot keep a value as {name!r}, since names of its methods and names that begin with '_' are "
    "reserved. Choose another name."
)


class ElasticState:
    """The state that `run_elastic` restores when a worker has died: networks, trainers and your own values.

    Parameters
    ----------
    checkpoint : str, optional
        With update_on_kvstore=True, a file of ``trainer.save_states``. Optimizer states are loaded from it when a
        worker and the worker that kept a copy of its states have died together. The loaded states are then from an
        earlier step than the weights. Without a file such a loss ends the job.
    **members
        By any names: networks (Block) with all parameters of the trainers; trainers (DistributedTrainer or LocalTrainer
        with elastic=True), at least one; and other values that `commit` keeps, such as the numbers of the epoch and the
        batch. copy.deepcopy must be able to copy these values. With ``run_elastic(respawn=True)`` they must also be
        picklable. All members are attributes of the state, to be read and assigned; attributes that are assigned later
        are kept too. Names that begin with ``_``, and names of methods, such as ``commit``, are reserved.

    Raises
    ------
    TypeError, ValueError
        There is no trainer, a trainer is not elastic or has parameters that no network has, a name is reserved, or a
        member was passed without a name. Assigning to a reserved name later raises AttributeError.

    Examples
    --------
    >>> trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", elastic=True)
    >>> state = mykv.ElasticState(net=net, trainer=trainer, epoch=0, best=None)
    >>> state.epoch, state.best = 1, 0.97  # values of your own are attributes
    >>> state.commit()  # run_elastic() continues from here when a worker dies
    """

    def __init__(self, *unnamed: Any, checkpoint: str | None = None, **members: Any) -> None:
        if unnamed:
            raise TypeError("An ElasticState takes its members by name: ElasticState(net=net, trainer=trainer, ...).")
        for name in members:
            if name.startswith("_") or hasattr(ElasticState, name):
                raise ValueError(_REFUSED.format(name=name))
        self._callbacks: list[Callable[[], Any]] = []
        self._checkpoint = checkpoint
        self._nets = [member for member in members.values() if isinstance(member, gluon.Block)]
        self._trainers = [member for member in members.values() if isinstance(member, Trainer)]
        self._number = _NEVER  # the number of the last commit
        self._members: Members | None = None  # set by run_elastic()
        vars(self).update(members)
        self._own = {name for name in vars(self) if name.startswith("_")} | {"_own", "_copies"}
        self._own |= {name for name, member in members.items() if isinstance(member, (gluon.Block, Trainer))}
        if not self._trainers:
            raise ValueError("An ElasticState needs a DistributedTrainer: ElasticState(net=net, trainer=trainer, ...).")
        known = {id(parameter) for parameter in self._parameters()}
        for trainer in self._trainers:
            if not isinstance(trainer, DistributedTrainer) or not trainer._is_elastic:
                raise TypeError(
                    f"An ElasticState needs trainers made as DistributedTrainer(..., elastic=True), not {trainer!r}."
                )
            for parameter in trainer._params:
                if id(parameter) not in known:
                    raise ValueError(
                        f"The trainer has the parameter {parameter.name}, which no network of the ElasticState has: "
                        "pass the network too, ElasticState(net=net, trainer=trainer, ...)."
                    )
        self._copies = [_Copy(len(self._trainers)) for _ in range(2)]

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self).get("_own")
        if own is not None and (hasattr(ElasticState, name) or (name.startswith("_") and name not in own)):
            raise AttributeError(_REFUSED.format(name=name))
        super().__setattr__(name, value)

    def commit(self) -> None:
        """Keep the current state: training continues from it if a worker dies later.

        Collective: call it at the same step on all workers. Waits for the other workers. Calls
        `LocalTrainer.synchronize` of trainers that make local steps.

        Raises
        ------
        WorkersLost
            A worker has died; `run_elastic` handles it.
        MXNetError
            An earlier step has failed, or the workers have made different numbers of commits.

        Examples
        --------
        >>> trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", elastic=True)
        >>> state = mykv.ElasticState(net=net, trainer=trainer, epoch=0)
        >>> state.epoch += 1
        >>> state.commit()  # after a death training continues from here
        """
        errors.check()
        try:
            has_room = self._commit(self._members)
        except WorkersLost:
            raise
        except RuntimeError as error:
            raise errors.any_failure(error) from None
        if self._members is not None:
            self._members.committed()
        if has_room:
            raise MoreWorkers(
                "mykv adds workers: run_elastic() goes on from this commit. Do not catch this in train()."
            )

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions without arguments to call after workers were lost or added, before training continues.

        When they are called, the state is restored, and `rank` and `size` are new. The functions may, for example,
        redistribute the data or change the learning rate.

        Examples
        --------
        >>> trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, elastic=True)
        >>> state = mykv.ElasticState(net=net, trainer=trainer, epoch=0)
        >>> state.register_reset_callbacks([lambda: trainer.set_learning_rate(0.005 * mykv.size())])
        """
        self._callbacks.extend(callbacks)

    def _parameters(self) -> list[Parameter]:
        """The parameters of all networks, each once, in the same order on all workers."""
        unique = {}
        for net in self._nets:
            for item in named_parameters(net.collect_params()):
                unique.setdefault(id(item.value), item.value)
        return list(unique.values())

    def _commit(self, members: Members | None = None) -> bool:
        """Commit the state. Returns whether `members` have room for more workers."""
        for trainer in self._trainers:
            trainer._before_commit()
        parameters = self._parameters()
        for parameter in parameters:
            for value in parameter._data or ():
                value.wait_to_read()
        with operation.waiting(global_process_set, "commit") as turn:
            has_room = members is not None and members.look_for_room()
            met, rooms = turn.meet("commit", [self._number, has_room]).T
        if (met != met[0]).any():
            raise MXNetError(
                f"The workers have made different numbers of commits: {met.tolist()}, in the order of ranks. Call "
                "commit() equally often on all workers."
            )
        current = self._last()
        spare = self._copies[current is self._copies[0]]
        spare.take(parameters, self._trainers, self._values())
        spare.number = self._number = self._number + 1
        return bool(rooms.any())

    def _last(self) -> _Copy:
        return max(self._copies, key=lambda kept: kept.number)

    def _values(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._own}

    def _check_handover(self) -> None:
        """Raise a TypeError on all workers if a new worker could not get the last commit. Collective."""
        last = self._last()
        names = {id(value): name for name, value in vars(self).items()}
        handover.check(last.values, {names[id(trainer)]: last.training[i] for i, trainer in enumerate(self._trainers)})

    def _restore(self) -> None:
        """Restore the last commit that all remaining workers have, and commit it again. Collective."""
        counts = global_process_set._counted()
        held = [(kept.number, kept.rank) for kept in self._copies]
        everyone = allgather_object((max(held)[0], held, counts, new_workers.is_respawned()))
        for _, _, others, _ in everyone:
            global_process_set._skip_to(others)
        # A new worker may have no commit: only the other workers' commits count then.
        agreed = min((number for number, _, _, is_new in everyone if number != _NEVER or not is_new), default=_NEVER)
        held_then = [next((commit for commit in held if commit[0] == agreed), None) for _, held, _, _ in everyone]
        lacks = [rank for rank, commit in enumerate(held_then) if commit is None]
        if agreed == _NEVER or not all(everyone[rank][3] for rank in lacks):
            raise RuntimeError("A worker was lost before all workers had completed the first commit of run_elastic.")
        for kept in self._copies:
            if kept.number != agreed:
                kept.number = _NEVER
        last = self._last()
        self._number = agreed
        if lacks:
            donor = next(rank for rank, commit in enumerate(held_then) if commit is not None)
            handover.hand_over(last, self._parameters(), self._trainers, donor, self._members)
        for name in self._values():
            delattr(self, name)
        vars(self).update(copy.deepcopy(last.values))
        last.parameters.restore()
        for net in self._nets:
            net.apply(forget_recorded)
        for trainer, training in zip(self._trainers, last.training):
            training.restore(trainer)
            trainer._meet_again()
            training.restore(trainer)  # again: _meet_again() has changed counters
        for number, trainer in enumerate(self._trainers):
            if trainer._store_optimizer is not None:
                self._restore_shares(
                    number, trainer, last, [None if commit is None else commit[1] for commit in held_then]
                )
        wait_for_all()
        self._commit()

    def _restore_shares(self, number: int, trainer: Any, last: _Copy, ranks_then: Sequence[int | None]) -> None:
        keepers = last.keepers
        new_rank_of = {old: new for new, old in enumerate(ranks_then) if old is not None}
        providers = [new_rank_of.get(old, new_rank_of.get(keeper)) for old, keeper in enumerate(keepers)]
        if None in providers:
            if self._checkpoint is None:
                old = providers.index(None)
                raise RuntimeError(
                    f"The optimizer states of rank {old} of {len(keepers)} are lost, since rank {keepers[old]}, which "
                    "kept their copy, has died too. Start again from a checkpoint, or name it in "
                    "ElasticState(checkpoint=...)."
                )
            trainer.load_states(self._checkpoint)
            last.training[number].restore(trainer)  # counters and settings: those in the file are from an earlier step
            return
        held = {}
        if ranks_then[global_process_set.rank()] is not None:  # otherwise this worker is new
            held = {keepers.index(last.rank): last.kept[number], last.rank: last.own[number]}
        shard_replicas.divide_anew(trainer._store_optimizer, last.training[number].shards, providers, held)


class _Copy:
    """One of the two buffers of commits.

    Attributes
    ----------
    number : int
        The number of the commit; _NEVER while the copy is incomplete.
    rank : int
        This worker's rank at the commit.
    keepers : list of int
        The keeper of each worker's share at the commit.
    own, kept : dict of ndarray
        For each trainer with the optimizer on the store: this worker's share of the states, and the share that this
        worker keeps for another worker, as bytes.
    """

    def __init__(self, trainers: int) -> None:
        self.number = _NEVER
        self.rank = 0
        self.keepers: list[int] = []
        self.values: dict[str, Any] = {}
        self.parameters = snapshots.Parameters()
        self.training = [snapshots.Training() for _ in range(trainers)]
        self.own: dict[int, np.ndarray] = {}
        self.kept: dict[int, np.ndarray] = {}

    def take(self, parameters: Sequence[Parameter], trainers: Sequence[Any], values: dict[str, Any]) -> None:
        self.number = _NEVER
        core = global_process_set._core
        self.rank, self.keepers = core.rank(), shard_replicas.keepers(core.host_ranks())
        self.values = copy.deepcopy(values)
        arriving = self.parameters.take(parameters)
        for training, trainer in zip(self.training, trainers):
            arriving += training.take(trainer)
        for array in arriving:
            array.wait_to_read()
        for number, (training, trainer) in enumerate(zip(self.training, trainers)):
            if trainer._store_optimizer is None:
                continue
            self.own[number] = shard_replicas.pack(training.states)
            with operation.waiting(global_process_set, "commit") as turn:
                sizes = turn.meet("commit of states", [len(self.own[number])])[:, 0].tolist()
            self.kept[number] = shard_replicas.pass_on(self.own[number], sizes, self.keepers[self.rank])
