"""DistributedTrainer: gluon.Trainer whose gradients are averaged over all workers."""

from __future__ import annotations

import warnings
from typing import Any, Mapping, Sequence

from . import compression as compressions
from . import mxnet_compat, parameters, process, shares
from .arguments import check_is_added, check_predivide_factor, whole_number
from .compression import Compression
from .gradients import Gradients
from .local_gradients import LocalGradients
from .mxnet_compat import Parameter, gluon
from .optimizer import DistributedOptimizer
from .parameters import Named
from .plan import Reduction
from .process_set import ProcessSet, global_process_set

_REDUCE_METHODS = ("mean", "sum")


class DistributedTrainer(gluon.Trainer):
    """Trains the same parameters on all workers, each on data of its own.

    Gradients are averaged over the workers, so that the arguments of step() mean what they mean in one process with a
    worker's batch. All workers start from the values of `root_rank`, also where the parameters are initialized later,
    in the first forward pass or anew. Creating a trainer is collective, as init() is, which it calls if nobody has;
    all workers must create their trainers in the same order, with the same arguments (but for `bucket_bytes`).

    Parameters
    ----------
    params : ParameterDict, dict or list of Parameter
        Matched between workers by key, or by position in a list or a ParameterDict; never by Parameter.name. A
        Parameter that is there twice is trained once.
    optimizer : str or Optimizer
        As for gluon.Trainer. Of a `DistributedOptimizer` the wrapped optimizer is taken, with a UserWarning, since
        gradients need averaging once.
    optimizer_params : dict, optional
        As for gluon.Trainer.
    compression : optional
        Type in which gradients travel between hosts: `Compression.none`, `Compression.fp16` or `Compression.bf16`.
    gradient_predivide_factor : float, optional
        Finite and above 0. Elsewhere it divides gradients before they are summed, so that sums of float16 stay in
        range, and multiplies the result. Here sums of 16 bits are formed in 32, and one scale is applied to the sum, so
        the result is the mean whatever the factor is.
    prefix : str, optional
        Part of the names in error messages.
    num_groups : int, optional
        Gradients are reduced in so many groups, as many gradients in each, in the order of `params`: those of a group
        and a dtype by one operation, whatever their size. 0: `bucket_bytes` divides them. With more groups than
        gradients each is a group.
    process_set : ProcessSet, optional
        The workers that train together. In a trainer of another worker all parameters stay local.
    root_rank : int, optional
        The worker, as a global rank, whose initial values count. In a process set that does not hold rank 0, the
        default means its first one.
    update_on_kvstore : bool, optional
        Must be None or False: there are no servers.
    bucket_bytes : int, optional
        Gradients are put into shared memory next to each other, up to so many bytes, and each such bucket is reduced
        by one operation. 0: they stay where MXNet made them, and each is copied into shared memory and back (with
        `num_groups`, by one operation for each group). The value of the set's first worker counts for all, and so does
        its division of gradients into buckets.
    reduce_method : str, optional
        'mean' or 'sum': what becomes of the gradients of several workers.
    broadcast_period : int, optional
        0: parameters are broadcast at the start only. n > 0: in every n-th step, before the update, they are again
        overwritten on every worker and device with those of `root_rank`. -1: they are never broadcast, those whose
        initialization is deferred neither; the workers must see to equal values themselves.
    parameter_process_sets : dict, optional
        Process sets of single parameters, in place of `process_set`. Its keys are Parameters, or keys of `params`.
        Where the value is None, or a set without this worker, the parameter stays local: it is neither broadcast nor
        reduced, and trained on this worker's gradients alone.

    Raises
    ------
    NotImplementedError
        An argument has a value that is not built yet, or a parameter or its gradient is sparse.
    TypeError, ValueError
        An argument is wrong, or a process set was not added.
    RuntimeError
        The workers have other sets of parameters, or other arguments.
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
        reduce_method: str = "mean",
        broadcast_period: int = 0,
        parameter_process_sets: Mapping[Parameter | str, ProcessSet | None] | None = None,
    ) -> None:
        process.require()
        scopes = shares.scopes_of(process_set, parameter_process_sets)
        try:
            check_is_added(process_set)
            compressions.check(compression)
            check_predivide_factor(gradient_predivide_factor)
            num_groups = whole_number("num_groups", num_groups, 0)
            bucket_bytes = whole_number("bucket_bytes", bucket_bytes, 0)
            broadcast_period = whole_number("broadcast_period", broadcast_period, -1)
            _check_choices(prefix, update_on_kvstore, reduce_method)
            named = parameters.named_parameters(params)
            _check_parameters(named)
            named_of = shares.divide(params, named, process_set, parameter_process_sets)
            global_process_set.position_of(root_rank)  # raises where it is no rank
            roots = {one: shares.root_of(one, root_rank, process_set) for one in scopes}
            super().__init__(_in_mxnets_order(params), _unwrapped(optimizer), optimizer_params, None, None, False)
        except Exception as error:
            shares.refuse(scopes.items(), error)
            raise
        self._ignores_stale = False
        self._freshness_is_shared = False
        self._broadcast_period = broadcast_period
        self._steps = 0
        suffix = f".{prefix}" if prefix else ""
        self._shares = [
            shares.Share(one, name + suffix, named_of.get(one, []), roots[one]) for one, name in scopes.items()
        ]
        label = (
            f"prefix={prefix!r}, root_rank={root_rank}, compression={compression!r}, num_groups={num_groups}, "
            f"gradient_predivide_factor={float(gradient_predivide_factor)}, reduce_method={reduce_method!r}, "
            f"broadcast_period={broadcast_period}"
        )
        how = Reduction(process_set, reduce_method == "mean", compression.wire, bucket_bytes, num_groups)
        self._gradients = self._met(scopes, how, label)
        local = [one.value for one in named_of.get(None, [])]
        if local:
            self._gradients.append(LocalGradients(local, self._follow_devices))

    def _met(self, scopes: dict[ProcessSet, str], how: Reduction, label: str) -> list[Gradients | LocalGradients]:
        """Meet the other members of each process set, give the parameters equal values, and keep their gradients."""
        met = []
        for number, share in enumerate(self._shares):
            try:
                reduction = how._replace(process_set=share.process_set)
                meeting = f"{scopes[share.process_set]}/parameters"
                gradients = Gradients(meeting, share.scope, share.named, reduction, self._follow_devices, label)
                if self._broadcast_period >= 0:
                    parameters.keep_equal(share.process_set, share.named, share.scope, share.root)
            except Exception as error:
                shares.refuse(list(scopes.items())[number + 1 :], error)
                raise
            if share.named:
                met.append(gradients)
        return met

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Average the gradients over the workers and update the parameters. Returns at once.

        Parameters
        ----------
        batch_size : int
            Size of this worker's batch; gradients are divided by it. It must be the same on all workers: with others
            their weights would drift apart, so that is an error. Where it is not that of the last step, this waits
            until the workers have compared it.
        ignore_stale_grad : bool, optional
            A worker whose backward has not used a parameter contributes zeros; all workers update it if any has used
            it, and none if none has. This waits for the other workers.

        Raises
        ------
        UserWarning
            A parameter was not used since the last step, and `ignore_stale_grad` is not set.
        MXNetError
            A parameter has no values yet, here or on another worker, or the workers do not take this step alike, for
            example with batches of different sizes.
        """
        factor = self._scale / batch_size
        self._check_and_rescale_grad(factor)
        self._allreduce(ignore_stale_grad, factor)
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
            Size of this worker's batch; gradients are divided by it. It must be the same on all workers, which only
            step() checks.
        ignore_stale_grad : bool, optional
            As for step().
        """
        self._check_and_rescale_grad(self._scale / batch_size)
        self._ignores_stale = ignore_stale_grad
        if ignore_stale_grad and not self._freshness_is_shared:
            for gradients in self._gradients:
                gradients.share_freshness()
        self._update(ignore_stale_grad)

    def _allreduce(self, ignore_stale: bool, factor: float | None = None) -> None:
        for number, gradients in enumerate(self._gradients):
            try:
                gradients.allreduce(ignore_stale, factor)
            except Exception as error:
                for later in self._gradients[number + 1 :]:
                    later.refuse(str(error))
                raise
        self._freshness_is_shared = ignore_stale

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if self._broadcast_period > 0:
            self._steps += 1
            if self._steps % self._broadcast_period == 0:
                for share in self._shares:
                    parameters.broadcast_again(share.process_set, share.named, share.scope, share.root)
        super()._update(ignore_stale_grad)

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


def _check_choices(prefix: str | None, update_on_kvstore: bool | None, reduce_method: str) -> None:
    if prefix is not None and not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, not {type(prefix).__name__}.")
    if not isinstance(reduce_method, str):
        raise TypeError(f"reduce_method must be a str, not {type(reduce_method).__name__}.")
    if reduce_method not in _REDUCE_METHODS:
        raise ValueError(f"reduce_method must be 'mean' or 'sum', not {reduce_method!r}.")
    if update_on_kvstore:
        raise NotImplementedError("update_on_kvstore=True is not built yet: each worker updates its own copy.")


def _unwrapped(optimizer: Any) -> Any:
    if not isinstance(optimizer, DistributedOptimizer):
        return optimizer
    warnings.warn(
        "DistributedTrainer was given a DistributedOptimizer and takes the optimizer that it wraps, since both of them "
        "average gradients: pass that one.",
        UserWarning,
        stacklevel=3,
    )
    return optimizer._optimizer


def _in_mxnets_order(params: Any) -> list[Parameter]:
    """The parameters in the order in which gluon.Trainer numbers them, by which states are saved; each once."""
    ordered = params if isinstance(params, (list, tuple)) else [params[key] for key in sorted(params.keys())]
    return list({id(parameter): parameter for parameter in ordered}.values())


def _check_parameters(named: Sequence[Named]) -> None:
    for label, parameter, _ in named:
        if not isinstance(parameter, Parameter):
            raise TypeError(f"params must hold Parameters, but {label} is a {type(parameter).__name__}.")
        for what, stype in (("values", parameter._stype), ("gradient", parameter._grad_stype)):
            if stype != "default":
                raise NotImplementedError(
                    f"The {what} of parameter {label} ({parameter.name}) are {stype}, and only dense arrays can be "
                    "reduced: use sparse_grad=False, stype='default' and grad_stype='default'."
                )
