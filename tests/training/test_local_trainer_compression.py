"""Meetings of a LocalTrainer whose changes are compressed between hosts."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import array, checksum, dense_network, parameters
from mxnet import autograd

_SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})
_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2", "MYKV_COMPRESS_BYTES": "0"}
_BATCH = 4
_K = 4
_CHOICES = {
    "fp16": {"type": "fp16"},
    "2bit": {"type": "2bit", "threshold": 0.05},
    "topk share": {"type": "topk", "k": 0.25},
    "topk number": {"type": "topk", "k": _K},
    "randomk number": {"type": "randomk", "k": _K},
}


def _train(net, trainer, steps, rank) -> None:
    for step in steps:
        x = array(np.random.RandomState(1000 * step + rank).randn(_BATCH, 6).astype("float32"))
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(_BATCH)


def _made(seed: int, compression=None, **options):
    net = dense_network(seed)
    return net, mykv.LocalTrainer(net.collect_params(), *_SGD, compression_params=compression, **options)


@pytest.mark.ranks(4, env=_HOSTS)
@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlap"])
@pytest.mark.parametrize("choice", _CHOICES)
def test_compressed_meetings_on_two_hosts(gather, rank, choice, overlap):
    """All workers have equal bits, which are not those without compression; with float16 they are close to them."""
    options = {"period": 2, "outer_momentum": 0.5, "overlap": overlap}
    net, trainer = _made(rank, _CHOICES[choice], **options)
    plain, uncompressed = _made(rank, **options)
    for first in range(0, 6, 2):
        for one, its in ((net, trainer), (plain, uncompressed)):
            _train(one, its, range(first, first + 2), rank)
        assert overlap or len(set(gather(checksum(net)))) == 1
    for its in (trainer, uncompressed):
        its.synchronize()
    assert len(set(gather(checksum(net)))) == 1
    assert checksum(net) != checksum(plain), "nothing was compressed"
    if choice == "fp16":
        for name, values in parameters(plain).items():
            np.testing.assert_allclose(parameters(net)[name], values, rtol=0, atol=5e-3, err_msg=name)


@pytest.mark.ranks(4, env={"MYKV_COMPRESS_BYTES": "0"})
@pytest.mark.parametrize("choice", _CHOICES)
def test_on_one_host_nothing_is_compressed(gather, rank, choice):
    seen = []
    for compression in (_CHOICES[choice], None):
        net, trainer = _made(rank, compression, period=2)
        _train(net, trainer, range(4), rank)
        seen.append(checksum(net))
    assert len(set(gather(seen[0]))) == 1
    assert seen[0] == seen[1]


@pytest.mark.ranks(4, env=_HOSTS)
@pytest.mark.parametrize("kind", ["topk", "randomk"])
def test_k_counts_the_elements_of_each_weight(rank, kind):
    net, trainer = _made(0, {"type": kind, "k": _K}, period=1)
    before = parameters(net)
    _train(net, trainer, range(1), rank)
    after = parameters(net)
    for name, values in before.items():
        changed = int((after[name] != values).sum())
        # Each piece that a host owns rounds its part of k up.
        assert min(_K, values.size) <= changed <= min(_K + 3, values.size), name


@pytest.mark.ranks(4, env=_HOSTS)
@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlap"])
@pytest.mark.parametrize("compression", [{"type": "2bit", "threshold": 0.01}, _CHOICES["topk share"]])
def test_a_meeting_without_steps_does_not_spend_what_error_feedback_has_kept(gather, rank, compression, overlap):
    nets = []
    for more in (0, 3):
        net, trainer = _made(0, compression, period=4, overlap=overlap)
        _train(net, trainer, range(8), rank)
        trainer.synchronize()
        for _ in range(more):
            trainer.synchronize()
        _train(net, trainer, range(8, 12), rank)
        trainer.synchronize()
        nets.append(net)
    assert len(set(gather(checksum(nets[0])))) == 1
    assert checksum(nets[0]) == checksum(nets[1])
