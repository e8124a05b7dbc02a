"""broadcast_states: sends one worker's training state to all workers, after only that worker has loaded a checkpoint.

The root sends a description as a pickle: names and shapes, the optimizer with its scheduler, and the numbers that the
trainer keeps. Arrays follow as operations of the core. The objects of a worker are overwritten in place, so that
references to the optimizer, its scheduler or AMP's scaler stay valid.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Sequence

import numpy as np

from ..collectives.objects import broadcast_object
from ..compat import arrays
from ..compat.mxnet import MXNetError, NDArray, SparseNDArray, Trainer, gluon, trainer_contexts
from ..compat.state_tree import Leaf, described_array, filled, made_array, mapped
from ..coordination import agreement, operation, operation_names
from ..gradients import parameter_groups
from ..integrations import gluon_trainer
from ..integrations.distributed_optimizer import DistributedOptimizer
from ..parameters import load_tracking, naming, placement, resumption
from ..parameters.deferred_init import Broadcast
from ..parameters.naming import Named
from ..store.kvstore import MyKV
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from .trainer import DistributedTrainer

# Attributes of an optimizer: its update counts, and the names that this worker has for the parameters.
_COUNTERS = {"num_update", "begin_num_update", "_index_update_count", "_all_index_update_counts"}
_OF_THE_WORKER = {"param_dict", "idx2name", "sym_info"}

# Attributes of a Trainer that are sent in addition to its optimizer. AMP changes the first and adds the second.
_OF_THE_TRAINER = ("_scale", "_amp_original_scale")


class _Share(NamedTuple):
    """The parameters that one process set trains; the root sends their values to all members."""

    process_set: ProcessSet
    named: Sequence[Named]
    root: int  # rank within the set
    with_optimizer: bool  # False: of the optimizer, only the states of these parameters are sent


def broadcast_states(trainer: gluon.Trainer, root_rank: int = 0, counters: bool = True) -> None:
    """Send the training state of one worker to all workers: parameters, optimizer states, settings and counts.

    For use after only one worker has loaded a checkpoint, with ``net.load_parameters`` and ``trainer.load_states``.
    Collective; returns when everything has arrived. It sends the values of all parameters of the trainer (including
    frozen and auxiliary parameters), the optimizer's states, settings (such as the learning rate) and scheduler, the
    scale of AMP, and the counts of updates. Deferred parameters are initialized if the root has values. States that a
    worker has not created yet are created.

    With the optimizer on the store no worker has all states: each worker has the states of its share, and load_states,
    which all workers call, gives each worker its share. So this call neither sends nor changes states.

    Parameters
    ----------
    trainer : gluon.Trainer or DistributedTrainer
        Created with the same arguments on all workers. A gluon.Trainer's workers are those of its store 'mykv' or its
        DistributedOptimizer; with neither, all workers. In a DistributedTrainer, each parameter's process set gets its
        values from the root, or from the set's first worker if the root is not in the set. Local parameters are left
        alone.
    root_rank : int, optional
        Global rank of the worker that sends. In a process set without rank 0, the default means the set's first worker.
    counters : bool, optional
        Whether to send the counts of updates, which learning rate schedules and Adam's bias correction use. False: each
        worker keeps its own counts.

    Raises
    ------
    TypeError, ValueError
        Errors of this rank's arguments: `trainer` is of another type, `root_rank` is not a worker of the trainer, a
        parameter has another shape or dtype than the root's. The other ranks get an MXNetError that names this rank.
    MXNetError
        The workers' trainers differ in parameters, in AMP, or in where they update; a worker waits in another call or
        has left; an array carries an error.

    Examples
    --------
    >>> if mykv.rank() == 0:  # the only worker that can read the checkpoint
    ...     net.save_parameters("net.params")
    ...     trainer.save_states("net.states")
    ...     net.load_parameters("net.params")
    ...     trainer.load_states("net.states")
    >>> mykv.broadcast_states(trainer, root_rank=0)
    """
    process.require()
    try:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a gluon.Trainer or DistributedTrainer, not {type(trainer).__name__}.")
        divided, counters = _shares_of(trainer, root_rank), bool(counters)
    except (TypeError, ValueError) as error:
        with operation.waiting(_process_set_of(trainer), "broadcast_states"):
            raise error
    for share in divided:
        _Exchange(trainer, share, root_rank, counters).run()


class _Exchange:
    """The exchange of broadcast_states in one process set."""

    def __init__(self, trainer: gluon.Trainer, share: _Share, root_rank: int, counters: bool) -> None:
        self._trainer = trainer
        self._share = share
        self._label = f"broadcast_states from rank {root_rank}, counters={counters}"
        self._counters = counters
        self._index_of = {id(parameter): index for index, parameter in enumerate(trainer._params)}
        self._is_root = share.process_set.rank() == share.root
        self._sent: list[NDArray] = []  # on the root, the arrays of the optimizer's states

    def run(self) -> None:
        attached = self._meet()
        share = self._share
        sent = self._described() if self._is_root else None
        described = broadcast_object(sent, share.process_set.ranks[share.root], "broadcast_states", share.process_set)
        with operation.waiting(share.process_set, "broadcast_states") as turn:
            self._check(described)
            # Use new names: an exception in an earlier call may have left different call counts for that call's names.
            scope, _ = operation_names.numbered_alike(
                turn, share.process_set, "broadcast_states", "broadcast_states of values"
            )
        for (_, parameter, _), like in zip(share.named, described["parameters"]):
            if like is not None and parameter._data is None:
                parameter.shape = like.shape
                parameter._finish_deferred_init()
        self._attach(attached)
        arriving = self._push_values(described["parameters"], scope)
        received = self._push_states(described["arrays"], scope)
        for array in arriving + received:
            array.wait_to_read()
        share.process_set._core.forget(f"{scope}/")
        self._keep_states(described["states"], received)
        if share.with_optimizer:
            self._keep_optimizer(described["optimizer"])
            self._keep_names()
            self._keep_numbers(described)
        if self._counters:
            self._keep_counters(described)
        load_tracking.forget([item.value for item in share.named])

    def _meet(self) -> np.ndarray:
        """Compare the trainers; returns a flag for each worker, whether its trainer is attached to a store."""
        share, trainer = self._share, self._trainer
        names = [item.name for item in share.named]
        with_scaler = getattr(trainer, "_amp_loss_scaler", None) is not None
        with operation.waiting(share.process_set, "broadcast_states") as turn:
            mine = [agreement.digest(names), len(names), with_scaler, gluon_trainer.was_attached(trainer)]
            met = turn.meet(self._label, mine)
        self._require_same(met[:, :2], f"parameters; on this rank, {process.rank()}, there are {len(names)}")
        self._require_same(met[:, 2:3], "use of AMP; call init_trainer() on all workers first")
        if met[share.root, 3] and not met[:, 3].all() and share.root != 0:
            raise MXNetError(
                f"On rank {share.process_set.ranks[share.root]} the trainer has already set up its store; on other "
                f"ranks it has not. So all trainers get the values of rank {share.process_set.ranks[0]}. Load on rank "
                f"{share.process_set.ranks[0]}, on all ranks, or after the first step."
            )
        return met[:, 3]

    def _require_same(self, met: np.ndarray, what: str) -> None:
        other = agreement.first_that_differs(met)
        if other is not None:
            ranks = self._share.process_set.ranks
            raise MXNetError(
                f"broadcast_states needs the same trainer on all workers, but the trainer of rank {ranks[other]} "
                f"differs from the trainer of rank {ranks[0]} in its {what}."
            )

    def _described(self) -> dict[str, Any]:
        """The root's message, with arrays replaced by descriptions."""
        trainer = self._trainer
        states = {}
        for name, parameter, _ in self._share.named:
            index = self._index_of[id(parameter)]
            if index in trainer._updaters[0].states:
                states[name] = mapped(trainer._updaters[0].states[index], self._described_array)
        optimizer = _unwrapped(trainer._optimizer)
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        return {
            "parameters": [
                item.value._data and described_array(item.value._data[0], also_sparse=True)
                for item in self._share.named
            ],
            "states": states,
            "arrays": [described_array(array) for array in self._sent],
            "optimizer": optimizer if self._share.with_optimizer else None,
            "trainer": {name: vars(trainer)[name] for name in _OF_THE_TRAINER if name in vars(trainer)},
            "scaler": None if scaler is None else vars(scaler),
            "counts": {
                name: optimizer._index_update_count[self._index_of[id(parameter)]]
                for name, parameter, _ in self._share.named
                if self._index_of[id(parameter)] in optimizer._index_update_count
            },
        }

    def _described_array(self, array: NDArray) -> Leaf | NDArray:
        """Placeholder for an array of a state, which is sent separately; sparse arrays are sent in the pickle."""
        if isinstance(array, SparseNDArray):
            return array
        self._sent.append(array)
        return described_array(array)

    def _check(self, described: dict[str, Any]) -> None:
        """Raise an error if this worker cannot take the root's state."""
        root = self._share.process_set.ranks[self._share.root]
        for (name, parameter, _), like in zip(self._share.named, described["parameters"]):
            if like is None:
                if parameter._data is not None:
                    raise ValueError(
                        f"{naming.described(name, parameter)} has values on this rank, but none on rank {root}. "
                        f"Initialize it on rank {root} too."
                    )
                continue
            held = parameter if parameter._data is None else parameter._data[0]
            fits = parameter.shape is None or (
                len(parameter.shape) == len(like.shape)
                and all(own in (other, 0, -1) for own, other in zip(parameter.shape, like.shape))
            )
            if not fits or arrays.dtype_name(held.dtype) != arrays.dtype_name(like.dtype):
                raise ValueError(
                    f"{naming.described(name, parameter)} is {parameter.shape} {arrays.dtype_name(held.dtype)} here, "
                    f"but {like.shape} {arrays.dtype_name(like.dtype)} on rank {root}. Build the same network on all "
                    "ranks."
                )
        optimizer = _unwrapped(self._trainer._optimizer)
        if self._share.with_optimizer and type(described["optimizer"]) is not type(optimizer):
            raise ValueError(
                f"The optimizer is {type(optimizer).__name__} here, but {type(described['optimizer']).__name__} on "
                f"rank {root}. Create the trainers with the same optimizer."
            )

    def _attach(self, attached: np.ndarray) -> None:
        """Attach the gluon.Trainers of all workers to the store if some are attached.

        A Trainer may have set up its store in load_states(), before its first step. A Trainer that updates on the store
        drops its store in load_parameters().
        """
        trainer = self._trainer
        if gluon_trainer.was_attached(trainer):
            gluon_trainer.attach_again(trainer)
        elif attached.any():
            trainer._init_kvstore()
            trainer._init_params()

    def _push_values(self, described: Sequence[Leaf | None], scope: str) -> list[NDArray]:
        arriving = []
        for (name, parameter, position), like in zip(self._share.named, described):
            if like is not None:
                name = f"{scope}/values/{name}"
                Broadcast(self._share.process_set, name, self._share.root, -position).push(parameter._data)
                arriving += parameter._data
        return arriving

    def _push_states(self, described: Sequence[Leaf], scope: str) -> list[NDArray]:
        process_set = self._share.process_set
        received = self._sent if self._is_root else [made_array(leaf) for leaf in described]
        for number, array in enumerate(received):
            name = f"{scope}/states/{number}"
            process_set._core.push_broadcast(name, array.handle.value, arrays.handles([array]), self._share.root)
        return received

    def _keep_states(self, described: dict[str, Any], received: list[NDArray]) -> None:
        """Give each device's updater its own states; MXNet moves them to the device at their first use."""
        for number, updater in enumerate(self._trainer._updaters):
            with arrays.not_recorded():
                # On the root, `received` are the arrays of its first updater: no copy is needed.
                own = received if number == 0 else [array.copy() for array in received]
            left = iter(own)
            states = {name: filled(skeleton, left) for name, skeleton in copy.deepcopy(described).items()}
            for name, parameter, _ in self._share.named:
                index = self._index_of[id(parameter)]
                updater.states.pop(index, None)
                updater.states_synced.pop(index, None)
                if name in states:
                    updater.states[index], updater.states_synced[index] = states[name], False

    def _keep_optimizer(self, received: Any) -> None:
        for optimizer in self._optimizers():
            if optimizer is received:
                continue
            for name, value in vars(copy.deepcopy(received)).items():
                if name in _COUNTERS or name in _OF_THE_WORKER:
                    continue
                mine = getattr(optimizer, name, None)
                if name == "lr_scheduler" and value is not None and type(mine) is type(value):
                    vars(mine).clear()
                    vars(mine).update(vars(value))
                else:
                    vars(optimizer)[name] = value
            if self._counters:
                optimizer.num_update, optimizer.begin_num_update = received.num_update, received.begin_num_update

    def _keep_names(self) -> None:
        """Give each DistributedOptimizer the same name on all workers: load_states() may have replaced some of them."""
        held = [self._trainer._optimizer, *(updater.optimizer for updater in self._trainer._updaters)]
        wrappers = [one for one in held if isinstance(one, DistributedOptimizer)]
        if wrappers:
            first_use = operation_names.FirstUse(self._share.process_set, "optimizer", "broadcast_states()")
            first_use.meet()
            for wrapper in wrappers:
                wrapper._mean.renumber(first_use.number)

    def _keep_numbers(self, described: dict[str, Any]) -> None:
        vars(self._trainer).update(described["trainer"])
        if described["scaler"] is not None:
            vars(self._trainer._amp_loss_scaler).update(described["scaler"])

    def _keep_counters(self, described: dict[str, Any]) -> None:
        devices = {0, *(device.device_id for device in trainer_contexts(self._trainer) or ())}
        devices.update(placement.device_ids(self._trainer._params))
        for optimizer in self._optimizers():
            for number in devices:
                counts = optimizer._all_index_update_counts.setdefault(number, {})
                for name, parameter, _ in self._share.named:
                    counts.pop(self._index_of[id(parameter)], None)
                    if name in described["counts"]:
                        counts[self._index_of[id(parameter)]] = described["counts"][name]

    def _optimizers(self) -> list[Any]:
        """The optimizers of the trainer and its updaters, each once; usually one."""
        held = [self._trainer._optimizer, *(updater.optimizer for updater in self._trainer._updaters)]
        return list({id(one): one for one in map(_unwrapped, held)}.values())


def _process_set_of(trainer: Any) -> ProcessSet:
    """The process set of a trainer's workers."""
    if isinstance(trainer, DistributedTrainer):
        return trainer._workers.process_set
    if not isinstance(trainer, Trainer):
        return global_process_set
    store = trainer._kvstore_params["kvstore"]
    if isinstance(store, MyKV):
        return store._process_set
    if isinstance(trainer._optimizer, DistributedOptimizer):
        return trainer._optimizer._mean.process_set
    return global_process_set


def _shares_of(trainer: gluon.Trainer, root_rank: int) -> list[_Share]:
    global_process_set._position_of(root_rank)  # raises if root_rank is not a rank
    main = _process_set_of(trainer)
    if isinstance(trainer, DistributedTrainer):
        return [
            _Share(
                share.process_set,
                share.named,
                parameter_groups.root_of(share.process_set, root_rank, main),
                share.process_set is main,
            )
            for share in trainer._shares
        ]
    named = naming.named_parameters(trainer._params)
    return [_Share(main, named, parameter_groups.root_of(main, root_rank, main), True)]


def _unwrapped(optimizer: Any) -> Any:
    return optimizer._optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer


resumption.use(broadcast_states)
