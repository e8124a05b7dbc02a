"""Compression between hosts through the public interface: the store, both trainers, wrong arguments, and training."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, clear_errors, mx, value
from kvstore_plugin.collectives.gradient_compression import gradient_compression
from mxnet import gluon

_EXAMPLES = Path(__file__).parents[2] / "examples"
_SGD = ("sgd", {"learning_rate": 0.1})
_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2", "MYKV_COMPRESS_BYTES": "1000"}
_TOPK = {"type": "topk", "k": 0.1}
_EVERY = [
    {"type": "2bit"},
    {"type": "1bit", "threshold": 0},
    {"type": "onebit", "scaling": False},
    {"type": "topk", "k": 3},
    {"type": "randomk", "seed": 5},
    {"type": "dithering", "partition": "natural", "normalize": "l2"},
]


@pytest.mark.parametrize(
    "params, wire",
    [
        ({"type": "none"}, ""),
        ({"type": "fp16"}, "float16"),
        ({"compressor": "bf16"}, "bfloat16"),
        ({"type": "2bit"}, "2bit threshold=0.5 ef=True"),
        ({"type": "2bit", "threshold": 2}, "2bit threshold=2.0 ef=True"),
        ({"type": "1bit", "threshold": np.float32(-0.5), "ef": False}, "1bit threshold=-0.5 ef=False"),
        ({"compressor": "onebit", "scaling": True, "ef": "vanilla"}, "onebit scaling=True ef=True"),
        ({"type": "topk", "k": 0.001}, "topk k=0.001 ef=True"),
        ({"type": "topk", "k": np.int64(7)}, "topk k=7 ef=True"),
        ({"type": "randomk", "seed": 2**63 - 1}, f"randomk k=0.01 seed={2**63 - 1} ef=True"),
        ({"type": "dithering"}, "dithering partition=linear normalize=max k=127 seed=0 ef=True"),
        (
            {"type": "dithering", "partition": "natural", "normalize": "l2", "ef": False},
            "dithering partition=natural normalize=l2 k=7 seed=0 ef=False",
        ),
        # As BytePS's examples write them, with every key always.
        ({"compressor": "", "ef": "", "momentum": False, "scaling": False, "k": 1, "fp16": False}, ""),
        ({"compressor": "", "ef": None, "momentum": "", "scaling": False, "k": 1, "fp16": True}, "float16"),
        (
            {"compressor": "onebit", "ef": "vanilla", "momentum": "", "scaling": False, "k": 1, "fp16": True},
            "onebit scaling=False ef=True",
        ),
        ({"compressor": "topk", "ef": "", "momentum": "", "scaling": False, "k": 3}, "topk k=3 ef=True"),
        ({"fp16": True}, "float16"),
        ({"type": "2bit", "threshold": None, "ef": ""}, "2bit threshold=0.5 ef=True"),
    ],
)
def test_what_users_say_becomes_a_text_that_the_core_understands(params, wire):
    from compiled import testing

    assert gradient_compression(params).wire == wire
    if " " in wire:
        assert testing.Compressor(wire).text == wire
        assert repr(gradient_compression(params)).startswith("{'type': '")


@pytest.mark.parametrize(
    "params, error, sentence",
    [
        ("2bit", TypeError, "must be a dict such as {'type': '2bit'}, not '2bit'"),
        ({}, ValueError, "must have a 'type'.*The types are 'none', 'fp16', 'bf16', '2bit'"),
        ({"type": "3bit"}, ValueError, "must be one of 'none'.* not '3bit'"),
        ({"type": 2}, ValueError, "must be one of 'none'.* not 2"),
        ({"type": "2bit", "compressor": "2bit"}, ValueError, "not have both 'type' and 'compressor'"),
        ({"type": "2bit", "k": 1}, ValueError, "'2bit' has no parameter 'k': its parameters are 'threshold', 'ef'"),
        ({"type": "onebit", "momentum": "nesterov"}, ValueError, "not have 'momentum'.*'nesterov'"),
        ({"compressor": "onebit", "sacling": True}, ValueError, "'onebit' has no parameter 'sacling'"),
        ({"type": "onebit", "k": 1}, ValueError, "'onebit' has no parameter 'k'"),
        ({"type": "topk", "fp16": 1}, TypeError, "'fp16'.* must be True or False, not 1"),
        ({"type": "fp16", "ef": True}, ValueError, "'fp16' has no parameter 'ef': it has no parameters"),
        ({"type": "2bit", "threshold": 0}, ValueError, "'threshold' of the compression '2bit' must be above 0, not 0"),
        ({"type": "2bit", "threshold": "0.5"}, TypeError, "'threshold'.* must be a number, not '0.5'"),
        ({"type": "2bit", "threshold": True}, TypeError, "'threshold'.* must be a number, not True"),
        ({"type": "1bit", "threshold": float("nan")}, ValueError, "'threshold'.* must be finite, not nan"),
        ({"type": "2bit", "ef": 1}, TypeError, "'ef'.* must be True or False, not 1"),
        ({"type": "2bit", "ef": "nesterov"}, TypeError, "'ef'.* must be True or False, not 'nesterov'"),
        ({"type": "onebit", "scaling": 1}, TypeError, "'scaling'.* must be True or False, not 1"),
        ({"type": "topk", "k": 0}, ValueError, "'k'.* from 1 to 2..31 or a fraction between 0 and 1, not 0"),
        ({"type": "topk", "k": 1.0}, ValueError, "'k'.* fraction between 0 and 1, not 1.0"),
        ({"type": "topk", "k": 2.5}, ValueError, "'k'.* fraction between 0 and 1, not 2.5"),
        ({"type": "topk", "k": "1%"}, TypeError, "'k'.* fraction between 0 and 1, not '1%'"),
        ({"type": "randomk", "seed": -1}, ValueError, "'seed'.* must be between 0 and"),
        ({"type": "randomk", "seed": 1.5}, TypeError, "'seed'.* must be a whole number, not 1.5"),
        (
            {"type": "dithering", "partition": "log"},
            ValueError,
            "'partition'.* must be 'linear' or 'natural', not 'log'",
        ),
        ({"type": "dithering", "normalize": 2}, ValueError, "'normalize'.* must be 'max' or 'l2', not 2"),
        ({"type": "dithering", "k": 0}, ValueError, "'k'.* must be between 1 and 32767, not 0"),
        ({"type": "dithering", "partition": "natural", "k": 33}, ValueError, "'k'.* at most 32 .*'natural', not 33"),
    ],
)
@pytest.mark.ranks(1)
def test_wrong_parameters_are_refused_in_a_sentence(params, error, sentence):
    store = mx.kv.create("mykv")
    with pytest.raises(error, match=sentence):
        store.set_gradient_compression(params)
    parameter = gluon.Parameter("weight", shape=(3,))
    parameter.initialize()
    if params == {}:  # none, as in MXNet's Trainer
        mykv.DistributedTrainer([parameter], *_SGD, compression_params=params)
        return
    with pytest.raises(error, match=sentence):
        mykv.DistributedTrainer([parameter], *_SGD, compression_params=params)


@pytest.mark.ranks(1)
def test_both_ways_at_once_are_refused():
    parameter = gluon.Parameter("weight", shape=(3,))
    parameter.initialize()
    with pytest.raises(ValueError, match=r"either compression \(Compression.fp16\) or compression_params .*not both"):
        mykv.DistributedTrainer(
            [parameter], *_SGD, compression=mykv.Compression.fp16, compression_params={"type": "2bit"}
        )


@pytest.mark.ranks(4, long=(3,), env=_HOSTS)
@pytest.mark.parametrize("params", _EVERY, ids=lambda one: one["type"])
@pytest.mark.parametrize("face", ["pushpull", "push", "optimizer", "trainer", "buckets", "sharded trainer"])
def test_all_ways_give_all_workers_the_same_compressed_result(rank, size, gather, params, face):
    values = [np.random.RandomState(one).uniform(-1, 1, 1000).astype("float32") for one in range(size)]
    exact = np.sum(values, axis=0, dtype="float64")
    if face in ("pushpull", "push", "optimizer"):
        store = mx.kv.create("mykv")
        store.set_gradient_compression(params)
        result = array(np.zeros(1000, "float32"))
        store.init("one", result)
        if face == "optimizer":
            store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, wd=0, rescale_grad=-1.0))
        if face == "pushpull":
            store.pushpull("one", array(values[rank]), result)
        else:
            store.push("one", array(values[rank]))
            store.pull("one", result)
    else:
        parameter = gluon.Parameter("weight", shape=(1000,))
        parameter.initialize(mx.init.Zero())
        trainer = mykv.DistributedTrainer(
            [parameter],
            "sgd",
            {"learning_rate": 1.0, "rescale_grad": -1.0},
            reduce_method="sum",
            bucket_bytes=0 if face == "trainer" else 16 << 20,
            compression_params=params,
            update_on_kvstore=True if face == "sharded trainer" else None,
        )
        parameter.grad()[:] = array(values[rank])
        parameter.data()._fresh_grad = True
        trainer.step(1)
        result = parameter.data()
    got = value(result)
    assert len(set(gather(got.tobytes()))) == 1
    assert np.isfinite(got).all()
    assert abs(got - exact).max() > 1e-3, "nothing was compressed"


@pytest.mark.ranks(2, env=_HOSTS)
@pytest.mark.parametrize("params", [{"type": "fp16"}, {"type": "bf16"}], ids=lambda one: one["type"])
def test_fp16_and_bf16_are_those_of_compression(rank, params):
    method = getattr(mykv.Compression, params["type"])
    results = []
    for more in ({"compression": method}, {"compression_params": params}):
        parameter = gluon.Parameter("weight", shape=(1000,))
        parameter.initialize(mx.init.Zero())
        trainer = mykv.DistributedTrainer([parameter], *_SGD, **more)
        parameter.grad()[:] = array(np.random.RandomState(rank).uniform(-1, 1, 1000).astype("float32"))
        trainer.allreduce_grads()
        results.append(value(parameter.grad()).tobytes())
    store = mx.kv.create("mykv")
    store.set_gradient_compression(params)
    mine = array(np.random.RandomState(rank).uniform(-1, 1, 1000).astype("float32"))
    store.pushpull(0, mine)
    assert results[0] == results[1]
    np.testing.assert_allclose(value(mine) / 2, np.frombuffer(results[0], "float32"), rtol=1e-2, atol=1e-2)


@pytest.mark.ranks(2, env=_HOSTS)
def test_the_stock_trainer_hands_its_compression_params_to_the_store(rank, gather):
    sums = []
    for more in ({}, {"compression_params": {"type": "topk", "k": 3}}):
        parameter = gluon.Parameter("weight", shape=(1000,))
        parameter.initialize(mx.init.Zero())
        trainer = gluon.Trainer([parameter], *_SGD, kvstore=mx.kv.create("mykv"), update_on_kvstore=False, **more)
        parameter.grad()[:] = array(np.random.RandomState(rank).uniform(-1, 1, 1000).astype("float32"))
        trainer.allreduce_grads()
        sums.append(value(parameter.grad()))
        assert len(set(gather(sums[-1].tobytes()))) == 1
    assert np.count_nonzero(sums[0]) == 1000
    assert 0 < np.count_nonzero(sums[1]) <= 2 * 3


@pytest.mark.ranks(2, env=_HOSTS)
@pytest.mark.parametrize("kind", ["topk", "randomk"])
@pytest.mark.parametrize("more", [{}, {"bucket_bytes": 0}, {"num_groups": 2}], ids=lambda one: str(list(one)))
def test_a_whole_k_counts_elements_of_each_array_in_a_trainer_too(rank, gather, kind, more):
    def trained(made):
        parameters = [gluon.Parameter(f"weight{number}", shape=(500 + number,)) for number in range(10)]
        for parameter in parameters:
            parameter.initialize(mx.init.Zero())
        parameters[3].grad_req = "null"
        trainer = made(parameters)
        if len(more) == 0:
            parameters[3].grad_req = "write"  # it gets a place of its own too
        for number, parameter in enumerate(parameters):
            if parameter.grad_req != "null":
                values = np.random.RandomState(100 * number + rank).uniform(0.5, 1, parameter.shape)
                parameter.grad()[:] = array(values.astype("float32"))
        trainer.allreduce_grads()
        return [np.count_nonzero(value(one.grad())) for one in parameters if one.grad_req != "null"]

    params = {"type": kind, "k": 5}
    counts = trained(lambda given: mykv.DistributedTrainer(given, *_SGD, compression_params=params, **more))
    # On each host up to 6: k is rounded up in each piece. 'randomk' also draws from the padding behind a gradient.
    least = 5 if kind == "topk" else 3
    assert all(least <= count <= 2 * 6 for count in counts), counts
    expected = trained(
        lambda given: gluon.Trainer(given, *_SGD, kvstore="mykv", update_on_kvstore=False, compression_params=params)
    )
    if kind == "topk":
        assert counts == expected
    else:  # the stock Trainer's arrays have no padding
        assert all(0 <= other - count <= 3 for count, other in zip(counts, expected)), (counts, expected)


@pytest.mark.ranks(2, env=_HOSTS)
def test_other_compression_on_a_worker_is_an_error_that_shows_both(rank):
    wires = [gradient_compression(one).wire for one in (_TOPK, {"type": "2bit"})]
    store = mx.kv.create("mykv")
    store.set_gradient_compression(_TOPK if rank == 0 else {"type": "2bit"})
    mine = array(np.ones(1000, "float32"))
    store.pushpull("one", mine)
    with pytest.raises(MXNetError) as failure:
        mine.asnumpy()
    assert all(f"'{wire}'" in str(failure.value) for wire in wires)
    parameter = gluon.Parameter("weight", shape=(1000,))
    parameter.initialize()
    with pytest.raises(RuntimeError) as failure:
        mykv.DistributedTrainer([parameter], *_SGD, compression_params=_TOPK if rank == 0 else {"type": "2bit"})
    for one in (_TOPK, {"type": "2bit"}):
        assert f"compression={gradient_compression(one)!r}" in str(failure.value)
    clear_errors()


@pytest.mark.ranks(2, env={**_HOSTS, "MYKV_COMPRESS_BYTES": "4000"})
def test_small_gradients_and_other_types_are_not_compressed(rank):
    store = mx.kv.create("mykv")
    store.set_gradient_compression({"type": "topk", "k": 1})
    for key, (count, dtype) in enumerate([(999, "float32"), (1000, "float32"), (5000, "float16"), (5000, "int32")]):
        mine = array(np.ones(count, dtype))
        store.pushpull(key, mine)
        is_compressed = (count, dtype) == (1000, "float32")
        assert (value(mine) == 2).all() == (not is_compressed)


@pytest.mark.ranks(2, env=_HOSTS)
def test_what_is_lost_comes_with_the_next_steps(rank):
    """The mean of the decoded values over many steps equals the sent values."""
    store = mx.kv.create("mykv")
    store.set_gradient_compression({"type": "topk", "k": 0.25})
    mine = np.linspace(0.5, 1.5, 1000).astype("float32") * (1 + rank)
    arrived = np.zeros(1000)
    for _ in range(60):
        out = array(np.zeros(1000, "float32"))
        store.pushpull("one", array(mine), out)
        arrived += value(out)
    np.testing.assert_allclose(arrived / 60, np.linspace(0.5, 1.5, 1000) * 3, rtol=0.3)


@pytest.mark.ranks(2, env={"MYKV_COMPRESS_BYTES": "0"})
def test_on_one_host_nothing_is_compressed(rank):
    store = mx.kv.create("mykv")
    store.set_gradient_compression({"type": "1bit"})
    mine = array(np.full(5000, 0.25 + rank, "float32"))
    store.pushpull("one", mine)
    assert (value(mine) == 1.5).all()


_LEARNING = [
    {"type": "2bit"},
    {"type": "1bit", "threshold": 0},
    {"type": "onebit"},
    {"type": "topk", "k": 0.05},
    {"type": "randomk", "k": 0.5},  # with less it diverges from some weights, at this learning rate
    {"type": "dithering"},
    {"type": "dithering", "partition": "natural", "normalize": "l2"},
    {"type": "fp16"},
]


@pytest.mark.long
@pytest.mark.parametrize("params", _LEARNING, ids=lambda one: "-".join(map(str, one.values())))
def test_digits_are_learned_all_the_same(mpirun, params):
    pytest.importorskip("sklearn")
    script = f"""
    import sys
    sys.path.insert(0, {str(_EXAMPLES)!r})
    import kvstore_plugin as mykv, mxnet as mx, numpy as np
    from digits_common import SGD, accuracy, batches, checksum, data, gather, loss_of, network
    from mxnet import autograd

    mykv.init()
    params = {params!r}
    rank, size = mykv.rank(), mykv.size()
    (images, labels), _ = data()
    length = len(images) // size
    share = slice(rank, length * size, size)
    images, labels = images[share], labels[share]
    net = network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", SGD, compression_params=params)
    for epoch in range(20):
        for positions in batches(epoch, length, size):
            with autograd.record():
                loss = loss_of(net(mx.np.array(images[positions])), mx.np.array(labels[positions]))
            loss.backward()
            trainer.step(len(positions))
    sums = gather(mx.kv.create("mykv"), [checksum(net)])
    if rank == 0:
        print(f"accuracy {{accuracy(net):.4f}}, {{len(set(sums[:, 0]))}} different weights")
    """
    result = mpirun(2, textwrap.dedent(script), timeout=120, env=_HOSTS)
    assert result.code == 0, result.text
    accuracy, different = re.search(r"accuracy (\S+), (\d+) different weights", result.stdout).groups()
    assert different == "1"
    # 31 trainings from other weights and in other orders ended at 0.972 or more, one with other instructions at 0.969.
    assert float(accuracy) >= 0.95


@pytest.mark.parametrize("kind", ["nd", "np"])
@pytest.mark.parametrize("name, bits", [("none", 53), ("fp16", 11), ("bf16", 8)])
def test_compress_and_decompress_as_horovods_compressors(name, bits, kind):
    method = getattr(mykv.Compression, name)
    for dtype in ("float32", "float64", "float16", "int32"):
        values = np.linspace(-3, 3, 11).astype(dtype)
        tensor = array(values, kind)
        small, ctx = method.compress(tensor)
        converted = name != "none" and dtype in ("float32", "float64")
        assert type(small) is type(tensor) and (small is not tensor) == converted
        back = method.decompress(small, ctx)
        assert back.dtype == tensor.dtype and type(back) is type(tensor)
        np.testing.assert_allclose(back.asnumpy(), values, rtol=2.0 ** (1 - bits) if converted else 0)


def test_a_compressor_without_decompress_is_refused_with_what_to_do():
    class Halves:
        @staticmethod
        def compress(tensor):
            return tensor.astype("float16"), tensor.dtype

    for compressor in (Halves, Halves(), "fp16", None):
        with pytest.raises(TypeError, match="compression must be.*A compressor of your own needs methods compress"):
            mykv.DistributedTrainer([], "sgd", compression=compressor)
