"""docs/learning-rate.md: the divisions, and the page's program with a warm-up."""

from __future__ import annotations

import re
from pathlib import Path

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
import pytest
from harness.support import IS_2, array
from mxnet import autograd, gluon

_PAGE = Path(__file__).parents[2] / "docs" / "learning-rate.md"
_RATE, _BATCH = 0.5, 4


def _change(make_trainer, batches, batch_size, mean=False):
    """The change of a linear layer's weights by one step over these batches."""
    net = gluon.nn.Dense(1, in_units=3, use_bias=False)
    net.initialize(mx.init.One())
    if len(batches) > 1:
        net.weight.grad_req = "add"
    trainer = make_trainer(net.collect_params(), "sgd", {"learning_rate": _RATE})
    for batch in batches:
        with autograd.record():
            loss = net(array(batch)) * 1.0
            loss = loss.mean() if mean else loss
        loss.backward()
    trainer.step(batch_size)
    return net.weight.data().asnumpy() - 1


@pytest.mark.ranks(2)
def test_steps_divide_as_the_table_says(rank, size):
    def stock(*arguments):
        mykv.broadcast_parameters(arguments[0])
        return gluon.Trainer(*arguments, kvstore=mx.kv.create("mykv"))

    def summing(*arguments):
        return mykv.DistributedTrainer(*arguments, reduce_method="sum")

    averaging = mykv.DistributedTrainer
    of_ranks = [np.random.RandomState(one).randn(3, _BATCH, 3).astype("float32") for one in range(size)]
    mine = of_ranks[rank]
    # The gradient of a sample is the sample.
    expected = -_RATE * np.concatenate([data[0] for data in of_ranks]).mean(axis=0)[None]
    expected_of_all = -_RATE * np.concatenate(of_ranks, axis=1).reshape(-1, 3).mean(axis=0)[None]
    for change, wanted in [
        (_change(averaging, mine[:1], _BATCH), expected),
        (_change(averaging, mine[:1], 1, mean=True), expected),
        (_change(averaging, mine, _BATCH * 3), expected_of_all),
        (_change(stock, mine[:1], _BATCH * size), expected),
        (_change(summing, mine[:1], _BATCH), size * expected),
    ]:
        np.testing.assert_allclose(change, wanted, rtol=1e-5, atol=1e-6)


def test_the_program_on_the_page_warms_up(mpirun):
    script = "".join(re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL))
    if IS_2:
        script = script.replace("mykv.init()", "mykv.init()\nmx.npx.set_np()")
    result = mpirun(2, script + "\nmykv.check_in_step(net.collect_params())\n")
    assert result.code == 0, result.text
    assert "overwritten" not in result.text
    printed = re.findall(r"^epoch \d: loss (\S+), learning rate (\S+)$", result.stdout, re.MULTILINE)
    losses, rates = np.array(printed, dtype=float).reshape(2, 6, 2).transpose(2, 0, 1)
    # From the rate of one worker to that of two within two epochs, then down to 0.
    np.testing.assert_allclose(rates[0, :2], [0.03, 0.04], atol=1e-3)
    assert (np.diff(rates[:, 1:]) < 0).all() and rates[:, -1].max() < 1e-3
    assert (np.diff(losses) < 0).all(), losses
