"""check_in_step: replicas that differ are found, and named on all ranks."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import (
    BFLOAT16,
    DTYPES,
    IS_2,
    MXNetError,
    array,
    clear_errors,
    dense_network,
    mx,
    numbers,
    structure,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_plugin.compat.argument_errors import ArgumentValueError
from kvstore_plugin.parameters.check_in_step import digest
from mxnet import autograd
from mxnet.gluon import nn

_LARGE = (301, 217)  # several blocks of the digest and a rest


def _set(net, name, values):
    structure(net)[name].set_data(array(values.astype("float32")))


def _one_bit_more(values, place, bit=0):
    changed = values.copy()
    changed.reshape(-1)[place : place + 1].view("uint32")[0] ^= 1 << bit
    return changed


@settings(max_examples=30, deadline=None)
@given(st.integers(0, np.prod(_LARGE) - 1), st.integers(0, 31))
def test_a_digest_sees_each_bit(place, bit):
    values = np.random.RandomState(3).randn(*_LARGE).astype("float32")
    assert digest(array(_one_bit_more(values, place, bit))) != digest(array(values))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_digest_sees_what_sums_of_whole_arrays_would_not(dtype):
    values = np.random.RandomState(4).randn(*_LARGE).astype(dtype)
    others = [values.reshape(-1)[::-1], -values, np.roll(values, 1), 0 * values, 0 * values + 1, -0.0 * values]
    others += [np.concatenate([values[150:], values[:150]])]
    digests = [digest(array(other.reshape(_LARGE))) for other in [values, *others]]
    assert len(set(digests)) == len(digests)
    assert digest(array(values)) == digests[0]


@pytest.mark.parametrize("columns", [1, 64, 512, 1024, 1000])
def test_a_digest_sees_rows_that_have_changed_places(columns):
    """As the rows of two classes do, where two workers have listed their classes in different orders."""
    values = np.random.RandomState(5).randn(200, columns).astype("float32")
    exchanged = values.copy()
    exchanged[[3, 7]] = values[[7, 3]]
    assert digest(array(exchanged)) != digest(array(values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nd", "np"])
def test_a_digest_of_every_dtype_and_shape(dtype, kind):
    with mx.util.np_shape(True):
        for shape in [(), (0, 3), (1,), (3, 501), (8064 * 9,)]:
            values = numbers(0, shape, dtype)
            assert digest(array(values, kind)) == digest(array(values.copy(), kind))
            if values.size:
                other = values.copy()
                other.reshape(-1)[-1] = not other.reshape(-1)[-1]
                assert digest(array(values, kind)) != digest(array(other, kind))
        assert digest(array(np.zeros(6, dtype), kind)) != digest(array(np.zeros((2, 3), dtype), kind))
    assert digest(array(np.zeros(8, "int8"), kind)) != digest(array(np.zeros(8, "uint8"), kind))


def test_a_digest_of_bfloat16():
    values = mx.nd.array(numbers(0, (100,))).astype(BFLOAT16)
    assert digest(values) == digest(values.copy()) != digest((mx.nd.array(numbers(1, (100,)))).astype(BFLOAT16))


@pytest.mark.parametrize("hybridize", [False, True])
def test_a_digest_of_weights_that_an_operator_has_rearranged(hybridize):
    """An inference pass leaves the weights of convolutions in oneDNN's own layout."""
    net = nn.Conv2D(32, 3, in_channels=16)
    net.initialize()
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    x = array(np.random.RandomState(0).randn(1, 16, 8, 8).astype("float32"))
    net(x).wait_to_read()
    weight = net.weight.data()
    values = weight.asnumpy()
    for _ in range(3):
        outputs = net(x).asnumpy()
        assert digest(weight) == digest(array(values))
        np.testing.assert_array_equal(net(x).asnumpy(), outputs)
        np.testing.assert_array_equal(weight.asnumpy(), values)


def test_a_digest_while_inference_passes_run():
    """They rearrange the weights, and nothing but the digest waits for them; the hash takes longer than a pass."""
    net = nn.Conv2D(256, 3, in_channels=256)
    net.initialize()
    x = array(np.random.RandomState(0).randn(1, 256, 8, 8).astype("float32"))
    net(x).wait_to_read()
    weight = net.weight.data()
    expected = digest(array(weight.asnumpy()))
    for _ in range(20):
        outputs = [net(x) for _ in range(2)]
        assert digest(weight) == expected
        del outputs


@pytest.mark.ranks(1, 2, 3)
def test_training_keeps_workers_in_step(rank):
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    for step in range(4):
        with autograd.record():
            loss = (net(array(np.random.RandomState(10 * step + rank).randn(4, 6).astype("float32"))) ** 2).sum()
        loss.backward()
        trainer.step(4)
        assert mykv.check_in_step(net.collect_params()) is None


@pytest.mark.ranks(4)
def test_the_first_parameter_and_the_ranks_that_differ_are_named_on_all_ranks(rank, gather):
    net = dense_network(seed=0)
    values = structure(net)["1.weight"].data().asnumpy()
    if rank in (1, 3):
        _set(net, "2.bias", np.zeros(2))
    if rank == 2:
        _set(net, "1.weight", _one_bit_more(values, 7))
    with pytest.raises(MXNetError) as caught:
        mykv.check_in_step(structure(net))
    sentence = str(caught.value)
    assert "Parameter 1.weight" in sentence and "has other values on rank 2 than on ranks [0, 1, 3]." in sentence
    assert "2 of 6 parameters are out of step; broadcast_parameters() would" in sentence
    assert len(set(gather(sentence))) == 1
    if rank == 2:
        _set(net, "1.weight", values)
    with pytest.raises(MXNetError, match=r"Parameter 2.bias.*other values on ranks \[1, 3\] than on ranks \[0, 2\]"):
        mykv.check_in_step(structure(net))
    mykv.broadcast_parameters(structure(net))
    mykv.check_in_step(structure(net))


@pytest.mark.ranks(2)
def test_the_order_is_that_of_the_network_and_not_of_names(rank):
    values = {name: array(np.full(2, float(rank), "float32")) for name in ("c", "a", "b")}
    with pytest.raises(MXNetError, match="Parameter c has other values on rank 1 than on rank 0"):
        mykv.check_in_step(values)
    with pytest.raises(MXNetError, match="^Parameter 0 has other values"):
        mykv.check_in_step(list(values.values()))


@pytest.mark.ranks(2)
def test_every_nth_call_checks(rank):
    nets = [dense_network(seed=0), dense_network(seed=0)]
    for net in nets:
        mykv.check_in_step(net.collect_params(), every=3)
    for net in nets:
        _set(net, "0.bias", np.full(8, float(rank)))
    for _ in range(2):
        for net in nets:
            mykv.check_in_step(net.collect_params(), every=3)
    for net in nets:
        with pytest.raises(MXNetError, match="rank 1"):
            mykv.check_in_step(net.collect_params(), every=3)
    with pytest.raises(ArgumentValueError, match="every=2 works for Parameters, but params holds arrays"):
        mykv.check_in_step([array(np.zeros(3))], every=2)
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        mykv.check_in_step([], every=0)


@pytest.mark.ranks(3)
def test_calls_are_counted_in_each_process_set(rank):
    """Two sets that share rank 1, which makes twice as many calls for the same parameters as the others."""
    mykv.init()
    added = [mykv.add_process_set(ranks) for ranks in ([0, 1], [1, 2])]
    sets = [one for one in added if one.included()]
    net = dense_network(seed=0)
    for step in range(3):
        for one in sets:
            if step < 2:
                mykv.check_in_step(net.collect_params(), every=2, process_set=one)
                continue
            _set(net, "0.bias", np.full(8, float(rank)))
            with pytest.raises(MXNetError, match="has other values on rank"):  # in the third call, on both members
                mykv.check_in_step(net.collect_params(), every=2, process_set=one)
    clear_errors()
    for one in added:
        mykv.remove_process_set(one)


@pytest.mark.ranks(2)
def test_running_statistics_are_checked_where_that_is_wanted(rank):
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=2), nn.BatchNorm(in_channels=3))
    net.initialize(mx.init.One())
    with autograd.record():
        loss = net(array(np.random.RandomState(rank).randn(4, 2).astype("float32"))).sum()
    loss.backward()
    mykv.check_in_step(net.collect_params())
    with pytest.raises(MXNetError, match=r"running_mean.* 2 of 6 .*; sync_aux_params\(net\) would make them equal"):
        mykv.check_in_step(net.collect_params(), auxiliary=True)
    net[0].bias.set_data(array(np.full(3, float(rank), "float32")))
    with pytest.raises(MXNetError, match=r"bias\) has other values.* 3 of 6 .*; broadcast_parameters\(\) would"):
        mykv.check_in_step(net.collect_params(), auxiliary=True)
    net[0].bias.set_data(array(np.zeros(3, "float32")))
    mykv.sync_aux_params(net)
    mykv.check_in_step(net.collect_params(), auxiliary=True)


@pytest.mark.ranks(2)
def test_devices_of_one_process(rank):
    net = dense_network(seed=0, ctx=[mx.cpu(0), mx.cpu(1)] if rank else [mx.cpu(0)])
    mykv.check_in_step(net.collect_params())
    if rank:
        structure(net)["1.bias"].list_data()[1][:] = 3
    with pytest.raises(MXNetError, match=r"differs between the devices of rank 1\..* 1 of 6"):
        mykv.check_in_step(net.collect_params())


@pytest.mark.ranks(2)
def test_parameters_without_values(rank):
    net = nn.Dense(3)
    net.initialize()
    mykv.check_in_step(net.collect_params())  # nowhere yet
    if rank == 0:
        net(array(np.ones((1, 2), "float32")))
    with pytest.raises(MXNetError, match="has no values yet on rank 1, but has values on other ranks"):
        mykv.check_in_step(net.collect_params())


@pytest.mark.ranks(2)
def test_ranks_that_pass_other_things(rank):
    pair = {"a": array(np.zeros(3)), "b": array(np.zeros(3))}
    other = {"a": array(np.zeros(3)), "c": array(np.zeros(3))}
    with pytest.raises(MXNetError, match="2 parameters on each rank, but with other names on rank 1 than on rank 0"):
        mykv.check_in_step(other if rank else pair)
    with pytest.raises(MXNetError, match="(?s)1 parameters, every=1.*2 parameters|2 parameters, every=1.*1 parameters"):
        mykv.check_in_step({"a": pair["a"]} if rank else pair)
    net = dense_network(seed=0)
    with pytest.raises(MXNetError, match="(?s)every=10.*every=20|every=20.*every=10"):
        mykv.check_in_step(net.collect_params(), every=20 if rank else 10)
    if rank:
        with pytest.raises(TypeError, match="params must hold Parameters or NDArrays, but a is a int"):
            mykv.check_in_step({"a": 3})
    else:
        with pytest.raises(MXNetError, match="rank 1.*but a is a int"):
            mykv.check_in_step(pair)
    mykv.check_in_step(pair)
    clear_errors()


@pytest.mark.ranks(3)
def test_process_sets_show_global_ranks(rank):
    mykv.init()
    pair = mykv.add_process_set([0, 2])
    if pair.included():
        with pytest.raises(MXNetError, match="on rank 2 than on rank 0"):
            mykv.check_in_step([array(np.full(3, float(rank)))], process_set=pair)
    mykv.remove_process_set(pair)


@pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no Module")
@pytest.mark.ranks(2)
def test_arrays_of_a_module(rank):
    names = {"fc_weight": mx.nd.ones((2, 2)), "fc_bias": mx.nd.array([0.0, float(rank)])}
    with pytest.raises(MXNetError, match="Parameter fc_bias has other values"):
        mykv.check_in_step(names)
