"""mykvrun --as horovod: scripts that import Horovod run unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness import launcher
from harness.support import IS_2

from mykvrun.command_line import parse

_FOR_HOROVOD = """
    import mxnet as mx
    import horovod.mxnet as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.common.process_sets import global_process_set
    from horovod.common.util import check_extension, gpu_available, mpi_built, split_list
    from horovod.mxnet.compression import Compression
    from horovod.mxnet.functions import broadcast_object
    from horovod.mxnet.mpi_ops import allreduce_, broadcast_, rank, size

    check_extension('horovod.mxnet', 'HOROVOD_WITH_MXNET', __file__, 'mpi_lib')
    assert mpi_built() and not gpu_available('mxnet') and global_process_set is hvd.global_process_set
    assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]] and split_list([1], 2) == [[1], []]
    hvd.init()

    class SumOfGradients(mx.gluon.Trainer):
        def __init__(self, params, optimizer, optimizer_params):
            super().__init__(params, optimizer, optimizer_params, kvstore=None)
            self._scale /= size()

        def _allreduce_grads(self):
            for number, parameter in enumerate(self._params):
                if parameter.grad_req != 'null':
                    allreduce_(parameter.list_grad()[0], average=False, name=str(number), priority=-number)

    net = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.Constant(float(rank())))
    broadcast_(net.weight.data(), root_rank=0, name='weight')
    trainer = SumOfGradients(net.collect_params(), 'sgd', {'learning_rate': 1.0})
    assert broadcast_object(rank(), root_rank=1) == 1 and Compression.fp16 is hvd.Compression.fp16
    try:
        hvd.allreduce(mx.nd.ones((2 + rank(),)), name='lengths').wait_to_read()
    except HorovodInternalError:
        print('differs')
    with mx.autograd.record():
        loss = net(mx.nd.array([[1.0, 3.0 * rank()]])).sum()
    loss.backward()
    trainer.step(1)
    print('weights', net.weight.data().asnumpy().tolist())
"""

# It clips sums between allreduce_grads() and update(), as in Horovod.
_CLIPS = """
    import horovod
    import horovod.mxnet as hvd
    from horovod.mxnet import DistributedTrainer, rank
    import mxnet as mx

    hvd.init()
    net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(0.0))
    trainer = DistributedTrainer(net.collect_params(), 'sgd', {'learning_rate': 1.0})
    with mx.autograd.record():
        loss = net(mx.nd.array([[1.0 + rank()]])).sum()
    loss.backward()
    trainer.allreduce_grads()
    print('sum', float(net.weight.grad().asnumpy().sum()))
    trainer.update(1)
    print('weight', float(net.weight.data().asnumpy().sum()), horovod.__version__, hvd.size())
"""

_RUNS = """
import os
import horovod

def work(scale):
    import horovod
    return scale * int(os.environ["MINE"]), horovod.__file__

print(horovod.run(work, args=(2,), num_proc=2, use_mpi=True, env={"MINE": "3"}) == [(6, horovod.__file__)] * 2)
try:
    horovod.run(work, np=2, min_np=1)
except RuntimeError as error:
    print(error)
"""


def _run(tmp_path, workers, program):
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "mykvrun", "-n", str(workers), "--as", "horovod", str(tmp_path / "train.py")]
    env = launcher.environment(tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.skipif(IS_2, reason="blocks of MXNet 2.0 do not take the arrays of such scripts")
def test_programs_that_import_horovod_and_its_submodules_run(tmp_path):
    """Imports of published scripts: their own Trainer over mpi_ops."""
    stdout, stderr = _run(tmp_path, 2, _FOR_HOROVOD)
    assert stdout.count("weights [[-1.0, -1.5]]") == stdout.count("differs") == 2, stdout + stderr


@pytest.mark.skipif(IS_2, reason="blocks of MXNet 2.0 do not take the arrays of such scripts")
def test_gradients_after_allreduce_grads_are_sums_as_in_horovod(tmp_path):
    stdout, stderr = _run(tmp_path, 2, _CLIPS)
    assert stdout.count("sum 3.0") == stdout.count("weight -1.5 0.28.1 2") == 2, stdout + stderr
    assert "are means" not in stderr


def test_the_line_for_notebooks_runs_as_printed(tmp_path):
    """On the page docs/clients.md."""
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    (line,) = re.findall(r"In a notebook: `(.*?)`", page)
    program = (
        f"import kvstore_plugin, sys\n{line}\nimport horovod.mxnet as hvd\nhvd.init()\nprint(hvd.size(), hvd.__file__)"
    )
    env = launcher.environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=150)
    assert re.fullmatch(r"1 .*/kvstore_plugin/as_horovod/horovod/.*\n", done.stdout), done.stdout + done.stderr


def test_horovod_run_takes_horovods_arguments(tmp_path):
    stdout, stderr = _run(tmp_path, 1, _RUNS)
    assert "True\n" in stdout and "--min-num-proc is Horovod's option to add workers" in stdout, stdout + stderr


def test_the_folder_stands_before_the_users_own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    for options, own in ([], "/theirs"), (["-x", "PYTHONPATH=/mine"], "/mine"):
        path = parse(["-n", "2", "--as", "horovod", *options, "true"]).job.variables["PYTHONPATH"]
        folder, _, rest = path.partition(":")
        assert rest == own and (Path(folder) / "horovod/mxnet.py").exists()
    assert "PYTHONPATH" not in parse(["-n", "2", "true"]).job.variables
