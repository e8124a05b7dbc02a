"""How the gradients of a trainer are divided into groups, and which operations a rank refuses."""

from __future__ import annotations

from types import SimpleNamespace

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import array, checksum, dense_network, mx, parameters, structure
from kvstore_plugin.gradients import bucket_sizes
from kvstore_plugin.world import process
from mxnet import autograd


@pytest.mark.parametrize(
    ("trained", "num_groups", "groups"),
    [
        ("111111", 0, [None] * 6),
        ("111111", 1, [0] * 6),
        ("111111", 2, [0, 0, 0, 1, 1, 1]),
        ("111111", 4, [0, 0, 1, 2, 2, 3]),
        ("111111", 6, [0, 1, 2, 3, 4, 5]),
        ("111", 100, [0, 33, 66]),
        ("001111", 2, [0, 0, 0, 0, 1, 1]),  # frozen parameters do not count
        ("110110", 2, [0, 0, 1, 1, 1, 1]),
        ("00", 3, [0, 0]),
    ],
)
def test_groups_have_equally_many_trained_parameters(trained, num_groups, groups):
    parameters = [SimpleNamespace(grad_req="write" if one == "1" else "null") for one in trained]
    slots = [SimpleNamespace(parameter=parameter, group=None) for parameter in parameters]
    bucket_sizes.number_groups(slots, num_groups)
    assert [slot.group for slot in slots] == groups


@pytest.mark.ranks(2)
def test_weights_that_were_replaced_between_steps_are_updated_on_the_store(rank, gather):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=True)

    def step():
        with autograd.record():
            loss = (net(array(np.random.RandomState(rank).rand(4, 6).astype("float32"))) ** 2).sum()
        loss.backward()
        trainer.step(4)
        mx.nd.waitall()

    step()
    for parameter in structure(net).values():
        parameter._data = [parameter.data().copy()]
        autograd.mark_variables(parameter._data, parameter._grad)
    before = parameters(net)
    step()
    assert all((after != before[name]).any() for name, after in parameters(net).items() if "weight" in name)
    assert len(set(gather(checksum(net)))) == 1


class _Refused:
    """The core, recording refusals instead of executing them."""

    def __init__(self, core):
        self._core = core
        self.names = []

    def __getattr__(self, name):
        return getattr(self._core, name)

    def refuse(self, name, reason, turn_of=""):
        self.names.append(name)


@pytest.mark.ranks(1)
def test_a_refused_step_refuses_a_comparison_only_after_a_step_that_had_one(monkeypatch):
    """Other ranks would never come to another comparison, so it would stay in the table."""
    mykv.init()
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "sgd")
    [gradients] = trainer._reducers
    core = _Refused(process.core)

    def use():
        for parameter in structure(net).values():
            parameter.data()._fresh_grad = True

    def refused():
        core.names.clear()
        with monkeypatch.context() as changed:
            changed.setattr(process, "core", core)
            gradients.refuse("planted")
        return core.names

    use()
    trainer.step(1)
    operations = list(refused())
    assert operations == gradients._names()
    use()
    trainer.allreduce_grads()
    trainer.update(1)
    assert refused() == [*operations, f"{operations[0]}/update"]
