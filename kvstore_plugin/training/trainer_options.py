"""The arguments of a DistributedTrainer: their checks, and the lines that must be the same on all workers."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any, Callable, Mapping, Sequence

from ..collectives import compression as compressions
from ..collectives.compression import Compression, UserCompression
from ..compat import arrays, mxnet
from ..compat.arguments import check_is_added, positive_number, whole_number
from ..compat.mxnet import Parameter
from ..coordination import step_label
from ..gradients.bucket_plan import Reduction
from ..gradients.bucket_sizes import default_bucket_bytes
from ..gradients.communication_hook import GradientBucket
from ..gradients.compressor_hook import CompressorHook
from ..gradients.power_sgd import PowerSGD
from ..parameters.naming import Named, described_within
from ..sharded_optimizer import traits
from ..world import failure_detector, process
from ..world.process_set import ProcessSet, global_process_set

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_REDUCE_METHODS = ("mean", "sum")
_STORES = ("local", "device", "nccl", "dist", "mykv", "horovod", "byteps")  # prefixes of stores' names


@dataclasses.dataclass(frozen=True)
class TrainerOptions:
    """Arguments of a DistributedTrainer, with the same names."""

    process_set: ProcessSet
    parameter_process_sets: Mapping[Parameter | str, ProcessSet | None] | None
    root_rank: int
    prefix: str | None
    compression: Any  # an object with the attribute `wire`
    num_groups: int
    bucket_bytes: int
    update_on_kvstore: bool | None
    reduce_method: str
    gradients_after_allreduce: str | None
    gradient_predivide_factor: float
    broadcast_period: int
    aux_sync_period: int
    elastic: bool
    clip_global_norm: float | None
    communication_hook: Callable[[GradientBucket], None] | None

    @classmethod
    def checked(cls, *, compression_params: Mapping[str, Any] | None, **given: Any) -> TrainerOptions:
        """The options from the user's arguments.

        Raises
        ------
        TypeError, ValueError, NotImplementedError
            An argument is wrong.
        """
        process_set = given["process_set"]
        check_is_added(process_set)
        if isinstance(given["compression"], str) and given["compression"].startswith(_STORES):
            raise TypeError(
                "The fourth argument of DistributedTrainer is compression, not a store such as "
                f"{given['compression']!r}, which it does not need. Leave it out."
            )
        if isinstance(given["compression"], numbers.Integral):
            raise TypeError(
                "The fourth argument of DistributedTrainer is compression, as in Horovod. If root_rank is meant, as in "
                f"BytePS, pass it by keyword, with what follows it: root_rank={given['compression']!r}, "
                "compression_params=..."
            )
        given["compression"] = compressions.choose(given["compression"], compression_params)
        given["gradient_predivide_factor"] = positive_number(
            "gradient_predivide_factor", given["gradient_predivide_factor"]
        )
        if given["bucket_bytes"] is None:
            core = process_set._core if process_set.included() else process.core  # a worker outside trains alone
            given["bucket_bytes"] = default_bucket_bytes(len(core.host_ranks()), core.size())
        for name, least in (("num_groups", 0), ("bucket_bytes", 0), ("broadcast_period", -1), ("aux_sync_period", 0)):
            given[name] = whole_number(name, given[name], least)
        given["clip_global_norm"] = _norm(given["clip_global_norm"])
        options = cls(**given)
        options._check_choices()
        options._check_gradients_after_allreduce()
        options._check_hook()
        return options

    @functools.cached_property
    def sums_of_means(self) -> bool:
        """Whether gradients are sums between allreduce_grads() and update(), and update() divides the sums."""
        return self.reduce_method == "mean" and self.gradients_after_allreduce == "sum"

    @property
    def predivide(self) -> float:
        """The divisor of sums in allreduce_grads(); 1.0 unless `sums_of_means`."""
        return self.gradient_predivide_factor if self.sums_of_means else 1.0

    def lines(self, optimizer: Any) -> list[str]:
        """The options that must be equal on all workers, one per line, as error messages show them."""
        lines = [
            f"prefix={self.prefix!r}",
            f"root_rank={self.root_rank}",
            f"compression={self.compression!r}",
            f"num_groups={self.num_groups}",
            f"bucket_bytes={self.bucket_bytes}",
            f"gradient_predivide_factor={self.gradient_predivide_factor}",
            f"reduce_method={self.reduce_method!r}",
            f"gradients_after_allreduce={self.gradients_after_allreduce or self.reduce_method!r}",
            f"broadcast_period={self.broadcast_period}",
            f"aux_sync_period={self.aux_sync_period}",
            f"update_on_kvstore={bool(self.update_on_kvstore)}",
            f"elastic={bool(self.elastic)}",
            f"clip_global_norm={self.clip_global_norm}",
            f"communication_hook={_described(self.communication_hook)}",
            *traits.settings(optimizer),
        ]
        if optimizer.lr_scheduler is None:
            lines.append(f"learning rate {step_label.learning_rate_of(optimizer)!r}")
        return lines

    def reduction(self, store_optimizer: Any) -> Reduction:
        """How gradients are reduced."""
        return Reduction(
            self.process_set,
            self.reduce_method == "mean" and not self.sums_of_means,
            self.compression.wire,
            self.bucket_bytes,
            self.num_groups,
            store_optimizer,
            self.predivide,
            self._hook,
        )

    @property
    def _hook(self) -> Callable[[GradientBucket], None] | None:
        """The hook that reduces buckets instead of this package."""
        if isinstance(self.compression, UserCompression):
            return CompressorHook(self.compression, self.gradient_predivide_factor)
        return self.communication_hook

    def check_parameters(self, named: Sequence[Named]) -> None:
        """Raise an error if these parameters cannot be trained with these options.

        Raises
        ------
        TypeError, ValueError, NotImplementedError
            The message names the parameter.
        """
        for label, parameter, _ in named:
            _check_parameter(label, parameter)
        if self.update_on_kvstore:
            self._check_update_on_kvstore(named)
        if self.clip_global_norm is not None:
            self._check_clipping(named)
        if self._hook is not None:
            self._check_hooked(named)
        if self.elastic:
            self._check_elastic(named)
            failure_detector.check_possible()

    def _check_choices(self) -> None:
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise TypeError(f"prefix must be a str, not {type(self.prefix).__name__}.")
        if not isinstance(self.reduce_method, str):
            raise TypeError(f"reduce_method must be a str, not {type(self.reduce_method).__name__}.")
        if self.reduce_method not in _REDUCE_METHODS:
            raise ValueError(f"reduce_method must be 'mean' or 'sum', not {self.reduce_method!r}.")
        if self.update_on_kvstore not in (None, False, True):
            raise TypeError(f"update_on_kvstore must be True, False or None, not {self.update_on_kvstore!r}.")

    def _check_gradients_after_allreduce(self) -> None:
        given = self.gradients_after_allreduce
        if given is not None and not isinstance(given, str):
            raise TypeError(f"gradients_after_allreduce must be a str or None, not {type(given).__name__}.")
        if given not in (None, *_REDUCE_METHODS):
            raise ValueError(f"gradients_after_allreduce must be 'mean' or 'sum', not {given!r}.")
        if given == "mean" and self.reduce_method == "sum":
            raise ValueError(
                "gradients_after_allreduce='mean' cannot be combined with reduce_method='sum', where update() takes "
                "sums. Leave one of the two out."
            )
        if given != "sum":
            return
        if self.update_on_kvstore:
            raise ValueError(
                "gradients_after_allreduce='sum' cannot be combined with update_on_kvstore=True, where "
                "allreduce_grads() cannot be called. Leave one of the two out."
            )
        if self.parameter_process_sets and self.reduce_method == "mean":
            raise ValueError(
                "gradients_after_allreduce='sum' cannot be combined with parameter_process_sets, since an update "
                "divides all gradients by the same number. Use 'mean'."
            )

    def _check_hook(self) -> None:
        """Reject options that cannot be combined with a communication hook or a user's compressor."""
        hook = self.communication_hook
        if hook is not None and not callable(hook):
            raise TypeError(
                f"communication_hook must be a function of a bucket or None, not {type(hook).__name__}. Pass a "
                "function that takes a GradientBucket, or an object such as PowerSGD()."
            )
        if self._hook is None:
            return
        if hook is not None and repr(self.compression) != repr(Compression.none):
            raise ValueError(
                f"communication_hook cannot be combined with the compression {self.compression!r}, since the hook "
                "decides what travels. Leave one of the two out."
            )
        if self.update_on_kvstore:
            raise ValueError(
                f"{self._hook_argument} cannot be combined with update_on_kvstore=True, where each worker gets sums of "
                "its own share of the gradients only. Leave one of the two out."
            )
        if self.elastic:
            raise ValueError(
                f"{self._hook_argument} cannot be combined with elastic=True, since it may keep states that differ "
                "between the remaining workers. Leave one of the two out."
            )

    @property
    def _hook_argument(self) -> str:
        """How errors name the argument that sets a hook: `communication_hook`, or `compression` with its value."""
        return "communication_hook" if self.communication_hook is not None else f"compression={self.compression!r}"

    def _check_hooked(self, named: Sequence[Named]) -> None:
        for label, parameter, _ in named:
            if parameter._grad_stype != "default":
                raise NotImplementedError(
                    f"{self._hook_argument} needs dense gradients, but those of {described_within(label, parameter)} "
                    f"are {parameter._grad_stype}. Use sparse_grad=False, or leave it out."
                )

    def _check_clipping(self, named: Sequence[Named]) -> None:
        for label, parameter, _ in named:
            dtype = arrays.dtype_name(parameter.dtype)
            if dtype not in _FLOATS and parameter.grad_req != "null":
                raise TypeError(
                    f"clip_global_norm needs gradients of {', '.join(_FLOATS)}, but those of "
                    f"{described_within(label, parameter)} are {dtype}. Set its grad_req to 'null'."
                )

    def _check_elastic(self, named: Sequence[Named]) -> None:
        for label, parameter, _ in named:
            if parameter._stype != "default" or parameter._grad_stype != "default":
                raise NotImplementedError(
                    f"elastic=True needs dense values and gradients, but parameter {label} ({parameter.name}) has "
                    f"values of {parameter._stype} and gradients of {parameter._grad_stype}. Use sparse_grad=False, or "
                    "elastic=False."
                )
        if self.process_set is not global_process_set or self.parameter_process_sets:
            raise ValueError(
                "elastic=True needs all parameters on all workers, since process sets end when a worker is lost. Give "
                "neither process_set nor parameter_process_sets."
            )

    def _check_update_on_kvstore(self, named: Sequence[Named]) -> None:
        if self.parameter_process_sets:
            raise ValueError(
                "update_on_kvstore=True needs all parameters in one process set. Leave parameter_process_sets out."
            )
        if not self.process_set.included():
            raise ValueError(f"update_on_kvstore=True needs this worker, rank {process.rank()}, in the process set.")
        for label, parameter, _ in named:
            if parameter._stype != "default":
                raise NotImplementedError(
                    f"The values of {described_within(label, parameter)} are {parameter._stype}, but with "
                    "update_on_kvstore=True only gradients may be sparse. Use nn.Embedding(sparse_grad=True), or "
                    "update_on_kvstore=False."
                )


def _described(hook: Any) -> str:
    """The text by which workers compare a hook: its repr if its class defines one, otherwise its name."""
    has_repr = hook is None or type(hook).__repr__ is PowerSGD.__repr__
    return repr(hook) if has_repr else compressions.described(hook)


def _norm(given: Any) -> float | None:
    """A value of clip_global_norm."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"clip_global_norm must be a number or None, not {type(given).__name__}.")
    if not given > 0:  # including NaN
        raise ValueError(f"clip_global_norm must be above 0, not {given!r}. Leave it out for no clipping.")
    return float(given)


def _check_parameter(label: str, parameter: Any) -> None:
    if not isinstance(parameter, Parameter):
        raise TypeError(f"params must hold Parameters, but {label} is a {type(parameter).__name__}.")
    for what, stype in (("values", parameter._stype), ("gradient", parameter._grad_stype)):
        if stype != "default" and not mxnet.HAS_SPARSE_PARAMETERS:
            raise NotImplementedError(
                f"The {what} of {described_within(label, parameter)} are {stype}, but only MXNet 1.9 trains sparse "
                "parameters: use sparse_grad=False, stype='default' and grad_stype='default'."
            )
        if stype not in ("default", "row_sparse"):
            raise NotImplementedError(
                f"The {what} of {described_within(label, parameter)} are {stype}, but only dense and row_sparse arrays "
                "can be trained. Use stype='default' and grad_stype='default'."
            )
