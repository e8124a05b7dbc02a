"""Everything that trains, and the collective operations of Python, for test_namespaces.py.

Prints "fine RANK HOSTS" at the end. Its argument is JSON: `locked`, ranks that may not share memory; `link`, two files,
or null: this program makes the first when the link may go down in the middle of a training, and goes on when the second
is there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for harness

from harness.launcher import rank_of_this_process
from programs.lock_down import forbid_memfd

GIVEN = json.loads(sys.argv[1])
if rank_of_this_process() in GIVEN["locked"]:
    forbid_memfd()

import kvstore_plugin as mykv  # noqa: E402
import numpy as np  # noqa: E402
from harness.support import array, checksum, dense_network, mx, parameters, value  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

mykv.init()
RANK, SIZE = mykv.rank(), mykv.size()
_HOSTS = len(mykv.world.process.core.host_ranks())
_BATCH, _STEPS = 4, 5
_OPTIMIZER = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
_LINK_S = 60.0

_TRAINERS = {
    "DistributedTrainer": lambda params: mykv.DistributedTrainer(params, *_OPTIMIZER),
    "DistributedTrainer on the store": lambda params: mykv.DistributedTrainer(
        params, *_OPTIMIZER, update_on_kvstore=True
    ),
    "Trainer": lambda params: _stock(params, update_on_kvstore=False),
    "Trainer on the store": lambda params: _stock(params, update_on_kvstore=True),
}
_COMPRESSED = [{"type": "2bit", "threshold": 0.1}, {"type": "topk", "k": 0.1}]


def main() -> None:
    """Run everything on one network after the other."""
    alone = dense_network(seed=0, dtype="float64")
    one = gluon.Trainer(alone.collect_params(), *_OPTIMIZER, kvstore=None)
    for step in range(_STEPS):
        whole = [np.concatenate(parts) for parts in zip(*(_batch(step, rank) for rank in range(SIZE)))]
        _step(alone, one, whole, _BATCH * SIZE)
    expected = parameters(alone)
    bits = {}
    for name in _TRAINERS:
        net = _train(name)
        _compare(net, expected, name)
        bits[name] = checksum(net)
    if GIVEN["link"] is not None:
        net = _train("DistributedTrainer", _link_goes_down)
        assert checksum(net) == bits["DistributedTrainer"], "a link that went down has changed the result"
    if _HOSTS > 1:
        for params in _COMPRESSED:
            _compressed(params, expected)
    _collectives()
    mx.nd.waitall()
    mykv.barrier()
    print("fine", RANK, _HOSTS, flush=True)


def _stock(params, update_on_kvstore: bool, **more):
    mykv.broadcast_parameters(params)
    store = mx.kv.create("mykv")
    return gluon.Trainer(params, *_OPTIMIZER, kvstore=store, update_on_kvstore=update_on_kvstore, **more)


def _batch(step: int, rank: int):
    rng = np.random.RandomState(1000 * step + rank)
    return rng.randn(_BATCH, 6), rng.randn(_BATCH, 2)


def _step(net, trainer, batch, size: int) -> None:
    x, y = batch
    with autograd.record():
        # By hand, since MXNet rounds rescale_grad, and its 2.0 the result of L2Loss too, to float32.
        loss = ((net(array(x)) - array(y)) ** 2 * array(np.full(y.shape, 1 / size))).sum()
    loss.backward()
    trainer.step(1)


def _train(name: str, between=None):
    """A network, other on each rank at first, after a training; `between` is called before the last steps."""
    net = dense_network(seed=RANK, dtype="float64")
    trainer = _TRAINERS[name](net.collect_params())
    for step in range(_STEPS):
        if between is not None and step == 2:
            mx.nd.waitall()
            between()
        _step(net, trainer, _batch(step, RANK), _BATCH if name.startswith("Dist") else _BATCH * SIZE)
    return net


def _compare(net, expected: dict, name: str) -> None:
    """Assert that it was trained as one process would have done, with the same bits everywhere."""
    for key, values in parameters(net).items():
        np.testing.assert_allclose(values, expected[key], rtol=1e-9, atol=1e-9, err_msg=f"{name}: {key}")
    assert len(set(mykv.allgather_object(checksum(net)))) == 1, name


def _compressed(params: dict, expected: dict) -> None:
    """Both trainers: other weights than uncompressed, and the same ones on all workers."""
    for trainer in (
        lambda all_: mykv.DistributedTrainer(all_, *_OPTIMIZER, compression_params=params),
        lambda all_: _stock(all_, False, compression_params=params),
    ):
        net = dense_network(seed=RANK, dtype="float64", widths=(64, 2))
        made = trainer(net.collect_params())
        for step in range(_STEPS):
            _step(net, made, _batch(step, RANK), _BATCH * SIZE)
        plain = dense_network(seed=RANK, dtype="float64", widths=(64, 2))
        uncompressed = _stock(plain.collect_params(), False)
        for step in range(_STEPS):
            _step(plain, uncompressed, _batch(step, RANK), _BATCH * SIZE)
        assert checksum(net) != checksum(plain), f"{params} has lost nothing"
        assert all(np.isfinite(values).all() for values in parameters(net).values())
        assert len(set(mykv.allgather_object(checksum(net)))) == 1, params


def _collectives() -> None:
    """Each collective operation once, among all and in a set of two."""
    ends = mykv.add_process_set([0, SIZE - 1]) if SIZE > 2 else mykv.global_process_set
    for process_set in dict.fromkeys([mykv.global_process_set, ends]):
        if not process_set.included():
            continue
        me, size = process_set.rank(), process_set.size()
        where = {"process_set": process_set}
        all_ = [np.arange(size * 6.0).reshape(size * 2, 3) + 100 * rank for rank in range(size)]
        mine, total = array(all_[me]), sum(all_)
        np.testing.assert_array_equal(value(mykv.allreduce(mine, op=mykv.Sum, **where)), total)
        grouped = mykv.grouped_allreduce([mine, mine + 1], op=mykv.Sum, **where)
        np.testing.assert_array_equal(value(grouped[1]), total + size)
        last = process_set.ranks[-1]
        np.testing.assert_array_equal(value(mykv.broadcast(mine, last, **where)), all_[-1])
        np.testing.assert_array_equal(value(mykv.allgather(mine, **where)), np.concatenate(all_))
        rows = value(mykv.reducescatter(mine, op=mykv.Sum, **where))
        np.testing.assert_array_equal(rows, total[2 * me : 2 * me + 2])
        sent, counts = mykv.alltoall(mine, [2] * size, **where)
        np.testing.assert_array_equal(value(sent), np.concatenate([one[2 * me : 2 * me + 2] for one in all_]))
        assert value(counts).tolist() == [2] * size
        assert mykv.allgather_object(me, **where) == list(range(size))
        assert mykv.broadcast_object({"from": me}, last, **where) == {"from": size - 1}
        mykv.barrier(**where)


def _link_goes_down() -> None:
    mykv.barrier()
    ready, down = map(Path, GIVEN["link"])
    ready.touch()
    deadline = time.monotonic() + _LINK_S
    while not down.exists():
        assert time.monotonic() < deadline, "nobody has cut the link"
        time.sleep(0.01)
    begin = time.monotonic()
    mykv.allreduce(array(np.ones(3)), name="over the link").wait_to_read()
    print(f"stood {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
