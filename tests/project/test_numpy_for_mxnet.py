"""mykvrun/numpy_for_mxnet.py: MXNet's replacements for names that numpy has removed."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import types
import warnings

import numpy as np
import pytest
from harness.support import IS_2, mx

from mykvrun import numpy_for_mxnet

_A = np.array([[3, 1, 2], [0, 5, 4]])
_ARGUMENTS = {
    "alltrue": [(_A,), (_A > 0, 1)],
    "asfarray": [(_A,), (_A.astype("float16"),), (_A, "int8"), (_A, "float32")],
    "cumproduct": [(_A,), (_A, 1)],
    "in1d": [(_A, [1, 5]), (_A, [1, 5], False, True)],
    "msort": [(_A,), ([3, 1],)],
    "product": [(_A,), (_A, 0)],
    "round_": [(_A / 7, 2)],
    "row_stack": [([_A, _A],)],
    "sometrue": [(_A,), (_A, 0)],
    "trapz": [(_A,), (_A, [0, 1, 4]), (_A, None, 0.5, 0)],
}
_IS_OLD = tuple(map(int, np.__version__.split(".")[:2])) < (1, 24)


_OWN = {"alltrue", "asfarray", "in1d", "msort", "sometrue"}
_GONE = {*numpy_for_mxnet._ALIASES, *numpy_for_mxnet._NUMBERS, *_OWN, "compat"}


@pytest.mark.skipif(not _IS_OLD, reason="this numpy has no functions to compare with")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_mean_what_they_meant():
    """With the functions of numpy 1.23 itself, whose later names are taken."""
    later = types.SimpleNamespace(**{name: value for name, value in vars(np).items() if name not in _GONE})
    later.trapezoid = np.trapz
    put_back = numpy_for_mxnet.names(later)
    assert set(put_back) >= _GONE
    assert {name for name, value in put_back.items() if callable(value) and name in _ARGUMENTS} == set(_ARGUMENTS)
    for name, calls in _ARGUMENTS.items():
        for arguments in calls:
            expected, got = getattr(np, name)(*arguments), put_back[name](*arguments)
            assert np.asarray(got).dtype == np.asarray(expected).dtype, name
            np.testing.assert_array_equal(got, expected, err_msg=name)
    for name, value in put_back.items():
        if isinstance(value, (float, type)):
            np.testing.assert_equal(value, getattr(np, name), err_msg=name)
    with pytest.raises(RuntimeError, match="numpy-financial"):
        put_back["pmt"](0.1, 1, 2)


def test_mxnet_is_imported_where_numpy_lacks_all_these_names():
    """numpy itself still lacks them afterwards: other packages test its contents."""
    code = """if True:
        import contextlib, sys, warnings
        import numpy
        with contextlib.suppress(ImportError):
            import sklearn  # MXNet imports it, and its release fits this numpy
        from mykvrun import numpy_for_mxnet
        warnings.simplefilter("ignore")
        if not hasattr(numpy, "trapezoid"):
            numpy.trapezoid = numpy.trapz
        gone = set(sys.argv[1].split())
        numpy.__all__ = [name for name in numpy.__all__ if name not in gone]
        for name in gone & set(vars(numpy)):
            delattr(numpy, name)
        numpy.__version__ = "2.5.0"
        if len(sys.argv) > 2:
            import kvstore_plugin
        else:
            numpy_for_mxnet.install()
        import mxnet as mx
        from mxnet.gluon.contrib.estimator import event_handler
        assert mx.np.bool == bool and mx.np.NINF == -float("inf") and mx.nd.ones(3).sum().asscalar() == 3
        assert mx.np.einsum("ij->j", mx.np.ones((2, 3))).tolist() == [2, 2, 2]
        assert not gone & set(vars(numpy)), gone & set(vars(numpy))
        """
    for argument in ([], ["kvstore_plugin"]):
        command = [sys.executable, "-c", code, " ".join(_GONE), *argument]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_shapes_with_integers_of_numpy_reach_operators():
    """numpy 2 writes np.int64(2) in the text of a tuple, and MXNet hands its core such texts."""
    two, three = np.int64(2), np.int32(3)
    assert mx.nd.Pooling(mx.nd.ones((1, 1, 4, 4)), kernel=(two, three), pool_type="avg").shape == (1, 1, 3, 2)
    assert mx.nd.zeros((two, 3)).shape == mx.nd.ones((3, 2)).reshape((two, three)).shape == (2, 3)
    assert mx.nd.slice(mx.nd.ones((3, 4)), begin=(np.int32(1), None), end=[three, two]).shape == (2, 2)
    pooled = mx.sym.Pooling(mx.sym.var("x", shape=(1, 1, two, three)), kernel=[two, two], pool_type="max")
    assert pooled.infer_shape()[1] == [(1, 1, 1, 2)] and "int64" not in pooled.tojson()
    weight = mx.nd.zeros((4, 6))
    mx.init.Orthogonal()(mx.init.InitDesc("weight"), weight)
    np.testing.assert_allclose(mx.nd.dot(weight, weight.T).asnumpy(), 2 * np.eye(4), atol=1e-2)
    assert mx.nd.LeakyReLU(mx.nd.array([-1.0]), slope=np.float32(0.1)).asscalar() == pytest.approx(-0.1)


def test_shapes_with_integers_of_numpy_reach_data_iterators(tmp_path):
    (tmp_path / "data.csv").write_text("1,2,3\n4,5,6\n")
    batches = mx.io.CSVIter(data_csv=str(tmp_path / "data.csv"), data_shape=(np.int64(3),), batch_size=2)
    assert next(batches).data[0].asnumpy().tolist() == [[1, 2, 3], [4, 5, 6]]


def test_texts_of_other_values_stay_as_they_are():
    text = numpy_for_mxnet._Text
    for value in (1, 0.1, None, "a", (), (1,), [1, "a"], (None, (2, 3.5)), {"a": 1}, mx.cpu(1), np.float32):
        assert text(value) == str(value)
    assert (text(), text(b"a", "ascii"), text((np.float32(0.1), [np.int8(3)]))) == ("", "a", "(0.1, [3])")
    assert isinstance("a", text) and not isinstance(1, text)


def test_another_array_names_a_type():
    """Sockeye's loss calls ``output.astype(label)``."""
    for namespace in (mx.nd, mx.np):
        half = namespace.ones((2,), dtype="float16")
        assert namespace.ones((2,)).astype(half, copy=False).dtype == np.float16
        assert half.astype(half, copy=False) is half
        assert namespace.zeros((2,), dtype="int32").astype(namespace.ones((2,))).dtype == np.float32
    with pytest.raises(TypeError):
        mx.nd.ones((2,)).astype("no such type")


def test_what_stands_for_dtype_is_else_numpys():
    replaced = numpy_for_mxnet._dtype_like(np)
    for value in ("float32", np.int8, np.dtype("bool"), None, [("a", "int8")], float):
        assert replaced(value) == np.dtype(value)
    assert replaced("int8", align=True) == np.int8 and replaced.names is np.dtype.names
    assert isinstance(np.dtype("int8"), replaced) and not isinstance(np.int8, replaced)


def test_metrics_sum_in_float64():
    """With numpy 2 a float plus a float32 is a float32, which counts up to 16,777,216 and no further."""
    metrics = mx.metric if hasattr(mx, "metric") else mx.gluon.metric
    metric = metrics.Loss()
    namespace = mx.np if IS_2 else mx.nd
    for loss in (namespace.array([2.0**24]), *[namespace.ones(1)] * 3):
        metric.update(None, [loss])
    assert metric.get()[1] * 4 == 2.0**24 + 3
    assert pickle.loads(pickle.dumps(metric)).get() == metric.get()
    metric.reset()
    assert np.isnan(metric.get()[1])


@pytest.mark.skipif(IS_2, reason="MXNet 2.0 counts in its own arrays")
def test_metrics_count_samples_in_float64():
    """Perplexity subtracts the labels that it ignores, a float32, from the number of labels."""
    metric = mx.metric.Perplexity(ignore_label=0)
    for labels in ([0, 1], [1, 1], [0, 1], [0, 1]):
        metric.update([mx.nd.array(labels)], [mx.nd.array([[0.5, 0.5], [0.5, 0.5]])])
        metric.num_inst += 2**24
    assert metric.num_inst == 4 * 2**24 + 5 and metric.global_num_inst == 5
    assert type(metric.num_inst) is type(metric.global_num_inst) is np.float64


def test_records_with_several_labels_are_packed_and_unpacked(monkeypatch):
    from mxnet import recordio

    packed = recordio.pack(recordio.IRHeader(0, [1, 2, 3], 7, 0), b"bytes")
    header, data = recordio.unpack(packed)
    assert header.label.tolist() == [1, 2, 3] and header.id == 7 and data == b"bytes"
    encoder = types.SimpleNamespace(
        imencode=lambda *_: (True, np.array([65, 66], dtype=np.uint8)), IMWRITE_JPEG_QUALITY=1
    )
    monkeypatch.setattr(recordio, "cv2", encoder)
    header, data = recordio.unpack(recordio.pack_img(recordio.IRHeader(0, 4, 7, 0), None))
    assert header.label == 4 and data == b"AB"


def test_thresholds_for_quantization_are_numbers(monkeypatch):
    """MXNet logs them and hands them to its core."""
    from mxnet.contrib import quantization

    monkeypatch.setattr(quantization, "stats", "scipy.stats, of which only the presence matters", raising=False)
    find = getattr(quantization, "_LayerHistogramCollector", None)
    find = getattr(find, "get_optimal_thresholds", None) or quantization._get_optimal_thresholds
    counts, edges = np.histogram(np.linspace(-1, 1, 5000) ** 3, bins=1001, range=(-1, 1))
    lower, upper = find({"a": (counts, edges, -1.0, 1.0, 1.0)}, "int8", logger=logging.getLogger())["a"]
    assert -float(lower) == float(upper) and 0 < upper <= 1


def test_axes_may_be_moved_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mx.nd.moveaxis(mx.nd.ones((2, 3, 4)), [0, 1], [-1, 0]).shape == (3, 4, 2)


def test_functions_that_are_gone_take_arrays_of_mxnet():
    ones = mx.np.ones((2, 3))
    assert mx.np.alltrue(ones) and mx.np.sometrue(ones) and mx.np.in1d(ones, 1).all()
    assert mx.np.msort(ones).shape == (2, 3)
    assert {type(mx.np.msort(ones)), type(mx.np.in1d(ones, 1))} == {mx.np.ndarray}
    assert mx.np.msort(mx.np.array([2.0, 1.0])).asnumpy().tolist() == [1, 2]


def test_numpy_takes_arrays_of_mxnet_as_their_values():
    one, same, other = (mx.nd.array(values) for values in ([1, 2], [1, 2], [1, 3]))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    assert np.all(one == same) and np.unique(other).tolist() == [1, 3]
    np.testing.assert_array_equal(one, same)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(one, other)
    for result in (np.float32(2) * one, one * np.float64(2), np.int64(2) + one):
        assert type(result) is mx.nd.NDArray and result.dtype == np.float32


def test_arguments_that_numpy_2_rejects():
    ranks = mx.np.array([1.0, 2.0, 4.0])
    assert float(mx.np.nanpercentile(ranks, 60, interpolation="lower")) == 2
    assert float(mx.np.nanquantile(ranks, 0.6, interpolation="higher")) == 4
    assert mx.nd.array([300, -1], dtype="uint8").asnumpy().tolist() == [44, 255]


@pytest.mark.skipif(_IS_OLD, reason="MXNet gets numpy itself")
def test_a_module_that_another_loader_has_run_gets_the_names_too():
    """pytest loads mxnet/test_utils.py itself, since its name is that of a file with tests."""
    assert mx.test_utils.np.bool is bool
