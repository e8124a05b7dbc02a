"""allreduce_metric: the value of an evaluation metric over the data of all workers.

The mean of the workers' values is wrong if workers have seen different numbers of samples, or if the metric is not a
mean, such as F1. So the workers exchange the sums and counts from which the value is computed.
"""

from __future__ import annotations

import copy
import numbers
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from ..collectives.objects import allgather_object
from ..compat.mxnet import NDArray
from ..compat.mxnet import metric as mxnet_metrics
from ..coordination import operation
from ..world import process
from ..world.process_set import ProcessSet, global_process_set

_TOTALS = ("sum_metric", "num_inst", "global_sum_metric", "global_num_inst")
_COUNTS = tuple(
    f"{scope}{count}"
    for scope in ("", "global_")
    for count in ("true_positives", "false_positives", "true_negatives", "false_negatives")
)
_MATRICES = ("lcm", "gcm")
# Counts, means and squared deviations of labels and predictions, and the sum of products of their deviations.
_CORRELATION = ("_label_nums", "_mean_l", "_sse_l", "_pred_nums", "_mean_p", "_sse_p", "_conv", "num_inst")

# The class whose counts are reset after each batch with average='macro', a mean over batches. MXNet 1.x only.
_OF_BATCHES: Any = getattr(mxnet_metrics, "_BinaryClassificationMetrics", ())

State = Any


class _Kind(NamedTuple):
    """Describes how a kind of metric is combined."""

    matches: Callable[[Any], bool]
    names: Sequence[str]  # names of the attributes of its state
    combine: Callable[[Any, Sequence[State]], None]  # sets a metric to the combined states of all ranks
    holder: Callable[[Any], Any] = lambda metric: metric  # the object that has the attributes

    def state(self, metric: Any) -> State:
        """The numbers that a metric has counted, by the names of its attributes."""
        holder = self.holder(metric)
        present = [name for name in self.names if getattr(holder, name, None) is not None]
        return {name: _number(getattr(holder, name)) for name in present}


def allreduce_metric(metric: Any, process_set: ProcessSet = global_process_set) -> Any:
    """Combine a metric over all workers, as if one worker had seen all data. Collective; waits.

    Workers may have seen different numbers of samples, or none. Metrics that MXNet averages over batches are averaged
    over the batches of all workers.

    Parameters
    ----------
    metric : EvalMetric, or sequence of them
        Any metric of MXNet (mx.metric, in 2.0 mx.gluon.metric), including composite metrics, and your own metrics that
        only add to `sum_metric` and `num_inst`. It is not changed, so it can continue to count. The same on all ranks.
    process_set : ProcessSet, optional
        The workers whose metrics are combined.

    Returns
    -------
    EvalMetric, or list of them
        A copy with the counts of all workers, for ``get()``. All ranks get the same numbers; sums are in float64.

    Raises
    ------
    TypeError
        `metric` is of another type, or has a state that cannot be added up (its class, outside of MXNet, overrides
        ``reset()``). The other ranks' call raises an MXNetError that names this rank.
    ValueError
        This rank is not in the process set.
    MXNetError
        Ranks pass different metrics; or a rank waits in another call, has refused, or has left.

    References
    ----------
    Correlations are combined as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", 1979, eq. 2.1.

    Examples
    --------
    >>> accuracy = mx.metric.Accuracy()  # in MXNet 2.0 mx.gluon.metric.Accuracy()
    >>> for images, labels in loader:
    ...     accuracy.update([labels], [net(images).argmax(axis=1)])
    >>> name, value = mykv.allreduce_metric(accuracy).get()  # over the samples of all workers
    >>> name
    'accuracy'
    """
    process.require()
    with operation.waiting(process_set, "allreduce_metric") as turn:
        given = list(metric) if isinstance(metric, (list, tuple)) else [metric]
        leaves = [leaf for one in given for leaf in _leaves(one)]
        states = [_kind(leaf).state(leaf) for leaf in leaves]
        described = ", ".join(f"{type(leaf).__name__} {leaf.name!r}" for leaf in leaves)
        turn.meet(f"allreduce_metric of {described}")
    everyones = allgather_object(states, process_set=process_set)
    # The function of a CustomMetric is shared and not copied: it may hold a network.
    called = [leaf._feval for leaf in leaves if isinstance(leaf, mxnet_metrics.CustomMetric)]
    combined = copy.deepcopy(given, {id(function): function for function in called})
    leaves = [leaf for one in combined for leaf in _leaves(one)]
    for leaf, of_ranks in zip(leaves, zip(*everyones)):
        _kind(leaf).combine(leaf, of_ranks)
    return combined if isinstance(metric, (list, tuple)) else combined[0]


def _leaves(metric: Any) -> list:
    """The metrics of a composite metric, including nested composites."""
    if isinstance(metric, mxnet_metrics.CompositeEvalMetric):
        return [leaf for part in metric.metrics for leaf in _leaves(part)]
    if not isinstance(metric, mxnet_metrics.EvalMetric):
        raise TypeError(f"metric must be an EvalMetric or a list of them, not {type(metric).__name__}.")
    return [metric]


def _kind(metric: Any) -> _Kind:
    if type(metric).reset.__module__ != mxnet_metrics.__name__:
        raise TypeError(
            f"The metric {metric.name!r} cannot be combined over workers: its class, {type(metric).__name__}, "
            "overrides reset(), so it counts more than sum_metric and num_inst. Combine its counts with allreduce()."
        )
    return next(kind for kind in _KINDS if kind.matches(metric))


def _number(value: Any) -> Any:
    """A sum or count as a Python or numpy number. Sums of whole numbers are exact up to 2**53."""
    if isinstance(value, NDArray):
        value = value.asnumpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.item() if value.ndim == 0 else value.astype(np.float64)
    if not isinstance(value, numbers.Number):
        raise TypeError(
            f"A metric counts with a {type(value).__name__}, which cannot be combined over workers. Count with "
            "numbers, or combine its counts with allreduce()."
        )
    return value


def _add_totals(metric: Any, states: Sequence[State]) -> None:
    for name in states[0]:
        setattr(metric, name, sum(state[name] for state in states))


def _counts_of(metric: Any) -> Any:
    """The object with the positives and negatives of F1 and MCC; None if the value is not computed from their sums."""
    counts = getattr(metric, "metrics", None) or getattr(metric, "_metrics", None)
    if isinstance(counts, _OF_BATCHES) and "macro" in (vars(metric).get("average"), vars(metric).get("_average")):
        return None
    return counts if hasattr(counts, "true_positives") else None


def _add_counts(metric: Any, states: Sequence[State]) -> None:
    states = [state for state in states if state]  # MXNet 2.0 has no counts before the first batch
    if not states:
        return
    counts = _counts_of(metric)
    for name in states[0]:
        total = sum(state[name] for state in states)
        if isinstance(total, np.ndarray):
            total = mxnet_metrics.numpy.array(total, dtype="float64")
            counts.num_classes = len(total)
        setattr(counts, name, total)
    metric.update([], [])  # computes the value from the counts


def _add_matrices(metric: Any, states: Sequence[State]) -> None:
    metric.k = max(len(state["lcm"]) for state in states)
    for name in states[0]:
        if name not in _MATRICES:
            setattr(metric, name, sum(state[name] for state in states))
            continue
        total = np.zeros((metric.k, metric.k))
        for matrix in (state[name] for state in states):
            total[: len(matrix), : len(matrix)] += matrix
        setattr(metric, name, mxnet_metrics.numpy.array(total, dtype="float64"))


def _add_correlations(metric: Any, states: Sequence[State]) -> None:
    total = dict.fromkeys(_CORRELATION, 0)
    for state in states:
        before, added = total["_label_nums"], state["_label_nums"]
        if added == 0:
            continue
        weight = before * added / (before + added)
        label = state["_mean_l"] - total["_mean_l"]
        pred = state["_mean_p"] - total["_mean_p"]
        total["_sse_l"] += state["_sse_l"] + weight * label**2
        total["_sse_p"] += state["_sse_p"] + weight * pred**2
        total["_conv"] += state["_conv"] + weight * label * pred
        total["_mean_l"] += label * added / (before + added)
        total["_mean_p"] += pred * added / (before + added)
        for name in ("_label_nums", "_pred_nums", "num_inst"):
            total[name] += state[name]
    for name, value in total.items():
        setattr(metric, name, value)
    if hasattr(metric, "global_num_inst"):
        metric.global_num_inst = metric.num_inst


def _is_correlation(metric: Any) -> bool:
    over_batches = getattr(metric, "average", "micro") == "macro"
    return isinstance(metric, mxnet_metrics.PearsonCorrelation) and not over_batches


_KINDS = (
    _Kind(
        lambda metric: isinstance(metric, mxnet_metrics.PCC), (*_MATRICES, "num_inst", "global_num_inst"), _add_matrices
    ),
    _Kind(_is_correlation, _CORRELATION, _add_correlations),
    _Kind(lambda metric: _counts_of(metric) is not None, _COUNTS, _add_counts, _counts_of),
    _Kind(lambda metric: True, _TOTALS, _add_totals),
)
