"""mykvrun/numpy_for_mxnet.py: what MXNet gets in place of names that numpy has removed."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import numpy as np
import pytest

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


_GONE = {*numpy_for_mxnet._ALIASES, *numpy_for_mxnet._NUMBERS, "asfarray", "compat", "in1d", "msort"}


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
    """And numpy still lacks them afterwards: other packages ask what it has."""
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
        assert mx.np.bool is bool and mx.np.NINF == -float("inf") and mx.nd.ones(3).sum().asscalar() == 3
        assert mx.np.einsum("ij->j", mx.np.ones((2, 3))).tolist() == [2, 2, 2]
        assert not gone & set(vars(numpy)), gone & set(vars(numpy))
        """
    for argument in ([], ["kvstore_plugin"]):
        command = [sys.executable, "-c", code, " ".join(_GONE), *argument]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
