"""broadcast_object and allgather_object: anything that can be pickled, small and large, in any process set."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, value


@pytest.fixture(autouse=True)
def initialized():
    mykv.init()


class _Thing:
    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return type(other) is _Thing and other.number == self.number


_OBJECTS = [
    None,
    0,
    "text",
    b"",
    {"a": [1, 2.5, (3,)], "b": {4}},
    float("inf"),
    _Thing(7),
    range(5),
    np.float32,
    [],
    ValueError("as an object"),
]


@pytest.mark.ranks(1, 2, 3)
def test_every_rank_gets_the_object_of_the_root(rank, size):
    for root in range(size):
        for thing in _OBJECTS:
            result = mykv.broadcast_object(thing if rank == root else "not this", root)
            assert repr(result) == repr(thing) if isinstance(thing, Exception) else result == thing
            assert rank != root or result is thing


@pytest.mark.ranks(1, 2, 3)
def test_every_rank_gets_the_objects_of_all(rank, size):
    for k in range(len(_OBJECTS)):
        mine = [_OBJECTS[(k + other) % 10] for other in range(size)]
        assert mykv.allgather_object(mine[rank], name=f"turn {k}") == mine


@pytest.mark.ranks(2)
def test_arrays_in_objects(rank):
    result = mykv.broadcast_object({"w": array(np.arange(5.0)), "n": np.arange(3)} if rank == 0 else None)
    assert value(result["w"]).tolist() == [0, 1, 2, 3, 4] and result["n"].tolist() == [0, 1, 2]
    result["n"][0] = 5  # what arrives may be changed


@pytest.mark.ranks(2, timeout=120)
def test_hundreds_of_megabytes(rank):
    large = np.arange(32 << 20, dtype=np.int64)  # 256 MB
    result = mykv.broadcast_object(large if rank == 1 else None, 1)
    assert result.nbytes == 256 << 20 and result[-1] == (32 << 20) - 1 and (result[::100001] == large[::100001]).all()
    sizes = [len(one) for one in mykv.allgather_object(b"x" * (100_000_000 * rank + 5))]
    assert sizes == [5, 100_000_005]


@pytest.mark.ranks(2, 4, env={"MYKV_VIRTUAL_HOSTS": "2"})
def test_objects_between_hosts(rank, size):
    assert mykv.broadcast_object("from the last" if rank == size - 1 else None, size - 1) == "from the last"
    assert mykv.allgather_object([rank] * 100000) == [[other] * 100000 for other in range(size)]


@pytest.mark.ranks(3)
def test_objects_in_process_sets(rank):
    pair = mykv.add_process_set([0, 2])
    if rank != 1:
        assert mykv.broadcast_object(rank, root_rank=2, process_set=pair) == 2
        assert mykv.allgather_object(rank, process_set=pair) == [0, 2]
        with pytest.raises(ValueError, match="root_rank"):
            mykv.broadcast_object(rank, root_rank=1, process_set=pair)
    else:
        with pytest.raises(ValueError, match="Rank 1 is not in"):
            mykv.allgather_object(rank, process_set=pair)
    mykv.remove_process_set(pair)


@pytest.mark.ranks(2)
def test_object_that_cannot_be_pickled(rank):
    class Refuses:
        def __reduce__(self):
            raise KeyError("no pickle of this")

    for call in (lambda: mykv.broadcast_object(Refuses(), 1), lambda: mykv.allgather_object(Refuses() if rank else 1)):
        with pytest.raises(KeyError if rank else MXNetError, match="no pickle of this"):
            call()
    assert mykv.allgather_object(rank) == [0, 1]
