"""The controller's pytest plugin: runs tests marked ``ranks`` in pools, and all others itself."""

from __future__ import annotations

import signal
from collections import OrderedDict

import pytest

from . import reports
from .marks import parametrize_size, ranks_of
from .pool import Pool
from .script import MpiRun

# Pools alive at a time, alone and in each of several workers: a rank that has imported MXNet holds some 200 MB.
_MOST_POOLS, _MOST_POOLS_OF_A_WORKER = 2, 1
# The same examples in every run, so that a failure means a change of the code; --hypothesis-seed draws others.
_HYPOTHESIS_SEED = "0"
_POOL_START_S = 180.0  # for the start of a pool, in the first of its tests


class Controller:
    """Plugin of the process in which the user called pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._pools: OrderedDict[tuple, Pool] = OrderedDict()
        self._most_pools = _MOST_POOLS_OF_A_WORKER if hasattr(config, "workerinput") else _MOST_POOLS

    @pytest.fixture
    def mpirun(self, tmp_path, request):
        """``mpirun(n, script, ...)``: run a small script in a fresh mpirun; see `harness.script.MpiRun`."""
        runner = MpiRun(tmp_path)
        yield runner
        runner.close()

    def pytest_sessionstart(self) -> None:
        """Make SIGTERM end pytest like Ctrl-C, which closes the pools and removes their folders."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        parametrize_size(metafunc)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Group the tests of each pool, so that few pools are started; the order is otherwise kept."""
        items.sort(key=lambda item: (_pool_key(item) or (0, ()), _settings(item)))
        for item in items:  # the pool ends a test at its limit; the default of pytest-timeout would end the session
            if _pool_key(item) is not None:
                item.add_marker(pytest.mark.timeout(ranks_of(item).timeout + _POOL_START_S), append=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        key = _pool_key(item)
        if key is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item, key):
            item.ihook.pytest_runtest_logreport(report=report)
        # This test has set up nothing here, but an earlier test may have kept its module's fixtures for the next.
        item.session._setupstate.teardown_exact(nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        while self._pools:
            _, pool = self._pools.popitem()
            pool.close()

    def _run(self, item: pytest.Item, key: tuple) -> list[pytest.TestReport]:
        try:
            pool = self._pool(key)
        except RuntimeError as error:
            return [reports.failure(item, str(error), 0.0)]
        try:
            outcome = pool.run(item.nodeid, ranks_of(item).timeout)
        except BaseException:  # Ctrl-C: the ranks are in the middle of a test
            self._discard(key)
            raise
        if outcome.broken:
            self._discard(key)
        return reports.merge(item, outcome)

    def _pool(self, key: tuple) -> Pool:
        if key not in self._pools:
            while len(self._pools) >= self._most_pools:
                _, oldest = self._pools.popitem(last=False)
                oldest.close()
            size, env = key
            self._pools[key] = Pool(size, dict(env), self._arguments(), self._config.option.capture == "no")
        self._pools.move_to_end(key)
        return self._pools[key]

    def _discard(self, key: tuple) -> None:
        pool = self._pools.pop(key, None)
        if pool:
            pool.kill()

    def _arguments(self) -> list[str]:
        """Pytest's command line in a rank: this process's options that change how a test runs or is shown."""
        option = self._config.option
        arguments = [f"--rootdir={self._config.rootpath}", "-q", "--no-header", "--no-summary"]
        arguments += ["-p", "no:cacheprovider", "-p", "no:faulthandler", f"--tb={option.tbstyle}"]
        arguments += [f"--capture={option.capture}", f"--import-mode={option.importmode}"]
        if self._config.inipath:
            arguments += ["-c", str(self._config.inipath)]
        if option.showlocals:
            arguments.append("--showlocals")
        if option.runxfail:
            arguments.append("--runxfail")
        for warning in option.pythonwarnings or []:
            arguments += ["-W", warning]
        if hasattr(option, "hypothesis_seed"):
            seed = option.hypothesis_seed
            arguments.append(f"--hypothesis-seed={_HYPOTHESIS_SEED if seed is None else seed}")
        if option.confcutdir:
            arguments.append(f"--confcutdir={option.confcutdir}")
        return arguments


def _pool_key(item: pytest.Item) -> tuple | None:
    ranks = ranks_of(item)
    return (item.callspec.params["size"], ranks.process_env) if ranks else None


def _settings(item: pytest.Item) -> tuple:
    ranks = ranks_of(item)
    return ranks.settings if ranks else ()
