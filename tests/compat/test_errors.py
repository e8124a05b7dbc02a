"""The code of an error and the ranks that it names: on every rank, on every host, and after pickling.

Where each code comes from is tested beside the feature; here is how a code travels.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

_TESTS = Path(__file__).parents[1]
_ENV = {"MYKV_TEST_POOL": "errors"}  # ranks of their own: to pickle an error of the core imports the package, and MXNet


@pytest.fixture
def core(hosts, gather):
    """The core over so many hosts, made for this test."""
    from compiled import core
    from mpi4py import MPI

    core.init(MPI.COMM_WORLD.py2f(), {"virtual_hosts": hosts})
    yield core
    gather("no rank asks for anything more")
    core.shutdown()


def _error(core, name: str, count: int = 10):
    """The error of an operation that fails on this rank."""
    array = np.ones(count)
    with pytest.raises(core.Error) as raised:
        core.submit_allreduce(name, [array], [array]).wait(20)
    return raised.value


@pytest.mark.ranks(3, env=_ENV)
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_every_rank_gets_the_code_and_the_ranks(core, rank, size, hosts, gather):
    # A rank has refused.
    if rank == 1:
        core.refuse("refused", "it has no wings")
    else:
        error = _error(core, "refused")
        assert (error.code, error.ranks) == ("refused", (1,)), error
    # Ranks bring different arrays. Between hosts the first ranks of two hosts are compared.
    error = _error(core, "mismatch", 10 if rank < 2 else 11)
    assert error.code == "mismatch" and len(error.ranks) == 2 and 2 in error.ranks, error
    # A rank gives up what others have not arrived to; those get the same error when they come.
    for code, ranks in (("given_up", (1, 2)), ("deadlock", (2047,)), ("no_memory", ())):
        if rank == 0:
            array = np.ones(10)
            work = core.submit_allreduce("given up", [array], [array])
            core.give_up("given up", "tired of waiting", code, list(ranks))
            with pytest.raises(core.Error) as raised:
                work.wait(20)
            error = raised.value
        gather("rank 0 has given up")
        if rank != 0:
            error = _error(core, "given up")
        assert (error.code, error.ranks) == (code, ranks), error
        assert "given up: tired of waiting" in str(error)
    # A text that is cut takes neither away.
    if rank == 0:
        array = np.ones(10)
        work = core.submit_allreduce("long", [array], [array])
        core.give_up("long", "long " * 1000, ranks=[2, 1])
        with pytest.raises(core.Error) as raised:
            work.wait(20)
        assert (raised.value.code, raised.value.ranks) == ("given_up", (1, 2))
        assert len(str(raised.value)) < 2000
    gather("that too")
    if rank != 0:
        error = _error(core, "long")
        assert (error.code, error.ranks) == ("given_up", (1, 2))
    # Rank 2 leaves, and no rank has left before.
    if rank == 2:
        core.leave("it had enough")
        error = _error(core, "afterwards")
        assert (error.code, error.ranks) == ("left", ()), error
    else:
        error = _error(core, "afterwards")
        assert (error.code, error.ranks) == ("departed", (2,)), error
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is core.Error and str(again) == str(error)
    assert (again.code, again.ranks) == (error.code, error.ranks)
    with pytest.raises(ValueError, match="no error code 'tired'"):
        core.give_up("given up", "reason", "tired")


def test_an_error_without_a_code():
    from compiled import core

    # In a process of its own: another test may have initialized the core in this one.
    script = "from compiled import core\ntry: core.rank()\nexcept core.Error as error: print(error.code, error.ranks)"
    alone = subprocess.run([sys.executable, "-c", script], cwd=_TESTS, capture_output=True, text=True, timeout=60)
    assert alone.stdout == "other ()\n", alone.stderr
    assert (core.Error("text").code, core.Error("text").ranks) == ("other", ())


def test_the_codes_are_documented():
    from compiled import core

    page = (_TESTS.parent / "docs/errors.md").read_text()
    assert tuple(re.findall(r"^\| `'(\w+)'` \|", page, re.MULTILINE)) == core.Error.codes


@pytest.mark.ranks(2)
def test_a_late_rank_skips_what_was_given_up_also_if_the_text_is_cut(rank, gather):
    import kvstore_plugin as mykv
    from kvstore_plugin.coordination import operation
    from mxnet.base import MXNetError

    mykv.init()
    limit = operation.Limit(0.5, "a setting", "Start the missing worker.")

    def meet(call):
        return operation.exchange(mykv.global_process_set, "errors/meeting", call, numbers=[rank], limit=limit)

    for call in ("short", "long " * 1000):
        if rank == 0:
            with pytest.raises(MXNetError) as raised:
                meet(call)
            assert (raised.value.code, raised.value.ranks) == ("given_up", (1,))
            again = pickle.loads(pickle.dumps(raised.value))
            assert (again.code, again.ranks) == ("given_up", (1,))
        gather("rank 0 has given up")
        assert meet(call).tolist() == [[0], [1]]
