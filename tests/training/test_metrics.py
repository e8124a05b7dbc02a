"""allreduce_metric: values over the data of all workers, equal to those of one process that has seen all."""

from __future__ import annotations

import inspect

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array
from kvstore_plugin.compat.mxnet import metric as metrics

_SIZES = [4, 1, 7, 3, 2, 6]  # of batches


def _numbers(rng, n):
    labels = rng.randn(n)
    return labels, labels + 0.5 * rng.randn(n)


def _vectors(rng, n):
    return rng.randn(n, 3), rng.randn(n, 3)


def _binary(rng, n):
    labels, shares = rng.randint(0, 2, n), rng.uniform(0.05, 0.95, n)
    return labels, np.stack([1 - shares, shares], axis=1)


def _chances(rng, n):
    return rng.randint(0, 2, n), rng.uniform(0, 1, n)


def _classes(rng, n):
    raw = np.exp(rng.randn(n, 4))
    return rng.randint(0, 4, n), raw / raw.sum(axis=1, keepdims=True)


def _growing(rng, n):
    """Classes that only later batches know, so that the workers' confusion matrices differ in size."""
    return rng.randint(0, n, n), rng.randint(0, n, n)


def _custom(label, pred):
    return float(np.abs(np.asarray(label.shape[0])))


def _custom_pair(label, pred):
    return float((label > 0).sum()), label.shape[0]


def _cases():
    """Pairs of a function that makes a metric and one that makes its data."""
    yield from [
        (metrics.Accuracy, _classes),
        (lambda: metrics.TopKAccuracy(top_k=2), _classes),
        (lambda: metrics.Perplexity(ignore_label=None), _classes),
        (lambda: metrics.Perplexity(ignore_label=1), _classes),
        (metrics.CrossEntropy, _classes),
        (metrics.MAE, _numbers),
        (metrics.MSE, _numbers),
        (metrics.RMSE, _numbers),
        (metrics.Loss, _numbers),
        (metrics.Torch, _numbers),
        (metrics.F1, _binary),
        (lambda: metrics.F1(average="micro"), _binary),
        (lambda: metrics.F1(average="macro"), _binary),
        (metrics.MCC, _binary),
        (metrics.PCC, _classes),
        (metrics.PCC, _growing),
        (metrics.PearsonCorrelation, _numbers),
        (lambda: metrics.CustomMetric(_custom), _numbers),
        (lambda: metrics.CustomMetric(_custom_pair), _numbers),
        (lambda: metrics.CompositeEvalMetric([metrics.Accuracy(), [metrics.CrossEntropy(), metrics.PCC()]]), _classes),
    ]
    if IS_2:
        yield from [
            (lambda: metrics.F1(class_type="multiclass", average=None), _classes),
            (lambda: metrics.F1(class_type="multiclass", average="macro"), _classes),
            (lambda: metrics.Fbeta(beta=2), _binary),
            (metrics.BinaryAccuracy, _chances),
            (metrics.MeanPairwiseDistance, _vectors),
            (metrics.MeanCosineSimilarity, _vectors),
        ]
    else:
        yield from [
            (metrics.NegativeLogLikelihood, _classes),
            (metrics.Caffe, _numbers),
            (lambda: metrics.MCC(average="micro"), _binary),
            (lambda: metrics.PearsonCorrelation(average="micro"), _numbers),
        ]


def _name(case):
    metric = case[0]()
    return f"{type(metric).__name__}-{getattr(metric, 'average', getattr(metric, '_average', ''))}-{case[1].__name__}"


_CASES = list(_cases())


def _batches(make, numbers):
    for number in numbers:
        labels, preds = make(np.random.RandomState(number), _SIZES[number])
        yield [array(labels.astype("float32"))], [array(preds.astype("float32"))]


def _updated(make_metric, make, numbers):
    metric = make_metric()
    for labels, preds in _batches(make, numbers):
        metric.update(labels, preds)
    return metric


def _values(metric):
    """All values that a metric shows."""
    names, values = zip(*metric.get_name_value())
    if hasattr(metric, "get_global"):
        values += tuple(value for _, value in metric.get_global_name_value())
    return names, [np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value) for value in values]


def test_every_metric_of_this_release_is_tested():
    classes = {
        one for one in vars(metrics).values() if inspect.isclass(one) and issubclass(one, metrics.EvalMetric)
    } - {metrics.EvalMetric}
    assert {type(make()) for make, _ in _CASES} == classes


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("shares", ["uneven", "none on rank 0"])
@pytest.mark.parametrize("case", _CASES, ids=_name)
def test_values_are_those_of_one_process_with_all_data(rank, size, gather, case, shares):
    if shares == "uneven":
        mine = [number for number in range(len(_SIZES)) if number % (size + 1) % size == rank]
    else:
        mine = list(range(rank - 1, len(_SIZES), size - 1)) if rank else []
    metric = _updated(*case, mine)
    own = _values(metric)
    combined = mykv.allreduce_metric(metric)
    assert type(combined) is type(metric)
    names, values = _values(combined)
    expected = _values(_updated(*case, range(len(_SIZES))))
    assert names == expected[0] and len(values) == len(expected[1])
    for value, right in zip(values, expected[1]):
        np.testing.assert_allclose(value, right, rtol=2e-6)
    assert len({tuple(value.tobytes() for value in of_rank) for of_rank in gather(values)}) == 1
    for value, before in zip(_values(metric)[1], own[1]):
        np.testing.assert_array_equal(value, before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", _CASES, ids=_name)
def test_without_data_values_are_those_of_a_new_metric(case):
    for value, new in zip(_values(mykv.allreduce_metric(case[0]()))[1], _values(case[0]())[1]):
        np.testing.assert_array_equal(value, new)


@pytest.mark.ranks(2)
def test_a_metric_goes_on_counting_by_itself(rank):
    metric = metrics.Accuracy()
    for number in range(4):
        for labels, preds in _batches(_classes, [number]):
            metric.update(labels, preds)
        combined = mykv.allreduce_metric(metric)
        assert metric.num_inst == sum(_SIZES[: number + 1]) and combined.num_inst == 2 * metric.num_inst


@pytest.mark.ranks(2)
def test_lists_of_metrics(rank):
    pair = [_updated(metrics.Accuracy, _classes, [rank]), _updated(metrics.F1, _binary, [rank])]
    combined = mykv.allreduce_metric(pair)
    alone = [_updated(metrics.Accuracy, _classes, [0, 1]), _updated(metrics.F1, _binary, [0, 1])]
    assert isinstance(combined, list)
    for one, right in zip(combined, alone):
        np.testing.assert_allclose(one.get()[1], right.get()[1])


class _Adding(metrics.EvalMetric):
    def update(self, labels, preds):
        self.sum_metric += 3.0
        self.num_inst += 1


class _Largest(metrics.EvalMetric):
    def reset(self):
        super().reset()
        self.largest = 0.0


@pytest.mark.ranks(2)
def test_a_metric_of_the_user_that_only_adds(rank):
    metric = _Adding("adding")
    for _ in range(rank + 1):
        metric.update(None, None)
    combined = mykv.allreduce_metric(metric)
    assert combined.num_inst == 3 and combined.get() == ("adding", 3.0)


@pytest.mark.ranks(2)
def test_a_function_that_a_metric_calls_is_not_copied():
    class Network:
        def __call__(self, label, pred):
            return 1.0

        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    metric = metrics.CustomMetric(Network(), name="network")
    assert mykv.allreduce_metric(metric)._feval is metric._feval


@pytest.mark.ranks(2)
def test_a_metric_with_a_state_of_its_own_is_refused_on_all_ranks(rank):
    metric = metrics.CompositeEvalMetric([metrics.Accuracy(), _Largest("top") if rank else _Adding("top")])
    if rank:
        with pytest.raises(TypeError, match="'top' cannot be combined over .*: its class, _Largest, overrides reset"):
            mykv.allreduce_metric(metric)
    else:
        with pytest.raises(MXNetError, match="rank 1.*_Largest"):
            mykv.allreduce_metric(metric)
    assert mykv.allreduce_metric(metrics.Accuracy()).num_inst == 0


@pytest.mark.ranks(2)
def test_different_metrics(rank):
    with pytest.raises(MXNetError, match=r"(?s)Accuracy 'accuracy'.*F1 'f1'|F1 'f1'.*Accuracy 'accuracy'"):
        mykv.allreduce_metric(metrics.F1() if rank else metrics.Accuracy())
    with pytest.raises(TypeError, match="metric must be an EvalMetric or a list of them, not str"):
        mykv.allreduce_metric("accuracy")


@pytest.mark.ranks(3)
def test_process_sets(rank):
    mykv.init()
    pair = mykv.add_process_set([0, 2])
    if pair.included():
        combined = mykv.allreduce_metric(_updated(metrics.Accuracy, _classes, [rank]), process_set=pair)
        assert combined.get() == _updated(metrics.Accuracy, _classes, [0, 2]).get()
    mykv.remove_process_set(pair)
