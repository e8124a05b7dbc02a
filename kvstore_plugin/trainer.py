"""DistributedTrainer: gluon.Trainer whose gradients are averaged over all workers."""

from __future__ import annotations

import itertools
import math
from typing import Any

from . import compression as compressions
from . import mxnet_compat, parameters, process
from . import process_set as process_sets
from .compression import Compression
from .gradients import Gradients
from .mxnet_compat import Parameter, gluon
from .process_set import ProcessSet, global_process_set

_numbers = itertools.count()


class DistributedTrainer(gluon.Trainer):
    """Trains the same parameters on all workers, each on data of its own.

    Gradients are averaged over the workers, so that the arguments of step() mean what they mean in one process with a
    worker's batch. All workers start from the values of `root_rank`, also where the parameters are initialized later,
    in the first forward pass or anew. Creating a trainer is collective, as init() is, which it calls if nobody has;
    all workers must create their trainers in the same order.

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter
        Matched between workers by key, or by position in a list or a ParameterDict; never by Parameter.name. A
        Parameter that is there twice is trained once.
    optimizer : str or Optimizer
        As for gluon.Trainer.
    optimizer_params : dict, optional
        As for gluon.Trainer.
    compression : optional
        `Compression.none`.
    gradient_predivide_factor : float, optional
        Must be 1.0.
    prefix : str, optional
        Part of the names in error messages.
    num_groups : int, optional
        Must be 0.
    process_set : optional
        Must be `global_process_set`.
    root_rank : int, optional
        The worker whose initial values count.
    update_on_kvstore : bool, optional
        Must be None or False: there are no servers.
    bucket_bytes : int, optional
        Gradients are put into shared memory next to each other, up to so many bytes, and each such bucket is reduced
        by one operation. 0: they stay where MXNet made them, and each is copied into shared memory and back.

    Raises
    ------
    NotImplementedError
        An argument has a value that is not built yet, or a parameter or its gradient is sparse.
    TypeError, ValueError
        An argument is wrong.
    RuntimeError
        The workers have other sets of parameters.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        *,
        root_rank: int = 0,
        update_on_kvstore: bool | None = None,
        bucket_bytes: int = 16 << 20,
    ) -> None:
        process.require()
        scope = f"trainer{next(_numbers)}" + (f".{prefix}" if prefix else "")
        try:
            compressions.check(compression)
            process_sets.check(process_set)
            _check_arguments(gradient_predivide_factor, num_groups, update_on_kvstore, bucket_bytes)
            parameters.check_root(root_rank)
            named = parameters.named_parameters(params)
            _check_parameters(named)
            super().__init__(_in_mxnets_order(params), optimizer, optimizer_params, None, None, False)
        except Exception as error:
            process.core.refuse(f"{scope}/parameters", str(error))
            raise
        self._gradients = Gradients(scope, named, bucket_bytes, self._follow_devices)
        self._ignores_stale = False
        self._freshness_is_shared = False
        parameters.keep_equal(named, scope, root_rank)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Average the gradients over the workers and update the parameters. Returns at once.

        Parameters
        ----------
        batch_size : int
            Size of this worker's batch; gradients are divided by it.
        ignore_stale_grad : bool, optional
            A worker whose backward has not used a parameter contributes zeros; all workers update it if any has used
            it, and none if none has. This waits for the other workers.

        Raises
        ------
        UserWarning
            A parameter was not used since the last step, and `ignore_stale_grad` is not set.
        MXNetError
            A parameter has no values yet, here or on another worker, or the workers do not take this step alike.
        """
        self._check_and_rescale_grad(self._scale / batch_size)
        self._allreduce(ignore_stale_grad)
        self._update(ignore_stale_grad)

    def allreduce_grads(self) -> None:
        """Average the gradients over the workers, for use before update(): clip them, look at them. Returns at once.

        Once update() was called with ignore_stale_grad=True, this takes stale gradients as zeros, as step() then does.
        """
        self._allreduce(self._ignores_stale)

    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Update the parameters from gradients that allreduce_grads() has averaged.

        Parameters
        ----------
        batch_size : int
            Size of this worker's batch; gradients are divided by it.
        ignore_stale_grad : bool, optional
            As for step().
        """
        self._check_and_rescale_grad(self._scale / batch_size)
        self._ignores_stale = ignore_stale_grad
        if ignore_stale_grad and not self._freshness_is_shared:
            self._gradients.share_freshness()
        self._update(ignore_stale_grad)

    def _allreduce(self, ignore_stale: bool) -> None:
        self._gradients.allreduce(ignore_stale)
        self._freshness_is_shared = ignore_stale

    def _allreduce_grads(self) -> None:
        self.allreduce_grads()

    def _init_kvstore(self) -> None:
        # There is no store to set up, and MXNet's own version wants all parameters to be initialized.
        self._kv_initialized = True

    def _follow_devices(self) -> None:
        """Give each device of the parameters an updater whose states live there, after reset_ctx moved them."""
        old = mxnet_compat.trainer_contexts(self)
        new = next((mxnet_compat.contexts(p) for p in self._params if p._data is not None), old)
        if new == old:
            return
        states = self._updaters[0].get_states(dump_optimizer=False)
        self._updaters = [mxnet_compat.updater_with(self._optimizer, states) for _ in new]
        mxnet_compat.set_trainer_contexts(self, list(new))


def _check_arguments(
    gradient_predivide_factor: float, num_groups: int, update_on_kvstore: bool | None, bucket_bytes: int
) -> None:
    if not isinstance(bucket_bytes, int):
        raise TypeError(f"bucket_bytes must be an int, not {type(bucket_bytes).__name__}.")
    if bucket_bytes < 0:
        raise ValueError(f"bucket_bytes must be at least 0, not {bucket_bytes}.")
    if not isinstance(gradient_predivide_factor, (int, float)):
        raise TypeError(f"gradient_predivide_factor must be a number, not {type(gradient_predivide_factor).__name__}.")
    if not (math.isfinite(gradient_predivide_factor) and gradient_predivide_factor > 0):
        raise ValueError(f"gradient_predivide_factor must be finite and above 0, not {gradient_predivide_factor}.")
    if gradient_predivide_factor != 1.0:
        raise NotImplementedError("gradient_predivide_factor other than 1.0 is not built yet.")
    if not isinstance(num_groups, int):
        raise TypeError(f"num_groups must be an int, not {type(num_groups).__name__}.")
    if num_groups < 0:
        raise ValueError(f"num_groups must be at least 0, not {num_groups}.")
    if num_groups:
        raise NotImplementedError("num_groups other than 0 is not built yet.")
    if update_on_kvstore:
        raise NotImplementedError("update_on_kvstore=True is not built yet: each worker updates its own copy.")


def _in_mxnets_order(params: Any) -> list[Parameter]:
    """The parameters in the order in which gluon.Trainer numbers them, by which states are saved; each once."""
    ordered = params if isinstance(params, (list, tuple)) else [params[key] for key in sorted(params.keys())]
    return list({id(parameter): parameter for parameter in ordered}.values())


def _check_parameters(named: list[parameters.Named]) -> None:
    for label, parameter, _ in named:
        if not isinstance(parameter, Parameter):
            raise TypeError(f"params must hold Parameters, but {label} is a {type(parameter).__name__}.")
        for what, stype in (("values", parameter._stype), ("gradient", parameter._grad_stype)):
            if stype != "default":
                raise NotImplementedError(
                    f"The {what} of parameter {label} ({parameter.name}) are {stype}, and only dense arrays can be "
                    "reduced: use sparse_grad=False, stype='default' and grad_stype='default'."
                )
