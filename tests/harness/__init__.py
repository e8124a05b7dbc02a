"""Tests of several ranks, written like tests of one.

    @pytest.mark.ranks(2, 3)              # once with 2 ranks, once with 3, each in all ranks
    def test_sum(rank, size): ...

``pytest`` itself does not run under mpirun. It keeps a pool for each number of ranks (and set of environment
variables): one long-lived mpirun, whose ranks are pytest processes that run the tests the controller names and send
their reports back over a Unix socket. MPI and the store under test carry none of the harness's own messages. Variables
that init() reads (MYKV_...) need no pool of their own: the ranks shut down, and the next init() reads them. With
MYKV_TEST_POOL among them they do, since such ranks start the core without the package.

Why not a package: mpi-pytest 2026.0 starts an mpirun and a pytest per test and has no time limit; pytest-isolate-mpi
0.4.1 has one, but also starts both per test, needs Python 3.10, and on a time-out kills mpirun only, with no stacks.
Importing MXNet in every rank costs 3 to 6 s on two cores; with some 200 tests that alone would exceed ten minutes.

marks      ranks(*sizes, long=(), env={}, timeout=60)
                                               one rank means a plain Python process without mpirun; `make test` leaves
                                               sizes in `long` out
           long                                `make test` leaves it out; marks.long(value) in a parametrization
           alone                               no other test runs meanwhile (turns.py)
fixtures   rank, size, gather(value) -> list   in the ranks
           mpirun(n, script, ...)              in an ordinary test: a fresh mpirun of a small script (see script.py)

A test fails if it fails on any rank, and shows the traceback of each. A crashed rank fails only its own test. A test
that exceeds its time limit fails with the Python stacks of all ranks. After each of these the pool starts afresh.

Test modules must not import mpi4py.MPI at the top: the controller imports them too, and that import calls MPI_Init.
"""

import pytest

from .stacks import light_mxnet  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    """Install the controller's half, or the rank's half when this process is a rank of a pool."""
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, long=(), env={}, timeout=60): run in all ranks of a pool of each of these sizes",
    )
    config.addinivalue_line("markers", "alone: no other test runs meanwhile, also where several workers run tests")
    if not config.pluginmanager.hasplugin("harness-rank"):
        from .controller import Controller
        from .turns import Turns

        config.pluginmanager.register(Controller(config), "harness-controller")
        config.pluginmanager.register(Turns(config), "harness-turns")
