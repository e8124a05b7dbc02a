"""Devices of parameters are found without calls of MXNet's library: a trainer looks at all of them."""

from __future__ import annotations

import pytest
from harness.support import dense_network, mx, structure
from kvstore_plugin.parameters import placement
from mxnet import gluon


def _parameters(net):
    return list(structure(net).values())


def test_device_ids_ask_no_array(monkeypatch):
    parameters = _parameters(dense_network(1, ctx=[mx.cpu(0), mx.cpu(1)]))
    array = type(parameters[0].data(mx.cpu(0)))
    assert placement.device_ids(parameters) == [0, 1]
    for base in array.__mro__:
        for name in {"context", "ctx", "device"} & set(vars(base)):
            monkeypatch.setattr(base, name, property(lambda self: pytest.fail("an array was asked for its device")))
    assert placement.device_ids(parameters) == [0, 1]


def test_parameters_without_values_are_on_no_device():
    unknown = gluon.Parameter("weight", shape=(3, 0), allow_deferred_init=True)
    unknown.initialize()
    assert placement.device_ids([unknown, *_parameters(dense_network(1))]) == [0]
    assert placement.device_ids([unknown]) == []
