"""broadcast_parameters: everything it takes; it returns when the values have arrived, and raises there."""

from __future__ import annotations

import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import (
    DTYPES,
    IS_2,
    MXNetError,
    array,
    checksum,
    clear_errors,
    conv_network,
    dense_network,
    mx,
    numbers,
    structure,
)
from mxnet import gluon
from mxnet.gluon import nn


def _arrays(rank):
    return {
        "weight": array(np.full((3, 4), rank + 1.0)),
        "bias": array(np.full(4, rank + 10.0, "float32")),
        "steps": array(np.full(1, rank + 5, "int64")),
    }


def _check_arrays(arrays, root=0):
    for name, values in arrays.items():
        expected = {"weight": 1, "bias": 10, "steps": 5}[name] + root
        assert (values.asnumpy() == expected).all(), name


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("root_rank", [0, -1])
def test_collected_parameters(rank, size, root_rank):
    root_rank %= size
    net = conv_network(seed=rank)
    mykv.broadcast_parameters(net.collect_params(), root_rank)
    assert checksum(net) == checksum(conv_network(seed=root_rank))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("prefix", [None, "model.", 3])
def test_dict_of_arrays(rank, prefix):
    arrays = _arrays(rank)
    mykv.broadcast_parameters(arrays, prefix=prefix)
    _check_arrays(arrays)


@pytest.mark.ranks(2)
def test_dict_in_another_order(rank):
    arrays = _arrays(rank)
    mykv.broadcast_parameters(dict(sorted(arrays.items(), reverse=bool(rank))), root_rank=1)
    _check_arrays(arrays, 1)


@pytest.mark.ranks(2)
def test_dict_of_parameters_with_keys_of_the_users(rank, gather):
    net = dense_network(seed=rank)
    params = {f"layer {number}": parameter for number, parameter in enumerate(structure(net).values())}
    mykv.broadcast_parameters(params)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_list(rank):
    arrays = _arrays(rank)
    mykv.broadcast_parameters(list(arrays.values()))
    _check_arrays(arrays)


@pytest.mark.ranks(2)
def test_pair_of_dicts_as_of_module_get_params(rank):
    arguments, auxiliary = _arrays(rank), {"weight": array(np.full(2, rank + 1.0))}
    mykv.broadcast_parameters((arguments, auxiliary))
    _check_arrays(arguments)
    assert (auxiliary["weight"].asnumpy() == 1).all()


@pytest.mark.ranks(2)
@pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no Module")
def test_module(rank, gather):
    data = mx.sym.Variable("data")
    net = mx.sym.BatchNorm(mx.sym.FullyConnected(data, num_hidden=3), name="norm")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"))
    module.bind(data_shapes=[("data", (2, 4))], label_shapes=[("softmax_label", (2,))])
    mx.random.seed(rank)
    module.init_params(mx.init.Uniform(1))
    arguments, auxiliary = module.get_params()
    assert arguments and auxiliary
    mykv.broadcast_parameters(module.get_params())
    for values in (*arguments.values(), *auxiliary.values()):
        assert len(set(gather(values.asnumpy().tobytes()))) == 1
    for half in module.get_params():
        mykv.broadcast_parameters(half)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("empty", [{}, [], ({}, {})])
def test_nothing_to_broadcast(empty):
    mykv.broadcast_parameters(empty)


@pytest.mark.ranks(2)
def test_every_dtype(rank):
    arrays = {dtype: array(numbers(rank, (3, 5), dtype)) for dtype in DTYPES}
    mykv.broadcast_parameters(arrays)
    for dtype, values in arrays.items():
        np.testing.assert_array_equal(values.asnumpy(), numbers(0, (3, 5), dtype))


@pytest.mark.ranks(2)
def test_nan_of_another_rank_never_leaks_in(rank):
    arrays = {"a": array(np.full(5, np.nan if rank else 2.0))}
    mykv.broadcast_parameters(arrays)
    assert (arrays["a"].asnumpy() == 2).all()


@pytest.mark.ranks(2)
def test_returns_when_the_values_have_arrived(rank, gather):
    """The root comes late; the others do not return before it has."""
    values = array(np.full(100_000, rank + 1.0))
    gather("both begin")
    begin = time.monotonic()
    if rank == 0:
        time.sleep(0.5)
    mykv.broadcast_parameters({"late": values})
    if rank == 1:
        assert time.monotonic() - begin > 0.4
    assert (values.asnumpy() == 1).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [False, True])
def test_after_an_inference_pass(rank, gather, hybridize):
    """An inference pass leaves convolution weights in oneDNN's blocked layout, if they are large enough."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(32, 3, in_channels=16, padding=1), nn.Conv2D(32, 3, in_channels=32), nn.Dense(16, in_units=32 * 36)
    )
    mx.random.seed(rank)
    net.initialize(mx.init.Xavier())
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    x = array(np.random.RandomState(0).rand(2, 16, 8, 8).astype("float32"))
    for _ in range(2):
        net(x).wait_to_read()
    mykv.broadcast_parameters(net.collect_params())
    outputs = gather(net(x).asnumpy())
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_several_devices(rank):
    devices = [mx.cpu(0), mx.cpu(1)]
    parameter = gluon.Parameter("weight", shape=(3,))
    parameter.initialize(mx.init.Constant(rank + 1), ctx=devices)
    mykv.broadcast_parameters({"weight": parameter})
    for device in devices:
        assert (parameter.data(device).asnumpy() == 1).all()


@pytest.mark.ranks(2)
def test_other_shapes_raise_here_on_every_rank(rank, gather):
    arrays = {"good": array(np.full(3, rank + 1.0)), "bad": array(np.zeros(4 + rank))}
    with pytest.raises(MXNetError) as failure:
        mykv.broadcast_parameters(arrays)
    for word in ("bad", "(4,)", "(5,)"):
        assert word in str(failure.value)
    clear_errors()
    again = _arrays(rank)
    mykv.broadcast_parameters(again)
    _check_arrays(again)


@pytest.mark.ranks(2)
def test_other_dtypes_raise_here_on_every_rank(rank):
    arrays = {"bad": array(np.zeros(4, "float32" if rank else "float64"))}
    with pytest.raises(MXNetError) as failure:
        mykv.broadcast_parameters(arrays)
    for word in ("bad", "float32", "float64"):
        assert word in str(failure.value)
    clear_errors()


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("names", [("a", "b"), ("b",)])
def test_other_sets_of_parameters_raise_here_on_every_rank(rank, names):
    arrays = {name: array(np.zeros(3)) for name in (names if rank == 1 else ("a",))}
    with pytest.raises(RuntimeError, match=f"rank {rank}"):
        mykv.broadcast_parameters(arrays)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "params", [None, 3, "weights", {"a": np.zeros(3)}, {"a": None}, [1], ({"a": 1}, {}), ({}, {}, {})], ids=repr
)
def test_wrong_types(params):
    with pytest.raises(TypeError, match="params") as caught:
        mykv.broadcast_parameters(params)
    assert isinstance(caught.value, ValueError)  # as Horovod and BytePS raise


@pytest.mark.ranks(2)
@pytest.mark.parametrize("root_rank, error", [(2, ValueError), (-1, ValueError), ("0", TypeError), (0.0, TypeError)])
def test_wrong_root(root_rank, error):
    with pytest.raises(error, match="root_rank"):
        mykv.broadcast_parameters({}, root_rank)


@pytest.mark.ranks(2)
def test_what_one_rank_sees_alone_reaches_the_others(rank):
    arrays = {"a": array(np.zeros(3)) if rank == 0 else np.zeros(3)}
    with pytest.raises(TypeError if rank else RuntimeError) as failure:
        mykv.broadcast_parameters(arrays)
    assert rank == 1 or ("rank 1" in str(failure.value) and "ndarray" in str(failure.value))


@pytest.mark.ranks(2)
def test_other_roots_on_the_ranks_are_an_error(rank):
    with pytest.raises((MXNetError, RuntimeError), match="from rank 1"):
        mykv.broadcast_parameters({"a": array(np.zeros(3))}, root_rank=rank)
    clear_errors()


@pytest.mark.ranks(2)
def test_csr_arrays_are_refused(rank):
    sparse = mx.nd.sparse.zeros("csr", (4, 2))
    with pytest.raises(ValueError, match="sparse"):
        mykv.broadcast_parameters({"a": sparse})
