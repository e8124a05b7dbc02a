"""The store in MXNet's Module API, which only 1.x has: ``mx.mod.Module(...).fit(kvstore='mykv')``.

Module was written for MXNet's own stores. It counts the workers in rescale_grad only if the store's type contains
'dist' and '_sync'. If it does not update on the store, it never gives the workers equal starting weights. It does not
check that all workers have the same batch size. This file replaces the functions that Module calls, for this store
only.
"""

from __future__ import annotations

from typing import Any, Callable

from ..compat import arrays, patches
from ..compat.mxnet import MXNetError
from ..coordination import agreement, deadlock_check, operation
from ..coordination.step_label import value_of
from ..sharded_optimizer import traits
from ..store.kvstore import MyKV
from ..store.names import created, is_ours
from ..world import process
from .distributed_optimizer import check_not_averaging

_ANOTHER_STORE = "another store than 'mykv'"


class ModuleStore(MyKV):
    """A view of a store with a type that Module recognizes as a synchronous store of several workers.

    The view shares the attributes of the store, so that both always have the same state. gluon.Trainer must not see
    this type: with such a store it would reject changes of the learning rate or the parameters.

    Parameters
    ----------
    store : MyKV
        The store whose attributes the view shares.
    """

    def __init__(self, store: MyKV) -> None:
        self.__dict__ = store.__dict__

    @property
    def type(self) -> str:
        """'dist_sync_mykv'."""
        return "dist_sync_mykv"

    def begin_training(
        self, param_arrays: Any, arg_params: dict, param_names: list[str], update_on_kvstore: bool
    ) -> None:
        """Copy the weights of rank 0 to all workers, to every executor and to the Module's own copy.

        Waits for all workers.

        Parameters
        ----------
        param_arrays, arg_params, param_names, update_on_kvstore
            As in MXNet's _initialize_kvstore.

        Raises
        ------
        RuntimeError
            The workers' Modules have different parameters, or only some update on the store. All workers get the error.
        """
        where = "on the store" if update_on_kvstore else "on the workers"
        agreement.check_names(
            self._process_set,
            deadlock_check.waiting_name(self._process_set),
            param_names,
            "parameters of a Module",
            f"a Module that updates {where}",
            remedy="Name the symbols (name='fc1'): MXNet numbers those without a name in each process alone.",
        )
        for name, replicas in zip(param_names, param_arrays):
            value = arg_params[name]
            if value.stype == "default":
                self.broadcast(name, value, out=replicas)
                arrays.copy(replicas[0], value)
            else:
                self.init(name, value)

    def agree_on_rescaling(self, module: Any, is_modules_own: bool) -> None:
        """Make all workers multiply the sum of gradients by the same factor. Waits for all workers.

        Parameters
        ----------
        module : Module
            A Module with an optimizer.
        is_modules_own : bool
            Whether Module has computed rescale_grad. If so on all workers, and the factors differ because batch sizes
            differ (for example with unequal numbers of devices), rescale_grad becomes 1 / the sum of all batch sizes.

        Raises
        ------
        MXNetError
            The workers' factors differ, and the user has given a factor. All workers get the error.
        """
        optimizer = module._optimizer
        factor = value_of(optimizer.rescale_grad)
        call = "a Module's optimizer"
        numbers = [int(is_modules_own), module._exec_group.batch_size, *agreement.as_integers([factor])]
        met = operation.exchange(self._process_set, deadlock_check.waiting_name(self._process_set), call, call, numbers)
        factors = agreement.as_floats(met[:, 2])
        other = agreement.first_that_differs(met[:, 2:])
        if other is None:
            return
        if not met[:, 0].all():
            raise MXNetError(
                f"rescale_grad must be the same on all workers, but it is {factors[0]!r} on rank "
                f"{self._process_set.ranks[0]}, {factors[other]!r} on rank {self._process_set.ranks[other]} and "
                f"{factor!r} on this rank, {process.rank()}. Give the same value everywhere, or let Module choose it."
            )
        optimizer.rescale_grad = 1.0 / int(met[:, 1].sum())


@patches.replaces(
    "model._create_kvstore",
    "module.module._create_kvstore",
    releases=(1,),
    why="MXNet drops the name of a store where a process has one device: each worker would train alone. Module knows "
    "by a store's type whether it has several workers.",
    does="Creates the store 'mykv' where its name is given, under a type that Module knows.",
    undone_by=_ANOTHER_STORE,
)
def _create_kvstore(original: Callable, kvstore: Any, *args: Any, **kwargs: Any) -> Any:
    store, update_on_kvstore = original(created(kvstore), *args, **kwargs)
    return (ModuleStore(store) if isinstance(store, MyKV) else store), update_on_kvstore


@patches.replaces(
    "model._initialize_kvstore",
    "module.module._initialize_kvstore",
    releases=(1,),
    when=patches.AT_INIT,
    why="A Module that does not update on the store never gives the workers equal weights.",
    does="Gives all workers the weights of rank 0.",
    undone_by=_ANOTHER_STORE,
)
def _initialize_kvstore(
    original: Callable,
    kvstore: Any,
    param_arrays: Any,
    arg_params: dict,
    param_names: list[str],
    update_on_kvstore: bool,
) -> None:
    if isinstance(kvstore, MyKV):
        kvstore.begin_training(param_arrays, arg_params, param_names, update_on_kvstore)
    else:
        original(kvstore, param_arrays, arg_params, param_names, update_on_kvstore)


@patches.replaces(
    "module.Module.init_optimizer",
    releases=(1,),
    why="Module does not check that all workers multiply gradients by the same factor. A Module that was given the "
    "name 'mykv' has run no code of this package before this call.",
    does="Lets the workers compare or agree on the factor. Raises an error for a `DistributedOptimizer`.",
    undone_by=_ANOTHER_STORE,
)
def _init_optimizer(
    original: Callable,
    self: Any,
    kvstore: Any = "local",
    optimizer: Any = "sgd",
    optimizer_params: Any = (("learning_rate", 0.01),),
    force_init: bool = False,
) -> None:
    if is_ours(kvstore):
        check_not_averaging(optimizer, "Module")
    had_one = self.optimizer_initialized
    if isinstance(kvstore, MyKV) and kvstore._optimizer is not None and not had_one:
        # A SequentialModule passes the same store to all its Modules. The store holds the first Module's optimizer. So
        # each other Module gets a new store, as if it had been given the store's name.
        wire, kvstore = kvstore._wire, MyKV(kvstore._process_set)
        kvstore._wire = wire
    original(self, kvstore, optimizer, optimizer_params, force_init)
    if is_ours(kvstore) and (force_init or not had_one):
        if not self._update_on_kvstore:
            traits.warn_of_noise(self._optimizer, self._kvstore.size)
        is_modules_own = isinstance(optimizer, str) and "rescale_grad" not in dict(optimizer_params)
        self._kvstore.agree_on_rescaling(self, is_modules_own)
