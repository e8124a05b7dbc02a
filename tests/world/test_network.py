"""Two hosts with networks, addresses and names of their own (network namespaces, as root): one job over real TCP."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from harness import launcher
from harness.processes import Launch

_LIMIT_S = 90.0

# Namespaces share a kernel, by which MPICH's UCX takes them for one host, and would not use the network.
_ENV = {"UCX_TLS": "tcp,self"}

_SCRIPT = """
import hashlib, time
import kvstore_plugin as mykv
import numpy as np
import mxnet as mx
from mxnet import autograd, gluon

mykv.init()
assert (mykv.size(), mykv.local_size(), mykv.cross_size()) == (4, 2, 2)
if mx.__version__.startswith("2."):
    mx.npx.set_np()
make = mx.np if mx.__version__.startswith("2.") else mx.nd
mx.random.seed(mykv.rank())
net = gluon.nn.Dense(500)  # its shape is known in the first forward pass
net.initialize(mx.init.Xavier())
trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
for step in range(5):
    with autograd.record():
        loss = (net(make.ones((8, 400)) * (1 + mykv.rank() + step)) ** 2).mean()
    loss.backward()
    trainer.step(8)
weights = net.weight.data().asnumpy()
assert np.isfinite(weights).all()
digests = mykv.allgather_object(hashlib.sha256(weights.tobytes()).hexdigest())
assert len(set(digests)) == 1

x = make.ones((1000,))
used = []
for turn in range(6):  # the first takes what is taken once, and other work makes this dearer
    mykv.barrier()
    if mykv.rank() == mykv.size() - 1:
        time.sleep(1.0)
    before = time.process_time()
    total = mykv.allreduce(x, average=False, name="late").asnumpy()
    used.append(time.process_time() - before)
assert (total == mykv.size()).all()
assert min(used) < 0.1, f"rank {mykv.rank()} used {used} s while it waited"
mykv.barrier()
if mykv.rank() == 0:
    print("trained on", mykv.cross_size(), "hosts")
"""


@pytest.fixture(scope="module")
def network():
    """The benchmarks' module of this name; it is no part of the installed package."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "network.py"
    if not path.exists():
        pytest.skip("the benchmarks are not here")
    spec = importlib.util.spec_from_file_location("network_of_the_benchmarks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reason = module.unavailable()
    if reason:
        pytest.skip(reason)
    return module


@pytest.mark.alone
def test_two_hosts_train_alike_and_sleep_while_they_wait(network, tmp_path):
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(_SCRIPT)
    with network.Network(2) as up, output.open("wb") as out:
        command = up.mpirun(launcher.mpirun_path(), [2, 2], [sys.executable, str(script)])
        launch = Launch(command, launcher.environment(tmp_path, _ENV), stdout=out, stderr=out, cwd=str(tmp_path))
        try:
            code = launch.process.wait(_LIMIT_S)
        finally:
            launch.kill()
    text = output.read_text(errors="replace")
    assert code == 0 and "trained on 2 hosts" in text, text
