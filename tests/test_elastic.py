"""Jobs whose workers are killed, one after another: the others go on, from one state, and no step counts twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
import pytest
from harness import launcher
from kvstore_plugin import kept_shares, sharding
from kvstore_plugin.optimizer_states import described_array
from mxnet.gluon import nn

_WORKER = Path(__file__).with_name("elastic_digits.py")
_NOTICE_S = 2.0
_LIMIT_S = 150.0

# The replay adds the gradients of all workers up in another order: rounding, which training does not make smaller.
_ROUNDING = 5e-3

pytestmark = pytest.mark.skipif(not launcher.is_open_mpi(), reason="only Open MPI's mpirun has --with-ft ulfm")


@pytest.fixture
def job(mpirun):
    """Run a plan of elastic_digits.py; returns what the survivors say at the end, after what all plans have in common.

    The result has, for each survivor, its first rank, last rank and size, and what follows as words.
    """

    def run(ranks: int, plan: dict, **env: str):
        result = mpirun(ranks, _WORKER, json.dumps(plan), options=("--with-ft", "ulfm"), env=env, timeout=_LIMIT_S)
        died = re.findall(r"^dies (\d+) ([\d.]+)$", result.stdout, re.MULTILINE)
        assert sorted(int(rank) for rank, _ in died) == sorted(map(int, plan["deaths"])), result.text
        ends = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("end ")]
        assert len(ends) == ranks - len(died), result.text
        assert [int(end[2]) for end in ends] == [len(ends)] * len(ends), result.text
        resets: dict[str, set] = {}
        for line in result.stdout.splitlines():
            if line.startswith("reset "):
                _, _, _, size, step, checksum = line.split()
                resets.setdefault(size, set()).add((step, checksum))
        assert resets and all(len(seen) == 1 for seen in resets.values()), result.text  # all at one step, in one state
        noticed = [float(time) for time in re.findall(r"noticed at ([\d.]+)", result.stderr)]
        for _, died_at in died:
            assert any(0 <= time - float(died_at) < _NOTICE_S for time in noticed), result.text
        for end in ends:
            said = dict(zip(end[3::2], end[4::2]))
            assert said["steps"] == said["replayed"] == said["updates"], result.text
            assert float(said["difference"]) < _ROUNDING, result.text
        assert len({end[-1] for end in ends}) == 1, result.text  # the weights
        return result, ends

    return run


def test_four_workers_down_to_one(job):
    deaths = {"0": ["forward", 6], "2": ["reduction", 15], "3": ["commit", 26]}
    result, ends = job(4, {"deaths": deaths, "epochs": 20, "every": 2})
    assert float(ends[0][ends[0].index("accuracy") + 1]) >= 0.97, result.text


def test_four_workers_down_to_one_with_the_optimizer_on_the_store(job):
    deaths = {"1": ["update", 6], "0": ["reduction", 15], "3": ["pass_on", 25]}
    result, ends = job(4, {"deaths": deaths, "epochs": 20, "sharded": True})
    assert float(ends[0][ends[0].index("accuracy") + 1]) >= 0.97, result.text


def test_two_die_at_once_and_one_before_the_first_step(job):
    job(4, {"deaths": {"0": ["forward", 0], "1": ["update", 13], "3": ["update", 13]}, "every": 3})


def test_one_dies_while_the_others_begin_again(job):
    job(4, {"deaths": {"0": ["forward", 6], "1": ["recovery", 0]}})


@pytest.mark.parametrize("sharded", [False, True])
def test_death_at_any_moment_on_two_hosts(job, sharded):
    job(
        3,
        {"deaths": {"1": ["any", -1]}, "every": 2, "sharded": sharded, "adam": sharded, "by_mpi": True},
        MYKV_VIRTUAL_HOSTS="2",
    )


def test_states_that_died_with_their_copy_end_the_job(mpirun):
    plan = {"deaths": {"1": ["forward", 4], "2": ["forward", 4]}, "sharded": True}
    result = mpirun(4, _WORKER, json.dumps(plan), options=("--with-ft", "ulfm"), timeout=_LIMIT_S)
    assert result.code != 0
    assert re.search(r"states of the optimizer on rank 1 of 4 are lost, since rank 2, .* has died too", result.stderr)


def test_a_job_that_ends_with_its_first_process_is_refused():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    with pytest.raises(RuntimeError, match="mpirun --with-ft ulfm"):
        mykv.DistributedTrainer(net.collect_params(), "sgd", elastic=True)


def test_process_sets_and_other_trainers_are_refused():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    with pytest.raises(ValueError, match="process sets end"):
        mykv.DistributedTrainer(net.collect_params(), "sgd", parameter_process_sets={"weight": None}, elastic=True)
    with pytest.raises(ValueError, match="needs a DistributedTrainer"):
        mykv.ElasticState(net=net)
    with pytest.raises(TypeError, match="elastic=True"):
        mykv.ElasticState(net=net, trainer=mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=None))


def test_a_share_of_states_survives_its_way_as_bytes():
    state = mx.nd.array(np.arange(12).reshape(3, 4))
    half = state.astype("float16")
    states = {0: (state, None, half), "key": state[0:1]}
    unpacked = kept_shares._unpack(kept_shares.pack(states))
    assert list(unpacked) == [0, "key"]
    assert unpacked[0][0] == (described_array(state), None, described_array(half))
    assert unpacked[0][1][1].tobytes() == half.asnumpy().tobytes()
    assert unpacked["key"][1][0].tobytes() == state[0:1].asnumpy().tobytes()


def test_shards_are_filled_from_those_of_another_division():
    values = np.arange(100, dtype=np.float32)
    new = sharding.Shard(0, 30, 50)
    array = mx.nd.zeros(50)
    for old in (sharding.Shard(0, 0, 40), sharding.Shard(1, 40, 5), sharding.Shard(2, 45, 55)):
        piece = values[old.begin : old.begin + old.count].view(np.uint8)
        kept_shares._fill(array, piece, 4, old, new, False)
    assert (array.asnumpy() == values[30:80]).all()
